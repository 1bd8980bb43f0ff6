"""sparring index and sparring recommend --all: the requested index in its run folder, and the lists of every query."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.cli.parsing import size
from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.recipes.settings import build
from sparring.serving.export import lists
from sparring.serving.index import KINDS, Index, recall_tuning, tune
from sparring.serving.index.run_index import build_index, open_index
from sparring.training import trained as runs
from sparring.training.fitting import fit
from support.cagra import pretend_gpu
from support.run_files import change_tensors

rng = np.random.default_rng(2)
CENTRES = rng.standard_normal((80, 12))
ITEMS = (CENTRES[rng.integers(0, 80, 4000)] + 0.6 * rng.standard_normal((4000, 12))).astype(np.float32)
QUERIES = (CENTRES[rng.integers(0, 80, 120)] + 0.6 * rng.standard_normal((120, 12))).astype(np.float32)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make speed measurements short and equal; on a busy machine the search for the best would end early."""
    measure = recall_tuning._speed
    monkeypatch.setattr(recall_tuning, "_LEAST", 0.005)
    monkeypatch.setattr(recall_tuning, "_speed", lambda *given: 0 * measure(*given) + 1000.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run over 300 queries and 2,500 items."""
    folder = tmp_path_factory.mktemp("index") / "run"
    parts = split(
        make_world(300, 2500, exposure=0.02, relevant=0.4, seed=3).interactions, "random", valid=0.1, test=0.2, seed=1
    )
    fit(
        build("default", parts.train, {"dim": 8, "epochs": 1, "n": 16, "batch_size": 512}),
        parts,
        folder,
        k=(10,),
        device="cpu",
    )
    return folder


def measured_recall(index: Index, k: int, queries: np.ndarray = QUERIES) -> float:
    truth = np.argsort(-(queries.astype(np.float64) @ ITEMS.T.astype(np.float64)), axis=1)[:, :k]
    found = index.search(queries, k)[1]
    return float(np.mean([len(set(a.tolist()) & set(b.tolist())) / k for a, b in zip(found, truth, strict=True)]))


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "exact"])
def test_each_kind_is_tuned_to_the_recall_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recall by brute force on the same queries meets the target; the measured points bracket it."""
    pytest.importorskip("faiss")
    if kind == "cagra":
        pretend_gpu(monkeypatch)
    tuned = tune(ITEMS, QUERIES, k=10, recall=0.95, kind=kind)
    assert tuned.index.kind == tuned.chosen.kind == kind
    assert measured_recall(tuned.index, 10) >= 0.95
    assert tuned.recall >= 0.95
    assert {point.kind for point in tuned.points} == {kind}
    good = [point for point in tuned.points if point.recall >= 0.95]
    assert tuned.chosen in good
    assert min(point.recall for point in tuned.points) < 0.95 or tuned.chosen.effort.width <= 10


def test_a_kind_that_was_asked_for_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exact search as a choice, the index is tuned until the recall is met, however slow."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(recall_tuning, "_speed", lambda index, *more: 1e9 if index.kind == "exact" else 1.0)
    assert tune(ITEMS, QUERIES, k=10, recall=0.95, kind="ivf").chosen.recall >= 0.95
    assert tune(ITEMS, QUERIES, k=10, recall=0.95).index.kind == "exact"


def test_recall_of_a_point_is_that_of_brute_force() -> None:
    """The reported recall of a configuration equals a manual count on the same queries."""
    pytest.importorskip("faiss")
    tuned = tune(ITEMS, np.concatenate([QUERIES, QUERIES]), k=10, recall=0.9, kind="ivf")  # both halves are the same
    for point in tuned.points[:3]:
        again = Index(tuned.index.vectors, tuned.index.ids, "ivf", tuned.index.ann, point.effort)
        assert measured_recall(again, 10) == pytest.approx(point.recall, abs=1e-3)  # equal scores may swap places


def test_queries_that_tuned_nothing_must_confirm() -> None:
    """If the tuning half is easy and the held-out half is hard, the chosen index is good enough for the latter."""
    pytest.importorskip("faiss")
    hard = np.random.default_rng(5).standard_normal((60, 12)).astype(np.float32)
    tuned = tune(ITEMS, np.concatenate([CENTRES[:60].astype(np.float32), hard]), k=10, recall=0.97)
    assert measured_recall(tuned.index, 10, hard) >= 0.97
    alone = tune(ITEMS, np.concatenate([CENTRES[:60], CENTRES[:60]]).astype(np.float32), k=10, recall=0.97, kind="ivf")
    assert measured_recall(alone.index, 10, hard) < 0.97  # the choice of the easy half alone


def test_the_memory_limit_holds() -> None:
    """Only fitting kinds are built; a smaller limit gives a smaller kind; an impossible request is an error."""
    pytest.importorskip("faiss")
    whole = 4 * ITEMS.size
    tuned = tune(ITEMS, QUERIES, k=10, recall=0.9, memory=whole // 2)
    assert tuned.index.kind in ("ivfsq", "ivfpq")
    assert tuned.chosen.memory <= whole // 2
    assert any(line.startswith("hnsw") for line in tuned.left_out)
    with pytest.raises(UserError, match="fits"):
        tune(ITEMS, QUERIES, k=10, memory=1000)
    with pytest.raises(UserError, match="ivfpq"):
        tune(ITEMS, QUERIES, k=20, recall=1.0, memory=66_000)


def test_a_small_catalogue_is_searched_exactly() -> None:
    """Up to 2,000 items only exact search is tried, without FAISS."""
    tuned = tune(ITEMS[:1500], QUERIES, k=10, recall=0.999)
    assert (tuned.index.kind, tuned.recall, len(tuned.points)) == ("exact", 1.0, 1)


def test_index_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index in the run folder answers as the model does; table, figure and page describe the choice."""
    pytest.importorskip("faiss")
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    words = ["index", str(copy), "--recall", "0.9", "--k", "20", "--queries", "100", "--kind", "ivf"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "ivf" in shown
    assert "chosen" in shown
    folder = copy / "index"
    assert {"report.html", "recall_speed.png", "recall_speed.svg", "points.csv"} <= {
        path.name for path in (folder / "report").iterdir()
    }
    assert "recall@20" in (folder / "report" / "report.html").read_text()
    trained, index = runs.load(copy), open_index(copy)
    assert index.kind == "ivf"
    q = trained.model.query_vectors(torch.arange(300))
    truth = torch.topk(q @ trained.model.item_vectors().T, 20).indices.numpy()
    found = index.search(q.numpy(), 20)[1]
    assert np.mean([len(set(a.tolist()) & set(b.tolist())) / 20 for a, b in zip(found, truth, strict=True)]) > 0.85
    assert main([*words[:-2], "--kind", "exact", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["chosen"]["kind"] == open_index(copy).kind == "exact"
    assert printed["recall"] == 1.0


def test_the_report_fits_a_phone(run: Path, tmp_path: Path) -> None:
    """At 390 pixels the figure fits, and only the table scrolls."""
    chromium, play = shutil.which("chromium"), pytest.importorskip("playwright.sync_api")
    if chromium is None:
        pytest.skip("chromium is not installed: the page was not opened in a browser")
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    assert main(["index", str(copy), "--kind", "exact", "--queries", "20", "--quiet"]) == 0
    with play.sync_playwright() as playing:
        browser = playing.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto((copy / "index" / "report" / "report.html").as_uri())
        assert page.locator("figure svg").bounding_box()["width"] > 300
        assert page.evaluate(
            "[...document.querySelectorAll('figure svg')].every(each => each.getBoundingClientRect().right <= 390)"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()


def test_an_index_of_another_model_is_refused(run: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    """After the model has changed, the old index is not used."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    refused(["recommend", copy, "--all", "--index", "--out", tmp_path / "a.parquet"], "no index", "sparring index")
    assert main(["index", str(copy), "--kind", "exact", "--quiet"]) == 0
    tensors, _ = files.read_tensors(copy / "model.safetensors")
    change_tensors(copy, "model", **{name: tensor * 2 for name, tensor in tensors.items()})
    refused(["recommend", copy, "--all", "--index", "--out", tmp_path / "a.parquet"], "another model", "sparring index")
    assert not (tmp_path / "a.parquet").exists()


def test_bad_options_are_one_line(
    run: Path, tmp_path: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid recalls, sizes, kinds and combinations raise one-line errors."""
    refused(["index", run, "--recall", "1.2"], "'1.2'", "recall")
    refused(["index", run, "--memory", "many"], "'many'", "500MB")
    refused(["index", run, "--kind", "hmsw"], "hnsw")
    refused(["index", tmp_path / "none"], "no such run folder")
    refused(["index", run, "--memory", "1kB"], "fits within")
    refused(["recommend", run, "--all"], "--out")
    refused(["recommend", run, "--query", "3", "--out", tmp_path / "a.csv"], "--all")
    refused(["recommend", run, "--all", "--query", "3"], "--all")
    refused(["recommend", run, "--all", "--k", "9999", "--out", tmp_path / "a.csv"], "9999", "2,500")
    for name in ("a", "a.json", "a.csv.gz"):  # reported before the run is looked up
        refused(["recommend", tmp_path / "none", "--all", "--out", tmp_path / name], name, ".parquet or .csv")
    refused(["recommend", run, "--all", "--out", tmp_path], "is a folder")
    refused(["recommend", run, "--all", "--out", "/dev/null/x.parquet"], "/dev/null/x.parquet")
    monkeypatch.setitem(sys.modules, "faiss", None)
    refused(["index", run, "--kind", "hnsw"], 'pip install "sparring[serve]"')
    refused(["index", run], 'pip install "sparring[serve]"')


def test_sizes_of_the_command_line() -> None:
    """A size is a number of bytes with a decimal or binary unit: 500MB, 2GiB."""
    assert [size(text) for text in ("500MB", "2GiB", "1.5 kB", "77", "3 bytes")] == [500_000_000, 2**31, 1500, 77, 3]


@pytest.mark.parametrize("block", [64, 4096])
def test_all_lists_are_those_of_single_queries(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """The rows of every query equal `recommend` for one query at a time, for every block size."""
    monkeypatch.setattr(lists, "_BLOCK", block)
    assert main(["recommend", str(run), "--all", "--k", "15", "--out", str(tmp_path / "all.parquet")]) == 0
    table = pl.read_parquet(tmp_path / "all.parquet")
    trained = runs.load(run)
    expected = trained.recommend(trained.ids.query_ids.ids.to_list(), k=15)
    assert table.columns == ["query", "rank", "item", "score"]
    for column in ("query", "rank", "item"):
        assert table[column].to_list() == expected[column].to_list()
    assert table["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), abs=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["all.parquet"]


def test_lists_as_csv_are_those_as_parquet(run: Path, tmp_path: Path) -> None:
    """The suffix selects the format, and both have the same rows."""
    for name in ("a.parquet", "a.csv", "b.CSV"):
        assert main(["recommend", str(run), "--all", "--k", "5", "--out", str(tmp_path / name)]) == 0
    table = pl.read_parquet(tmp_path / "a.parquet")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.CSV").read_text()
    written = pl.read_csv(tmp_path / "a.csv", schema_overrides=table.schema)
    assert written.drop("score").equals(table.drop("score"))
    assert written["score"].to_numpy() == pytest.approx(table["score"].to_numpy(), abs=1e-6)


def test_lists_end_where_unseen_items_do(run: Path, tmp_path: Path) -> None:
    """With k = N a list has all trained items except known ones, or all with --with-seen."""
    trained = runs.load(run)
    n_items, n_queries = len(trained.ids.item_ids), len(trained.ids.query_ids)
    assert trained.eligibility.test is not None
    left = np.ones((n_queries, n_items), dtype=bool)
    for part in (trained.eligibility.seen, trained.eligibility.test):
        left[np.repeat(np.arange(n_queries), np.diff(part.start.numpy())), part.items.numpy()] = False
    left[:, trained.eligibility.items.numpy()] = False
    assert main(["recommend", str(run), "--all", "--k", str(n_items), "--out", str(tmp_path / "a.parquet")]) == 0
    lengths = pl.read_parquet(tmp_path / "a.parquet").group_by("query", maintain_order=True).len()["len"].to_numpy()
    assert lengths.tolist() == left.sum(1).tolist()
    assert main(["recommend", str(run), "--all", "--with-seen", "--k", "7", "--out", str(tmp_path / "b.parquet")]) == 0
    assert len(pl.read_parquet(tmp_path / "b.parquet")) == 7 * n_queries


def test_lists_through_the_index_leave_out_seen_items(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact index gives the exact lists; ivf and cagra give k unseen items each."""
    pretend_gpu(monkeypatch)
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    assert main(["recommend", str(copy), "--all", "--k", "10", "--out", str(tmp_path / "exact.parquet")]) == 0
    exact = pl.read_parquet(tmp_path / "exact.parquet")
    trained = runs.load(copy)
    owner = np.repeat(np.arange(len(trained.ids.query_ids)), np.diff(trained.seen.start.numpy()))
    seen = set(
        zip(
            trained.ids.query_ids.decode(owner).tolist(),
            trained.ids.item_ids.decode(trained.seen.items).tolist(),
            strict=True,
        )
    )
    for kind in ("exact", "ivf", "cagra"):
        assert (
            main(["index", str(copy), "--kind", kind, "--recall", "0.8", "--k", "10", "--queries", "300", "--quiet"])
            == 0
        )
        assert (
            main(["recommend", str(copy), "--all", "--index", "--k", "10", "--out", str(tmp_path / f"{kind}.parquet")])
            == 0
        )
        table = pl.read_parquet(tmp_path / f"{kind}.parquet")
        assert not seen & set(table.select("query", "item").iter_rows())
        assert len(table) == len(exact)
        same = table.select("query", "item").join(exact.select("query", "item"), on=["query", "item"])
        assert len(same) >= (1.0 if kind == "exact" else 0.7) * len(exact)


def test_a_stop_leaves_no_half_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the second block or kill -9 the old file is untouched and there is no new one."""
    out = tmp_path / "all.parquet"
    out.write_text("old")
    trained, calls = runs.load(run), []

    def fail_late(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 2:
            raise RuntimeError("stopped")

    monkeypatch.setattr(lists, "_BLOCK", 64)
    with pytest.raises(RuntimeError, match="stopped"):
        lists.write_lists(trained, out, 10, progress=fail_late)
    assert out.read_text() == "old"
    code = (
        "import time; from pathlib import Path; from sparring.training.trained import load\n"
        "from sparring.serving.export import lists; lists._BLOCK = 64\n"
        "def wait(done, total): print(done, flush=True); time.sleep(0.2)\n"
        f"lists.write_lists(load({str(run)!r}), Path({str(out)!r}), 10, progress=wait)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"kind": "hsnw"}, "hnsw"), ({"recall": 0.0}, "recall"), ({"recall": 1.5}, "1.5"), ({"queries": 1}, "2 queries")],
)
def test_a_tuning_that_cannot_be_measured_is_refused(arguments: dict[str, Any], word: str) -> None:
    """An unknown kind, a recall outside (0, 1] and a single query are one-line errors, before anything is built."""
    queries = QUERIES[: arguments.pop("queries", len(QUERIES))]
    with pytest.raises(UserError, match=word):
        tune(ITEMS, queries, k=10, **{"recall": 0.9, **arguments})


def test_a_recall_that_held_out_queries_do_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that reaches its recall only on the queries that tuned it is not returned."""
    pytest.importorskip("faiss")
    measured, half = recall_tuning._recall, len(QUERIES) // 2
    held_out = Index(ITEMS, np.arange(len(ITEMS))).search(QUERIES, 10)[1][half:]
    lucky = lambda found, truth: 0.5 if np.array_equal(truth, held_out) else measured(found, truth)  # noqa: E731
    monkeypatch.setattr(recall_tuning, "_recall", lucky)
    with pytest.raises(UserError, match="held-out"):
        tune(ITEMS, QUERIES, k=10, recall=0.9, kind="ivf")


def test_a_graph_over_many_items_is_built_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves HNSW out beyond a size and says how to get it; `--kind hnsw` builds it."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(recall_tuning, "GRAPH", 2500)
    tuned = tune(ITEMS[:3000], QUERIES, k=10, recall=0.5)
    assert any("--kind hnsw" in reason for reason in tuned.left_out)
    assert "hnsw" not in {point.kind for point in tuned.points}
    assert tune(ITEMS[:3000], QUERIES, k=10, recall=0.5, kind="hnsw").chosen.kind == "hnsw"


def test_a_diverged_model_has_no_index(run: Path, tmp_path: Path) -> None:
    """NaN in the vectors of a run is one line, before any index is built."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(folder / "index", ignore_errors=True)
    weight = torch.full_like(files.read_tensors(folder / "model.safetensors")[0]["item.weight"], float("nan"))
    change_tensors(folder, "model", **{"item.weight": weight})
    with pytest.raises(UserError, match="diverged"):
        build_index(runs.load(folder), k=10, queries=20)
    assert not (folder / "index").exists()
