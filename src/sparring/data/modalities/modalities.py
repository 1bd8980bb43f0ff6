"""Modalities: named vectors of items (image, text, behaviour), read in blocks, some of them missing."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError

_BLOCK = 8192  # rows read at once in a full pass
_MAPPED = 64 << 20  # bytes of each memory map that may stay mapped into the process
_FAULT = 2 << 20  # bytes that the system may map for one touched row: a large page of its cache


@dataclass(eq=False)
class Modality:
    """One kind of vector of N items: `vectors` of any number type, in memory or memory maps, never read entirely.

    Item i is row `item_rows[i]` of the concatenated vectors, and lacks the modality where that is -1. It also lacks it
    where its row is all zero or holds a value that is not finite: files mark missing vectors this way.

        Modality("image", (np.load("images.npy", mmap_mode="r"),)).rows(slice(0, 100))  -> (100, width) float32
    """

    name: str
    vectors: tuple[np.ndarray, ...]  # each (rows, width)
    item_rows: np.ndarray | None = None  # (N,) int64; None: item i is row i
    present: np.ndarray = field(init=False)  # (N,) bool

    def __post_init__(self) -> None:
        for part in self.vectors:
            if part.ndim != 2 or part.dtype.kind not in "fiub":
                given = f"{part.dtype} of {part.shape}"
                raise UserError(f"modality {self.name!r} must be a table of numbers, one row per item, not {given}")
        widths = {part.shape[1] for part in self.vectors}
        if len(widths) != 1 or 0 in widths:
            given = " and ".join(map(str, sorted(widths))) if widths - {0} else "no"
            raise UserError(f"modality {self.name!r} has vectors of {given} numbers; give one width for all")
        self._ends = np.cumsum([len(part) for part in self.vectors])
        self.present = np.ones(len(self), dtype=bool) if self.item_rows is None else self.item_rows >= 0
        for start in range(0, len(self), _BLOCK):
            index = np.arange(start, min(start + _BLOCK, len(self)))
            size = self._gather(index).abs().sum(1).numpy()
            self.present[index] &= np.isfinite(size) & (size > 0)
            self.unmap()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.item_rows is None else len(self.item_rows)

    @property
    def width(self) -> int:
        return int(self.vectors[0].shape[1])

    def rows(self, index: np.ndarray | slice) -> Tensor:
        """(n, width) float32 vectors of the items in an index; zero where missing."""
        index = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        rows = self._gather(index)
        missing = np.flatnonzero(~self.present[index])
        if len(missing):
            rows[torch.from_numpy(missing)] = 0.0
        return rows

    def unmap(self) -> None:
        """Release the pages of memory maps: they stay cached, but no longer count as this process's memory."""
        for array in self.vectors:
            base: object = array
            while isinstance(base, np.ndarray):
                base = base.base
            if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
                base.madvise(mmap.MADV_DONTNEED)

    def _gather(self, index: np.ndarray) -> Tensor:
        """The raw rows of an index; an arbitrary row for an item that has none."""
        rows_of = index if self.item_rows is None else self.item_rows[index]
        if len(self.vectors) == 1:
            rows = _take_rows(self.vectors[0], rows_of)
        else:
            rows = torch.zeros(len(rows_of), self.width)
            part = np.searchsorted(self._ends, rows_of, side="right")
            for number in np.unique(part):
                here = np.flatnonzero(part == number)
                start = self._ends[number] - len(self.vectors[number])
                rows[torch.from_numpy(here)] = _take_rows(self.vectors[number], rows_of[here] - start)
        return rows


class Modalities:
    """Modalities of the same N items, in dense item order, by name.

    modalities = Modalities.from_arrays({"image": images, "text": texts})
    len(modalities), modalities.names, modalities.widths, modalities.present["image"]
    modalities.rows(np.array([3, 1]))["image"]  -> (2, width) float32, zero where missing
    for index, rows in modalities.blocks(): ...     # all items, a block at a time
    """

    def __init__(self, modalities: Sequence[Modality], notes: Sequence[str] = ()) -> None:
        if not modalities:
            raise UserError("there is no modality: name at least one, such as --modality text=text:title")
        first = modalities[0]
        for modality in modalities:
            if len(modality) != len(first):
                raise UserError(
                    f"modality {modality.name!r} has {len(modality):,} rows, {first.name!r} has {len(first):,}"
                )
        if len({modality.name for modality in modalities}) < len(modalities):
            raise UserError(
                f"modalities {', '.join(modality.name for modality in modalities)}: each name may be given once"
            )
        self.modalities = {modality.name: modality for modality in modalities}
        self._touched = 0  # an upper bound on the bytes mapped since the last release
        self.notes = tuple(notes)  # a line for each modality: its origin, and the items that lack it

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Modalities:
        """Modalities of arrays or memory maps (N, width) in dense item order; rows of zeros or with NaN are missing."""
        return cls([Modality(name, (array,)) for name, array in arrays.items()])

    def __len__(self) -> int:
        return len(next(iter(self.modalities.values())))

    def __repr__(self) -> str:
        return f"Modalities({len(self):,} items: {', '.join(f'{name} {width}' for name, width in self.widths.items())})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.modalities)

    @property
    def widths(self) -> dict[str, int]:
        return {name: modality.width for name, modality in self.modalities.items()}

    @property
    def present(self) -> dict[str, np.ndarray]:
        """For each modality, which of the N items have it."""
        return {name: modality.present for name, modality in self.modalities.items()}

    def rows(self, index: np.ndarray | slice) -> dict[str, Tensor]:
        """For each modality, the (n, width) float32 vectors of the items in an index; zero where missing.

        From a memory map, consecutive items are read many times faster than scattered ones.
        """
        rows = {name: modality.rows(index) for name, modality in self.modalities.items()}
        jumps = 1 if isinstance(index, slice) else np.count_nonzero(np.diff(index) != 1) + 1
        self._touched += int(jumps) * _FAULT + max(block.numel() for block in rows.values()) * 4
        if self._touched > _MAPPED:
            self._unmap()
        return rows

    def blocks(self, size: int = _BLOCK) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """(items, their rows) over all items in order, at most `size` at a time."""
        for start in range(0, len(self), size):
            index = slice(start, min(start + size, len(self)))
            yield index, {name: modality.rows(index) for name, modality in self.modalities.items()}
            self._unmap()

    def only(self, names: Sequence[str]) -> Modalities:
        """Some of the modalities, in the given order, for an ablation."""
        for name in names:
            if name not in self.modalities:
                raise UserError(f"there is no modality {name!r}; there are {', '.join(self.names)}")
        return Modalities([self.modalities[name] for name in names], self.notes)

    def _unmap(self) -> None:
        self._touched = 0
        for modality in self.modalities.values():
            modality.unmap()


def _take_rows(array: np.ndarray, index: np.ndarray) -> Tensor:
    """A float32 copy of rows; index -1 gives an arbitrary row, which `present` masks."""
    n = len(index)
    consecutive = n > 1 and 0 <= index[0] == index[-1] - (n - 1) and bool((np.diff(index) == 1).all())
    rows = np.array(array[index[0] : index[-1] + 1]) if consecutive else np.asarray(array[index])
    if rows.dtype == np.float16:
        return torch.from_numpy(rows).float()  # several times faster than numpy's conversion
    with np.errstate(over="ignore"):
        return torch.from_numpy(rows.astype(np.float32, copy=False))
