"""sparring diagnose: a run's negatives, and others, against the full softmax: tables, JSON or a page, with advice."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparring.cli.inputs as inputs
from sparring.cli.parsing import (
    Commands,
    add_device,
    add_json,
    add_run,
    command_line,
    count,
    names,
    whole,
)
from sparring.cli.screen import console, detail, result, table
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, writing

if TYPE_CHECKING:
    from sparring.data.interactions import Split


def add_diagnose(commands: Commands) -> None:
    parser = commands.add(
        "diagnose",
        "Measure how well the negatives of a run, and others, approximate the full softmax, and give advice.",
        "sparring diagnose runs/first --samplers own,uns,ssl_pop,bir",
        diagnose,
    )
    add_run(parser)
    group = parser.add_argument_group("measurement")
    text = "own (the run's negatives) and any recipes, also FILE.py:FUNCTION (default: own,uns,ssl_pop,mns,bir)"
    usual = ("own", "uns", "ssl_pop", "mns", "bir")
    group.add_argument("--samplers", type=names, default=usual, metavar="NAME,NAME", help=text)
    text = "training pairs to measure on (default: 256)"
    group.add_argument("--queries", type=count, default=256, metavar="N", help=text)
    text = "batches that each pair is put into (default: 20)"
    group.add_argument("--draws", type=count, default=20, metavar="N", help=text)
    text = "place of the run's data, if it has moved"
    group.add_argument("--data", metavar="FILE_OR_NAME", help=text)
    text = "seed of the sampled pairs and of the draws (default: 0)"
    group.add_argument("--seed", type=whole, default=0, metavar="N", help=text)
    add_device(group)
    group = parser.add_argument_group("output")
    text = "also write report.html, figures and tables to this folder"
    group.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    add_json(group)


def diagnose(args: Namespace) -> int:
    from sparring.core.devices import hardware, pick_device
    from sparring.experiments.diagnose import advice
    from sparring.experiments.diagnose import samplers as opponents
    from sparring.experiments.diagnose.measures import diagnose as measure
    from sparring.experiments.report import diagnosis
    from sparring.recipes.finding import named, short
    from sparring.training.folder import read_meta

    samplers = tuple(dict.fromkeys(name if name == "own" else named(name) for name in args.samplers))
    if args.draws < 2:
        raise UserError(f"--draws {args.draws} is too few: a variance needs at least 2")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file, not a folder")
    device = pick_device(args.device)
    if not args.run.is_dir():
        raise UserError(f"no such run folder: {args.run}")
    meta = read_meta(args.run)
    parts = _parts(args, meta)
    world = inputs.world(args.data or meta["source"]["data"])
    own = opponents.load_for_diagnosis(args.run, parts, device, args.recipe, args.trust, args.model)
    sample = diagnosis.SampleSize(min(args.queries, len(parts.train)), args.draws, args.seed)
    how = {"queries": args.queries, "draws": args.draws, "seed": args.seed, "world": world}
    measured = []
    for name in samplers:
        with console().status(f"measuring {short(name)}"):
            run = own if name == "own" else opponents.with_negatives_of(name, own, parts)
            measured.append(measure(short(name), run, parts, **how))
    tables, lines = advice.tables(measured), advice.advise(measured)
    shown = [part for each in tables.values() for part in (table(each.cells(), each.caption), "")]
    shown += [f"{line.kind}: {line.text}" for line in lines]
    if args.out is not None:
        with writing(args.out, args.out / LOCK):
            for name, each in {**tables, "advice": advice.as_table(lines)}.items():
                each.write(args.out, name)
            page = diagnosis.write(args.out, measured, lines, parts, meta, sample, hardware(device), command_line(args))
        shown.append(f"{page}: the complete report; {args.out}: figures, and tables as .md, .csv, .tex and .json")
    rows = [advice.row(each) for each in measured]
    record = {"run": str(args.run), **vars(sample), "samplers": rows, "advice": [vars(line) for line in lines]}
    return result(args, [record], *shown)


def _parts(args: Namespace, meta: dict[str, Any]) -> Split:
    """The run's data, split as in its training; if that is not recorded, the pairs of --data that it was trained on."""
    import numpy as np

    from sparring.data.interactions import Ids, Split
    from sparring.data.pairs import pair_keys
    from sparring.training.folder import read_eligibility, read_manifest, seen_interactions

    if args.data is None or (meta.get("source") or {}).get("data"):
        record = inputs.recorded(meta, args.run)
        data = inputs.read_recorded(meta, args.run, args.data, record["columns"])
        return inputs.split_recorded(data, meta, args.run, args.data)
    given, listed = inputs.read_data(args.data, {}), read_manifest(args.run)
    ids = Ids.load(args.run, listed)
    pairs = seen_interactions(ids, read_eligibility(listed, meta, ids).seen)
    queries = ids.query_ids.encode(given.query_ids.ids)[given.queries]
    items = ids.item_ids.encode(given.item_ids.ids)[given.items]
    known = (queries >= 0) & (items >= 0)
    keys = pair_keys(queries[known], items[known], pairs.n_items)
    train = pairs.subset(np.flatnonzero(np.isin(pair_keys(pairs.queries, pairs.items, pairs.n_items), keys)))
    if not len(train):
        raise UserError(f"{args.data} holds no training pair of {args.run}: give the data of its training")
    detail(args, f"measured on the {len(train):,} pairs of {args.data} that {args.run} was trained or validated on")
    return Split(train, None, None)
