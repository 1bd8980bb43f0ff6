"""A model in one file works with every command, like ours; the file is that of docs/guide/models.md."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

import sparring
from sparring.cli.main import main, parser
from sparring.core.errors import UserError
from sparring.data.histories import histories
from sparring.data.interactions import Interactions, Split
from sparring.data.synthetic_world import make_world
from sparring.data.table import from_frame
from sparring.evaluation.ranking import evaluate
from sparring.experiments.comparison import ComparedData, Comparison
from sparring.experiments.search_space import space
from sparring.models import Inputs, ModelSettings, Retriever, finding
from sparring.models.histories import HistoryTower
from sparring.models.named import MODELS, model, towers, usual_settings
from sparring.models.parts import Dense, Perceptron, Sum
from sparring.models.towers import IdTower
from sparring.negatives import Sampled, Uniform
from sparring.recipes import RECIPES, Range
from sparring.recipes.finding import find
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build, own_setup, resolve
from sparring.recipes.setup import SETTINGS, Setup, find_setting, parse_setup
from sparring.serving.http.served_run import load_served
from sparring.testing import TowersContract
from sparring.training import loop as training
from support.run_files import approve, contents

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text()
FILE = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Gated" in block)
QUICK = ["--device", "cpu", "--set", "dim=4", "--set", "model.layers=2", "--epochs", "2", "--quiet"]
MODEL = ["--model", "gated.py:gated"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's gated.py, interactions, and a finished run of the model in runs/gated."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "gated.py").write_text(FILE)
    data = make_world(60, 60, exposure=0.5, relevant=0.4, seed=3).interactions
    pairs = pl.DataFrame({"user_id": data.queries + 1000, "item_id": data.items})
    pairs.write_parquet(folder / "interactions.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*trained("runs/gated")]) == 0
    return folder


def trained(out: str) -> list[str]:
    return ["train", "--data", "interactions.parquet", "--recipe", "uns", *MODEL, *QUICK, "--out", out]


def test_the_pages_commands_parse() -> None:
    """The command line parses every command of the guide."""
    commands = re.findall(r"^sparring .*?[^\\]$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(commands) >= 9
    for command in commands:
        _, rest = parser()[0].parse_known_args(shlex.split(command.replace("\\\n", " "))[1:])
        assert not rest


def test_the_pages_tower_keeps_the_contract(place: Path) -> None:
    """The guide's proof passes; only the tests of a GPU and of histories are skipped."""
    proof = finding.find(f"{place / 'gated.py'}:gated").__globals__["TestGated"]()  # type: ignore[attr-defined]
    for name in (name for name in dir(TowersContract) if name.startswith("test_")):
        try:
            getattr(proof, name)()
        except unittest.SkipTest:
            assert name in ("test_devices", "test_histories", "test_the_future_changes_nothing")


def test_models_are_listed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`sparring models` lists ours; with a name it describes one, also of a file: options and usual settings."""
    monkeypatch.chdir(place)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() >= MODELS.keys()
    assert main(["models", "gated.py:gated", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out).values()
    assert facts["usual"] == {"batch_size": 512, "lr": 0.01}
    assert facts["options"]["layers"] == {
        "path": "model.layers",
        "type": "a whole number",
        "default": "1",
        "description": "hidden layers of the query tower",
    }
    assert main(["models"]) == 0
    assert "usually with query_tower=history" in capsys.readouterr().out


def test_packages_offer_models(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of the entry point group sparring.models are found by name and listed; a broken one gives a warning."""
    info = tmp_path / "paper-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.2\n")
    entries = ("offered = gated_offered:gated", "broken = nowhere_found:f", "ids = gated_offered:gated")
    (info / "entry_points.txt").write_text("\n".join(["[sparring.models]", *entries]))
    (tmp_path / "gated_offered.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    run = build("uns", parts.train, {"dim": 4, "model.layers": 0}, model="offered")
    assert (run.setup.model.name, run.setup.model.options) == ("offered", {"layers": 0})
    assert main(["models", "--json"]) == 0
    shown, told = capsys.readouterr()
    assert [*json.loads(shown)] == [*MODELS, "offered"]
    assert json.loads(shown)["ids"]["source"] == "sparring"
    assert "'broken'" in told


def test_a_run_records_its_model(place: Path) -> None:
    """run.json has the file's full path, all options, and the usual settings; the card says how to load the run."""
    meta = json.loads((place / "runs/gated/run.json").read_text())
    setup = meta["setup"]
    assert setup["model"]["name"] == f"{(place / 'gated.py').resolve()}:gated"
    assert setup["model"]["options"] == {"layers": 2}
    assert (setup["batches"]["batch_size"], setup["training"]["lr"]) == (512, 0.01)
    assert setup["temperature"]["tau"] == own_setup(RECIPES["uns"]).temperature.tau
    assert meta["towers"]["query"].endswith("gated.py:Gated")
    card = (place / "runs/gated/README.md").read_text()
    assert "`uns` and the model `gated`" in card
    assert 'load("THIS_FOLDER", model="FILE.py:gated")' in card


def test_every_verb_opens_it(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """evaluate, recommend, export, diagnose, a service and load read the run with its model, and agree."""
    monkeypatch.chdir(place)
    run = "runs/gated"
    assert main(["evaluate", run, *MODEL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    result = json.loads(Path(run, "result.json").read_text())["test"]["metrics"]
    assert result["recall@10"] == pytest.approx(json.loads(json.dumps(found))["metrics"]["recall@10"])
    assert main(["recommend", run, *MODEL, "--query", "1003", "--k", "3", "--json"]) == 0
    assert main(["export", run, *MODEL, "--to", "parquet", "--out", "vectors"]) == 0
    assert main(["diagnose", run, *MODEL, "--samplers", "own,uns", "--queries", "9", "--draws", "2"]) == 0
    loaded = sparring.load(run, "gated.py:gated")
    table = pl.read_parquet(next(Path("vectors").glob("item*.parquet")))
    kept = loaded.ids.item_ids.encode(table["id"])  # items without a training pair are left out
    np.testing.assert_allclose(table["vector"].to_numpy(), loaded.item_vectors().numpy()[kept], rtol=1e-6)
    served = load_served(Path(run), "gated", model="gated.py:gated")
    assert torch.equal(served.trained.item_vectors(), loaded.item_vectors())
    assert loaded.recommend([1003], k=3).height == 3


def test_resume_is_as_if_never_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped after its first step and resumed equals an uninterrupted one bit by bit."""
    monkeypatch.chdir(place)
    save = training.Trainer.save

    def once(self: Any) -> None:
        save(self)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Trainer, "save", once)
        assert main([*trained("runs/stopped"), "--save-seconds", "0"]) == 130
    assert main(["train", "--resume", "--out", "runs/stopped", *MODEL, "--quiet", "--device", "cpu"]) == 0
    first, second = contents(place / "runs/gated"), contents(place / "runs/stopped")
    for name in (name for name in first if name.startswith("model.")):
        assert torch.equal(first[name], second[name]), name
    assert first["metrics"] == second["metrics"]


def test_resume_changes_neither_model_nor_options(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Another model or another option is one line; the same option is accepted."""
    monkeypatch.chdir(place)
    words = ["train", "--resume", "--out", "runs/gated", "--quiet", "--device", "cpu"]
    refused([*words, "--model", "history"], "gated", "history")
    refused([*words, *MODEL, "--set", "model.layers=1"], "model.layers=2", "not 1")
    assert main([*words, *MODEL, "--set", "model.layers=2"]) == 0


def test_a_folder_brings_no_code_along(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """The model that run.json names is imported by no command, unless the caller trusts the folder, and logged then."""
    monkeypatch.chdir(place)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'was here')!r}, 'w')\n" + FILE)
    folder = place / "runs/gated"
    meta = json.loads((folder / "run.json").read_text())
    changed = json.loads(json.dumps(meta))
    changed["setup"]["model"]["name"] = f"{evil}:gated"
    try:
        (folder / "run.json").write_text(json.dumps(changed))
        approve(folder)
        for command in (
            ["recommend", "runs/gated", "--query", "1003"],
            ["evaluate", "runs/gated"],
            ["train", "--resume", "--out", "runs/gated"],
            ["diagnose", "runs/gated", "--samplers", "own"],
        ):
            refused(command, "not part of Sparring", "evil.py:gated", "--trust")
        with pytest.raises(UserError) as error:
            load_served(folder, "gated")
        assert error.value.argument == "model"
        assert not (tmp_path / "was here").exists()
        copy = sparring.load("runs/gated", "gated.py:gated")  # the caller's copy is used instead
        assert not (tmp_path / "was here").exists()
        assert torch.equal(sparring.load("runs/gated", trust=True).item_vectors(), copy.item_vectors())
        assert (tmp_path / "was here").exists()
    finally:
        (folder / "run.json").write_text(json.dumps(meta))
        approve(folder)


def test_the_grid_of_recipes_and_models(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compare trains every recipe with every model, in rows of both names; a solved recipe has one row."""
    monkeypatch.chdir(place)
    words = ["compare", "--data", "interactions.parquet", "--seeds", "1", "--out", "compare/grid", "--quiet"]
    words += ["--device", "cpu", "--epochs", "1", "--set", "dim=4", "--recipes", "uns,popularity"]
    assert main([*words, "--models", "ids,gated.py:gated", "--set", "model.layers=2"]) == 0
    rows = json.loads(Path("compare/grid/quality.json").read_text())
    text = json.dumps(rows)
    for row in ("uns x ids", "uns x gated", "popularity"):
        assert row in text
    metas = {path.parent.parent.name: json.loads(path.read_text()) for path in Path("compare/grid").rglob("0/run.json")}
    assert {name: meta["setup"]["model"]["options"] for name, meta in metas.items()} == {
        "uns+ids": {},
        "uns+gated": {"layers": 2},
        "popularity": {},
    }


def test_the_baseline_of_a_grid(parts: Split) -> None:
    """The baseline is a row by name, or the first row of a recipe; by default that of uns."""
    data = (ComparedData("world", parts),)
    grid = Comparison(Path("nowhere"), data, ("xir", "uns"), models=("ids", "history"))
    assert grid.names == ("xir x ids", "xir x history", "uns x ids", "uns x history")
    assert grid.baseline_name == "uns x ids"
    for baseline, row in (("xir", "xir x ids"), ("uns x history", "uns x history")):
        assert dataclasses.replace(grid, baseline=baseline).baseline_name == row


# Settings


@pytest.mark.parametrize("name", MODELS)
def test_usual_settings_are_settings(name: str) -> None:
    """The usual settings of our models are shared settings; every recipe takes the model, or refuses it in a line."""
    assert all(find_setting(key) is not None for key in usual_settings(MODELS[name]))
    for recipe in RECIPES.values():
        if own_setup(recipe).training.optimizer == "solver":
            with pytest.raises(UserError, match="solved"):
                resolve(recipe, {"model": name})
        else:
            setup = resolve(recipe, {"model": name})[0]
            assert setup.model.name == name
            assert parse_setup(json.loads(json.dumps({"model": {"name": name, "options": {}}}))).model.name == name


def wide(inputs: Inputs, settings: ModelSettings, *, blocks: Annotated[int, "blocks", Range(1, 4)] = 2) -> Retriever:
    """A model without usual settings."""
    return towers(inputs, settings)


def test_precedence(parts: Split) -> None:
    """A model's settings replace the recipe's, not those of its method; the user's replace all."""

    @model(rows="pairs", lr=0.5, query_tower="history")
    def mine(inputs: Inputs, settings: ModelSettings) -> Retriever:
        return towers(inputs, settings)

    setup = resolve(find("dpr"), {"model": mine, "batch_size": 7})[0]
    assert setup.batches.rows == "queries"  # DPR's method
    assert (setup.training.lr, setup.model.query_tower, setup.batches.batch_size) == (0.5, "history", 7)
    assert resolve(find("dpr"), {"model": mine, "lr": "0.25"})[0].training.lr == 0.25
    assert resolve(find("uns"), {"model": mine}, Setup.of(lr=0.1, tau=0.7))[0].temperature.tau == 0.7
    assert resolve(find("quick"), {"model": "ids"})[0].model.init == "spectral"
    assert resolve(find("quick"), {"model": "sasrec"})[0].model.init == "normal"
    assert resolve(find("default"), {"model": "sasrec"})[0].batches.rows == "sequences"  # its rows are its model's
    run = build("uns", parts.train, {"dim": 4}, model=mine)  # a function that no name finds
    assert isinstance(run.model.query, HistoryTower)


def test_text_with_histories() -> None:
    """--model history with an encoder reads item texts and histories; --model text reads texts on both sides."""
    chosen = resolve(find("default"), {"model": "history", "encoder": "bag"})[0].model
    assert (chosen.query_tower, chosen.item_tower) == ("history", "text")
    text = resolve(find("dpr"), {"model": "text"})[0]
    assert (text.model.query_tower, text.model.item_tower) == ("text", "text")
    assert text.text.encoder is not None
    assert text.batches.rows == "queries"


def test_options_are_parsed_tuned_and_refused(parts: Split) -> None:
    """Options have the declared types; those with a Range are tuned; a wrong one is one line."""
    setup = resolve(find("uns"), {"model": wide, "model.blocks": "3"})[0]
    assert setup.model.options == {"blocks": 3}
    assert resolve(find("uns"), {"model": wide})[0].model.options == {"blocks": 2}
    assert "model.blocks" in space("uns", {"model": wide})
    for key, value, word in (("model.block", 1, "model.blocks"), ("model.blocks", "x", "whole number")):
        with pytest.raises(UserError, match=word):
            resolve(find("uns"), {"model": wide, key: value})
    with pytest.raises(UserError, match="history"):
        resolve(find("uns"), {"model": "histry"})


def no_settings(data: object) -> None: ...


def hides(inputs: Inputs, settings: ModelSettings, *, dim: int = 3) -> Retriever:
    return towers(inputs, settings)


def narrow(inputs: Inputs, settings: ModelSettings) -> Retriever:
    return Retriever(IdTower(inputs.n_queries, 3), IdTower(inputs.n_items, 3))


def nothing(inputs: Inputs, settings: ModelSettings) -> Retriever:
    return None  # type: ignore[return-value]


def fewer_queries(inputs: Inputs, settings: ModelSettings) -> Retriever:
    return Retriever(nn.Embedding(3, settings.dim), IdTower(inputs.n_items, settings.dim))


def fewer_items(inputs: Inputs, settings: ModelSettings) -> Retriever:
    return Retriever(IdTower(inputs.n_queries, settings.dim), IdTower(5, settings.dim), n_items=inputs.n_items)


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (no_settings, "inputs, settings"),
        (hides, "settings.dim"),
        (narrow, "dim=3"),
        (nothing, "NoneType"),
        (fewer_queries, "3 queries"),
        (fewer_items, "5 items"),
    ],
)
def test_wrong_models_are_one_line(function: Any, word: str, parts: Split) -> None:
    """Another signature, an option that hides a setting, another width or number of ids and no Retriever are one-line
    errors."""
    with pytest.raises(UserError, match=word) as error:
        build("uns", parts.train, {"dim": 8}, model=function)
    assert "\n" not in str(error.value)


def test_features_without_columns(parts: Split) -> None:
    """The model features names the columns that there are."""
    with pytest.raises(UserError, match="category"):
        build("uns", parts.train, model="features")


# Models that are passed to compose


def test_a_composed_model_trains_and_is_read_again(parts: Split, tmp_path: Path) -> None:
    """compose(model=...) trains the Retriever that it is given; `load` needs it again, since no name builds it."""
    n_queries, n_items = parts.train.n_queries, parts.train.n_items
    images = np.random.default_rng(0).normal(size=(n_items, 5))

    def made() -> Retriever:
        return Retriever(
            IdTower(n_queries, 4), Sum(IdTower(n_items, 4), Perceptron(Dense(images), (6,), 4)), score="dot"
        )

    given, term = made(), Term(1.0, Sampled(Uniform(n_items), 8))
    run = compose(parts.train, Setup.of(epochs=1, batch_size=64), term, model=given)
    assert run.model is given
    fitted = sparring.fit(run, parts, tmp_path / "run", k=(5,), device="cpu")
    assert np.isfinite(fitted.history[0]["loss"])
    loaded = sparring.load(tmp_path / "run", made())
    assert torch.equal(loaded.item_vectors(), run.model.item_vectors())
    assert "model=YOUR_RETRIEVER" in (tmp_path / "run" / "README.md").read_text()
    with pytest.raises(UserError, match="load"):
        sparring.load(tmp_path / "run")
    wrong: tuple[tuple[Any, Setup, str], ...] = (
        (nn.Linear(2, 2), Setup(), "Retriever"),
        (Retriever(IdTower(3, 4), IdTower(n_items, 4)), Setup(), "3 queries"),
        (Retriever(IdTower(n_queries, 4), IdTower(5, 4)), Setup(), "5 items"),
        (Retriever(IdTower(n_queries, 4), nn.Sequential(IdTower(n_items, 4)), n_items=7), Setup(), "7 items"),
        (made(), Setup.of(model_name="history"), "history"),
    )
    for other, setup, word in wrong:
        with pytest.raises(UserError, match=word):
            compose(parts.train, setup, term, model=other)


def reads_histories(data: Interactions, setup: Setup = Setup()) -> Run:
    """Queries as the mean of their last three items, by a tower of its own."""
    item = IdTower(data.n_items, 4)
    towers = Retriever(HistoryTower(item, histories(data), 3), item, "dot")
    return compose(data, setup, Term(1.0, Sampled(Uniform(data.n_items), 4)), model=towers)


def test_towers_of_ones_own_read_the_histories_of_the_run(tmp_path: Path) -> None:
    """A loaded run reads what came before the test part, validation items included, however its towers were built."""
    rows, rng = 90, np.random.default_rng(0)
    frame = {"user": rng.integers(0, 8, rows), "item": rng.integers(0, 12, rows), "time": np.arange(rows)}
    parts = sparring.split(from_frame(pl.DataFrame(frame)), "leave-last-out")
    train, before = parts.train, parts.joined().train
    assert before.time is not None
    run = build(reads_histories, train, {"epochs": 1, "batch_size": 16})
    fitted = sparring.fit(run, parts, tmp_path / "run", k=(5,), device="cpu")
    given = sparring.load(tmp_path / "run", reads_histories(train).model)
    for loaded in (given, sparring.load(tmp_path / "run", recipe=reads_histories)):
        table = loaded.model.item_vectors()
        for query in range(train.n_queries):
            taken = before.queries == query
            items = before.items[taken][np.argsort(before.time[taken])]
            found = loaded.model.query_vectors(torch.tensor([query]))[0]
            torch.testing.assert_close(found, table[torch.from_numpy(items[-3:]).long()].mean(0))
        assert parts.test is not None
        again = evaluate(loaded.model, parts.test, parts.seen_for("test"), (5,), ("ndcg",))
        assert fitted.test is not None
        assert again.metrics["ndcg@5"] == fitted.test.metrics["ndcg@5"]


def test_settings_name_the_model() -> None:
    """The model and its options are settings of the group model, and cannot be set by their flat names."""
    assert {"model_name", "model_options"} <= SETTINGS.keys()
    with pytest.raises(UserError, match="model_name"):
        resolve(find("uns"), {"model_name": "history"})
