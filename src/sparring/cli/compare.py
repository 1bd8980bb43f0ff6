"""sparring compare: recipes x seeds x data, with the progress on the screen and the tables at the end."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, TimeElapsedColumn

from sparring.cli import inputs, screen
from sparring.cli.values import count, device, names, setting, whole
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from sparring.core.workers import Failure, Listener
    from sparring.experiments.comparison import ComparedData, Comparison

_GENERIC = {"interactions", "data", "pairs", "ratings", "events"}  # file names that say nothing: the folder's name does


def options(parser: ArgumentParser) -> None:
    inputs.add_several(parser)
    inputs.add_split(parser)
    parser.add_argument(
        "--split-seed",
        type=whole,
        default=0,
        metavar="N",
        help="seed of the split, the same for every run (default: 0)",
    )
    group = parser.add_argument_group("what is compared")
    listed = "`sparring recipes` lists them; or FILE.py:FUNCTION"
    group.add_argument("--recipes", type=names, required=True, metavar="NAME,NAME", help=listed)
    group.add_argument(
        "--seeds", type=count, default=5, metavar="N", help="each recipe is trained with the seeds 0..N-1 (default: 5)"
    )
    group.add_argument(
        "--setup", metavar="RECIPE", help="take towers, optimiser and schedule of every run from this recipe"
    )
    group.add_argument(
        "--tune", type=count, default=0, metavar="N", help="first tune each recipe with N trials on validation"
    )
    group.add_argument(
        "--baseline", metavar="NAME", help="what the others are compared with (default: uns, else the first)"
    )
    group.add_argument(
        "--metrics",
        type=names,
        default=("recall@20", "ndcg@20"),
        metavar="NAME@K,NAME@K",
        help="(default: recall@20,ndcg@20)",
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
    group.add_argument("--epochs", type=count, metavar="N", help="the same as --set epochs=N")
    group = parser.add_argument_group("how it is run")
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
        required=True,
        metavar="FOLDER",
        help="for all runs and tables; the same command again does what is missing",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but failures and the last line")


def compare(args: Namespace) -> int:
    from sparring.experiments import comparison_tables
    from sparring.experiments.comparison import compare as run_all
    from sparring.experiments.report import comparison

    plan = _plan(args)
    show = screen.console()
    for line in () if args.quiet else _notes(plan):
        show.print(line, markup=False, soft_wrap=True)
    with listening(show, args.quiet) as listener:
        failures = run_all(plan, args.jobs, listener)
    command = shlex.join(["sparring", *sys.argv[1:]]) if sys.argv[1:2] == ["compare"] else ""
    tables = comparison_tables.write(plan, failures, command)
    page = comparison.write(plan, tables, failures, command)
    for table in tables:
        if table.rows and not args.quiet:
            show.print()
            cells = table.cells()
            show.print(screen.table(cells, table.caption, left=sum(column.text for column in table.columns[:3])))
    show.print()
    return closing(show, failures, page, plan.out)


def _notes(plan: Comparison) -> list[str]:
    """What is not as the recipes come: texts that are read, classifiers that are left out, arguments that are not tuned."""
    from sparring.experiments.search_space import untuned
    from sparring.recipes import finding, settings

    lines = [inputs.TEXTS_READ] if plan.shared.get("encoder") == "auto" else []
    setups = {
        name: settings.resolve(finding.find(method.recipe), method.settings, plan.base)[0]
        for name, method in plan.methods.items()
    }
    staged = [name for name, setup in setups.items() if setup.classifiers.epochs]
    if staged:
        lines.append(f"compared by their towers alone, without classifiers and fusion: {', '.join(staged)}")
    if plan.trials:
        kept = {name: untuned(method.recipe, method.settings) for name, method in plan.methods.items()}
        words = "; ".join(f"{name}: {', '.join(each)}" for name, each in kept.items() if each)
        lines += [f"not tuned, kept as they come: {words}"] if words else []
    return lines


def closing(show: Console, failures: Sequence[Failure], page: Path, out: Path) -> int:
    """The last lines: what failed, and where everything is; the exit code."""
    for failure in failures:
        show.print(
            f"failed: {failure.data} {failure.recipe} {failure.what}: {failure.error}", markup=False, soft_wrap=True
        )
    if failures:
        show.print(f"{len(failures)} failed; the same command tries them again", markup=False)
    show.print(
        f"{page}: the whole report; {out}: figures, and tables as .md, .csv, .tex and .json",
        markup=False,
        soft_wrap=True,
    )
    return 1 if failures else 0


def _plan(args: Namespace) -> Comparison:
    from sparring.experiments.comparison import Comparison, cutoffs
    from sparring.recipes import finding, settings

    if not args.data:
        raise UserError("--data is needed: a file, or the name of a set; repeat it for several")
    recipes, baseline = args.recipes, args.baseline or ""
    shared = inputs.settings(args, "epochs")
    if args.tune:
        shared.setdefault("select", args.metrics[-1])  # equal tuning includes what it aims at
    base = None if args.setup is None else settings.own_setup(finding.find(args.setup))
    cutoffs(args.metrics)  # wrong metrics are told before a long read
    if args.tune:
        from sparring.experiments.tuning import require_optuna

        require_optuna()
    plan = Comparison(args.out, (), recipes, args.seeds, baseline, args.metrics, base, shared, args.tune, args.device)
    for method in plan.methods.values():
        settings.resolve(finding.find(method.recipe), method.settings, base)
    data = tuple(_data(args, where, name) for where, name in zip(args.data, short_names(args.data), strict=True))
    if base is None and inputs.only_texts_help(shared, *(each.split for each in data)):
        shared = {**shared, "encoder": "auto"}
    return dataclasses.replace(plan, data=data, shared=shared)


def _data(args: Namespace, where: str, name: str) -> ComparedData:
    from sparring.data.splits import split
    from sparring.experiments.comparison import ComparedData

    world = inputs.world(where)
    data = world.interactions if world is not None else inputs.read_data(where, inputs.columns(args))
    parts = split(data, args.split, args.valid, args.test, args.split_seed)
    kept = Namespace(
        **{**vars(args), "data": where, "k": [k for k in (10, 20, 50) if k <= data.n_items] or [data.n_items]}
    )
    return ComparedData(name, parts, inputs.source(kept, data, args.split_seed), world)


def short_names(places: list[str]) -> list[str]:
    """A short name for each data set, for its folder and its rows: the file's, or its folder's where the file's says nothing."""
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
def listening(show: Console, quiet: bool) -> Iterator[Listener]:
    """A bar over all trainings on a terminal, and a line for each that ends, anywhere; nothing where quiet."""
    from sparring.core.workers import Listener

    if quiet:
        yield Listener()
        return
    with screen.bar_of(show, "trainings", TimeElapsedColumn()) as bar:
        yield _Lines(bar).listener()


class _Lines:
    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=None, note="", visible=False)
        self.last: dict[str, Any] = {}  # what each running task said last

    def listener(self) -> Listener:
        from sparring.core.workers import Listener

        return Listener(begin=self.begin, said=self.said, ended=self.ended)

    def begin(self, phase: str, done: int, total: int) -> None:
        self.bar.reset(self.task, description=phase, completed=done, total=total, note="", visible=True)
        self.say(f"{phase}: {done} of {total} already done" if done else f"{phase}: {total} to do")

    def said(self, name: str, message: Any) -> None:
        self.last[name] = message
        self.bar.update(self.task, note="; ".join(f"{task} {_now(message)}" for task, message in self.last.items()))

    def ended(self, name: str, error: str | None) -> None:
        message = self.last.pop(name, None)
        self.bar.update(self.task, advance=1)
        self.say(
            f"{name}: failed: {error}" if error is not None else f"{name}: {'' if message is None else _now(message)}"
        )

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, soft_wrap=True)


def _now(message: Any) -> str:
    """An epoch's record or a trial in a few words."""
    from sparring.experiments.tuning import Trial

    if isinstance(message, Trial):
        outcome = f"failed: {message.error}" if message.value is None else f"{message.value:.4f}"
        return f"trial {message.number + 1}: {outcome}"
    return screen.epoch_line(message)
