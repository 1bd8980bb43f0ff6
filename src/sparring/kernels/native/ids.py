"""Ids of some rows; ids in a list: how many are distinct, and where given ids occur, by hash instead of by sorting."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sparring.kernels.native.library import function, plain

_TAKE = "ids_take", "plplp"
_DISTINCT, _FIND, _PAIRS = ("ids_distinct", "plp"), ("ids_find", "plplppp"), ("ids_pairs", "ppplpp")
_MOST = 1 << 30  # places are 32-bit numbers


def taken(column: Tensor, rows: Tensor) -> Tensor:
    """column[rows] (n,) int64."""
    kernel = function(*_TAKE)
    fits = plain(column, rows) and column.dtype == torch.int32 and rows.dtype == torch.int64 and column.is_contiguous()
    if kernel is None or not fits:
        return column.index_select(0, rows).long()
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    if kernel(column.data_ptr(), len(column), rows.data_ptr(), len(rows), out.data_ptr()):
        raise IndexError(f"a row is outside a column of {len(column)}")
    return out


def distinct(ids: Tensor) -> int:
    """The number of distinct ids (n,)."""
    kernel = function(*_DISTINCT)
    if kernel is None or not _fits(ids):
        return len(torch.unique(ids))
    ids, count = ids.contiguous(), ctypes.c_int64()
    kernel(ids.data_ptr(), len(ids), ctypes.addressof(count))
    return count.value


def pairs(ids: Tensor, wanted: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All (row, place) with ids[place] = wanted[k] and row = rows[k], or k without rows, by k and then by place."""
    finds, lists = function(*_FIND), function(*_PAIRS)
    given = (ids, wanted) if rows is None else (ids, wanted, rows)
    if finds is None or lists is None or not _fits(*given):
        return _pairs(ids, wanted, rows)
    ids, wanted = ids.contiguous(), wanted.contiguous()
    rows = None if rows is None else rows.contiguous()
    first, following = (torch.empty(len(each), dtype=torch.int32) for each in (wanted, ids))
    total = ctypes.c_int64()
    places = first.data_ptr(), following.data_ptr()
    finds(ids.data_ptr(), len(ids), wanted.data_ptr(), len(wanted), *places, ctypes.addressof(total))
    row, place = torch.empty(2, total.value, dtype=torch.int64)
    lists(*places, 0 if rows is None else rows.data_ptr(), len(wanted), row.data_ptr(), place.data_ptr())
    return row, place


def _pairs(ids: Tensor, wanted: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(ids, stable=True)
    low = torch.searchsorted(ordered, wanted)
    count = torch.searchsorted(ordered, wanted, right=True) - low
    which = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    within = torch.arange(len(which), device=count.device) - (torch.cumsum(count, 0) - count)[which]
    return which if rows is None else rows[which], order[low[which] + within]


def _fits(*columns: Tensor) -> bool:
    return plain(*columns) and all(each.dtype == torch.int64 and len(each) < _MOST for each in columns)
