"""The partition function of a bag, and the draws that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sparring.core.exclusion import KnownPositives, KnownQueries
from sparring.core.types import Bag, Candidates, DrawCounts, Outcome, Step
from sparring.kernels import Mix, reference, weighted_logsumexp
from sparring.kernels.native.ids import distinct

_MERGED = 1 << 22  # pairs (query, candidate) from which copies of a candidate are looked for
_FEWER = 0.7  # distinct candidates per candidate from which on merging them costs more than it saves
_ROWS = 4096  # candidates that are compared at a time
_LEAST = torch.finfo(torch.float32).min


def log_partition(step: Step, bag: Bag) -> tuple[Tensor, DrawCounts]:
    """log sum_j exp(q_i . e_j / tau_i + log_w_ij) over all blocks of the bag, (B,), and the draws of each block.

    The sum is -inf if nothing counts. On a GPU the counts of a closed form are complete after the backward pass.
    """
    sums, counts = zip(*(_log_sum(step, block) for block in bag.blocks), strict=True)
    return sums[0] if len(sums) == 1 else reference.safe_logsumexp(torch.stack(sums, -1)), counts


def drawn_blocks(step: Step, outcome: Outcome) -> Iterator[tuple[Candidates, Tensor | None]]:
    """Every block of a step with the draws of each candidate (see DrawCounts); None if nothing was drawn.

    The counts come from the loss. For a loss that returns none they are computed here.
    """
    for i, bag in enumerate(outcome.bags):
        counts = outcome.outputs[i].draw_counts if outcome.outputs else None
        for j, block in enumerate(bag.blocks):
            if counts is not None:
                yield block, counts[j]
            elif block.draws is None:
                yield block, block.drawn
            else:
                with torch.no_grad():
                    yield block, _log_sum(step, block)[1]


def _log_sum(step: Step, block: Candidates) -> tuple[Tensor, Tensor | None]:
    shared = step.shared
    if shared is not None and _same_for_all_rows(step, block):
        known = None if block.exclude is None else step.known(shared.ids).places(block.ids)
        total = weighted_logsumexp(shared.q / step.tau, block.emb, block.log_w, known)
        return total.index_select(0, shared.rows), block.drawn
    counts = block.drawn if block.draws is None else torch.zeros(block.ids.shape, device=step.q.device)
    block = _distinct(step, block)
    places = block.exclude.places(block.ids) if block.exclude else None
    mix = Mix(block.mix.weights, block.mix.places(), block.mix.offset) if block.mix else None
    wanted = None if block.draws is None else counts
    total = weighted_logsumexp(step.scaled, block.emb, block.log_w, places, block.draws, wanted, mix, block.seed)
    return total, counts


def _distinct(step: Step, block: Candidates) -> Candidates:
    """The block with each candidate once, at the sum of its weights, where that gives the same sum for less work.

    A batch of texts for labels holds the frequent labels many times: of 16,384 positives of OEWN-Hyper3 about 5,000 are
    distinct. Copies must have the same vector, which they have unless dropout made them differ. On a GPU the number of
    distinct candidates would have to be waited for.
    """
    ids, emb, log_w = block.ids, block.emb, block.log_w
    plain = block.draws is None and block.seed is None and block.mix is None and block.shared
    plain = plain and not isinstance(block.exclude, KnownQueries)  # which names candidates by their places in the batch
    weights = log_w.dim() <= 1 and not log_w.requires_grad
    if not plain or not weights or ids.is_cuda or len(step.q) * len(ids) < _MERGED:
        return block
    if distinct(ids) > _FEWER * len(ids):
        return block
    items, which = torch.unique(ids, return_inverse=True)
    if items[0] < 0:
        return block
    first = torch.full_like(which[: len(items)], len(ids)).scatter_reduce_(0, which, torch.arange(len(ids)), "amin")
    once = emb.index_select(0, first)
    with torch.no_grad():
        same = all(torch.equal(part, once[at]) for part, at in zip(emb.split(_ROWS), which.split(_ROWS), strict=True))
        if not same:
            return block
        top = log_w.amax().clamp(min=_LEAST)
        sums = log_w.new_zeros(len(items)).index_add_(0, which, (log_w - top).exp().expand(len(ids)))
    return replace(block, ids=items, emb=once, log_w=sums.log() + top)


def _same_for_all_rows(step: Step, block: Candidates) -> bool:
    """Whether the sum depends on a row through its query alone."""
    plain = block.draws is None and block.seed is None and block.mix is None
    by_query = block.exclude is None or isinstance(block.exclude, KnownPositives)
    return plain and by_query and block.shared and block.log_w.dim() < 2 and step.tau.dim() == 0
