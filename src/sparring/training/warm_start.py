"""Warm starts: towers that start with the vectors of an earlier run, matched by original ids."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.data.interactions import Split, Vocabulary
from sparring.models.hashed import HashedIds
from sparring.models.histories import PastReader
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.training import trained
from sparring.training.folder import model_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class WarmStart:
    """The run that a model started from, and dense ids of the queries and items that take its trained vectors."""

    run: Path
    model: str  # the hash of the run's model file
    queries: np.ndarray
    items: np.ndarray
    leaked: int  # test pairs of this split that the run was trained on or chosen by

    def described(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "run": str(self.run),
            "model": self.model,
            "queries": len(self.queries),
            "items": len(self.items),
            "leaked": self.leaked,
        }

    def report(self) -> None:
        """Log where the vectors come from, and warn of test pairs that the earlier run has seen."""
        queries, items = len(self.queries), len(self.items)
        log.info("warm start from %s: vectors of %s queries and %s items", self.run, f"{queries:,}", f"{items:,}")
        if self.leaked:
            log.warning("%s test pairs were in its training data; test metrics will be optimistic", f"{self.leaked:,}")


def warm_start(model: Retriever, split: Split, run: str | Path) -> WarmStart:
    """Copy the vectors of an earlier run into new towers by original id; other rows stay.

    For id towers, query towers that read histories over one, and the item bias. Of hashed ids the complete tables are
    copied, so new ids start with the rows of others. Optimiser state is not copied.

        warm_start(run.model, split, "runs/yesterday");   fit(run, split, "runs/today")
    """
    before = trained.load(run, novelty=0)
    old, ids, train = before.model, before.ids, split.train
    _check(old, model, before.folder)
    queries = _both(ids.query_ids, train.query_ids, before.eligibility.queries)
    items = _both(ids.item_ids, train.item_ids, before.eligibility.items)
    with torch.no_grad():
        _copy(old.item, model.item, items)
        if old.item_bias is not None and model.item_bias is not None:
            _copy(old.item_bias, model.item_bias, items)
        if isinstance(model.query, PastReader):
            assert isinstance(old.query, PastReader)
            for name, parameter in _besides_items(model.query).items():
                parameter.copy_(_besides_items(old.query)[name])
            if model.query.item is not model.item:
                _copy(old.query.item, model.query.item, items)
        else:
            _copy(old.query, model.query, queries)
    digest = model_hash(before.folder)
    return WarmStart(before.folder.resolve(), digest, queries[1], items[1], trained.leaked_pairs(before, split))


def _check(old: Retriever, new: Retriever, folder: Path) -> None:
    """Raise unless the towers can be copied row by row."""
    for side, tower in (("query", new.query), ("item", new.item)):
        before = getattr(old, side)
        if (
            side == "query"
            and isinstance(tower, PastReader)
            and (tower.item is new.item or isinstance(tower.item, IdTower | HashedIds))
        ):
            same = type(before) is type(tower) and _shapes(before) == _shapes(tower)
            same = same and (before.item is old.item) == (tower.item is new.item)
        elif isinstance(tower, IdTower):
            same = isinstance(before, IdTower)
        elif isinstance(tower, HashedIds):
            same = isinstance(before, HashedIds) and before.buckets == tower.buckets
        else:
            hint = (
                f"; a text encoder starts from --set encoder={folder / 'encoder'}" if hasattr(tower, "encoder") else ""
            )
            raise UserError(f"cannot warm-start the {side} tower {type(tower).__name__}: only id towers can{hint}")
        if not same:
            kinds = type(before).__name__, type(tower).__name__
            raise UserError(
                f"cannot warm-start: the {side} tower of {folder} is a {kinds[0]}, "
                f"the new run has {'another' if kinds[0] == kinds[1] else 'a'} {kinds[1]}"
            )
    shapes = [(int(model.item.dim), model.score, model.item_bias is not None) for model in (old, new)]  # type: ignore[arg-type]
    if shapes[0] != shapes[1]:
        ours = [f"{dim} dimensions and {score} scores{', an item bias' if bias else ''}" for dim, score, bias in shapes]
        raise UserError(f"cannot warm-start: {folder} has {ours[0]}, the new run {ours[1]}")


def _both(old: Vocabulary, new: Vocabulary, blank: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(rows in the old table, rows in the new one) of ids that both know and the old run had trained."""
    row = old.encode(new.ids)
    here = np.flatnonzero((row >= 0) & ~np.isin(row, blank.numpy()))
    return row[here], here


def _copy(old: nn.Module, new: nn.Module, rows: tuple[np.ndarray, np.ndarray]) -> None:
    if isinstance(new, HashedIds):  # the same ids have the same rows
        new.load_state_dict(old.state_dict())
        return
    assert isinstance(old, IdTower)
    assert isinstance(new, IdTower)
    there, here = torch.from_numpy(rows[0]), torch.from_numpy(rows[1])
    new.weight[here.to(new.weight.device)] = old.weight[there].to(new.weight)


def _besides_items(tower: nn.Module) -> dict[str, Tensor]:
    """The parameters of a tower of histories besides those of the item tower."""
    return {name: parameter for name, parameter in tower.named_parameters() if not name.startswith("item.")}


def _shapes(tower: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in _besides_items(tower).items()}
