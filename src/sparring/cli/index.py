"""sparring index: the index of a run, tuned for a recall and a memory limit, with a table, a figure and a page."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sparring.cli import screen
from sparring.cli.values import count, size, target, whole
from sparring.core.errors import UserError

KINDS = ("auto", "exact", "hnsw", "ivf", "ivfsq", "ivfpq")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`")
    parser.add_argument(
        "--recall", type=target, default=0.99, metavar="R", help="least share of the exact best k (default: 0.99)"
    )
    parser.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="most that searches may keep in memory, such as 500MB (default: any)",
    )
    parser.add_argument("--kind", choices=KINDS, default="auto", help="auto tries all that fit (default: auto)")
    parser.add_argument(
        "-k",
        "--k",
        type=count,
        default=100,
        metavar="K",
        help="length of the lists that it is tuned for (default: 100)",
    )
    parser.add_argument(
        "--queries", type=count, default=1000, metavar="N", help="queries of the run to measure on (default: 1000)"
    )
    parser.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="seed of the sample and of the clusters (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the last line and errors")


def index(args: Namespace) -> int:
    from sparring.core.devices import hardware, pick_device
    from sparring.serving.index import report
    from sparring.serving.index.faiss_backends import require_faiss
    from sparring.serving.index.run_index import FOLDER, build_index
    from sparring.serving.index.tuning import SMALL
    from sparring.training import trained as runs

    if args.kind not in ("auto", "exact"):
        require_faiss()
    trained = runs.load(args.run)
    screen.tell_of_towers(trained)
    if args.kind == "auto" and len(trained.ids.item_ids) > SMALL:
        require_faiss()
    if args.queries < 2 or len(trained.ids.query_ids) < 2:
        raise UserError("recall is measured on at least 2 queries, half of them held out")
    show = screen.console()
    quiet = args.quiet or args.json

    def say(line: str) -> None:
        if not quiet:
            show.print(line, markup=False, soft_wrap=True)

    tuned = build_index(trained, args.k, args.recall, args.memory, args.kind, args.queries, args.seed, say)
    k = min(args.k, len(trained.ids.item_ids))
    facts = {
        "run": str(args.run),
        "items": f"{len(tuned.index.ids):,} x {tuned.index.dim}",
        "hardware": hardware(pick_device("cpu")),
    }
    folder = args.run / FOLDER
    path = report.write(tuned, args.recall, args.memory, k, folder / "report", facts)
    chosen = {"kind": tuned.chosen.kind, "width": tuned.chosen.effort.width, "refine": tuned.chosen.effort.refine}
    if args.json:
        rows = report.table(tuned, args.recall).rows
        print(json.dumps({"run": str(args.run), "chosen": chosen, "recall": tuned.recall, "k": k, "points": rows}))
        return 0
    if not args.quiet:
        best = report.table(tuned, args.recall, best_only=True)
        show.print()
        show.print(screen.table(best.cells(), left=2))
        for line in tuned.left_out:
            show.print(f"not tried: {line}", markup=False, soft_wrap=True)
        show.print()
    closing = f"{folder}: {report.describe(tuned.chosen)}, recall@{k} {tuned.recall:.4f} on held-out queries; {path}"
    show.print(closing, markup=False, soft_wrap=True)
    return 0
