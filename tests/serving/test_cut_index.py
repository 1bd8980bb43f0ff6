"""Vectors cut to their first dimensions: in rankings, in an index, and in what is served from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn.functional import normalize

import sparring
from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.serving.index.run_index import open_index
from support.settings import quick_words


@pytest.fixture(scope="module")
def run(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose vectors of 8 dimensions can be cut to 3."""
    folder = tmp_path_factory.mktemp("cut")
    train = parts.train
    pl.DataFrame({"user_id": train.queries, "item_id": train.items}).write_parquet(folder / "pairs.parquet")
    words = ["train", "--data", str(folder / "pairs.parquet"), "--recipe", "ssl", "--quiet", "--no-baselines"]
    assert (
        main([*words, *quick_words(epochs=1, dim=8, matryoshka=3, score="cosine"), "--out", str(folder / "run")]) == 0
    )
    return folder / "run"


def short(vectors: torch.Tensor) -> torch.Tensor:
    return normalize(vectors[:, :3], dim=1)


def test_a_cut_run_ranks_by_short_vectors(run: Path) -> None:
    """Vectors of a cut run are the first dimensions at length 1, and its lists follow their products."""
    trained = sparring.load(run)
    cut = trained.cut(3)
    torch.testing.assert_close(cut.item_vectors(), short(trained.item_vectors()))
    ids = torch.arange(5)
    torch.testing.assert_close(cut.model.query_vectors(ids), short(trained.model.query_vectors(ids)))
    np.testing.assert_allclose(cut.model.table_queries(ids.numpy()), cut.model.query_vectors(ids).numpy(), rtol=1e-5)
    assert cut.model.dim == 3
    assert trained.model.dim == 8
    for wrong in (0, 9):
        with pytest.raises(UserError, match="8"):
            trained.cut(wrong)


def test_an_index_of_short_vectors_is_searched_and_served(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`index --dim` keeps the short vectors; recommend, the service and evaluate rank by them, equal to brute force."""
    from sparring.serving.http.served_run import load_served

    assert main(["index", str(run), "--dim", "3", "--kind", "exact", "--queries", "20", "--quiet"]) == 0
    index, trained = open_index(run), sparring.load(run)
    assert index.dim == 3
    q, items = short(trained.model.query_vectors(torch.arange(4))), short(trained.item_vectors())
    _, found = index.search(q.numpy(), 5)
    np.testing.assert_array_equal(found, (q @ items.T).topk(5).indices.numpy())
    served = load_served(run, "run")
    np.testing.assert_allclose(served.user_vectors(np.arange(4)), q.numpy(), rtol=1e-4, atol=1e-6)
    out = run.parent / "lists.parquet"
    words = ["recommend", str(run), "--all", "--index", "-k", "5", "--with-seen", "--out", str(out)]
    assert main(words) == 0
    first = str(trained.ids.query_ids.ids[0])
    lists = pl.read_parquet(out)
    name = lists.columns[0]
    assert lists.filter(pl.col(name).cast(pl.String) == first).height == 5
    capsys.readouterr()
    assert main(["evaluate", str(run), "-k", "5", "--dim", "3", "--json", "--no-baselines"]) == 0
    cut = json.loads(capsys.readouterr().out)["metrics"]
    assert main(["evaluate", str(run), "-k", "5", "--json", "--no-baselines"]) == 0
    assert cut != json.loads(capsys.readouterr().out)["metrics"]
    assert main(["evaluate", str(run), "--dim", "9"]) == 2
