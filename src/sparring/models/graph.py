"""The graph of the training pairs: LightGCN's propagation over the id tables of both sides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparring.core.part import Part
from sparring.core.types import Positives
from sparring.data.pairs import within
from sparring.kernels import gather

_PIECE = 64  # edges that one thread adds up: the most popular item has thousands


class Graph(Part):
    """Ids of both sides, propagated over the bipartite graph of their pairs (LightGCN); the query tower itself.

        E^(l+1) = D^-1/2 A D^-1/2 E^(l),   vector = mean of E^(0) to E^(L)

    A joins every query with its items, and D holds the number of pairs of each query and item. E^(0), `weight`, has the
    queries first, then the items. The item tower is GraphItems(graph). Every vector depends on the complete table, so
    its gradient is dense: row optimisers cannot train it. All ids are propagated together, once in a training step,
    and once in evaluation mode until the weights change. Nothing waits for the device.

        graph = Graph(train.positives(), n_items, 64);  Retriever(graph, GraphItems(graph))

    He et al., LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation, SIGIR 2020.
    """

    start: Tensor
    items: Tensor
    columns: Tensor
    value: Tensor
    pieces: Tensor
    rows: Tensor
    places: Tensor

    def __init__(
        self, pairs: Positives, n_items: int, dim: int, layers: int = 3, init_std: float | None = None
    ) -> None:
        super().__init__()
        if layers < 0 or dim < 1:
            raise ValueError(f"a graph needs layers >= 0 and dim >= 1, got {layers} and {dim}")
        self.n, self.n_items, self.dim, self.layers = len(pairs.start) - 1, n_items, dim, layers
        std = dim**-0.5 if init_std is None else init_std
        self.weight = nn.Parameter(torch.empty(self.n + n_items, dim).normal_(0.0, std))
        self.register_buffer("start", pairs.start.long())
        self.register_buffer("items", pairs.items.int())
        for name, tensor in _adjacency(pairs, n_items).items():
            self.register_buffer(name, tensor, persistent=False)
        self._propagated: _Propagated | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return gather(self.propagated().mean, ids.long())

    def propagated(self) -> _Propagated:
        """The vectors of all ids: from this step, from this evaluation, or computed now."""
        known, key = self._propagated, (self.weight._version, self.weight.data_ptr(), self.training)
        grad = torch.is_grad_enabled() and self.weight.requires_grad
        if known is not None and known.key == key and (known.mean.requires_grad or not grad):
            return known
        mean, *layers = _Propagation.apply(self.weight, self)  # type: ignore[no-untyped-call]
        found = _Propagated(key, mean, (self.weight, *layers))
        # In training a result without gradient is not kept: a recorded step changes the weights, not their version.
        if grad or not self.training:
            self._propagated = found
        return found

    def neighbours(self, x: Tensor) -> Tensor:
        """D^-1/2 A D^-1/2 x for a table of all ids, queries first."""
        value = self.value.to(x.dtype)
        sums = F.embedding_bag(self.columns, x, self.pieces, mode="sum", per_sample_weights=value)
        return F.embedding_bag(self.places, sums, self.rows, mode="sum")

    def train(self, mode: bool = True) -> Graph:
        if mode != self.training:
            self._propagated = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Without the vectors of a step, which cannot be copied."""
        return {**self.__dict__, "_propagated": None}

    def extra_repr(self) -> str:
        return f"{self.n} queries, {self.n_items} items, {len(self.items)} pairs, {self.layers} layers"


class GraphItems(Part):
    """The item side of a Graph: the item tower of its Retriever."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.n, self.dim = graph, graph.n_items, graph.dim

    @property
    def layers(self) -> int:
        """Layers of the graph, E^(0) not counted."""
        return self.graph.layers

    def forward(self, ids: Tensor) -> Tensor:
        return self.graph(ids + self.graph.n)  # type: ignore[no-any-return]

    def layer(self, ids: Tensor, layer: int) -> Tensor:
        """E^(layer) of items; their vectors are the mean over the layers."""
        return gather(self.graph.propagated().layers[layer], ids.long() + self.graph.n)


class _Propagated(NamedTuple):
    key: tuple[int, int, bool]  # version and place of the weights, and the mode
    mean: Tensor  # (queries + items, D)
    layers: tuple[Tensor, ...]  # E^(0) to E^(L)


class _Propagation(torch.autograd.Function):
    """The mean over the layers, then E^(1) to E^(L). D^-1/2 A D^-1/2 is symmetric, so it also carries gradients back.

    dE^(0) = G_0 + S (G_1 + S (... + S G_L)),   S = D^-1/2 A D^-1/2,   G_l = gradient of E^(l)
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, graph: Graph) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        layers = [weight.detach()]
        for _ in range(graph.layers):
            layers.append(graph.neighbours(layers[-1]))
        total = layers[0].clone()
        for layer in layers[1:]:
            total += layer
        return total.div_(len(layers)), *layers[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean: Tensor | None, *layers: Tensor | None) -> tuple[Tensor | None, None]:
        graph: Graph = ctx.graph
        graph._propagated = None  # a second backward pass needs a second forward pass
        share = None if mean is None else mean / (graph.layers + 1)
        total: Tensor | None = None
        for layer in reversed(layers):
            total = _sum(total, _sum(layer, share))
            total = None if total is None else graph.neighbours(total)
        return _sum(total, share), None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _adjacency(pairs: Positives, n_items: int) -> dict[str, Tensor]:
    """D^-1/2 A D^-1/2 by rows, each cut into pieces of at most _PIECE entries.

    `columns` and `value` are the entries, `pieces` the first entry of each piece, `rows` the first piece of each row.
    """
    n_queries = len(pairs.start) - 1
    queries = np.repeat(np.arange(n_queries, dtype=np.int64), pairs.start.diff().cpu().numpy())
    keys = np.unique(queries * n_items + pairs.items.cpu().numpy())  # an item counts once, however often a query has it
    query, item = keys // n_items, keys % n_items + n_queries
    row, column = np.concatenate([query, item]), np.concatenate([item, query])
    order = np.argsort(row, kind="stable")
    row, column = row[order], column[order]
    degree = np.bincount(row, minlength=n_queries + n_items)
    value = 1 / np.sqrt(degree[row].astype(np.float64) * degree[column])
    first = np.cumsum(degree) - degree
    cut = -(-degree // _PIECE)  # pieces of each row
    rows = np.cumsum(cut) - cut
    pieces = np.repeat(first, cut) + within(cut) * _PIECE
    kind = torch.int32 if len(column) < 2**31 else torch.int64
    tensors = {"columns": column, "pieces": pieces, "rows": rows, "places": np.arange(len(pieces))}
    return {name: torch.from_numpy(each).to(kind) for name, each in tensors.items()} | {
        "value": torch.from_numpy(value).float()
    }
