"""Exact top k over a catalogue in bounded memory, with deterministic tie-breaking."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.kernels import TRITON
from sparring.kernels.native import ranking

_TILE = 64  # most queries per matrix product
_GROUP = 32  # items reduced to their maximum before the first selection
_SPARE = 4  # items rescored beyond k, so that a difference in rounding rarely decides who is among them
_COLUMNS = 1 << 16  # items scored at once; the lists of further parts are merged
_CUDA_SCORES = 1 << 27  # scores held at once on a GPU by default, 512 MB
_NUMBERS = 1 << 21  # numbers of item vectors rescored at once
_ENOUGH = 128  # queries that repay the preparation of items
_NEVER = float("-inf")
_settings = threading.RLock()  # held while process-wide settings of torch are changed


def top_k(
    q: Tensor,
    items: Tensor | None,
    k: int,
    seen: Positives | None = None,
    query_ids: Tensor | None = None,
    block: int | None = None,
    prepared: Prepared | None = None,
) -> tuple[Tensor, Tensor]:
    """The k items with the largest inner product for every query: scores (B, k) and ids (B, k).

    Without `items`, q (B, N) has the scores themselves.

    Exact: equal to sorting all N scores by (score descending, id ascending), without the seen items of `query_ids`. If
    fewer than k unseen items are left, the rest holds id -1 and score -inf. A score depends on its two vectors alone
    (`inner_products`), so equal vectors tie, and a list does not depend on the other queries of the batch, on `block`
    (queries scored at once, rounded up to a multiple of 64) or on the number of threads. `prepared` is
    `prepare(items)`, for callers that rank the same items often.

    Unless `block` is given, a kernel ranks without storing the scores: kernels/topk.py on a GPU, and on a CPU
    kernels/native/ranking.cpp, for 128 queries or more, or for prepared items. Otherwise memory is bounded by block x
    min(N, 65536) scores per thread.

        scores, ids = top_k(model.encode_queries(users), model.item_vectors(), 10, train.positives(), users)

    Without a kernel, each group of 32 items is first reduced to its maximum. The best items are in the groups with the
    largest maxima, so only those are searched, and the selection costs a fraction of the matrix product. The best of
    these are scored again, since a matrix product rounds by the shape of the matrices and the place in them.
    """
    if q.dim() != 2 or (items is not None and (items.dim() != 2 or q.shape[1] != items.shape[1])):
        shape = None if items is None else tuple(items.shape)
        raise ValueError(f"q must be (B, D) and items (N, D), not {tuple(q.shape)} and {shape}")
    if k < 1 or (block is not None and block < 1):
        raise UserError(f"k and block must be at least 1, not {k} and {block}")
    if seen is not None and (query_ids is None or len(query_ids) != len(q)):
        raise ValueError("`seen` needs `query_ids`: the id of every query")
    ranked = q if items is None else items
    device = ranked.device
    dtype = torch.float64 if ranked.dtype == torch.float64 else torch.float32
    q = q.detach().to(device, dtype)
    items = None if items is None else items.detach().to(dtype).contiguous()
    n_items = q.shape[1] if items is None else len(items)
    if items is not None and prepared is None:
        prepared = prepare(items, len(q) if block is None else 0)
    if (prepared is not None and not math.isfinite(prepared.largest)) or not bool(torch.isfinite(q).all()):
        raise UserError(
            "the vectors to rank contain NaN or infinite values: the model diverged, train with a lower learning rate"
        )
    if seen is not None and query_ids is not None:
        query_ids = query_ids.to(device).long()
        known = len(seen.start) - 1
        bad = query_ids[(query_ids < 0) | (query_ids >= known)]
        if len(bad):
            raise UserError(f"query {int(bad[0])} is out of range: seen items are known for {known} queries")
        seen = seen.to(device)
    largest = 0.0 if prepared is None else prepared.largest
    if items is not None and prepared is not None and block is None:
        found = _by_kernel(q.contiguous(), items, prepared, k, seen, query_ids)
        if found is not None:
            scores, ids, sure = found
            doubtful = torch.nonzero(~sure).flatten()
            if len(doubtful):
                whose = None if query_ids is None else query_ids[doubtful]
                scores[doubtful], ids[doubtful] = _ranked(q[doubtful], items, k, seen, whose, _TILE * 8, largest)
            return scores, ids
    if block is None:
        block = _TILE if device.type == "cpu" else max(_TILE, min(_CUDA_SCORES // max(1, min(n_items, _COLUMNS)), 4096))
    while True:
        try:
            return _ranked(q, items, k, seen, query_ids, -(-block // _TILE) * _TILE, largest)
        except torch.OutOfMemoryError:
            if block <= _TILE:
                raise
            block //= 2


class Prepared(NamedTuple):
    """Facts about item vectors that `top_k` needs."""

    largest: float  # absolute value; NaN if there is one
    packed: ranking.Packed | None  # for the kernel of a CPU, if it applies


def prepare(items: Tensor, queries: int = _ENOUGH) -> Prepared:
    """Prepare items (N, D) for `top_k`; packed, which takes a quarter of their memory, if it helps so many queries."""
    items = items.detach()
    items = items if items.dtype == torch.float64 else items.float().contiguous()
    largest = 0.0
    if items.numel():
        low, high = torch.aminmax(items)  # many times faster than a norm; NaN if there is one
        largest = float(torch.maximum(-low, high))
    packs = queries >= _ENOUGH and math.isfinite(largest)
    return Prepared(largest, ranking.pack(items) if packs else None)


def _by_kernel(
    q: Tensor, items: Tensor, prepared: Prepared, k: int, seen: Positives | None, query_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Scores and ids (B, k), and whether each list is sure to be exact; None where no kernel applies."""
    lists = (None, None, None) if seen is None else (seen.start, seen.items, query_ids)
    if TRITON and q.is_cuda:
        from sparring.kernels import topk

        return topk.top_k(q, items, k, *lists) if topk.fits(q, items, k) else None
    if prepared.packed is None or 8 * k > len(items):
        return None
    return ranking.rank(q, items, prepared.packed, k, *lists)


def _ranked(
    q: Tensor,
    items: Tensor | None,
    k: int,
    seen: Positives | None,
    query_ids: Tensor | None,
    block: int,
    largest: float,
) -> tuple[Tensor, Tensor]:
    n_items = q.shape[1] if items is None else len(items)
    # Twice the most that a score of the matrix product can differ from the inner product; given scores are exact.
    kind = torch.finfo(q.dtype)
    slack = q.new_zeros(len(q))
    if items is not None:
        slack = (q.abs().sum(1) * largest + kind.tiny) * ((q.shape[1] + 2) * kind.eps)
    scores = torch.full((len(q), k), _NEVER, dtype=q.dtype, device=q.device)
    ids = torch.full((len(q), k), -1, dtype=torch.int64, device=q.device)
    starts = iter(range(0, len(q), block))
    blocks = -(-len(q) // block)
    groups = -(-min(n_items, _COLUMNS) // _GROUP)

    def work(_: int) -> None:
        most = len(q) if len(q) < _TILE else min(block, -(-len(q) // _TILE) * _TILE)
        scratch = q.new_empty(most * groups * _GROUP)
        for start in starts:  # shared by all workers
            rows = slice(start, start + block)
            hidden = None
            if seen is not None and query_ids is not None:
                exclude = seen.of(query_ids[rows])
                assert exclude.rows is not None
                hidden = (exclude.rows, exclude.ids)
            scores[rows], ids[rows] = _rank_block(q[rows], items, k, hidden, scratch, slack[rows])

    if not n_items or not len(q):
        return scores, ids
    workers = 1 if q.device.type != "cpu" else min(torch.get_num_threads(), blocks)
    with _full_precision(q.device):
        if workers == 1:
            work(0)
        else:
            # One thread per block: threads that share a block mostly wait for each other.
            with _one_thread_each(), ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, range(workers)))
    return scores, ids


def _rank_block(
    q: Tensor, items: Tensor | None, k: int, hidden: tuple[Tensor, Tensor] | None, scratch: Tensor, slack: Tensor
) -> tuple[Tensor, Tensor]:
    """Top k of one block of queries, without the (row, item) pairs `hidden`."""
    n_items = q.shape[1] if items is None else len(items)
    tile = min(_TILE, len(q))
    tiles = -(-len(q) // tile)
    padded = nn.functional.pad(q, (0, 0, 0, tiles * tile - len(q)))
    best: tuple[Tensor, Tensor] | None = None
    for low in range(0, n_items, _COLUMNS):
        n_part = min(n_items - low, _COLUMNS)
        size = -(-n_part // _GROUP) * _GROUP
        # items x queries: reductions over items run along memory
        s = scratch[: tiles * size * tile].view(tiles, size, tile)
        s[:, n_part:] = _NEVER
        part = None if items is None else items[low : low + n_part]
        for t in range(tiles):
            queries = padded[t * tile : (t + 1) * tile].T
            if part is None:
                s[t, :n_part] = queries[low : low + n_part]
            else:
                torch.mm(part, queries, out=s[t, :n_part])
        if hidden is not None:
            row, item = hidden
            if n_items > _COLUMNS:
                here = (item >= low) & (item < low + _COLUMNS)
                row, item = row[here], item[here] - low
            s.view(-1).index_fill_(0, (row // tile * size + item) * tile + row % tile, _NEVER)
        top = _select(s, q, part, k, slack)
        top = top[0], top[1] + low
        if best is not None:
            top = in_order(torch.cat([best[0], top[0]], 1), torch.cat([best[1], top[1]], 1), k)
        best = top
    assert best is not None
    short = (0, k - best[0].shape[1])
    value, ids = nn.functional.pad(best[0], short, value=_NEVER), nn.functional.pad(best[1], short)
    return value, ids.masked_fill_(torch.isneginf(value), -1)


def _select(s: Tensor, q: Tensor, items: Tensor | None, k: int, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Top k of queries by their inner products; s (tiles, items, queries of a tile) are these within slack / 2."""
    (tiles, size, tile), n_rows, m = s.shape, len(q), k + _SPARE
    groups = size // _GROUP
    if groups <= m:
        scores = s.transpose(1, 2).reshape(tiles * tile, size)[:n_rows]
        value, ids = torch.topk(scores, min(m, size), dim=1)
    else:
        highest = s.view(tiles, groups, _GROUP, tile).amax(2).transpose(1, 2).reshape(tiles * tile, groups)[:n_rows]
        chosen = torch.topk(highest, m, dim=1, sorted=False).indices
        candidates = (chosen.unsqueeze(2) * _GROUP + torch.arange(_GROUP, device=s.device)).view(n_rows, -1)
        row = torch.arange(n_rows, device=s.device)
        scores = s.view(-1)[candidates * tile + (row // tile * (size * tile) + row % tile).unsqueeze(1)]
        value, column = torch.topk(scores, m, dim=1)
        ids = candidates.gather(1, column)
    best = _rescored(q, items, value, ids, k)
    if value.shape[1] < size:
        least = value[:, k - 1] - slack
        near = (value[:, -1] >= least) & ~torch.isneginf(value[:, -1])  # more items may belong to the k best
        doubtful = torch.nonzero(near).flatten()
        for first in range(0, len(doubtful), 8):  # few at a time: each copies full rows of scores
            rows = doubtful[first : first + 8]
            scores = s[rows // tile, :, rows % tile]
            n = int((scores >= least[rows].unsqueeze(1)).sum(1).max())
            best[0][rows], best[1][rows] = _rescored(q[rows], items, *torch.topk(scores, n, dim=1), k)
    return best


def _rescored(q: Tensor, items: Tensor | None, value: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of these items by inner product, or by `value` without vectors; those with value -inf are hidden."""
    if items is None:
        return in_order(value, ids, k)
    scores = inner_products(q, items, ids.clamp(max=len(items) - 1))
    return in_order(scores.masked_fill_(torch.isneginf(value), _NEVER), ids, k)


def inner_products(q: Tensor, items: Tensor, ids: Tensor) -> Tensor:
    """(B, C): the inner products of queries (B, D) with their items (B, C) of a table (N, D).

    Summed in float64 and rounded once. Unlike a matrix product, which rounds by shape and place, this gives the same
    pair of vectors the same score everywhere.
    """
    found = ranking.inner_products(q.contiguous(), items, ids)
    if found is not None:
        return found
    out = q.new_empty(ids.shape)
    width = max(1, min(ids.shape[1], _NUMBERS // max(1, q.shape[1])))
    height = max(1, _NUMBERS // max(1, width * q.shape[1]))
    for top in range(0, len(ids), height):
        wide = q[top : top + height].double().unsqueeze(1)
        for left in range(0, ids.shape[1], width):
            part = slice(top, top + height), slice(left, left + width)
            out[part] = (items[ids[part]].double() * wide).sum(2).to(q.dtype)
    return out


def in_order(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k of scores and ids (B, C) by (score descending, id ascending): the order of every exact list."""
    by_id = torch.sort(ids, dim=1)
    by_score = torch.sort(scores.gather(1, by_id.indices), dim=1, descending=True, stable=True)
    return by_score.values[:, :k], by_id.values.gather(1, by_score.indices[:, :k])


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the precision of the vectors, regardless of TF32 or autocast."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        before = torch.get_float32_matmul_precision()
        if before == "highest":
            yield
            return
        with _settings:
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    with _settings:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
