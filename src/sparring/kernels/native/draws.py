"""Draws from a generator of PyTorch, several times as fast on a CPU: the integers of torch.randint, and orders."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from sparring.kernels.native.library import function

_KERNEL, _ORDER = ("randint", "pllp"), ("order", "plp")
_MOST = 1 << 28  # PyTorch draws larger ranges from two words
_LEAST = 1 << 10  # numbers; fewer are not worth a copy of the state


def randint(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """torch.randint(high, shape) int64, number by number; the generator moves on as PyTorch moves it.

    randint(40_981, (4096, 1), torch.Generator().manual_seed(0))
    """
    fits = generator.device.type == "cpu" and 0 < high < _MOST and math.prod(shape) >= _LEAST
    if not fits or function(*_KERNEL) is None or not _same():
        return torch.randint(high, shape, generator=generator, device=generator.device)
    out = torch.empty(shape, dtype=torch.int64)
    _draw(high, out, generator)
    return out


def order(n: int, generator: torch.Generator) -> Tensor:
    """A random order (n,) int64: torch.rand(n).argsort(), and where two of these numbers are equal the first is first.

    order(8192, torch.Generator().manual_seed(0))
    """
    drawn = torch.rand(n, generator=generator, device=generator.device)
    kernel = function(*_ORDER)
    if kernel is None or generator.device.type != "cpu" or n >= 1 << 31:
        return drawn.argsort(stable=True)
    out = torch.empty(n, dtype=torch.int64)
    kernel(drawn.data_ptr(), n, out.data_ptr())
    return out


def _draw(high: int, out: Tensor, generator: torch.Generator) -> None:
    kernel = function(*_KERNEL)
    assert kernel is not None
    state = generator.get_state()
    kernel(state.data_ptr(), high, out.numel(), out.data_ptr())
    generator.set_state(state)


@cache
def _same() -> bool:
    """Whether this version of PyTorch keeps the state and draws the numbers that the kernel knows."""
    ours, theirs = (torch.Generator().manual_seed(0) for _ in range(2))
    for n in (700, 1000):  # across the turns of the state
        drawn = torch.empty(n, dtype=torch.int64)
        _draw(1_000_003, drawn, ours)
        if not torch.equal(drawn, torch.randint(1_000_003, (n,), generator=theirs)):
            return False
    return torch.equal(ours.get_state(), theirs.get_state())
