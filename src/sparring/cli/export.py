"""sparring export: a run's vectors or neighbours as Parquet, its towers as ONNX, its items in Milvus or PostgreSQL."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli.parsing import Commands, add_novelty, add_quiet, add_run, add_unfinished, count, names
from sparring.cli.screen import console, note_towers, progress, show
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, writing

if TYPE_CHECKING:
    import polars as pl

    from sparring.serving.export.milvus import MilvusItems
    from sparring.serving.export.pgvector import PostgresItems
    from sparring.training.trained import Trained

ADDRESSES = {"milvus": "FILE.db or http://HOST:19530", "pgvector": "postgresql://USER@HOST/DATABASE"}


def add_export(commands: Commands) -> None:
    parser = commands.add(
        "export",
        "Write a run's vectors as Parquet or its towers as ONNX, or send its items to Milvus or PostgreSQL.",
        "sparring export runs/first --to parquet --out vectors",
        export,
    )
    add_run(parser)
    text = "format of the files, or the database"
    parser.add_argument("--to", choices=("parquet", "onnx", *ADDRESSES), required=True, help=text)
    text = "parquet, onnx: folder of the files (default: RUN/parquet, RUN/onnx)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    text = "parquet of ease and item_knn: neighbours written of each item, the strongest (default: 200)"
    parser.add_argument("--neighbours", type=count, metavar="M", help=text)
    add_novelty(parser)
    add_unfinished(parser)
    add_quiet(parser)
    group = parser.add_argument_group("databases")
    text = (
        "milvus: a file FILE.db (Milvus Lite) or http://HOST:19530, with the token in MILVUS_TOKEN; "
        "pgvector: postgresql://USER@HOST/DATABASE, with the password in PGPASSWORD"
    )
    group.add_argument("--address", metavar="WHERE", help=text)
    text = "collection or table, created if missing (default: items)"
    group.add_argument("--table", default="items", metavar="NAME", help=text)
    text = "only delete these items from the database"
    group.add_argument("--delete", type=names, metavar="ID,ID", help=text)


def export(args: Namespace) -> int:
    from sparring.training import trained as runs

    files = args.to not in ADDRESSES
    if files and (args.address or args.delete):
        option = "address" if args.address else "delete"
        raise UserError(f"--{option} is for milvus and pgvector; --to {args.to} takes --out FOLDER")
    if not files and args.out:
        raise UserError(f"--out is for parquet and onnx; --to {args.to} takes --address")
    if not files and not args.address:
        raise UserError(f"--to {args.to} needs --address {ADDRESSES[args.to]}")
    trained = runs.load(
        args.run, args.model, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished, novelty=args.novelty
    )
    note_towers(trained)
    matrix = trained.model.scores_items
    if args.neighbours is not None and not (matrix and args.to == "parquet"):
        raise UserError("--neighbours is for --to parquet of runs with an item-item matrix (ease, item_knn)")
    if not trained.has_vectors and not (matrix and args.to == "parquet"):
        trained.item_vectors()  # says why there are none
    return _files(args, trained) if files else _database(args, trained)


def _files(args: Namespace, trained: Trained) -> int:
    from sparring.core.manifest import add_files
    from sparring.serving.export.onnx import write_onnx
    from sparring.serving.export.vectors import write_neighbours, write_vectors

    folder, onnx = args.out or args.run / args.to, args.to == "onnx"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the exported files")
    with writing(folder, folder / LOCK):
        omitted: list[str] = []
        if onnx:
            paths, omitted = write_onnx(trained, folder)
        elif trained.model.scores_items:
            paths = write_neighbours(trained, folder, args.neighbours or 200)
        else:
            paths = write_vectors(trained, folder)
        if folder.resolve().is_relative_to(args.run.resolve()):
            add_files(args.run, *(str(path.resolve().relative_to(args.run.resolve())) for path in paths))
    checked = "; checked against the model" if onnx else ""
    show(*omitted, f"{folder}: {', '.join(path.name for path in paths)}{checked}")
    return 0


def _database(args: Namespace, trained: Trained) -> int:
    from sparring.serving.export.pgvector import PostgresItems
    from sparring.serving.export.vectors import send, store_ids

    ids = store_ids(trained)
    store = _store(args, trained, ids)
    where = f"{args.to} {args.table}"
    try:
        if args.delete:
            asked = _ids_like(args.delete, ids)
            show(f"{where}: deleted {store.delete(asked):,} of {len(asked):,} items")
            return 0
        with progress("items", args.quiet) as update:
            sent, deleted = send(trained, store, lambda done, total: update("sending", done, total))
        if isinstance(store, PostgresItems):
            with console().status("building the index"):
                store.build_index()
        show(f"{where}: wrote {sent:,} items, deleted {deleted:,} that the run does not have")
    finally:
        store.close()
    return 0


def _store(args: Namespace, trained: Trained, ids: pl.Series) -> MilvusItems | PostgresItems:
    import polars as pl

    from sparring.serving.export.milvus import MilvusItems
    from sparring.serving.export.pgvector import PostgresItems

    text, dim = ids.dtype == pl.String, trained.model.dim
    if args.to == "milvus":
        return MilvusItems(args.address, args.table, dim, text, os.environ.get("MILVUS_TOKEN", ""))
    return PostgresItems(args.address, args.table, dim, text)


def _ids_like(asked: tuple[str, ...], ids: pl.Series) -> pl.Series:
    """Ids of the command line in the type of the run's."""
    import polars as pl

    cast = pl.Series("id", asked).cast(ids.dtype, strict=False)
    for word in pl.Series(asked).filter(cast.is_null()):
        raise UserError(f"--delete {word!r} is not a whole number, as the ids of this run are")
    return cast
