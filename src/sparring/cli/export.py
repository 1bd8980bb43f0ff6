"""sparring export: a run's vectors as Parquet, its towers as ONNX, its items in Milvus or PostgreSQL."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import TimeRemainingColumn

from sparring.cli import screen
from sparring.cli.values import ids
from sparring.core.errors import UserError

if TYPE_CHECKING:
    import polars as pl

    from sparring.serving.export.milvus import MilvusItems
    from sparring.serving.export.pgvector import PostgresItems
    from sparring.training.trained import Trained


def options(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument(
        "--to", choices=("parquet", "onnx", "milvus", "pgvector"), required=True, help="files, or a database"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="parquet, onnx: where the files go (default: RUN/parquet, RUN/onnx)"
    )
    group = parser.add_argument_group("databases")
    group.add_argument(
        "--address",
        metavar="WHERE",
        help="milvus: a file FILE.db (Milvus Lite) or http://HOST:19530, its token in MILVUS_TOKEN; "
        "pgvector: postgresql://USER@HOST/DATABASE, the password in PGPASSWORD",
    )
    group.add_argument(
        "--table",
        default="items",
        metavar="NAME",
        help="collection or table; made where it is missing (default: items)",
    )
    group.add_argument(
        "--delete", type=ids, metavar="ID,ID", help="delete these items from the database, and do nothing else"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def export(args: Namespace) -> int:
    from sparring.training import trained as runs

    files = args.to in ("parquet", "onnx")
    if files and (args.address or args.delete):
        raise UserError(
            f"--{'address' if args.address else 'delete'} is for milvus and pgvector; --to {args.to} takes --out FOLDER"
        )
    if not files and args.out:
        raise UserError(f"--out is for parquet and onnx; --to {args.to} takes --address")
    if not files and not args.address:
        what = "FILE.db or http://HOST:19530" if args.to == "milvus" else "postgresql://USER@HOST/DATABASE"
        raise UserError(f"--to {args.to} needs --address {what}")
    trained = runs.load(args.run)
    screen.tell_of_towers(trained)
    return _files(args, trained) if files else _database(args, trained)


def _files(args: Namespace, trained: Trained) -> int:
    from sparring.serving.export.onnx import write_onnx
    from sparring.serving.export.vectors import write_vectors

    folder = args.out or args.run / args.to
    show = screen.console()
    paths, cannot = (write_vectors(trained, folder), []) if args.to == "parquet" else write_onnx(trained, folder)
    for line in cannot:
        show.print(line, markup=False, soft_wrap=True)
    checked = "; checked against the model" if args.to == "onnx" else ""
    show.print(f"{folder}: {', '.join(path.name for path in paths)}{checked}", markup=False, soft_wrap=True)
    return 0


def _database(args: Namespace, trained: Trained) -> int:
    from sparring.serving.export.pgvector import PostgresItems
    from sparring.serving.export.vectors import send, store_ids

    own = store_ids(trained)
    store = _store(args, trained, own)
    show = screen.console()
    where = f"{args.to} {args.table}"
    try:
        if args.delete:
            asked = _ids_like(args.delete, own)
            show.print(
                f"{where}: {store.delete(asked):,} of {len(asked):,} items deleted", markup=False, soft_wrap=True
            )
            return 0
        with screen.bar_of(show, "items", TimeRemainingColumn()) as bar:
            task = bar.add_task("sending", total=len(own), note="", visible=not args.quiet)
            sent, deleted = send(trained, store, lambda done, total: bar.update(task, completed=done))
        if isinstance(store, PostgresItems):
            with show.status("building the index"):
                store.build_index()
        show.print(
            f"{where}: {sent:,} items put in, {deleted:,} that the run does not have deleted",
            markup=False,
            soft_wrap=True,
        )
    finally:
        store.close()
    return 0


def _store(args: Namespace, trained: Trained, own: pl.Series) -> MilvusItems | PostgresItems:
    import polars as pl

    from sparring.serving.export.milvus import MilvusItems
    from sparring.serving.export.pgvector import PostgresItems

    text, dim = own.dtype == pl.String, trained.model.dim
    if args.to == "milvus":
        return MilvusItems(args.address, args.table, dim, text, os.environ.get("MILVUS_TOKEN", ""))
    return PostgresItems(args.address, args.table, dim, text)


def _ids_like(asked: list[str], own: pl.Series) -> pl.Series:
    """Ids of the command line in the type of the run's."""
    import polars as pl

    found = pl.Series("id", asked).cast(own.dtype, strict=False)
    for word in pl.Series(asked).filter(found.is_null()):
        raise UserError(f"--delete {word!r} is not a whole number, as the ids of this run are")
    return found
