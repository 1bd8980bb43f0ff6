"""Tests of the difference between two recipes: over queries, over seeds and over both; Holm's correction.

A recipe trained with seed s has the value x_sq on test query q; against a baseline trained with the same seeds,
d_sq = x_sq - y_sq. Three tests answer three questions:

    over queries   d_q = mean_s d_sq, n = queries: would these trained models differ on other queries of the same kind?
                   It ignores training variance, so it often calls two trainings of one recipe different.
    over seeds     d_s = mean_q d_sq, n = seeds: would newly trained models differ on these queries?
    over both      would newly trained models differ on other queries? `seeds_and_queries`: the one to report, and the
                   verdict of `sparring compare`. Its false-positive rate matches its level (benchmarks/null_test.py).
                   A seed may stand for a complete repetition, tuning included: `sparring book` does so
                   (benchmarks/null_book.py).

With n seeds the sign-flip test over seeds cannot give a p-value below 2 / 2^n (0.0625 for five seeds). With few seeds
the t-tests decide, which assume that means over all queries are about normal from seed to seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

_BLOCK = 1 << 24  # numbers held at once by a resampling test


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and t interval of the mean of n values; std and interval are None for n = 1."""

    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TestResult:
    """A mean difference: its standard error, degrees of freedom, two-sided p-value and confidence interval."""

    mean: float
    error: float
    df: float
    p: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """One recipe against the baseline in one metric; tests over seeds are None if there is one seed."""

    mean: float
    both: TestResult | None  # over seeds and queries: the headline
    queries: TestResult
    seeds: TestResult | None
    p_flip_queries: float
    p_flip_seeds: float | None
    bootstrap: tuple[float, float]  # over queries


def summary(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Summary:
    """Mean, standard deviation and confidence interval over seeds.

    summary([0.191, 0.194, 0.190, 0.192, 0.193])  # mean 0.192, std 0.0016, interval 0.1900 to 0.1940
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return Summary(len(x), float(x.mean()), None, None, None)
    test = paired_t(x, level)
    return Summary(len(x), test.mean, float(x.std(ddof=1)), test.low, test.high)


def difference(
    a: np.ndarray, b: np.ndarray, level: float = 0.95, flips: int = 10_000, resamples: int = 1_000, seed: int = 0
) -> Difference:
    """Every paired test of a - b, both (seeds, queries): row s has the values of the models of the s-th seed.

    result = difference(mine, baseline);  result.mean, result.both.p
    """
    d = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    if d.ndim != 2 or d.shape[1] < 2:
        raise ValueError(f"differences must be (seeds, queries) with at least 2 queries, got shape {d.shape}")
    several = len(d) > 1
    return Difference(
        mean=float(d.mean()),
        both=seeds_and_queries(d, level) if several else None,
        queries=paired_t(d.mean(0), level),
        seeds=paired_t(d.mean(1), level) if several else None,
        p_flip_queries=sign_flip(d.mean(0), flips, seed),
        p_flip_seeds=sign_flip(d.mean(1), flips, seed) if several else None,
        bootstrap=bootstrap(d.mean(0), level, resamples, seed),
    )


def paired_t(d: np.ndarray, level: float = 0.95) -> TestResult:
    """Student's t-test of mean zero for paired differences d (n >= 2): t = mean / (std / sqrt n), n - 1 df."""
    n = len(d)
    return _test(float(d.mean()), float(d.std(ddof=1)) / math.sqrt(n), n - 1, level)


def equal_variance_t(a: Summary, b: Summary, level: float = 0.95) -> TestResult:
    """Student's t-test of equal means for two unpaired samples of equal variance, from their means and deviations.

        t = (mean_a - mean_b) / (s sqrt(1 / n_a + 1 / n_b)),   s^2 = pooled variance on n_a + n_b - 2 degrees of freedom

    Papers that print mean and deviation over runs use it, such as ESANS; on equal splits and seeds `paired_t` has more
    power.

        equal_variance_t(Summary(5, 0.2121, 0.0015, None, None), Summary(5, 0.2045, 0.0020, None, None)).p
    """
    if a.std is None or b.std is None:
        raise ValueError(f"the equal-variance t-test needs at least 2 values on both sides, got {a.n} and {b.n}")
    df = a.n + b.n - 2
    pooled = ((a.n - 1) * a.std**2 + (b.n - 1) * b.std**2) / df
    return _test(a.mean - b.mean, math.sqrt(pooled * (1 / a.n + 1 / b.n)), df, level)


def two_way(d: np.ndarray, level: float = 0.95) -> TestResult:
    """t-test of mean zero for d (S, Q), seeds and queries both sampled: d_sq = mu + seed_s + query_q + rest_sq.

        var(mean) = (MS_seed + max(MS_query - MS_rest, 0)) / (S Q),   df by Satterthwaite, at least min(S, Q) - 1

    where MS are the mean squares of the two-way table. A sum of mean squares has at least the least df of its terms;
    Satterthwaite's formula loses this bound where one is subtracted, and a df near 0 would give unbounded intervals. If
    queries differ only by noise it is the test over seeds; if seeds do, it approaches the test over queries. With fewer
    than about five seeds MS_seed is at times small by chance and df too large: with two seeds up to 12 % of null tables
    are called different at 5 %, which `seeds_and_queries` corrects.

    Satterthwaite, An Approximate Distribution of Estimates of Variance Components, Biometrics Bulletin 1946.
    """
    s, q = d.shape
    mean, by_seed, by_query = d.mean(), d.mean(1, keepdims=True), d.mean(0, keepdims=True)
    ms_seed = q * float(((by_seed - mean) ** 2).sum()) / (s - 1)
    ms_query = s * float(((by_query - mean) ** 2).sum()) / (q - 1)
    ms_rest = float(((d - by_seed - by_query + mean) ** 2).sum()) / ((s - 1) * (q - 1))
    of_queries = max(ms_query - ms_rest, 0.0)
    total = ms_seed + of_queries
    spread = ms_seed**2 / (s - 1)
    if of_queries > 0:
        spread += ms_query**2 / (q - 1) + ms_rest**2 / ((s - 1) * (q - 1))
    df = max(total**2 / spread, min(s, q) - 1) if spread > 0 else s - 1
    return _test(float(mean), math.sqrt(total / (s * q)), df, level)


def seeds_and_queries(d: np.ndarray, level: float = 0.95) -> TestResult:
    """The headline for d (S, Q): a claim must hold over seeds and queries together (`two_way`) and over seeds alone.

    The larger p-value and the hull of the two intervals. From five seeds on it is nearly always `two_way`; with fewer
    it keeps the level that `two_way` alone would exceed.
    """
    both, seeds = two_way(d, level), paired_t(d.mean(1), level)
    weaker = max(both, seeds, key=lambda test: test.p)
    return replace(weaker, low=min(both.low, seeds.low), high=max(both.high, seeds.high))


def _test(mean: float, error: float, df: float, level: float) -> TestResult:
    if error <= 1e-12 * abs(mean) or error == 0:  # equal differences: their spread is rounding
        return TestResult(mean, 0.0, df, 1.0 if mean == 0 else 0.0, mean, mean)
    reach = t_quantile(level, df) * error
    return TestResult(mean, error, df, t_tail(mean / error, df), mean - reach, mean + reach)


def sign_flip(d: np.ndarray, flips: int = 10_000, seed: int = 0) -> float:
    """Two-sided permutation p-value of mean zero: how often random signs give a sum as far from zero as observed.

    Exact, over all 2^n signs, if these are at most `flips`; else p = (1 + hits) / (1 + flips) over drawn signs. Assumes
    only that d and -d are equally likely under the null, not that they are normal.
    """
    x = np.asarray(d, dtype=np.float64)
    x = x[x != 0]  # the sign of a zero changes nothing
    n = len(x)
    if n == 0:
        return 1.0
    x = x / np.abs(x).max()
    least = abs(x.sum()) - 1e-6 * n  # tolerates another order of summation
    if n < 63 and 2**n <= flips:
        signs = 1 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        return float((np.abs(signs @ x) >= least).mean())
    random = np.random.default_rng(seed)
    rows, hits = max(_BLOCK // n, 1), 0
    for begin in range(0, flips, rows):
        size = min(rows, flips - begin)
        bits = np.unpackbits(random.integers(0, 256, (size, (n + 7) // 8), dtype=np.uint8), axis=1, count=n)
        sums = x.sum() - 2 * (bits.astype(np.float32) @ x.astype(np.float32)).astype(np.float64)
        hits += int((np.abs(sums) >= least).sum())
    return (1 + hits) / (1 + flips)


def bootstrap(d: np.ndarray, level: float = 0.95, resamples: int = 1_000, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of d (n,), resampled with replacement.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    x = np.asarray(d, dtype=np.float64)
    random = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(_BLOCK // len(x), 1)
    for begin in range(0, resamples, rows):
        size = min(rows, resamples - begin)
        means[begin : begin + size] = x[random.integers(0, len(x), (size, len(x)), dtype=np.uint32)].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the probability of any false positive in the family stays below the level.

        p_(i) -> max over j <= i of min(1, (m - j + 1) p_(j)),   p_(1) <= ... <= p_(m)

        holm([0.01, 0.04, 0.03])  # [0.03, 0.06, 0.06]

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 1979.
    """
    raw = np.asarray(p, dtype=np.float64)
    order = np.argsort(raw, kind="stable")
    adjusted = np.empty_like(raw)
    adjusted[order] = np.minimum(np.maximum.accumulate(raw[order] * np.arange(len(raw), 0, -1)), 1.0)
    return [float(value) for value in adjusted]


def t_tail(t: float, df: float) -> float:
    """P(|T| >= |t|) for Student's t with df > 0 degrees of freedom: I_x(df / 2, 1 / 2) at x = df / (df + t^2).

    SciPy would be needed for this alone; it takes 100 MB and a second to import.
    """
    if not math.isfinite(t):
        return 0.0 if math.isinf(t) else math.nan
    return _beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))


def t_quantile(level: float, df: float) -> float:
    """The t with P(|T| <= t) = level, by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, df) > 1 - level:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 1 - level else (low, middle)
    return high


def _beta(a: float, b: float, x: float, y: float) -> float:
    """The regularised incomplete beta function I_x(a, b), y = 1 - x, by its continued fraction (modified Lentz)."""
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on the other side
        return 1.0 - _beta(b, a, y, x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + term * d, tiny)
            c = _away(1 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return min(front * fraction, 1.0)


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


# Several methods on several data sets


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, 1 for the largest value; equal values share the mean of their places.

    ranks(np.array([0.3, 0.1, 0.3]))  # [1.5, 3, 1.5]
    """
    x = np.asarray(values, dtype=np.float64)
    above, equal = x[..., None, :] > x[..., :, None], x[..., None, :] == x[..., :, None]
    return np.asarray(above.sum(-1) + (equal.sum(-1) + 1) / 2, dtype=np.float64)


def critical_difference(methods: int, sets: int, level: float = 0.95) -> float:
    """Nemenyi's critical difference: average ranks of k methods over n sets differ if they are further apart.

        q sqrt(k (k + 1) / (6 n)),   q = the quantile of the range of k standard normals / sqrt 2

    It assumes independent sets and reads ranks alone, not the size of a difference. With few sets it shows little.

        critical_difference(5, 30)  # 1.11

    Nemenyi, Distribution-free Multiple Comparisons, 1963; Demsar, Statistical Comparisons of Classifiers over Multiple
    Data Sets, JMLR 2006.
    """
    if methods < 2 or sets < 1:
        raise ValueError(f"a critical difference needs at least 2 methods and 1 set, got {methods} and {sets}")
    low, high = 0.0, 20.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _range_below(middle, methods) < level else (low, middle)
    return high / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * sets))


def _range_below(q: float, k: int) -> float:
    """P(range of k standard normals <= q) = k * integral of phi(z) (Phi(z) - Phi(z - q))^(k - 1) dz."""
    z = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(a / math.sqrt(2))) / 2 for a in z])
    before = np.array([(1 + math.erf((a - q) / math.sqrt(2))) / 2 for a in z])
    return float(k * (density * (below - before) ** (k - 1)).sum() * (z[1] - z[0]))


@dataclass(frozen=True)
class SignedRank:
    """Probabilities that over data sets one method is worse, equal within a margin, or better."""

    worse: float
    equal: float
    better: float


def bayesian_signed_rank(
    d: Sequence[float] | np.ndarray, margin: float, prior: float = 0.5, draws: int = 20_000, seed: int = 0
) -> SignedRank:
    """The Bayesian signed-rank test of differences d, one per data set; within +- margin they count as equal.

    Sets have weights w ~ Dirichlet(prior, 1, ..., 1), the first for a difference of zero. Of all pairs (i, j), weighted
    by w_i w_j, a share has (d_i + d_j) / 2 above the margin, below its negative, or between. The probability of each
    outcome is how often it has the largest share; ties are divided. It assumes that sets are drawn alike and
    independently. It knows only the differences that it saw: with fewer than about five sets it is too sure.

        bayesian_signed_rank([0.02, 0.03, 0.05, 0.01], margin=0.01).better

    Benavoli et al., Time for a Change: a Tutorial for Comparing Multiple Classifiers Through Bayesian Analysis, JMLR
    2017.
    """
    x = np.concatenate([[0.0], np.asarray(d, dtype=np.float64)])
    weights = np.random.default_rng(seed).dirichlet([prior, *[1.0] * (len(x) - 1)], draws)
    middle = (x[:, None] + x[None, :]) / 2
    regions = (middle < -margin, np.abs(middle) <= margin, middle > margin)
    shares = np.stack([((weights @ region) * weights).sum(1) for region in regions], 1)
    largest = shares >= shares.max(1, keepdims=True) - 1e-12
    chances = (largest / largest.sum(1, keepdims=True)).mean(0)
    return SignedRank(*(float(chance) for chance in chances))


def share_interval(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share of hits among trials.

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 1927.
    """
    z = t_quantile(level, 1e9)
    p, n = hits / trials, trials
    middle, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max((middle - reach) / (1 + z * z / n), 0.0), min((middle + reach) / (1 + z * z / n), 1.0)
