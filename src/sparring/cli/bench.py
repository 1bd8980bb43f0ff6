"""sparring bench: how fast the loss is on this machine, against PyTorch's own forms and the floor."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from sparring.cli import screen
from sparring.cli.values import count, device

PRECISIONS = ("float32", "tf32", "bf16")
SIZES = {"cpu": [512, 1024, 2048, 4096], "cuda": [2048, 4096, 8192, 16384, 32768, 65536]}


def sizes(text: str) -> list[int]:
    """2048,8192 -> [2048, 8192]"""
    try:
        return [count(word) for word in text.split(",")]
    except (ValueError, ArgumentTypeError):
        raise ArgumentTypeError(f"{text!r} is not a list of numbers of queries such as 2048,8192") from None


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", type=sizes, metavar="B,B", help="numbers of queries and candidates (default: what suits the device)"
    )
    parser.add_argument("--dim", type=count, default=128, metavar="N", help="dimensions of the vectors (default: 128)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="of the products (default: tf32 on a GPU, float32 on a CPU)"
    )
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="the best of so many counts (default: 5)")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile too, which takes its time to compile at each size"
    )
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write bench.json and a picture, bench.svg and bench.png, there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def bench(args: Namespace) -> int:
    from sparring.core.devices import hardware, pick_device
    from sparring.experiments import bench as measuring
    from sparring.experiments.report import figures

    where = pick_device(args.device)
    precision: measuring.Precision = args.precision or ("tf32" if where.type == "cuda" else "float32")
    show = screen.console()
    rows = []
    for row in measuring.measure(
        where, args.sizes or SIZES[where.type], args.dim, precision, args.rounds, args.compiled
    ):
        rows.append(row)
        if not args.json:
            took = "does not fit" if row.ms is None else f"{row.ms:.3f} ms"
            show.print(
                f"B = {row.size:,}  {row.method}{', ' if row.form else ''}{row.form}: {took}",
                markup=False,
                soft_wrap=True,
            )
    about = {"hardware": hardware(where), "dim": args.dim, "precision": precision, "rows": measuring.record(rows)}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        figures.save(measuring.figure(rows), args.out, "bench", "time and memory against the size of the batch")
    if args.json:
        print(json.dumps(about))
        return 0
    show.print()
    title = f"weighted log-sum-exp, forward and backward, d = {args.dim}, {precision}, {about['hardware']}"
    show.print(screen.table(measuring.cells(rows), title=title, left=3))
    if args.out is not None:
        show.print(f"\n{args.out}: bench.json, bench.svg, bench.png", markup=False, soft_wrap=True)
    return 0
