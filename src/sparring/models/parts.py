"""Parts of towers: columns, vectors, and their sums, concatenations and perceptrons.

A part maps ids of any shape to vectors and has `n` ids and `dim` dimensions; it is a tower itself.

    genres = Tags(features.tags[0], 64)
    Retriever(IdTower(n_queries, 64), Sum(IdTower(n_items, 64), genres, Perceptron(Dense(images), (128,), 64)))
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.core.part import n_ids
from sparring.data.features import Features, TagColumn
from sparring.data.histories import Context
from sparring.models.towers import HistoryReader, IdTower, width_of


class Categories(nn.Module):
    """Categorical columns, one vector of `dim` for each, side by side: columns * dim dimensions.

    Row i of `codes` (n, F) has the codes of id i. Code 0 of a column (missing or rare) has its own learned vector.

        Categories(features.categorical, features.cardinalities, 32)
    """

    codes: Tensor

    def __init__(
        self,
        codes: np.ndarray | Tensor,
        cardinalities: Sequence[int],
        dim: int,
        init_std: float | None = None,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        table = torch.as_tensor(codes, dtype=torch.int32)
        if table.dim() != 2 or table.shape[1] != len(cardinalities) or not len(cardinalities):
            raise UserError(f"codes of shape {tuple(table.shape)} do not fit {len(cardinalities)} columns")
        if len(table) and bool((table < 0).any() | (table >= torch.tensor(cardinalities)).any()):
            raise UserError(f"the codes of a column must be from 0 to its cardinality - 1, of {tuple(cardinalities)}")
        self.n, self.dim = len(table), dim * len(cardinalities)
        # One table for all columns, each at its own offset: one gather instead of one per column.
        self.values = IdTower(sum(cardinalities), dim, init_std, sparse)
        offsets = torch.tensor([0, *itertools.accumulate(cardinalities)][:-1], dtype=torch.int32)
        self.register_buffer("codes", table + offsets)

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.values(self.codes[ids.long()])
        return vectors.flatten(-2)


class Tags(nn.Module):
    """A column with any number of values per id: the mean of their vectors; without a known value, the vector of 0.

    Tags(Features.from_table(items, ["genres"]).tags[0], 32)
    """

    codes: Tensor
    weights: Tensor

    def __init__(self, column: TagColumn, dim: int, init_std: float | None = None, sparse: bool = True) -> None:
        super().__init__()
        codes = torch.as_tensor(column.codes, dtype=torch.int32)
        if codes.dim() != 2 or bool((codes[:, 0] < 0).any() | (codes >= column.cardinality).any()):
            raise UserError(f"tags need codes of at least one value per id, below {column.cardinality}")
        self.n, self.dim = len(codes), dim
        self.values = IdTower(column.cardinality, dim, init_std, sparse)
        present = codes >= 0
        # The places after the last value repeat the first with weight 0, so that no other row gets a gradient.
        self.register_buffer("codes", torch.where(present, codes, codes[:, :1]))
        self.register_buffer("weights", present / present.sum(1, keepdim=True))

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.long()
        return (self.values(self.codes[rows]) * self.weights[rows].unsqueeze(-1)).sum(-2)


class Dense(nn.Module):
    """Given vectors, one per id, which are not trained: numbers of columns, or vectors of images, audio or texts.

    `vectors` is an array (n, D) or the path of a `.npy` file. They are part of the state unless `saved` is false, for
    vectors that a run folder keeps in a file.

        Perceptron(Dense("images.npy"), (128,), 64)
    """

    values: Tensor

    def __init__(self, vectors: np.ndarray | str | Path, saved: bool = True) -> None:
        super().__init__()
        self.saved = saved
        self.register_buffer("values", torch.from_numpy(Features.from_array(vectors).dense), persistent=saved)
        self.n, self.dim = self.values.shape
        if not self.dim:
            raise UserError("vectors need at least one dimension")

    def forward(self, ids: Tensor) -> Tensor:
        return self.values[ids.long()]


class Joint(nn.Module):
    """Several parts as one. A part that reads histories gets the context of a training step."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.n = nn.ModuleList(parts), _size(parts)
        self._read = ["context" in inspect.signature(part.forward).parameters for part in parts]

    def each(self, ids: Tensor, context: Context | None) -> list[Tensor]:
        """The vectors of every part."""
        return [part(ids, context) if reads else part(ids) for part, reads in zip(self.parts, self._read, strict=True)]


class Sum(Joint):
    """The sum of parts of equal width."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        widths = [width_of(part) for part in parts]
        if len(set(widths)) > 1:
            raise UserError(f"parts of {', '.join(map(str, widths))} dimensions cannot be summed: use Concat")
        self.dim = widths[0]

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        first, *others = self.each(ids, context)
        return sum(others, first)


class Concat(Joint):
    """Parts side by side."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.dim = sum(width_of(part) for part in parts)

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        return torch.cat(self.each(ids, context), -1)


class Perceptron(Joint):
    """A part through fully connected layers of `hidden` units with ReLU between them, and a linear layer to `dim`.

    The last layer is linear, so scores can be negative. Without `hidden` the part is projected to `dim`.

        Perceptron(Concat(IdTower(n, 64), genres), (128,), 64)
    """

    def __init__(self, part: nn.Module, hidden: Sequence[int], dim: int) -> None:
        super().__init__(part)
        if min([*hidden, dim]) < 1:
            raise UserError(f"every layer needs at least one unit, got hidden={tuple(hidden)} and dim={dim}")
        self.dim = dim
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([width_of(part), *hidden, dim]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    @property
    def part(self) -> nn.Module:
        return self.parts[0]

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        if context is None and ids.dim() > 1 and not ids.is_cuda:  # candidates of each query: encode each item once
            distinct, which = torch.unique(ids, return_inverse=True)
            return F.embedding(which, self.layers(self.each(distinct, None)[0]))
        vectors: Tensor = self.layers(self.each(ids, context)[0])
        return vectors

    def mixtures(self, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """(..., V, D): items (..., M) mixed by weights (..., V, M) after `layer` layers, then sent through the rest."""
        starts = [index for index, part in enumerate(self.layers) if isinstance(part, nn.Linear)]
        if not 0 <= layer < len(starts):
            raise ValueError(f"layer={layer} is not inside the item tower: choose 0 to {len(starts) - 1}")
        hidden = self.layers[: starts[layer]](self.part(ids))
        mixed: Tensor = self.layers[starts[layer] :](weights @ hidden)
        return mixed


class FeatureTower(Perceptron):
    """Ids with the columns that describe them, concatenated and passed through a perceptron.

        x = [id vector | one vector per categorical column | one per column of tags | numbers | vectors of a file]

    The id and every column have vectors of `width` dimensions (`dim` by default). Without `with_id` an item is known
    by its features alone, so the tower can encode items it was never trained on. The features are buffers of the
    module.

        FeatureTower(n=len(table), dim=32, features=Features.from_table(table, ["seller", "category"]))

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 4.5.
    """

    def __init__(
        self,
        n: int,
        dim: int,
        features: Features | None,
        hidden: Sequence[int] = (64,),
        with_id: bool = True,
        init_std: float | None = None,
        sparse: bool = True,
        vectors: np.ndarray | None = None,
        width: int | None = None,
    ) -> None:
        each = dim if width is None else width
        parts: list[nn.Module] = [IdTower(n, each, init_std, sparse)] if with_id else []
        if features is not None:
            if features.cardinalities:
                parts.append(Categories(features.categorical, features.cardinalities, each, init_std, sparse))
            parts += [Tags(column, each, init_std, sparse) for column in features.tags]
            if features.dense.shape[1]:
                parts.append(Dense(features.dense))
        if vectors is not None:
            parts.append(Dense(vectors, saved=False))
        if not parts:
            raise UserError("a tower without ids needs at least one feature: name columns, or vectors")
        sizes = {len(features)} if features is not None else set()
        sizes |= {len(vectors)} if vectors is not None else set()
        for size in sizes - {n}:
            raise UserError(f"features of {size:,} ids do not fit a tower of {n:,} ids")
        super().__init__(Concat(*parts), hidden, dim)

    @property
    def inputs(self) -> list[nn.Module]:
        """The inputs of the perceptron, in order."""
        return list(self.part.parts)  # type: ignore[union-attr, arg-type]


class DescribedHistory(HistoryReader):
    """A query as the sum of its history's vector and one of its own columns; a new query has its history alone."""

    def __init__(self, history: HistoryReader, columns: nn.Module) -> None:
        super().__init__()
        self.history, self.columns = history, columns
        self.n, self.dim = _size([columns]), width_of(history)

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        vectors: Tensor = self.history(ids, context) + self.columns(ids)
        return vectors

    def encode_history(self, items: Tensor) -> Tensor:
        return self.history.encode_history(items)


def fixed_shapes(tower: nn.Module) -> bool:
    """Whether the shapes of a tower's work follow from the shape of its ids: on a GPU it never waits for values."""
    parts = (IdTower, Categories, Tags, Dense, Joint, nn.Linear, nn.ReLU, nn.Sequential, nn.ModuleList)
    return all(isinstance(part, parts) for part in tower.modules())


def _size(parts: Sequence[nn.Module]) -> int:
    """The number of ids of parts, which must agree."""
    if not parts:
        raise UserError("give at least one part")
    sizes = [n_ids(part) for part in parts]
    if None in sizes:
        kind = type(parts[sizes.index(None)]).__name__
        raise UserError(f"the part {kind} has no attribute n, its number of ids: set it")
    if len(set(sizes)) > 1:
        raise UserError(f"parts of {', '.join(f'{size:,}' for size in sizes)} ids do not fit together")
    return sizes[0]  # type: ignore[return-value]
