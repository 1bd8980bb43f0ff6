"""Exact top k over a catalogue in bounded memory, with deterministic tie-breaking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.core.types import Positives

_TILE = 64  # queries per matrix product: BLAS rounds differently for other shapes, and lists must not depend on `block`
_GROUP = 32  # items reduced to their maximum before the first selection
_COLUMNS = 1 << 16  # items scored at once; the lists of further parts are merged
_CUDA_SCORES = 1 << 27  # scores held at once on a GPU by default, 512 MB
_NEVER = float("-inf")
_TRITON = find_spec("triton") is not None
_settings = threading.RLock()  # held while process-wide settings of torch are changed


def top_k(
    q: Tensor,
    items: Tensor | None,
    k: int,
    seen: Positives | None = None,
    query_ids: Tensor | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k items with the largest inner product for every query: scores (B, k) and ids (B, k).

    Without `items`, q (B, N) has the scores themselves.

    Exact: equal to sorting all N scores by (score descending, id ascending), without the seen items of `query_ids`. If
    fewer than k unseen items are left, the rest holds id -1 and score -inf. The result does not depend on `block`
    (queries scored at once, rounded up to a multiple of 64) or on the number of threads. Memory is bounded by block x
    min(N, 65536) scores per thread. On a GPU, unless `block` is given, a fused kernel ranks without storing the scores
    (kernels/topk.py).

        scores, ids = top_k(model.encode_queries(users), model.item_vectors(), 10, train.positives(), users)

    Each group of 32 items is first reduced to its maximum. The k best items are in the k groups with the largest
    maxima, so only those are searched, and the selection costs a fraction of the matrix product.
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
    if not bool(torch.isfinite(q).all()) or (items is not None and not bool(torch.isfinite(items).all())):
        raise UserError(
            "the vectors to rank contain NaN or infinite values: the model diverged, train with a lower learning rate"
        )
    if seen is not None and query_ids is not None:
        query_ids = query_ids.to(device).long()
        if len(query_ids) and int(query_ids.max()) >= len(seen.start) - 1:
            raise UserError(
                f"query {int(query_ids.max())} is out of range: seen items are known for {len(seen.start) - 1} queries"
            )
        seen = seen.to(device)
    if _TRITON and block is None and q.is_cuda and items is not None:
        from sparring.kernels import topk

        if topk.fits(q, items, k):
            lists = (None, None, None) if seen is None else (seen.start, seen.items, query_ids)
            scores, ids, sure = topk.top_k(q.contiguous(), items, k, *lists)
            doubtful = torch.nonzero(~sure).flatten()
            if len(doubtful):
                whose = None if query_ids is None else query_ids[doubtful]
                scores[doubtful], ids[doubtful] = _ranked(q[doubtful], items, k, seen, whose, _TILE * 8)
            return scores, ids
    if block is None:
        block = _TILE if device.type == "cpu" else max(_TILE, min(_CUDA_SCORES // max(1, min(n_items, _COLUMNS)), 4096))
    while True:
        try:
            return _ranked(q, items, k, seen, query_ids, -(-block // _TILE) * _TILE)
        except torch.OutOfMemoryError:
            if block <= _TILE:
                raise
            block //= 2


def _ranked(
    q: Tensor, items: Tensor | None, k: int, seen: Positives | None, query_ids: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    n_items = q.shape[1] if items is None else len(items)
    scores = torch.full((len(q), k), _NEVER, dtype=q.dtype, device=q.device)
    ids = torch.full((len(q), k), -1, dtype=torch.int64, device=q.device)
    starts = iter(range(0, len(q), block))
    blocks = -(-len(q) // block)
    groups = -(-min(n_items, _COLUMNS) // _GROUP)

    def work(_: int) -> None:
        scratch = q.new_empty(min(block, -(-len(q) // _TILE) * _TILE) * groups * _GROUP)
        for start in starts:  # shared by all workers
            rows = slice(start, start + block)
            hidden = None
            if seen is not None and query_ids is not None:
                exclude = seen.of(query_ids[rows])
                assert exclude.rows is not None
                hidden = (exclude.rows, exclude.ids)
            scores[rows], ids[rows] = _rank_block(q[rows], items, k, hidden, scratch)

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
    q: Tensor, items: Tensor | None, k: int, hidden: tuple[Tensor, Tensor] | None, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """Top k of one block of queries, without the (row, item) pairs `hidden`."""
    n_items = q.shape[1] if items is None else len(items)
    tiles = -(-len(q) // _TILE)
    padded = nn.functional.pad(q, (0, 0, 0, tiles * _TILE - len(q)))
    best: tuple[Tensor, Tensor] | None = None
    for low in range(0, n_items, _COLUMNS):
        n_part = min(n_items - low, _COLUMNS)
        size = -(-n_part // _GROUP) * _GROUP
        # items x queries: reductions over items run along memory
        s = scratch[: tiles * size * _TILE].view(tiles, size, _TILE)
        s[:, n_part:] = _NEVER
        for t in range(tiles):
            tile = padded[t * _TILE : (t + 1) * _TILE].T
            if items is None:
                s[t, :n_part] = tile[low : low + n_part]
            else:
                torch.mm(items[low : low + n_part], tile, out=s[t, :n_part])
        if hidden is not None:
            row, item = hidden
            if n_items > _COLUMNS:
                here = (item >= low) & (item < low + _COLUMNS)
                row, item = row[here], item[here] - low
            s.view(-1).index_fill_(0, (row // _TILE * size + item) * _TILE + row % _TILE, _NEVER)
        top = _select(s, len(q), k)
        top = top[0], top[1] + low
        if best is not None:
            # Earlier parts have smaller ids and come first, so a stable sort keeps ties in the order of ids.
            joined = torch.cat([best[0], top[0]], 1), torch.cat([best[1], top[1]], 1)
            ordered = torch.sort(joined[0], dim=1, descending=True, stable=True)
            top = ordered.values[:, :k], joined[1].gather(1, ordered.indices[:, :k])
        best = top
    assert best is not None
    return best[0], best[1].masked_fill_(torch.isneginf(best[0]), -1)


def _select(s: Tensor, n_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Top k of the first n_rows queries of s (tiles, items, _TILE), ties in the order of ids."""
    tiles, size, _ = s.shape
    groups = size // _GROUP
    if groups <= k + 1:
        scores = s.transpose(1, 2).reshape(tiles * _TILE, size)[:n_rows]
        value, ids = torch.topk(scores, min(k + 1, size), dim=1)
    else:
        highest = s.view(tiles, groups, _GROUP, _TILE).amax(2).transpose(1, 2).reshape(tiles * _TILE, groups)[:n_rows]
        chosen = torch.topk(highest, k + 1, dim=1, sorted=False).indices
        candidates = (chosen.unsqueeze(2) * _GROUP + torch.arange(_GROUP, device=s.device)).view(n_rows, -1)
        row = torch.arange(n_rows, device=s.device)
        scores = s.view(-1)[candidates * _TILE + (row // _TILE * (size * _TILE) + row % _TILE).unsqueeze(1)]
        value, column = torch.topk(scores, k + 1, dim=1)
        ids = candidates.gather(1, column)
    if value.shape[1] <= k:
        short = k + 1 - value.shape[1]
        value, ids = nn.functional.pad(value, (0, short), value=_NEVER), nn.functional.pad(ids, (0, short))
    # With k + 1 groups chosen, an item outside them that equals the k-th score implies one inside that does:
    # comparing neighbours in the first k + 1 finds every tie that matters.
    tied = (value[:, :-1] == value[:, 1:]) & (value[:, 1:] > _NEVER)
    value, ids = value[:, :k].contiguous(), ids[:, :k].contiguous()
    if bool(tied.any()):
        for rows in torch.nonzero(tied[:, -1]).flatten().split(8):  # few at a time: each copies full rows of scores
            ids[rows] = _first_at_boundary(s[rows // _TILE, :, rows % _TILE], value[rows, -1:], k)
            value[rows] = s[(rows // _TILE).unsqueeze(1), ids[rows], (rows % _TILE).unsqueeze(1)]
        rows = torch.nonzero(tied.any(1)).flatten()
        by_id = torch.sort(ids[rows], dim=1)
        by_score = torch.sort(value[rows].gather(1, by_id.indices), dim=1, descending=True, stable=True)
        value[rows], ids[rows] = by_score.values, by_id.values.gather(1, by_score.indices)
    return value, ids


def _first_at_boundary(scores: Tensor, kth: Tensor, k: int) -> Tensor:
    """(R, k) ids with a score above the k-th, then the smallest ids that equal it."""
    above, equal = scores > kth, scores == kth
    kept = above | (equal & (torch.cumsum(equal, 1) <= k - above.sum(1, keepdim=True)))
    return torch.nonzero(kept)[:, 1].view(len(scores), k)


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
