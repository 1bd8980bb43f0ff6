"""sparring prepare: interactions of any size, written to a folder that training reads from disk."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import sparring.cli.inputs as inputs
from sparring.cli.parsing import Commands, add_quiet, whole
from sparring.cli.screen import detail, progress, show


def add_prepare(commands: Commands) -> None:
    parser = commands.add(
        "prepare",
        "Write interactions of any size to a folder that `sparring train --data FOLDER` reads from disk.",
        "sparring prepare parts/ --split leave-last-out --out prepared",
        prepare,
    )
    text = "a Parquet file, a folder of Parquet parts, a glob in quotes, or a CSV file"
    parser.add_argument("data", metavar="DATA", help=text)
    inputs.add_columns(parser)
    inputs.add_split(parser)
    group = parser.add_argument_group("execution")
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the split (default: 0)")
    text = "folder to write; it appears only when it is complete"
    group.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=text)
    group.add_argument("--overwrite", action="store_true", help="replace the prepared data in FOLDER")
    text = "spark runs on a cluster and writes the same files (default: polars)"
    group.add_argument("--engine", choices=("polars", "spark"), default="polars", help=text)
    add_quiet(group)


def prepare(args: Namespace) -> int:
    from sparring.data.prepared.preparation import prepare as write_prepared

    began = time.perf_counter()
    given = {**inputs.columns(args), **inputs.split_arguments(args, args.seed)}
    with progress("rows", args.quiet) as update:
        data = write_prepared(
            args.data, args.out, **given, engine=args.engine, overwrite=args.overwrite, progress=update
        )
    assert data.parts is not None
    detail(args, *data.notes)
    parts = {"train": data.parts.train, "valid": data.parts.valid, "test": data.parts.test}
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items() if part is not None)
    shape, seconds = f"{data.n_queries:,} queries x {data.n_items:,} items", time.perf_counter() - began
    show(f"{args.out}: {shape}; {sizes} interactions; {seconds:.1f} s")
    return 0
