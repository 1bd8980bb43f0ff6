"""sparring recommend --all: the best items of every query of a run as one Parquet or CSV file."""

from __future__ import annotations

import json
import time
from argparse import Namespace

from rich.progress import TimeRemainingColumn

from sparring.cli import screen
from sparring.errors import UserError


def recommend_all(args: Namespace) -> int:
    from sparring import runs
    from sparring.export.lists import check_file, write_lists
    from sparring.index.beside import open_index

    if not args.all:
        raise UserError(f"--{'out' if args.out else 'index'} goes with --all: the lists of every query")
    if args.out is None:
        raise UserError("--all needs --out FILE: a .parquet or .csv file for the lists")
    check_file(args.out)
    trained = runs.load(args.run)
    index = open_index(args.run) if args.index else None
    show = screen.console()
    n = len(trained.ids.query_ids)
    k = args.k or min(100, len(trained.ids.item_ids))
    began = time.perf_counter()
    with screen.bar_of(show, "queries", TimeRemainingColumn()) as bar:
        task = bar.add_task("ranking", total=n, note="")
        rows = write_lists(trained, args.out, k, args.with_seen, index, lambda done, total: bar.update(task, completed=done))
    seconds = time.perf_counter() - began
    if args.json:
        print(json.dumps({"file": str(args.out), "queries": n, "rows": rows, "seconds": round(seconds, 3)}))
        return 0
    how = "exact" if index is None else f"through the {index.kind} index"
    line = f"{args.out}: {rows:,} rows, the best {k} of {n:,} queries, {how}, in {seconds:.1f} s ({n / seconds:,.0f} queries/s)"
    show.print(line, markup=False, soft_wrap=True)
    return 0
