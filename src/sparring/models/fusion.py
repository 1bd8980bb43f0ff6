"""Rank fusion (NGAME): classifiers list items, and a small decision tree weighs both models' scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.topk import in_order, inner_products, top_k
from sparring.core.types import Positives
from sparring.data.interactions import Interactions
from sparring.models.retriever import Retriever
from sparring.models.tree import grow

RANKINGS = {"encoder": "knn", "classifiers": "clf", "fused": "fusion"}  # and the stage of each in result.json
FILE = "fusion.safetensors"  # in a run folder
DEPTH = 7  # depth of the tree
ROWS = 75_000  # queries the tree is fitted to
BLOCK = 512  # queries ranked at once


class Fused(nn.Module):
    """A retriever and classifiers over the same query vectors, ranked together.

        score = clf + beta (knn + P(relevant | clf, knn, inverse propensity))   for the `shortlist` best by clf

    clf and knn are cosines. P is given by a decision tree of depth 7, fitted to the lists of held-out queries
    (`learn`); before that it is 0. `ranking` is the best of encoder, classifiers and fused on held-out queries, and the
    default of commands.

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
        self, knn: Retriever, clf: Retriever, propensity: np.ndarray, beta: float = 1.0, shortlist: int = 300
    ) -> None:
        super().__init__()
        self.ranking = "encoder"
        self.knn, self.clf, self.beta, self.shortlist = knn, clf, beta, min(shortlist, knn.n_items)
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

    @torch.no_grad()
    def lists(self, ids: Tensor, k: int, seen: Positives | None) -> Tensor:
        """(B, k): the best items of these training queries, padded with -1."""
        knn, clf = self.knn.item_vectors(), self.clf.item_vectors()
        parts = []
        for block in ids.split(BLOCK):
            listed = top_k(self.clf.query_vectors(block), clf, max(k, self.shortlist), seen, block)
            parts.append(self.ordered(*listed, self.knn.query_vectors(block), knn)[1][:, :k])
        return torch.cat(parts)

    def ordered(self, scores: Tensor, items: Tensor, q: Tensor, knn: Tensor) -> tuple[Tensor, Tensor]:
        """Fused scores and ids (B, n) of the items listed by the classifiers, best first, equal scores by id."""
        features = self._features(scores, items, q, knn)
        fused = features[..., 0] + self.beta * (features[..., 1] + self.probability(features))
        return in_order(fused.masked_fill(items < 0, -torch.inf), items, items.shape[1])

    def _features(self, scores: Tensor, items: Tensor, q: Tensor, knn: Tensor) -> Tensor:
        """(B, n, 3): classifier score, retriever score and inverse propensity of each listed item."""
        index = items.clamp(min=0)
        near = inner_products(q, knn, index)
        return torch.stack([scores.nan_to_num(neginf=0.0), near, self.propensity[index]], 2)

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
        rows, targets = [], []
        for ids in torch.from_numpy(queries).long().to(device).split(BLOCK):
            scores, items = top_k(self.clf.query_vectors(ids), clf, self.shortlist, seen, ids)
            features = self._features(scores, items, self.knn.query_vectors(ids), knn)
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
        settings = {"beta": self.beta, "shortlist": self.shortlist, "ranking": self.ranking}
        files.write_tensors(folder / FILE, learnt, settings)

    @classmethod
    def load(cls, folder: Path, knn: Retriever, clf: Retriever) -> Fused:
        """Read a saved tree over the two models it was fitted to."""
        tensors, settings = files.read_tensors(folder / FILE)
        fused = cls(knn, clf, tensors["propensity"].numpy(), settings["beta"], settings["shortlist"])
        for name, own in fused.named_buffers(recurse=False):
            if name not in tensors or tensors[name].shape != own.shape:
                raise UserError(
                    f"{folder / FILE} does not fit this run: tensor {name!r} is missing or has another shape"
                )
            own.copy_(tensors[name])
        fused.ranking = str(settings.get("ranking"))
        if fused.ranking not in RANKINGS:
            raise UserError(f"{folder / FILE} does not name the best ranking of the run: train the run again")
        return fused
