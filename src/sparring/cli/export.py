"""sparring export: a run's vectors or neighbours as files, its towers as ONNX, its items in a vector store."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli.parsing import (
    Commands,
    add_novelty,
    add_quiet,
    add_ranking,
    add_run,
    add_unfinished,
    count,
    names,
    place,
)
from sparring.cli.screen import console, note, note_untrained, progress, show
from sparring.core.choices import FEEDS, STORES
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, writing

if TYPE_CHECKING:
    import polars as pl

    from sparring.serving.export.rows import Rows
    from sparring.training.trained import Trained


def add_export(commands: Commands) -> None:
    parser = commands.add(
        "export",
        "Write a run's vectors as Parquet or its towers as ONNX, or send its items to a vector store.",
        "sparring export runs/first --to parquet --out vectors",
        export,
    )
    add_run(parser)
    text = "format of the files, or the store"
    kinds = tuple(dict.fromkeys(("parquet", "onnx", *STORES, *FEEDS)))
    parser.add_argument("--to", choices=kinds, required=True, help=text)
    text = "folder of the files (default: RUN/parquet, RUN/onnx, ...)"
    parser.add_argument("--out", type=place, metavar="FOLDER", help=text)
    text = "parquet of ease and item_knn: neighbours written of each item, the strongest (default: 200)"
    parser.add_argument("--neighbours", type=count, metavar="M", help=text)
    add_ranking(parser)
    add_novelty(parser)
    add_unfinished(parser)
    add_quiet(parser)
    group = parser.add_argument_group("stores")
    text = "; ".join(f"{store}: {address}" for store, address in STORES.items())
    group.add_argument("--address", metavar="WHERE", help=text)
    text = "collection, table or index, created if missing (default: items)"
    group.add_argument("--table", default="items", metavar="NAME", help=text)
    text = "also send the vectors of all queries, to TABLE_queries"
    group.add_argument("--with-queries", action="store_true", help=text)
    text = "queries whose lists are then searched in the store and compared with the run's (default: 100)"
    group.add_argument("--check", type=int, default=100, metavar="N", help=text)
    text = "only delete these items from the store"
    group.add_argument("--delete", type=names, metavar="ID,ID", help=text)


def export(args: Namespace) -> int:
    from sparring.training import trained as runs

    files = args.to not in STORES or (args.to in FEEDS and not args.address)
    stored = {"address": args.address, "delete": args.delete}
    if args.to not in (*STORES, *FEEDS):
        stored["with-queries"] = args.with_queries
    for option in [name for name, value in stored.items() if files and value]:
        how = "takes --out FOLDER" if args.to not in STORES else f"needs --address {STORES[args.to]}"
        raise UserError(f"--{option} is for vector stores; --to {args.to} {how}")
    if not files and args.out:
        raise UserError(f"--out is for files; --to {args.to} takes --address {STORES[args.to]}")
    if not files and not args.address:
        raise UserError(f"--to {args.to} needs --address {STORES[args.to]}")
    if args.check < 0:
        raise UserError(f"--check {args.check}: give a number of queries, 0 for no check")
    trained = runs.load(
        args.run, args.model, recipe=args.recipe, trust=args.trust, unfinished=args.unfinished, novelty=args.novelty
    )
    if args.to == "onnx":
        if args.ranking not in (None, "towers"):
            raise UserError(f"--to onnx writes the towers alone: for --ranking {args.ranking} write parquet")
        if trained.has_vectors and trained.how() != "towers":
            note(f"only the towers are written; `--to parquet` writes the vectors of the {trained.how()} ranking")
    elif args.ranking is not None or trained.has_vectors:
        args.ranking = trained.how(args.ranking)
    if args.neighbours is not None and (trained.has_vectors or args.to != "parquet"):
        raise UserError("--neighbours is for --to parquet of runs with an item-item matrix (ease, item_knn)")
    if not trained.has_vectors and args.to != "parquet":
        trained.item_vectors()  # says why there are none
    if args.to != "onnx":
        note_untrained(trained)
    return _files(args, trained) if files else _store(args, trained)


def _files(args: Namespace, trained: Trained) -> int:
    from sparring.core.manifest import add_files
    from sparring.serving.export.onnx import write_onnx
    from sparring.serving.export.vectors import NEIGHBOURS, write_parquet

    folder, onnx = args.out or args.run / args.to, args.to == "onnx"
    if isinstance(folder, str):
        return _remote(args, trained, folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the exported files")
    with writing(folder, folder / LOCK):
        omitted: list[str] = []
        paths: Sequence[Path | str]
        if onnx:
            paths, omitted = write_onnx(trained, folder)
        elif args.to == "parquet":
            paths = write_parquet(trained, folder, args.neighbours or NEIGHBOURS, args.ranking)
        else:
            paths = _feed(args, trained, folder)
        if folder.resolve().is_relative_to(args.run.resolve()):
            add_files(args.run, *(str(Path(path).resolve().relative_to(args.run.resolve())) for path in paths))
    checked = "; checked against the model" if onnx else _ranked(args)
    show(*omitted, f"{folder}: {', '.join(str(Path(path).relative_to(folder)) for path in paths)}{checked}")
    return 0


def _remote(args: Namespace, trained: Trained, place: str) -> int:
    from sparring.serving.export.vectors import NEIGHBOURS, write_parquet

    if args.to != "parquet":
        raise UserError(f"--to {args.to} writes to a folder of this machine, not to {place}")
    show(*map(str, write_parquet(trained, place, args.neighbours or NEIGHBOURS, args.ranking)))
    return 0


def _feed(args: Namespace, trained: Trained, folder: Path) -> list[Path]:
    from sparring.serving.export.opensearch import write_opensearch
    from sparring.serving.export.vespa import write_vespa

    paths = []
    for rows, table in _sides(args, trained):
        if args.to == "vespa":
            paths += write_vespa(rows, folder, table)
        else:
            paths += write_opensearch(rows, folder, table, elastic=args.to == "elasticsearch")
    return paths


def _store(args: Namespace, trained: Trained) -> int:
    from sparring.serving.export.rows import item_rows
    from sparring.serving.export.stores import agreement, open_store, send

    if args.delete:
        rows = item_rows(trained, args.ranking)
        asked, store = _ids_like(args.delete, rows.ids), open_store(args.to, args.address, args.table, rows.schema)
        with closing(store):
            show(f"{args.to} {args.table}: deleted {store.delete(asked):,} of {len(asked):,} items")
        return 0
    for rows, table in _sides(args, trained):
        things = "items" if table == args.table else "queries"
        with closing(open_store(args.to, args.address, table, rows.schema)) as store:
            with progress(things, args.quiet) as update:
                sent, deleted = send(rows, store, lambda done, total: update("sending", done, total))
            line = f"{args.to} {table}: wrote {sent:,} {things}, deleted {deleted:,} that the run does not have"
            show(f"{line}{_ranked(args)}")
            if args.check and things == "items":
                with console().status("searching"):
                    share = agreement(trained, store, queries=args.check, how=args.ranking)
                show(f"{args.to} {table}: finds {share:.1%} of the run's own lists of 10, for {args.check:,} queries")
    return 0


def _sides(args: Namespace, trained: Trained) -> Iterator[tuple[Rows, str]]:
    """The rows of items and, if asked for, of queries, with the names of their tables."""
    from sparring.serving.export.rows import item_rows, query_rows

    yield item_rows(trained, args.ranking), args.table
    if args.with_queries:
        yield query_rows(trained, args.ranking), f"{args.table}_queries"


def _ranked(args: Namespace) -> str:
    """The ranking of what was written, if it is not that of the towers."""
    if args.ranking == "fused" and args.to != "parquet":
        return "; they find the shortlists of the fused ranking, and `--to parquet` writes what scores them"
    return {"classifiers": "; ranked by the classifiers", "fused": "; ranked by both fused"}.get(args.ranking, "")


def _ids_like(asked: tuple[str, ...], ids: pl.Series) -> pl.Series:
    """Ids of the command line in the type of the run's."""
    import polars as pl

    cast = pl.Series("id", asked).cast(ids.dtype, strict=False)
    for word in pl.Series(asked).filter(cast.is_null()):
        raise UserError(f"--delete {word!r} is not a whole number, as the ids of this run are")
    return cast
