"""Reproductions: one split per seed, ours beside the published figures with the right verdict, nothing run twice."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import safetensors.numpy

from sparring.cli import main
from sparring.data.interactions import Interactions
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.experiments.papers import (
    EXPERIMENTS,
    PaperDataset,
    PaperMethod,
    Reproduction,
    esans,
    find,
    reproduce,
    seeds,
)
from sparring.experiments.papers.paper_tables import beside
from sparring.experiments.papers.printed import PublishedFigure
from sparring.experiments.papers.xir import DATA, TABLE_2_CELLS, TABLE_4_CELLS, table_4_methods
from sparring.recipes import RECIPES
from sparring.training import trained
from support.papers import metrics_of, result_json, run_here, run_json, table
from support.settings import quick

QUICK = quick(dim=4, epochs=2, batch_size=128)
FAST = ["--epochs", "2", "--set", "batch_size=128", "--set", "dim=4", "--device", "cpu"]


@pytest.fixture(scope="module")
def world() -> SyntheticWorld:
    return make_world(80, 60, exposure=0.5, relevant=0.4, seed=4)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)


def small(name: str, out: Path, data: Interactions, known_as: str = "", **settings: object) -> Reproduction:
    return Reproduction(
        find(name), out, (PaperDataset("tiny", data, known_as),), seeds(2), {**QUICK, **settings}, "cpu"
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, world: SyntheticWorld) -> Path:
    """xir-table2 by the command line on a file; XIR fails because of lam=2."""
    folder = tmp_path_factory.mktemp("reproduce")
    data = world.interactions
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(folder / "tiny.parquet")
    words = [
        "reproduce",
        "xir-table2",
        "--data",
        str(folder / "tiny.parquet"),
        "--seeds",
        "1",
        *FAST,
        "--set",
        "lam=2",
        "--jobs",
        "2",
    ]
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        assert main([*words, "--out", str(folder / "out")]) == 1
    return folder / "out"


def test_the_verdict_is_that_of_the_relative_difference() -> None:
    """A mean is within 2 % of the published figure, bounds included; deviations divide by n - 1."""
    for values, printed, verdict in (
        ([0.102], 0.1, "within 2 %"),
        ([0.098], 0.1, "within 2 %"),
        ([0.10201], 0.1, "outside 2 %"),
    ):
        row = beside(values, PublishedFigure(printed))
        assert row["verdict"] == verdict
        assert row["difference"] == pytest.approx((values[0] - printed) / printed)
    row = beside([1.0, 2.0, 6.0], PublishedFigure(2.0, 0.5))
    assert (row["mean"], row["std"], row["difference"]) == (3.0, pytest.approx(7**0.5), 0.5)
    assert (row["published"], row["published_std"], row["seeds"]) == (2.0, 0.5, 3)
    assert beside([1.0], None)["difference"] is None
    assert beside([1.0], None)["verdict"] == "not published"
    missing = beside([], PublishedFigure(2.0), "because")
    assert (missing["mean"], missing["difference"], missing["verdict"]) == (None, None, "not run: because")


def test_published_figures_agree_with_the_papers_texts() -> None:
    """The improvements named in XIR's text follow from its tables up to rounding; so do the ratios of ESANS' hours."""
    gains = {"BIR": (2.47, 6.57, 6.58, 2.04, 5.17), "XIR": (3.81, 12.23, 15.24, 11.73, 17.12)}
    for method, said in gains.items():
        for data, gain in zip(DATA, said, strict=True):
            best = TABLE_2_CELLS[data, "NDCG@10", "MNS"].value
            assert 100 * (TABLE_2_CELLS[data, "NDCG@10", method].value / best - 1) == pytest.approx(gain, abs=0.2)
    assert len(TABLE_2_CELLS) == 5 * 6 * 2
    for method, gain in (("BIR", 3.06), ("XIR", 4.87)):
        found = TABLE_4_CELLS["Tmall", "NDCG@10", method].value / TABLE_4_CELLS["Tmall", "NDCG@10", "SSL-Pop"].value
        assert 100 * (found - 1) == pytest.approx(gain, abs=0.1)
    assert [round(value, 2) for value in esans.time_ratios().values()] == [1.0, 1.01, 1.14, 1.06, 1.6, 1.42, 1.18]
    wrong = {
        name
        for name, row in DATA.items()
        if abs(row["interactions"] / (row["queries"] * row["items"]) / row["density"] - 1) > 0.02
    }
    assert wrong == {"Ta-feng"}


def test_data_is_matched_by_counts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any file with Ta-feng's counts is Ta-feng, whose printed density is a misprint; one pair less and it is not."""
    users, items, n = 19_451, 10_480, 630_767
    at = np.arange(n)
    frame = pl.DataFrame({"user_id": at % users, "item_id": (at % users * 13 + at // users) % items})
    for rows, known in ((n, "Ta-feng"), (n - 1, "")):
        path = tmp_path / f"gowalla-{rows}.parquet"
        frame.head(rows).write_parquet(path)
        assert find("xir-table2").known_as((users, items, rows)) == known
        assert main(["reproduce", "xir-table1", "--data", str(path), "--out", str(tmp_path / str(rows))]) == 0
        first = [row for row in table(tmp_path / str(rows)) if row["data"] == (known or path.stem)]
        assert [row["mean"] for row in first[:3]] == [users, items, rows]
        assert first[3]["mean"] == pytest.approx(rows / users / items)
        assert [row["published"] for row in first[:3]] == ([users, items, n] if known else [None] * 3)
        assert "misprint" in first[3]["note"] if known else first[3]["note"] == ""
    assert "misprint" in capsys.readouterr().out


def test_each_seed_has_its_own_split(tmp_path: Path, world: SyntheticWorld, here: None) -> None:
    """round(0.8 n) of each query's n items train: different ones for each seed, the same for all methods of a seed."""
    plan = small("xir-table6", tmp_path / "out", world.interactions)
    reproduce(plan)
    held = np.bincount(world.interactions.queries, minlength=80)
    seen: dict[int, set[tuple[int, int]]] = {}
    for seed in (10, 20):
        for lam in ("0", "0.5", "1"):
            folder = plan.out / "tiny" / f"lambda-{lam}" / str(seed)
            stored = safetensors.numpy.load_file(folder / "seen.safetensors")
            sizes = np.diff(stored["start"])
            assert sizes.tolist() == [round(0.8 * int(n)) for n in held]
            pairs = set(zip(np.repeat(np.arange(80), sizes).tolist(), stored["items"].tolist(), strict=True))
            assert seen.setdefault(seed, pairs) == pairs
            run = run_json(folder)
            assert (run["source"]["split"]["seed"], run["setup"]["seed"]) == (seed, seed)
            assert run["arguments"]["lam"] == float(lam)
            assert "valid" not in run["data"]
    assert len(seen[10] & seen[20]) < 0.95 * len(seen[10])


def test_the_table_equals_the_folders(tmp_path: Path, world: SyntheticWorld, here: None) -> None:
    """Rows have the means of result.json by the release's formula, the standard metric and the published figure."""
    plan = small("xir-table2", tmp_path / "out", world.interactions, "Ta-feng", lr=0.1)
    found, page = reproduce(plan)
    rows = {(row["data"], row["metric"], row["method"]): row for row in table(plan.out)}
    printed = {("NDCG@10", "BIR"): 0.0675, ("RECALL@10", "G-Tower"): 0.0415}
    for method in ("SSL", "SSL-Pop", "MNS", "G-Tower", "BIR", "XIR"):
        each = [metrics_of(plan.out / "tiny" / method.lower() / str(seed)) for seed in (10, 20)]
        for metric, ours, standard in (
            ("NDCG@10", "ndcg_xir_release@10", "ndcg@10"),
            ("RECALL@10", "recall_xir_release@10", "recall@10"),
        ):
            row = rows["Ta-feng", metric, method]
            values = [value[ours] for value in each]
            assert row["mean"] == pytest.approx(sum(values) / 2)
            assert row["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
            assert row["standard"] == pytest.approx(sum(value[standard] for value in each) / 2)
            if (metric, method) in printed:
                assert row["published"] == printed[metric, method]
                assert row["difference"] == pytest.approx(row["mean"] / printed[metric, method] - 1)
    text = page.read_text()
    assert f"{rows['Ta-feng', 'NDCG@10', 'BIR']['mean']:.4f}" in text
    assert any("XIR with lambda 0.5" in line for line in found.findings)
    wide = {row["method"]: row for row in table(plan.out, "cutoffs")}
    for k in (10, 20, 50):
        each = [metrics_of(plan.out / "tiny" / "ssl" / str(seed))[f"recall@{k}"] for seed in (10, 20)]
        assert wide["SSL"][f"recall_at_{k}"] == pytest.approx(sum(each) / 2)


def test_lambda_is_the_papers_by_default(world: SyntheticWorld) -> None:
    """lam is 0.2 on Gowalla and 0.5 elsewhere unless --set changes it; every method is in the release's form."""
    used = {}
    for known_as, settings in (("Gowalla", {}), ("Ta-feng", {}), ("", {}), ("Gowalla", {"lam": "0.8"})):
        plan = small("xir-table2", Path("unused"), world.interactions, known_as, **settings)
        methods = {method.name: method for method in plan.methods["tiny"]}
        used[known_as, *settings] = methods["XIR"].settings["lam"]
        assert {method.settings["form"] for method in methods.values()} == {"release"}
    assert used == {("Gowalla",): 0.2, ("Ta-feng",): 0.5, ("",): 0.5, ("Gowalla", "lam"): "0.8"}


def test_a_failed_method_is_reported_and_the_others_continue(done: Path) -> None:
    """lam=2 fails XIR alone: its rows give the reason, the five others have figures, and run folders load."""
    rows = [row for row in table(done) if row["data"] == "tiny"]
    assert len(rows) == 12
    for row in rows:
        if row["method"] == "XIR":
            assert row["mean"] is None
            assert row["verdict"].startswith("not run: failed: lam")
        else:
            assert row["mean"] > 0
            assert row["verdict"] == "not published"
    assert "XIR seed 10: lam" in (done / "README.md").read_text()
    assert len(trained.load(done / "tiny" / "ssl-pop" / "10").recommend([3], 5)) == 5


def test_data_that_was_not_given_has_published_figures_only(done: Path) -> None:
    """Every published figure of the five sets is in the table without one of ours, with the reason."""
    rows = [row for row in table(done) if row["data"] != "tiny"]
    assert {(row["data"], row["metric"], row["method"]): row["published"] for row in rows} == {
        key: figure.value for key, figure in TABLE_2_CELLS.items()
    }
    assert {row["verdict"] for row in rows} == {"not run: the data was not given"}
    assert all(row["mean"] is row["difference"] is row["standard"] is None for row in rows)
    assert (done / "table.md").read_text().count("not run: the data was not given") == 60


def test_a_second_call_runs_only_what_is_missing(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finished runs are untouched, a worker process recomputes a lost result identically, other settings are errors."""
    words = [
        "reproduce",
        "xir-table2",
        "--data",
        str(done.parent / "tiny.parquet"),
        "--seeds",
        "1",
        *FAST,
        "--set",
        "lam=2",
    ]
    words += ["--out", str(done)]
    folders = [done / "tiny" / name / "10" for name in ("ssl", "ssl-pop", "mns", "g-tower", "bir")]
    before = [(folder / "checkpoint.safetensors").stat().st_mtime_ns for folder in folders]
    expected = metrics_of(folders[1])
    (folders[1] / "result.json").unlink()
    assert main(words) == 1
    assert "4 of 6 already done" in capsys.readouterr().out
    assert metrics_of(folders[1]) == expected
    assert [(folder / "checkpoint.safetensors").stat().st_mtime_ns for folder in folders] == before
    for more, said in (
        (["--set", "lr=0.1"], "without lr=0.1"),
        (["--set", "seed=3"], "seed cannot be set"),
        (["--set", "lamb=1"], "'lam'"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["reproduce", "xir-table6", *words[2:], "--set", "lam=1"]) == 2
    assert "lam cannot be set" in capsys.readouterr().err
    assert main(["reproduce", "xir-table4", *words[2:]]) == 2
    assert "xir-table2" in capsys.readouterr().err


def test_names_are_listed_and_misspelt_ones_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    """`sparring reproduce` lists every name; a misspelt name is answered with the closest one."""
    assert main(["reproduce"]) == 0
    printed = capsys.readouterr().out
    assert list(EXPERIMENTS) == re.findall(r"^((?:xir|esans|ngame)-\w+)", printed, re.MULTILINE)
    assert len(EXPERIMENTS) == 16
    assert main(["reproduce", "xir-tabel2", "--data", "demo", "--out", "x"]) == 2
    assert "did you mean 'xir-table2'?" in capsys.readouterr().err
    assert main(["reproduce", "xir-table2", "--out", "x"]) == 2
    assert "--data is needed" in capsys.readouterr().err


def test_curves_are_measured_on_the_test_part(tmp_path: Path, world: SyntheticWorld, here: None) -> None:
    """xir-figure1 measures the first, every eval_every-th and the last epoch; the last equals the result."""
    plan = small("xir-figure1", tmp_path / "out", world.interactions, epochs=5, eval_every=2)
    plan = dataclasses.replace(plan, seeds=(10,))
    reproduce(plan)
    for method in ("ssl", "xir"):
        folder = plan.out / "tiny" / method / "10"
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [record["epoch"] for record in records if "test_ndcg_xir_release@10" in record] == [1, 2, 4, 5]
        assert records[-1]["test_ndcg_xir_release@10"] == pytest.approx(metrics_of(folder)["ndcg_xir_release@10"])
        assert result_json(folder)["best_epoch"] == 5
    curve = [row for row in table(plan.out, "curve") if row["method"] == "SSL"]
    assert [row["epoch"] for row in curve] == [1, 2, 4, 5]


def test_occurrences_are_those_of_the_cache(tmp_path: Path, world: SyntheticWorld, here: None) -> None:
    """xir-figure2's shares are those of the occurrence vector in the checkpoint, items by descending popularity."""
    plan = dataclasses.replace(small("xir-figure2", tmp_path / "out", world.interactions), seeds=(10,))
    reproduce(plan)
    folder = plan.out / "tiny" / "xir" / "10"
    state = safetensors.numpy.load_file(folder / "checkpoint.safetensors")
    (occurrences,) = [value for name, value in state.items() if name.endswith("occurrences")]
    counts = np.bincount(safetensors.numpy.load_file(folder / "seen.safetensors")["items"], minlength=60)
    order = sorted(range(60), key=lambda item: (-counts[item], item))
    rows = [row for row in table(plan.out) if row["data"] == "tiny"]
    for at, row in enumerate(rows):
        fifth = order[12 * at : 12 * at + 12]
        assert row["mean"] == pytest.approx(occurrences[fifth].sum() / occurrences.sum())
        assert row["interactions"] == pytest.approx(counts[fifth].sum() / counts.sum())


def test_sweeps_compare_on_the_same_split(tmp_path: Path, world: SyntheticWorld, here: None) -> None:
    """xir-table5 is relative to BIR seed by seed; xir-figure3 draws B/64 to B items and times the gradient."""
    plan = small("xir-table5", tmp_path / "cache", world.interactions, lr=0.1)
    reproduce(plan)
    each = {
        name: [metrics_of(plan.out / "tiny" / name / str(seed))["ndcg_xir_release@10"] for seed in (10, 20)]
        for name in ("bir", "xir-cache-4x")
    }
    ratios = [ours / base - 1 for ours, base in zip(each["xir-cache-4x"], each["bir"], strict=True)]
    (row,) = [row for row in table(plan.out) if (row["metric"], row["method"]) == ("NDCG@10", "XIR, cache 4x")]
    assert row["over"] == pytest.approx(sum(ratios) / 2)
    sizes = [method.settings.get("cache_size") for method in plan.methods["tiny"]]
    assert sizes == [None, 64, 128, 256, 512]
    plan = dataclasses.replace(small("xir-figure3", tmp_path / "drawn", world.interactions), seeds=(10,))
    reproduce(plan)
    assert [method.settings.get("n") for method in plan.methods["tiny"]] == [None, 2, 4, 8, 16, 32, 64, 128]
    rows = {row["method"]: row for row in table(plan.out) if row["metric"] == "NDCG@10"}
    assert rows["SSL-Pop"]["gradient_ratio"] == 1
    for name in ("BIR, B/64", "BIR, B"):
        assert rows[name]["gradient_ratio"] == pytest.approx(rows[name]["gradient_ms"] / rows["SSL-Pop"]["gradient_ms"])


def test_features_need_columns_of_items(tmp_path: Path, world: SyntheticWorld, here: None) -> None:
    """xir-table4 takes categorical item columns; without any it gives the reason beside the figures of Tmall."""
    data = world.interactions
    without = PaperDataset("bare", dataclasses.replace(data, item_table=None))
    bare = Reproduction(find("xir-table4"), tmp_path / "bare", (without,), (10,), dict(QUICK), "cpu")
    found, _ = reproduce(bare)
    assert any("bare: not run" in line for line in found.findings)
    assert {row["data"] for row in table(bare.out)} == {"Tmall"}
    items = pl.DataFrame(
        {"item": range(60), "kind": [at % 5 for at in range(60)], "title": [f"t{at}" for at in range(60)]}
    )
    dataset = PaperDataset("tiny", dataclasses.replace(data, item_table=items))
    plan = Reproduction(find("xir-table4"), tmp_path / "out", (dataset,), (10,), dict(QUICK), "cpu")
    assert {method.settings["item_features"] for method in plan.methods["tiny"]} == {"kind"}
    reproduce(plan)
    setup = run_json(plan.out / "tiny" / "bir" / "10")["setup"]["model"]
    assert (setup["item_features"], setup["feature_dim"]) == (["kind"], 32)
    assert (setup["hidden"], setup["dim"]) == ([32], QUICK["dim"])
    assert {method.settings["dim"] for method in table_4_methods(dataset, {})} == {16}
    assert len([row for row in table(plan.out) if row["data"] == "tiny" and row["mean"] is not None]) == 16


def test_esans_is_run_if_its_recipe_exists(
    tmp_path: Path, world: SyntheticWorld, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are ratios to UNS of the same seed, without the first epoch; without its recipe ESANS is not run."""
    monkeypatch.setitem(RECIPES, "esans", RECIPES["uns"])
    plan = small("esans-cost", tmp_path / "out", world.interactions, n=16)
    assert PaperMethod("ESANS", "esans", {**QUICK, "n": 16}) in plan.methods["tiny"]
    monkeypatch.delitem(RECIPES, "esans")
    plan = small("esans-cost", tmp_path / "out", world.interactions, n=16)
    reproduce(plan)
    rows = {row["method"]: row for row in table(plan.out)}
    assert rows["ESANS"]["verdict"] == "not run: there is no recipe `esans` yet"
    assert (rows["ESANS"]["published"], rows["ESANS"]["mean"]) == (1.18, None)
    times = {}
    for method in ("uns", "fairneg"):
        ends = [
            [json.loads(line)["seconds"] for line in (plan.out / "tiny" / method / str(seed) / "metrics.jsonl").open()]
            for seed in (10, 20)
        ]
        times[method] = [last - first for first, last in ends]
    ratios = [ours / base for ours, base in zip(times["fairneg"], times["uns"], strict=True)]
    assert rows["FairNeg"]["mean"] == pytest.approx(sum(ratios) / 2)
    assert rows["UNS"]["verdict"] == "the reference"
    assert esans.COST.alone


def test_a_browser_opens_the_page(done: Path, browse: Callable[[Path], tuple[str, str]]) -> None:
    """Chromium shows the page of a reproduction without console messages, with seeds, failure and figures."""
    dom, said = browse(done / "report.html")
    assert said == ""
    assert dom.count("<svg") == 1
    for words in (
        "not run: the data was not given",
        "10, each with its own split",
        "XIR seed 10: lam",
        "0.1543 ± 0.00011",
    ):
        assert words in dom
    assert {path.suffix for path in (done / "figures").iterdir()} == {".svg", ".png"}
