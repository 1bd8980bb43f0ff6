"""TREC's files: rankings of any system (run files) and judgements (qrels), as trec_eval reads them.

run file:  QUERY Q0 DOCUMENT RANK SCORE NAME         qrels:  QUERY 0 DOCUMENT GRADE
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Vocabulary
from sparring.data.lines import read_lines


class RunFile:
    """Writes lists to a run file, under a temporary name until all are written.

    trec_eval orders by score, so the score of rank r of K is K + 1 - r: ties of the model keep their order. An id
    with a space cannot be written.

        with RunFile("run.trec", data.query_ids, data.item_ids, "bag") as file:
            evaluate(model, test, seen, k=(100,), lists_to=file)
    """

    def __init__(self, path: str | os.PathLike[str], queries: Vocabulary, items: Vocabulary, name: str) -> None:
        self.path, self.name = Path(path), "".join(name.split()) or "sparring"
        self.names = tuple(_words(ids, path) for ids in (queries, items))
        self._part = self.path.with_name(self.path.name + ".part")
        self._file: IO[str] | None = None

    def __enter__(self) -> RunFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._part, "w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        return self

    def __call__(self, queries: np.ndarray, lists: np.ndarray) -> None:
        """Add the lists (n, K) of queries (n,), in dense ids, -1 for an empty place."""
        assert self._file is not None
        k = lists.shape[1]
        rank = np.broadcast_to(np.arange(k), lists.shape)
        filled = lists >= 0
        columns = {
            "query": self.names[0].gather(np.repeat(queries, filled.sum(1))),
            "q0": pl.repeat("Q0", int(filled.sum()), eager=True),
            "item": self.names[1].gather(lists[filled]),
            "rank": rank[filled] + 1,
            "score": k - rank[filled],
        }
        table = pl.DataFrame(columns).with_columns(name=pl.lit(self.name))
        self._file.write(table.write_csv(include_header=False, separator=" ", quote_style="never"))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()
        if kind is None:
            os.replace(self._part, self.path)
        else:
            self._part.unlink(missing_ok=True)


def write_qrels(test: Interactions, path: str | os.PathLike[str]) -> None:
    """Write test pairs as judgements; a pair without a grade has 1. Grades are rounded, since TREC's are integers."""
    queries, items = (_words(ids, path) for ids in (test.query_ids, test.item_ids))
    grade = np.ones(len(test)) if test.grade is None else np.rint(test.grade)
    table = pl.DataFrame({"query": queries.gather(test.queries), "item": items.gather(test.items)})
    table = table.select("query", zero=pl.lit(0), item="item", grade=pl.Series(grade.astype(np.int64)))
    text = table.write_csv(include_header=False, separator=" ", quote_style="never")
    files.write(Path(path), lambda file: file.write_text(text, encoding="utf-8"))


def read_run(
    path: str | os.PathLike[str], test: Interactions, k: int, note: Callable[[str], None] = lambda line: None
) -> np.ndarray:
    """The lists (U, k) of a run file for the queries of a test part, as `evaluate_lists` takes them.

    They are ordered by score, as trec_eval orders them: equal scores by document id, descending; the column RANK is not
    read. A query that the file lacks has an empty list. `note` gets a line about ids that the data lacks.
    """
    file = Path(path)
    lines, _ = read_lines(file)
    lines = lines.str.strip_chars()
    names = ("query", "item", "score")
    form = r"^(\S+)\s+\S+\s+(\S+)\s+\S+\s+(\S+)(?:\s+\S+)?$"
    table = lines.str.extract_groups(form).struct.rename_fields(names).struct.unnest()
    table = table.with_columns(pl.col("score").cast(pl.Float64, strict=False), line=pl.int_range(1, len(lines) + 1))
    wrong = table.filter(pl.col("score").is_null() & (lines != ""))
    if len(wrong):
        at = int(wrong["line"][0])
        raise UserError(
            f"{file} line {at:,} is {lines[at - 1][:60]!r}; expected: QUERY Q0 DOCUMENT RANK SCORE NAME, "
            "separated by spaces"
        )
    table = table.drop_nulls("score")
    if table.select("query", "item").is_duplicated().any():
        twice = table.filter(table.select("query", "item").is_duplicated()).row(0)
        raise UserError(f"{file} lists the document {twice[1]!r} twice for the query {twice[0]!r}")
    table = table.sort("query", "score", "item", descending=[False, True, True])
    queries, items = test.query_ids.encode(table["query"]), test.item_ids.encode(table["item"])
    tested = np.unique(test.queries)
    for ids, what in ((queries, "queries"), (items, "documents")):
        if (ids < 0).any():
            note(f"{file.name} has {int((ids < 0).sum()):,} lines of {what} that the data lacks")
    place = np.searchsorted(tested, queries)
    kept = np.flatnonzero((queries >= 0) & (tested[np.minimum(place, len(tested) - 1)] == queries))
    if not len(kept):
        raise UserError(f"{file} has no list for any test query: its ids must be those of the data")
    place, items = place[kept], items[kept]  # an unknown document keeps its rank: it is a miss
    order = np.argsort(place, kind="stable")
    place, items = place[order], items[order]
    first = np.searchsorted(place, np.arange(len(tested)))
    rank = np.arange(len(place)) - first[place]
    lists = np.full((len(tested), k), -1, dtype=np.int64)
    lists[place[rank < k], rank[rank < k]] = items[rank < k]
    return lists


def _words(ids: Vocabulary, path: str | os.PathLike[str]) -> pl.Series:
    """Ids as text; one with a space is an error."""
    words = ids.ids.cast(pl.String)
    spaced = words.filter(words.str.contains(r"\s") | (words == ""))
    if len(spaced):
        raise UserError(f"cannot write {path}: the id {spaced[0]!r} holds a space, which TREC's files cannot")
    return words
