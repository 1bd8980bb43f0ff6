"""sparring compare: recipes x seeds x data sets, with the progress on the screen and the tables at the end."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparring.cli.inputs as inputs
from sparring.cli.config import add_config
from sparring.cli.parsing import (
    Commands,
    add_baselines,
    add_device,
    add_jobs,
    add_quiet,
    add_set,
    command_line,
    count,
    names,
    whole,
)
from sparring.cli.screen import bar, detail, show, table
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, writing

if TYPE_CHECKING:
    from rich.table import Table

    from sparring.core.workers import Failure, Listener
    from sparring.experiments.comparison import ComparedData, Comparison
    from sparring.experiments.report.tables import Table as ReportTable

TABLES = "figures, and tables as .md, .csv, .tex and .json"  # what a study writes beside its page
_GENERIC = {"interactions", "data", "pairs", "ratings", "events"}  # file names that say less than their folder's


def add_compare(commands: Commands) -> None:
    parser = commands.add(
        "compare",
        "Train recipes over several seeds on the same data, and test which differences are significant.",
        "sparring compare --data demo --recipes uns,ssl_pop,bir --seeds 5 --setup default --out compare/first",
        compare,
    )
    add_config(parser)
    inputs.add_several(parser)
    inputs.add_split(parser)
    group = parser.add_argument_group("comparison")
    text = "recipes to compare, also FILE.py:FUNCTION; `sparring recipes` lists them"
    group.add_argument("--recipes", type=names, required=True, metavar="NAME,NAME", help=text)
    text = "compare every recipe with each of these models, also FILE.py:FUNCTION; `sparring models` lists them"
    group.add_argument("--models", type=names, default=(), metavar="NAME,NAME", help=text)
    text = "train each recipe with the seeds 0..N-1 (default: 5)"
    group.add_argument("--seeds", type=count, default=5, metavar="N", help=text)
    text = "seed of the split, which all runs share (default: 0)"
    group.add_argument("--split-seed", type=whole, default=0, metavar="N", help=text)
    text = "take the model, optimiser and schedule of every run from this recipe"
    group.add_argument("--setup", metavar="RECIPE", help=text)
    text = "first tune each recipe with N trials on the validation part"
    group.add_argument("--tune", type=count, default=0, metavar="N", help=text)
    text = "train every run again on train and valid, for the epochs that validation chose, and test that"
    group.add_argument("--refit", action="store_true", help=text)
    text = "recipe, or row of the table, that the others are compared with (default: uns, else the first)"
    group.add_argument("--baseline", metavar="NAME", help=text)
    text, usual = "metrics to compare (default: recall@20,ndcg@20)", ("recall@20", "ndcg@20")
    group.add_argument("--metrics", type=names, default=usual, metavar="NAME@K,NAME@K", help=text)
    add_set(group, "change a setting of every recipe that has it: dim=256 or model.dim=256; repeatable")
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N")
    add_baselines(group)
    add_study(parser.add_argument_group("execution"), required=True)


def add_study(group: Any, required: bool) -> None:
    """--jobs, --device, --out and --quiet of a study."""
    add_jobs(group)
    add_device(group)
    text = "folder of all runs and tables; the same command again completes it"
    group.add_argument("--out", type=Path, required=required, metavar="FOLDER", help=text)
    add_quiet(group)


def compare(args: Namespace) -> int:
    from sparring.experiments import comparison_tables
    from sparring.experiments.comparison import compare as run_all
    from sparring.experiments.report import comparison_page

    plan = _plan(args)
    detail(args, *_notes(plan))
    with writing_study(args.out):
        with listening(args.quiet) as listener:
            failures = run_all(plan, args.jobs, listener)
        tables = comparison_tables.write(plan, failures, command_line(args))
        page = comparison_page.write(plan, tables, failures, command_line(args))
    for each in tables:
        if each.rows:
            detail(args, "", study_table(each))
    if told := comparison_tables.notes(plan, tables[0].rows):
        detail(args, "", *told)
    return closing(args, failures, page, plan.out)


def writing_study(out: Path) -> AbstractContextManager[None]:
    """Hold the folder of a study."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder for the study")
    return writing(out, out / LOCK)


def study_table(report: ReportTable) -> Table:
    """A table of a report for the screen; its leading text columns are aligned left."""
    return table(report.cells(), report.caption, left=sum(column.text for column in report.columns[:3]))


def _notes(plan: Comparison) -> list[str]:
    """Lines about deviations from the recipes: texts that are encoded, classifiers left out, arguments not tuned."""
    from sparring.experiments.search_space import untuned
    from sparring.recipes.finding import find
    from sparring.recipes.settings import resolve

    lines = [inputs.TEXTS_READ] if plan.shared.get("encoder") == "auto" else []
    setups = {
        name: resolve(find(method.recipe), method.settings, plan.base)[0] for name, method in plan.methods.items()
    }
    staged = [name for name, setup in setups.items() if setup.classifiers.epochs]
    if staged:
        lines.append(f"compared by their towers alone, without classifiers and fusion: {', '.join(staged)}")
    if plan.trials:
        kept = {name: untuned(method.recipe, method.settings) for name, method in plan.methods.items()}
        listed = "; ".join(f"{name}: {', '.join(arguments)}" for name, arguments in kept.items() if arguments)
        lines += [f"not tuned, kept at their defaults: {listed}"] if listed else []
    return lines


def closing(args: Namespace, failures: Sequence[Failure], page: Path, out: Path, written: str = TABLES) -> int:
    """Print the failures and where everything is; the exit code."""
    detail(args, "")
    show(*(f"failed: {each.data} {each.recipe} {each.what}: {each.error}" for each in failures))
    if failures:
        show(f"{len(failures)} failed; the same command tries them again")
    show(f"{page}: the complete report; {out}: {written}")
    return 1 if failures else 0


def _plan(args: Namespace) -> Comparison:
    from sparring.experiments.comparison import Comparison, cutoffs

    shared = inputs.settings(args, "epochs")
    if args.tune:
        shared.setdefault("select", args.metrics[-1])  # all recipes are tuned for the same metric
    base = inputs.base_setup(args)
    cutoffs(args.metrics)  # raises for unknown metrics
    recipes, baseline = args.recipes, args.baseline or ""
    plan = Comparison(
        args.out,
        (),
        recipes,
        args.seeds,
        baseline,
        args.metrics,
        base,
        shared,
        args.tune,
        args.device,
        args.models,
        args.refit,
        args.baselines,
    )
    inputs.check_settings([(method.recipe, method.settings) for method in plan.methods.values()], base, args.tune)
    data = tuple(_data(args, where, name) for where, name in zip(args.data, short_names(args.data), strict=True))
    if base is None and not args.models and inputs.only_texts_help(shared, *(each.split for each in data)):
        shared = {**shared, "encoder": "auto"}
    return dataclasses.replace(plan, data=data, shared=shared)


def _data(args: Namespace, where: str, name: str) -> ComparedData:
    from sparring.data.splits import split
    from sparring.experiments.comparison import ComparedData

    world, given, how = inputs.world(where), inputs.columns(args), inputs.split_arguments(args, args.split_seed)
    data = inputs.read_data(where, given)
    record = inputs.source(data, where, given, how, inputs.cutoffs_for(None, data.n_items))
    return ComparedData(name, split(data, **how), record, world)


def short_names(places: list[str]) -> list[str]:
    """A name for each data set, for its folder and rows: that of the file, or of its folder if that says more."""
    names: list[str] = []
    for place in places:
        path = Path(place)
        name = path.name if path.is_dir() or not path.exists() else path.stem
        if name in _GENERIC and path.exists():
            name = path.resolve().parent.name
        name = name.replace(":", "-") or "data"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


@contextmanager
def listening(quiet: bool) -> Iterator[Listener]:
    """Callbacks of a study: a bar over all trainings on a terminal, and a line when one ends; nothing if quiet."""
    from rich.progress import TimeElapsedColumn

    from sparring.core.workers import Listener

    if quiet:
        yield Listener()
        return
    with bar("trainings", TimeElapsedColumn()) as drawn:
        task = drawn.add_task("", total=None, note="", visible=False)
        last: dict[str, Any] = {}  # the last message of each running task

        def begin(phase: str, done: int, total: int) -> None:
            drawn.reset(task, description=phase, completed=done, total=total, note="", visible=True)
            show(f"{phase}: {done} of {total} already done" if done else f"{phase}: {total} to do")

        def said(name: str, message: Any) -> None:
            last[name] = message
            drawn.update(task, note="; ".join(f"{name} {_summary(message)}" for name, message in last.items()))

        def ended(name: str, error: str | None) -> None:
            message = last.pop(name, None)
            drawn.update(task, advance=1)
            outcome = "" if message is None else _summary(message)
            show(f"{name}: {outcome if error is None else f'failed: {error}'}")

        yield Listener(begin=begin, said=said, ended=ended)


def _summary(message: Any) -> str:
    """An epoch's record or a trial in a few words."""
    from sparring.experiments.tuning import Trial
    from sparring.training.progress import epoch_line

    if isinstance(message, Trial):
        outcome = f"failed: {message.error}" if message.value is None else f"{message.value:.4f}"
        return f"trial {message.number + 1}: {outcome}"
    return epoch_line(message)
