"""sparring reproduce: an experiment of a paper on some data, beside the published figures."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import sparring.cli.inputs as inputs
from sparring.cli.compare import add_study, closing, listening, short_names, study_table, writing_study
from sparring.cli.parsing import Commands, add_code, add_set, command_line, count, names
from sparring.cli.screen import detail, show, table
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.experiments.papers import Experiment, ItemModalities, PaperDataset, Reproduction

MSAC = "msac."  # prefix of the settings of the clusters: --set msac.steps=500


def add_reproduce(commands: Commands) -> None:
    parser = commands.add(
        "reproduce",
        "Train a table or figure of a paper on your data, and show it beside the published figures.",
        "sparring reproduce xir-table2 --data interactions.parquet --out reproduce/table2",
        reproduce,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="table or figure; without a name all are listed")
    inputs.add_several(parser, required=False)
    inputs.add_modalities(parser)
    add_code(parser, "recipe of the run of behaviour:RUN, if it is your own: FILE.py:FUNCTION")
    group = parser.add_argument_group("items")
    text = "column of the items with their categories (default: category)"
    group.add_argument("--category", default="category", metavar="COLUMN", help=text)
    text = "clusters that several tables share; missing ones are learned and saved there"
    group.add_argument("--codes", type=Path, metavar="FOLDER", help=text)
    group = parser.add_argument_group("training")
    text = "methods to train, by their folders: ngame,dexa; the tables show all that is trained (default: all)"
    group.add_argument("--methods", type=names, default=(), metavar="NAME,NAME", help=text)
    text = "number of seeds, which are 10, 20, ...; for XIR each also splits the data (default: 5)"
    group.add_argument("--seeds", type=count, default=5, metavar="N", help=text)
    text = "esans-...: first tune with N trials on the validation part"
    group.add_argument("--tune", type=count, default=0, metavar="N", help=text)
    text = "the same as --set epochs=N (default: as in the paper)"
    group.add_argument("--epochs", type=count, metavar="N", help=text)
    group.add_argument("--batch-size", type=count, metavar="N", help="the same as --set batch_size=N")
    text = "ngame-dexa: the same as --set encoder=NAME, such as minilm, bag or a folder"
    group.add_argument("--encoder", metavar="NAME", help=text)
    add_set(group, "change a setting of every recipe that has it: dim=256 or model.dim=256; repeatable")
    add_study(parser.add_argument_group("execution"), required=False)


def reproduce(args: Namespace) -> int:
    from sparring.experiments.papers import EXPERIMENTS
    from sparring.experiments.papers import reproduce as run_all

    if args.name is None:
        listed = [[each.name, each.line, each.source] for each in EXPERIMENTS.values()]
        show(table([["name", "result", "paper"], *listed], left=3))
        return 0
    plan = _plan(args)
    with writing_study(args.out), listening(args.quiet) as listener:
        results, page = run_all(plan, args.jobs, listener)
    shown = {each.shown for each in plan.data}
    rows = [row for row in results.table.rows if row["data"] in shown]
    detail(args, "", study_table(replace(results.table, rows=rows)), "", *results.findings)
    return closing(args, plan.failures, page, plan.out)


def _plan(args: Namespace) -> Reproduction:
    from sparring.experiments.papers import Reproduction, find, seeds

    experiment = find(args.name)
    if not args.data:
        raise UserError(f"--data is needed: {inputs.DATA}; repeat it for several")
    if args.out is None:
        raise UserError("--out is needed: the folder of its runs and tables")
    settings = inputs.settings(args, "epochs", "batch_size", "encoder")
    settings = {name: value for name, value in settings.items() if not name.startswith(MSAC)}
    inputs.check_settings([], trials=args.tune)
    data = tuple(
        _given(args, where, name, experiment) for where, name in zip(args.data, short_names(args.data), strict=True)
    )
    command, given = command_line(args), seeds(args.seeds)
    return Reproduction(
        experiment, args.out, data, given, settings, args.device, command, trials=args.tune, only=args.methods
    )


def _given(args: Namespace, where: str, name: str, experiment: Experiment) -> PaperDataset:
    from sparring.experiments.papers import PaperDataset

    given = inputs.columns(args)
    if "repeats" in given:
        raise UserError("the papers count every pair once: leave out --repeats keep")
    data = inputs.read_data(where, given)
    if data.weight is not None:
        data = replace(data, weight=None)  # the papers count every pair once
    record = inputs.source(data, where, given, {**experiment.protocol.arguments(0), "seed": 0}, [])
    known_as = experiment.known_as((data.n_queries, data.n_items, len(data)))
    return PaperDataset(name, data, known_as, record, _catalogue(args, name))


def _catalogue(args: Namespace, name: str) -> ItemModalities:
    """The modalities of --modality; behaviour alone by default."""
    from sparring.data.modalities.sources import parse_modalities
    from sparring.experiments.papers import ItemModalities

    settings = {key.removeprefix(MSAC): value for key, value in args.settings if key.startswith(MSAC)}
    specs = parse_modalities(args.modality) or {"behaviour": "behaviour"}
    folder = args.out / name / "codes" if args.codes is None else args.codes / name
    encoder, cache = args.text_encoder, args.cache
    return ItemModalities(folder, specs, encoder, cache, settings, args.category, args.recipe, args.trust)
