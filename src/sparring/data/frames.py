"""From any polars frame to Interactions: columns found, rows cleaned, ids encoded, duplicates merged.

The frame is scanned a few times in polars' streaming engine, and only the dense columns are ever held: 4 + 4 bytes a row,
8 more for a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import polars as pl

from sparring.data.columns import find_column, find_columns, with_title
from sparring.data.interactions import Interactions, Vocabulary, first_line, is_canonical, pair_keys, unpack_keys
from sparring.errors import UserError

_PARTS = {"train": 0, "training": 0, "0": 0, "valid": 1, "val": 1, "validation": 1, "dev": 1, "1": 1, "test": 2, "testing": 2, "2": 2}
_CLICKS = {"1": 1, "true": 1, "0": 0, "false": 0}
_SHORT = {"query": "q", "item": "i", "time": "t", "weight": "w", "rating": "r", "split": "s", "label": "l"}


def from_frame(
    frame: pl.DataFrame | pl.LazyFrame,
    *,
    query: str | None = None,
    item: str | None = None,
    time: str | None = None,
    weight: str | None = None,
    rating: str | None = None,
    min_rating: float | None = None,
    split: str | None = None,
    label: str | None = None,
    items: pl.DataFrame | None = None,
    queries: pl.DataFrame | None = None,
    catalogue: bool = False,
    source: str = "the table",
    text: bool = False,
) -> Interactions:
    """Interactions of a polars frame; the arguments are those of `read`.

    `source` names the table in errors. `text` says that every column came as text (a CSV file): ids that all spell integers
    become integers, and times and numbers are parsed.

        from_frame(pl.DataFrame({"user": ["a", "b"], "item": [1, 2]}))
    """
    lazy = frame.lazy()
    with reading(source):
        schema = lazy.collect_schema()
        named = {"query": query, "item": item, "time": time, "weight": weight, "rating": rating, "split": split, "label": label}
        found = find_columns(schema.names(), named, source, rated=min_rating is not None)
        lazy = lazy.select(pl.col(column).alias(_SHORT[role]) for role, column in found.items())
        lazy, notes = _clean(lazy, found, min_rating, source, guessed_time=time is None)
        query_ids, lazy = _encode(lazy, "q", found["query"], text, None, source)
        extra = None if items is None or not catalogue else items[_table_key(items, "item", found["item"], source)]
        item_ids, lazy = _encode(lazy, "i", found["item"], text, extra, source)
        if len(query_ids) < 2:
            raise UserError(f"{source} has only one query ({query_ids.ids[0]!r}); training needs at least two")
        if len(item_ids) < 2:
            raise UserError(f"{source} has only one item ({item_ids.ids[0]!r}); training needs at least two")
        rows = lazy.collect(engine="streaming")
    columns = _columns(rows)
    del rows
    data = _assemble(columns, query_ids, item_ids, notes, source)
    tables: dict[str, pl.DataFrame | None] = {"query": None, "item": None}
    for role, table, ids in (("query", queries, query_ids), ("item", items, item_ids)):
        if table is not None:
            tables[role] = _align(table, role, found[role], ids, source, notes)
    return Interactions(**data, item_table=tables["item"], query_table=tables["query"], notes=tuple(notes))


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn what polars or the system says about a bad file into one line that names it."""
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise UserError(f"{source} is empty") from error
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"cannot read {source}: {first_line(error)}") from error


def _clean(
    lazy: pl.LazyFrame, found: dict[str, str], min_rating: float | None, source: str, guessed_time: bool
) -> tuple[pl.LazyFrame, list[str]]:
    """Typed columns, rows without ids, times or a sufficient rating dropped, and a note for each kind of dropped row."""
    schema = lazy.collect_schema()
    for name in ("q", "i"):
        if schema[name].is_nested():
            raise UserError(f"column {found['query' if name == 'q' else 'item']!r} of {source} holds {schema[name]}, not ids")
    lazy = lazy.with_columns(pl.col(name).fill_nan(None) for name in ("q", "i") if schema[name].is_float())
    if "time" in found:
        lazy = _typed_time(lazy, found["time"], source)
    for role in ("weight", "rating"):
        if role in found:
            lazy = _typed_number(lazy, _SHORT[role], found[role], source)
    for role, codes in (("split", _PARTS), ("label", _CLICKS)):
        if role in found:
            lazy = _typed_codes(lazy, role, found[role], codes, source)
    no_id = pl.col("q").is_null() | pl.col("i").is_null()
    low = pl.col("r").is_null() | (pl.col("r") < min_rating) if min_rating is not None else pl.lit(False)
    timed = "time" in found
    no_time = pl.col("t").is_null() if timed else pl.lit(False)
    keep = ~no_id & ~low
    n, without_id, below, untimed, left, unweighted = (
        lazy.select(
            pl.len().alias("n"),
            no_id.sum().alias("without_id"),
            (~no_id & low).sum().alias("below"),
            (keep & no_time).sum().alias("untimed"),
            keep.sum().alias("left"),
            (keep & pl.col("w").is_null()).sum().alias("unweighted") if "weight" in found else pl.lit(0).alias("unweighted"),
        )
        .collect(engine="streaming")
        .row(0)
    )
    if not n:
        raise UserError(f"{source} is empty: it has no rows")
    if without_id == n:
        raise UserError(f"all {n:,} rows of {source} have a null in {found['query']!r} or {found['item']!r}")
    if not left:
        raise UserError(f"no row of {source} has a {found['rating']!r} of at least {min_rating}")
    notes = []
    if without_id:
        notes.append(f"dropped {without_id:,} rows with null ids")
    if below:
        notes.append(f"dropped {below:,} rows with {found['rating']} below {min_rating:g}")
    if untimed == left and guessed_time:
        notes.append(f"ignored the column {found['time']}: it holds nulls only")
        lazy, timed, untimed = lazy.drop("t"), False, 0
    elif untimed == left:
        raise UserError(f"the time column {found['time']!r} of {source} holds nulls only")
    if untimed:
        notes.append(f"dropped {untimed:,} rows with a null {found['time']}")
    if unweighted:
        notes.append(f"counted {unweighted:,} rows with a null {found['weight']} as weight 1")
    lazy = lazy.filter(keep & ~no_time if timed else keep)
    return lazy.drop("r", strict=False), notes


def _typed_time(lazy: pl.LazyFrame, column: str, source: str) -> pl.LazyFrame:
    kind = lazy.collect_schema()["t"]
    time = pl.col("t")
    if kind.is_integer():
        return lazy.with_columns(time.cast(pl.Int64))
    if kind.is_float():
        return lazy.with_columns(time.cast(pl.Float64).fill_nan(None))
    if isinstance(kind, (pl.Date, pl.Datetime)):
        return lazy.with_columns(time.dt.timestamp("us"))
    if kind == pl.Null:
        return lazy.with_columns(time.cast(pl.Int64))
    if kind != pl.String:
        raise UserError(f"the time column {column!r} of {source} holds {kind}; expected numbers or dates")
    moment = time.str.to_datetime(strict=False, time_unit="us", time_zone="UTC").dt.timestamp("us")
    readings = [time.cast(pl.Int64, strict=False), time.cast(pl.Float64, strict=False), moment]
    wrong = lazy.select((time.is_not_null() & each.is_null()).sum().alias(str(n)) for n, each in enumerate(readings))
    failures = wrong.collect(engine="streaming").row(0)
    if min(failures):
        best = readings[int(np.argmin(failures))]
        value = lazy.filter(time.is_not_null() & best.is_null()).select("t").head(1).collect().item()
        raise UserError(f"the time column {column!r} of {source} holds {value!r}, neither a number nor a date")
    return lazy.with_columns(readings[failures.index(0)])


def _typed_number(lazy: pl.LazyFrame, name: str, column: str, source: str) -> pl.LazyFrame:
    kind = lazy.collect_schema()[name]
    number = pl.col(name).cast(pl.Float64, strict=False).fill_nan(None)
    if not kind.is_numeric():
        wrong = lazy.filter(pl.col(name).is_not_null() & pl.col(name).cast(pl.Float64, strict=False).is_null())
        value = wrong.select(name).head(1).collect(engine="streaming")
        if len(value):
            raise UserError(f"column {column!r} of {source} holds {value.item()!r}, not a number")
    if name == "w":
        wrong = lazy.filter((number < 0) | number.is_infinite()).select(number).head(1)
        value = wrong.collect(engine="streaming")
        if len(value):
            raise UserError(f"the weight column {column!r} of {source} holds {value.item():g}; weights must be finite and not negative")
    return lazy.with_columns(number)


def _typed_codes(lazy: pl.LazyFrame, role: str, column: str, codes: dict[str, int], source: str) -> pl.LazyFrame:
    name = _SHORT[role]
    plain = pl.col(name).cast(pl.String).str.strip_chars().str.to_lowercase().str.replace(r"\.0$", "")
    lazy = lazy.with_columns(plain)
    values = lazy.select(name).unique().collect(engine="streaming")[name]
    unknown = values.filter(values.is_null() | ~values.is_in(list(codes))).sort().to_list()
    if unknown:
        shown = ", ".join("null" if value is None else repr(value) for value in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        expected = "train, valid, test or 0, 1, 2" if role == "split" else "1 (clicked) and 0 (shown, not clicked)"
        raise UserError(f'the {role} column {column!r} of {source} holds {shown}; expected {expected}, or pass {role}="" to leave it out')
    return lazy.with_columns(pl.col(name).replace_strict(codes, return_dtype=pl.UInt8))


def _encode(
    lazy: pl.LazyFrame, name: str, column: str, text: bool, extra: pl.Series | None, source: str
) -> tuple[Vocabulary, pl.LazyFrame]:
    """The vocabulary of an id column, and the frame with the column replaced by dense int32 ids."""
    kind = lazy.collect_schema()[name]
    if not (kind.is_integer() or kind.is_float() or kind == pl.String):
        lazy = lazy.with_columns(pl.col(name).cast(pl.String))
    known = lazy.select(name).unique().collect(engine="streaming")[name]
    if text and bool(known.str.contains(r"^(0|-?[1-9][0-9]{0,17})$").all()):
        known = known.cast(pl.Int64)
    vocabulary = Vocabulary(known)
    if extra is not None:
        more = extra.drop_nulls().cast(pl.String).cast(vocabulary.ids.dtype, strict=False)
        if more.null_count():
            wrong = extra.drop_nulls().filter(more.is_null())[0]
            raise UserError(f"the items table has the id {wrong!r}, but {column!r} of {source} holds integers")
        vocabulary = Vocabulary(pl.concat([vocabulary.ids, more.alias("id")]))
    if len(vocabulary) >= 2**31:
        raise UserError(f"column {column!r} of {source} has {len(vocabulary):,} ids; at most 2,147,483,647 fit")
    dense = pl.DataFrame({name: vocabulary.ids, "dense": np.arange(len(vocabulary), dtype=np.int32)}).lazy()
    # The order of rows does not matter: pairs are sorted afterwards.
    lazy = lazy.with_columns(pl.col(name).cast(vocabulary.ids.dtype)).join(dense, on=name)
    return vocabulary, lazy.drop(name).rename({"dense": name})


def _columns(rows: pl.DataFrame) -> dict[str, np.ndarray]:
    if "w" in rows.columns:
        rows = rows.with_columns(pl.col("w").fill_null(1.0))
    # One column at a time leaves the frame, so that both forms of only one are held.
    return {name: rows.drop_in_place(name).to_numpy(writable=True) for name in rows.columns}


def _assemble(columns: dict[str, np.ndarray], query_ids: Vocabulary, item_ids: Vocabulary, notes: list[str], source: str) -> dict:
    """Fields of Interactions: clicked and shown rows apart, each pair once."""
    shown: dict[str, np.ndarray] = {}
    clicked = columns.pop("l", None)
    if clicked is not None:
        if not clicked.any():
            raise UserError(f"no row of {source} is labelled 1: there are no positives")
        shown = {name: column[clicked == 0] for name, column in columns.items() if name != "w"}
        columns = {name: column[clicked == 1] for name, column in columns.items()}
    n_items, before = len(item_ids), len(columns["q"])
    merged = merge_pairs(columns, n_items)
    if len(merged["q"]) < before:
        notes.append(f"merged {before - len(merged['q']):,} duplicates")
    fields: dict = {"queries": merged["q"], "items": merged["i"], "query_ids": query_ids, "item_ids": item_ids}
    fields |= {"time": merged.get("t"), "weight": merged.get("w"), "split": merged.get("s")}
    if shown and len(shown["q"]):
        shown = merge_pairs(shown, n_items)
        fresh = ~np.isin(pair_keys(shown["q"], shown["i"], n_items), pair_keys(merged["q"], merged["i"], n_items))
        shown = {name: column[fresh] for name, column in shown.items()}
        fields |= {"shown": (shown["q"], shown["i"]), "shown_time": shown.get("t"), "shown_split": shown.get("s")}
    return fields


def merge_pairs(columns: dict[str, np.ndarray], n_items: int) -> dict[str, np.ndarray]:
    """One row per (q, i), sorted: the last time `t`, the summed weight `w`, the first part `s`. Takes the arrays over.

    A pair that a file has in both train and test counts as train: a seen item is masked, so it could never be found.
    """
    queries, items = columns.pop("q"), columns.pop("i")
    if is_canonical(queries, items):
        merged = dict(columns)
    else:
        key = pair_keys(queries, items, n_items)
        del queries, items
        order = None
        if columns:
            order = np.argsort(key)
            key = key[order]
        else:
            key.sort()
        first = np.ones(len(key), dtype=bool)
        np.not_equal(key[1:], key[:-1], out=first[1:])
        start = None if first.all() else np.flatnonzero(first)
        merged = {}
        for name in list(columns):
            column = columns.pop(name)[order]
            merged[name] = column if start is None else _REDUCE[name](column, start)
        del order
        queries, items = unpack_keys(key if start is None else key[start], n_items)
    if "w" in merged:
        merged["w"] = merged["w"].astype(np.float32)
    return {"q": queries, "i": items, **merged}


_REDUCE = {"t": np.maximum.reduceat, "w": np.add.reduceat, "s": np.minimum.reduceat}


def _table_key(table: pl.DataFrame, role: str, name: str, source: str) -> str:
    """The id column of an items or queries table: the interactions' own name for it, else the best guess."""
    if name in table.columns:
        return name
    found = find_column(role, table.columns, None, f"the {role} table of {source}", required=True)
    assert found is not None
    return found


def _align(table: pl.DataFrame, role: str, name: str, ids: Vocabulary, source: str, notes: list[str]) -> pl.DataFrame:
    """The table with one row per dense id, null where it says nothing; the id column goes, because `ids` has it."""
    key = _table_key(table, role, name, source)
    dense = ids.encode(table[key])
    known, first = np.unique(dense, return_index=True)
    first = first[known >= 0]
    known = known[known >= 0]
    if not len(known):
        example = table[key].drop_nulls().head(1).to_list()
        raise UserError(f"no id of the {role} table's column {key!r} (such as {example}) occurs in {source}")
    rows = np.full(len(ids), -1, dtype=np.int64)
    rows[known] = first
    if len(known) < len(ids):
        notes.append(f"{len(ids) - len(known):,} of {len(ids):,} {'items' if role == 'item' else 'queries'} are not in the {role} table")
    at = pl.Series(rows).replace(-1, None)
    aligned = table.drop(key).select(pl.all().gather(at)) if table.width > 1 else pl.DataFrame({key: ids.ids})
    return with_title(aligned)
