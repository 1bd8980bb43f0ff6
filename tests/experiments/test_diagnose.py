"""The measures of `sparring diagnose` equal brute force over a small catalogue, and its advice follows its rules."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.core.types import Bag, Candidates, Step
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.experiments.diagnose import advice, samplers
from sparring.experiments.diagnose.measures import Diagnosis, DrawSummary, Gradient, compared, diagnose, exact
from sparring.negatives import (
    AllItems,
    Hardest,
    InBatch,
    Negatives,
    Popularity,
    RelatedItems,
    Resample,
    Sampled,
    Uniform,
    Unless,
)
from sparring.recipes import RECIPES
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup

SETUP = Setup.of(dim=6, score="dot", tau=0.5, init_std=0.7, batch_size=32, seed=2)
ALL = 10_000  # more than there are training pairs: every one is sampled


def run_with(parts: Split, negatives: Negatives, setup: Setup = SETUP) -> Run:
    return compose(parts.train, setup, Term(1.0, negatives))


def arrays(run: Run, parts: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Query ids and positives of all training pairs, and the two tables, in float64."""
    query, item = (tower.weight.detach().double().numpy() for tower in (run.model.query, run.model.item))
    return parts.train.queries, parts.train.items, query, item


def pooled(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def softmax_gradients(run: Run, parts: Split, tau: float) -> np.ndarray:
    """The gradient of -log softmax at the positive with respect to the query vector, pair by pair."""
    rows = []
    for q, p in zip(*arrays(run, parts)[:2], strict=True):
        query, item = arrays(run, parts)[2:]
        e = np.exp(item @ query[q] / tau)
        rows.append(((e / e.sum()) @ item - item[p]) / tau)
    return np.array(rows)


class Listed(Negatives):
    """A fixed list for each query: 9 items by a formula, two of them equal, and a synthetic vector."""

    def forward(self, step: Step) -> Bag:
        ids = torch.tensor([listed(int(q)) for q in step.query_ids])
        emb = step.encode(ids.clamp(min=0))
        return Bag((Candidates(ids, emb, torch.zeros(())),))


def listed(query: int) -> list[int]:
    return [(7 * query + 3 * j) % 40 for j in range(8)] + [7 * query % 40, -1]


def test_exact_is_the_gradient_of_the_full_softmax(parts: Split) -> None:
    """It equals a loop over the catalogue, row by row, and autograd of the cross entropy."""
    run = run_with(parts, AllItems(40))
    rows = torch.arange(len(parts.train))
    found, edges = exact(run, parts, rows, block=7)
    np.testing.assert_allclose(found.numpy(), softmax_gradients(run, parts, SETUP.temperature.tau), atol=1e-7)
    queries, items, query, item = arrays(run, parts)
    q = torch.tensor(query[queries], requires_grad=True)
    torch.nn.functional.cross_entropy(
        q @ torch.tensor(item).T / SETUP.temperature.tau, torch.tensor(items).long(), reduction="sum"
    ).backward()
    assert q.grad is not None
    torch.testing.assert_close(found, q.grad, atol=1e-7, rtol=1e-6)
    scores = item @ query[queries[5]] / SETUP.temperature.tau
    assert [(scores < edge).sum() for edge in edges[5].numpy()] == [4, 8, 12, 16, 20, 24, 28, 32, 36]


def test_all_items_have_no_bias_and_no_noise(parts: Split) -> None:
    """The full softmax against itself: cosine 1, length 1, bias and noise 0 up to rounding."""
    found = diagnose("all", run_with(parts, AllItems(40)), parts, queries=50, draws=3).gradient
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert found.step_cosine == pytest.approx(1, abs=1e-6)
    assert found.across == pytest.approx(1, abs=1e-6)
    assert found.length == pytest.approx(1, abs=1e-5)
    assert max(found.bias, found.noise, found.error) < 1e-4


def test_the_bias_of_corrected_uniform_negatives_falls_with_n(parts: Split) -> None:
    """Sampled softmax is consistent: more candidates, less bias and less noise."""
    found = [
        diagnose("uns", run_with(parts, Sampled(Uniform(40), n, per_query=True)), parts, queries=40, draws=40).gradient
        for n in (2, 8, 64)
    ]
    assert found[0].bias > 1.3 * found[1].bias
    assert found[1].bias > 1.8 * found[2].bias
    assert found[0].noise > found[1].noise > found[2].noise > 0
    assert found[0].cosine < found[1].cosine < found[2].cosine


def test_bias_and_noise_are_those_of_all_possible_draws(parts: Split) -> None:
    """With one uniform negative per query, bias and noise equal those of a loop over the 40 possible draws."""
    run = run_with(parts, Sampled(Uniform(40), 1, per_query=True), SETUP.replaced(batch_size=256))
    found = diagnose("uns", run, parts, queries=ALL, draws=30).gradient
    queries, items, query, item = arrays(run, parts)
    means, spread = [], 0.0
    for q, p in zip(queries, items, strict=True):
        s = item @ query[q] / SETUP.temperature.tau
        weight = np.where(
            np.arange(40) == p, 0.0, 40 * np.exp(s)
        )  # one of 40 with expected count 1 / 40; the positive never counts
        rows = (weight / (weight + np.exp(s[p])))[:, None] * (item - item[p]) / SETUP.temperature.tau
        means.append(rows.mean(0))
        spread += ((rows - rows.mean(0)) ** 2).sum() / 40
    target = softmax_gradients(run, parts, SETUP.temperature.tau)
    size = (target**2).sum()
    assert found.bias == pytest.approx(np.sqrt(((np.array(means) - target) ** 2).sum() / size), rel=0.03)
    assert found.noise == pytest.approx(np.sqrt(spread / size), rel=0.03)
    assert found.cosine == pytest.approx(pooled(np.array(means), target), abs=0.01)


def test_correction_takes_the_bias_out_of_batches_in_a_zipf_world() -> None:
    """Popular items are too frequent in a batch; the correction brings the gradient close to the full softmax."""
    world = make_world(300, 60, zipf=1.2, exposure=0.2, seed=1)
    parts = split(world.interactions, "random", valid=0.0, test=0.1, seed=0)
    setup = SETUP.replaced(batch_size=128)
    pop = Popularity(torch.from_numpy(parts.train.counts()))
    plain = diagnose("ssl", run_with(parts, InBatch(), setup), parts, queries=100, draws=30)
    corrected = diagnose("ssl_pop", run_with(parts, InBatch(pop), setup), parts, queries=100, draws=30)
    assert corrected.gradient.bias < 0.6 * plain.gradient.bias
    assert corrected.gradient.cosine > plain.gradient.cosine + 0.02
    assert corrected.profile["popularity"] == plain.profile["popularity"] > 0.4


def test_closed_form_resampling_points_as_the_softmax_at_half_the_temperature(
    parts: Split, small_world: SyntheticWorld
) -> None:
    """For BIR over the catalogue, direction, effective sample size and false negatives equal a loop over the pairs."""
    run = run_with(parts, Resample(AllItems(40), 64))
    found = diagnose("bir", run, parts, queries=ALL, draws=2, world=small_world)
    queries, items, query, item = arrays(run, parts)
    half, rows, ess, wrong = softmax_gradients(run, parts, SETUP.temperature.tau / 2), [], [], 0.0
    likes = (small_world.relevant(torch.arange(60)) & ~small_world.observed(torch.arange(60))).numpy()
    for q, p in zip(queries, items, strict=True):
        others = np.arange(40) != p
        s = item @ query[q] / SETUP.temperature.tau
        drawn = 64 * np.exp(s[others]) / np.exp(s[others]).sum()
        weight = drawn * np.exp(s[others])
        left = weight.sum() / (weight.sum() + np.exp(s[p]))
        rows.append(left * (weight / weight.sum() @ item[others] - item[p]) / SETUP.temperature.tau)
        ess.append(weight.sum() ** 2 / (weight**2).sum())
        wrong += drawn[likes[q][others]].sum()
    cosines = [pooled(a, b) for a, b in zip(np.array(rows), half, strict=True)]
    assert min(cosines) > 1 - 1e-9
    assert found.gradient.cosine == pytest.approx(
        pooled(np.array(rows), softmax_gradients(run, parts, SETUP.temperature.tau)), abs=1e-5
    )
    assert found.gradient.across < found.gradient.cosine
    assert found.gradient.noise < 1e-4
    assert found.draws.ess == pytest.approx(np.mean(ess), rel=1e-5)
    assert found.draws.false_negatives == pytest.approx(wrong / (64 * len(queries)), rel=1e-5)
    assert found.draws.own_positive == 0
    pop = Popularity(torch.from_numpy(parts.train.counts()))
    corrected = diagnose("ssl_pop", run_with(parts, InBatch(pop)), parts, queries=60, draws=40)
    resampled = diagnose("bir", run_with(parts, Resample(InBatch(pop))), parts, queries=60, draws=40)
    assert resampled.gradient.cosine < corrected.gradient.cosine


def test_gradient_measures_equal_a_loop() -> None:
    """On synthetic gradients, bias, noise, cosines, length and the jackknife equal their formulas, pair by pair."""
    generator = np.random.default_rng(0)
    target = generator.normal(size=(6, 3))
    found = target * 1.5 + generator.normal(size=(5, 6, 3))
    positive = generator.normal(size=(6, 3))
    result = compared(torch.from_numpy(found), torch.from_numpy(target), torch.from_numpy(positive))
    mean = found.mean(0)
    spread = sum(((found[d] - mean) ** 2).sum() for d in range(5)) / 4
    size = (target**2).sum()
    assert result.noise == pytest.approx(np.sqrt(spread / size))
    assert result.bias == pytest.approx(np.sqrt((((mean - target) ** 2).sum() - spread / 5) / size))
    assert result.length == pytest.approx((mean * target).sum() / size)
    assert result.step_cosine == pytest.approx(np.mean([pooled(found[d], target) for d in range(5)]))

    def cosine(rows: list[int]) -> float:
        m, t, f = mean[rows], target[rows], found[:, rows]
        noise = ((f - m) ** 2).sum() / 4 / 5
        return float((m * t).sum() / np.sqrt(((m**2).sum() - noise) * (t**2).sum()))

    assert result.cosine == pytest.approx(min(cosine(list(range(6))), 1))
    without = np.array([min(cosine([j for j in range(6) if j != i]), 1) for i in range(6)])
    assert result.error == pytest.approx(np.sqrt(5 / 6 * ((without - without.mean()) ** 2).sum()))
    mean, target, found = (
        g - ((g * positive).sum(-1) / (positive**2).sum(-1))[..., None] * positive for g in (mean, target, found)
    )
    assert result.across == pytest.approx(min(cosine(list(range(6))), 1))


def test_the_noise_of_few_draws_is_not_bias() -> None:
    """For unbiased gradients with noise of their own length, 4 draws leave the mean off by half and the bias near 0."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2000, 4, generator=generator, dtype=torch.float64)
    found = target + torch.randn(4, 2000, 4, generator=generator, dtype=torch.float64)
    result = compared(found, target, torch.randn(2000, 4, generator=generator, dtype=torch.float64))
    assert float((found.mean(0) - target).norm() / target.norm()) > 0.45
    assert result.bias < 0.12
    assert result.cosine == pytest.approx(1, abs=0.02)
    assert result.noise == pytest.approx(1, abs=0.05)


def test_equal_weights_are_all_effective(parts: Split) -> None:
    """With equal scores and weights, the effective sample size is the number of candidates; otherwise it is smaller."""
    run = run_with(parts, Sampled(Uniform(40), 24, per_query=True, exclude="none"))
    uneven = diagnose("uns", run, parts, queries=20, draws=2).draws
    assert uneven.candidates == 24
    assert 1 < uneven.ess < 20
    with torch.no_grad():
        run.model.query.weight.zero_()
    even = diagnose("uns", run, parts, queries=20, draws=2).draws
    assert even.ess == pytest.approx(24)


def test_hits_and_false_negatives_equal_a_loop(parts: Split, small_world: SyntheticWorld) -> None:
    """Own positives, other positives and false negatives of fixed lists equal a loop; a synthetic vector is none."""
    run = run_with(parts, Listed())
    found = diagnose("listed", run, parts, queries=ALL, draws=2, world=small_world).draws
    taken = {(int(q), int(i)) for q, i in zip(parts.train.queries, parts.train.items, strict=True)}
    relevant = small_world.relevant(torch.arange(60)).numpy()
    observed = {
        (int(q), int(i)) for q, i in zip(small_world.interactions.queries, small_world.interactions.items, strict=True)
    }
    own = other = wrong = places = 0
    for q, p in zip(parts.train.queries.tolist(), parts.train.items.tolist(), strict=True):
        for item in listed(q):
            if item >= 0:
                places += 1
                own += item == p
                other += item != p and (q, item) in taken
                wrong += bool(relevant[q, item]) and (q, item) not in observed
    assert min(own, other, wrong) > 0
    assert found.own_positive == pytest.approx(own / places)
    assert found.other_positive == pytest.approx(other / places)
    assert found.unmasked == pytest.approx((own + other) / places)
    assert found.false_negatives == pytest.approx(wrong / places)
    assert found.candidates == 10


@pytest.mark.parametrize("exclude", ["none", "positive", "known"])
def test_masked_candidates_are_not_unmasked(parts: Split, exclude: str) -> None:
    """Over all items, hits follow from the data; masking removes them from `unmasked`, not from the draws."""
    found = diagnose("all", run_with(parts, AllItems(40, exclude)), parts, queries=ALL, draws=2).draws  # type: ignore[arg-type]
    degree = np.bincount(parts.train.queries, minlength=60)[parts.train.queries]
    assert found.own_positive == pytest.approx(1 / 40)
    assert found.other_positive == pytest.approx((degree - 1).mean() / 40)
    dropped = {"none": 0 * degree, "positive": 0 * degree + 1, "known": degree}[exclude]
    assert found.unmasked == pytest.approx((degree - dropped).sum() / (40 - dropped).sum())
    assert found.candidates == pytest.approx((40 - dropped).mean())
    assert found.false_negatives is None


def test_the_share_that_a_filter_drops(parts: Split) -> None:
    """Over all items, the share dropped by an item graph is that of related pairs; without a filter there is none."""
    related = RelatedItems(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3]))
    found = diagnose("all", run_with(parts, Unless(AllItems(40), related, relative=1.0)), parts, queries=20, draws=2)
    assert found.draws.dropped is not None
    assert 0 < found.draws.dropped <= 2 / 40
    every = Unless(AllItems(40), most=-10.0)
    assert diagnose("all", run_with(parts, every), parts, queries=20, draws=2).draws.dropped == pytest.approx(39 / 40)
    assert diagnose("all", run_with(parts, AllItems(40)), parts, queries=20, draws=2).draws.dropped is None


def test_hardness_is_flat_for_uniform_draws_and_at_the_end_for_the_hardest(parts: Split) -> None:
    """All items fill the tenths equally, uniform draws within 5 standard errors; the 4 hardest of 40 fill the last."""
    every = diagnose("all", run_with(parts, AllItems(40, "none")), parts, queries=30, draws=2).draws.hardness
    assert every == pytest.approx([0.1] * 10)
    uniform = diagnose(
        "uns", run_with(parts, Sampled(Uniform(40), 20, per_query=True, exclude="none")), parts, queries=100, draws=20
    )
    assert sum(uniform.draws.hardness) == pytest.approx(1)
    error = np.sqrt(0.1 * 0.9 / (100 * 20 * 20))
    assert max(abs(share - 0.1) for share in uniform.draws.hardness) < 5 * error
    hardest = diagnose(
        "hardest", run_with(parts, Hardest(AllItems(40, "none"), 4)), parts, queries=30, draws=2
    ).draws.hardness
    assert hardest == pytest.approx([0.0] * 9 + [1.0])


def test_the_run_is_unchanged_and_a_seed_repeats(parts: Split) -> None:
    """Measuring changes no state, not even of a cache; the same seed repeats the values, another seed differs."""
    run = build("xir", parts.train, {"cache_size": 16}, SETUP)
    before = {name: tensor.clone() for name, tensor in run.modules().state_dict().items()}
    first, again, other = (diagnose("xir", run, parts, queries=20, draws=3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.gradient != other.gradient
    for name, tensor in run.modules().state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_other_negatives_share_the_model_and_the_number_of_candidates(parts: Split) -> None:
    """n gives every sampler as many candidates as the run, or is the batch size; memories are filled."""
    run = build("debiased_mns", parts.train, {"n": 16}, SETUP)  # 32 in the batch and 16 more
    for name, expected in {"uns": 48, "mns": 48, "pns": 48, "ssl_pop": 32, "bir": 32, "full_softmax": 40}.items():
        other = samplers.with_negatives_of(name, run, parts)
        assert other.model is run.model
        assert other.temperature is run.temperature
        assert samplers.candidate_count(other, parts) == (expected, True), name
    assert samplers.candidate_count(
        samplers.with_negatives_of("mns", build("ssl", parts.train, {}, SETUP), parts), parts
    ) == (64, True)
    assert samplers.candidate_count(samplers.with_negatives_of("dns", run, parts), parts)[1] is False
    memory = [
        m for m in samplers.with_negatives_of("cbns", run, parts).modules().modules() if type(m).__name__ == "Memory"
    ]
    assert int((memory[0].ids >= 0).sum()) > 200  # type: ignore[operator]


def test_bad_numbers_are_errors(parts: Split) -> None:
    """One draw has no variance and no query no gradient; equal item vectors have no gradient either."""
    run = run_with(parts, AllItems(40))
    with pytest.raises(UserError, match="draws is 1"):
        diagnose("all", run, parts, draws=1)
    with pytest.raises(UserError, match="queries is 0"):
        diagnose("all", run, parts, queries=0)
    with torch.no_grad():
        run.model.item.weight.zero_()
    with pytest.raises(UserError, match="full softmax is 0"):
        diagnose("all", run, parts)


def made(
    name: str,
    cosine: float = 0.9,
    noise: float = 0.5,
    error: float = 0.0,
    popularity: float = 0.5,
    across: float = 0.95,
    **drawn: float,
) -> Diagnosis:
    figures = {
        "candidates": 100.0,
        "ess": 50.0,
        "own_positive": 0.0,
        "other_positive": 0.0,
        "unmasked": 0.0,
        "false_negatives": None,
    }
    return Diagnosis(
        name,
        Gradient(cosine, error, cosine / 2, across, 0.1, noise, 1.0),
        DrawSummary(**{**figures, "hardness": (0.1,) * 10, **drawn}),  # type: ignore[arg-type]
        {"popularity": popularity},
    )


def test_the_recommendation_follows_its_rules() -> None:
    """The largest cosine below the noise limit wins; on a tie the run's own or the least noise; else the best step."""

    def chosen(*found: Diagnosis) -> str:
        first = advice.advise(found)[0]
        assert first.kind == "recommendation"
        return first.sampler

    assert chosen(made("own", 0.8), made("a", 0.95), made("b", 0.9)) == "a"
    assert chosen(made("own", 0.8), made("a", 0.95, noise=1.2), made("b", 0.9)) == "b"
    assert chosen(made("a", 0.95), made("own", 0.945, noise=0.9)) == "own"
    assert chosen(made("a", 0.95), made("b", 0.945, noise=0.1)) == "b"
    assert chosen(made("a", 0.95, error=0.04), made("own", 0.88)) == "own"
    assert chosen(made("own", 0.8, noise=3), made("a", 0.9, noise=2)) == "a"


def test_advice_names_a_setting_only_where_it_can_be_set(parts: Split) -> None:
    """exclude=known is advised for recipes that have it; the warning about others names recipes that do."""
    able, unable = [], []
    for name in RECIPES:
        try:
            build(name, parts.train, {"exclude": "known"})
            able.append(name)
        except UserError as error:
            (unable if "unknown setting" in str(error) else able).append(name)
    assert "default" in able
    assert "ssl_pop" in unable
    found = [replace(made(name, unmasked=0.2), recipe=name) for name in RECIPES]
    found.append(replace(made("own", unmasked=0.2), recipe="custom"))
    said = {line.sampler: line.text for line in advice.advise(found) if line.kind == "warning"}
    assert set(said) == {", ".join(able), ", ".join([*unable, "own"])}
    assert "(exclude=known masks them)" in said[", ".join(able)]
    assert f"exclude=known of {', '.join(able)}" in said[", ".join([*unable, "own"])]


def test_warnings_name_the_samplers_beyond_a_threshold() -> None:
    """Each threshold warns about the samplers beyond it and no others; otherwise there is no warning."""

    def warned(*found: Diagnosis) -> list[str]:
        return [line.sampler for line in advice.advise(found) if line.kind == "warning"]

    assert warned(made("own"), made("a")) == []
    bad = [
        {"across": 0.89},
        {"ess": 4.9},
        {"unmasked": 0.011},
        {"popularity": 0.1},
        {"popularity": 0.9},
        {"false_negatives": 0.06},
    ]
    for fault in [*bad, {"hardness": (0.0,) * 9 + (1.0,)}]:
        assert warned(made("own"), made("a", **fault)) == ["a"], fault  # type: ignore[arg-type]
    assert warned(made("own", popularity=0.1), made("a", popularity=0.15)) == ["own, a"]
    assert warned(made("a", ess=5.1, unmasked=0.009, popularity=0.3, false_negatives=0.04)) == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs in a world with known truth."""
    folder = tmp_path_factory.mktemp("diagnose") / "run"
    words = shlex.split(f"train --data world:80x50:1 --recipe ssl_pop --epochs 2 --quiet --device cpu --out {folder}")
    assert main([*words, "--set", "batch_size=32", "--set", "dim=4"]) == 0
    return folder


QUICK = ["--queries", "20", "--draws", "3", "--device", "cpu"]


def test_the_command_shows_writes_and_repeats(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints tables and advice; JSON and files have the same values; the world gives false negatives."""
    words = ["diagnose", str(trained), "--samplers", "own,ssl-pop,uns,own", *QUICK]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    for word in ("cosine", "false negatives", "90-100 %", "recommendation: ", "reason: ", "note: "):
        assert word in shown
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    own, same, uns = result["samplers"]
    assert [own["sampler"], same["sampler"], uns["sampler"]] == ["own", "ssl_pop", "uns"]
    assert {**own, "sampler": ""} == {**same, "sampler": ""}  # the run's own negatives are ssl_pop's
    assert own["false_negatives"] > 0
    assert result["advice"][0]["kind"] == "recommendation"
    rows = list(csv.DictReader((tmp_path / "out" / "gradient.csv").open()))
    assert float(rows[2]["cosine"]) == uns["cosine"]
    names = {
        f"{name}.{suffix}"
        for name in ("gradient", "negatives", "hardness", "advice")
        for suffix in ("md", "csv", "tex", "json")
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "report.html", "figures"}
    assert str(tmp_path / "out" / "report.html") in shown.splitlines()[-1]


def test_an_unfinished_run_is_read_from_its_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint or the model alone is enough; with neither there is an error."""
    shutil.copytree(trained, tmp_path / "run")
    words = ["diagnose", str(tmp_path / "run"), "--samplers", "own", *QUICK, "--json"]
    (tmp_path / "run" / "model.safetensors").unlink()
    assert main(words) == 0
    shutil.copy(trained / "model.safetensors", tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    assert main(words) == 0
    (tmp_path / "run" / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(words) == 2
    assert "neither a model nor a checkpoint" in capsys.readouterr().err


def test_bad_input_is_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown samplers, too few draws, missing folders and other data are one-line errors that name the bad value."""
    refused: Callable[..., None]

    def refused(words: list[object], *mentions: str) -> None:
        assert main([str(word) for word in ["diagnose", *words]]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        for mention in mentions:
            assert mention in lines[0]

    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    refused([trained, "--samplers", "own,ssl_popp"], "'ssl_popp'", "ssl_pop")
    refused([trained, "--draws", "1"], "--draws 1")
    refused([trained, "--draws", "0"], "'0'")
    refused([trained, "--out", tmp_path / "file"], str(tmp_path / "file"))
    refused([tmp_path / "none"], "no such run folder")
    refused([tmp_path / "empty"], "run.json")
    refused([trained, "--data", "world:80x50:2"], "is not the training data")
    refused([trained, "--data", tmp_path / "gone.parquet"], "gone.parquet")
