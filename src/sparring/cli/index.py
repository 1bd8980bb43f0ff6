"""sparring index: the index of a run, tuned for a recall and a memory limit, with a table, a figure and a page."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError, Namespace

from sparring.cli import screen
from sparring.errors import UserError

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
KINDS = ("auto", "exact", "hnsw", "ivf", "ivfsq", "ivfpq")


def size(text: str) -> int:
    """500MB -> 500,000,000; also kB, GB, KiB, MiB, GiB, or bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower().removesuffix("ytes").removesuffix("yte") if match else ""
    unit = "" if unit == "b" else unit
    if not match or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[unit])


def target(text: str) -> float:
    """A recall: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a recall: it must be above 0 and at most 1")
    return value


def index(args: Namespace) -> int:
    from sparring import runs
    from sparring.compare import hardware
    from sparring.devices import pick_device
    from sparring.index import page
    from sparring.index.beside import FOLDER, build_index
    from sparring.index.kinds import require_faiss

    if args.kind not in ("auto", "exact"):
        require_faiss()
    trained = runs.load(args.run)
    if args.kind == "auto" and len(trained.ids.item_ids) > 2000:
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
    facts = {"run": str(args.run), "items": f"{len(tuned.index.ids):,} x {tuned.index.dim}", "hardware": hardware(pick_device("cpu"))}
    folder = args.run / FOLDER
    path = page.write(tuned, args.recall, args.memory, k, folder / "report", facts)
    chosen = {"kind": tuned.chosen.kind, "width": tuned.chosen.effort.width, "refine": tuned.chosen.effort.refine}
    if args.json:
        rows = page.table(tuned, args.recall).rows
        print(json.dumps({"run": str(args.run), "chosen": chosen, "recall": tuned.recall, "k": k, "points": rows}))
        return 0
    if not args.quiet:
        best = page.table(tuned, args.recall, best_only=True)
        show.print()
        show.print(screen.table(best.cells(), left=2))
        for line in tuned.left_out:
            show.print(f"not tried: {line}", markup=False, soft_wrap=True)
        show.print()
    closing = f"{folder}: {page.describe(tuned.chosen)}, recall@{k} {tuned.recall:.4f} on held-out queries; {path}"
    show.print(closing, markup=False, soft_wrap=True)
    return 0
