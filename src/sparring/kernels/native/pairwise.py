"""One step of a pairwise loss over two tables: losses, and both tables updated by their row rules."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparring.kernels.native.library import function, plain
from sparring.kernels.native.rows import Rule

Excluded = Literal["none", "positive", "known"]
Kind = Literal["logistic", "hinge", "gbce"]
_EXCLUDED: tuple[Excluded, ...] = ("none", "positive", "known")
_KINDS: tuple[Kind, ...] = ("logistic", "hinge", "gbce")
_NAME = "pairwise", "p"


@dataclass(frozen=True)
class Penalty:
    """A pairwise loss; `parameter` is the margin of the hinge, or the calibration of gBCE over `n_items`.

    `offset` is added to the scores of gBCE.
    """

    kind: Kind
    parameter: float = 0.0
    n_items: int = 0
    offset: float = 0.0


class _Step(ctypes.Structure):  # `Step` in pairwise.cpp
    _fields_ = [
        ("queries", Rule),
        ("items", Rule),
        *((name, ctypes.c_void_p) for name in ("query_slot", "item_slot", "query_of", "item_of", "pairs", "negative")),
        *((name, ctypes.c_void_p) for name in ("start", "known", "marks", "scale", "losses")),
        *((name, ctypes.c_int64) for name in ("n_pairs", "b", "n", "kept", "d")),
        *((name, ctypes.c_int32) for name in ("loss", "exclude", "threads")),
        *((name, ctypes.c_float) for name in ("sharp", "parameter", "others", "offset")),
    ]


def available(*tables: Tensor) -> bool:
    """Whether the kernel is there and takes these tables."""
    fits = plain(*tables) and all(t.dtype == torch.float32 and t.is_contiguous() for t in tables)
    return fits and all(len(t) < 1 << 31 for t in tables) and function(*_NAME) is not None


def slots(table: Tensor) -> Tensor:
    """A number for each row of a table, which a step uses and leaves at 0."""
    return torch.zeros(len(table), dtype=torch.int32)


def marked(start: Tensor, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The offsets (int64) and sorted items (int32) of every query, and bits by which a step tells most others apart."""
    kernel = function("pairwise_marks", "pplp")
    assert kernel is not None
    marks = torch.zeros_like(items)
    kernel(start.data_ptr(), items.data_ptr(), len(start) - 1, marks.data_ptr())
    return start, items, marks


def pairwise(
    rules: tuple[Rule, Rule],
    slots: tuple[Tensor, Tensor],
    columns: tuple[Tensor, Tensor],
    pairs: Tensor,
    negative: Tensor,
    scale: Tensor,
    tau: float,
    penalty: Penalty,
    kept: int | None = None,
    exclude: Excluded = "none",
    known: tuple[Tensor, Tensor, Tensor] | None = None,
    threads: int | None = None,
) -> Tensor:
    """Losses (B,); the rows of queries and items are updated by the gradients of sum_i scale_i loss_i.

    `columns` are the queries and items (int32) of all pairs, `pairs` (B,) those of the batch. Each query meets its
    negatives (B, n), or the `kept` hardest of them that are not excluded. The formulas are in pairwise.cpp. `known`
    comes from `marked`. `threads` (PyTorch's unless given) change no bit.
    """
    kernel = function(*_NAME)
    assert kernel is not None
    b, n = negative.shape
    assert b * (1 + n) < 1 << 31  # places of a batch are 32-bit numbers
    queries, items = rules
    assert all(column.dtype == torch.int32 and column.is_contiguous() for column in columns)
    pairs, negative, scale = pairs.long().contiguous(), negative.long().contiguous(), scale.float().contiguous()
    losses = torch.empty(b)
    step = _Step(
        *rules,
        *(each.data_ptr() for each in (*slots, *columns, pairs, negative)),
        *((0, 0, 0) if known is None else (each.data_ptr() for each in known)),
        *(scale.data_ptr(), losses.data_ptr()),
        *(len(columns[0]), b, n, n if kept is None else min(kept, n), queries.columns),
        *(_KINDS.index(penalty.kind), _EXCLUDED.index(exclude), threads or torch.get_num_threads()),
        *(1 / tau, penalty.parameter, penalty.n_items - 1, penalty.offset),
    )
    if kernel(ctypes.byref(step)):
        raise IndexError(f"an id is not a row of its table: {queries.rows} queries, {items.rows} items")
    return losses
