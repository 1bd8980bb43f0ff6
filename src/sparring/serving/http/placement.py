"""Vectors of items that a run was not trained on: given, or from a text, similar items or item columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.data.features import Features, value_codes
from sparring.data.texts.texts import joined_text
from sparring.models.parts import Categories, Dense, FeatureTower, Tags
from sparring.models.text import TextTower
from sparring.serving.http.store import Change
from sparring.training.item_vectors import mean_item
from sparring.training.trained import Trained


class ItemPlacer:
    """Places new items in the vector space of one run.

    - vector: the given vector, if it was given for this very model;
    - text: encoded by the item tower, if it reads texts, after the columns that it reads first (such as a title);
    - like: the mean of similar items, rescaled to their mean length unless vectors have length 1;
    - features: encoded by the item tower, if it reads columns; the mean of all id vectors replaces the missing one.

    An item-item matrix and a fused run place no new items: `ways` is empty.

    If the run has item biases, the bias is the mean of those of the similar items, or of all items.
    """

    def __init__(self, trained: Trained, model: str) -> None:
        self.trained, self.model = trained, model
        item = trained.model.item
        self.ways = ["vector", "like"] if trained.has_vectors else []
        self._features: _FeatureEncoder | None = None
        if not self.ways:
            return
        if isinstance(item, TextTower):
            self.ways.append("text")
        self._text_columns: list[str] = list(trained.meta["setup"]["text"]["item_text"] or ())[:-1]
        if isinstance(item, FeatureTower) and trained.ids.item_table is not None:
            names = trained.meta["setup"]["model"]["item_features"] or ()
            self._features = _FeatureEncoder(item, trained.ids.item_table, tuple(names))
            self.ways.append("features")

    @property
    def dim(self) -> int:
        return self.trained.model.dim

    def given(self, change: Change) -> np.ndarray | None:
        """The given vector, if it is of this model; else None."""
        if change.vector is None or change.model != self.model or len(change.vector) != self.dim:
            return None
        return change.vector

    def from_text(self, text: str, columns: Mapping[str, Any]) -> np.ndarray | None:
        if "text" not in self.ways:
            return None
        joined = joined_text([_text(columns.get(name)) for name in self._text_columns] + [text])
        return self.trained.encode_texts([joined], "item")[0].float().numpy()

    def from_like(self, vectors: np.ndarray) -> np.ndarray:
        """The mean of vectors (n, D), scaled like an item."""
        return mean_item(self.trained.model, vectors)

    def from_columns(self, row: Mapping[str, Any]) -> np.ndarray | None:
        if self._features is None:
            return None
        with torch.no_grad():
            model, vector = self.trained.model, self._features.vector(row)
            vector = F.normalize(vector, dim=0) if model.score == "cosine" else vector
            if model.closed_form is not None:
                vector = torch.cat([vector, torch.zeros(model.closed_form.dim)])
            if model.item_bias is not None:
                vector = torch.cat([vector, model.biases(torch.arange(model.n_items)).mean(0)])
        return vector.float().numpy()


class _FeatureEncoder:
    """Encodes a new row with a feature tower: its columns are coded and scaled like the rows of the training table."""

    def __init__(self, tower: FeatureTower, table: pl.DataFrame, names: tuple[str, ...]) -> None:
        self.tower, self.table = tower, table
        kinds = {name: Features.from_table(table.head(1), [name]) for name in names}
        self.coded = [name for name, found in kinds.items() if found.cardinalities]
        self.tagged = [name for name, found in kinds.items() if found.tags]
        self.scaled = [name for name, found in kinds.items() if found.dense.shape[1]]
        self.codes: dict[str, dict[str, int]] = {
            name: dict(value_codes(table[name]).iter_rows()) for name in (*self.coded, *self.tagged)
        }

    def vector(self, row: Mapping[str, Any]) -> Tensor:
        parts, tags = list[Tensor](), iter(self.tagged)
        for part in self.tower.inputs:
            if isinstance(part, Categories):
                parts.append(part.values(torch.tensor([self._categories(row)])).flatten(1))
            elif isinstance(part, Tags):
                parts.append(part.values(torch.tensor(self._tags(row, next(tags)))).mean(0, keepdim=True))
            elif isinstance(part, Dense) and part.saved:
                parts.append(self._numbers(row))
            else:  # a new item has no id and no vector of its own
                parts.append(part(torch.arange(self.tower.n)).mean(0, keepdim=True))
        out: Tensor = self.tower.layers(torch.cat(parts, 1))
        return out[0]

    def _categories(self, row: Mapping[str, Any]) -> list[int]:
        """The rows of the table of all columns, each at the offset of its column; row 0 of a column is "unknown"."""
        places, offset = [], 0
        for name in self.coded:
            places.append(offset + self.codes[name].get(_text(row.get(name)), 0))
            offset += len(self.codes[name]) + 1
        return places

    def _tags(self, row: Mapping[str, Any], name: str) -> list[int]:
        """The codes of the known values of a column of tags."""
        values = row.get(name) or []
        given = values if isinstance(values, list | tuple) else [values]
        return sorted({self.codes[name].get(_text(value), 0) for value in given} - {0}) or [0]

    def _numbers(self, row: Mapping[str, Any]) -> Tensor:
        # appended to the table: one row hardly changes the mean and the deviation that columns are scaled by
        new = pl.DataFrame(
            [{name: row.get(name) for name in self.scaled}], schema={n: self.table.schema[n] for n in self.scaled}
        )
        joined = pl.concat([self.table.select(self.scaled), new])
        return torch.from_numpy(Features.from_table(joined, self.scaled).dense[-1:])


def _text(value: Any) -> str:
    return "" if value is None else str(pl.Series([value]).cast(pl.String)[0])
