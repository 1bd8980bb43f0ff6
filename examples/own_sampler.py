"""A sampler of your own, proved by the contract and trained. Run it, or run `pytest examples/own_sampler.py`."""

import math

import torch

import sparring
from sparring.core import Bag, Candidates, Exclude
from sparring.data import make_world
from sparring.negatives import InBatch, Negatives, Union
from sparring.testing import NegativesContract


class Stratified(Negatives):
    """One item from each of n equal slices of the catalogue: uniform, with less variance."""

    def __init__(self, n_items, n):
        super().__init__()
        self.n_items, self.n, self.log_rate = n_items, n, math.log(n / n_items)

    def forward(self, step):
        u = torch.rand(self.n, generator=step.generator, device=step.q.device, dtype=torch.float64)
        ids = ((torch.arange(self.n, device=u.device) + u) * (self.n_items / self.n)).long().clamp(max=self.n_items - 1)
        return Bag((Candidates(ids, step.encode(ids), torch.tensor(-self.log_rate), Exclude(step.item_ids)),))

    def log_count(self, ids, step):
        return torch.full(ids.shape, self.log_rate, device=ids.device)

    def size(self, step):
        return self.n


class TestStratified(NegativesContract):
    make = lambda self, world: Stratified(world.n_items, 8)  # noqa: E731
    resized = lambda self, world, n: Stratified(world.n_items, n)  # noqa: E731


if __name__ == "__main__":
    data = make_world(queries=400, items=200, seed=0).interactions
    split = sparring.split(data, "random", valid=0.1, test=0.2, seed=0)
    train, setup = split.train, sparring.Setup.of(dim=16, batch_size=256, epochs=15, lr=0.02)
    popularity = sparring.recipes.item_frequency(train)
    negatives = Union(InBatch(popularity), Stratified(train.n_items, 50))  # it combines with every other sampler
    run = sparring.compose(train, setup, sparring.Term(1.0, negatives))
    print(sparring.describe_batch(run, split))
    fitted = sparring.fit(run, split, device="cpu")
    print(f"recall@20 {fitted.test.metrics['recall@20']:.4f}")
