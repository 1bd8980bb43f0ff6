"""Neighbours of item-item matrices: the index that cuts a matrix to the strongest, and their export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.recipes.settings import build
from sparring.serving.checking import check
from sparring.serving.index import index_files
from sparring.serving.index.run_index import build_lists, open_index, open_lists
from sparring.training.fitting import fit
from sparring.training.trained import Trained, load

KEPT = 6


@pytest.fixture(scope="module")
def ease(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("lists") / "ease"
    fit(build("ease", parts.train, {"lam": 20.0}), parts, out, k=(10,), device="cpu")
    return load(out)


def cut(trained: Trained) -> np.ndarray:
    """(N, N): the matrix with the largest absolute weights of each row, the others 0."""
    weight = trained.model.query.weight.detach().numpy()  # type: ignore[union-attr]
    kept = np.zeros_like(weight)
    for row, values in enumerate(weight):
        for item in sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:KEPT]:
            kept[row, item] = values[item]
    return kept


def test_an_index_scores_by_the_strongest_neighbours(ease: Trained, parts: Split) -> None:
    """Scores are sums of the kept weights, negative ones too; recall is measured against the whole matrix."""
    found = build_lists(ease, KEPT, k=10, queries=40)
    model = open_lists(ease.model, ease.folder)
    baskets = np.zeros((parts.train.n_queries, parts.train.n_items))
    baskets[parts.train.queries, parts.train.items] = 1
    n = parts.train.n_queries
    scores = model.query_vectors(torch.arange(n)).numpy()
    np.testing.assert_allclose(scores, baskets @ cut(ease), atol=1e-5)
    exact = baskets @ ease.model.query.weight.detach().double().numpy()  # type: ignore[union-attr]
    asked = np.random.default_rng(0).permutation(n)[:40]
    same = [
        len(set(np.argsort(-exact[query], kind="stable")[:10]) & set(np.argsort(-scores[query], kind="stable")[:10]))
        for query in asked
    ]
    assert found["recall"] == pytest.approx(np.mean(same) / 10, abs=0.01)
    assert found["memory"] == parts.train.n_items * KEPT * 8
    assert check(ease.folder).problems == []


def test_a_damaged_or_foreign_index_is_refused(ease: Trained) -> None:
    """Hashes and the hash of the model are compared, and vectors are not expected."""
    build_lists(ease, KEPT, k=10, queries=10)
    with pytest.raises(UserError, match="neighbours"):
        open_index(ease.folder)
    meta = index_files.read_meta(ease.folder / "index")
    path = ease.folder / "index" / meta["files"]["neighbours"]["name"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="corrupt"):
        open_lists(ease.model, ease.folder)
    assert [problem.path for problem in check(ease.folder).problems] == [path]
    path.write_bytes(whole)
    with pytest.raises(UserError, match="neighbours"):
        build_lists(ease, 0)


def test_neighbours_are_exported(
    ease: Trained, tmp_path: Path, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """neighbours.parquet has each item's strongest neighbours by original id, the strongest first."""
    words = ["export", ease.folder, "--to", "parquet", "--out", tmp_path / "lists", "--neighbours", KEPT, "--quiet"]
    assert main([str(word) for word in words]) == 0
    table = pl.read_parquet(tmp_path / "lists" / "neighbours.parquet")
    assert table.columns == ["item", "neighbour", "score"]
    found = np.zeros((ease.model.n_items, ease.model.n_items))
    rows, columns = (ease.ids.item_ids.encode(table[name].to_list()) for name in ("item", "neighbour"))
    found[rows, columns] = table["score"].to_numpy()
    np.testing.assert_allclose(found, cut(ease), atol=1e-6)
    first = table.filter(pl.col("item") == ease.ids.item_ids.ids[3])["score"].abs().to_list()
    assert first == sorted(first, reverse=True)
    capfd.readouterr()
    assert main(["index", str(ease.folder), "--neighbours", "4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["neighbours"] == 4
    refused(["export", ease.folder, "--to", "onnx", "--neighbours", "3"], "--neighbours")
