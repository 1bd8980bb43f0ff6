"""sparring reproduce: an experiment of a paper on some data, beside the published figures."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from sparring.cli import inputs, screen
from sparring.errors import UserError

MSAC = "msac."  # begins the settings of the clusters: --set msac.steps=500

if TYPE_CHECKING:
    from sparring.reproduce import Catalogue, Experiment, Given, Plan


def reproduce(args: Namespace) -> int:
    if args.name is None:
        return _listing()
    from sparring.cli.compare import listening
    from sparring.reproduce import reproduce as run_all

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
    for failure in plan.failures:
        show.print(f"failed: {failure.data} {failure.recipe} {failure.what}: {failure.error}", markup=False, soft_wrap=True)
    if plan.failures:
        show.print(f"{len(plan.failures)} failed; the same command tries them again", markup=False)
    where = f"{page}: the whole report; {plan.out}: figures, and tables as .md, .csv, .tex and .json"
    show.print(where, markup=False, soft_wrap=True)
    return 1 if plan.failures else 0


def _listing() -> int:
    from sparring.reproduce import EXPERIMENTS

    rows = [["name", "what", "from"], *([each.name, each.line, each.source] for each in EXPERIMENTS.values())]
    screen.console().print(screen.table(rows, left=3))
    return 0


def _plan(args: Namespace) -> Plan:
    from sparring.cli.compare import short_names
    from sparring.reproduce import Plan, find, seeds

    experiment = find(args.name)
    for option in ("data", "out"):
        if not getattr(args, option):
            what = "a file, or the name of a set; repeat it for several" if option == "data" else "the folder for its runs and tables"
            raise UserError(f"--{option} is needed: {what}")
    settings: dict[str, object] = dict(args.settings)
    for name in ("epochs", "batch_size", "encoder"):
        value = getattr(args, name)
        if value is not None and name in settings:
            raise UserError(f"{name} is set twice: by --{name.replace('_', '-')} and by --set {name}={settings[name]}")
        if value is not None:
            settings[name] = value
    if args.tune:
        from sparring.tune import require_optuna

        require_optuna()
    data = tuple(_given(args, where, name, experiment) for where, name in zip(args.data, short_names(args.data), strict=True))
    settings = {name: value for name, value in settings.items() if not name.startswith(MSAC)}
    command = shlex.join(["sparring", *sys.argv[1:]]) if sys.argv[1:2] == ["reproduce"] else ""
    return Plan(experiment, args.out, data, seeds(args.seeds), settings, args.device, command, trials=args.tune)


def _given(args: Namespace, where: str, name: str, experiment: Experiment) -> Given:
    from sparring.reproduce import Given

    data = inputs.read_data(where, inputs.columns(args))
    if data.weight is not None:
        data = replace(data, weight=None)  # the papers count every pair once
    made = {name: value for name, value in experiment.protocol.recorded(0).items() if name != "seed"}
    kept = Namespace(**{**vars(args), "data": where, "split": made.pop("how"), **made, "k": []})
    known_as = experiment.known((data.n_queries, data.n_items, len(data)))
    return Given(name, data, known_as, inputs.source(kept, data, 0), _catalogue(args, name))


def _catalogue(args: Namespace, name: str) -> Catalogue:
    """The modalities that were asked for; behaviour alone where none was."""
    from sparring.data.modality_sources import parse_modalities
    from sparring.reproduce import Catalogue

    own = {key.removeprefix(MSAC): value for key, value in args.settings if key.startswith(MSAC)}
    specs = parse_modalities(args.modality) or {"behaviour": "behaviour"}
    folder = args.out / name / "codes" if args.codes is None else args.codes / name
    return Catalogue(folder, specs, args.text_encoder, args.cache, own, args.category)
