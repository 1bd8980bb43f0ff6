"""Retrieval data sets in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/*.tsv; or as Parquet, as NanoBEIR is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError, one_line
from sparring.data.interactions import Interactions
from sparring.data.lines import find_file, read_json_lines, read_lines
from sparring.data.pairs import pair_keys
from sparring.data.table import from_frame

_PARTS = {"train": "train", "dev": "valid", "valid": "valid", "test": "test"}


def is_beir(folder: Path) -> bool:
    """Whether a folder holds a data set in BEIR's layout."""
    names = ("corpus", "queries")
    return all(find_file(folder, f"{name}.jsonl") or _parquet(folder / name) for name in names)


def _parquet(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) if folder.is_dir() else []


def read_beir(folder: str | os.PathLike[str]) -> Interactions:
    """The data set of a folder: queries and documents with their texts, and the pairs judged relevant (score above 0).

    `corpus.jsonl` has `_id`, `text` and perhaps `title` (text towers read both), `queries.jsonl` has `_id` and `text`,
    and `qrels/train.tsv`, `dev.tsv` and `test.tsv` have a header, then query, document and score, separated by tabs or
    spaces. In NanoBEIR's layout `corpus`, `queries` and `qrels` are folders of Parquet files, the last with the columns
    query-id, corpus-id and perhaps score. The files are the split if there is a train.tsv; otherwise the pairs have
    none. All documents can be recommended. Grades other than 1 are kept in `grade`, which ndcg reads; training treats
    all pairs alike. Queries without a relevant document are dropped, and repeated lines are read once; notes report the
    number of each.

        data = read_beir("scifact")
    """
    folder = Path(folder)
    notes: list[str] = []
    corpus = _texts(folder, "corpus.jsonl", notes)
    queries = _texts(folder, "queries.jsonl", notes)
    files = {name: file for name in _PARTS if (file := find_file(folder / "qrels", f"{name}.tsv"))}
    tables = _parquet(folder / "qrels")
    if not files and not tables:
        raise UserError(f"{folder / 'qrels'} holds none of {', '.join(f'{name}.tsv' for name in _PARTS)}, nor Parquet")
    parts = [_judgements(file).with_columns(split=pl.lit(_PARTS[name])) for name, file in files.items()]
    judged = pl.concat(parts) if files else _nano_judgements(tables)
    for column, table in (("query", queries), ("item", corpus)):
        known = judged[column].is_in(table["_id"].implode())
        if not known.all():
            missing = judged.filter(~known)
            notes.append(
                f"dropped {len(missing):,} judgements of unknown ids, such as the {column} {missing[column][0]!r}"
            )
            judged = judged.filter(known)
    right = judged.filter(pl.col("score") > 0)
    if right.is_empty():
        raise UserError(f"{folder} has no query with a relevant document: no score in qrels is above 0")
    notes += _left_out(corpus, queries, right)
    if "train" not in files:
        notes.append("qrels has no train.tsv: the pairs have no split")
        right = right.drop("split")
    named = {name: table.rename({"_id": name}) for name, table in (("query", queries), ("item", corpus))}
    pairs, source = right.drop("score"), str(folder)
    data = from_frame(
        pairs,
        query="query",
        item="item",
        queries=named["query"],
        items=named["item"],
        catalogue=True,
        source=source,
        text=True,
    )
    return replace(data, notes=(*notes, *data.notes), grade=_grades(data, right))


def _grades(data: Interactions, right: pl.DataFrame) -> np.ndarray | None:
    """The grade of each pair, the highest where a pair is judged more than once; None if all are 1."""
    if (right["score"] == 1).all():
        return None
    highest = right.group_by("query", "item").agg(pl.col("score").max())
    keys = pair_keys(data.query_ids.encode(highest["query"]), data.item_ids.encode(highest["item"]), data.n_items)
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], pair_keys(data.queries, data.items, data.n_items))
    grades: np.ndarray = highest["score"].to_numpy()[order][place].astype(np.float32)
    return grades


def _texts(folder: Path, name: str, notes: list[str]) -> pl.DataFrame:
    file = find_file(folder, name)
    columns: dict[str, pl.DataType | type[pl.DataType]] = {"_id": pl.String, "title": pl.String, "text": pl.String}
    if file is None:
        file = folder / name.removesuffix(".jsonl")
        table = _read_parquet(_parquet(file), ("_id", "text"))
        missing = [pl.lit(None, pl.String).alias(column) for column in columns if column not in table.columns]
        table = table.with_columns(missing).select(pl.col(column).cast(pl.String) for column in columns)
    else:
        table, note = read_json_lines(file, columns, "_id")
        notes += [note] if note else []
    table, before = table.unique(maintain_order=True), len(table)
    if len(table) < before:
        notes.append(f"dropped {before - len(table):,} repeated lines of {file.name}")
    if table["_id"].n_unique() < len(table):
        twice = table["_id"].filter(table["_id"].is_duplicated())[0]
        raise UserError(f"{file} has the _id {twice!r} more than once, with different texts")
    table = table.with_columns(pl.col("title", "text").str.strip_chars().replace("", None))
    return table if table["title"].null_count() < len(table) else table.drop("title")


def _read_parquet(files: list[Path], needed: tuple[str, ...]) -> pl.DataFrame:
    with one_line(f"cannot read {files[0].parent}", OSError, pl.exceptions.PolarsError):
        table = pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed")
    for name in needed:
        if name not in table.columns:
            raise UserError(f"{files[0].parent} has no column {name!r}; it has {', '.join(table.columns)}")
    return table


def _nano_judgements(files: list[Path]) -> pl.DataFrame:
    """Columns query, item, score and split of qrels in Parquet; without a score every pair is relevant."""
    table = _read_parquet(files, ("query-id", "corpus-id"))
    score = pl.col("score").cast(pl.Float64) if "score" in table.columns else pl.lit(1.0)
    names = {"query": pl.col("query-id").cast(pl.String), "item": pl.col("corpus-id").cast(pl.String)}
    return table.select(**names, score=score, split=pl.lit("test"))


def _left_out(corpus: pl.DataFrame, queries: pl.DataFrame, right: pl.DataFrame) -> list[str]:
    """Notes on grades, on queries without a relevant document, and on documents without text."""
    notes = []
    graded = right["score"].filter(right["score"] != 1).to_numpy()
    if len(graded):
        notes.append(f"{len(graded):,} judgements have grades other than 1 (up to {graded.max():g}): ndcg counts them")
    idle = len(queries) - right["query"].n_unique()
    if idle:
        notes.append(f"dropped {idle:,} queries without a relevant document")
    texts = [name for name in ("title", "text") if name in corpus.columns]
    empty = corpus.select(pl.all_horizontal(pl.col(texts).is_null()).sum()).item()
    if empty:
        notes.append(f"{empty:,} documents have no text: a text tower gives them all the same vector")
    return notes


def _judgements(file: Path) -> pl.DataFrame:
    """Columns query, item, score of a qrels file, also in TREC's form: a 0 in the second column, and no header.

    A line with tabs is split at tabs, so that an id may hold spaces.
    """
    lines, _ = read_lines(file)
    names = ("query", "item", "score")
    forms = {True: r"^([^\t]+)\t(?:0\t)?([^\t]+)\t\s*(\S+)$", False: r"^(\S+)\s+(?:0\s+)?(\S+)\s+(\S+)$"}
    split = {
        tabs: lines.str.strip_chars().str.extract_groups(form).struct.rename_fields(names)
        for tabs, form in forms.items()
    }
    table = split[False].zip_with(~lines.str.contains("\t", literal=True), split[True]).struct.unnest()
    table = table.with_columns(pl.col("score").cast(pl.Float64, strict=False))
    wrong = (table["score"].is_null() & (lines.str.strip_chars() != "")).arg_true()
    wrong = wrong.filter(wrong > 0)  # the first line is a header
    if len(wrong):
        line = f"{file} line {int(wrong[0]) + 1:,} is {lines[int(wrong[0])][:60]!r}"
        raise UserError(f"{line}; expected a query, a document and a score")
    return table.drop_nulls()
