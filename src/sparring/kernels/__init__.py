"""The weighted log-sum-exp behind every softmax-type method, dispatched by device and shape.

Kernels import only torch and triton, and know nothing of samplers, losses or training.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.kernels import chunked, mixtures_chunked, reference
from sparring.kernels.native import logsumexp
from sparring.kernels.native import mixtures as native_mixtures
from sparring.kernels.reference import ExcludedKeys, ExcludedPairs, Mix, logits

__all__ = [
    "ExcludedKeys",
    "ExcludedPairs",
    "Mix",
    "fuses",
    "fuses_draws",
    "fuses_mixtures",
    "fuses_rows",
    "gather",
    "logits",
    "weighted_logsumexp",
]

TRITON = find_spec("triton") is not None
_WIDEST = 256  # dimensions that fit a fused kernel
_MIXED = 16  # members of a group that a mixture kernel holds
_CLUSTERS = 8192  # clusters that one program can draw from
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    places: ExcludedPairs | None = None,
    draws: float | None = None,
    draw_counts: Tensor | None = None,
    mix: Mix | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """log sum_j exp(q_i . e_j + log_w_ij), (B,). Arguments as in reference.py; `seed` as in fused.py."""
    # weights per pair with expected draws, learned weights and per-query candidates are rare: the reference serves them
    plain = emb.dim() == 3 or log_w.requires_grad or (draws is not None and log_w.dim() == 2)
    if mix is not None:
        if draws is not None:
            raise ValueError("expected draws do not support mixtures: resample the plain form of the bag")
        if plain or log_w.dim() == 2:
            return reference.weighted_logsumexp(q, emb, log_w, places, mix=mix)
        keyed = all(which is None or isinstance(which, ExcludedKeys) for which in (places, mix.places))
        if fuses(q, emb, log_w, keyed):
            from sparring.kernels import mixtures

            return mixtures.weighted_logsumexp(q, emb, log_w, places if isinstance(places, ExcludedKeys) else None, mix)
        mixed = native_mixtures.weighted_logsumexp(q, emb, log_w, places, mix)
        return mixtures_chunked.weighted_logsumexp(q, emb, log_w, places, mix) if mixed is None else mixed
    keys = places if isinstance(places, ExcludedKeys) else None
    if fuses(q, emb, log_w, places is None or keys is not None):
        from sparring.kernels import fused

        return fused.weighted_logsumexp(q, emb, log_w, keys, draws, draw_counts, seed)
    if emb.dim() == 3 and _fuses_own(q, emb, log_w, places):
        from sparring.kernels import per_query

        return per_query.weighted_logsumexp(
            q, emb, log_w, places if isinstance(places, Tensor) else None, draws, draw_counts
        )
    if seed is not None:
        raise ValueError("seeded draws need the fused kernel: use draw='systematic' or 'multinomial'")
    if plain:
        return reference.weighted_logsumexp(q, emb, log_w, places, draws, draw_counts)
    tiled = logsumexp.weighted_logsumexp(q, emb, log_w, places, draws, draw_counts)
    return chunked.weighted_logsumexp(q, emb, log_w, places, draws, draw_counts) if tiled is None else tiled


def fuses(q: Tensor, emb: Tensor, log_w: Tensor, keyed: bool) -> bool:
    """Whether the Triton kernel applies: a GPU, shared candidates, up to 256 dimensions, constant weights, keys."""
    fits = (
        TRITON and keyed and q.is_cuda and emb.dim() == 2 and 0 < emb.shape[1] <= _WIDEST and min(len(q), len(emb)) > 0
    )
    return fits and not log_w.requires_grad and q.dtype == emb.dtype and q.dtype in _FLOATS


def _fuses_own(q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None) -> bool:
    """Whether the Triton kernel for per-query candidates applies; it takes exclusions as a mask."""
    masked = places is None or isinstance(places, Tensor)
    fits = TRITON and masked and q.is_cuda and 0 < emb.shape[2] <= _WIDEST and min(emb.shape[:2]) > 0
    return fits and not log_w.requires_grad and q.dtype in _FLOATS and emb.dtype in _FLOATS


def fuses_mixtures(emb: Tensor, m: int) -> bool:
    """Whether the Triton kernels can mix m of these vectors (..., D): a GPU, m up to 16, up to 256 dimensions."""
    return TRITON and emb.is_cuda and emb.dtype in _FLOATS and 1 <= m <= _MIXED and 0 < emb.shape[-1] <= _WIDEST


def fuses_draws(items: Tensor, clusters: int) -> bool:
    """Whether the Triton kernels can draw by cluster for these items: a GPU, up to 8,192 clusters."""
    return TRITON and items.is_cuda and clusters <= _CLUSTERS


def fuses_rows(table: Tensor) -> bool:
    """Whether the Triton kernels can update the rows of this table: a GPU, float32, up to 256 dimensions."""
    fits = TRITON and table.is_cuda and table.dtype == torch.float32 and table.dim() == 2 and table.shape[1] <= _WIDEST
    return fits and table.is_contiguous()


def gather(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids] (..., D), with a dense gradient."""
    if not fuses_rows(table):
        return F.embedding(ids, table)
    from sparring.kernels import row_updates

    return row_updates.gather(table, ids)
