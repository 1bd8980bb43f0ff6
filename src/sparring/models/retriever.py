"""The Retriever: two towers, and how their vectors are compared."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.core.part import Part, n_ids
from sparring.core.sparse_rows import unit_lookup
from sparring.core.types import ALONE, ItemLayers, Ranks
from sparring.data.histories import Context, Histories
from sparring.kernels.vectors import unit
from sparring.models.graph import GraphItems
from sparring.models.histories import PastReader, past_readers, reading
from sparring.models.low_rank_ease import LowRankEase
from sparring.models.parts import Perceptron
from sparring.models.towers import HistoryReader, IdTower, UnitTower, evaluating, width_of
from sparring.models.trend import Trend

NORM_EPS = 1e-6  # a shorter vector is scaled by 1 / NORM_EPS, so that zero stays zero and its gradient finite


class Retriever(nn.Module):
    """Two towers and a score: score(u, i) = q_u . e_i, with both vectors scaled to length 1 if score is "cosine".

    Works with any two modules that map ids to vectors of the same width. `n_items` is read from the item tower (`n`, or
    `num_embeddings` of an nn.Embedding) unless given. With `item_bias`, a tower of width 1, the score is q_u . e_i +
    b_i: an item's vector ends in b_i and a query's in 1, so every inner product includes the bias. Scaling to length 1
    leaves that last dimension out. `with_closed_form` adds dimensions before it (low_rank_ease.py), `with_trend` a part
    of the bias that follows the demand (trend.py).

        model = Retriever(IdTower(n_queries, 64), IdTower(n_items, 64), score="cosine")
        scores = model.encode_queries(queries) @ model.item_vectors().T
    """

    def __init__(
        self,
        query: nn.Module,
        item: nn.Module,
        score: Literal["cosine", "dot"] = "cosine",
        n_items: int | None = None,
        item_bias: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if score not in ("cosine", "dot"):
            raise ValueError(f"unknown score {score!r}: use 'cosine' or 'dot'")
        self.query, self.item, self.score, self.item_bias = query, item, score, item_bias
        widths = width_of(query), width_of(item)
        if widths[0] != widths[1]:
            raise ValueError(
                f"the query tower has {widths[0]} dimensions and the item tower {widths[1]}: they must be equal"
            )
        count = n_items or n_ids(item)
        if count is None:
            raise ValueError(f"the item tower {type(item).__name__} has no attribute n: pass n_items")
        self.n_items, self.width = int(count), widths[0]
        self.closed_form: LowRankEase | None = None
        self.trend: Trend | None = None
        self._reads_context = "context" in inspect.signature(query.forward).parameters

    @property
    def dim(self) -> int:
        """Dimensions of a vector: the towers', those of a closed form, and one for the bias."""
        return self.width + (0 if self.closed_form is None else self.closed_form.dim) + (self.item_bias is not None)

    def encode_queries(self, ids: Tensor, context: Context | None = None) -> Tensor:
        """Vectors of queries (..., D). In training a context says what a tower of histories may read for each row."""
        if context is not None:
            with reading(self.query, context):
                return self._finished(self.query(ids, context) if self._reads_context else self.query(ids))
        if self.closed_form is None:
            return self._finished(self.query(ids))
        assert isinstance(self.query, PastReader)
        items, owners, _ = self.query.read(ids.reshape(-1))
        closed = self.closed_form.queries(items, owners, ids.numel())
        return self._finished(self.query(ids), closed.reshape(*ids.shape, -1))

    def past_readers(self) -> list[PastReader]:
        """The parts of the query tower that read histories."""
        return past_readers(self.query)

    def remember(self, past: Histories) -> None:
        """Let the query tower read these histories from now on."""
        for part in self.past_readers():
            part.remember(past)

    def encode_items(self, ids: Tensor) -> Tensor:
        """Vectors of items (..., D)."""
        fused = self._unit_items(ids)
        if fused is not None:
            return fused
        vectors = self._scaled(self.item(ids))
        more = [] if self.closed_form is None else [self.closed_form.items(ids)]
        if self.item_bias is not None:
            more.append(self.biases(ids))
        return torch.cat([vectors, *(each.to(vectors.dtype) for each in more)], -1) if more else vectors

    def biases(self, ids: Tensor) -> Tensor:
        """Biases of items (..., 1), a trend included."""
        assert self.item_bias is not None
        bias: Tensor = self.item_bias(ids)
        return bias if self.trend is None else bias + self.trend.shift[ids].unsqueeze(-1)

    def _unit_items(self, ids: Tensor) -> Tensor | None:
        """The same from tables in one pass, if a kernel can do that."""
        bias = self.item_bias
        tables = [part for part in (self.item, bias) if type(part) is IdTower and part.sparse]
        added = self.closed_form is not None or self.trend is not None
        if self.score != "cosine" or added or len(tables) != 1 + (bias is not None):
            return None
        return unit_lookup(*(tables[0].weight, ids.long()), *(table.weight for table in tables[1:]))

    def encode_mixtures(self, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """Vectors (..., V, D) of items (..., M) mixed by weights (..., V, M) after `layer` layers."""
        if not isinstance(self.item, Perceptron):
            raise ValueError(
                f"layer={layer} needs hidden layers in the item tower {type(self.item).__name__}: set item_features"
            )
        vectors = self._scaled(self.item.mixtures(ids, weights, layer))
        if self.item_bias is None:
            return vectors
        return torch.cat([vectors, weights @ self.item_bias(ids).to(vectors.dtype)], -1)

    def item_layers(self) -> ItemLayers | None:
        """The layers of the item tower, if it is that of a graph; an item bias is the last dimension of each."""
        tower = self.item
        if not isinstance(tower, GraphItems):
            return None

        def encode(ids: Tensor, layer: int) -> Tensor:
            vectors = tower.layer(ids, layer)
            return vectors if self.item_bias is None else torch.cat([vectors, self.item_bias(ids)], -1)

        def join(mean: Tensor) -> Tensor:
            if self.item_bias is None:
                return self._scaled(mean)
            return torch.cat([self._scaled(mean[..., :-1]), mean[..., -1:]], -1)

        return ItemLayers(tower.layers + 1, encode, join)

    def encode_histories(self, items: Tensor) -> Tensor:
        """Vectors (B, D) of queries given by their items (B, L) in time order, padded with -1."""
        if not isinstance(self.query, HistoryReader):
            raise ValueError(
                f"the query tower {type(self.query).__name__} cannot encode a history: train with a HistoryTower"
            )
        vectors = self.query.encode_history(items)
        if self.closed_form is None:
            return self._finished(vectors)
        assert isinstance(self.query, PastReader)
        present = items >= 0
        present &= present.flip(1).cumsum(1).flip(1) <= self.query.last
        return self._finished(vectors, self.closed_form.queries(items[present], present.nonzero()[:, 0], len(items)))

    def encode_texts(self, strings: Sequence[str], side: Literal["query", "item"] = "query") -> Tensor:
        """Vectors (n, D) of texts, as new queries or new items, without gradient, in evaluation mode."""
        tower = self.query if side == "query" else self.item
        encode: Callable[[Sequence[str]], Tensor] | None = getattr(tower, "encode_texts", None)
        if encode is None:
            raise ValueError(f"the {side} tower {type(tower).__name__} cannot encode a text: train with a TextTower")
        with evaluating(self):
            vectors = encode(strings)
        if side == "query":
            return self._finished(vectors)
        vectors = self._scaled(vectors)
        return vectors if self.item_bias is None else torch.cat([vectors, torch.zeros_like(vectors[:, :1])], -1)

    def dropped(self, q: Tensor, rate: float, uniform: Tensor) -> Tensor:
        """Dropout of query vectors (..., D): a dimension is 0 if its number in `uniform` is below `rate`.

        The others are divided by 1 - rate. Under cosine the result is scaled to length 1 again, as if the tower's
        output had been dropped. The bias dimension is never dropped and has no number in `uniform`.
        """
        vectors = q if self.item_bias is None else q[..., :-1]
        if self.score == "cosine":
            fused = unit(vectors.contiguous(), int(self.item_bias is not None), uniform, rate)
            if fused is not None:
                return fused
        return self._finished(vectors * (uniform >= rate) / (1 - rate))

    def item_vectors(self, block: int = 65536, ranks: Ranks = ALONE) -> Tensor:
        """Vectors of all items (N, D), without gradient, in evaluation mode, by blocks; ranks share the work."""
        shard = self.item_shard()
        if shard is not None:
            gathered: Tensor = self.item.whole(shard[1])  # type: ignore[operator]
            return gathered
        ids = torch.arange(self.n_items, device=self.device)
        if ranks.world == 1 or isinstance(self.item, IdTower):  # reading a table is faster than sending it
            return self._in_blocks(self.encode_items, ids, block)
        return ranks.gather(self._in_blocks(self.encode_items, ranks.own(ids), block), len(ids))

    def with_bias(self, bias: nn.Module | None) -> Retriever:
        """The same towers, shared, with another item bias."""
        other = self._shared()
        other.item_bias = bias
        return other

    def cut(self, dim: int) -> Retriever:
        """The same towers, shared, with the first `dim` dimensions of their vectors, scaled after the cut."""
        whole = width_of(self.item)
        if self.scores_items or self.closed_form is not None:
            raise UserError("vectors can be cut where two towers are trained by steps: this model has a closed form")
        if not 1 <= dim <= whole:
            raise UserError(f"vectors cannot be cut to {dim} dimensions: they have {whole}")
        other = self._shared()
        other.width = dim
        return other

    @property
    def whole(self) -> Retriever:
        """The same towers, shared, with all dimensions."""
        return self.cut(width_of(self.item)) if self.width != width_of(self.item) else self

    def shortened(self, vectors: Tensor) -> Tensor:
        """Vectors (..., D) of the model with all dimensions, as this one has them; an item bias stays last."""
        short = self._scaled(vectors[..., : self.width])
        return short if self.item_bias is None else torch.cat([short, vectors[..., -1:]], -1)

    def with_closed_form(self, form: LowRankEase) -> Retriever:
        """The same towers, shared, beside a closed form; for query towers that pool the items of a history."""
        if not isinstance(self.query, PastReader):
            raise ValueError(f"a closed form reads histories, and the query tower {type(self.query).__name__} has none")
        other = self._shared()
        other.closed_form = form.to(self.device)
        return other

    def with_trend(self, trend: Trend) -> Retriever:
        """The same towers, shared, with a trend, which has yet to count (trend.py)."""
        other = self._shared()
        other.trend = trend.to(self.device)
        return other

    @property
    def towers(self) -> Retriever:
        """The same towers, shared, without a closed form and a trend, as they are trained."""
        if self.closed_form is None and self.trend is None:
            return self
        other = self._shared()
        other.closed_form = other.trend = None
        return other

    def _shared(self) -> Retriever:
        other = copy.copy(self)
        other._modules = dict(self._modules)
        return other

    @torch.no_grad()
    def item_shard(self) -> tuple[int, Tensor] | None:
        """This rank's first item and the vectors of its items, if the table is sharded (rowwise_tables.py)."""
        if not (isinstance(self.item, Part) and self.item.spread):
            return None
        vectors = self._scaled(self.item.weight)  # type: ignore[arg-type]
        low = int(self.item.bounds[self.item.ranks.rank])  # type: ignore[index, union-attr, arg-type]
        if self.item_bias is not None:
            vectors = torch.cat(
                [vectors, self.item_bias(torch.arange(low, low + len(vectors), device=vectors.device))], -1
            )
        return low, vectors

    @property
    def scores_items(self) -> bool:
        """Whether a query's vector already holds its score of every item; items are then unit vectors."""
        return isinstance(self.item, UnitTower)

    def query_vectors(self, ids: Tensor, block: int = 65536) -> Tensor:
        """Vectors of these queries (n, D), without gradient, in evaluation mode, `block` at a time."""
        return self._in_blocks(self.encode_queries, ids.to(self.device), block)

    def table_queries(self, ids: np.ndarray) -> np.ndarray:
        """`query_vectors` of an IdTower by numpy: a call of torch releases the interpreter lock, which costs a wait."""
        vectors: np.ndarray = self.query.weight.detach().numpy()[ids, : self.width]  # type: ignore[union-attr, operator]
        if self.score == "cosine":
            vectors /= np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), NORM_EPS)[:, None]
        return vectors if self.item_bias is None else np.concatenate([vectors, np.ones_like(vectors[:, :1])], 1)

    def _scaled(self, vectors: Tensor) -> Tensor:
        vectors = vectors if vectors.shape[-1] == self.width else vectors[..., : self.width]
        return F.normalize(vectors, dim=-1, eps=NORM_EPS) if self.score == "cosine" else vectors

    def _finished(self, vectors: Tensor, closed: Tensor | None = None) -> Tensor:
        """Output of a query tower, scaled, with the closed form's dimensions and that of the bias."""
        if self.score == "cosine" and closed is None:
            fused = unit(vectors, int(self.item_bias is not None))
            if fused is not None:
                return fused
        vectors = self._scaled(vectors)
        more = [] if closed is None else [closed.to(vectors.dtype)]
        if self.item_bias is not None:
            more.append(torch.ones_like(vectors[..., :1]))
        return torch.cat([vectors, *more], -1) if more else vectors

    @property
    def device(self) -> torch.device:
        """The device of the towers."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

    def _in_blocks(self, encode: Callable[[Tensor], Tensor], ids: Tensor, block: int) -> Tensor:
        with evaluating(self), torch.no_grad():
            parts = [encode(part) for part in ids.split(block)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
