"""Comparisons: ordinary run folders, paired by query and seed; failures are reported, only missing runs are trained."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.stats
import torch
from torch import Tensor

from sparring.cli import main
from sparring.core import memory_usage, workers
from sparring.core.errors import UserError
from sparring.core.types import Bag, Candidates, Step
from sparring.core.workers import Listener
from sparring.data.interactions import Interactions, Split
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.evaluation.metrics import popularity_percentile, popularity_strata
from sparring.experiments import comparison_tables
from sparring.experiments.comparison import ComparedData, Comparison, check, compare
from sparring.experiments.comparison_tables import CHEAP
from sparring.experiments.diagnose.profile import profile
from sparring.negatives import Negatives
from sparring.recipes.run import Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup, flat
from sparring.training import trained as runs
from sparring.training.fitting import fit
from support.papers import result_json, run_here, run_json, table

SEEDS = 2
WORDS = shlex.split(
    f"compare --recipes uns,ssl_pop,shown --seeds {SEEDS} --setup default --epochs 2 --metrics recall@5,ndcg@10"
)
WORDS += ["--set", "dim=4", "--set", "batch_size=128", "--set", "n=16", "--device", "cpu", "--jobs", "2"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, small_world: SyntheticWorld) -> tuple[Path, list[str]]:
    """A comparison on a file without shown rows, so that the recipe `shown` fails; its folder and its command."""
    folder = tmp_path_factory.mktemp("compare")
    data = small_world.interactions
    pl.DataFrame({"user_id": data.queries + 1000, "item_id": data.items}).write_parquet(folder / "tiny.parquet")
    words = [*WORDS, "--data", str(folder / "tiny.parquet"), "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        patch.setattr(memory_usage, "resident_bytes", lambda: 0)
        patch.setattr(memory_usage, "peak_bytes", itertools.count(1000, 1000).__next__)
        assert main(words) == 1
    return folder / "out", words


def stored(out: Path, recipe: str, metric: str) -> np.ndarray:
    """(seeds, queries) values from the run folders."""
    frames = [pl.read_parquet(out / "tiny" / recipe / str(seed) / "per_query.parquet") for seed in range(SEEDS)]
    assert all(frame["query"].to_list() == frames[0]["query"].to_list() for frame in frames)
    return np.stack([frame[metric].to_numpy() for frame in frames]).astype(float)


def test_runs_are_ordinary_folders_with_values_of_single_queries(done: tuple[Path, list[str]]) -> None:
    """A run loads and recommends; its values by query are float32, with original ids, and average to result.json."""
    folder = done[0] / "tiny" / "ssl_pop" / "1"
    trained = runs.load(folder)
    assert (trained.meta["recipe"], trained.meta["setup"]["seed"]) == ("ssl_pop", 1)
    assert len(trained.recommend([1003], 5)) == 5
    frame = pl.read_parquet(folder / "per_query.parquet")
    assert frame["query"].min() >= 1000  # type: ignore[operator]
    assert frame["recall@5"].dtype == pl.Float32
    assert "popularity@10" not in frame.columns
    metrics = result_json(folder)["test"]["metrics"]
    for name in ("recall@5", "ndcg@10", "mrr@20"):
        assert frame[name].mean() == pytest.approx(metrics[name], rel=1e-5)


def test_the_table_equals_the_folders(done: tuple[Path, list[str]]) -> None:
    """Means, deviations, differences and p-values equal those computed here from the stored values."""
    rows = {(row["metric"], row["recipe"]): row for row in table(done[0], "quality") if row["verdict"] != CHEAP}
    assert set(rows) == {(metric, recipe) for metric in ("recall@5", "ndcg@10") for recipe in ("uns", "ssl_pop")}
    for metric in ("recall@5", "ndcg@10"):
        mine, theirs = stored(done[0], "ssl_pop", metric), stored(done[0], "uns", metric)
        row, base = rows[metric, "ssl_pop"], rows[metric, "uns"]
        assert row["mean"] == pytest.approx(mine.mean())
        assert row["std"] == pytest.approx(mine.mean(1).std(ddof=1))
        assert row["difference"] == pytest.approx(mine.mean() - theirs.mean())
        assert row["relative"] == pytest.approx(mine.mean() / theirs.mean() - 1)
        assert row["p_seeds"] == pytest.approx(scipy.stats.ttest_rel(mine.mean(1), theirs.mean(1)).pvalue)
        assert row["p_queries"] == pytest.approx(scipy.stats.ttest_rel(mine.mean(0), theirs.mean(0)).pvalue)
        assert row["p_holm"] == pytest.approx(row["p"])  # one comparison: nothing to correct
        assert row["verdict"] == (
            "no difference shown" if row["p_holm"] >= 0.05 else "better" if row["difference"] > 0 else "worse"
        )
        assert (base["verdict"], base["p"], base["difference"]) == ("baseline", None, None)
    for suffix in ("md", "csv", "tex", "json"):
        assert (done[0] / f"negatives.{suffix}").stat().st_size > 0


def test_cheap_baselines_have_rows_without_tests(done: tuple[Path, list[str]], small_world: SyntheticWorld) -> None:
    """Popularity and a personalised baseline have the figures of their own trainings and no verdict; a recipe of the
    comparison has no second row; notes name the recipes that do worse, and those whose best epoch is the last."""
    out = done[0]
    cheap = [row for row in table(out, "quality") if row["verdict"] == CHEAP]
    names = [row["recipe"] for row in cheap if row["metric"] == "ndcg@10"]
    assert len(names) == 2
    assert all(row["p"] is None and row["seeds"] is None for row in cheap)
    data = ComparedData("tiny", split(small_world.interactions, "random", valid=0.1, test=0.2, seed=0))
    fitted = fit(build("popularity", data.split.train), data.split, k=(5, 10), device="cpu")
    assert fitted.test is not None
    for metric in ("recall@5", "ndcg@10"):
        (row,) = (row for row in cheap if (row["metric"], row["recipe"]) == (metric, "popularity"))
        assert row["mean"] == pytest.approx(fitted.test.metrics[metric])
    metrics = ("recall@5", "ndcg@10")
    plan = Comparison(out, (data,), ("uns", "ssl_pop"), SEEDS, metrics=metrics, cheap_baselines=True)
    assert list(plan.read_baselines("tiny")) == names
    assert list(dataclasses.replace(plan, recipes=("uns", "popularity")).read_baselines("tiny")) == names[1:]
    assert dataclasses.replace(plan, cheap_baselines=False).read_baselines("tiny") == {}
    rows = comparison_tables.quality(plan).rows
    told = "\n".join(comparison_tables.notes(plan, rows))
    means = {row["recipe"]: row["mean"] for row in table(out, "quality") if row["metric"] == "ndcg@10"}
    line = f"ndcg@10 is behind popularity, a cheap baseline ({means['popularity']:.4f}): "
    behind = [name for name in ("uns", "ssl_pop") if means[name] < 0.99 * means["popularity"]]
    assert (line + ", ".join(behind) in told) if behind else (line not in told)
    worse = [{**row, "mean": 0.5 * means["popularity"]} if row["recipe"] == "ssl_pop" else row for row in rows]
    lower = [*behind, *({"ssl_pop"} - {*behind})]
    assert line + ", ".join(lower) in "\n".join(comparison_tables.notes(plan, worse))
    for recipe in ("uns", "ssl_pop"):
        last = any(result_json(out / "tiny" / recipe / str(seed))["best_is_last"] for seed in range(SEEDS))
        assert last == (recipe in told.partition("more epochs may do better")[2].partition("\n")[0])
    assert told.splitlines()[-1] in (out / "README.md").read_text()


def test_costs_are_ratios_to_uns(done: tuple[Path, list[str]]) -> None:
    """Time and memory are ratios of the recorded means to uns; in-batch negatives are as popular as positives."""
    rows = {row["recipe"]: row for row in table(done[0], "negatives")}
    assert rows["uns"]["seconds_ratio"] == rows["uns"]["peak_bytes_ratio"] == 1
    for recipe in ("uns", "ssl_pop"):
        results_of = [result_json(done[0] / "tiny" / recipe / str(s)) for s in range(SEEDS)]
        assert rows[recipe]["seconds"] == pytest.approx(np.mean([result["train_seconds"] for result in results_of]))
        measured = [json.loads((done[0] / "tiny" / recipe / f"{s}/measured.json").read_text()) for s in range(SEEDS)]
        assert rows[recipe]["peak_bytes"] == np.mean([each["peak_bytes"] for each in measured]) >= 1000
    assert rows["ssl_pop"]["seconds_ratio"] == pytest.approx(rows["ssl_pop"]["seconds"] / rows["uns"]["seconds"])
    assert rows["ssl_pop"]["popularity"] == pytest.approx(0.5, abs=0.02)
    assert rows["uns"]["popularity"] < 0.45


def test_failures_are_reported_and_nothing_is_trained_twice(
    done: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command retries only failures; finished runs keep their files; a deleted run is retrained, now in a
    process of its own, with the same values."""
    out, words = done
    before = {path: path.stat().st_mtime_ns for path in out.glob("tiny/*/*/model.safetensors")}
    assert len(before) == 2 * SEEDS
    lost = out / "tiny" / "uns" / "1"
    values = pl.read_parquet(lost / "per_query.parquet")
    for path in lost.iterdir():
        path.unlink()
    capsys.readouterr()
    assert main(words) == 1
    told = capsys.readouterr().out
    assert f"{2 * SEEDS - 1} of {3 * SEEDS} already done" in told
    assert told.count("failed: tiny shown seed") == SEEDS
    assert "--label-column" in told
    after = {path: path.stat().st_mtime_ns for path in out.glob("tiny/*/*/model.safetensors")}
    assert {path for path in after if after[path] != before[path]} == {lost / "model.safetensors"}
    assert pl.read_parquet(lost / "per_query.parquet").equals(values)
    assert json.loads((lost / "measured.json").read_text())["peak_bytes"] > 0
    assert "shown seed 0" in (out / "README.md").read_text()


def test_a_comparison_whose_trainings_all_failed_has_a_page(done: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Exit code 1, and a page with the failures, also where cheap baselines were measured."""
    data = str(done[0].parent / "tiny.parquet")
    words = ["compare", "--data", data, "--recipes", "shown", "--seeds", "1", "--device", "cpu", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    assert {row["verdict"] for row in table(tmp_path / "out", "quality")} == {CHEAP}
    assert "--label-column" in (tmp_path / "out" / "report.html").read_text()


def test_bad_input_is_one_line(done: tuple[Path, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that names the bad value, before any training."""

    def refused(change: Callable[[list[str]], list[str]], *mentions: str) -> None:
        capfd.readouterr()
        assert main(change(list(done[1]))) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert all(mention in lines[0] for mention in mentions), lines

    def with_(option: str, value: str) -> Callable[[list[str]], list[str]]:
        def change(words: list[str]) -> list[str]:
            fresh = [*words[: words.index("--out")], "--out", str(tmp_path / "fresh")]
            return (
                [*fresh[: fresh.index(option) + 1], value, *fresh[fresh.index(option) + 2 :]]
                if option in fresh
                else [*fresh, option, value]
            )

        return change

    refused(with_("--recipes", "uns,xri"), "'xri'", "'xir'")
    refused(with_("--recipes", "uns,uns"), "named twice")
    refused(with_("--recipes", ","), "--recipes")
    refused(with_("--baseline", "xir"), "baseline 'xir'")
    refused(with_("--metrics", "recall"), "'recall'", "recall@20")
    refused(with_("--metrics", "popularity@10"), "single queries")
    refused(with_("--metrics", "ndcg@500"), "500", "40 items")
    refused(with_("--setup", "nothing"), "'nothing'")
    refused(with_("--data", "world:abc"), "world:QUERIESxITEMS")
    refused(with_("--test", "0"), "test part")
    refused(with_("--models", "ids,sasrec"), "order")
    refused(lambda words: [*with_("--models", "ids")(words), "--set", "item_features=colour"], "colour", "--items")
    refused(lambda words: [*with_("--models", "ids")(words), "--set", "item_vectors=no.npy"], "no.npy")
    refused(lambda words: [*words, "--set", "lamm=0.5"], "'lamm'")
    refused(lambda words: [*words, "--set", "seed=5"], "--seeds")
    refused(lambda words: [*words, "--set", "lr=0.5"], "without lr=0.5")
    refused(lambda words: [*words, "--epochs", "7"], "epochs=", "not 7")
    refused(lambda words: [*words, "--split-seed", "9"], "version or split of tiny")
    assert not list(tmp_path.glob("fresh/*/*"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    refused(lambda words: [*words, "--out", str(tmp_path / "full")], "is not empty")


def test_an_interrupted_comparison_resumes(
    parts: Split, small_world: SyntheticWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after one training and resumed, a comparison ends with the values of an uninterrupted one."""
    run_here(monkeypatch)
    shared = {"dim": 4, "batch_size": 128, "n": 16, "epochs": 2}
    data = (ComparedData("w", parts, world=small_world),)
    whole = Comparison(tmp_path / "whole", data, ("uns", "pns"), 2, "", ("ndcg@10",), Setup(), dict(shared))
    stopped = dataclasses.replace(whole, out=tmp_path / "stopped", device="cpu")

    def stop(name: str, error: str | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(stopped, 1, Listener(ended=stop))
    assert len(stopped.study.runs("w", stopped.methods["uns"])) == 1
    assert compare(stopped, 1) == compare(whole, 1) == []
    for first, second in zip(
        comparison_tables.quality(stopped).rows, comparison_tables.quality(whole).rows, strict=True
    ):
        assert first == second
    row = comparison_tables.negatives(whole).rows[0]
    assert 0 < float(row["false_negatives"] or 0) < 1
    check(dataclasses.replace(whole, seeds=9, recipes=("uns", "pns", "bir")))  # a comparison may grow
    with pytest.raises(UserError, match="trials=0, not 3"):
        check(dataclasses.replace(whole, trials=3))
    with pytest.raises(UserError, match=r"recall@30 was not measured"):
        comparison_tables.quality(dataclasses.replace(whole, metrics=("recall@30",)))


def test_tuned_comparison(small_world: SyntheticWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --tune every recipe has the same number of trials, and its final runs have the best settings."""
    pytest.importorskip("optuna")
    run_here(monkeypatch)
    words = shlex.split("compare --data world:80x60 --recipes uns,pns --seeds 1 --tune 2 --epochs 1 --metrics ndcg@10")
    words += ["--set", "dim=4", "--set", "n=8", "--setup", "default", "--device", "cpu", "--quiet", "--valid", "0.3"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert main([*words, "--valid", "0", "--out", str(tmp_path / "none")]) == 2
    for recipe in ("uns", "pns"):
        trials = [
            json.loads(line)
            for line in (tmp_path / "out" / "world-80x60" / recipe / "tune" / "trials.jsonl").read_text().splitlines()
        ]
        assert len(trials) == 2
        winner = max(trials, key=lambda trial: trial["value"])
        meta = run_json(tmp_path / "out" / "world-80x60" / recipe / "0")
        assert {**flat(meta["setup"]), **meta["arguments"]}.items() >= winner["settings"].items()
        assert meta["setup"]["validation"]["select"] == "ndcg@10"
    rows = table(tmp_path / "out", "tuned")
    assert [(row["recipe"], row["trials"], row["failed"]) for row in rows] == [("uns", 2, 0), ("pns", 2, 0)]
    verdicts = {row["verdict"] for row in table(tmp_path / "out", "quality")}
    assert verdicts == {"baseline", "one seed: no verdict", CHEAP}


def test_refitted_comparison(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With refit, the tested runs are trained on train and valid; their learning curves are those of the validation; a
    comparison without refit cannot continue in the folder."""
    run_here(monkeypatch)
    shared: dict[str, object] = {"dim": 4, "epochs": 2, "batch_size": 128}
    plan = Comparison(
        tmp_path, (ComparedData("w", parts),), ("uns",), 1, "", ("ndcg@10",), shared=shared, device="cpu", refit=True
    )
    assert not compare(plan)
    (run,) = plan.study.runs("w", plan.methods["uns"])
    assert run.meta["refit"]["interactions"] == run.meta["data"]["train"] == len(parts.train) + len(parts.valid or ())
    assert [record["epoch"] for record in run.history] == [1, 2]
    assert all("ndcg@10" in record for record in run.history)
    with pytest.raises(UserError, match="refit"):
        check(dataclasses.replace(plan, refit=False))
    with pytest.raises(UserError, match="refit needs a validation part"):
        check(dataclasses.replace(plan, data=(ComparedData("w", Split(parts.train, None, parts.test)),)))


def test_a_recipe_whose_trials_all_failed_does_not_stop_the_others(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported, also when the comparison is repeated, and the other recipes are trained."""
    pytest.importorskip("optuna")
    run_here(monkeypatch)
    shared = {"dim": 4, "batch_size": 128, "epochs": 1}
    data = (ComparedData("w", dataclasses.replace(parts, train=no_shown(parts))),)
    plan = Comparison(tmp_path / "out", data, ("uns", "shown"), 1, trials=1)
    plan = dataclasses.replace(plan, base=Setup(), shared=shared, device="cpu")
    for _ in range(2):
        (failure,) = compare(plan)
        assert (failure.recipe, failure.what) == ("shown", "tuning")
        assert "all 1 trials of shown failed" in failure.error
    assert len(plan.study.runs("w", plan.methods["uns"])) == 1
    assert [row["failed"] for row in comparison_tables.tuned(plan).rows] == [0, 1]


def no_shown(parts: Split) -> Interactions:
    return dataclasses.replace(parts.train, shown=None, shown_time=None)


def test_workers_survive_their_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value, a message, an error and a killed process, two at once, are each reported under their own task."""
    code = "import os\ndef work(say, what):\n    say(what)\n"
    code += "    if what == 'die': os.kill(os.getpid(), 9)\n    return 10 // what\n"
    (tmp_path / "odd_jobs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import odd_jobs  # type: ignore[import-not-found]

    events = list(
        workers.run([workers.Task(str(what), odd_jobs.work, (what,)) for what in (5, 0, "die", 2)], jobs=2, threads=1)
    )
    ended = {event.name: event for event in events if isinstance(event, workers.Ended)}
    assert (ended["5"].value, ended["2"].value) == (2, 5)
    assert "ZeroDivisionError" in (ended["0"].error or "")
    assert "-9" in (ended["die"].error or "")
    assert {event.message for event in events if isinstance(event, workers.TaskMessage)} >= {5, 0, 2}


def test_profile_of_the_complete_catalogue(parts: Split, small_world: SyntheticWorld) -> None:
    """With every item as a candidate of every query, all shares equal counts over the data."""
    run = build("full_softmax", parts.train, {"dim": 4, "batch_size": 10_000})
    found = profile(run, parts, world=small_world)
    n, counts = parts.train.n_items, parts.train.counts()
    assert found["popularity"] == pytest.approx(popularity_percentile(counts).mean())
    for index, name in enumerate(("head", "mid", "tail")):
        assert found[name] == pytest.approx((popularity_strata(counts) == index).mean())
    taken: dict[int, set[int]] = {}
    for query, item in zip(parts.train.queries.tolist(), parts.train.items.tolist(), strict=True):
        taken.setdefault(query, set()).add(item)
    all_taken = set(
        zip(small_world.interactions.queries.tolist(), small_world.interactions.items.tolist(), strict=True)
    )
    likes = small_world.relevance(torch.arange(small_world.n_queries))
    rows = parts.train.queries.tolist()
    assert found["accidental"] == pytest.approx(np.mean([len(taken[q]) / n for q in rows]))
    wrong = [sum(bool(likes[q, i] > 0.5) and (q, i) not in all_taken for i in range(n)) / n for q in rows]
    assert found["false_negatives"] == pytest.approx(np.mean(wrong))
    assert found["synthetic"] == 0


class Weighted(Negatives):
    """Items 0 and 1, drawn 3 * `real` and `real` times for every query, and a synthetic vector drawn four times."""

    def __init__(self, real: float = 1.0) -> None:
        super().__init__()
        self.real = real

    def forward(self, step: Step) -> Bag:
        b = len(step.q)
        ids = torch.tensor([0, 1, -1]).expand(b, 3)
        usage = torch.tensor([3.0 * self.real, self.real, 4.0]).expand(b, 3)
        return Bag((Candidates(ids, torch.zeros(b, 3, step.q.shape[1]), usage.log(), drawn=usage),))


def test_profile_counts_draws(parts: Split) -> None:
    """Candidates are weighted by their draws; synthetic vectors are counted separately."""

    def zero(step: Step, bag: Bag) -> Tensor:
        return step.q.sum(-1) * 0

    found = profile(compose(parts.train, Setup.of(dim=4, batch_size=64), Term(1.0, Weighted(), zero)), parts, batches=2)
    percentile = popularity_percentile(parts.train.counts())
    assert found["popularity"] == pytest.approx((3 * percentile[0] + percentile[1]) / 4)
    assert found["synthetic"] == pytest.approx(0.5)
    assert "false_negatives" not in found
    nothing = profile(
        compose(parts.train, Setup.of(dim=4, batch_size=64), Term(1.0, Weighted(real=0.0), zero)), parts, batches=1
    )
    assert nothing == {"synthetic": 1.0}
