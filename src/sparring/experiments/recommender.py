"""Recommender: fit, recommend, save and load in the manner of scikit-learn, over any table of users and items."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, Unpack

import polars as pl

from sparring.core.errors import UserError
from sparring.core.locks import LOCK
from sparring.data.columns import Columns
from sparring.data.interactions import Interactions, Split
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.data.table import AnyTable
from sparring.evaluation.ranking import Evaluation
from sparring.experiments.auto import auto
from sparring.models import finding as models
from sparring.models.named import Model
from sparring.recipes import finding
from sparring.recipes.finding import Recipe
from sparring.recipes.settings import build, given, is_solved, resolve, settings_of
from sparring.recipes.setup import parse_setup
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.trained import How, Trained, load

AUTO = "auto"
VALID = 0.1  # share of the pairs that choose the epoch
_PARAMS = ("recipe", "model", "split", "valid", "test", "refit", "warm_start", "budget", "device", "progress")
_CUTOFFS = (10, 20, 50)


class Recommender:
    """A recipe with its settings, which `fit` trains; then it recommends, as tables of user, rank, item and score.

    `recipe` is a name, a function, or "auto", which tries several within `budget`. `model` and further settings are
    those of `build`: Recommender("xir", dim=64, lam=0.2); for an option of the model write model__layers=2.
    `valid` is the share of the pairs that chooses the best epoch (0.1; 0 for a closed form, which has no epochs), and
    `refit` then trains on all pairs for that many epochs. `test` is the share that is only ranked at the end, for
    `test_`. `split` says how parts are drawn, as in `split`. `warm_start` starts from the vectors of the last `fit`, or
    of a run folder, for all users and items that it knows. `device` and `progress` are those of `sparring.fit`.

    Tables come back as pandas if pandas came in, otherwise as polars. `get_params`, `set_params` and scikit-learn's
    `clone` work; scikit-learn itself is not needed. `trained_` is the run that was fitted, `test_` its test metrics.

        users = sparring.Recommender("default", dim=128).fit(df).recommend([1042, 77], k=10)
    """

    trained_: Trained
    test_: Evaluation | None

    def __init__(
        self,
        recipe: str | Recipe = "default",
        *,
        model: str | Model | None = None,
        split: str = "auto",
        valid: float | None = None,
        test: float = 0.0,
        refit: bool = False,
        warm_start: bool | str | os.PathLike[str] = False,
        budget: str | int | None = None,
        device: str = "auto",
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        self.recipe, self.model, self.split, self.valid, self.test = recipe, model, split, valid, test
        self.refit, self.warm_start, self.budget = refit, warm_start, budget
        self.device, self.progress, self.settings = device, progress, settings
        self._pandas = False
        self._check()

    def __repr__(self) -> str:
        usual = Recommender().get_params()
        changed = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if name != "recipe" and (name not in usual or value != usual[name])
        ]
        return f"Recommender({', '.join([repr(self.recipe), *changed])})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name, settings included; `deep` is for scikit-learn and has no effect."""
        return {name: getattr(self, name) for name in _PARAMS} | self.settings

    def set_params(self, **params: Any) -> Self:
        """Change parameters or settings by name; a fitted model stays as it is until the next `fit`."""
        changed = type(self)(**{**self.get_params(), **params})
        for name in (*_PARAMS, "settings"):
            setattr(self, name, getattr(changed, name))
        return self

    def _check(self) -> None:
        """Refuse wrong settings before any data is read."""
        if self.recipe == AUTO:
            wrong = next((name for name in self._settings() if name not in ("select", "seed")), None)
            if wrong is not None:
                raise UserError(f"auto chooses {wrong} itself: it takes select and seed only; name a recipe to set it")
            for name in ("refit", "warm_start"):
                if getattr(self, name):
                    raise UserError(f"{name} is for a single recipe: auto decides it, so leave it out")
            return
        if self.budget is not None:
            raise UserError('budget is for recipe="auto", which trains more than one run')
        resolve(finding.find(self.recipe), self._settings())

    def _settings(self) -> dict[str, Any]:
        """The settings by the names that `build` takes."""
        named = {name.replace("__", "."): value for name, value in self.settings.items()}
        return named if self.model is None else {**named, "model": self.model}

    # Training

    def fit(
        self,
        data: str | os.PathLike[str] | AnyTable | Interactions | Split,
        *,
        items: str | os.PathLike[str] | AnyTable | None = None,
        users: str | os.PathLike[str] | AnyTable | None = None,
        catalogue: bool = False,
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        callbacks: Sequence[TrainingProgress] = (),
        **columns: Unpack[Columns],
    ) -> Self:
        """Train on interactions; returns itself.

        `data`, `items`, `users`, `catalogue` and the columns are those of `read`: a table of polars, pandas or Arrow, a
        sparse matrix of scipy, an array of pairs, or a path. It can also be Interactions, or a Split whose parts are
        taken as they are. `out` is a run folder, which every command of Sparring opens; without it the run is in a
        temporary folder until `save`. `callbacks` are those of `sparring.fit`: trackers, or functions of yours.
        """
        self._check()
        parts = self._parts(data, {"items": items, "users": users, "catalogue": catalogue, **columns})
        held = TemporaryDirectory(prefix="sparring-") if out is None else None
        folder = Path(held.name) / "run" if held is not None else Path(str(out))
        cutoffs = [k for k in _CUTOFFS if k <= parts.train.n_items] or [parts.train.n_items]
        if self.recipe == AUTO and callbacks:
            raise UserError("callbacks are for a single recipe: auto trains several runs, so leave them out")
        if self.recipe == AUTO:
            settings = self._settings()
            choice = auto(
                parts,
                folder,
                budget=self.budget or "10m",
                select=settings.get("select", f"ndcg@{min(20, parts.train.n_items)}"),
                seed=settings.get("seed", 0),
                k=cutoffs,
                device=self.device,
                overwrite=overwrite,
            )
            trained, test = load(folder), choice.test
        else:
            fitted = fit(
                build(self.recipe, parts.train, self._settings()),
                parts,
                folder,
                overwrite=overwrite,
                device=self.device,
                k=cutoffs,
                progress=self.progress,
                warm=self._warm(),
                refit=self.refit,
                callbacks=callbacks,
            )
            trained, test = load(folder, fitted.run.model.cpu()), fitted.test
        self._keep(trained, held)
        self.test_, self._pandas = test, _is_pandas(data)
        return self

    def _parts(self, data: Any, how: Mapping[str, Any]) -> Split:
        """The data as parts."""
        named = next((name for name, value in how.items() if value is not None and value is not False), None)
        if isinstance(data, Interactions | Split):
            if named is not None:
                raise UserError(f"{named} is for tables: pass it to sparring.read instead")
        else:
            data = read(data, **how)
        if isinstance(data, Split):
            return data
        seed = self.settings.get("seed", 0)
        return split(data, self.split, self._valid(), self.test, seed)

    def _valid(self) -> float:
        """The share of the validation part: a closed form without anything to choose needs none."""
        if self.valid is not None or self.recipe == AUTO:
            return VALID if self.valid is None else self.valid
        recipe = finding.find(self.recipe)
        return 0.0 if is_solved(recipe) and "epochs" not in settings_of(recipe) else VALID

    def _warm(self) -> Path | None:
        """The run to start from."""
        if not isinstance(self.warm_start, bool):
            return Path(self.warm_start)
        return self.trained_.folder if self.warm_start and self._is_fitted() else None

    def _keep(self, trained: Trained, held: TemporaryDirectory[str] | None) -> None:
        """Keep a run, and the temporary folder that it is in; that of an earlier run is deleted."""
        self.trained_, self._held = trained, held

    def __sklearn_is_fitted__(self) -> bool:
        return self._is_fitted()

    def _is_fitted(self) -> bool:
        return "trained_" in vars(self)

    def _fitted(self) -> Trained:
        if not self._is_fitted():
            raise UserError("this Recommender is not fitted: call fit(data) first, or Recommender.load(folder)")
        return self.trained_

    # Lists

    def recommend(
        self,
        users: Sequence[object] | Any = None,
        k: int = 10,
        *,
        with_seen: bool | None = None,
        ranking: How | None = None,
    ) -> Any:
        """The k best items of each user, all users if none are given: user, rank, item, title where known, score.

        Items that a user has taken are left out, unless the data keeps repeats; `with_seen` decides otherwise.
        """
        trained = self._fitted()
        asked: Any = trained.ids.query_ids.ids if users is None else users
        return self._table(trained.recommend(asked, k, with_seen, ranking).rename({"query": "user"}), users)

    def recommend_history(
        self,
        items: Sequence[object] | Any,
        k: int = 10,
        *,
        with_seen: bool | None = None,
        ranking: How | None = None,
    ) -> Any:
        """The k best items for a new user who has taken these items, oldest first: rank, item, title, score."""
        best = self._fitted().recommend_history(items, k, with_seen, ranking)
        return self._table(best.drop("query"), items)

    def similar_items(self, items: Sequence[object] | Any, k: int = 10) -> Any:
        """The k nearest items of each item: item, rank, similar, title where known, score."""
        return self._table(self._fitted().similar_items(items, k), items)

    def _table(self, table: pl.DataFrame, asked: object) -> Any:
        """A table of the kind that came in."""
        if not (self._pandas or _is_pandas(asked)):
            return table
        import pandas

        return pandas.DataFrame({name: table[name].to_numpy() for name in table.columns})

    # Files

    def save(self, folder: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Copy the run to a folder, which `load` and every command of Sparring open; returns the folder."""
        source, target = self._fitted().folder, Path(folder)
        if target.resolve() == source.resolve():
            return target
        if target.is_file() or (target.is_dir() and any(target.iterdir())):
            if not overwrite or not (target / "run.json").is_file():
                raise UserError(f"{target} is not empty: choose another folder, or overwrite=True if it holds a run")
            shutil.rmtree(target)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(LOCK), dirs_exist_ok=True)
        return target

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        model: str | Model | None = None,
        recipe: str | Recipe | None = None,
        trust: bool = False,
    ) -> Self:
        """Read a finished run, from `save` or `sparring train`, with its recipe and settings; see `sparring.load`."""
        trained = load(Path(folder), model, recipe=recipe, trust=trust)
        meta = trained.meta
        if "parts" in meta:
            made = cls(AUTO)
        else:
            function = recipe or (meta["recipe"] if trust or finding.is_ours(meta["recipe"]) else None)
            if function is None:
                raise UserError(f"{folder} was trained by the recipe {meta['recipe']}: pass recipe=... or trust=True")
            setup = parse_setup(meta["setup"])
            if model is not None:
                setup = setup.replaced(model_name=models.passed(model))
            settings = given(finding.find(function), setup, meta.get("arguments", {}))
            named = {name.replace(".", "__"): value for name, value in settings.items()}
            made = cls(function, **({**named, "model": model} if model is not None else named))
        made._keep(trained, None)
        made.test_ = None
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self._is_fitted():
            raise UserError(
                "a fitted Recommender is a run folder, not a pickle: save(folder), Recommender.load(folder)"
            )
        return vars(self)


def _is_pandas(table: object) -> bool:
    return type(table).__module__.partition(".")[0] == "pandas"
