"""Eligibility: a run recommends neither items that a query has taken nor items whose vectors were never trained.

Towers over features or texts have a useful vector of any item, so they list untrained ones too. Evaluation ranks the
same items for every query, but excludes only those taken before the part that it ranks (`Split.seen_for`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparring.core.part import Part
from sparring.core.subset import Subset
from sparring.core.topk import inner_products, top_k
from sparring.core.types import Positives
from sparring.data.interactions import Interactions, Split
from sparring.data.pairs import csr, occurrences
from sparring.models.fusion import BLOCK, Fused, unit
from sparring.models.graph import Graph, GraphItems
from sparring.models.hashed import HashedIds
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryReader, IdTower, UnitTower

_NONE = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class Eligibility:
    """The items that queries have taken, and the queries and items that were never trained, in dense ids.

    eligibility.ranking(model.item_vectors()).best(model.query_vectors(queries), 10, eligibility.taken(queries))
    """

    seen: Positives  # training and validation
    test: Positives | None = None
    queries: Tensor = _NONE  # without a training pair, if only pairs give a query its vector
    items: Tensor = _NONE  # without a training pair, if the item tower is a plain table: their vectors are untrained

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], n_queries: int, n_items: int) -> Eligibility:
        """From the tensors of `seen_tensors`; ValueError if they do not fit this many queries and items."""
        if not {"start", "items"} <= tensors.keys() or ("test_start" in tensors) != ("test_items" in tensors):
            raise ValueError("it does not hold the items that queries have seen")
        lists = [
            Positives(tensors[f"{part}start"], tensors[f"{part}items"])
            for part in ("", "test_")
            if f"{part}start" in tensors
        ]
        blank = [tensors.get(f"untrained_{side}", _NONE) for side in ("queries", "items")]
        for start, items in ((each.start, each.items) for each in lists):
            if start.dtype != torch.int64 or start.shape != (n_queries + 1,) or items.shape != (int(start[-1]),):
                raise ValueError(f"it has no list of items for each of {n_queries:,} queries")
            if int(start[0]) != 0 or bool((start.diff() < 0).any()):
                raise ValueError("its lists of items overlap")
        for ids, n in (
            (lists[0].items, n_items),
            (lists[-1].items, n_items),
            (blank[0], n_queries),
            (blank[1], n_items),
        ):
            if ids.dtype.is_floating_point or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n):
                raise ValueError(f"it has ids outside 0..{n - 1}")
        return cls(lists[0], lists[1] if len(lists) > 1 else None, *blank)

    def taken(self, queries: Tensor) -> Positives:
        """All items that these queries have taken; row i belongs to queries[i]."""
        rows, items = list[np.ndarray](), list[np.ndarray]()
        for part in (self.seen, self.test):
            if part is not None:
                pairs = part.of(queries)
                assert pairs.rows is not None
                rows.append(pairs.rows.numpy())
                items.append(pairs.ids.numpy())
        taken = np.concatenate(items)
        return csr(np.concatenate(rows), taken, len(queries), int(taken.max(initial=0)) + 1)

    def listed(self, n_items: int) -> Tensor | None:
        """The items that lists may hold; None for all."""
        return _others(self.items, n_items)

    def ranking(self, vectors: Tensor | None, n_items: int | None = None) -> Ranking:
        """Ranks the eligible items by the vectors (N, D) of all items, or `n_items` items by scores."""
        return Ranking(vectors, self.items, n_items)


class Ranking:
    """An exact ranking of all items except untrained ones; without vectors, a query is its scores of all items."""

    def __init__(self, vectors: Tensor | None, untrained: Tensor, n_items: int | None = None) -> None:
        n = n_items or len(vectors)  # type: ignore[arg-type]
        listed = _others(untrained, n)
        self.vectors, self.part = vectors, None if listed is None else Subset(listed, n)
        if self.part is not None and vectors is not None:
            self.vectors = vectors[self.part.ids.to(vectors.device)]

    def best(self, q: Tensor, k: int, taken: Positives | None = None) -> tuple[Tensor, Tensor]:
        """Scores and ids (B, k) of the best items, id -1 where none is left; row i of `taken` belongs to query i."""
        if self.part is None:
            return top_k(q, self.vectors, k, taken, torch.arange(len(q)))
        taken = None if taken is None else self.part.lists(taken)
        if self.vectors is None:
            q = q[:, self.part.ids.to(q.device)]
        scores, places = top_k(q, self.vectors, k, taken, torch.arange(len(q)))
        return scores, self.part.to(places.device).ids_at(places)

    def scores(self, q: Tensor, items: Tensor) -> Tensor:
        """Scores (B, U) of items (B, U), NaN for untrained ones; -1 has the score of some item."""
        items = items.clamp(min=0)
        place = None if self.part is None else self.part.place.to(items.device)
        if self.vectors is None:
            values = q.gather(1, items)
        else:
            values = _inner_products(q, self.vectors, items if place is None else place[items].clamp(min=0))
        return values if place is None else values.masked_fill(place[items] < 0, torch.nan)


def _inner_products(q: Tensor, vectors: Tensor, items: Tensor) -> Tensor:
    """`inner_products`; on a CPU by one product with a small catalogue in float64, which is eight times as fast.

    The two may differ in the last bit of a score: none of a million did.
    """
    if q.device.type != "cpu" or len(vectors) > 32 * items.shape[1]:
        return inner_products(q, vectors, items)
    return (q.double() @ vectors.double().T).gather(1, items).to(q.dtype)


def seen_tensors(
    data: Interactions,
    seen: Positives,
    test: Interactions | None,
    model: Retriever | None,
    warm: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """The tensors of seen.safetensors for a training on `data`; untrained ids need the model.

    `warm` has the dense ids of `queries` and `items` that start with the trained vectors of an earlier run.
    """
    warm = warm or {}
    tensors = {"start": seen.start, "items": seen.items}
    if test is not None:
        held_out = test.positives()
        tensors |= {"test_start": held_out.start, "test_items": held_out.items}
    if model is not None and not _is_frozen(model):
        if _is_table(model.query) or isinstance(model.query, HistoryReader):
            tensors["untrained_queries"] = _absent(data.queries, data.n_queries, warm.get("queries"))
        if (items := untrained_items(model, data, warm.get("items"))) is not None:
            tensors["untrained_items"] = items
    return tensors


def untrained_items(model: Retriever, data: Interactions, warm: np.ndarray | None = None) -> Tensor | None:
    """The items whose vectors a training on `data` leaves as they started; None if the item tower has no such items."""
    if _is_frozen(model) or not (_is_table(model.item) or isinstance(model.item, UnitTower)):
        return None
    return _absent(data.items, data.n_items, warm)


def listed_items(model: Retriever, data: Interactions, warm: np.ndarray | None = None) -> Tensor | None:
    """The items that an evaluation of a model trained on `data` may list; None for all."""
    absent = untrained_items(model, data, warm)
    return None if absent is None else _others(absent, data.n_items)


def untrained(split: Split) -> dict[str, int]:
    """The number of queries and items without a training pair, and of such queries in the test part."""
    pairs = occurrences(split.train.queries, split.train.n_queries)
    counts = {"queries": int((pairs == 0).sum()), "items": int((split.train.counts() == 0).sum())}
    if split.test is not None:
        counts["tested"] = int((pairs[np.unique(split.test.queries)] == 0).sum())
    return counts


def untrained_line(counts: Mapping[str, int]) -> str | None:
    """The counts of `untrained` as a sentence; None if every query and every item has a training pair."""
    named = [(counts[name], name, one) for name, one in (("queries", "query"), ("items", "item")) if counts.get(name)]
    if not named:
        return None
    who = " and ".join(f"{n:,} {name if n > 1 else one}" for n, name, one in named)
    tested = f", among them {counts['tested']:,} test queries" if counts.get("tested") else ""
    return f"{who} {'have' if sum(n for n, _, _ in named) > 1 else 'has'} no training pair{tested}"


def _is_frozen(model: Retriever) -> bool:
    """Whether vectors were trained by an earlier stage."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def _others(ids: Tensor, n: int) -> Tensor | None:
    """The other ids of 0..n-1; None if `ids` is empty."""
    if not len(ids):
        return None
    kept = torch.ones(n, dtype=torch.bool)
    kept[ids.long()] = False
    return torch.nonzero(kept).flatten()


def _is_table(tower: torch.nn.Module) -> bool:
    """Whether only the training pairs of an id give it a vector."""
    return isinstance(tower, IdTower | HashedIds | Graph | GraphItems) or (isinstance(tower, Part) and tower.spread)


def _absent(ids: np.ndarray, n: int, warm: np.ndarray | None) -> Tensor:
    """The ids of 0..n-1 that neither occur nor started warm."""
    absent = np.flatnonzero(occurrences(ids, n) == 0)
    return torch.from_numpy((absent if warm is None else np.setdiff1d(absent, warm)).astype(np.int32))


class FusedRanking:
    """`Ranking` by towers and classifiers fused, for any query vector of the retriever, new texts included.

    `knn` (N, D) are the retriever's item vectors; untrained items are left out.
    """

    def __init__(self, fused: Fused, knn: Tensor, untrained: Tensor) -> None:
        self.fused, self.knn, self.clf = fused, knn, fused.clf.item_vectors()
        self.listing = Ranking(fused.listing(knn, self.clf), untrained)

    @torch.no_grad()
    def best(self, q: Tensor, k: int, taken: Positives | None = None) -> tuple[Tensor, Tensor]:
        """Fused scores and ids (B, k) of the best items, id -1 where none is left; row i of `taken` is of query i."""
        q = q.float()
        items = self.listing.best(unit(q), max(k, self.fused.shortlist), taken)[1]
        blocks = zip(items.split(BLOCK), q.split(BLOCK), strict=True)
        parts = [self.fused.ordered(*block, self.knn, self.clf) for block in blocks]
        return torch.cat([part[0][:, :k] for part in parts]), torch.cat([part[1][:, :k] for part in parts])


class ClassifierRanking(Ranking):
    """`Ranking` by the classifiers alone, for any query vector of the retriever."""

    def best(self, q: Tensor, k: int, taken: Positives | None = None) -> tuple[Tensor, Tensor]:
        return super().best(unit(q), k, taken)
