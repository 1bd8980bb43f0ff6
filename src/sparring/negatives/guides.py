"""Guides: scores by which `Unless` tells that a candidate is probably relevant.

The model itself (OwnScores), vectors of another model (VectorScores), a table (TableScores), an item graph
(RelatedItems), or any function such as a cross-encoder (ScoreFunction).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.part import Part
from sparring.core.types import Step
from sparring.kernels import logits

_STRIDE = 1 << 40  # query * _STRIDE + item is unique for every pair


class Guide(Part):
    """Scores of the candidates of a step; higher is nearer to the query, nan where the guide knows nothing.

    `forward` gets candidate ids (C,) or (B, C), -1 for synthetic ones, and their vectors, or None for items of which
    only the id is known; it returns (B, C). It is called without gradient, for the candidates and for the positives.

        class SameCategory(Guide):
            def forward(self, step, ids, emb):
                return (self.category[step.item_ids].unsqueeze(1) == self.category[ids]).float()
    """

    name = "a guide"

    def forward(self, step: Step, ids: Tensor, emb: Tensor | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define forward(step, ids, emb)")


class OwnScores(Guide):
    """The scores of the model in training, q . e without the temperature; synthetic candidates have one too."""

    name = "the model's own scores"

    def forward(self, step: Step, ids: Tensor, emb: Tensor | None) -> Tensor:
        return logits(step.q.detach(), (step.encode(ids.clamp(min=0)) if emb is None else emb).detach())


class VectorScores(Guide):
    """Inner products of fixed vectors: another encoder, or vectors from a file (the guide of GISTEmbed).

    Vectors (queries, D) and (N, D) are compared as given: normalise them for cosines.

        VectorScores(torch.from_numpy(guide.encode(query_texts)), torch.from_numpy(guide.encode(item_texts)))
    """

    name = "vectors of a guide"
    queries: Tensor
    items: Tensor

    def __init__(self, queries: Tensor, items: Tensor):
        super().__init__()
        if queries.dim() != 2 or items.dim() != 2 or queries.shape[1] != items.shape[1]:
            shapes = f"{tuple(queries.shape)} and {tuple(items.shape)}"
            raise UserError(f"the guide's vectors of queries and items must have one width, got shapes {shapes}")
        self.n_items = len(items)
        self.register_buffer("queries", queries, persistent=False)
        self.register_buffer("items", items, persistent=False)

    def forward(self, step: Step, ids: Tensor, emb: Tensor | None) -> Tensor:
        scores = logits(self.queries[step.query_ids].float(), self.items[ids.clamp(min=0)].float())
        return scores.masked_fill(ids < 0, math.nan)


class TableScores(Guide):
    """Scores of listed (query, item) pairs, such as those of a cross-encoder; a pair that is not listed has `missing`.

    The default, None, keeps such a candidate; and where the positive has no score, a bound that is relative to it drops
    nothing. A pair listed twice is an error.

        TableScores(torch.tensor([0, 0, 1]), torch.tensor([4, 7, 4]), torch.tensor([0.9, 0.1, 0.8]))
    """

    name = "a table of scores"
    keys: Tensor
    scores: Tensor

    def __init__(self, queries: Tensor, items: Tensor, scores: Tensor, missing: float | None = None):
        super().__init__()
        if not queries.shape == items.shape == scores.shape or queries.dim() != 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in (queries, items, scores))
            raise UserError(f"a table of scores needs as many queries, items and scores, got shapes {shapes}")
        keys, order = torch.sort(queries.long() * _STRIDE + items.long())
        twice = torch.nonzero(keys[1:] == keys[:-1]).flatten()
        if len(twice):
            query, item = divmod(int(keys[twice[0]]), _STRIDE)
            raise UserError(f"the table of scores lists the pair of query {query} and item {item} twice")
        self.missing = missing
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("scores", scores[order].float(), persistent=False)

    def forward(self, step: Step, ids: Tensor, emb: Tensor | None) -> Tensor:
        return self.look_up(self.rows(step), ids).masked_fill(ids < 0, math.nan)

    def rows(self, step: Step) -> Tensor:
        """(B,) the first of a pair."""
        return step.query_ids

    def look_up(self, rows: Tensor, ids: Tensor) -> Tensor:
        """(B, C): the score of each row with each id (C,) or (B, C)."""
        wanted = rows.long().unsqueeze(1) * _STRIDE + ids
        missing = math.nan if self.missing is None else self.missing
        if not len(self.keys):
            return torch.full(wanted.shape, missing, device=wanted.device)
        place = torch.searchsorted(self.keys, wanted).clamp_(max=len(self.keys) - 1)
        return torch.where(self.keys[place] == wanted, self.scores[place], missing)


class RelatedItems(TableScores):
    """An item graph: 1 for a candidate that is related to the positive, and for the positive itself; 0 for all others.

    `items` and `related` are the ends of its edges, which count both ways. With `strengths` a related candidate has
    the strength of its edge instead of 1; an edge listed in both directions, or twice, has the larger one.

        Unless(InBatch(), RelatedItems(children, parents), relative=0.95)
    """

    name = "an item graph"

    def __init__(self, items: Tensor, related: Tensor, strengths: Tensor | None = None):
        ends = torch.cat([items, related]).long() * _STRIDE + torch.cat([related, items]).long()
        strength = torch.ones(len(items)) if strengths is None else strengths.float()
        keys, which = torch.unique(ends, return_inverse=True)
        strongest = torch.full((len(keys),), -math.inf).scatter_reduce(0, which, torch.cat([strength] * 2), "amax")
        super().__init__(keys // _STRIDE, keys % _STRIDE, strongest, missing=0.0)

    def rows(self, step: Step) -> Tensor:
        return step.item_ids

    def look_up(self, rows: Tensor, ids: Tensor) -> Tensor:
        return super().look_up(rows, ids).masked_fill(ids == rows.unsqueeze(1), 1.0)


class ScoreFunction(Guide):
    """Scores by a function of query ids (P,) and item ids (P,): a cross-encoder, a service, a rule (RocketQA).

    Each distinct pair of a step is scored once. The function may return an array or a tensor (P,) on any device. It
    runs on the host, so no CUDA graph captures the step: score the pairs once into a TableScores where they repeat.

        ScoreFunction(lambda q, i: encoder.predict([(query_texts[a], item_texts[b]) for a, b in zip(q, i)]))
    """

    name = "a function of pairs"

    def __init__(self, function: Callable[[Tensor, Tensor], object]):
        super().__init__()
        self.function = function

    def forward(self, step: Step, ids: Tensor, emb: Tensor | None) -> Tensor:
        keys = step.query_ids.long().unsqueeze(1) * _STRIDE + ids
        real = (ids >= 0).expand(keys.shape)
        pairs, which = torch.unique(keys[real], return_inverse=True)
        scores = torch.full(keys.shape, math.nan, device=keys.device)
        if len(pairs):
            found = torch.as_tensor(self.function(pairs // _STRIDE, pairs % _STRIDE), dtype=torch.float32)
            if found.shape != pairs.shape:
                got = f"shape {tuple(found.shape)} for {len(pairs):,} pairs"
                raise UserError(f"the guide's function must return one score for each pair, got {got}")
            scores[real] = found.to(keys.device)[which]
        return scores
