"""sparring reproduce: an experiment of a paper on some data, beside the published figures."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli import inputs, screen
from sparring.cli.modalities import add_modalities
from sparring.cli.values import count, device, setting
from sparring.core.errors import UserError

MSAC = "msac."  # begins the settings of the clusters: --set msac.steps=500

if TYPE_CHECKING:
    from sparring.experiments.papers import Experiment, ItemModalities, PaperDataset, Reproduction


def options(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="which table or figure; without a name all are listed")
    inputs.add_several(parser)
    add_modalities(parser)
    parser.add_argument(
        "--category",
        default="category",
        metavar="COLUMN",
        help="column of the items with categories (default: category)",
    )
    parser.add_argument(
        "--codes", type=Path, metavar="FOLDER", help="clusters for several tables; what is missing is learned there"
    )
    group = parser.add_argument_group("how it is run")
    group.add_argument(
        "--seeds", type=count, default=5, metavar="N", help="10, 20, ...; for XIR each is a split too (default: 5)"
    )
    group.add_argument(
        "--tune", type=count, default=0, metavar="N", help="esans-...: first tune with N trials on the validation part"
    )
    group.add_argument(
        "--epochs", type=count, metavar="N", help="the same as --set epochs=N (default: as in the paper)"
    )
    group.add_argument("--batch-size", type=count, metavar="N", help="the same as --set batch_size=N")
    group.add_argument(
        "--encoder", metavar="NAME", help="ngame-dexa: the same as --set encoder=NAME: minilm, bag, a folder, ..."
    )
    group.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="for every recipe that knows it",
    )
    group.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="trainings at once, with one thread each if several (default: 1)",
    )
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")
    group.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for all runs and tables; the same command again does what is missing",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but failures and the last line")


def reproduce(args: Namespace) -> int:
    if args.name is None:
        return _listing()
    from sparring.cli.compare import closing, listening
    from sparring.experiments.papers import reproduce as run_all

    plan = _plan(args)
    show = screen.console()
    with listening(show, args.quiet) as listener:
        results, page = run_all(plan, args.jobs, listener)
    if not args.quiet:
        show.print()
        given = {each.shown for each in plan.data}
        table = replace(results.table, rows=[row for row in results.table.rows if row["data"] in given])
        show.print(screen.table(table.cells(), table.caption, left=sum(column.text for column in table.columns[:3])))
        show.print()
        for line in results.findings:
            show.print(line, markup=False, soft_wrap=True)
    return closing(show, plan.failures, page, plan.out)


def _listing() -> int:
    from sparring.experiments.papers import EXPERIMENTS

    rows = [["name", "what", "from"], *([each.name, each.line, each.source] for each in EXPERIMENTS.values())]
    screen.console().print(screen.table(rows, left=3))
    return 0


def _plan(args: Namespace) -> Reproduction:
    from sparring.cli.compare import short_names
    from sparring.experiments.papers import Reproduction, find, seeds

    experiment = find(args.name)
    for option in ("data", "out"):
        if not getattr(args, option):
            what = (
                "a file, or the name of a set; repeat it for several"
                if option == "data"
                else "the folder for its runs and tables"
            )
            raise UserError(f"--{option} is needed: {what}")
    settings = inputs.settings(args, "epochs", "batch_size", "encoder")
    if args.tune:
        from sparring.experiments.tuning import require_optuna

        require_optuna()
    data = tuple(
        _given(args, where, name, experiment) for where, name in zip(args.data, short_names(args.data), strict=True)
    )
    settings = {name: value for name, value in settings.items() if not name.startswith(MSAC)}
    command = shlex.join(["sparring", *sys.argv[1:]]) if sys.argv[1:2] == ["reproduce"] else ""
    return Reproduction(experiment, args.out, data, seeds(args.seeds), settings, args.device, command, trials=args.tune)


def _given(args: Namespace, where: str, name: str, experiment: Experiment) -> PaperDataset:
    from sparring.experiments.papers import PaperDataset

    data = inputs.read_data(where, inputs.columns(args))
    if data.weight is not None:
        data = replace(data, weight=None)  # the papers count every pair once
    made = {name: value for name, value in experiment.protocol.arguments(0).items() if name != "seed"}
    kept = Namespace(**{**vars(args), "data": where, "split": made.pop("how"), **made, "k": []})
    known_as = experiment.known_as((data.n_queries, data.n_items, len(data)))
    return PaperDataset(name, data, known_as, inputs.source(kept, data, 0), _catalogue(args, name))


def _catalogue(args: Namespace, name: str) -> ItemModalities:
    """The modalities that were asked for; behaviour alone where none was."""
    from sparring.data.modalities.sources import parse_modalities
    from sparring.experiments.papers import ItemModalities

    own = {key.removeprefix(MSAC): value for key, value in args.settings if key.startswith(MSAC)}
    specs = parse_modalities(args.modality) or {"behaviour": "behaviour"}
    folder = args.out / name / "codes" if args.codes is None else args.codes / name
    return ItemModalities(folder, specs, args.text_encoder, args.cache, own, args.category)
