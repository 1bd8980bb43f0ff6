"""The negatives of one item: the candidates that a run's sampler sets against it as the positive of a training pair."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.experiments.diagnose.measures import block_terms
from sparring.recipes.run import Run
from sparring.training.step import TrainingRows, sample_steps

STEPS = 24
SECONDS = 3.0
BATCH = 8192  # most pairs in a batch: more of them cost time and hardly change the draws for one pair


@dataclass(frozen=True)
class ItemNegatives:
    """The negatives of an item as the positive of sampled training pairs, one pair per step; the strongest first.

    items    (K,) dense ids of negatives
    times    (K,) draws of each per step
    shares   (K,) share of each in the partition function: softmax_j(q . e_j / tau + log_w_j), the mean over steps, with
             the terms of the run by their weights
    """

    items: list[int]
    times: list[float]
    shares: list[float]
    pairs: int  # training pairs of the item
    steps: int
    batch: int
    candidates: float  # unmasked, per step
    distinct: int  # items among them, over all steps
    made_up: float  # share of synthetic vectors, which are no items of the catalogue
    cut: bool  # the time ran out before the last step


@torch.no_grad()
def negatives_of_item(
    run: Run, split: Split, item: int, *, limit: int = 30, steps: int = STEPS, seconds: float = SECONDS, seed: int = 0
) -> ItemNegatives:
    """Draw training batches, each with one pair of the item, and sum up its unmasked candidates.

    The run, with its caches and memories, is left unchanged. It ends after `steps` steps, or after the first one that
    ends `seconds` after the start.

        negatives_of_item(load_for_diagnosis(folder, split), split, item=17).items
    """
    device = next(run.model.parameters()).device
    training = TrainingRows(run, split.train)
    n = split.train.n_items
    if not 0 <= item < n:
        raise UserError(f"dense item {item} is outside 0..{n - 1}")
    pairs = (training.items == item).nonzero().flatten()
    if not len(pairs):
        raise UserError("no training pair has this item, so it has no negatives")
    size = min(run.setup.batches.batch_size, BATCH, training.batches.n_rows)
    generator = torch.Generator().manual_seed(seed)
    times, shares = (
        torch.zeros(n + 1, dtype=torch.float64, device=device) for _ in range(2)
    )  # the last entry: synthetic vectors
    candidates, taken, end = 0.0, 0, time.monotonic() + seconds
    if training.by_query is None:
        positive = pairs[torch.randint(len(pairs), (steps,), generator=generator)]
    else:
        chances = training.by_query.chances()[pairs]
        positive = pairs[torch.multinomial(chances, steps, replacement=True, generator=generator)]
    batches = (training.around(pair, size, generator) for pair in positive.split(1))
    for _, step, outcome in sample_steps(run, split, seed=seed + 1, batches=batches):
        total = sum(term.weight for term in run.terms)
        for term, bag in zip(run.terms, outcome.bags, strict=True):
            ids, weights, counts = [], [], []
            for block in bag.plain().blocks:
                found, _, weight, _, counted = block_terms(step, block, 1)
                ids.append(torch.where(found < 0, n, found).flatten())
                weights.append(weight.flatten())
                counts.append(counted.flatten())
            where, weight, count = torch.cat(ids), torch.cat(weights), torch.cat(counts)
            counts_of = torch.where(torch.isneginf(weight), 0.0, count)
            times += torch.bincount(where, counts_of, n + 1)
            shares += torch.bincount(where, term.weight / total * weight.softmax(-1).nan_to_num(nan=0.0), n + 1)
            candidates += float((counts_of > 0).sum())
        taken += 1
        if time.monotonic() > end:
            break
    best = torch.argsort(shares[:n], descending=True, stable=True)[:limit]
    best = best[times[best] > 0]
    return ItemNegatives(
        items=best.tolist(),
        times=(times[best] / taken).tolist(),
        shares=(shares[best] / taken).tolist(),
        pairs=len(pairs),
        steps=taken,
        batch=size,
        candidates=candidates / taken,
        distinct=int((times[:n] > 0).sum()),
        made_up=float(shares[n]) / taken,
        cut=taken < steps,
    )
