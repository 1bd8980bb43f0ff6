"""sparring prepare: interactions of any size into a folder that training reads from disk."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli import inputs, screen
from sparring.cli.values import whole

if TYPE_CHECKING:
    from sparring.data.prepared.buckets import StageProgress


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "data", metavar="DATA", help="a Parquet file, a folder of Parquet parts, a glob in quotes, or a CSV file"
    )
    inputs.add_columns(parser)
    inputs.add_split(parser)
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the split (default: 0)")
    group = parser.add_argument_group("how it is run")
    group.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where it goes; it appears there as a whole at the end",
    )
    group.add_argument("--overwrite", action="store_true", help="replace what was prepared in FOLDER before")
    group.add_argument(
        "--engine",
        choices=("polars", "spark"),
        default="polars",
        help="spark: on a cluster, for the same files (default: polars)",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def prepare(args: Namespace) -> int:
    from sparring.data.prepared.preparation import prepare as make

    began = time.perf_counter()
    how = {"how": args.split, "valid": args.valid, "test": args.test, "seed": args.seed}
    with _bar(args.quiet) as tell:
        data = make(
            args.data,
            args.out,
            **inputs.columns(args),
            **how,
            engine=args.engine,
            overwrite=args.overwrite,
            progress=tell,
        )
    assert data.parts is not None
    show = screen.console()
    if not args.quiet:
        for note in data.notes:
            show.print(note, markup=False, soft_wrap=True)
    parts = {"train": data.parts.train, "valid": data.parts.valid, "test": data.parts.test}
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items() if part is not None)
    line = f"{args.out}: {data.n_queries:,} queries x {data.n_items:,} items; {sizes} interactions; {time.perf_counter() - began:.1f} s"
    show.print(line, markup=False, soft_wrap=True)
    return 0


@contextmanager
def _bar(quiet: bool) -> Iterator[StageProgress]:
    """A bar for each stage on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    show = screen.console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=show, transient=True, disable=quiet or not show.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        stage = "reading"

        def tell(name: str, done: int, total: int | None) -> None:
            nonlocal stage
            if name != stage:
                stage = name
                bar.reset(task)
            bar.update(task, description=name, completed=done, total=total)

        yield tell
