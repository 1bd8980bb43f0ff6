"""What a run may recommend to whom: nothing that its data knows a query to have taken, and no item whose vector nobody has trained.

Evaluation is another matter: it ranks the whole catalogue, and leaves out what was taken before the part that it ranks (`Split.seen_for`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.core.part import Part
from sparring.core.topk import top_k
from sparring.core.types import Positives
from sparring.data.interactions import Interactions, Split
from sparring.data.pairs import csr, occurrences
from sparring.models.fusion import BLOCK, Fused
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryTower, IdTower

_NONE = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class Offers:
    """What the data of a run knows of its queries and items, in dense ids; folders of before the test part was kept know less.

    offers.ranking(model.item_vectors()).best(model.query_vectors(at), 10, offers.taken(at))
    """

    seen: Positives  # training and validation
    test: Positives | None = None
    queries: Tensor = _NONE  # without a training pair, where only pairs give a query its vector
    items: Tensor = _NONE  # without one, where the item tower is a plain table: their vectors are as they began

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> Offers:
        """As `kept` named them."""
        seen = Positives(tensors["start"], tensors["items"])
        test = Positives(tensors["test_start"], tensors["test_items"]) if "test_start" in tensors else None
        return cls(seen, test, tensors.get("untrained_queries", _NONE), tensors.get("untrained_items", _NONE))

    def taken(self, at: Tensor) -> Positives:
        """All that these queries have taken, row i that of the i-th."""
        rows, items = list[np.ndarray](), list[np.ndarray]()
        for part in (self.seen, self.test):
            if part is not None:
                pairs = part.of(at)
                assert pairs.rows is not None
                rows.append(pairs.rows.numpy())
                items.append(pairs.ids.numpy())
        taken = np.concatenate(items)
        return csr(np.concatenate(rows), taken, len(at), int(taken.max(initial=0)) + 1)

    def ranking(self, vectors: Tensor) -> Ranking:
        """The items that may be recommended, by the vectors (N, D) of all."""
        return Ranking(vectors, self.items)


class Ranking:
    """Items to choose from, ranked exactly: all but those that were never trained."""

    def __init__(self, vectors: Tensor, untrained: Tensor) -> None:
        self.vectors, self.kept, self.place = vectors, None, None
        if len(untrained):
            offered = torch.ones(len(vectors), dtype=torch.bool)
            offered[untrained.long()] = False
            self.kept = torch.nonzero(offered).flatten()
            self.place = torch.where(offered, offered.cumsum(0) - 1, -1)
            self.vectors = vectors[self.kept.to(vectors.device)]

    def best(self, q: Tensor, k: int, taken: Positives | None = None) -> tuple[Tensor, Tensor]:
        """Scores and ids (B, k) of the best items, id -1 where none is left; `taken` has row i for query i."""
        if taken is not None and self.place is not None:
            items = self.place[taken.items.long()]
            left = torch.cat([torch.zeros(1, dtype=torch.long), (items >= 0).cumsum(0)])
            taken = Positives(left[taken.start], items[items >= 0])
        scores, ids = top_k(q, self.vectors, k, taken, torch.arange(len(q)))
        return scores, ids if self.kept is None else torch.where(
            ids >= 0, self.kept.to(ids.device)[ids.clamp(min=0)], -1
        )


def kept(
    data: Interactions,
    seen: Positives,
    test: Interactions | None,
    model: Retriever | None,
    began: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """What seen.safetensors holds of a training on `data`; without a model nothing is said of what was never trained.

    `began` has the dense ids of `queries` and `items` that started with vectors that were trained before (warm.py).
    """
    warm = began or {}
    tensors = {"start": seen.start, "items": seen.items}
    if test is not None:
        held = test.positives()
        tensors |= {"test_start": held.start, "test_items": held.items}
    if model is not None and all(
        parameter.requires_grad for parameter in model.parameters()
    ):  # frozen: vectors from elsewhere (stages.py)
        if _is_table(model.query) or isinstance(model.query, HistoryTower):
            tensors["untrained_queries"] = _without(data.queries, data.n_queries, warm.get("queries"))
        if _is_table(model.item):
            tensors["untrained_items"] = _without(data.items, data.n_items, warm.get("items"))
    return tensors


def untrained(split: Split) -> dict[str, int]:
    """How many queries and items have no training pair, and how many of the queries to be tested."""
    pairs = occurrences(split.train.queries, split.train.n_queries)
    found = {"queries": int((pairs == 0).sum()), "items": int((split.train.counts() == 0).sum())}
    return found if split.test is None else found | {"tested": int((pairs[np.unique(split.test.queries)] == 0).sum())}


def untrained_line(counts: Mapping[str, int]) -> str | None:
    """The same in words; None where every query and every item has a training pair."""
    found = [
        (counts.get(name, 0), name, one) for name, one in (("queries", "query"), ("items", "item")) if counts.get(name)
    ]
    if not found:
        return None
    named = " and ".join(f"{n:,} {name if n > 1 else one}" for n, name, one in found)
    tested = f", among them {counts['tested']:,} of the queries that are tested" if counts.get("tested") else ""
    return f"{named} {'have' if sum(n for n, _, _ in found) > 1 else 'has'} no training pair{tested}"


def _is_table(tower: torch.nn.Module) -> bool:
    return isinstance(tower, IdTower) or (isinstance(tower, Part) and tower.spread)


def _without(ids: np.ndarray, n: int, but: np.ndarray | None) -> Tensor:
    """The ids of 0..n-1 that do not occur, but for some."""
    found = np.flatnonzero(occurrences(ids, n) == 0)
    return torch.from_numpy((found if but is None else np.setdiff1d(found, but)).astype(np.int32))


class FusedRanking:
    """Items to choose from, as `Ranking` has them, for any query that the retriever gives a vector: a new text as well.

    `knn` (N, D) are the retriever's item vectors; items that were never trained are left out.
    """

    def __init__(self, fused: Fused, knn: Tensor, untrained: Tensor) -> None:
        self.fused, self.knn, self.listing = fused, knn, Ranking(fused.clf.item_vectors(), untrained)

    @torch.no_grad()
    def best(self, q: Tensor, k: int, taken: Positives | None = None) -> tuple[Tensor, Tensor]:
        """Fused scores and ids (B, k) of the best items, id -1 where none is left; `taken` has row i for query i."""
        q = q.float()
        unit = F.normalize(q, dim=-1)  # as the classifiers see queries
        scores, items = self.listing.best(unit, max(k, self.fused.shortlist), taken)
        blocks = zip(scores.split(BLOCK), items.split(BLOCK), q.split(BLOCK), strict=True)
        parts = [self.fused.ordered(*block, self.knn) for block in blocks]
        return torch.cat([part[0][:, :k] for part in parts]), torch.cat([part[1][:, :k] for part in parts])
