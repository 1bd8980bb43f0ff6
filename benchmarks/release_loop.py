"""A plain PyTorch loop that does what the XIR release does, at the same cost: the yardstick of in_batch.py.

Written from the formulas of Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, and from the
published description of how its release computes them: pairs come one by one from a Dataset, popularity and
everything computed from it is float64, resampling draws B x B indices and gathers scores, the cache counts its draws
with `torch.unique`, both tables are dense and start at N(0, 1), Adam has coupled weight decay. Item ids are shifted
by one: row 0 is the padding row.

    python benchmarks/release_loop.py --methods ssl_pop,bir,xir --steps 12
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from _shared import Clock, Pairs, gowalla_xir, quality, table

QUALITY = ("recall@20", "ndcg@20", "ndcg@10")
METHODS = ("ssl", "ssl_pop", "mns", "g_tower", "bir", "xir")


@dataclass(frozen=True)
class Trained:
    """The cost of a loop and its final tables; `items` has no padding row."""

    steps: int
    pairs: int
    cpu: float
    wall: float
    users: np.ndarray
    items: np.ndarray


class _PairSet(Dataset):
    def __init__(self, data: Pairs) -> None:
        self.users, self.items = data.users, data.items + 1

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, row: int) -> tuple[int, int]:
        return self.users[row], self.items[row]


class _Gaps:
    """Streaming estimate of item frequency: the largest mean gap over several hash arrays (G-Tower)."""

    sizes = (4993, 4999, 5003, 5009, 5011)

    def __init__(self, alpha: float = 1e-4) -> None:
        self.alpha, self.now = alpha, 0
        self.last = [torch.zeros(size) for size in self.sizes]
        self.gap = [torch.ones(size) for size in self.sizes]

    def log_prob(self, items: Tensor) -> Tensor:
        self.now += 1
        longest = torch.zeros(len(items))
        for size, last, gap in zip(self.sizes, self.last, self.gap, strict=True):
            bucket = (items + 1) % size
            moved = (1 - self.alpha) * gap[bucket] + self.alpha * (self.now - last[bucket])
            last[bucket] = float(self.now)
            gap[bucket] = moved
            longest = torch.maximum(longest, moved)
        return -torch.log(longest)


class _Loss:
    """The loss of one batch by method; holds the method's state."""

    def __init__(self, method: str, data: Pairs, batch_size: int, lam: float) -> None:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
        self.method, self.n_items, self.size, self.lam = method, data.n_items, batch_size, lam
        counts = np.concatenate([[0.0], data.item_counts().astype(np.float64)])
        self.pop = torch.from_numpy(counts / counts.sum())  # float64, as a MATLAB matrix gives it
        self.gaps = _Gaps()
        self.occurrence = torch.ones(data.n_items + 1)
        self.cache = torch.randint(1, data.n_items + 1, (batch_size,))

    def __call__(self, query: Tensor, item: Tensor, items: Tensor, table: nn.Embedding) -> Tensor:
        scores = query @ item.T
        positive = torch.sum(query * item, dim=-1)
        if self.method == "ssl":
            return self._softmax(positive, scores)
        if self.method == "g_tower":
            log_q = self.gaps.log_prob(items)
            return self._softmax(positive - log_q, scores - log_q)
        log_pop = torch.log(self.pop[items])
        if self.method == "ssl_pop":
            return self._softmax(positive - log_pop, scores - log_pop)
        if self.method == "mns":
            drawn = torch.randint(0, self.n_items + 1, (len(items),))
            share = len(drawn) / (len(drawn) + len(items))
            offered = torch.cat([items, drawn])
            log_q = torch.log(share * self.pop[offered] + (1 - share) / (self.n_items + 1))
            logits = torch.cat([scores, query @ table(drawn).T], dim=1) - log_q
            return self._softmax(positive - log_pop, logits)
        if self.method == "bir":
            kept = self._draw(scores, log_pop, len(items))
            # the kept draws are given equal probability: a constant that cancels, computed for every draw all the same
            log_q = log_pop[kept]
            log_q = -torch.log((self.n_items + 1) * torch.ones_like(log_q))
            constant = -torch.log((self.n_items + 1) * torch.ones_like(log_pop))
            return self._softmax(positive - constant, torch.gather(scores, 1, kept) - log_q)
        return self._xir(query, scores, positive, items, log_pop, table)

    def _xir(
        self, query: Tensor, scores: Tensor, positive: Tensor, items: Tensor, log_pop: Tensor, table: nn.Embedding
    ) -> Tensor:
        half = self.size // 2
        cached = query @ table(self.cache).T
        log_cached = torch.log(self.pop[self.cache])
        from_batch = self._draw(scores, log_pop, half)
        from_cache = self._draw(cached, log_cached, half)
        drawn = torch.cat([items[from_batch], self.cache[from_cache]], dim=1)
        distinct, times = torch.unique(drawn, return_counts=True)
        self.occurrence[distinct] += times
        chosen = torch.multinomial(self.occurrence[distinct], self.size, replacement=True)
        loss_batch = self._softmax(positive, torch.gather(scores, 1, from_batch))
        loss_cache = self._softmax(positive, torch.gather(cached, 1, from_cache))
        self.cache = distinct[chosen]
        return self.lam * loss_cache + (1 - self.lam) * loss_batch

    @staticmethod
    def _draw(scores: Tensor, log_q: Tensor, n: int) -> Tensor:
        with torch.no_grad():
            weight = torch.softmax(scores - log_q, dim=-1)
            return torch.multinomial(weight, n, replacement=True)

    @staticmethod
    def _softmax(positive: Tensor, logits: Tensor) -> Tensor:
        everything = torch.cat([positive.unsqueeze(1), logits], dim=1)
        return (torch.logsumexp(everything, dim=1) - positive).mean()


def steps(
    method: str,
    data: Pairs,
    n_steps: int,
    *,
    batch_size: int = 2048,
    dim: int = 32,
    lr: float = 0.01,
    weight_decay: float = 1e-5,
    lam: float = 0.2,
    seed: int = 10,
    warm_up: int = 2,
) -> Trained:
    """Train for warm_up + n_steps batches (over as many epochs as that takes) and return the cost of the last n_steps.

    Building the tables and the first shuffle of the pairs are not counted.
    """
    torch.manual_seed(seed)
    users, items = nn.Embedding(data.n_users, dim), nn.Embedding(data.n_items + 1, dim)
    loss_of = _Loss(method, data, batch_size, lam)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.95)
    loader = DataLoader(_PairSet(data), batch_size=batch_size, shuffle=True)
    done, pairs, clock = -warm_up, 0, Clock()
    for _ in range(math.ceil((warm_up + n_steps) / len(loader))):
        for user, item in loader:
            if done == 0:
                clock, pairs = Clock(), 0
            optimizer.zero_grad()
            loss = loss_of(users(user), items(item), item, items)
            loss.backward()
            optimizer.step()
            done, pairs = done + 1, pairs + len(user)
            if done == n_steps:
                break
        else:
            schedule.step()
    cpu, wall = clock.read()
    return Trained(done, pairs, cpu, wall, users.weight.detach().numpy(), items.weight.detach().numpy()[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--quality", action="store_true", help="also rank all items for all users and print recall and ndcg"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data = gowalla_xir()
    print(f"release loop on {data.source}: B = 2048, d = 32, {given.threads} thread(s), {given.steps} steps")
    rows = []
    for method in given.methods.split(","):
        ran = steps(method, data, given.steps)
        row = [method, f"{ran.cpu / ran.steps:.3f}", f"{ran.wall / ran.steps:.3f}", f"{ran.pairs / ran.cpu:,.0f}"]
        if given.quality:
            found = quality(ran.users, ran.items, data, k=(10, 20))
            row += [f"{found[name]:.4f}" for name in QUALITY]
        rows.append(row)
    print(
        table(
            ["method", "CPU s per step", "wall s per step", "pairs per CPU s", *(QUALITY if given.quality else ())],
            rows,
        )
    )


if __name__ == "__main__":
    main()
