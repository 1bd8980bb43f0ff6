"""A warm start: towers that begin with the vectors of an earlier run, for all that both know by its original id."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.data.interactions import Split, Vocabulary
from sparring.data.pairs import pair_keys
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryTower, IdTower
from sparring.training import trained


@dataclass(frozen=True, eq=False)
class Warm:
    """What a model began with: the run, and dense ids of queries and items whose vectors that run had trained."""

    run: Path
    model: str  # SHA-256 of the run's model file
    queries: np.ndarray
    items: np.ndarray
    known: int  # test pairs of this split that the run was trained on or chosen by

    def described(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "run": str(self.run),
            "model": self.model,
            "queries": len(self.queries),
            "items": len(self.items),
            "known": self.known,
        }

    def __str__(self) -> str:
        line = f"starting from {self.run}: vectors of {len(self.queries):,} queries and {len(self.items):,} items"
        return line + (
            f"; it was trained on {self.known:,} pairs that are tested here, so the test flatters" if self.known else ""
        )


def warm_start(model: Retriever, split: Split, run: str | Path) -> Warm:
    """Copy the vectors of an earlier run into new towers, row by row of original ids; what it does not know, or never trained, stays.

    For tables of free vectors, query towers that read histories over one, and the item bias. State of optimisers is not taken over.

        run = recipes.default(split.train);   warm_start(run.model, split, "runs/yesterday");   fit(run, split, "runs/today")
    """
    before = trained.load(run)
    old, ids, train = before.model, before.ids, split.train
    _check(old, model, before.folder)
    queries = _both(ids.query_ids, train.query_ids, before.offers.queries)
    items = _both(ids.item_ids, train.item_ids, before.offers.items)
    with torch.no_grad():
        _copy(old.item, model.item, items)
        if old.item_bias is not None and model.item_bias is not None:
            _copy(old.item_bias, model.item_bias, items)
        if isinstance(model.query, HistoryTower):
            for name, parameter in _own(model.query).items():
                parameter.copy_(_own(old.query)[name])
        else:
            _copy(old.query, model.query, queries)
    with open(before.folder / "model.safetensors", "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Warm(before.folder.resolve(), digest, queries[1], items[1], _known(before, split))


def _check(old: Retriever, new: Retriever, folder: Path) -> None:
    """Refuse what cannot be copied row by row."""
    for side, tower in (("query", new.query), ("item", new.item)):
        before = getattr(old, side)
        if side == "query" and isinstance(tower, HistoryTower) and tower.item is new.item:
            same = isinstance(before, HistoryTower) and _shapes(before) == _shapes(tower)
        elif isinstance(tower, IdTower):
            same = isinstance(before, IdTower)
        else:
            hint = (
                f"; a text encoder starts from --set encoder={folder / 'encoder'}" if hasattr(tower, "encoder") else ""
            )
            raise UserError(f"the {side} tower {type(tower).__name__} cannot start warm, only tables of ids can{hint}")
        if not same:
            raise UserError(
                f"the {side} tower of {folder} is {type(before).__name__}, not as the one to be trained: no start from it"
            )
    kinds = [(int(model.item.dim), model.score, model.item_bias is not None) for model in (old, new)]  # type: ignore[arg-type]
    if kinds[0] != kinds[1]:
        said = [
            f"{dim} dimensions and {score} scores{', with an item bias' if bias else ''}" for dim, score, bias in kinds
        ]
        raise UserError(f"{folder} has {said[0]}, the run to be trained {said[1]}: it cannot start from it")


def _both(old: Vocabulary, new: Vocabulary, blank: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(rows in the old table, rows in the new one) of ids that both know and the old run had trained."""
    at = old.encode(new.ids)
    here = np.flatnonzero((at >= 0) & ~np.isin(at, blank.numpy()))
    return at[here], here


def _copy(old: nn.Module, new: nn.Module, rows: tuple[np.ndarray, np.ndarray]) -> None:
    assert isinstance(old, IdTower)
    assert isinstance(new, IdTower)
    there, here = (torch.from_numpy(each) for each in rows)
    new.weight[here.to(new.weight.device)] = old.weight[there].to(new.weight)


def _own(tower: nn.Module) -> dict[str, Tensor]:
    """What a tower that reads histories has beside the item tower."""
    return {name: parameter for name, parameter in tower.named_parameters() if not name.startswith("item.")}


def _shapes(tower: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in _own(tower).items()}


def _known(before: trained.Trained, split: Split) -> int:
    """How many test pairs the earlier run has seen."""
    if split.test is None:
        return 0
    ids, n = before.ids, len(before.ids.item_ids)
    queries = ids.query_ids.encode(split.test.query_ids.ids)[split.test.queries]
    items = ids.item_ids.encode(split.test.item_ids.ids)[split.test.items]
    both = (queries >= 0) & (items >= 0)
    owner = np.repeat(np.arange(len(ids.query_ids)), before.seen.start.diff().numpy())
    return int(np.isin(pair_keys(queries[both], items[both], n), pair_keys(owner, before.seen.items.numpy(), n)).sum())
