"""Item-to-item models: a query's scores are the sum of rows of an item-item matrix over its items (EASE, item kNN)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.core.memory_usage import available_bytes
from sparring.core.topk import top_k
from sparring.core.types import Exclude, Positives
from sparring.data.histories import Histories
from sparring.data.interactions import Interactions
from sparring.models.novelty import spread
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryReader, UnitTower

_EXPANDED = 1 << 22  # weights that are added at once
_CELLS = 1 << 24  # counts that are held at once
_COLUMNS = 1024  # columns of an item-item matrix that are thinned at once
_SQUARE = 24  # bytes per cell of EASE: the Gram matrix, its factor and its inverse, in float64


class ItemSums(HistoryReader):
    """A query as its score of every item: the sum of rows of an item-item matrix over the query's items.

        score_uj = sum of W_ij over the items i of u

    W is dense, `weight` (N, N), or sparse with the same number of `neighbours` in each row: the weight of item
    neighbours[i, m] is weight[i, m], 0 where an item has fewer. An item counts once, however often a history has it.
    Scores grow with the number of items, so a `penalty` (N,) counts in units of the query's own spread (novelty.py).

        ItemSums(histories(train), n_items)(query_ids)     # (B, N)
    """

    start: Tensor
    items: Tensor
    neighbours: Tensor | None
    penalty: Tensor | None

    def __init__(self, histories: Histories, n_items: int, neighbours: int | None = None) -> None:
        super().__init__()
        self.n, self.dim = len(histories.start) - 1, n_items
        self.register_buffer("start", histories.start.long())
        self.register_buffer("items", histories.items.int())
        width = n_items if neighbours is None else neighbours
        self.weight = nn.Parameter(torch.zeros(n_items, width))
        empty = None if neighbours is None else torch.zeros(n_items, width, dtype=torch.int32)
        self.register_buffer("neighbours", empty)
        self.register_buffer("penalty", None, persistent=False)

    def forward(self, query_ids: Tensor) -> Tensor:
        flat = query_ids.reshape(-1)
        pairs = Positives(self.start, self.items).of(flat)
        assert pairs.rows is not None
        scores = self._corrected(self._sums(pairs.rows, pairs.ids.long(), len(flat)))
        return scores.reshape(*query_ids.shape, self.dim)

    def encode_history(self, items: Tensor) -> Tensor:
        """Scores (B, N) of all items for histories (B, L), padded with -1; order and repeats do not matter."""
        return self._corrected(self._sums(*distinct(items), len(items)))

    def rows(self, items: Tensor) -> Tensor:
        """Rows (n, N) of the matrix for items (n,)."""
        return self._sums(torch.arange(len(items), device=items.device), items.long(), len(items))

    def penalised(self, penalty: Tensor) -> ItemSums:
        """The same matrix, shared, with a penalty of each item."""
        tower = copy.copy(self)
        tower._buffers = {**self._buffers, "penalty": penalty.to(self.weight.device)}
        return tower

    def _corrected(self, scores: Tensor) -> Tensor:
        return scores if self.penalty is None else scores - spread(scores).unsqueeze(1) * self.penalty

    def _sums(self, rows: Tensor, items: Tensor, n: int) -> Tensor:
        """(n, N): the sum of the matrix's rows `items` by `rows`, which ascend."""
        if self.neighbours is None:
            offsets = torch.searchsorted(rows, torch.arange(n, device=rows.device))
            return F.embedding_bag(items, self.weight, offsets, mode="sum")
        scores = self.weight.new_zeros(n * self.dim)
        step = max(1, _EXPANDED // max(1, self.neighbours.shape[1]))
        for row, item in zip(rows.split(step), items.split(step), strict=True):
            cells = row.unsqueeze(1) * self.dim + self.neighbours[item]
            scores.index_add_(0, cells.flatten(), self.weight[item].flatten())
        return scores.view(n, self.dim)


def item_to_item(histories: Histories, n_items: int, neighbours: int | None = None) -> Retriever:
    """A retriever over an item-item matrix, still zero."""
    return Retriever(ItemSums(histories, n_items, neighbours), UnitTower(n_items), "dot")


def from_lists(model: Retriever, weight: Tensor, neighbours: Tensor) -> Retriever:
    """A retriever over the queries of another, with the weights (N, M) of these neighbours (N, M) of each item."""
    tower = model.query
    assert isinstance(tower, ItemSums)
    lists = item_to_item(Histories(tower.start, tower.items), model.n_items, 0)
    assert isinstance(lists.query, ItemSums)
    lists.query.weight, lists.query.neighbours = nn.Parameter(weight.float()), neighbours.int()
    lists.query.penalty = tower.penalty
    return lists.eval()


@torch.no_grad()
def largest_weights(model: Retriever, m: int) -> tuple[Tensor, Tensor]:
    """(weights, neighbours) (N, m): the m weights of each item that are largest in absolute value, largest first.

    Negative weights count as much as positive ones: EASE needs both.
    """
    tower = model.query
    assert isinstance(tower, ItemSums)
    m = min(m, tower.weight.shape[1])
    at = torch.cat(
        [
            torch.sort(part.abs(), dim=1, descending=True, stable=True).indices[:, :m]
            for part in tower.weight.split(1024)
        ]
    )
    weights = tower.weight.gather(1, at)
    return weights, (at if tower.neighbours is None else tower.neighbours.gather(1, at)).int()


def distinct(items: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, items): the distinct items of each history (B, L), which is padded with -1."""
    ordered = items.long().sort(1).values
    kept = ordered >= 0
    kept[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return torch.nonzero(kept)[:, 0], ordered[kept]


@dataclass(frozen=True)
class Ease:
    """EASE in closed form: each item's column is the ridge regression of that item on all the others.

        G = X^T X + lam I,   P = G^-1,   B_ij = -P_ij / P_jj,   B_jj = 0

    X is 0 or 1. Computed in float64: at a small lam the condition number of G reaches 1e6, which float32 does not
    resolve. The loss, |X - X B|^2 + lam |B|^2 per pair, is (sum_j 1 / P_jj - N lam) / pairs. With `neighbours` only
    the weights of each column that are largest in absolute value are kept, and the rest are 0.

    Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019.
    """

    lam: float
    neighbours: int | None = None
    closed_form = True
    weighted = False

    def __post_init__(self) -> None:
        if not 0 < self.lam < math.inf:
            raise UserError(f"lam must be positive and finite, got {self.lam}")
        if self.neighbours is not None and self.neighbours < 1:
            raise UserError(f"neighbours must be at least 1, got {self.neighbours}")

    def sweeps(self, model: Retriever, data: Interactions) -> Iterator[float]:
        tower = model.query
        assert isinstance(tower, ItemSums)
        n = data.n_items
        inverse = ridge_inverse(data.positives().to(tower.weight.device), n, self.lam)
        diagonal = inverse.diagonal().clone()
        tower.weight.copy_(inverse.div_(-diagonal))
        tower.weight.fill_diagonal_(0.0)
        if self.neighbours is not None and self.neighbours < n:
            del inverse
            for columns in tower.weight.split(_COLUMNS, 1):
                most = columns.abs().topk(self.neighbours, 0).indices
                columns.copy_(torch.zeros_like(columns).scatter_(0, most, columns.gather(0, most)))
        yield (float((1 / diagonal).sum()) - n * self.lam) / max(len(data), 1)


def ridge_inverse(pairs: Positives, n_items: int, lam: float, precision: torch.dtype = torch.float64) -> Tensor:
    """(X^T X + lam I)^-1 (N, N), on the device of the pairs, which are the ones of X."""
    device = pairs.items.device
    check_square(n_items, device)
    gram = torch.zeros(n_items, n_items, dtype=precision, device=device)
    for low, counts in co_counts(pairs, n_items):
        gram[low : low + len(counts)] = counts
    gram.diagonal().add_(lam)
    return torch.cholesky_inverse(torch.linalg.cholesky(gram))


def square_fits(n_items: int, device: torch.device, processes: int = 1) -> bool:
    """Whether a device has memory left for the square of a catalogue in each of so many processes."""
    return processes * _SQUARE * n_items**2 <= _room(device)


def check_square(n_items: int, device: torch.device) -> None:
    """Refuse a catalogue whose square does not fit the memory that a device has left."""
    room = _room(device)
    needed, largest = _SQUARE * n_items**2, math.isqrt(room // _SQUARE)
    if needed > room:
        sizes = f"{n_items:,} items need {needed / 1e9:,.1f} GB and {device.type} has {room / 1e9:,.1f} GB left"
        raise UserError(
            f"ease holds item-item matrices: {sizes}, enough for {largest:,} items; use item_knn or ials instead"
        )


def _room(device: torch.device) -> int:
    return available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class ItemKnn:
    """Item-based neighbours: cosines of the items' queries, shrunk, and the largest of each item.

        s_ij = c_ij / (sqrt(c_i c_j) + shrink)     c_ij queries have both items, c_i have item i

    A query's score of j sums s_ij over those of its items i that have j among their neighbours. Ties are in ascending
    order of id. The loss is 1 less the mean similarity that was kept.

    Deshpande and Karypis, Item-Based Top-N Recommendation Algorithms, TOIS 2004.
    """

    neighbours: int
    shrink: float
    closed_form = True
    weighted = False

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise UserError(f"neighbours must be at least 1, got {self.neighbours}")
        if not 0 <= self.shrink < math.inf:
            raise UserError(f"shrink must not be negative, got {self.shrink}")

    def sweeps(self, model: Retriever, data: Interactions) -> Iterator[float]:
        tower = model.query
        assert isinstance(tower, ItemSums)
        assert tower.neighbours is not None
        pairs = data.positives().to(tower.weight.device)
        root = torch.bincount(pairs.items, minlength=data.n_items).double().sqrt()
        for low, counts in co_counts(pairs, data.n_items):
            rows = torch.arange(low, low + len(counts), device=counts.device)
            similar = counts.double() / (root[rows].unsqueeze(1) * root + self.shrink).clamp(min=1e-300)
            similar[rows - low, rows] = -1.0  # no item is its own neighbour
            best, ids = top_k(similar.float(), None, tower.neighbours.shape[1])
            tower.weight[rows] = best.clamp(min=0.0)
            tower.neighbours[rows] = ids.clamp(min=0).int()
        yield 1.0 - float(tower.weight.mean())


def co_counts(pairs: Positives, n_items: int) -> Iterator[tuple[int, Tensor]]:
    """(first item, counts (b, N)): the queries that have both items, for blocks of items in order.

    A sparse product: the time is that of all pairs of items of all queries; memory is bounded by blocks.
    """
    n, n_queries, device = n_items, len(pairs.start) - 1, pairs.items.device
    everyone = torch.arange(n_queries, device=device)
    baskets = _sparse(pairs.of(everyone), n_queries, n)
    takers = _takers(pairs, n)
    block = max(1, min(n, _CELLS // max(n, 1)))
    for low in range(0, n, block):
        items = torch.arange(low, min(low + block, n), device=device)
        with warnings.catch_warnings():  # the product passes through CSR, which PyTorch calls a beta
            warnings.filterwarnings("ignore", message="Sparse CSR", category=UserWarning)
            counts = torch.sparse.mm(_sparse(takers.of(items), len(items), n_queries), baskets).to_dense()
        yield low, counts


def _takers(pairs: Positives, n_items: int) -> Positives:
    """The queries of each item, as the items of each query are stored."""
    queries = torch.arange(len(pairs.start) - 1, device=pairs.items.device).repeat_interleave(pairs.start.diff())
    count = torch.bincount(pairs.items, minlength=n_items)
    return Positives(F.pad(count.cumsum(0), (1, 0)), queries[torch.argsort(pairs.items, stable=True)])


def _sparse(pairs: Exclude, rows: int, columns: int) -> Tensor:
    """1 at every pair of a row and an id."""
    assert pairs.rows is not None
    places = torch.stack([pairs.rows.long(), pairs.ids.long()])
    ones = torch.ones(places.shape[1], device=places.device)
    return torch.sparse_coo_tensor(places, ones, (rows, columns), is_coalesced=True, check_invariants=False)
