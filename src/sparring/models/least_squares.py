"""iALS: two tables fitted by alternating least squares, each row by one ridge regression on the other table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.kernels.native import ridge as native
from sparring.models.item_to_item import distinct
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryReader, IdTower

_NUMBERS = 1 << 18  # of gathered vectors and normal equations that are held at once: what a CPU's cache holds
_CUDA_NUMBERS = 1 << 26
_SINGULAR = "the normal equations of ials are singular in float32: set a larger reg"


class RidgeTower(IdTower, HistoryReader):
    """One vector per query, and a history's vector by the ridge regression that iALS solves for its queries.

        (sum_i v_i v_i^T + alpha V^T V + reg (n + alpha N) I) u = sum_i v_i     over the n items of a history

    So a history of exactly a query's training items gives that query's vector.
    """

    gram: Tensor
    alpha: Tensor
    reg: Tensor

    def __init__(self, n: int, dim: int, item: IdTower, init_std: float | None = None) -> None:
        super().__init__(n, dim, init_std)
        self.item = item
        self.register_buffer("gram", torch.zeros(dim, dim))  # V^T V
        self.register_buffer("alpha", torch.zeros(()))
        self.register_buffer("reg", torch.ones(()))

    def encode_history(self, items: Tensor) -> Tensor:
        """Vectors (B, D) of histories (B, L), padded with -1; order and repeats do not matter."""
        rows, ids = distinct(items)
        count = torch.bincount(rows, minlength=len(items)).to(self.gram)
        diagonal = self.reg * (count + self.alpha * self.item.n)
        vectors = self.item.weight[ids].detach()
        u = vectors.new_zeros(len(items), self.dim)
        for row in range(len(items)):
            x = vectors[rows == row]
            normal = x.T @ x + self.alpha * self.gram + diagonal[row] * torch.eye(self.dim, device=x.device)
            u[row] = torch.linalg.solve(normal.double(), x.sum(0).double()).to(u)
        return u


@dataclass(frozen=True)
class Ials:
    """Alternating least squares over all pairs of queries and items.

        sum over pairs w (1 - u.v)^2 + alpha sum over all (u.v)^2
            + reg (sum_u (n_u + alpha N) |u|^2 + sum_i (n_i + alpha U) |v|^2)

    A sweep solves all items, then all queries, so queries are optimal for the items they are ranked with. n_u and n_i
    sum the weights w of the pairs of a row; N and U are the numbers of items and queries. The loss is the objective per
    pair. Rendle et al. scale the regularisation by (n_u + alpha N)^nu; here nu = 1, their choice.

    Hu et al., Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008; the objective and its scale: Rendle et
    al., Revisiting the Performance of iALS on Item Recommendation Benchmarks, RecSys 2022.
    """

    alpha: float
    reg: float
    closed_form = False
    weighted = True

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("reg", self.reg)):
            if not 0 < value < math.inf:
                raise UserError(f"{name} must be positive and finite, got {value}")

    def sweeps(self, model: Retriever, data: Interactions) -> Iterator[float]:
        query, item = model.query, model.item
        assert isinstance(query, RidgeTower)
        assert isinstance(item, IdTower)
        device = item.weight.device
        owners = [column.to(device).long() for column in data.pairs()]
        weight = None if data.weight is None else torch.from_numpy(data.weight).to(device).float()
        by_query = Rows(owners[0], owners[1], weight, query.n, item.n, item.dim)
        by_item = Rows(owners[1], owners[0], weight, item.n, query.n, item.dim)
        query.alpha.fill_(self.alpha)
        query.reg.fill_(self.reg)
        while True:
            by_item.solve(query.weight, self.alpha, self.reg, item.weight)
            left = by_query.solve(item.weight, self.alpha, self.reg, query.weight)
            query.gram.copy_(item.weight.T @ item.weight)
            yield (left + by_item.penalty(item.weight, self.alpha, self.reg)) / max(len(data), 1)


class Rows:
    """The rows of one side, each with its pairs; solves their ridge regressions.

    The shared part of the normal equations, alpha V^T V, is diagonalised once: V^T V = Q S Q^T, and in the basis Q the
    normal equations of a row are D + X^T X, where D is diagonal and X (n, D) holds the vectors of its pairs. The native
    kernel solves them by conjugate gradients that start from the row's last solution. Without it rows of similar length
    are solved in blocks, exactly; a row with fewer pairs than dimensions by the n x n system (I + X D^-1 X^T) y = 1,
    u = D^-1 X^T y.
    """

    def __init__(self, owners: Tensor, others: Tensor, weight: Tensor | None, n: int, n_others: int, dim: int) -> None:
        self.n_others, self.dim = n_others, dim
        order = torch.argsort(owners, stable=True)
        count = torch.bincount(owners, minlength=n)
        self.start = F.pad(count.cumsum(0), (1, 0))
        self.others, self.weight = others[order].int(), None if weight is None else weight[order]
        self.total = count.float() if weight is None else torch.bincount(owners, weight, n).float()

    @cached_property
    def blocks(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Rows (b,), their pairs' others (b, L), padded, and the roots of their weights (b, L)."""
        blocks, count = [], self.start.diff()
        for rows, longest in _blocks(count, self.dim):
            place = torch.arange(longest, device=rows.device)
            inside = place < count[rows].unsqueeze(1)
            pairs = (self.start[rows].unsqueeze(1) + place).clamp(max=len(self.others) - 1)
            padded = torch.where(inside, self.others[pairs], self.n_others)
            root = None if self.weight is None else torch.where(inside, self.weight[pairs].sqrt(), 0.0)
            blocks.append((rows, padded, root))
        return blocks

    @torch.no_grad()
    def solve(self, vectors: Tensor, alpha: float, reg: float, out: Tensor) -> float:
        """Set the rows of `out` (n, D) to their ridge regressions on `vectors` (M, D); rows without pairs are 0.

        Returns the least value of the objective over these rows, without the penalty of the other side: the sum over
        rows of their weight less u . sum_j w_j v_j.
        """
        values, basis = torch.linalg.eigh((vectors.T @ vectors).double())
        shared, turn = alpha * values.clamp(min=0.0).to(vectors), basis.to(vectors)
        added = reg * (self.total + alpha * self.n_others)
        turned, solved = vectors @ turn, out @ turn
        explained = native.ridge(turned, self.start, self.others, self.weight, shared, added, solved)
        if explained is None:
            explained = self._solve(turned, shared, added, solved)
        least = float(self.total.double().sum() - explained.sum())
        if not math.isfinite(least):
            raise UserError(_SINGULAR)
        torch.mm(solved, turn.T, out=out)
        return least

    def _solve(self, turned: Tensor, shared: Tensor, added: Tensor, solved: Tensor) -> Tensor:
        """The same by blocks, in torch; returns u . sum_j w_j v_j in float64, by block."""
        padded = torch.cat([turned, turned.new_zeros(1, self.dim)])  # the last row pads
        solved.zero_()
        explained = [torch.zeros((), dtype=torch.float64, device=solved.device)]
        for rows, ids, root in self.blocks:
            x = padded.index_select(0, ids.flatten()).unflatten(0, ids.shape)
            target = (ids != self.n_others).to(x) if root is None else root
            x = x if root is None else x * root.unsqueeze(2)
            u, along = ridge(x, target, shared + added[rows].unsqueeze(1))
            solved.index_copy_(0, rows, u)
            explained.append(along.double().sum())
        return torch.stack(explained)

    def penalty(self, vectors: Tensor, alpha: float, reg: float) -> float:
        """The regularisation of this side's vectors (n, D)."""
        return reg * float(((self.total + alpha * self.n_others).double() * vectors.double().square().sum(1)).sum())


def _blocks(count: Tensor, dim: int) -> Iterator[tuple[Tensor, int]]:
    """(rows, the most pairs of one of them), the longest rows first; a block wastes at most a fifth on padding."""
    length, rows = torch.sort(count, descending=True, stable=True)
    lengths = length.cpu()
    room = _CUDA_NUMBERS if length.is_cuda else _NUMBERS
    last = int((lengths > 0).sum())
    rising = lengths[:last].flip(0).contiguous()
    first = 0
    while first < last:
        longest = int(lengths[first])
        similar = last - int(torch.searchsorted(rising, max(1, math.ceil(0.8 * longest))))
        size = max(1, room // (longest * dim + min(longest, dim) ** 2))
        end = min(similar, first + size)
        yield rows[first:end], longest
        first = end


def ridge(x: Tensor, target: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Solutions u (b, D) of (diag(d) + X^T X) u = X^T t for X (b, L, D), t (b, L), d (b, D), and u . X^T t (b,)."""
    right = target.unsqueeze(2)
    if x.shape[1] < x.shape[2]:
        scale = diagonal.rsqrt().unsqueeze(1)
        x = x * scale
        normal = x @ x.mT
        normal.diagonal(dim1=1, dim2=2).add_(1.0)
        y = _solved(normal, right)
        return (x.mT @ y).squeeze(2) * scale.squeeze(1), (target * (target - y.squeeze(2))).sum(1)
    normal = x.mT @ x
    normal.diagonal(dim1=1, dim2=2).add_(diagonal)
    right = x.mT @ right
    u = _solved(normal, right)
    return u.squeeze(2), (u * right).sum((1, 2))


def _solved(normal: Tensor, right: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(normal)
    if bool(info.any()):
        raise UserError(_SINGULAR)
    return torch.cholesky_solve(right, factor)


def ials_model(n_queries: int, n_items: int, dim: int, init_std: float, seed: int) -> Retriever:
    """Two tables compared by inner products; the queries' start decides the first items."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        item = IdTower(n_items, dim, init_std)
        return Retriever(RidgeTower(n_queries, dim, item, init_std), item, "dot")
