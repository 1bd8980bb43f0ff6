"""sparring diagnose: a run's negatives and others against the full softmax, on the screen, as JSON or as a page, with advice."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparring.cli import inputs, screen
from sparring.cli.values import count, device, names, whole
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Split


def options(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `sparring train`, finished or not")
    parser.add_argument(
        "--samplers",
        type=names,
        default=("own", "uns", "ssl_pop", "mns", "bir"),
        metavar="NAME,NAME",
        help="own (the run's negatives) and any recipes, also FILE.py:FUNCTION (default: own,uns,ssl_pop,mns,bir)",
    )
    parser.add_argument(
        "--queries", type=count, default=256, metavar="N", help="training pairs to measure on (default: 256)"
    )
    parser.add_argument(
        "--draws", type=count, default=20, metavar="N", help="batches that each of them is put into (default: 20)"
    )
    parser.add_argument("--data", metavar="FILE_OR_NAME", help="where the data of the run is now, if it has moved")
    parser.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="seed of the sample and of the draws (default: 0)"
    )
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write a page, report.html, its figures and the tables there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _parts(args: Namespace, meta: dict[str, Any]) -> tuple[Split, str]:
    """The run's data as its training had it; where that is not recorded, the pairs of --data that it was trained on, and so said."""
    from sparring.core.files import read_tensors
    from sparring.core.types import Positives
    from sparring.data.interactions import Ids, Split
    from sparring.data.pairs import pair_keys
    from sparring.training.folder import seen_interactions

    if args.data is None or (meta.get("source") or {}).get("data"):
        source = inputs.recorded(meta, args.run)
        data = inputs.read_recorded(meta, args.run, args.data, source["columns"])
        return inputs.split_as(data, meta, args.run, args.data), ""
    given, ids = inputs.read_data(args.data, {}), Ids.load(args.run)
    tensors, _ = read_tensors(args.run / "seen.safetensors")
    pairs = seen_interactions(ids, Positives(tensors["start"], tensors["items"]))
    queries = ids.query_ids.encode(given.query_ids.ids)[given.queries]
    items = ids.item_ids.encode(given.item_ids.ids)[given.items]
    known = (queries >= 0) & (items >= 0)
    theirs = pair_keys(queries[known], items[known], pairs.n_items)
    train = pairs.subset(np.flatnonzero(np.isin(pair_keys(pairs.queries, pairs.items, pairs.n_items), theirs)))
    if not len(train):
        raise UserError(f"{args.data} holds no pair that {args.run} was trained on: give the data of its training")
    return Split(
        train, None, None
    ), f"measured on the {len(train):,} pairs of {args.data} that {args.run} was trained or validated on"


def diagnose(args: Namespace) -> int:
    from sparring.core.devices import hardware, pick_device
    from sparring.experiments.diagnose import advice
    from sparring.experiments.diagnose import samplers as opponents
    from sparring.experiments.diagnose.measures import diagnose as measure
    from sparring.experiments.report import diagnosis
    from sparring.recipes import finding
    from sparring.training.folder import read_meta

    samplers = tuple(dict.fromkeys(name if name == "own" else finding.named(name) for name in args.samplers))
    if args.draws < 2:
        raise UserError(f"--draws {args.draws} is too few: a variance needs at least 2")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file, not a folder")
    device = pick_device(args.device)
    if not args.run.is_dir():
        raise UserError(f"no such run folder: {args.run}")
    meta = read_meta(args.run)
    show = screen.console()
    parts, note = _parts(args, meta)
    world = inputs.world(args.data or meta["source"]["data"])
    own = opponents.load_for_diagnosis(args.run, parts, device)
    if note and not args.json:
        show.print(note, markup=False, soft_wrap=True)
    found = []
    for name in samplers:
        with show.status(f"measuring {finding.short(name)}"):
            run = own if name == "own" else opponents.with_negatives_of(name, own, parts)
            found.append(
                measure(
                    finding.short(name),
                    run,
                    parts,
                    queries=args.queries,
                    draws=args.draws,
                    seed=args.seed,
                    world=world,
                )
            )
    tables = advice.tables(found)
    lines = advice.advise(found)
    sample = diagnosis.SampleSize(min(args.queries, len(parts.train)), args.draws, args.seed)
    if args.out is not None:
        for name, table in {**tables, "advice": advice.as_table(lines)}.items():
            table.write(args.out, name)
        command = shlex.join(["sparring", *sys.argv[1:]]) if sys.argv[1:2] == ["diagnose"] else ""
        page = diagnosis.write(args.out, found, lines, parts, meta, sample, hardware(device), command)
    if args.json:
        rows = [advice.row(each) for each in found]
        print(
            json.dumps(
                {"run": str(args.run), **vars(sample), "samplers": rows, "advice": [vars(line) for line in lines]}
            )
        )
        return 0
    for table in tables.values():
        show.print(screen.table(table.cells(), table.caption))
        show.print()
    for line in lines:
        show.print(f"{line.kind}: {line.text}", markup=False, soft_wrap=True)
    if args.out is not None:
        where = f"{page}: the whole report; {args.out}: figures, and tables as .md, .csv, .tex and .json"
        show.print(where, markup=False, soft_wrap=True)
    return 0
