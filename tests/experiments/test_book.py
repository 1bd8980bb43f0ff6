"""The book: plans, cells with equal trials, budgets, resumed runs, verdicts and pages, on small synthetic worlds."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.stats

from sparring.cli import main
from sparring.cli.main import parser
from sparring.core import files
from sparring.core.errors import UserError
from sparring.experiments import study
from sparring.experiments.book import excerpts, pages, results, running
from sparring.experiments.book.plan import SOLVED, chosen, read_plan
from sparring.experiments.book.running import SHIFT, Book, stale
from sparring.experiments.study import FinishedRun
from sparring.recipes import finding, settings
from sparring.recipes.setup import parse_setup
from sparring.training.folder import read_meta
from support.papers import metrics_of, result_json, run_here

pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
PLAN = """
trials = 2
design = 1
rungs = [[1, 1]]
repetitions = 2
repeated = ["ssl_pop"]

[settings]
epochs = 2
dim = 8
batch_size = 256

[models.tables]
line = "Tables."
setup = "tables"
settings = { tau = 0.12, init = "spectral" }

[sets.first]
place = "world:200x120"
splits = ["random"]

[sets.second]
place = "world:180x100:1"
splits = ["random"]
rungs = []
settings = { eval_every = 2 }

[methods.popularity]
[methods.uns]
settings = { n = 32 }
[methods.ssl_pop]
[methods.xir]
settings = { cache_size = 64 }
tau_unit = 2.0
published = { paper = "xir", table = "table2", name = "XIR" }

[claims.xir]
statement = "XIR over SSL-Pop"
better = "xir"
worse = "ssl_pop"
paper = "Chen et al., NeurIPS 2022"
note = "Batches here are small."
"""
METHODS = ("uns", "ssl_pop", "xir", "ssl_pop again")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, plan_file: Path) -> Path:
    """The folder of a book that one command made."""
    out = tmp_path_factory.mktemp("book") / "out"
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        assert main(words(plan_file, out)) == 0
    return out


def words(plan: Path, out: Path, *more: str) -> list[str]:
    return ["book", "--plan", str(plan), "--out", str(out), "--device", "cpu", "--quiet", *more]


def read_book(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "book.json").read_text()))


def folder(out: Path, where: str, method: str, repetition: int) -> Path:
    model = "solved" if method == "popularity" else "tables"
    return out / "runs" / model / f"{where}-random" / method.replace(" ", "-") / str(repetition) / "0"


def stored(out: Path, where: str, method: str, metric: str = "ndcg@20") -> np.ndarray:
    """(repetitions, queries) values from the run folders."""
    paths = (folder(out, where, method, repetition) / "per_query.parquet" for repetition in (0, 1))
    return np.stack([pl.read_parquet(path)[metric].to_numpy() for path in paths if path.exists()]).astype(float)


# The plan


def test_the_plan_of_the_project_can_be_run(tmp_path: Path) -> None:
    """Every method of plan.toml has valid settings with every model and set; sets are in the order of the file.

    An epoch of a large set has more steps, so its rungs have fewer epochs; the largest are validated after each.
    """
    plan = read_plan()
    book = Book(tmp_path / "book", plan)
    running.check(book)
    assert plan.trials >= 20
    assert plan.repetitions >= 5
    own = {
        name: (plan.rungs_of(each), plan.base("tables", each).validation.eval_every) for name, each in plan.sets.items()
    }
    assert own["tiktok"] == own["electronics"] == own["movietweetings"] == own["world"] == (([8, 7], [24, 2]), 2)
    assert own["beauty"] == (([4, 7], [12, 2]), 2)
    large = ("online_retail", "tafeng", "groceries", "ml1m", "gowalla", "gowalla_lightgcn")
    assert [own[name] for name in large] == 6 * [(([2, 7], [6, 2]), 1)]
    rungs = {cell.method.name: book.study(cell).rungs for cell in book.cells if cell.where.name == "ml1m"}
    assert rungs["uns"] == ([2, 7], [6, 2])
    assert rungs["ials"] == ([8, 7], [24, 2])  # a sweep of a solver is no number of steps
    units = {name: each.tau_unit for name, each in plan.methods.items() if each.tau_unit != 1}
    assert units == {"xir": 2.0, "bir": 2.0, "psl": 0.5}
    assert {"popularity", "ease", "ials", "full_softmax"} <= set(plan.methods)
    assert {(claim.better, claim.worse) for claim in plan.claims.values()} >= {
        ("xir", "ssl_pop"),
        ("esans", "uns"),
        ("ngame", "random_batches"),
        ("slatk", "sl"),
        ("dns", "bpr"),
    }
    assert plan.methods["ssl_pop again"].repeats == "ssl_pop"
    assert (plan.base("tables").batches.rows, plan.base("sums").batches.rows) == ("pairs", "sets")
    places = [(cell.where.name, cell.split, cell.model) for cell in book.cells]
    assert list(dict.fromkeys(place[0] for place in places)) == list(plan.sets)
    assert all(places[i] == places[i + 1] or places[i] not in places[i + 1 :] for i in range(len(places) - 1))


def test_formulas_are_those_of_the_documentation() -> None:
    """The formula of a method is the first block of its entry in docs/methods; that of random batches is NGAME's."""
    entries: dict[str, str] = {}
    for path in (ROOT / "docs" / "methods").glob("*.md"):
        for entry in re.finditer(r"^## (\w+)\n.*?(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE):
            block = re.search(r"```\n(.*?)```", entry[0], re.DOTALL)
            entries |= {entry[1]: block[1].strip()} if block else {}
    for name, method in read_plan().methods.items():
        recipe = "ngame" if name == "random_batches" else method.recipe
        assert method.formula.strip() == entries[recipe], name


def test_unknown_names_are_one_line(plan_file: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A name that the plan does not have, data that is not here, and a broken plan are errors of one line."""
    out = tmp_path / "out"
    refused(words(plan_file, out, "--sets", "frist"), "--sets", "'frist'", "did you mean 'first'")
    refused(words(plan_file, out, "--methods", "uns,xri"), "--methods", "'xri'", "xir")
    refused(words(plan_file, out, "--models", "towers"), "--models", "'towers'", "tables")
    refused(words(plan_file, out, "--splits", "monthly"), "--splits", "'monthly'", "random")
    refused(words(plan_file, out, "--hours", "0"), "--hours", "'0'")
    refused(words(plan_file, out, "--set", "dimm=3"), "dimm")
    refused(words(plan_file, out, "--set", "eval_every=2"), "eval_every", "rungs at epoch 1")
    refused(["book", "--sets", "tafeng", "--data-root", str(tmp_path), "--out", str(out)], "tafeng", "--data-root")
    refused(words(tmp_path / "none.toml", out), "none.toml")
    for broken, mention in (
        (PLAN.replace('better = "xir"', 'better = "xirr"'), "'xirr'"),
        (PLAN.replace("tau_unit", "tau_units"), "'tau_units'"),
        (PLAN.replace("trials = 2", "trial = 2"), "'trial'"),
        (PLAN.replace("[[1, 1]]", "[[1, 3]]"), "rungs"),
        (PLAN.replace("[[1, 1]]", "[[2, 2], [1, 1]]"), "rungs"),
        *((PLAN.replace("[[1, 1]]", rungs), "rungs") for rungs in ("[1, 1]", "[[1]]", '[["1", 1]]', "1")),
        *(
            (PLAN.replace("rungs = []", f"rungs = {own}"), "sets.second")
            for own in ("1", "[[1, 3]]", "[[2, 1], [1, 0]]")
        ),
        (PLAN.replace("rungs = []\n", ""), "second random tables uns validates every 2 epochs"),
        (PLAN.replace("{ eval_every = 2 }", "2"), "settings of sets.second"),
        (PLAN.replace("{ eval_every = 2 }", "{ eval_evry = 2 }"), "eval_evry"),
        *((PLAN.replace("= 2", f"= {count}", 1), "trials") for count in ('"2"', "true", "-1")),
        (PLAN.replace("repetitions = 2", "repetitions = 0"), "repetitions"),
        (PLAN.replace("epochs = 2", "epochs = 2\neval_every = 2"), "eval_every"),
        (PLAN.replace('splits = ["random"]', 'splits = ["often"]'), "'often'"),
        (PLAN.replace('place = "world:200x120"\n', ""), "sets.first"),
        (PLAN.replace("[methods.uns]", "[methods.unns]"), "unns"),
    ):
        (tmp_path / "broken.toml").write_text(broken)
        refused(words(tmp_path / "broken.toml", out), mention)
    assert not out.exists() or not any(out.iterdir())


def test_a_part_of_a_plan_keeps_popularity_and_repetitions(plan_file: Path) -> None:
    """Chosen methods come with popularity and their repetitions; claims stay that have both methods."""
    plan = chosen(read_plan(plan_file), sets=["second"], methods=["ssl_pop"])
    assert list(plan.methods) == ["popularity", "ssl_pop", "ssl_pop again"]
    assert (list(plan.sets), list(plan.claims)) == (["second"], [])


# The runs


def trials_of(out: Path, where: str, method: str, repetition: int) -> list[dict[str, Any]]:
    path = folder(out, where, method, repetition).parent / "tune" / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_method_has_the_same_trials_and_seeds(made: Path) -> None:
    """Methods have two trials each, XIR at twice the temperature; every repetition has seeds of its own throughout."""
    for where in ("first", "second"):
        trials = {}
        for method in METHODS:
            trials[method] = trials_of(made, where, method, 0)
            seeds = [read_meta(folder(made, where, method, r))["setup"]["seed"] for r in (0, 1)]
            assert seeds == ([SHIFT, SHIFT + 1] if method == "ssl_pop again" else [0, 1])
            others = trials_of(made, where, method, 1)
            assert [t["value"] for t in trials[method]] != [t["value"] for t in others]
            for r, tried in enumerate((trials[method], others)):
                rungs = {"first": [(0, 1), (1, 2)], "second": [(0, 2), (0, 2)]}[where]  # the second set has none
                assert sorted((t["rung"], t["epochs"]) for t in tried) == rungs
                winner = max(tried, key=lambda t: (t["rung"], t["value"]))
                setup = read_meta(folder(made, where, method, r))["setup"]
                chosen_lr, chosen_tau = setup["training"]["lr"], setup["temperature"]["tau"]
                assert (chosen_lr, chosen_tau) == (winner["settings"]["lr"], winner["settings"]["tau"])
        assert {len(each) for each in trials.values()} == {2}
        taus = {name: [trial["settings"]["tau"] for trial in each] for name, each in trials.items()}
        assert taus["xir"] == pytest.approx([2 * tau for tau in taus["ssl_pop"]])
        settings_of = [[trial["settings"] for trial in trials[name]] for name in ("ssl_pop", "ssl_pop again")]
        assert settings_of[0] == settings_of[1]
        assert [t["value"] for t in trials["ssl_pop"]] != [t["value"] for t in trials["ssl_pop again"]]
    assert not folder(made, "first", "popularity", 1).exists()
    kept = {path.name for path in folder(made, "first", "xir", 0).iterdir() if not path.name.startswith(".")}
    assert kept == {*study.RESULTS, "manifest.json"}


def test_a_book_goes_on_after_a_kill_and_a_budget(
    made: Path, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that is killed in a training, or whose time is over, is completed by the next, with the same figures."""
    ran = run_here(monkeypatch)
    out, train, calls = tmp_path / "out", study._train_one, [0]

    def killed(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        train(*arguments)

    monkeypatch.setattr(study, "_train_one", killed)
    part = words(plan_file, out, "--sets", "first", "--methods", "uns,ssl_pop")
    assert main(part) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert main([*part, "--hours", "1e-9"]) == 0
    assert "3 of 4 cells are left, the next is first random tables uns" in capsys.readouterr().out
    assert read_book(out)["left"] == [f"first random tables {name}" for name in ("uns", "ssl_pop", "ssl_pop again")]
    before = (folder(out, "first", "uns", 0) / "result.json").stat().st_mtime_ns
    ran.clear()
    assert main(part) == 0
    left = [f"first random tables {name} {r}" for name in ("uns", "ssl_pop", "ssl_pop again") for r in (0, 1)]
    assert ran == left[1:]
    assert (folder(out, "first", "uns", 0) / "result.json").stat().st_mtime_ns == before
    assert read_book(out)["left"] == []
    for method in ("uns", "ssl_pop", "ssl_pop again"):
        assert np.array_equal(stored(out, "first", method), stored(made, "first", method))
    ran.clear()
    assert main(part) == 0
    assert ran == []


def test_a_failed_cell_harms_no_other(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that cannot be trained is reported once a repetition, the others are done, and the code is 1."""
    run_here(monkeypatch)
    text = PLAN.replace("[methods.uns]\nsettings = { n = 32 }", "[methods.shown]\n").replace("[claims", "[claims")
    (tmp_path / "plan.toml").write_text(text.replace('repeated = ["ssl_pop"]', 'reference = "ssl_pop"'))

    def no_rows(*arguments: Any) -> None:
        if arguments[3].name == "shown":
            raise UserError("no shown items")

    monkeypatch.setattr(study, "_tune_one", no_rows)
    monkeypatch.setattr(study.Study, "tuned_settings", lambda *arguments: {})
    more = ("--sets", "first", "--methods", "shown,ssl_pop")
    assert main(words(tmp_path / "plan.toml", tmp_path / "out", *more)) == 1
    book = read_book(tmp_path / "out")
    assert [(each["recipe"], each["error"]) for each in book["failures"]] == 2 * [("shown x tables", "no shown items")]
    assert {row["method"] for row in book["leaderboards"]} == {"popularity", "ssl_pop"}


def test_other_settings_need_another_folder(
    made: Path, plan_file: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Trials, defaults, and the rungs and settings of a set may not change while a book grows."""
    refused(words(plan_file, made, "--trials", "3"), "trials")
    for own in ("", "rungs = []\n", "rungs = [[1, 1]]\nsettings = { eval_every = 1 }\n"):
        (tmp_path / "plan.toml").write_text(PLAN.replace("rungs = []\nsettings = { eval_every = 2 }\n", own))
        refused(words(tmp_path / "plan.toml", made), "rungs and settings of second", "another folder")
    refused(words(plan_file, made, "--set", "dim=4"), "defaults", "model.dim=8, now 4", "another folder")


def test_a_set_has_rungs_and_settings_of_its_own(made: Path) -> None:
    """The rungs and settings of a set hold on it alone; its record, its page and the first page name them."""
    book = read_book(made)
    sets = book["plan"]["sets"]
    assert {name: (each["rungs"], each["settings"]) for name, each in sets.items()} == {
        "first": ([[1, 1]], {}),
        "second": ([], {"eval_every": 2}),
    }
    for run in book["runs"]:
        if run["method"] != "popularity":
            assert [epoch for epoch, _, _ in run["curve"]] == {"first": [1, 2], "second": [2]}[run["set"]]
    for row in book["leaderboards"]:
        validated_twice = row["set"] == "first" or row["method"] == "popularity"
        assert ("validation.eval_every=2" in row["train"]) != validated_twice
    assert {each["settings"]["validation.eval_every"] for each in book["defaults"].values()} == {1}
    index, first, second = ((made / f"{name}.html").read_text() for name in ("index", "set-first", "set-second"))
    pruned = "all train 1 epochs, the best 1 train until they stop rising"
    assert f"2 in each repetition: {pruned} (first); all train until they stop rising (second)" in index
    assert f"2 in each repetition: {pruned}<" in first
    assert "2 in each repetition: all train until they stop rising<" in second
    assert "eval_every=2<" in second
    assert "eval_every=2<" not in first


def test_changed_defaults_are_found(made: Path, plan_file: Path) -> None:
    """A default that differs from the book's is named; an unchanged book is not stale."""
    plan, before = read_plan(plan_file), read_book(made)["defaults"]
    now = Book(made, plan).defaults
    assert stale(before, now) == []
    changed = {**now, "tables xir": {**now["tables xir"], "digest": "0"}}
    changed["tables xir"]["settings"] = {**now["tables xir"]["settings"], "lam": 0.25}
    assert stale(before, changed) == ["tables xir: lam=0.5, now 0.25"]
    methods = {**plan.methods, "uns": dataclasses.replace(plan.methods["uns"], settings={"n": 33})}
    assert stale(before, Book(made, dataclasses.replace(plan, methods=methods)).defaults) == [
        "tables uns: n=32, now 33"
    ]
    assert stale(before, {}) != []


# The figures


def test_leaderboards_equal_the_folders(made: Path) -> None:
    """Means, differences and p-values are those computed here from the values of single queries."""
    rows = read_book(made)["leaderboards"]
    assert len(rows) == 2 * 2 * 5
    for row in rows:
        mine = stored(made, row["set"], row["method"], row["metric"])
        theirs = stored(made, row["set"], "uns", row["metric"])
        assert row["mean"] == pytest.approx(mine.mean(), rel=1e-5)
        assert row["repetitions"] == len(mine) == (1 if row["method"] == "popularity" else 2)
        seconds = [result_json(folder(made, row["set"], row["method"], s))["train_seconds"] for s in range(len(mine))]
        assert row["seconds"] == pytest.approx(np.mean(seconds))
        if row["method"] == "uns":
            assert (row["verdict"], row["difference"]) == ("reference", None)
            continue
        assert row["difference"] == pytest.approx(mine.mean() - theirs.mean(), rel=1e-4, abs=1e-7)
        by_repetition = (mine - theirs).mean(1)
        assert row["p"] >= scipy.stats.ttest_1samp(by_repetition, 0).pvalue - 1e-6
        assert row["d_low"] < row["difference"] < row["d_high"]
    for where in ("first", "second"):
        own = {r["method"]: r for r in rows if (r["set"], r["metric"]) == (where, "ndcg@20")}
        tested = sorted((own[name]["p"], name) for name in ("popularity", "ssl_pop", "xir"))
        adjusted = np.maximum.accumulate([min(1.0, p * (3 - i)) for i, (p, _) in enumerate(tested)])
        for value, (_, name) in zip(adjusted, tested, strict=True):
            assert own[name]["p_holm"] == pytest.approx(value)
            ahead = "better" if own[name]["difference"] > 0 else "worse"
            assert own[name]["verdict"] == (ahead if value < 0.05 else "no difference shown")
        assert own["ssl_pop again"]["verdict"] == "repeats ssl_pop"


def test_every_run_is_recorded(made: Path, plan_file: Path) -> None:
    """book.json and runs.csv have each run once, with its metrics, cost, draws, device, commit and versions."""
    book = read_book(made)
    with open(made / "runs.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(book["runs"]) == len(lines) == 2 * (1 + 4 * 2)
    for run, line in zip(book["runs"], lines, strict=True):
        place = folder(made, run["set"], run["method"], run["repetition"])
        assert run["test"] == metrics_of(place)
        assert float(line["ndcg@20"]) == run["test"]["ndcg@20"]
        assert run["commit"] == line["commit"] == running.commit()
        assert run["sparring"]
        assert "CPU" in run["device"]
        assert max(value for _, _, value in run["curve"]) == run["validation"]
        if run["method"] == "popularity":
            assert run["candidates"] is None
        if run["method"] == "uns":  # 32 draws with replacement of n items, and no others
            n = {"first": 120, "second": 100}[run["set"]]
            assert run["candidates"] == 32
            assert 0 < run["catalogue_share"] <= 32 / n
    assert str(made) not in (made / "book.json").read_text().replace(book["command"], "")


def test_claims_ranks_and_the_null_rate(made: Path) -> None:
    """The effect over sets is the mean relative difference, with its t interval; ranks and the null by brute force."""
    book = read_book(made)
    sets = ("first", "second")
    effects = [stored(made, s, "xir").mean() / stored(made, s, "ssl_pop").mean() - 1 for s in sets]
    (claim,) = book["claims"]
    usable = [each["set"] for each in book["data"] if each["usable"]]
    assert [row["relative"] for row in claim["rows"]] == pytest.approx(effects, rel=1e-3)
    kept = [effect for where, effect in zip(sets, effects, strict=True) if where in usable]
    assert claim["sets"] == usable
    if len(kept) == 2:
        low, high = scipy.stats.t.interval(0.95, 1, np.mean(kept), scipy.stats.sem(kept))
        assert (claim["low"], claim["high"]) == (pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3))
        verdict = "shown" if low > 0 else "reversed" if high < 0 else "not shown"
        assert claim["verdict"] == verdict
        names = ("popularity", "uns", "ssl_pop", "xir")
        table = np.array([[stored(made, s, name).mean() for name in names] for s in sets])
        by_hand = np.stack([scipy.stats.rankdata(-row) for row in table]).mean(0)
        (ranks,) = book["ranks"]
        wins = [int((table.argmax(1) == place).sum()) for place in range(4)]
        assert {row["method"]: row["wins"] for row in ranks["rows"]} == dict(zip(names, wins, strict=True))
        assert {row["method"]: row["rank"] for row in ranks["rows"]} == dict(zip(names, by_hand, strict=True))
        q = scipy.stats.studentized_range.ppf(0.95, 4, np.inf) / np.sqrt(2)
        assert ranks["distance"] == pytest.approx(q * np.sqrt(4 * 5 / (6 * 2)))
    assert claim["signed_rank"] is None  # two sets are too few
    assert book["null"]["pairs"] == 2
    assert book["null"]["rate"] == book["null"]["different"] / 2


def test_a_set_without_anything_above_popularity_is_left_out(made: Path, plan_file: Path) -> None:
    """Values below popularity make a chapter unusable, and claims and ranks do not count it."""
    book = Book(made, read_plan(plan_file))
    values = results.read_values(book)
    key = ("first", "random", "tables")
    own = results.chapters(book, values)[key]
    metric, claim = book.plan.metric, book.plan.claims["xir"]
    record = results.plan_record(book)
    floor = own["popularity"].by_metric[metric][0]
    poor = {
        name: each
        if name == "popularity"
        else dataclasses.replace(each, by_metric={metric: {s: floor * 0.5 + 0.001 * s for s in (0, 1)}})
        for name, each in own.items()
    }
    assert not results.above_popularity(book, poor)
    rich = {
        **poor,
        "xir": dataclasses.replace(own["xir"], by_metric={metric: {s: floor + 0.5 + 1e-4 * s for s in (0, 1)}}),
    }
    assert results.above_popularity(book, rich)
    left_out = results.judged(record, results.claim_rows(book, claim, {key: own}, set()))
    assert (left_out["verdict"], left_out["sets"]) == ("not tested", [])
    assert "popularity" in str(left_out["rows"][0]["verdict"])
    boards = results.leaderboard(book, key, own)
    data = dict(zip(("set", "split", "model"), key, strict=True))
    for usable in (False, True):
        shown = {"plan": record, "leaderboards": boards, "data": [{**data, "usable": usable}]}
        assert (results.over_sets(shown, "tables") is not None) == usable
    better = dataclasses.replace(own["uns"], by_metric=rich["xir"].by_metric)
    for chapter, sets in ((poor | {"uns": better}, []), (rich, ["first"])):  # a third method ahead is not enough
        assert results.above_popularity(book, chapter)
        tested = results.judged(record, results.claim_rows(book, claim, {key: chapter}, {key}))
        assert tested["sets"] == sets
        assert ("popularity" in str(tested["rows"][0]["verdict"])) == (not sets)


def test_verdicts_over_sets() -> None:
    """Several sets are judged by the interval of their mean; the chapters of one set must agree."""
    assert results.verdict_over_sets({"a": 0.1, "b": 0.11, "c": 0.09}, [])[0] == "shown"
    assert results.verdict_over_sets({"a": -0.1, "b": -0.11, "c": -0.09}, [])[0] == "reversed"
    assert results.verdict_over_sets({"a": 0.1, "b": -0.1}, ["shown", "reversed"])[0] == "not shown"
    assert results.verdict_over_sets({"a": 0.1}, ["shown", "shown"]) == ("shown", None, None)
    assert results.verdict_over_sets({"a": 0.1}, ["shown", "not shown"])[0] == "not shown"
    assert results.verdict_over_sets({}, [])[0] == "not tested"


def test_equal_time_reads_the_curve() -> None:
    """The best value up to a time, averaged over seeds; none if a seed has no validation by then."""
    curves = [[(1, 1.0, 0.1), (2, 2.0, 0.3), (3, 3.0, 0.2)], [(1, 1.5, 0.2), (2, 2.5, 0.6)]]
    assert results.equal_time(curves, 2.4) == pytest.approx((0.3 + 0.2) / 2)
    assert results.equal_time(curves, 3.0) == pytest.approx((0.3 + 0.6) / 2)
    assert results.equal_time(curves, 1.2) is None
    assert results.seconds_to_best(curves) == pytest.approx((2.0 + 2.5) / 2)


def test_times_of_other_hardware_are_not_compared(made: Path, plan_file: Path) -> None:
    """At equal time, a method has a value where it ran on the hardware of the reference, and none elsewhere."""
    book = Book(made, read_plan(plan_file))
    own = results.chapters(book, results.read_values(book))["first", "random", "tables"]
    reference, other = own["uns"], own["xir"]
    seconds = results.seconds_to_best(reference.curves)
    assert seconds is not None
    assert results.reached(other, reference) == results.equal_time(other.curves, seconds)
    elsewhere = dataclasses.replace(other, runs=[FinishedRun(run.folder) for run in other.runs])
    elsewhere.runs[1].__dict__["measured"] = {**other.runs[1].measured, "device": "another"}
    assert results.reached(elsewhere, reference) is None


def test_commands_repeat_a_cell(made: Path) -> None:
    """The commands of a cell parse; that of a training has exactly the settings of the run."""
    for row in read_book(made)["leaderboards"]:
        args, rest = parser()[0].parse_known_args(shlex.split(row["command"])[1:])
        assert not rest
        assert (args.sets, args.trials, args.repetitions) == ((row["set"],), 2, 2)
        args, rest = parser()[0].parse_known_args(shlex.split(row["train"])[1:])
        assert not rest
        meta = read_meta(folder(made, row["set"], row["method"], 0))
        setup, arguments = settings.resolve(finding.find(args.recipe), dict(args.settings))
        if row["method"] != "popularity":
            assert setup == parse_setup(meta["setup"])
        own = {name: default for name, (_, default) in settings.own_arguments(finding.find(args.recipe)).items()}
        assert {**own, **arguments} == meta["arguments"]


# The pages


def test_findings_name_all_that_share_the_best_rank() -> None:
    """Methods of equal average rank are named together; a single best one is named alone."""
    null = {"pairs": 0}
    rows = [{"method": name, "rank": rank} for name, rank in (("a", 1.5), ("b", 1.5), ("c", 3.0))]
    for own, words in ((rows, "a and b have the best average rank, 1.50"), (rows[1:], "b has the best average rank")):
        ranked = {"model": "tables", "sets": ["x", "y"], "rows": own}
        book = {"plan": {}, "ranks": [ranked], "claims": [], "null": null, "data": []}
        assert words in pages.findings(book)[0]


def test_pages_are_complete(made: Path) -> None:
    """A page for each set, method and claim; every link leads to a file; each has the commit; nothing is loaded."""
    book = read_book(made)
    expected = {"index.html", "claim-xir.html", "set-first.html", "set-second.html"}
    expected |= {f"method-{name.replace(' ', '-').replace('_', '-')}.html" for name in ("popularity", *METHODS)}
    assert {path.name for path in made.glob("*.html")} == expected
    for path in made.glob("*.html"):
        text = path.read_text()
        assert book["commits"][0] in text
        assert not re.search(r'(src|href)="(https?:)?//', text)
        for target in re.findall(r'href="([^"#]+)"', text):
            assert (made / target).is_file(), target
    index, method = (made / "index.html").read_text(), (made / "method-xir.html").read_text()
    assert pages.null_sentence(book["null"]) in index.replace("&#x27;", "'")
    assert "0.1543" in method  # published on Gowalla
    assert "sparring book" in method
    assert "as sharp as 1" in method
    assert "Batches here are small." in (made / "claim-xir.html").read_text()


def test_pages_can_be_made_from_the_json_alone(made: Path, tmp_path: Path) -> None:
    """Pages written from book.json equal those of the command."""
    book = read_book(made)
    assert pages.write(tmp_path, book) == tmp_path / "index.html"
    for path in made.glob("*.html"):
        assert (tmp_path / path.name).read_text() == path.read_text()


def test_a_page_names_the_commits_of_its_own_runs(made: Path, tmp_path: Path) -> None:
    """The page of a set or method has the commits of its runs, the first page those of all."""
    book = read_book(made)
    book["commits"] = ["aaaa", "bbbb"]
    for run in book["runs"]:
        run["commit"] = "aaaa" if run["set"] == "first" else "bbbb"
    pages.write(tmp_path, book)
    found = {
        name: (tmp_path / f"{name}.html").read_text() for name in ("index", "set-first", "set-second", "method-xir")
    }
    assert "Commit aaaa." in found["set-first"]
    assert "Commit bbbb." in found["set-second"]
    assert "Commit aaaa, bbbb." in found["index"]
    assert "Commit aaaa, bbbb." in found["method-xir"]


def test_a_shipped_book_stands_alone(made: Path, tmp_path: Path) -> None:
    """A repository keeps book.json, runs.csv and the pages of this book; no path of this machine is left in them."""
    (tmp_path / "method-gone.html").write_text("a page of an earlier book")
    excerpts.ship(made, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(path.name for path in made.glob("*.html")),
        "book.json",
        "runs.csv",
    }
    before, after = read_book(made), read_book(tmp_path)
    assert after["command"].split() == [word.split("/")[-1] for word in before["command"].split()]
    assert {**after, "command": before["command"]} == before
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert str(made.parent) not in text
        for target in re.findall(r'(?:href|src)="([^"#]+)"', text) if path.suffix == ".html" else ():
            assert (tmp_path / target).is_file(), target
        if path.name not in ("book.json", "index.html"):
            assert text == (made / path.name).read_text()


def test_joined_books_equal_a_whole(made: Path, plan_file: Path, tmp_path: Path) -> None:
    """Books of one set each, joined by their JSON alone, have the ranks, verdicts, nulls and runs of one book of both.

    Of a chapter that both have the one with more methods stays, and of two with as many the new one.
    """
    plan = read_plan(plan_file)

    def of(*sets: str, methods: tuple[str, ...] = ()) -> dict[str, Any]:
        book = Book(made, chosen(plan, sets, methods=methods))
        files.write_json(tmp_path / "book.json", results.collect(book, [], [], f"sparring book {' '.join(sets)}"))
        return dict(json.loads((tmp_path / "book.json").read_text()))

    whole, first, second = of("first", "second"), of("first"), of("second")
    joined = json.loads(json.dumps(results.joined(second, first)))
    assert joined.pop("command").splitlines() == ["sparring book first", "sparring book second"]
    del whole["command"]
    assert joined == whole
    assert pages.write(tmp_path / "pages", results.joined(second, first)).is_file()
    changed = json.loads(json.dumps(first))
    changed["leaderboards"][0]["mean"] = 0.5
    assert results.joined(first, changed)["leaderboards"] == first["leaderboards"]
    small = of("first", methods=("uns",))
    for one, other in ((small, first), (first, small)):
        both = json.loads(json.dumps(results.joined(one, other)))
        for part in ("data", "leaderboards", "claims", "null", "ranks"):
            assert both[part] == first[part], part
        assert sorted(map(str, both["runs"])) == sorted(map(str, first["runs"]))


def test_unlike_books_are_not_joined(made: Path, plan_file: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A book of another version, with other trials, rungs of a set or defaults is refused before any training.

    A set that was recorded without rungs and settings had those of the plan.
    """
    other, out = read_book(made), tmp_path / "out"
    sets = other["plan"]["sets"]

    def with_second(**own: object) -> dict[str, Any]:
        return {"plan": {**other["plan"], "sets": {**sets, "second": {**sets["second"], **own}}}}

    changes: tuple[tuple[dict[str, Any], str], ...] = (
        (with_second(rungs=[[1, 1]]), "sets.second.rungs=[[1, 1]], this book with []"),
        (with_second(settings={}), "sets.second.settings={}, this book with {'eval_every': 2}"),
        ({"format": 1}, "version"),
        ({"plan": {**other["plan"], "trials": 7}}, "trials=7"),
        ({"defaults": {name: {**each, "digest": "x"} for name, each in other["defaults"].items()}}, "defaults"),
    )
    for change, mention in changes:
        (tmp_path / "other.json").write_text(json.dumps({**other, **change}))
        refused(words(plan_file, out, "--join", str(tmp_path / "other.json")), "other.json", mention)
    assert not (out / "runs").exists()
    for name in ("rungs", "settings"):
        del sets["first"][name]
    results.check_alike(read_book(made)["plan"], other["defaults"], other, "other.json")
    del sets["second"]["rungs"]
    with pytest.raises(UserError, match=r"sets\.second\.rungs"):
        results.check_alike(read_book(made)["plan"], other["defaults"], other, "other.json")


def test_solved_methods_have_no_model(plan_file: Path) -> None:
    """A solved method is one cell of each split, before those of models."""
    cells = Book(Path("x"), read_plan(plan_file)).cells
    assert [(cell.model, cell.method.name) for cell in cells[:2]] == [(SOLVED, "popularity"), ("tables", "uns")]
    assert len(cells) == 2 * 5
