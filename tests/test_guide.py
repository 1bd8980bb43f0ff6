"""The Python of the guide runs as written, in a folder with small files of the names that it uses."""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import sparring
from sparring.data import make_world

GUIDE = Path(__file__).parents[1] / "docs" / "guide"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """interactions.parquet, with user 1042 and items 17 and 23; ratings.csv and movies.csv; a run in runs/first."""
    place = tmp_path_factory.mktemp("guide")
    data = make_world(60, 80, exposure=0.5, relevant=0.4, seed=3).interactions
    pairs = pl.DataFrame({"user_id": data.queries + 1000, "item_id": data.items, "timestamp": np.arange(len(data))})
    pairs.write_parquet(place / "interactions.parquet")
    pairs.with_columns(rating=pl.Series(np.arange(len(data)) % 2 + 4)).write_csv(place / "ratings.csv")
    pl.DataFrame({"item_id": np.arange(80), "title": [f"film {i}" for i in range(80)]}).write_csv(place / "movies.csv")
    split = sparring.split(data, "random", seed=0)
    sparring.fit(sparring.build("uns", split.train, {"dim": 4, "epochs": 1}), split, place / "runs/first", device="cpu")
    return place


@pytest.mark.parametrize("page", ["data", "python", "train", "recipes", "models", "fuse", "serving"])
def test_python_of_a_page_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page run in order in one namespace."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": page}
    if page == "serving":
        if find_spec("faiss") is None:
            pytest.skip("faiss is not installed")
        sparring.serving.build_index(sparring.load("runs/first"), k=10)
        names |= {"q": np.ones((1, 4), np.float32), "vector": np.ones((1, 4), np.float32)}
        names |= {"in_stock": np.arange(40), "recalled": np.array([5])}
    blocks = re.findall(r"```python\n(.*?)```", (GUIDE / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    try:
        for block in blocks:
            exec(compile(block, f"{page}.md", "exec"), names)
    finally:
        logging.getLogger("sparring").setLevel(logging.NOTSET)  # a page sets a level
