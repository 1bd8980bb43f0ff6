"""Paired tests, intervals and corrections agree with enumeration, loops and SciPy, and the tests have their nominal
size."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from sparring.evaluation.statistics import (
    bayesian_signed_rank,
    bootstrap,
    critical_difference,
    difference,
    holm,
    paired_t,
    ranks,
    seeds_and_queries,
    share_interval,
    sign_flip,
    summary,
    t_quantile,
    t_tail,
    two_way,
)


def test_summary_is_mean_deviation_and_t_interval() -> None:
    """Five seeds give the mean, the deviation with n - 1, and mean +- 2.776 standard errors (t with 4 degrees of
    freedom)."""
    values = [0.19, 0.21, 0.2, 0.23, 0.17]
    mean = sum(values) / 5
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
    found = summary(values)
    assert (found.n, found.mean, found.std) == (5, pytest.approx(mean), pytest.approx(std))
    assert found.low == pytest.approx(mean - 2.776445 * std / math.sqrt(5), rel=1e-6)
    assert found.high == pytest.approx(mean + 2.776445 * std / math.sqrt(5), rel=1e-6)
    one = summary([0.3])
    assert (one.n, one.mean, one.std, one.low) == (1, 0.3, None, None)


@pytest.mark.parametrize("df", [1, 2, 4, 4.7, 9, 30.5, 199, 29_857, 1e7])
def test_t_distribution(df: float) -> None:
    """Student's t tail and quantile are accurate to eight digits, centre to far tail, for any degrees of freedom."""
    for t in (0.0, 1e-6, 0.3, 1.0, 1.96, 2.776, 5.0, 12.0, 40.0):
        expected = 2 * scipy.stats.t.sf(t, df)
        assert t_tail(t, df) == pytest.approx(expected, rel=1e-8, abs=1e-300)
        assert t_tail(-t, df) == t_tail(t, df)
    for level in (0.5, 0.95, 0.999):
        assert t_quantile(level, df) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, df), rel=1e-8)


def test_paired_t_is_the_t_test() -> None:
    """Statistic, p-value and interval equal a one-sample t-test; constant differences give p = 0, zero differences p =
    1."""
    d = np.random.default_rng(0).normal(0.3, 1, 17)
    theirs = scipy.stats.ttest_1samp(d, 0)
    found = paired_t(d)
    assert found.mean / found.error == pytest.approx(theirs.statistic)
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval()))
    assert paired_t(np.zeros(4)).p == 1.0
    assert paired_t(np.full(4, 0.1)).p == 0.0


@pytest.mark.parametrize(
    "d",
    [[0.3, -0.1, 0.2], [1, 1, -1, 2, 0, 0.5], [0.1, 0.1, 0.1, 0.1, 0.1], [1 / 3, -1 / 3, 0.2, 0.7, 1.1, -0.4, 0.05]],
)
def test_sign_flips_are_enumerated_where_few(d: list[float]) -> None:
    """The exact p-value is the share of sign patterns whose sum is at least as far from zero, ties included."""
    sums = [sum(s * v for s, v in zip(signs, d, strict=True)) for signs in itertools.product((1, -1), repeat=len(d))]
    expected = sum(abs(total) >= abs(sum(d)) - 1e-12 for total in sums) / len(sums)
    assert sign_flip(np.array(d)) == pytest.approx(expected)


def test_five_seeds_cannot_be_significant_by_sign_flips() -> None:
    """Five differences of one sign give p = 2 / 32 at any magnitude, so the t-test decides."""
    assert sign_flip(np.array([5.0, 6, 7, 8, 9])) == pytest.approx(2 / 32)
    assert sign_flip(np.zeros(5)) == 1.0


def test_drawn_sign_flips_estimate_the_exact_ones() -> None:
    """With more patterns than flips, the sampled p-value is within four standard errors of the exact one and is
    repeatable."""
    d = np.random.default_rng(1).normal(0.2, 1, 16)
    signs = np.array(list(itertools.product((1, -1), repeat=16)))
    exact = float((np.abs(signs @ d) >= abs(d.sum()) - 1e-12).mean())
    found = sign_flip(d, 10_000, seed=3)
    assert 0.02 < exact < 0.9
    assert abs(found - exact) < 4 * math.sqrt(exact * (1 - exact) / 10_000) + 1e-4
    assert sign_flip(d, 10_000, seed=3) == found
    assert sign_flip(d + 50, 10_000) == 1 / 10_001  # never zero: the observed signs are one of the patterns


def test_many_flips_are_drawn_in_blocks() -> None:
    """At 20,000 queries, where a block is smaller than the number of flips, the p-value is close to the t-test's."""
    d = np.random.default_rng(2).normal(0.01, 1, 20_000)
    assert sign_flip(d, 2_000) == pytest.approx(scipy.stats.ttest_1samp(d, 0).pvalue, abs=0.05)


def table(
    random: np.random.Generator, s: int, q: int, seed_std: float, query_std: float, mean: float = 0.0
) -> np.ndarray:
    """Draw differences d_sq = mean + seed effect + query effect + noise of deviation 1."""
    return mean + random.normal(0, seed_std, (s, 1)) + random.normal(0, query_std, (1, q)) + random.normal(0, 1, (s, q))


def test_two_way_is_the_analysis_of_variance() -> None:
    """Standard error and degrees of freedom equal those from mean squares computed in loops."""
    d = table(np.random.default_rng(4), 4, 7, 0.3, 2.0)
    s, q, mean = 4, 7, float(np.mean(d))
    rows, columns = [float(np.mean(d[i])) for i in range(s)], [float(np.mean(d[:, j])) for j in range(q)]
    ms_seed = q * sum((r - mean) ** 2 for r in rows) / (s - 1)
    ms_query = s * sum((c - mean) ** 2 for c in columns) / (q - 1)
    rest = [(d[i, j] - rows[i] - columns[j] + mean) ** 2 for i in range(s) for j in range(q)]
    ms_rest = sum(rest) / ((s - 1) * (q - 1))
    assert ms_query > ms_rest
    total = ms_seed + ms_query - ms_rest
    df = total**2 / (ms_seed**2 / 3 + ms_query**2 / 6 + ms_rest**2 / 18)
    assert df > 3
    found = two_way(d)
    assert found.error == pytest.approx(math.sqrt(total / 28))
    assert found.df == pytest.approx(df)
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(abs(mean) / math.sqrt(total / 28), df))


def test_two_way_without_query_effects_is_the_test_over_seeds() -> None:
    """If queries vary less than noise predicts, the test reduces to the test over seeds."""
    d = np.random.default_rng(5).normal(size=(5, 1)) + np.tile([1.0, -1.0], (5, 20)) * np.array(
        [[1], [-1], [1], [-1], [0]]
    )
    assert two_way(d).p == pytest.approx(scipy.stats.ttest_1samp(d.mean(1), 0).pvalue)


def test_degrees_of_freedom_never_fall_below_those_of_the_poorest_part() -> None:
    """Two seeds with almost equal means and queries that barely exceed the noise give a Satterthwaite df below 0.1; df
    is then S - 1."""
    noise = np.linspace(-1, 1, 60)
    d = 0.05 + np.stack([1.005 * noise[::-1] + noise + 0.01, 1.005 * noise[::-1] - noise - 0.01])
    ms_seed = 60 * float(((d.mean(1) - d.mean()) ** 2).sum())
    ms_query = 2 * float(((d.mean(0) - d.mean()) ** 2).sum()) / 59
    ms_rest = float(((d - d.mean(1, keepdims=True) - d.mean(0) + d.mean()) ** 2).sum()) / 59
    total = ms_seed + ms_query - ms_rest
    assert ms_query > ms_rest
    assert total**2 / (ms_seed**2 + ms_query**2 / 59 + ms_rest**2 / 59) < 0.1
    found, error = two_way(d), math.sqrt(total / 120)
    assert found.df == 1
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(d.mean() / error, 1))
    assert seeds_and_queries(d).high == pytest.approx(d.mean() + scipy.stats.t.ppf(0.975, 1) * error)
    # with fewer queries than seeds, the queries bound the degrees of freedom
    few = np.random.default_rng(0).normal(0, 1, (9, 3)) + np.array([[-5.0, 0.0, 5.0]])
    assert two_way(few).df == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(("seed_std", "query_std"), [(0.0, 0.0), (0.2, 0.0), (0.3, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("seeds", [2, 5])
def test_the_headline_has_the_size_it_claims(seeds: int, seed_std: float, query_std: float) -> None:
    """At most about 5 % of 400 null tables are called different, for every kind of variance (8.3 % is three standard
    errors above)."""
    random = np.random.default_rng(6)
    p = [seeds_and_queries(table(random, seeds, 60, seed_std, query_std)).p for _ in range(400)]
    assert 0.01 < np.mean(np.array(p) < 0.05) < 0.083


def test_the_headline_is_the_weaker_of_two_tests() -> None:
    """The headline takes the larger p-value and the hull of the intervals of the two-way test and the test over
    seeds."""
    random = np.random.default_rng(11)
    for s in (2, 3, 5):
        d = table(random, s, 40, 0.2, 0.5, mean=0.3)
        both, over = two_way(d), scipy.stats.ttest_1samp(d.mean(1), 0)
        low, high = over.confidence_interval()
        found = seeds_and_queries(d)
        assert found.p == pytest.approx(max(both.p, over.pvalue))
        assert (found.low, found.high) == pytest.approx((min(both.low, low), max(both.high, high)))


def test_a_test_over_queries_mistakes_luck_of_training_for_merit() -> None:
    """If all queries of a seed share an effect, the test over queries calls more than a quarter of null tables
    different."""
    random = np.random.default_rng(7)
    p = [paired_t(table(random, 5, 200, 0.2, 0.0).mean(0)).p for _ in range(300)]
    assert np.mean(np.array(p) < 0.05) > 0.25


def test_a_real_difference_is_found() -> None:
    """A shift of five standard errors over five seeds is nearly always significant."""
    random = np.random.default_rng(8)
    p = [seeds_and_queries(table(random, 5, 100, 0.1, 0.1, mean=0.4)).p for _ in range(200)]
    assert np.mean(np.array(p) < 0.05) > 0.95


def test_bootstrap_interval() -> None:
    """For many values the interval is close to mean +- 1.96 standard errors; a seed fixes the interval."""
    d = np.random.default_rng(9).normal(0.2, 1, 2_000)
    low, high = bootstrap(d, resamples=4_000)
    error = d.std() / math.sqrt(2_000)
    assert low == pytest.approx(d.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(d.mean() + 1.96 * error, abs=0.15 * error)
    assert bootstrap(d, resamples=4_000) == (low, high)
    assert bootstrap(d, resamples=4_000, seed=1) != (low, high)


@pytest.mark.parametrize("p", [[0.01, 0.04, 0.03], [0.5], [], [0.04, 0.04, 0.001, 0.9, 0.02], [1e-9, 0.6, 0.7]])
def test_holm(p: list[float]) -> None:
    """An adjusted p-value is at most a level exactly when the hypothesis and all smaller p-values pass their Holm
    steps."""
    adjusted = holm(p)
    order = sorted(range(len(p)), key=lambda i: p[i])
    for level in (0.001, 0.01, 0.05, 0.061, 0.0799, 0.2, 0.95):
        rejected = set()
        for step, i in enumerate(order):
            if p[i] > level / (len(p) - step):
                break
            rejected.add(i)
        assert rejected == {i for i, value in enumerate(adjusted) if value <= level + 1e-12}
    assert all(0 <= value <= 1 for value in adjusted)


def test_difference_holds_every_test() -> None:
    """The test over queries averages over seeds and the test over seeds averages over queries; one seed leaves the
    latter unset."""
    random = np.random.default_rng(10)
    a, b = random.random((4, 30)) + 0.1, random.random((4, 30))
    found = difference(a, b)
    assert found.mean == pytest.approx(np.mean(a) - np.mean(b))
    assert found.queries.p == pytest.approx(scipy.stats.ttest_rel(a.mean(0), b.mean(0)).pvalue)
    assert found.seeds is not None
    assert found.seeds.p == pytest.approx(scipy.stats.ttest_rel(a.mean(1), b.mean(1)).pvalue)
    assert found.bootstrap[0] < found.mean < found.bootstrap[1]
    one = difference(a[:1], b[:1])
    assert (one.both, one.seeds, one.p_flip_seeds) == (None, None, None)
    assert one.queries.p == pytest.approx(scipy.stats.ttest_rel(a[0], b[0]).pvalue)
    with pytest.raises(ValueError, match=r"\(seeds, queries\)"):
        difference(a[0], b[0])


def test_ranks_share_ties() -> None:
    """The largest value has rank 1; equal values share the mean of their places."""
    values = np.random.default_rng(0).integers(0, 5, (6, 7)) / 10
    by_hand = np.stack([scipy.stats.rankdata(-row) for row in values])
    assert np.array_equal(ranks(values), by_hand)
    assert ranks(np.array([0.3, 0.1, 0.3])).tolist() == [1.5, 3.0, 1.5]


@pytest.mark.parametrize(("methods", "sets", "level"), [(2, 10, 0.95), (5, 30, 0.95), (10, 8, 0.9), (36, 3, 0.95)])
def test_critical_difference_is_nemenyis(methods: int, sets: int, level: float) -> None:
    """q sqrt(k (k + 1) / (6 n)), with q of the studentized range; with two methods q is the normal quantile."""
    q = scipy.stats.studentized_range.ppf(level, methods, np.inf) / math.sqrt(2)
    expected = q * math.sqrt(methods * (methods + 1) / (6 * sets))
    assert critical_difference(methods, sets, level) == pytest.approx(expected, rel=1e-6)
    if methods == 2:
        assert q == pytest.approx(scipy.stats.norm.ppf((1 + level) / 2), rel=1e-6)
    with pytest.raises(ValueError, match="at least 2 methods"):
        critical_difference(1, sets)


def test_critical_difference_keeps_its_level() -> None:
    """Of random rankings of six methods on 40 sets, about 5 % have two average ranks further apart than that."""
    random, distance = np.random.default_rng(0), critical_difference(6, 40)
    averages = ranks(random.random((4000, 40, 6))).mean(1)
    share = float((np.ptp(averages, axis=1) > distance).mean())
    assert abs(share - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000) + 0.01


def test_signed_rank_where_the_answer_is_known() -> None:
    """One difference: P(better) = P(w0^2 < 1/2), w0 ~ Beta(prior, 1); a mirrored sample mirrors the answer; within the
    margin all is equal; many clear differences are certain."""
    for prior in (0.5, 1.0, 2.0):
        expected = math.sqrt(0.5) ** prior
        found = bayesian_signed_rank([0.2], margin=0.0, prior=prior)
        assert found.better == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 20_000))
        assert (found.worse, found.better + found.equal) == (0.0, pytest.approx(1.0))
    d = np.random.default_rng(1).normal(0.01, 0.05, 9)
    ahead, behind = bayesian_signed_rank(d, 0.01), bayesian_signed_rank(-d, 0.01)
    assert (ahead.better, ahead.equal, ahead.worse) == (behind.worse, behind.equal, behind.better)
    assert bayesian_signed_rank([0.001, -0.002, 0.003], margin=0.01).equal == 1.0
    assert bayesian_signed_rank([0.1, 0.2, 0.15, 0.12, 0.3, 0.2, 0.1, 0.2], margin=0.01).better > 0.99


@pytest.mark.parametrize(("hits", "trials"), [(0, 4), (3, 40), (5, 100), (40, 40)])
def test_share_interval_is_wilsons(hits: int, trials: int) -> None:
    """The interval of a share is Wilson's."""
    wilson = scipy.stats.binomtest(hits, trials).proportion_ci(0.95, "wilson")
    assert share_interval(hits, trials) == (pytest.approx(wilson.low, abs=1e-7), pytest.approx(wilson.high, abs=1e-7))
