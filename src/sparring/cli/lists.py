"""sparring recommend --all: the best items of every query of a run as one Parquet or CSV file."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from rich.progress import TimeRemainingColumn

from sparring.cli import screen
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.training.trained import Trained


_TOLD = 10.0  # seconds between two lines where there is no terminal for a bar


def recommend_all(args: Namespace) -> int:
    from sparring.serving.export.lists import check_file, write_lists
    from sparring.serving.index.run_index import open_index
    from sparring.training import trained as runs

    if not args.all:
        raise UserError(f"--{'out' if args.out else 'index'} goes with --all: the lists of every query")
    if args.out is None:
        raise UserError("--all needs --out FILE: a .parquet or .csv file for the lists")
    check_file(args.out)
    if args.index and args.ranking == "fused":
        raise UserError("an index has the vectors of the towers alone: leave out --index for --ranking fused")
    trained = runs.load(args.run)
    index = open_index(args.run) if args.index else None
    if index is not None:
        screen.tell_of_towers(trained)
    show = screen.console()
    n = len(trained.ids.query_ids)
    k = args.k or min(100, len(trained.ids.item_ids))
    began = time.perf_counter()
    with screen.bar_of(show, "queries", TimeRemainingColumn()) as bar:
        task = bar.add_task("ranking", total=n, note="")
        told = began

        def tell(done: int, total: int) -> None:
            nonlocal told
            bar.update(task, completed=done)
            if bar.disable and time.perf_counter() - told >= _TOLD and done < total:  # into a log
                told = time.perf_counter()
                screen.tell(f"{done:,} of {total:,} queries ranked after {told - began:.0f} s")

        rows = write_lists(trained, args.out, k, args.with_seen, index, tell, args.ranking)
    seconds = time.perf_counter() - began
    tell_left_out(trained)
    if len(trained.eligibility.queries):
        screen.tell(
            f"note: {len(trained.eligibility.queries):,} queries have no training pair: their lists say nothing of them"
        )
    if args.json:
        print(json.dumps({"file": str(args.out), "queries": n, "rows": rows, "seconds": round(seconds, 3)}))
        return 0
    exact = "exact, towers and classifiers fused" if trained.how(args.ranking) == "fused" else "exact"
    how = exact if index is None else f"through the {index.kind} index"
    line = f"{args.out}: {rows:,} rows, the best {k} of {n:,} queries, {how}, in {seconds:.1f} s ({n / seconds:,.0f} queries/s)"
    show.print(line, markup=False, soft_wrap=True)
    return 0


def tell_left_out(trained: Trained) -> None:
    """How many items no list can hold, if any."""
    n = len(trained.eligibility.items)
    if n:
        which = f"{n:,} items that have no training pair are" if n > 1 else "1 item that has no training pair is"
        screen.tell(f"note: {which} not recommended")
