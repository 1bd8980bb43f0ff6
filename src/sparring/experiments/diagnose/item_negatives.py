"""Which negatives an item met: what a run's sampler sets against it when it is the positive of a training pair."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.experiments.diagnose.measures import offered
from sparring.recipes.run import Run
from sparring.training.step import contrast

STEPS = 24
SECONDS = 3.0
BATCH = 8192  # at most so many pairs in a batch: what is drawn for one of them hardly changes beyond, the time does


@dataclass(frozen=True)
class Met:
    """What one item met as the positive of sampled training pairs, one pair in each step; the strongest negatives first.

    items    dense ids (K,) of negatives
    times    (K,) how often each was set against the item, per step
    shares   (K,) each one's part in the sum that the positive is held against: softmax_j(q . e_j / tau + log_w_j) in the mean over steps,
             terms of the run by their weights
    """

    items: list[int]
    times: list[float]
    shares: list[float]
    pairs: int  # training pairs of the item
    steps: int
    batch: int
    candidates: float  # that count, per step
    distinct: int  # items among them, over all steps
    made_up: float  # share of the sum that is no item of the catalogue but a made-up vector
    cut: bool  # the time ran out before all steps were taken


@torch.no_grad()
def met(
    run: Run, split: Split, item: int, *, limit: int = 30, steps: int = STEPS, seconds: float = SECONDS, seed: int = 0
) -> Met:
    """Draw batches as training does, each with one pair of the item, and add up what counts against it.

    What the negatives remember (a cache, a memory) stays as it is, and so does the run. It ends after `steps` steps, or after the first
    that is over when `seconds` have passed.

        met(opponents.own(folder, split), split, item=17).items
    """
    device = next(run.model.parameters()).device
    queries, items = (column.long().to(device) for column in split.train.pairs())
    n = split.train.n_items
    if not 0 <= item < n:
        raise UserError(f"dense item {item} is outside 0..{n - 1}")
    own = (items == item).nonzero().flatten()
    if not len(own):
        raise UserError("no training pair has this item: as a positive it met no negatives")
    size = min(run.setup.batches.batch_size, BATCH, len(items))
    company, generator = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed + 1)
    positives = split.train.positives().to(device)
    times, shares = (
        torch.zeros(n + 1, dtype=torch.float64, device=device) for _ in range(2)
    )  # the last place: made-up vectors
    candidates, taken, end = 0.0, 0, time.monotonic() + seconds
    for at in torch.randint(len(own), (steps,), generator=company).tolist():
        rows = torch.cat([own[at : at + 1], _others(len(items), size, int(own[at]), company).to(device)])
        _, step, outcome = contrast(run, queries[rows], items[rows], generator, positives)
        whole = sum(term.weight for term in run.terms)
        for term, bag in zip(run.terms, outcome.bags, strict=True):
            ids, weights, counts = [], [], []
            for block in bag.plain().blocks:
                found, _, weight, _, counted = offered(step, block, 1)
                ids.append(torch.where(found < 0, n, found).flatten())
                weights.append(weight.flatten())
                counts.append(counted.flatten())
            where, weight, count = torch.cat(ids), torch.cat(weights), torch.cat(counts)
            counts_of = torch.where(torch.isneginf(weight), 0.0, count)
            times += torch.bincount(where, counts_of, n + 1)
            shares += torch.bincount(where, term.weight / whole * weight.softmax(-1).nan_to_num(nan=0.0), n + 1)
            candidates += float((counts_of > 0).sum())
        taken += 1
        if time.monotonic() > end:
            break
    best = torch.argsort(shares[:n], descending=True, stable=True)[:limit]
    best = best[times[best] > 0]
    return Met(
        items=best.tolist(),
        times=(times[best] / taken).tolist(),
        shares=(shares[best] / taken).tolist(),
        pairs=len(own),
        steps=taken,
        batch=size,
        candidates=candidates / taken,
        distinct=int((times[:n] > 0).sum()),
        made_up=float(shares[n]) / taken,
        cut=taken < steps,
    )


def _others(n: int, size: int, row: int, generator: torch.Generator) -> Tensor:
    """The rest of a batch: size - 1 other rows, distinct unless there are so many that the same two hardly ever meet."""
    drawn = (
        torch.randperm(n, generator=generator)[:size]
        if n <= 1 << 20
        else torch.randint(n, (size,), generator=generator)
    )
    return drawn[drawn != row][: size - 1]
