"""EASE with few weights per item as vectors: the other closed form beside towers (low_rank_ease.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.types import Positives
from sparring.data.spectral import orthonormal_basis, sparse_product
from sparring.models.item_to_item import ridge_inverse
from sparring.models.low_rank_ease import LowRankEase

_MORE = 32  # directions that are computed and dropped: the last ones are not exact
_ROUNDS = 4  # products with C before its directions are read
_ROWS = 1024  # of P that are thinned at once


@torch.no_grad()
def thinned_ease(
    pairs: Positives, n_items: int, dim: int, lam: float = 100.0, neighbours: int = 30, seed: int = 0
) -> LowRankEase:
    """EASE with only the largest weights of each item, at rank `dim` and weight 1, on the device of the pairs.

        P = (X^T X + lam I)^-1,   C_ij = -P_ij / sqrt(P_ii P_jj) ~ V diag(h) V^T
        query = unit(sum_j h * sqrt(P_jj) V_j),   item = V_i / sqrt(P_ii)

    C, the partial correlations, has an entry off the diagonal where |P_ij| is among the `neighbours` largest of row i
    or of row j, and is 0 elsewhere; V has the directions with the largest |h|. With all of them the inner products rank
    as EASE does, whose matrix is B_ij = -P_ij / P_jj, with the same entries kept. Ease(neighbours=30) keeps those of
    each column alone; with both, C is symmetric. Low rank alone smooths EASE; this form keeps its sharp neighbours.
    P is inverted in float32: at lam 100 the largest error of C is 9e-7 on three public sets, and its neighbours are
    those of float64.

        model = model.with_closed_form(thinned_ease(positives, n_items, dim=1024).times(0.5))
    """
    columns, start, value, own = _partial_correlations(pairs, n_items, lam, neighbours)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(n_items, min(dim + _MORE, n_items), generator=generator).to(own.device)
    for _ in range(_ROUNDS):
        basis = orthonormal_basis(sparse_product(columns, start, value, basis))
    gains, turn = torch.linalg.eigh(basis.T @ sparse_product(columns, start, value, basis))
    most = gains.abs().topk(min(dim, len(gains))).indices
    return LowRankEase(own.sqrt().unsqueeze(1) * (basis @ turn[:, most]), gains[most], 1 / own)


def _partial_correlations(
    pairs: Positives, n_items: int, lam: float, neighbours: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """C by rows: the columns of its entries, the start of each row and the values; and the diagonal of P."""
    inverse = ridge_inverse(pairs, n_items, lam, torch.float32)
    own = inverse.diagonal().clone()
    inverse.fill_diagonal_(0.0)
    kept = torch.zeros_like(inverse, dtype=torch.bool)
    for rows, marks in zip(inverse.split(_ROWS), kept.split(_ROWS), strict=True):
        marks.scatter_(1, rows.abs().topk(min(neighbours, n_items), 1).indices, value=True)
    kept = (kept | kept.T) & (inverse != 0)
    row, column = kept.nonzero().unbind(1)
    value = -inverse[row, column] * (own[row] * own[column]).rsqrt()
    start = F.pad(torch.bincount(row, minlength=n_items).cumsum(0), (1, 0))[:-1]
    return column, start, value, own
