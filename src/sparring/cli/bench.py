"""sparring bench: the speed of the loss on this machine, beside PyTorch's own forms and the lower bound."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli.parsing import Commands, add_device, add_json, count, counts
from sparring.cli.screen import detail, result, table

if TYPE_CHECKING:
    from rich.console import RenderableType

PRECISIONS = ("float32", "tf32", "bf16")
SIZES = {"cpu": [512, 1024, 2048, 4096], "cuda": [2048, 4096, 8192, 16384, 32768, 65536]}


def add_bench(commands: Commands) -> None:
    parser = commands.add(
        "bench",
        "Time the loss on this machine beside PyTorch's own forms and the lower bound, as a table and a figure.",
        "sparring bench --sizes 1024,2048 --out bench",
        bench,
    )
    group = parser.add_argument_group("problem")
    text = "numbers of queries and candidates (default: sizes that suit the device)"
    group.add_argument("--sizes", type=counts, metavar="B,B", help=text)
    group.add_argument("--dim", type=count, default=128, metavar="N", help="dimension of the vectors (default: 128)")
    text = "precision of matrix products (default: tf32 on a GPU, float32 on a CPU)"
    group.add_argument("--precision", choices=PRECISIONS, help=text)
    text = "number of timed rounds; the best one is reported (default: 5)"
    group.add_argument("--rounds", type=count, default=5, metavar="N", help=text)
    text = "time torch.compile too, which recompiles for each size"
    group.add_argument("--compiled", action="store_true", help=text)
    add_device(group)
    group = parser.add_argument_group("output")
    text = "also write bench.json, bench.svg and bench.png to this folder"
    group.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    add_json(group)


def bench(args: Namespace) -> int:
    from sparring.core.devices import hardware, pick_device
    from sparring.experiments import bench as measuring
    from sparring.experiments.report import figures

    device = pick_device(args.device)
    precision: measuring.Precision = args.precision or ("tf32" if device.type == "cuda" else "float32")
    sizes, rows = args.sizes or SIZES[device.type], []
    for row in measuring.measure(device, sizes, args.dim, precision, args.rounds, args.compiled):
        rows.append(row)
        took = "does not fit" if row.ms is None else f"{row.ms:.3f} ms"
        detail(args, f"B = {row.size:,}  {row.method}{', ' if row.form else ''}{row.form}: {took}")
    record = {"hardware": hardware(device), "dim": args.dim, "precision": precision, "rows": measuring.record(rows)}
    title = f"weighted log-sum-exp, forward and backward, d = {args.dim}, {precision}, {record['hardware']}"
    parts: list[RenderableType] = ["", table(measuring.cells(rows), title=title, left=3)]
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        figures.save(measuring.figure(rows), args.out, "bench", "time and memory against the size of the batch")
        parts += ["", f"{args.out}: bench.json, bench.svg, bench.png"]
    return result(args, [record], *parts)
