"""Fusion of ranked lists: the candidates of several sources, in one order by their scores or by their ranks.

A list is (B, n): item ids of B queries, best first, -1 for an empty place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.core.topk import in_order

_OFFSET = 60  # of ranks, as in the paper
_NEVER = float("-inf")
_TIES = 32  # places beyond the k-th that are searched for its equals

Score = Callable[[int, Tensor], Tensor]  # (source, items (B, U)) -> its scores (B, U), NaN for items it does not know


def union(lists: Sequence[Tensor]) -> Tensor:
    """(B, U): the distinct items of several lists, in ascending order, among places that hold -1."""
    items = torch.cat(list(lists), 1).sort(1).values
    repeated = items[:, 1:] == items[:, :-1]
    items[:, 1:].masked_fill_(repeated, -1)
    return items


def standardised(values: Tensor, listed: Tensor) -> Tensor:
    """Scores (B, U) of a source in standard deviations above the mean of the scores (B, n) in its own list.

    Empty places of the list have the score -inf. An item that the source does not know (NaN) is as good as the last
    of the list. All are 0 where the list has one score only.
    """
    present = torch.isfinite(listed)
    count = present.sum(1, keepdim=True).clamp(min=1)
    mean = listed.double().masked_fill(~present, 0.0).sum(1, keepdim=True) / count
    spread = (listed.double() - mean).masked_fill(~present, 0.0).square().sum(1, keepdim=True).div(count).sqrt()
    last = listed.masked_fill(~present, torch.inf).min(1, keepdim=True).values
    values = torch.where(torch.isnan(values), last, values)
    flat = spread <= 1e-12 * (1.0 + mean.abs())
    return torch.where(flat, 0.0, (values.double() - mean) / spread.clamp(min=1e-300)).float()


def reciprocal_ranks(items: Tensor, listed: Tensor) -> Tensor:
    """(B, U): 1 / (60 + rank) of items (B, U) in a list (B, n); 0 for items that it lacks.

    Cormack et al., Reciprocal Rank Fusion Outperforms Condorcet and Individual Rank Learning Methods, SIGIR 2009.
    """
    if not listed.shape[1]:
        return torch.zeros(items.shape, device=items.device)
    ordered, rank = listed.sort(1)
    at = torch.searchsorted(ordered, items.contiguous()).clamp(max=listed.shape[1] - 1)
    found = (ordered.gather(1, at) == items) & (items >= 0)
    return torch.where(found, 1.0 / (_OFFSET + 1 + rank.gather(1, at)), 0.0).float()


@dataclass(frozen=True, eq=False)
class Pool:
    """The items that S sources list for B queries, and how each source places them."""

    items: Tensor  # (B, U) ids, -1 for an empty place
    ranks: Tensor  # (B, U, S) `reciprocal_ranks`
    scores: Tensor | None  # (B, U, S) `standardised`; None where only ranks are needed

    @classmethod
    def of(cls, lists: Sequence[tuple[Tensor, Tensor]], depth: int, score: Score | None) -> Pool:
        """From the scores and ids (B, n) that each source lists, and `score`, which scores any items by a source."""
        items = union([listed for _, listed in lists])
        ranks = torch.stack([reciprocal_ranks(items, listed) for _, listed in lists], 2)
        if score is None:
            return cls(items, ranks, None)
        standard = [standardised(score(source, items), scores[:, :depth]) for source, (scores, _) in enumerate(lists)]
        return cls(items, ranks, torch.stack(standard, 2))

    def cpu(self) -> Pool:
        """The same in the memory of the CPU."""
        return Pool(self.items.cpu(), self.ranks.cpu(), None if self.scores is None else self.scores.cpu())

    def best(self, weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and ids (B, k) of the best items by weights (B, S), id -1 where none is left.

        An item is a candidate of a query if a source lists it that has a weight for this query.
        """
        features = self.ranks if self.scores is None else self.scores
        by = weights.unsqueeze(1)
        listed = ((self.ranks > 0) & (by > 0)).any(2)
        total = (features * by).sum(2).masked_fill(~listed, _NEVER)
        items = self.items.masked_fill(~listed, -1)
        short = max(0, k - items.shape[1])
        total, items = F.pad(total, (0, short), value=_NEVER), F.pad(items, (0, short), value=-1)
        most = k + _TIES
        if k and total.shape[1] > 2 * most:  # sort the best alone, unless equal scores end beyond them
            best, at = total.topk(most, dim=1)
            if not bool(((best[:, -1] == best[:, k - 1]) & torch.isfinite(best[:, -1])).any()):
                total, items = best, items.gather(1, at)
        return in_order(total, items, k)


def query_weights(weights: Tensor, known: Tensor) -> Tensor:
    """(B, S): the weights (S,) of the sources that know each query (B, S).

    Where none of them has a weight, all that know the query count alike; where no source does, all sources.
    """
    own = weights.to(known.device) * known
    alike = torch.where(known.any(1, keepdim=True), known.float(), 1.0)
    return torch.where(own.any(1, keepdim=True), own, alike)


def shares(items: Tensor, lists: Sequence[Tensor]) -> Tensor:
    """(B, S): the share of a final list (B, k) that each source has among its own k best items.

    Several sources may have the same item, so the shares of a query may add up to more than 1.
    """
    own = [reciprocal_ranks(items, listed[:, : items.shape[1]]) > 0 for listed in lists]
    count = (items >= 0).sum(1).clamp(min=1)
    return torch.stack([found.sum(1) / count for found in own], 1)
