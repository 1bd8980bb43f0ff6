"""From buckets of rows to the columns of prepared data: each bucket sorted and merged, every row assigned to its part, and written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparring.core.errors import UserError
from sparring.data.interactions import TRAIN, VALID, Interactions
from sparring.data.pairs import chunks, occurrences, offsets, taken_and_shown
from sparring.data.prepared.encoding import Encoded, Tell
from sparring.data.prepared.format import Column
from sparring.data.splits import Rows, check_parts, rule


class Merged:
    """All pairs once, sorted by (query, item), in raw files, with where each bucket begins."""

    def __init__(self, folder: Path, encoded: Encoded) -> None:
        self.folder, self.encoded = folder, encoded
        self.files: dict[str, BinaryIO] = {}
        self.kinds: dict[str, np.dtype[Any]] = {}
        self.begin: dict[str, list[int]] = {"": [0], "shown_": [0]}

    def add(self, rows: dict[str, np.ndarray] | None, kind: str = "") -> None:
        """The rows of the next bucket."""
        for name, column in (rows or {}).items():
            if kind + name not in self.files:
                self.files[kind + name], self.kinds[kind + name] = open(self.folder / (kind + name), "wb"), column.dtype  # noqa: SIM115
            self.files[kind + name].write(np.ascontiguousarray(column).data)
        self.begin[kind].append(self.begin[kind][-1] + (0 if rows is None else len(rows["q"])))

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def column(self, name: str) -> np.ndarray | None:
        path = self.folder / name
        return np.memmap(path, self.kinds[name], "r") if name in self.kinds and path.stat().st_size else None

    @property
    def data(self) -> Interactions:
        """All of them, memory-mapped."""
        q, i = self.column("q"), self.column("i")
        assert q is not None
        assert i is not None
        shown_q, shown_i = self.column("shown_q"), self.column("shown_i")
        shown = None if shown_q is None or shown_i is None else (shown_q, shown_i)
        named = {"time": self.column("t"), "weight": self.column("w"), "split": self.column("s"), "shown": shown}
        named |= {"shown_time": self.column("shown_t"), "shown_split": self.column("shown_s")}
        return Interactions(q, i, self.encoded.query_ids, self.encoded.item_ids, **named)  # type: ignore[arg-type]

    def buckets(self, data: Interactions) -> Iterator[tuple[int, Rows]]:
        """Of each bucket how many pairs were only shown, and what a rule sees of its rows."""
        first = self.encoded.first.tolist()
        for k in range(len(first) - 1):
            rows, shown = (slice(begin[k], begin[k + 1]) for begin in self.begin.values())

            def of(column: np.ndarray | None, rows: slice = rows) -> np.ndarray | None:
                return None if column is None else np.asarray(column[rows])

            queries, items = np.asarray(data.queries[rows]) - np.int32(first[k]), np.asarray(data.items[rows])
            bare = Rows(
                queries, items, first[k + 1] - first[k], data.n_items, of(data.time), of(data.split), first=first[k]
            )
            if data.shown is not None:
                asked = np.asarray(data.shown[0][shown]) - np.int32(first[k])
                bare = replace(
                    bare, shown=asked, shown_time=of(data.shown_time, shown), shown_split=of(data.shown_split, shown)
                )
            yield shown.stop - shown.start, bare


def merge(encoded: Encoded, folder: Path, source: str, tell: Tell) -> Merged:
    """Each bucket sorted, its duplicates merged."""
    folder.mkdir()
    merged, buckets, before = Merged(folder, encoded), len(encoded.first) - 1, 0
    for k in range(buckets):
        tell("sorting", k, buckets)
        columns = encoded.bucket(k)
        before += int(columns["l"].sum()) if "l" in columns else len(columns["q"])
        taken, shown = taken_and_shown(columns, len(encoded.item_ids))
        merged.add(taken)
        merged.add(shown, "shown_")
        shutil.rmtree(encoded.folder / f"b={k}")
    merged.close()
    if not before:
        raise UserError(f"no row of {source} is labelled 1: there are no positives")
    if merged.begin[""][-1] < before:
        encoded.notes.append(f"merged {before - merged.begin[''][-1]:,} duplicates")
    return merged


def write_parts(
    merged: Merged, data: Interactions, folder: Path, how: str, valid: float, test: float, seed: int, tell: Tell
) -> dict[str, int]:
    """Every row to its part; the columns, and the offsets and counts of the training part; how many rows each part has."""
    part, keep, sizes = _assigned(merged, data, how, valid, test, seed, tell)
    check_parts(how, sizes, valid, test)
    named = {"queries": data.queries, "items": data.items, "time": data.time, "weight": data.weight, "split": part}
    for done, (name, column) in enumerate(named.items()):
        tell("writing", done, len(named))
        if column is not None:
            _write_column(folder / f"{name}.npy", column, part, sizes, merged.begin[""])
    if sizes[VALID]:
        seen = Column(folder / "seen_items.npy", data.items.dtype, sizes[TRAIN] + sizes[VALID])
        counts = np.zeros(data.n_queries, dtype=np.int64)
        for rows in chunks(len(data)):
            chosen = part[rows] <= VALID
            seen.append(data.items[rows][chosen])
            np.add.at(counts, data.queries[rows][chosen], 1)
        seen.close()
        np.save(folder / "seen_start.npy", offsets(counts))
    if data.shown is not None and keep is not None and keep.any():
        for name, values in zip(("queries", "items"), data.shown, strict=True):
            shown = Column(folder / f"shown_{name}.npy", values.dtype, int(keep.sum()))
            for rows in chunks(len(values)):
                shown.append(values[rows][keep[rows]])
            shown.close()
    queries, items = (np.load(folder / f"{name}.npy", mmap_mode="r")[: sizes[TRAIN]] for name in ("queries", "items"))
    np.save(folder / "start.npy", offsets(occurrences(queries, data.n_queries)))
    np.save(folder / "counts.npy", occurrences(items, data.n_items))
    return dict(zip(("train", "valid", "test"), sizes, strict=True))


def _assigned(
    merged: Merged, data: Interactions, how: str, valid: float, test: float, seed: int, tell: Tell
) -> tuple[np.ndarray, np.ndarray | None, list[int]]:
    """The part of each row, which shown pairs train (None where nothing was shown), both in files, and the sizes of the parts."""
    assign, sizes = rule(data, how, valid, test, seed), np.zeros(3, dtype=np.int64)
    paths = merged.folder / "parts", merged.folder / "keep"
    with open(paths[0], "wb") as parts, open(paths[1], "wb") as keeps:
        for k, (shown, rows) in enumerate(merged.buckets(data)):
            tell("splitting", k, len(merged.begin[""]) - 1)
            part, keep = assign(rows)
            sizes += np.bincount(part, minlength=3)
            parts.write(part.data)
            keeps.write(np.ones(shown, dtype=bool).data if keep is None else np.ascontiguousarray(keep).data)
    kept = np.memmap(paths[1], bool, "r") if paths[1].stat().st_size else None
    return np.memmap(paths[0], np.uint8, "r"), kept, sizes.tolist()


def _write_column(path: Path, values: np.ndarray, part: np.ndarray, sizes: list[int], begin: list[int]) -> None:
    """The values in the order of parts, and within each as they are."""
    column = Column(path, values.dtype, len(values))
    at = [0, sizes[TRAIN], sizes[TRAIN] + sizes[VALID]]
    for first, last in pairwise(begin):
        some, codes = np.asarray(values[first:last]), np.asarray(part[first:last])
        for code in range(3):
            chosen = some[codes == code]
            column.put(at[code], chosen)
            at[code] += len(chosen)
    column.close()
