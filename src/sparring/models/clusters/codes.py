"""Codes: the cluster and the cell of every item, and the items of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core.errors import UserError, one_line
from sparring.core.files import AnyPath, read_section, write_tensors
from sparring.data.interactions import Vocabulary

ITEMS_PER_CLUSTER, MOST_CLUSTERS = 295, 300  # Amazon's in the paper: 88,408 items in 300 clusters


def default_clusters(n_items: int) -> int:
    """The primary clusters of a catalogue: one for 295 items, as on the paper's smallest set, from 2 to its 300.

    Small clusters leave an item the same few hard negatives in every epoch, many of them positives of the same query.

    Xing et al., ESANS, WWW 2025, tables 1 and 6.
    """
    return min(max(round(n_items / ITEMS_PER_CLUSTER), 2), MOST_CLUSTERS)


class Codes:
    """A primary cluster of every item, a secondary cluster inside it, and the sorted items of each (ESANS).

    Items of one primary cluster are similar, those of one cell (primary, secondary) so similar that they are poor
    negatives for each other. `order` lists the items by (primary, secondary, item): those of cluster p are
    order[start[p] : start[p + 1]], those of the cell (p, s) are order[cell_start[c] : cell_start[c + 1]] with c = p *
    k_secondary + s. A cluster or cell may be empty.

        codes = Codes.load("codes.safetensors").aligned(data.item_ids);  codes.items(7);  codes.cell_of[item]

    Xing et al., ESANS, WWW 2025, section 3.2.
    """

    primary: Tensor  # (N,) int32
    secondary: Tensor  # (N,) int16
    codewords: Tensor  # (k_primary, D) float32: centre of each primary cluster

    def __init__(
        self, primary: Tensor, secondary: Tensor, codewords: Tensor, k_secondary: int, ids: Vocabulary | None = None
    ) -> None:
        """`ids` are the original ids of the items; with them the codes can be aligned to another vocabulary."""
        if primary.dim() != 1 or primary.shape != secondary.shape or codewords.dim() != 2:
            shapes = f"{tuple(primary.shape)}, {tuple(secondary.shape)} and {tuple(codewords.shape)}"
            raise ValueError(f"codes need primary (N,), secondary (N,) and codewords (K, D), got {shapes}")
        if not 1 <= k_secondary < 2**15:
            raise ValueError(f"k_secondary is {k_secondary}; it must be between 1 and 32767")
        for name, codes, k in (("primary", primary, len(codewords)), ("secondary", secondary, k_secondary)):
            if len(codes) and not (int(codes.min()) >= 0 and int(codes.max()) < k):
                raise ValueError(
                    f"{name} codes range over {int(codes.min())}..{int(codes.max())}, but there are {k} codewords"
                )
        if ids is not None and len(ids) != len(primary):
            raise ValueError(f"{len(ids):,} ids for {len(primary):,} codes")
        self.primary, self.secondary = primary.cpu().to(torch.int32), secondary.cpu().to(torch.int16)
        self.codewords, self.k_secondary, self.ids = codewords.detach().cpu().float().clone(), k_secondary, ids

    def __len__(self) -> int:
        return len(self.primary)

    def __repr__(self) -> str:
        return f"Codes({len(self):,} items, {self.k_primary} x {self.k_secondary})"

    @property
    def k_primary(self) -> int:
        return len(self.codewords)

    @cached_property
    def cell_of(self) -> Tensor:
        """(N,) int64: the cell of each item, primary * k_secondary + secondary."""
        return self.primary.long() * self.k_secondary + self.secondary.long()

    @cached_property
    def order(self) -> Tensor:
        """(N,) int64: items sorted by cell, then by id."""
        return torch.argsort(self.cell_of, stable=True)

    @cached_property
    def cell_start(self) -> Tensor:
        """(k_primary * k_secondary + 1,) int64: start of each cell in `order`."""
        sizes = torch.bincount(self.cell_of, minlength=self.k_primary * self.k_secondary)
        return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    @cached_property
    def start(self) -> Tensor:
        """(k_primary + 1,) int64: start of each primary cluster in `order`."""
        return self.cell_start[:: self.k_secondary].clone()

    @property
    def sizes(self) -> Tensor:
        """(k_primary,) int64: items in each primary cluster."""
        return self.start.diff()

    def items(self, primary: int, secondary: int | None = None) -> Tensor:
        """The items of a primary cluster, or of one cell of it."""
        if secondary is None:
            return self.order[self.start[primary] : self.start[primary + 1]]
        cell = primary * self.k_secondary + secondary
        return self.order[self.cell_start[cell] : self.cell_start[cell + 1]]

    def aligned(self, ids: Vocabulary) -> Codes:
        """The codes of the items of another vocabulary, in its order; an item without a code is an error."""
        if self.ids is None:
            raise UserError("these codes have no item ids, so they fit only the items they were made for")
        row = torch.from_numpy(self.ids.encode(ids.ids))
        unknown = int((row < 0).sum())
        if unknown:
            first = ids.ids[int((row < 0).nonzero()[0])]
            raise UserError(
                f"{unknown:,} items, such as {first!r}, have no code: run `sparring cluster --update` with these items"
            )
        return Codes(self.primary[row], self.secondary[row], self.codewords, self.k_secondary, ids)

    def without_secondary(self) -> Codes:
        """The same primary clusters with one cell each: the baseline for the secondary codebook."""
        return Codes(self.primary, torch.zeros_like(self.secondary), self.codewords, 1, self.ids)

    def shuffled(self, seed: int = 0) -> Codes:
        """The same codewords and cell sizes with items reassigned at random: a control for clusters."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return Codes(self.primary[order], self.secondary[order], self.codewords, self.k_secondary, self.ids)

    @classmethod
    def random(
        cls, n: int, k_primary: int, k_secondary: int = 1, seed: int = 0, ids: Vocabulary | None = None
    ) -> Codes:
        """Random clusters and cells of equal size to within one item, all equally far from each other."""
        deal = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) % (k_primary * k_secondary)
        return cls(deal % k_primary, deal // k_primary, torch.eye(k_primary), k_secondary, ids)

    @classmethod
    def from_labels(
        cls,
        labels: Tensor | np.ndarray | pl.Series | Sequence[Any],
        secondary: Tensor | np.ndarray | pl.Series | Sequence[Any] | None = None,
        vectors: Tensor | None = None,
        ids: Vocabulary | None = None,
    ) -> Codes:
        """Clusters from labels such as categories, and optionally cells, in sorted order; None is a label too.

        Codewords are the means of `vectors` (N, D); without vectors all clusters are equally far from each other.
        """
        primary, k = _numbered(labels)
        inner, k_inner = (torch.zeros_like(primary), 1) if secondary is None else _numbered(secondary)
        if vectors is None:
            return cls(primary, inner, torch.eye(k), k_inner, ids)
        total = torch.zeros(k, vectors.shape[1]).index_add_(0, primary, vectors.float())
        return cls(primary, inner, total / torch.bincount(primary, minlength=k).unsqueeze(1), k_inner, ids)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Content of a file: tensors with names prefixed by "codes.", and a JSON value."""
        tensors = {"primary": self.primary, "secondary": self.secondary, "codewords": self.codewords}
        if self.ids is not None and self.ids.kind == "int":
            tensors["ids"] = torch.from_numpy(self.ids.ids.to_numpy(writable=True))
        elif self.ids is not None:
            text = self.ids.ids
            tensors["text"] = torch.frombuffer(bytearray("".join(text).encode() or b"\0"), dtype=torch.uint8)
            tensors["length"] = torch.from_numpy(text.str.len_bytes().to_numpy().astype(np.int32))
        return {f"codes.{name}": tensor for name, tensor in tensors.items()}, {
            "codes": {"k_secondary": self.k_secondary}
        }

    def save(self, path: AnyPath) -> None:
        """Write one safetensors file, 6 bytes per item plus the ids; atomic."""
        write_tensors(path, *self.tensors())

    @classmethod
    def load(cls, path: AnyPath) -> Codes:
        """Read a file written by `save` or `sparring cluster`."""
        found, meta = read_section(path, "codes")
        ids: Vocabulary | None = None
        with one_line(
            f"{path} is corrupt", KeyError, TypeError, ValueError, RuntimeError, IndexError, then="cluster again"
        ):
            if "ids" in found:
                ids = Vocabulary(found["ids"].numpy())
            elif "length" in found:
                ends = np.cumsum(found["length"].numpy(), dtype=np.int64)
                starts, whole = ends - found["length"].numpy(), found["text"].numpy().tobytes()
                ids = Vocabulary([whole[a:b].decode() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
            return cls(found["primary"], found["secondary"], found["codewords"], int(meta["k_secondary"]), ids)


def _numbered(labels: Tensor | np.ndarray | pl.Series | Sequence[Any]) -> tuple[Tensor, int]:
    """Labels as 0..k-1 in their sorted order, null first."""
    plain = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
    series = plain if isinstance(plain, pl.Series) else pl.Series(plain, strict=False)
    if not len(series):
        raise UserError("no labels: there is nothing to cluster")
    code = series.rank("dense")
    first = 1 if series.null_count() else 0
    dense = code.fill_null(1 - first).cast(pl.Int64) - 1 + first
    return torch.from_numpy(dense.to_numpy(writable=True)), int(dense.max()) + 1  # type: ignore[arg-type]
