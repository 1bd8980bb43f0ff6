"""Vectors as Parquet and towers as ONNX equal the model; unsupported exports raise clear errors."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli.main import main, parser
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.recipes.settings import build
from sparring.serving.export import onnx as towers
from sparring.serving.export import write_onnx, write_vectors
from sparring.training import trained as runs
from sparring.training.fitting import fit
from sparring.training.trained import Trained, load

TOWERS: dict[str, dict[str, object]] = {
    "id": {},
    "dot": {"score": "dot"},
    "bias": {"item_bias": True},
    "features": {"item_features": "category,tags", "hidden": "8,5"},
    "history": {"query_tower": "history", "history": 4},
    "attention": {"query_tower": "history", "history": 4, "pooling": "attention"},
    "history of features": {"query_tower": "history", "item_features": "category", "hidden": "8,5", "item_bias": True},
}


@pytest.fixture(scope="module")
def named_parts(parts: Split) -> Split:
    """The small world with text ids of queries and sparse numbers as items."""
    queries, items = (
        Vocabulary([f"u{i:02}" for i in range(parts.train.n_queries)]),
        Vocabulary(np.arange(parts.train.n_items) * 7 + 1000),
    )

    assert parts.train.item_table is not None
    tags = pl.Series([["new"] * (i % 2) + ["red", "blue"][: i % 3] for i in range(parts.train.n_items)])
    table = parts.train.item_table.with_columns(tags=tags)

    def renamed(data: Interactions | None) -> Interactions | None:
        return None if data is None else dataclasses.replace(data, query_ids=queries, item_ids=items, item_table=table)

    train = renamed(parts.train)
    assert train is not None
    return Split(train, renamed(parts.valid), renamed(parts.test))


@pytest.fixture(scope="module")
def trained(named_parts: Split, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """A finished run for every kind of tower that can be exported."""
    folder = tmp_path_factory.mktemp("export")
    quick = {"dim": 8, "epochs": 2, "batch_size": 64, "n": 16, "patience": None}
    for name, settings in TOWERS.items():
        fit(
            build("tables", named_parts.train, {**quick, **settings}),
            named_parts,
            folder / name,
            k=(10,),
            device="cpu",
        )
    return {name: load(folder / name) for name in TOWERS}


@pytest.mark.parametrize("name", ["id", "bias", "features", "history"])
def test_vectors_as_parquet_rank_as_the_model_does(trained: dict[str, Trained], name: str, tmp_path: Path) -> None:
    """Original ids, float32 vectors and all columns; inner products after reading rank as the run recommends."""
    run = trained[name]
    write_vectors(run, tmp_path / "vectors")
    items, queries = (pl.read_parquet(tmp_path / "vectors" / f"{side}.parquet") for side in ("items", "queries"))
    assert items.columns == ["id", "vector", "title", "category", "tags"]
    assert items.schema["vector"] == pl.Array(pl.Float32, run.model.dim)
    assert items["id"].to_list() == [1000 + 7 * i for i in range(40)]
    scores = queries["vector"].to_numpy() @ items["vector"].to_numpy().T
    for query in (0, 17, 59):
        expected = run.recommend([f"u{query:02}"], k=5, with_seen=True)
        assert queries["id"][query] == f"u{query:02}"
        assert (
            items["id"].to_numpy()[np.argsort(-scores[query], kind="stable")[:5]].tolist() == expected["item"].to_list()
        )
        assert np.sort(scores[query])[::-1][:5] == pytest.approx(expected["score"].to_numpy(), abs=1e-5)


@pytest.mark.parametrize("name", sorted(TOWERS))
def test_onnx_gives_the_vectors_of_the_model(trained: dict[str, Trained], name: str, tmp_path: Path) -> None:
    """Every item and query, by id or by history, through ONNX Runtime gives the vectors of the model."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    run = trained[name]
    paths, cannot = write_onnx(run, tmp_path)
    assert not cannot
    assert {path.name for path in paths} == {"query.onnx", "item.onnx", "query_ids.parquet", "item_ids.parquet"}
    item, query = (runtime.InferenceSession(str(tmp_path / f"{side}.onnx")) for side in ("item", "query"))
    vectors = item.run(["vectors"], {"ids": np.arange(40)})[0]
    assert vectors == pytest.approx(run.model.item_vectors().numpy(), abs=1e-5)
    expected = run.model.query_vectors(torch.arange(60)).numpy()
    if query.get_inputs()[0].name == "ids":
        assert query.run(None, {"ids": np.arange(60)})[0] == pytest.approx(expected, abs=1e-5)
        assert query.run(None, {"ids": np.array([], dtype=np.int64)})[0].shape == (0, run.model.dim)
    else:
        tower = run.model.query
        pasts = [tower.items[tower.start[u] : tower.start[u + 1]].tolist() for u in range(60)]
        longest = max(map(len, pasts))
        rows = np.array([[-1] * (longest - len(past)) + past for past in pasts])
        assert query.run(None, {"histories": rows})[0] == pytest.approx(expected, abs=1e-5)
        gaps = np.array([[3, -1, 5, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
        assert query.run(None, {"histories": gaps})[0] == pytest.approx(
            run.model.encode_histories(torch.from_numpy(gaps)).detach().numpy(), abs=1e-5
        )


def test_a_file_that_differs_is_not_kept(
    trained: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another epsilon and short vectors the export is rejected before it gets its name."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(towers, "NORM_EPS", 10.0)
    with pytest.raises(UserError, match="differ"):
        write_onnx(trained["id"], tmp_path)
    assert not list(tmp_path.glob("*.onnx*"))


def test_towers_that_cannot_be_written_are_named(trained: dict[str, Trained], tmp_path: Path) -> None:
    """With a custom tower the other one is written and a line names it; without any supported tower it is an error."""
    pytest.importorskip("onnxruntime")
    run = trained["id"]

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(60, 8))
            self.n = 60

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.weight[ids] + 1

    half = dataclasses.replace(run, model=type(run.model)(Own(), run.model.item))
    paths, unsupported = write_onnx(half, tmp_path)
    assert [path.name for path in paths] == ["item.onnx", "query_ids.parquet", "item_ids.parquet"]
    assert len(unsupported) == 1
    assert "query" in unsupported[0]
    with pytest.raises(UserError, match="query tower"):
        write_onnx(dataclasses.replace(run, model=type(run.model)(Own(), Own())), tmp_path / "none")


def test_a_file_runs_on_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of at most so many rows, joined in order; no row gives no vector."""
    runtime, sizes = pytest.importorskip("onnxruntime"), list[int]()

    def run(_: None, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        sizes.append(len(given["ids"]))
        return [2.0 * given["ids"][:, None]]

    session = SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name="ids")], run=run)
    monkeypatch.setattr(runtime, "InferenceSession", lambda *_, **__: session)
    monkeypatch.setattr(towers, "_ROWS", 3)
    assert towers.run_onnx(Path("any.onnx"), np.arange(8)).tolist() == [[2.0 * n] for n in range(8)]
    assert max(sizes) <= 3
    assert towers.run_onnx(Path("any.onnx"), np.arange(0)).shape == (0, 1)


def test_export_command(trained: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files go to --out, or into the run folder; the last line names them."""
    pytest.importorskip("onnxruntime")
    copy = Path(shutil.copytree(trained["history"].folder, tmp_path / "run"))
    assert main(["export", str(copy), "--to", "parquet"]) == 0
    assert (copy / "parquet" / "items.parquet").is_file()
    assert main(["export", str(copy), "--to", "onnx", "--out", str(tmp_path / "towers")]) == 0
    assert "checked against the model" in capsys.readouterr().out
    assert towers.run_onnx(tmp_path / "towers" / "item.onnx", np.arange(3)).shape == (
        3,
        9,
    )  # eight dimensions and the item bias


@pytest.mark.parametrize(
    ("words", "mention"),
    [
        (["--to", "csv"], "parquet"),
        (["--to", "parquet", "--address", "x"], "--out"),
        (["--to", "milvus"], "--address FILE.db"),
        (["--to", "pgvector"], "postgresql://"),
        (["--to", "pgvector", "--out", "x", "--address", "y"], "--address"),
        (["--to", "onnx", "--delete", "3"], "--delete"),
        (["--to", "onnx", "--with-queries"], "--with-queries"),
        (["--to", "opensearch", "--delete", "3"], "--address http://"),
        (["--to", "vespa", "--address", "x"], "--out"),
        (["--to", "vespa", "--table", "a-b"], "a-b"),
        (["--to", "qdrant", "--address", "x", "--check", "-1"], "--check"),
    ],
)
def test_bad_options_are_one_line(
    trained: dict[str, Trained],
    words: list[str],
    mention: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invalid targets and combinations raise one-line errors."""
    monkeypatch.delenv("SPARRING_DEBUG", raising=False)
    assert main(["export", str(trained["id"].folder), *words]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert mention in lines[0]


@pytest.mark.parametrize(
    ("target", "module", "extra"),
    [
        ("onnx", "onnxruntime", "onnx"),
        ("milvus", "pymilvus", "milvus"),
        ("pgvector", "psycopg", "pgvector"),
        ("qdrant", "qdrant_client", "qdrant"),
        ("lancedb", "lancedb", "lancedb"),
    ],
)
def test_extras_are_named(
    trained: dict[str, Trained],
    target: str,
    module: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If a package is missing, the error names the extra to install."""
    monkeypatch.delenv("SPARRING_DEBUG", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    where = ["--out", str(tmp_path / "x")] if target == "onnx" else ["--address", "x.db"]
    assert main(["export", str(trained["id"].folder), "--to", target, *where]) == 2
    assert f'pip install "sparring[{extra}]"' in capfd.readouterr().err


def test_commands_of_the_guide_parse() -> None:
    """The command line parses every sparring command of docs/guide/serving.md."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "serving.md").read_text()
    commands = re.findall(r"^sparring .*$", text, re.MULTILINE) + re.findall(r"`(sparring \w+ [^`]*--[^`]*)`", text)
    assert len(commands) >= 9
    for command in commands:
        _, rest = parser()[0].parse_known_args(shlex.split(command)[1:])
        assert not rest


def test_a_folder_that_is_a_file(trained: dict[str, Trained], tmp_path: Path) -> None:
    """--out that is a file raises an error, and the file stays."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="is a file"):
        write_vectors(trained["id"], tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    assert runs.load(trained["id"].folder)


def test_a_tower_beyond_the_limit_of_the_format_is_named(
    trained: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table larger than an ONNX file may be is left out with a line; the smaller one is written."""
    pytest.importorskip("onnxruntime")
    model = trained["id"].model
    query, item = (module.weight.numel() * 4 for module in (model.query, model.item))
    monkeypatch.setattr(towers, "_LIMIT", min(query, item))
    paths, unsupported = write_onnx(trained["id"], tmp_path)
    assert len([path for path in paths if path.suffix == ".onnx"]) == 1
    assert len(unsupported) == 1
    assert "limit" in unsupported[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write_onnx(trained["id"], tmp_path / "file")
