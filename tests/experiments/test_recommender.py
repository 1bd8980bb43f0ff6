"""The estimator: any table in, the same run as `fit` trains, tables out, and scikit-learn's conventions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch
from sklearn.base import clone

import sparring
from sparring import Recommender, UserError
from sparring.data.interactions import Interactions, Split
from sparring.data.synthetic_world import SyntheticWorld
from support.settings import quick

QUICK = quick()


@pytest.fixture(scope="module")
def pairs(small_world: SyntheticWorld) -> pl.DataFrame:
    """The pairs of the small world, with text for users, and times."""
    data = small_world.interactions
    users = [f"u{user:02}" for user in data.queries.tolist()]
    return pl.DataFrame({"user": users, "item": data.items, "time": data.time})


@pytest.fixture(scope="module")
def fitted(pairs: pl.DataFrame) -> Recommender:
    return Recommender("tables", **QUICK, device="cpu").fit(pairs)


def vectors(recommender: Recommender) -> torch.Tensor:
    return recommender.trained_.model.item_vectors()


def test_it_is_the_run_that_fit_trains(pairs: pl.DataFrame, fitted: Recommender) -> None:
    """The vectors and lists are bitwise those of read, split, build and fit with the same settings."""
    parts = sparring.split(sparring.read(pairs), "auto", valid=0.1, test=0.0, seed=0)
    by_hand = sparring.fit(sparring.build("tables", parts.train, QUICK), parts, device="cpu")
    assert torch.equal(vectors(fitted), by_hand.run.model.item_vectors())
    best = fitted.recommend(["u03", "u10"], k=4)
    assert best.columns == ["user", "rank", "item", "score"]
    assert best.equals(by_hand.recommend(["u03", "u10"], k=4).rename({"query": "user"}))
    taken = set(pairs.filter(user="u03")["item"].to_list())
    assert not taken & set(best.filter(user="u03")["item"].to_list())
    assert fitted.recommend(k=3)["user"].n_unique() == pairs["user"].n_unique()


@pytest.mark.parametrize("kind", ["pandas", "arrow", "lazy", "csr", "array", "interactions", "split", "path"])
def test_every_kind_of_table_trains_the_same_model(small_world: SyntheticWorld, tmp_path: Path, kind: str) -> None:
    """The same pairs give the same vectors in any form; pandas comes back as pandas, all others as polars."""
    world = small_world.interactions
    pairs = pl.DataFrame({"user": world.queries, "item": world.items})
    pairs.write_parquet(tmp_path / "pairs.parquet")
    data = sparring.read(pairs)
    forms: dict[str, Any] = {
        "pandas": pd.DataFrame({"user": world.queries, "item": world.items}),
        "arrow": pairs.to_arrow(),
        "lazy": pairs.lazy(),
        "csr": scipy.sparse.csr_array((np.ones(len(world)), (world.queries, world.items))),
        "array": np.stack([world.queries, world.items], 1),
        "interactions": data,
        "split": sparring.split(data, valid=0.1, test=0.0),
        "path": tmp_path / "pairs.parquet",
    }
    expected, found = (Recommender("tables", **QUICK, device="cpu").fit(each) for each in (pairs, forms[kind]))
    assert torch.equal(vectors(found), vectors(expected))
    best, want = found.recommend([3, 5], k=3), expected.recommend([3, 5], k=3)
    if kind == "pandas":
        assert isinstance(best, pd.DataFrame)
        assert best.to_dict("list") == want.to_dict(as_series=False)
    else:
        assert best.equals(want)


def test_pandas_asks_and_pandas_answers(fitted: Recommender) -> None:
    """Users in a pandas Series get a pandas table, whatever the model was trained on."""
    best = fitted.recommend(pd.Series(["u03", "u10"]), k=2)
    assert isinstance(best, pd.DataFrame)
    assert best["user"].tolist() == ["u03", "u03", "u10", "u10"]


@pytest.mark.parametrize(
    "params",
    [{"recipe": "ease"}, {"recipe": "ials", "dim": 4, "epochs": 2}, {"model": "sasrec", "model__blocks": 1, **QUICK}],
    ids=["ease", "ials", "sasrec"],
)
def test_other_recipes_and_models_are_read_back(pairs: pl.DataFrame, tmp_path: Path, params: dict[str, Any]) -> None:
    """Closed forms, sweeps and named models recommend, list similar items and histories, and come back from disk."""
    made = Recommender(**params, device="cpu").fit(pairs)
    made.save(tmp_path / "run")
    again = Recommender.load(tmp_path / "run")
    for ask in (
        lambda each: each.recommend(["u01", "u02"], k=3),
        lambda each: each.similar_items([4, 7], k=3),
        lambda each: each.recommend_history([4, 7], k=3),
    ):
        assert len(ask(made)) >= 3
        assert ask(again).equals(ask(made))
    kept = {name: value for name, value in again.get_params().items() if name in params}
    assert kept == params
    assert (made.trained_.meta["data"].get("valid") is None) == (params.get("recipe") == "ease")


def test_a_closed_form_trains_on_all_pairs(pairs: pl.DataFrame) -> None:
    """EASE has no epoch to choose, so no pair is held out, unless a share is given."""
    every = Recommender("ease", device="cpu").fit(pairs).trained_.meta["data"]["train"]
    some = Recommender("ease", valid=0.2, device="cpu").fit(pairs).trained_.meta["data"]["train"]
    assert every == pairs.select("user", "item").n_unique()
    assert some < every


def test_auto_chooses(pairs: pl.DataFrame) -> None:
    """recipe="auto" spends its budget and recommends; settings that it chooses itself are refused."""
    chosen = Recommender("auto", budget=1, select="ndcg@5", device="cpu").fit(pairs)
    assert len(chosen.recommend(["u01"], k=3)) == 3
    with pytest.raises(UserError, match="auto chooses dim itself"):
        Recommender("auto", dim=8)
    with pytest.raises(UserError, match="budget"):
        Recommender("tables", budget=3)


def test_parameters_are_those_of_scikit_learn(fitted: Recommender) -> None:
    """get_params has parameters and settings, set_params changes them, and clone copies an unfitted estimator."""
    made = Recommender("xir", dim=16, valid=0.2)
    assert {"recipe": "xir", "dim": 16, "valid": 0.2, "test": 0.0}.items() <= made.get_params().items()
    copied = clone(made)
    assert copied is not made
    assert copied.get_params() == made.get_params()
    assert repr(made.set_params(dim=32, lam=0.3)) == "Recommender('xir', valid=0.2, dim=32, lam=0.3)"
    assert "trained_" not in vars(clone(fitted))
    assert pickle.loads(pickle.dumps(made)).get_params() == made.get_params()
    with pytest.raises(UserError, match="save"):
        pickle.dumps(fitted)


def test_wrong_names_are_refused_at_once() -> None:
    """A misspelt setting or recipe is one line with the nearest name, before any data is read; set_params changes
    nothing."""
    with pytest.raises(UserError, match="'epochs'"):
        Recommender("default", epoch=3)
    with pytest.raises(UserError, match="'default'"):
        Recommender("defualt")
    made = Recommender("xir", dim=16)
    with pytest.raises(UserError, match="lamm"):
        made.set_params(dim=8, lamm=1)
    assert made.get_params()["dim"] == 16
    with pytest.raises(UserError, match="not fitted"):
        made.recommend(["u01"])


def test_a_warm_start_continues(pairs: pl.DataFrame, fitted: Recommender, tmp_path: Path) -> None:
    """With warm_start a fit starts from the vectors of the last one, or of a run folder."""
    folder = fitted.save(tmp_path / "first")
    with pytest.raises(UserError, match="not empty"):
        fitted.save(folder)
    started = {"lr": 1e-9, "epochs": 1}
    for made in (Recommender.load(folder).set_params(warm_start=True, **started), clone(fitted)):
        if not made.warm_start:
            made.set_params(warm_start=folder, **started)
        assert torch.allclose(vectors(made.fit(pairs)), vectors(fitted), atol=1e-5)
    cold = clone(fitted).set_params(**started).fit(pairs)
    assert not torch.allclose(vectors(cold), vectors(fitted), atol=1e-2)


def test_the_test_part_is_measured(pairs: pl.DataFrame) -> None:
    """With a share `test` the test metrics are those of fit; a Split of one's own is taken as it is."""
    data: Interactions = sparring.read(pairs)
    parts: Split = sparring.split(data, valid=0.1, test=0.2)
    made = Recommender("tables", **QUICK, test=0.2, device="cpu").fit(pairs)
    given = Recommender("tables", **QUICK, device="cpu").fit(parts)
    assert made.test_ is not None
    assert given.test_ is not None
    assert made.test_.metrics == given.test_.metrics
    with pytest.raises(UserError, match="min_rating is for tables"):
        given.fit(parts, min_rating=3)


def test_a_recipe_of_ones_own(pairs: pl.DataFrame, tmp_path: Path) -> None:
    """A recipe in a file trains; its folder does not import it again unless the caller trusts it or names it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from sparring import Run, Setup, Term, compose\n"
        "from sparring.data import Interactions\n"
        "from sparring.negatives import InBatch\n"
        "def mine(data: Interactions, setup: Setup = Setup.of(dim=4, epochs=1), *, weight: float = 1.0) -> Run:\n"
        "    return compose(data, setup, Term(weight, InBatch()))\n"
    )
    made = Recommender(f"{file}:mine", weight=0.5, device="cpu").fit(pairs, out=tmp_path / "run")
    with pytest.raises(UserError, match="trust"):
        Recommender.load(tmp_path / "run")
    for again in (
        Recommender.load(tmp_path / "run", recipe=f"{file}:mine"),
        Recommender.load(tmp_path / "run", trust=True),
    ):
        assert again.get_params()["weight"] == 0.5
        assert again.recommend(["u01"], k=3).equals(made.recommend(["u01"], k=3))
