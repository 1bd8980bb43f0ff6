"""Two rankings in one: classifiers list the items, and a small decision tree says what each score is worth (the fusion of NGAME)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sparring.data.interactions import Interactions
from sparring.rank import top_k
from sparring.retriever import Retriever
from sparring.tree import grow
from sparring.types import Positives

DEPTH = 7  # of the tree
ROWS = 75_000  # queries that it learns from
_BLOCK = 512  # queries whose lists are scored at once


class Fused(nn.Module):
    """A retriever and classifiers over the same query vectors, ranked together.

        score = clf + beta (knn + P(relevant | clf, knn, inverse propensity of the item))   of the `shortlist` best items by clf

    clf and knn are cosines. The chance is that of a decision tree of depth 7, learnt from lists of queries that neither was trained on
    (`learn`); until then it is 0.

        fused = Fused(model, classifiers, propensity);   fused.learn(split.valid, seen);   fused.lists(query_ids, 10, seen)

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023; features and depth of its release.
    """

    propensity: Tensor
    feature: Tensor
    threshold: Tensor
    below: Tensor
    above: Tensor
    chance: Tensor

    def __init__(self, knn: Retriever, clf: Retriever, propensity: np.ndarray, beta: float = 1.0, shortlist: int = 300) -> None:
        super().__init__()
        self.knn, self.clf, self.beta, self.shortlist = knn, clf, beta, min(shortlist, knn.n_items)
        self.register_buffer("propensity", torch.from_numpy(propensity).float())
        nodes = 2 ** (DEPTH + 1) - 1
        self.register_buffer("feature", torch.zeros(nodes, dtype=torch.long))
        self.register_buffer("threshold", torch.zeros(nodes, dtype=torch.float64))
        self.register_buffer("below", torch.arange(nodes))  # a leaf leads to itself
        self.register_buffer("above", torch.arange(nodes))
        self.register_buffer("chance", torch.zeros(nodes))

    @torch.no_grad()
    def lists(self, ids: Tensor, k: int, seen: Positives | None) -> Tensor:
        """(B, k): the best items of these queries, -1 where there are no more."""
        vectors = self.knn.item_vectors(), self.clf.item_vectors()
        parts = [self._ranked(some, k, seen, *vectors) for some in ids.split(_BLOCK)]
        return torch.cat(parts)

    def _ranked(self, ids: Tensor, k: int, seen: Positives | None, knn: Tensor, clf: Tensor) -> Tensor:
        items, features = self._features(ids, seen, knn, clf, max(k, self.shortlist))
        score = features[..., 0] + self.beta * (features[..., 1] + self.probability(features))
        score = score.masked_fill(items < 0, -torch.inf)
        return items.gather(1, torch.sort(score, dim=1, descending=True, stable=True).indices)[:, :k]

    def _features(self, ids: Tensor, seen: Positives | None, knn: Tensor, clf: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n best items by classifier (B, n), and of each (B, n, 3): classifier score, retriever score, inverse propensity."""
        scores, items = top_k(self.clf.query_vectors(ids), clf, n, seen, ids)
        at = items.clamp(min=0)
        near = torch.bmm(knn[at], self.knn.query_vectors(ids).unsqueeze(2)).squeeze(2)
        return items, torch.stack([scores.nan_to_num(neginf=0.0), near, self.propensity[at]], 2)

    def probability(self, features: Tensor) -> Tensor:
        """(...): what the tree says of features (..., 3)."""
        node = torch.zeros(features.shape[:-1], dtype=torch.long, device=features.device)
        for _ in range(DEPTH):
            value = features.gather(-1, self.feature[node].unsqueeze(-1)).squeeze(-1)
            node = torch.where(value <= self.threshold[node], self.below[node], self.above[node])
        return self.chance[node]

    @torch.no_grad()
    def learn(self, held: Interactions, seen: Positives | None, seed: int = 0) -> None:
        """Fit the tree to the lists of queries whose right items are known, at most 75,000 of them."""
        device = self.propensity.device
        queries = np.unique(held.queries)
        if len(queries) > ROWS:
            queries = np.sort(np.random.default_rng(seed).choice(queries, ROWS, replace=False))
        right = held.positives()
        right = Positives(right.start.to(device), right.items.to(device))
        vectors = self.knn.item_vectors(), self.clf.item_vectors()
        rows, targets = [], []
        for ids in torch.from_numpy(queries).long().to(device).split(_BLOCK):
            items, features = self._features(ids, seen, *vectors, self.shortlist)
            target = torch.zeros(items.shape, dtype=torch.bool, device=device)
            target[right.of(ids).hits(items)] = True
            rows.append(features[items >= 0])
            targets.append(target[items >= 0])
        tree = grow(torch.cat(rows), torch.cat(targets), DEPTH)
        for name in ("feature", "threshold", "below", "above", "chance"):
            getattr(self, name).copy_(getattr(tree, name))
