"""Rates of this machine for the cost model of docs/lab/scale.md, measured in each rank while all ranks measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparring.core.ranks import Group
from sparring.core.types import Exclude
from sparring.kernels import weighted_logsumexp
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.training.optimizers import optimizers

REPEATS = 25


@dataclass(frozen=True)
class Rates:
    """Seconds per operation, in CPU time of this rank or in wall time."""

    pair: float  # a query and a shared candidate scored and trained at this dimension, the own positive excluded
    far: float  # the same where the scores and vectors of a step do not fit a cache
    own: float  # a query and its own candidate, from vectors at hand, scored and trained
    product: float  # a query and a candidate scored, no gradient, to keep a few of many
    draw: float  # a random number with a logarithm
    look: float  # a row looked up and normalised, and its gradient as a row
    update: float  # a row of a table summed and moved
    byte: float  # received from another rank, gathered or summed


def quick(work: Callable[[], object], clock: Callable[[], float], repeats: int = REPEATS) -> float:
    """Seconds of one call: the minimum of several, since other load only adds."""
    work()
    taken = []
    for _ in range(repeats):
        began = clock()
        work()
        taken.append(clock() - began)
    return min(taken)


def measure(ranks: Group, n: int, dim: int, batch: int, clock: Callable[[], float] = time.process_time) -> Rates:
    own, shared, some = batch // ranks.world, 2 * batch, 64
    q, emb = torch.randn(own, dim, requires_grad=True), torch.randn(shared, dim, requires_grad=True)
    ids = torch.randint(n, (batch,))
    model = Retriever(IdTower(n, dim), IdTower(n, dim))
    rule = optimizers(model, "row-adagrad", 0.01, 0.0)[0]
    small, large = torch.zeros(8), torch.zeros(batch * 4 // ranks.world, dim)
    bounds = range(0, len(large) * ranks.world + 1, len(large))
    mask, candidates = Exclude(torch.randint(n, (own,))), torch.randint(n, (shared,))
    weights, places = torch.zeros(shared), torch.randint(shared, (own * some,))

    def train() -> None:
        weighted_logsumexp(q, emb, weights, mask.places(candidates)).sum().backward()

    every, zeros = torch.randn(n, dim, requires_grad=True), torch.zeros(n)

    def train_all() -> None:
        weighted_logsumexp(q, every, zeros, mask.places(torch.arange(n))).sum().backward()

    def train_own() -> None:
        weighted_logsumexp(q, emb.index_select(0, places).unflatten(0, (own, some)), weights[:some]).sum().backward()

    @torch.no_grad()
    def score() -> None:
        (q @ emb.T).topk(16, 1)

    def look() -> None:
        model.encode_items(ids).sum().backward()
        model.zero_grad(set_to_none=True)

    def look_and_update() -> None:
        model.encode_items(ids).sum().backward()
        rule.step()
        rule.zero_grad(set_to_none=True)

    def least(work: Callable[[], object]) -> float:
        return quick(work, clock)

    latency = least(lambda: ranks.gather_parts(small[None], range(ranks.world + 1)))
    moved = least(lambda: ranks.scatter_sum(ranks.gather_parts(large, bounds), bounds))
    looked = least(look)
    return Rates(
        pair=least(train) / (own * shared),
        far=quick(train_all, clock, 4) / (own * n),
        own=least(train_own) / (own * some),
        product=least(score) / (own * shared),
        draw=least(lambda: torch.rand(own, shared).log_()) / (own * shared),
        look=looked / batch,
        update=max(least(look_and_update) - looked, 0.0) / batch,
        byte=max(moved - 2 * latency, 0.0) / (2 * large.nbytes * (ranks.world - 1)),
    )
