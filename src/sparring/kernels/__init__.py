"""One operation under every softmax-type method: the weighted log-sum-exp, by the kernel that fits the device and the shape."""

from __future__ import annotations

from torch import Tensor

from sparring.kernels import chunked, mixed, reference
from sparring.kernels.reference import Mix, Places, logits

__all__ = ["Mix", "logits", "weighted_logsumexp"]


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    places: Places | None = None,
    draws: float | None = None,
    usage: Tensor | None = None,
    mix: Mix | None = None,
) -> Tensor:
    """log sum_j exp(q_i . e_j + log_w_ij), (B,); see kernels/reference.py for the meaning of each argument."""
    # expected counts with a weight per pair, a learned weight or a query's own candidates are rare: the plain form serves them
    plain = emb.dim() == 3 or log_w.requires_grad or (draws is not None and log_w.dim() == 2)
    if mix is not None:
        if draws is not None:
            raise ValueError("expected draws and mixtures do not go together: draw from the bag's plain form")
        if plain or log_w.dim() == 2:
            return reference.weighted_logsumexp(q, emb, log_w, places, mix=mix)
        return mixed.weighted_logsumexp(q, emb, log_w, places, mix)
    kernel = reference.weighted_logsumexp if plain else chunked.weighted_logsumexp
    return kernel(q, emb, log_w, places, draws, usage)
