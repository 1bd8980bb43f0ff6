"""`sparring prepare`: interactions of any size into a folder of memory-mapped columns, in bounded memory.

An engine numbers the ids and leaves the rows in buckets of complete queries. The rest is the same for every engine:
each bucket is sorted by (query, item), its duplicates are merged or kept, its rows are assigned to parts by the rules
of `split`, and the columns are written (format.py). The parts are those of `split` in memory, row for row.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import polars as pl

from sparring.core.errors import UserError, disk_full
from sparring.core.locks import writing
from sparring.data.columns import Columns, either, is_order, keeps_repeats
from sparring.data.formats.beir import is_beir
from sparring.data.formats.xc import is_xc
from sparring.data.interactions import Ids
from sparring.data.opening import open_table
from sparring.data.prepared.format import Prepared, is_prepared, read_prepared, write_description
from sparring.data.prepared.row_buckets import StageProgress, merge, write_parts
from sparring.data.remote import place_of
from sparring.data.splits import check_split
from sparring.data.table import align_table, id_notes, unchanged

Engine = Literal["polars", "spark"]


def prepare(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    items: str | os.PathLike[str] | None = None,
    queries: str | os.PathLike[str] | None = None,
    users: str | os.PathLike[str] | None = None,
    catalogue: bool = False,
    how: str = "auto",
    valid: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    engine: Engine = "polars",
    overwrite: bool = False,
    progress: StageProgress | None = None,
    **columns: Unpack[Columns],
) -> Prepared:
    """Interactions of a file, a folder of Parquet parts or a glob, split, as a folder that training reads from disk.

    Columns are found and rows cleaned as in `read`, with the same arguments; `how`, `valid`, `test` and `seed` are
    those of `split`, and give the same parts. An address is copied first (remote.py). The engine "spark" reads Parquet
    on a cluster (the active session, or a local one) and writes identical files. `out` appears complete at the end:
    work happens in a folder beside it, which is deleted after an error.

        prepare("parts/", "prepared", how="leave-last-out");   fit(run, split(read("prepared")), "runs/a")
    """
    path, out, report = place_of(path), Path(out), progress or (lambda stage, done, total: None)
    if engine not in ("polars", "spark"):
        raise UserError(f"no engine called {engine!r}; choose from polars, spark")
    repeats = keeps_repeats(columns)
    _check_out(out, overwrite)
    if isinstance(path, Path) and path.is_dir() and (is_prepared(path) or is_xc(path) or is_beir(path)):
        raise UserError(f"{path} needs no preparation: train on it directly")
    queries = either("queries", queries, users)
    table = replace(open_table(path, columns, items, queries, inline=engine == "polars"), catalogue=catalogue)
    roles = table.roles()
    table.more_items(roles["item"])  # refused before a long read if there is no items table
    order = is_order(roles, columns)
    check_split(how, valid, test, "time" in roles, "split" in roles, order)  # before a long read
    with writing(out), _work_folder(out) as folder:
        if engine == "spark":
            from sparring.data.prepared.spark_engine import fill_buckets
        else:
            from sparring.data.prepared.polars_engine import fill_buckets
        with unchanged(table.opened):
            buckets = fill_buckets(table, folder / "buckets", report, lambda n: _check_space(folder, n, roles, repeats))
        merged = merge(buckets, folder / "merged", table, report)
        shutil.rmtree(folder / "buckets")
        data = merged.data
        how = how if how != "auto" else "random" if data.split is None else "file"
        check_split(how, valid, test, data.time is not None, data.split is not None, order)
        sizes = write_parts(merged, data, folder, how, valid, test, seed, report)
        del data, merged
        shutil.rmtree(folder / "merged")
        report("ids and checksums", 0, None)
        ids = {"query": buckets.query_ids, "item": buckets.item_ids}
        buckets.notes.extend(id_notes(buckets.query_ids, buckets.item_ids))
        described: dict[str, pl.DataFrame | None] = {"query": buckets.queries, "item": buckets.items}
        for role, given in described.items():
            if given is not None:
                name = buckets.roles[role]
                described[role] = align_table(given, role, name, ids[role], table.source, buckets.notes)
        Ids(ids["query"], ids["item"], described["query"], described["item"]).save(folder)
        meta = {"rows": sizes, "queries": len(ids["query"]), "items": len(ids["item"]), "source": str(path)}
        meta |= {"columns": buckets.roles, "min_rating": columns.get("min_rating"), "notes": buckets.notes}
        meta |= {"repeats": "keep"} if repeats else {}
        write_description(folder, {**meta, "split": {"how": how, "valid": valid, "test": test, "seed": seed}})
        if out.exists():
            shutil.rmtree(out)
        os.replace(folder, out)
    return read_prepared(out)


def _check_out(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder for the prepared data")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"{out} is not empty: choose another folder, or overwrite the prepared data (--overwrite)")
        if not is_prepared(out):
            raise UserError(f"{out} does not hold prepared data: it will not be overwritten")


def _check_space(folder: Path, n_rows: int, roles: Mapping[str, str], repeats: bool) -> None:
    """Refuse a disk too small for two copies of all columns and the items that queries have seen."""
    row_bytes = 9 + 8 * ("time" in roles) + 8 * ("weight" in roles) + ("label" in roles)
    need, free = n_rows * (2 * row_bytes + 5 + 4 * repeats), shutil.disk_usage(folder).free
    if free < need:
        have, want = f"{free / 1e9:.1f} GB free", f"{need / 1e9:.1f} GB"
        raise UserError(
            f"the disk of {folder.parent} has {have}, and preparing {n_rows:,} rows takes about {want}: free some first"
        )


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, deleted after an error; one left by a kill is replaced."""
    folder = out.absolute().parent / f".{out.name}.preparing"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if disk_full(error):
            raise UserError(
                f"the disk of {folder.parent} is full: nothing was written to {out}; free some, then prepare again"
            ) from None
        raise
