"""Rank fusion (NGAME): towers and classifiers list items, and a small decision tree weighs both scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core import files
from sparring.core.choices import RANKINGS
from sparring.core.errors import UserError
from sparring.core.subset import Subset
from sparring.core.topk import in_order, inner_products, top_k
from sparring.core.types import Positives
from sparring.data.interactions import Interactions
from sparring.models.retriever import Retriever
from sparring.models.tree import grow

FILE = "fusion.safetensors"  # in a run folder
DEPTH = 7  # depth of the tree
ROWS = 75_000  # queries the tree is fitted to
BLOCK = 512  # queries ranked at once


class Fused(nn.Module):
    """A retriever and classifiers over the same query vectors, ranked together.

        score = clf + beta (knn + P(relevant | clf, knn, inverse propensity))  of the `shortlist` best by clf + near knn

    For a query q, a classifier w and an item vector v, clf = u w and knn = q v, where u is q at length 1. P is given by
    a decision tree of depth 7, fitted to the lists of held-out queries (`learn`); before that it is 0.

    The shortlist is one inner product, u (w + near v), so one index of w + near v finds it (`listing`). Under cosine
    q is u, and near is beta: items are listed by the score without P. Otherwise near is 0 and the classifiers list.

    `ranking` is the default of commands: the best of towers, classifiers and fused on held-out queries, whose figures
    are `valid`. Lists hold the items `listed`, by default all (training/eligibility.py).

        fused = Fused(model, classifiers, propensity);   fused.learn(split.valid, seen)
        fused.lists(query_ids, 10, seen)

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023; features and depth
    of its release.
    """

    propensity: Tensor
    feature: Tensor
    threshold: Tensor
    below: Tensor
    above: Tensor
    chance: Tensor

    def __init__(
        self,
        knn: Retriever,
        clf: Retriever,
        propensity: np.ndarray,
        beta: float = 1.0,
        shortlist: int = 300,
        near: float | None = None,
        listed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.ranking, self.valid, self.listed = "towers", dict[str, float](), listed
        self.knn, self.clf, self.beta, self.shortlist = knn, clf, beta, min(shortlist, knn.n_items)
        by_cosine = knn.score == "cosine" and knn.dim == knn.width  # a bias is one more dimension
        self.near = (beta if by_cosine else 0.0) if near is None else near
        self.register_buffer("propensity", torch.from_numpy(propensity).float())
        nodes = 2 ** (DEPTH + 1) - 1
        self.register_buffer("feature", torch.zeros(nodes, dtype=torch.long))
        self.register_buffer("threshold", torch.zeros(nodes, dtype=torch.float64))
        self.register_buffer("below", torch.arange(nodes))  # a leaf leads to itself
        self.register_buffer("above", torch.arange(nodes))
        self.register_buffer("chance", torch.zeros(nodes))

    @property
    def n_items(self) -> int:
        return self.knn.n_items

    def listing(self, knn: Tensor, clf: Tensor) -> Tensor:
        """(N, D): item vectors whose inner product with a query of length 1 orders the shortlist."""
        return clf + self.near * knn.to(clf.device) if self.near else clf

    @torch.no_grad()
    def lists(self, ids: Tensor, k: int, seen: Positives | None) -> Tensor:
        """(B, k): the best items of these training queries, padded with -1."""
        knn, clf = self.knn.item_vectors(), self.clf.item_vectors()
        blocks = self._shortlists(ids, max(k, self.shortlist), seen, knn, clf)
        return torch.cat([self.ordered(items, q, knn, clf)[1][:, :k] for q, items in blocks])

    def _shortlists(
        self, ids: Tensor, n: int, seen: Positives | None, knn: Tensor, clf: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(vectors of queries (B, D), their n best items (B, n), padded with -1), by blocks of queries."""
        vectors, part = self.listing(knn, clf), None
        if self.listed is not None:
            part = Subset(self.listed, self.n_items).to(vectors.device)
            vectors, seen = vectors[part.ids], None if seen is None else part.lists(seen.to(vectors.device))
        for block in ids.split(BLOCK):
            q = self.knn.query_vectors(block)
            items = top_k(unit(q), vectors, n, seen, block)[1]
            yield q, items if part is None else part.ids_at(items)

    def ordered(self, items: Tensor, q: Tensor, knn: Tensor, clf: Tensor) -> tuple[Tensor, Tensor]:
        """Fused scores and ids (B, n) of listed items (B, n), the best first, equal scores by id; -1 stays -1."""
        return in_order(self.scores(items, *self._both(items, q, knn, clf)), items, items.shape[1])

    def scores(self, items: Tensor, clf: Tensor, knn: Tensor) -> Tensor:
        """(B, n): fused scores of items (B, n) from both scores; -inf for -1.

        An item that came after the training counts as one of the rarest.
        """
        features = self._features(items, clf, knn)
        fused = clf + self.beta * (knn + self.probability(features))
        return fused.masked_fill(items < 0, -torch.inf)

    def _both(self, items: Tensor, q: Tensor, knn: Tensor, clf: Tensor) -> tuple[Tensor, Tensor]:
        """Classifier scores and retriever scores (B, n) of listed items."""
        rows = items.clamp(min=0)
        return inner_products(unit(q), clf, rows), inner_products(q, knn, rows)

    def _features(self, items: Tensor, clf: Tensor, knn: Tensor) -> Tensor:
        """(B, n, 3): classifier score, retriever score and inverse propensity of each listed item."""
        weight = self.propensity[items.clamp(0, self.n_items - 1)]
        new = items >= self.n_items
        if bool(new.any()):
            weight = torch.where(new, self.propensity.max(), weight)
        return torch.stack([clf, knn, weight], 2)

    def probability(self, features: Tensor) -> Tensor:
        """(...): the tree's probability of relevance for features (..., 3)."""
        node = torch.zeros(features.shape[:-1], dtype=torch.long, device=features.device)
        for _ in range(DEPTH):
            value = features.gather(-1, self.feature[node].unsqueeze(-1)).squeeze(-1)
            node = torch.where(value <= self.threshold[node], self.below[node], self.above[node])
        return self.chance[node]

    @torch.no_grad()
    def learn(self, held: Interactions, seen: Positives | None, seed: int = 0) -> None:
        """Fit the tree to the lists of at most 75,000 queries with known relevant items."""
        device = self.propensity.device
        queries = np.unique(held.queries)
        if len(queries) > ROWS:
            queries = np.sort(np.random.default_rng(seed).choice(queries, ROWS, replace=False))
        right = held.positives()
        right = right.to(device)
        knn, clf = self.knn.item_vectors(), self.clf.item_vectors()
        rows, targets, everyone = [], [], torch.from_numpy(queries).long().to(device)
        blocks = self._shortlists(everyone, self.shortlist, seen, knn, clf)
        for ids, (q, items) in zip(everyone.split(BLOCK), blocks, strict=True):
            features = self._features(items, *self._both(items, q, knn, clf))
            target = torch.zeros(items.shape, dtype=torch.bool, device=device)
            target[right.of(ids).hits(items)] = True
            rows.append(features[items >= 0])
            targets.append(target[items >= 0])
        tree = grow(torch.cat(rows), torch.cat(targets), DEPTH)
        for name in ("feature", "threshold", "below", "above", "chance"):
            getattr(self, name).copy_(getattr(tree, name))

    def save(self, folder: Path) -> None:
        """Write the tree; the two models are saved with their runs."""
        learnt = dict(self.named_buffers(recurse=False))
        settings: dict[str, object] = {"beta": self.beta, "shortlist": self.shortlist, "near": self.near}
        settings |= {"ranking": self.ranking, "valid": self.valid}
        files.write_tensors(folder / FILE, learnt, settings)

    @classmethod
    def load(cls, folder: Path, knn: Retriever, clf: Retriever, listed: Tensor | None = None) -> Fused:
        """Read a saved tree over the two models it was fitted to.

        A file of an earlier version may lack `near`: its classifiers listed alone. Without a ranking the towers rank.
        """
        tensors, settings = files.read_tensors(folder / FILE)
        near = float(settings.get("near", 0.0))
        fused = cls(knn, clf, tensors["propensity"].numpy(), settings["beta"], settings["shortlist"], near, listed)
        for name, own in fused.named_buffers(recurse=False):
            if name not in tensors or tensors[name].shape != own.shape:
                raise UserError(
                    f"{folder / FILE} does not fit this run: tensor {name!r} is missing or has another shape"
                )
            own.copy_(tensors[name])
        ranking = str(settings.get("ranking", "towers"))
        fused.ranking = {"encoder": "towers"}.get(ranking, ranking)  # its name in earlier versions
        if fused.ranking not in RANKINGS:
            raise UserError(f"{folder / FILE} names an unknown ranking, {ranking!r}: train the run again")
        fused.valid = {str(name): float(value) for name, value in settings.get("valid", {}).items()}
        return fused


def unit(q: Tensor) -> Tensor:
    """Query vectors at length 1, as the classifiers compare them."""
    return F.normalize(q.float(), dim=-1)
