"""Recipes, run folders, resume, diagnose and the command line with text towers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.experiments.diagnose import samplers
from sparring.experiments.diagnose.measures import diagnose
from sparring.recipes.finding import find
from sparring.recipes.settings import build, resolve
from sparring.training import trained as runs
from sparring.training.fitting import fit
from sparring.training.folder import read_meta
from sparring.training.loop import TrainingProgress
from support.settings import quick
from support.texts import text_parts, tiny_bert

QUICK = quick(encoder="bag", epochs=2, warmup=2)
pytestmark = pytest.mark.usefixtures("private_home")


@pytest.fixture(scope="module")
def parts() -> Split:
    return text_parts()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize(
    "recipe", ["default", "ssl_pop", "bir", "xir", "ada_tau", "slatk", "cbns", "midx", "dns", "full_softmax"]
)
@pytest.mark.parametrize("encoder", ["bag", "bert"])
def test_recipes_train_text_towers(parts: Split, bert: Path, recipe: str, encoder: str) -> None:
    """Every recipe trains text towers unchanged: the loss falls and the catalogue is ranked."""
    own: dict[str, dict[str, int]] = {"ada_tau": {"settle": 9}, "default": {"n": 16}}
    own |= {"cbns": {"opens": 2, "size": 64}, "midx": {"words": 4, "n": 8}, "xir": {"cache_size": 32}}
    settings = {**QUICK, "epochs": 3, **own.get(recipe, {})}
    settings |= {"encoder": str(bert), "lr": 0.003} if encoder == "bert" else {"lr": 0.05}
    fitted = fit(build(recipe, parts.train, settings), parts, k=(10,), device="cpu")
    # a memory that fills adds more and more negatives
    assert recipe == "cbns" or fitted.history[-1]["loss"] < fitted.history[0]["loss"]
    assert fitted.test is not None
    assert 0 <= fitted.test.metrics["recall@10"] <= 1


def test_text_tells_more_than_chance(parts: Split) -> None:
    """With queries that have the text of an item they took, items are found for queries that were never trained on."""
    train = parts.train.subset(parts.train.queries >= 15)
    test = parts.train.subset(parts.train.queries < 15)
    run = build("default", train, {**QUICK, "epochs": 12, "n": 16, "lr": 0.03, "dim": 32})
    fitted = fit(run, Split(train, None, test), k=(5,), device="cpu")
    assert fitted.test is not None
    assert fitted.test.metrics["hit@5"] > 0.6


def test_naming_an_encoder_asks_for_text_towers() -> None:
    """Both towers read text with suitable settings; explicit settings stay; a custom setup changes only the towers."""
    setup, _ = resolve(find("xir"), {"encoder": "bag", "lr": "0.5"})
    assert (
        setup.model.query_tower,
        setup.model.item_tower,
        setup.model.score,
        setup.training.lr,
        setup.training.schedule,
    ) == (
        "text",
        "text",
        "cosine",
        0.5,
        "linear",
    )
    assert resolve(find("xir"), {"encoder": "minilm"})[0].training.lr < setup.training.lr / 10
    own = setup.replaced(encoder=None, query_tower="id", item_tower="id", lr=0.25)
    kept, _ = resolve(find("xir"), {"encoder": "bag", "query_tower": "id"}, own)
    assert (kept.model.query_tower, kept.model.item_tower, kept.training.lr) == ("id", "text", 0.25)
    again, _ = resolve(find("xir"), {"encoder": "bag"}, setup)
    assert again == setup
    assert resolve(find("xir"), {"encoder": "none"})[0].model.query_tower == "id"


@pytest.mark.parametrize("gpu", [True, False])
def test_auto_is_a_bag_without_a_gpu(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is a bag without a GPU and a transformer with one; run.json records the choice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert resolve(find("ssl"), {"encoder": "auto"})[0].text.encoder == ("minilm" if gpu else "bag")


@pytest.mark.parametrize("cold", [True, False])
def test_the_command_line_reads_texts_where_nothing_else_helps(parts: Split, tmp_path: Path, cold: bool) -> None:
    """Without an encoder, towers read text if no test query is trained on, and ids otherwise."""
    data = parts.train
    assert data.query_table is not None
    assert data.item_table is not None
    test = data.queries < 15 if cold else np.arange(len(data)) % 5 == 0
    rows = {"user_id": data.queries, "item_id": data.items, "split": np.where(test, "test", "train")}
    pl.DataFrame(rows).write_parquet(tmp_path / "pairs.parquet")
    pl.DataFrame({"user_id": range(60), "text": data.query_table["text"]}).write_parquet(tmp_path / "queries.parquet")
    pl.DataFrame({"item_id": range(40), "text": data.item_table["text"]}).write_parquet(tmp_path / "items.parquet")
    words = [
        "train",
        "--data",
        str(tmp_path / "pairs.parquet"),
        "--items",
        str(tmp_path / "items.parquet"),
        "--epochs",
        "1",
        "--quiet",
    ]
    words += [
        "--queries",
        str(tmp_path / "queries.parquet"),
        "--set",
        "dim=8",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    setup = read_meta(tmp_path / "run")["setup"]
    encoder = "minilm" if torch.cuda.is_available() else "bag"
    found = setup["model"]["query_tower"], setup["text"]["encoder"]
    assert found == (("text", encoder) if cold else ("history", None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder": None, "query_tower": "text"}, "needs an encoder"),
        ({"pooling": "attention"}, "pooling=attention"),
        ({"encoder": None, "query_tower": "id", "item_tower": "id", "pooling": "cls"}, "pooling=cls"),
        ({"item_features": "category"}, "item_features"),
        ({"max_len": 0}, "max_len"),
        ({"encoder": None, "item_text": "title"}, "item_tower"),
        ({"item_text": "titel"}, "'titel'; .* title, category, text"),
        ({"encoder": "no/such/encoder"}, "no/such/encoder"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parts: Split, changes: dict[str, Any], words: str) -> None:
    """A one-line error names the setting."""
    with pytest.raises(UserError, match=words) as error:
        build("ssl", parts.train, {**QUICK, **changes})
    assert len(str(error.value).splitlines()) == 1


def test_what_a_text_run_is_asked_wrongly(parts: Split, tmp_path: Path) -> None:
    """An unknown id, an unknown side and an empty text raise one line each; the card mentions new texts."""
    fit(build("ssl", parts.train, QUICK), parts, tmp_path / "run", k=(10,), device="cpu")
    run = runs.load(tmp_path / "run")
    with pytest.raises(UserError, match="recommend_text"):
        run.recommend([999999])
    with pytest.raises(UserError, match='side is \'doc\'; it must be "query" or "item"'):
        run.encode_texts(["x"], "doc")  # type: ignore[arg-type]
    for blank in ("", " \n", None):
        with pytest.raises(UserError, match="no known tokens"):
            run.recommend_text(["red shoe", blank])  # type: ignore[list-item]
    with pytest.raises(UserError, match="text 1 is 7, not a text"):
        run.encode_texts(["a", 7], "query")  # type: ignore[list-item]
    assert run.encode_texts([""], "item").shape == (1, 8)
    assert "new queries by their texts: `recommend_text`" in (tmp_path / "run" / "README.md").read_text()


def test_texts_on_one_side(parts: Split) -> None:
    """Ids or histories on the query side, texts on the item side."""
    for query in ("id", "history"):
        run = build("default", parts.train, {**QUICK, "query_tower": query, "n": 16})
        fit(run, parts, k=(10,), device="cpu")
        with pytest.raises(ValueError, match="query tower"):
            run.model.encode_texts(["red"])
        assert run.model.encode_texts(["red"], "item").shape == (1, 8)


def test_a_bert_run_is_read_back_without_its_source(parts: Split, bert: Path, tmp_path: Path) -> None:
    """The folder alone gives bitwise the trained vectors, recommends for new texts, and opens in transformers."""
    import transformers

    source = Path(shutil.copytree(bert, tmp_path / "source"))
    for share in (True, False):
        run = build("default", parts.train, {**QUICK, "encoder": str(source), "n": 16, "share_encoder": share})
        out = tmp_path / f"run{share}"
        fit(run, parts, out, k=(10,), device="cpu")
        shutil.move(source, tmp_path / "gone")
        trained = runs.load(out)
        assert torch.equal(trained.model.item_vectors(), run.model.item_vectors())
        assert torch.equal(trained.model.query_vectors(torch.arange(60)), run.model.query_vectors(torch.arange(60)))
        folder = out / ("encoder" if share else "item_encoder")
        hidden = (
            transformers.AutoModel.from_pretrained(folder)
            .eval()(**transformers.AutoTokenizer.from_pretrained(folder)("red hat", return_tensors="pt"))
            .last_hidden_state[0]
        )
        want = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        torch.testing.assert_close(trained.encode_texts(["red hat"], "item")[0], want, rtol=1e-4, atol=1e-5)
        shutil.move(tmp_path / "gone", source)


def test_recommend_for_a_new_text(parts: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranking is by inner product with the text's vector, also on the command line; an id tower raises an error."""
    run = build("default", parts.train, {**QUICK, "n": 16})
    fit(run, parts, tmp_path / "run", k=(10,), device="cpu")
    trained = runs.load(tmp_path / "run")
    query = trained.encode_texts(["warm wool coat"], "query")[0].double().numpy()
    scores = trained.model.item_vectors().double().numpy() @ query
    table = trained.recommend_text(["warm wool coat", "lamp"], k=7)
    assert (
        table.filter(pl.col("query") == "warm wool coat")["item"].to_list()
        == np.argsort(-scores, kind="stable")[:7].tolist()
    )
    capsys.readouterr()
    assert main(["recommend", str(tmp_path / "run"), "--text", "warm wool coat", "-k", "7", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["item"] for row in told] == np.argsort(-scores, kind="stable")[:7].tolist()
    assert trained.recommend([3], k=2)["query"].to_list() == [3, 3]
    fit(build("default", parts.train, {"dim": 4, "epochs": 1, "n": 4}), parts, tmp_path / "ids", k=(10,), device="cpu")
    assert main(["recommend", str(tmp_path / "ids"), "--text", "lamp"]) == 2
    assert "encoder=bag" in capsys.readouterr().err
    assert main(["recommend", str(tmp_path / "run"), "--text", "lamp", "--query", "3"]) == 2


def test_a_run_is_read_back_without_the_extra(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bag of hashed words needs neither tokenizers nor transformers, in training and afterwards."""
    from sparring.models import encoders

    monkeypatch.setattr(encoders, "package_folder", lambda name: None)
    fit(build("default", parts.train, {**QUICK, "n": 16}), parts, tmp_path / "run", k=(10,), device="cpu")
    code = f"""
import sys
sys.modules |= dict.fromkeys(("tokenizers", "transformers", "wordllama"))
from sparring import load
print(load({str(tmp_path / "run")!r}).recommend_text(["red hat"], k=3)["item"].to_list())
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert json.loads(found.stdout) == runs.load(tmp_path / "run").recommend_text(["red hat"], k=3)["item"].to_list(), (
        found.stderr
    )


class Killed(BaseException):
    """Simulates a kill."""


@pytest.mark.parametrize("encoder", ["bag", "bert"])
def test_resumed_is_never_stopped(parts: Split, bert: Path, tmp_path: Path, encoder: str) -> None:
    """Stopped inside or between epochs, with dropout in the transformer and with chunks, a resumed run is bitwise
    identical and the global random state is untouched."""
    settings = {**QUICK, "encoder": encoder if encoder == "bag" else str(bert), "n": 16, "epochs": 3, "chunk": 40}

    def go(out: Path, stop: set[tuple[int, int]], resume: bool) -> None:
        def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
            if (epoch, done) in stop:
                stop.remove((epoch, done))
                raise Killed
            return done == 3

        fit(
            build("default", parts.train, settings),
            parts,
            out,
            k=(10,),
            device="cpu",
            resume=resume,
            progress=TrainingProgress(step=step, epoch=lambda record: True),
        )

    go(tmp_path / "whole", set(), False)
    stops = {(0, 5), (1, 1), (1, 4), (2, 6)}
    torch.manual_seed(5)
    for _ in range(4):
        torch.rand(3)  # the global state differs at every start
        with pytest.raises(Killed):
            go(tmp_path / "parts", stops, True)
    before = torch.get_rng_state()
    go(tmp_path / "parts", stops, True)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("model", "checkpoint"):
        whole, again = (
            files.read_tensors(tmp_path / folder / f"{name}.safetensors")[0] for folder in ("whole", "parts")
        )
        assert whole.keys() == again.keys()
        assert all(torch.equal(whole[key], again[key]) for key in whole)


def test_diagnose_reads_a_text_run(parts: Split, bert: Path, tmp_path: Path) -> None:
    """Text runs and other negatives on them can be measured, and the full softmax has no bias."""
    fit(
        build("default", parts.train, {**QUICK, "encoder": str(bert), "n": 16, "precision": "float32"}),
        parts,
        tmp_path / "run",
        k=(10,),
        device="cpu",
    )
    own = samplers.load_for_diagnosis(tmp_path / "run", parts)
    assert diagnose("own", own, parts, queries=32, draws=4).gradient.cosine > 0.5
    full = samplers.with_negatives_of("full_softmax", own, parts)
    assert diagnose("full_softmax", full, parts, queries=32, draws=4).gradient.bias < 1e-3


def test_compare_works_with_texts(parts: Split, tmp_path: Path) -> None:
    """`sparring compare --set encoder=bag` on tables with a text column gives two recipes, a table and a page."""
    rows = {"user_id": parts.train.queries, "item_id": parts.train.items}
    pl.DataFrame(rows).write_parquet(tmp_path / "pairs.parquet")
    for side, name, table in (
        ("user_id", "queries", parts.train.query_table),
        ("item_id", "items", parts.train.item_table),
    ):
        assert table is not None
        pl.DataFrame({side: range(len(table)), "text": table["text"]}).write_parquet(tmp_path / f"{name}.parquet")
    words = ["compare", "--data", str(tmp_path / "pairs.parquet"), "--items", str(tmp_path / "items.parquet")]
    words += ["--queries", str(tmp_path / "queries.parquet"), "--recipes", "ssl_pop,bir", "--seeds", "2", "--quiet"]
    for setting in ("encoder=bag", "dim=8", "epochs=1", "batch_size=64"):
        words += ["--set", setting]
    assert main([*words, "--metrics", "recall@5,ndcg@5", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    assert any((tmp_path / "out").glob("*.html"))
