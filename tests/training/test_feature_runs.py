"""Runs whose towers read columns, tags and vectors of files, on both sides: trained, read again, resumed, refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli.main import main
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.models.parts import DescribedHistory, FeatureTower
from sparring.recipes.settings import build
from sparring.serving.http.placement import ItemPlacer
from sparring.training.fitting import fit
from sparring.training.trained import load

QUICK = {"dim": 6, "epochs": 2, "batch_size": 64, "n": 8}
ITEMS = {"item_features": "category,tags", "hidden": "5"}


@pytest.fixture(scope="module")
def described(parts: Split) -> Split:
    """The small world with tags of items and a column of queries."""
    n_queries, n_items = parts.train.n_queries, parts.train.n_items
    tags = [["new"] * (i % 2) + ["red", "blue"][: i % 3] for i in range(n_items)]
    assert parts.train.item_table is not None
    items = parts.train.item_table.with_columns(tags=pl.Series(tags))
    queries = pl.DataFrame({"country": ["de", "fr", None] * (n_queries // 3)})
    known = [part for part in (parts.train, parts.valid, parts.test) if part is not None]
    return Split(*(replace(part, item_table=items, query_table=queries) for part in known))


@pytest.fixture
def vectors(parts: Split, tmp_path: Path) -> Path:
    """A file with one vector per item, in the order of the ids."""
    path = tmp_path / "images.npy"
    np.save(path, np.random.default_rng(0).normal(size=(parts.train.n_items, 3)))
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"item_tower": "features"},
        {"query_features": "country"},
        {"query_features": "country", "query_tower": "features"},
        {"query_features": "country", "query_tower": "history"},
        {"query_features": "country", "model": "sasrec"},
    ],
)
def test_a_run_is_read_again_without_its_files(
    described: Split, vectors: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    """A loaded model has bitwise the vectors of the trained one, after the file of vectors is gone."""
    run = build("uns", described.train, {**QUICK, **ITEMS, "item_vectors": str(vectors), **settings})
    fitted = fit(run, described, tmp_path / "run", k=(5,), device="cpu")
    assert np.isfinite(fitted.history[-1]["loss"])
    vectors.unlink()
    loaded = load(tmp_path / "run").model
    queries = torch.arange(described.train.n_queries)
    assert torch.equal(loaded.item_vectors(), run.model.item_vectors())
    assert torch.equal(loaded.query_vectors(queries), run.model.query_vectors(queries))
    assert loaded.dim == 6
    assert isinstance(loaded.item, FeatureTower)
    assert ("IdTower" in [type(part).__name__ for part in loaded.item.inputs]) is ("item_tower" not in settings)
    kinds: dict[object, type] = {"history": DescribedHistory, "features": FeatureTower}
    if "query_features" in settings:
        kind = "history" if "model" in settings else settings.get("query_tower")
        assert isinstance(loaded.query, kinds.get(kind, FeatureTower))


def test_resume_notices_other_vectors(described: Split, vectors: Path, tmp_path: Path) -> None:
    """A run is not continued with vectors that have changed since it started."""
    settings = {**QUICK, "item_vectors": str(vectors), "epochs": 1}
    fit(build("uns", described.train, settings), described, tmp_path / "run", k=(5,), device="cpu")
    np.save(vectors, np.load(vectors) + 1)
    with pytest.raises(UserError, match="vectors"):
        fit(build("uns", described.train, settings), described, tmp_path / "run", k=(5,), device="cpu", resume=True)


def test_vectors_are_matched_by_ids(described: Split, tmp_path: Path) -> None:
    """FILE.npy:IDS gives each item the row of its id; an item without one has zeros."""
    ids = described.train.item_ids.ids
    pl.DataFrame({"item_id": ids.reverse()[1:]}).write_parquet(tmp_path / "ids.parquet")
    array = np.arange(2 * (len(ids) - 1), dtype=np.float32).reshape(-1, 2)
    np.save(tmp_path / "v.npy", array)
    place = f"{tmp_path / 'v.npy'}:{tmp_path / 'ids.parquet'}"
    tower = build("uns", described.train, {**QUICK, "item_vectors": place}).model.item
    assert isinstance(tower, FeatureTower)
    found = tower.inputs[-1](torch.arange(len(ids)))
    assert torch.equal(found[:-1], torch.from_numpy(array[::-1].copy()))
    assert not found[-1].any()


def test_bad_columns_and_vectors_are_one_line(described: Split, tmp_path: Path) -> None:
    """A column that is not there, another number of rows, NaN, a missing file and nothing to read are one line each."""
    n_items = described.train.n_items
    broken = np.zeros((n_items, 2))
    broken[7, 1] = np.nan
    np.save(tmp_path / "nan.npy", broken)
    np.save(tmp_path / "short.npy", broken[:-1])
    odd = {
        "words": np.full((n_items, 2), "a"),
        "digits": np.full((n_items, 2), "1"),
        "complex": np.ones((n_items, 2), complex),
        "dates": np.zeros((n_items, 2), "datetime64[s]"),
        "empty": np.zeros((n_items, 0)),
        "huge": np.full((n_items, 2), 1e300),
        "objects": np.full((n_items, 2), None),
    }
    for name, array in odd.items():
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
    said = {
        "words": "holds <U1, not numbers",
        "digits": "holds <U1, not numbers",
        "complex": "holds complex128, not numbers",
        "dates": "holds datetime64",
        "empty": "has the shape",
        "huge": "has a value that is not finite",
        "objects": "is not a readable .npy array: it holds no numbers",
    }
    cases: list[tuple[dict[str, object], str]] = [
        ({"item_features": "colour"}, "colour"),
        ({"query_features": "colour"}, "colour"),
        ({"item_vectors": str(tmp_path / "nan.npy")}, "not finite"),
        ({"item_vectors": str(tmp_path / "short.npy")}, f"{n_items - 1} rows"),
        ({"item_vectors": str(tmp_path / "no.npy")}, "no such file"),
        ({"item_tower": "features"}, "item_features"),
        ({"query_tower": "features"}, "query_features"),
        ({"hidden": "0"}, "hidden"),
        ({"feature_dim": "0"}, "feature_dim"),
        ({"query_features": "country", "encoder": "bag"}, "query_features"),
    ]
    cases += [({"item_vectors": str(tmp_path / f"{name}.npy")}, rf"{name}\.npy {word}") for name, word in said.items()]
    for settings, word in cases:
        with pytest.raises(UserError, match=word) as error:
            build("uns", described.train, {**QUICK, **settings})
        assert "\n" not in str(error.value)
    bare = replace(described.train, query_table=None)
    with pytest.raises(UserError, match="--queries"):
        build("uns", bare, {**QUICK, "query_features": "country"})


def test_the_command_line_writes_nothing_for_bad_vectors(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Vectors of another number of rows than items: exit 2, and no run folder."""
    pl.DataFrame({"user": [1, 1, 2, 2], "item": [10, 20, 20, 30]}).write_csv(tmp_path / "pairs.csv")
    np.save(tmp_path / "v.npy", np.zeros((2, 3)))
    words = ["train", "--data", tmp_path / "pairs.csv", "--recipe", "uns", "--model", "features"]
    out = ["--out", tmp_path / "run", "--device", "cpu", "--test", "0", "--valid", "0"]
    refused([*words, "--set", f"item_vectors={tmp_path / 'v.npy'}", *out], "2 rows for 3 items")
    refused([*words, *out], "item_vectors=FILE.npy")
    assert not (tmp_path / "run").exists()
    np.save(tmp_path / "v.npy", np.eye(3))
    words += ["--set", f"item_vectors={tmp_path / 'v.npy'}", "--set", "epochs=1", "--set", "select=ndcg@2", "--quiet"]
    assert main([str(word) for word in (*words, *out, "--k", "2")]) == 0


def test_new_items_are_placed_by_their_columns(described: Split, vectors: Path, tmp_path: Path) -> None:
    """A new item with the columns of a known one differs from it by the id and the vector alone, which are means."""
    run = build("uns", described.train, {**QUICK, **ITEMS, "item_vectors": str(vectors), "score": "dot"})
    fit(run, described, tmp_path / "run", k=(5,), device="cpu")
    trained = load(tmp_path / "run")
    table, tower = trained.ids.item_table, trained.model.item
    assert table is not None
    assert isinstance(tower, FeatureTower)
    placer = ItemPlacer(trained, "any")
    every = torch.arange(tower.n)
    for item in (0, 5):
        row: dict[str, Any] = table.row(item, named=True)
        parts = [part(torch.tensor([item])) for part in tower.inputs]
        parts[0], parts[-1] = (tower.inputs[at](every).mean(0, keepdim=True) for at in (0, -1))
        want = tower.layers(torch.cat(parts, 1))[0].detach().numpy()
        found = placer.from_columns({name: row[name] for name in ("category", "tags")})
        assert found is not None
        np.testing.assert_allclose(found[: len(want)], want, rtol=1e-4, atol=1e-5)
    unknown = placer.from_columns({"category": "nowhere", "tags": ["none"]})
    assert unknown is not None
    assert np.isfinite(unknown).all()
