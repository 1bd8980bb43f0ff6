"""The partition function of a bag, and the draws that it stands for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, DrawCounts, Outcome, Step
from sparring.kernels import Mix, reference, weighted_logsumexp


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
    places = block.exclude.places(block.ids) if block.exclude else None
    mix = Mix(block.mix.weights, block.mix.places(), block.mix.offset) if block.mix else None
    counts = block.drawn if block.draws is None else torch.zeros(block.ids.shape, device=step.q.device)
    wanted = None if block.draws is None else counts
    total = weighted_logsumexp(step.scaled, block.emb, block.log_w, places, block.draws, wanted, mix, block.seed)
    return total, counts
