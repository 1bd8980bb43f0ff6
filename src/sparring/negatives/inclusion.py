"""Draws without replacement: `distinct` makes them, alike for all; `inclusion` says how likely each is to be among uneven ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distinct(size: Tensor, m: int, generator: torch.Generator) -> Tensor:
    """(..., m) whole numbers below size (...), every set of m as likely as any other; with repetition where size < m; 0 where it is 0."""
    u = torch.rand(*size.shape, m, dtype=torch.float64, generator=generator, device=size.device)
    # Floyd's algorithm: the k-th draw is below size - m + k + 1, and the last of those where it was drawn before
    size = size.unsqueeze(-1)
    enough = size >= m
    last = torch.where(enough, size - m + torch.arange(m, device=size.device), size - 1).clamp_(min=0)
    pick = torch.minimum((u * (last + 1)).long(), last)
    earlier = torch.ones(m, m, dtype=torch.bool, device=size.device).tril_(-1)
    again = ((pick.unsqueeze(-1) == pick.unsqueeze(-2)) & earlier).any(-1)
    # a draw also meets the last of an earlier one that was itself drawn before: chains of that are at most m - 1 long
    met = (pick.unsqueeze(-1) == last.unsqueeze(-2)) & earlier
    for _ in range(m - 2):
        again = again | (met & again.unsqueeze(-2)).any(-1)
    return torch.where(again & enough, last, pick)


def inclusion(chance: Tensor, m: int) -> Tensor:
    """(R, K): the chance that k is among m draws without replacement by the chances (R, K) of a first draw; a row sums to m.

        m = 1: p_k,   m = 2: p_k (1 + sum over l != k of p_l / (1 - p_l)),   else  int of p_k e^(-p_k t) P(fewer than m others by t) dt

    Where a row has m possible draws or fewer, each of them is certain. The integral is of the race of exponential clocks that the draw is;
    with log t as its variable the trapezoidal rule is exact to 1e-9.

        inclusion(torch.tensor([[0.5, 0.3, 0.2]]), 2)  # 0.8393, 0.6750, 0.4857
    """
    p = chance.double()
    if m == 1:
        return p
    if m == 2:
        odds = torch.where(p > 0, p / (1 - p).clamp(min=1e-300), 0.0)
        found = p * (1 + odds.sum(1, keepdim=True) - odds)
    else:
        found = torch.cat([_raced(rows, m) for rows in p.split(16)])
    certain = (p > 0) & ((p > 0).sum(1, keepdim=True) <= m)
    return torch.where(certain, 1.0, found)


def _raced(p: Tensor, m: int, step: float = 0.25) -> Tensor:
    least = float(torch.where(p > 0, p, 1.0).min())
    t = torch.arange(math.log(1e-10), math.log(50 / least) + step, step, dtype=p.dtype).exp()
    late = torch.exp(-p.unsqueeze(-1) * t)  # (R, K, T): not yet come at t

    def counted(order: range) -> list[Tensor]:
        """For each k the chances that 0..m-1 of those before it in this order have come, (m, R, T)."""
        some = torch.zeros(m, len(p), len(t), dtype=p.dtype)
        some[0] = 1
        found = {}
        for k in order:
            found[k] = some
            came = torch.zeros_like(some)
            came[1:] = some[:-1]
            some = torch.lerp(came, some, late[:, k])
        return [found[k] for k in range(len(order))]

    n = p.shape[1]
    before, after = counted(range(n)), counted(range(n - 1, -1, -1))
    # i of those before k and at most m - 1 - i of those after it
    fewer = [(a * b.cumsum(0).flip(0)).sum(0) for a, b in zip(before, after, strict=True)]
    return step * (p.unsqueeze(-1) * t * late * torch.stack(fewer, 1)).sum(-1)
