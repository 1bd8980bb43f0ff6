"""sparring book: every method of a plan on every set, equally tuned, and a page for each set, method and claim."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import sparring.cli.inputs as inputs
from sparring.cli.compare import add_study, closing, listening, writing_study
from sparring.cli.parsing import Commands, add_set, command_line, count, names, number
from sparring.cli.screen import detail, show

if TYPE_CHECKING:
    from sparring.experiments.book.running import Book


def add_book(commands: Commands) -> None:
    parser = commands.add(
        "book",
        "Tune and train every method of a plan on every set, and write a page for each set, method and claim.",
        "sparring book --sets groceries --methods uns,ssl_pop,xir --hours 0.5 --out book",
        book,
    )
    group = parser.add_argument_group("plan")
    text = "plan of your own, a TOML file (default: the plan of Sparring)"
    group.add_argument("--plan", type=Path, metavar="FILE", help=text)
    for name, text in (
        ("sets", "sets of the plan (default: all whose data is here)"),
        ("splits", "splits of the plan, such as random,temporal (default: all)"),
        ("models", "models of the plan, such as tables,sums (default: all)"),
        ("methods", "methods of the plan; popularity is always among them (default: all)"),
    ):
        group.add_argument(f"--{name}", type=names, default=(), metavar="NAME,NAME", help=text)
    text = "folder of data sets (default: $SPARRING_DATA)"
    group.add_argument("--data-root", type=Path, metavar="FOLDER", help=text)
    text = "trials of each repetition on the validation part (default: the plan's, 20)"
    group.add_argument("--trials", type=count, metavar="N", help=text)
    text = "repetitions of each method, each tuned anew (default: the plan's, 5)"
    group.add_argument("--repetitions", type=count, metavar="N", help=text)
    text = "book.json of other books that were made alike: their chapters stand before those of this one"
    group.add_argument("--join", type=Path, nargs="+", default=(), metavar="FILE", help=text)
    add_set(group, "change a setting of every method that has it: epochs=20 or dim=32; repeatable")
    group = parser.add_argument_group("execution")
    text = "end trainings after this time; the same command goes on later (default: no limit)"
    group.add_argument("--hours", type=hours, metavar="N", help=text)
    add_study(group, required=True)


def hours(text: str) -> float:
    value = number(text)
    if not 0 < value < 1e5:
        raise ArgumentTypeError(f"{text!r} is not a time in hours: it must be above 0")
    return value


def book(args: Namespace) -> int:
    from sparring.core import files
    from sparring.experiments.book import pages, results
    from sparring.experiments.book.running import run

    plan, others = _plan(args), [files.read_json(path) for path in args.join]
    for path, other in zip(args.join, others, strict=True):
        results.check_alike(results.plan_record(plan), plan.defaults, other, str(path))
    with writing_study(args.out):
        with listening(args.quiet) as listener:
            failures, left = run(plan, args.jobs, None if args.hours is None else 3600 * args.hours, listener)
        detail(args, "writing the pages")
        figures = results.collect(plan, failures, left, command_line(args))
        for path, other in zip(args.join, others, strict=True):
            figures = results.joined(figures, other, str(path))
        results.write(plan, figures)
        page = pages.write(args.out, figures)
    detail(args, "", *pages.findings(figures))
    if left:
        show(f"{len(left)} of {len(plan.cells)} cells are left, the next is {left[0].name}; the same command goes on")
    return closing(args, failures, page, args.out, "book.json and runs.csv with every run")


def _plan(args: Namespace) -> Book:
    from sparring.experiments.book.plan import chosen, read_plan
    from sparring.experiments.book.running import Book, available, default_root

    plan = chosen(read_plan(args.plan), args.sets, args.splits, args.models, args.methods)
    changes = {name: getattr(args, name) for name in ("trials", "repetitions") if getattr(args, name) is not None}
    root = args.data_root or default_root()
    plan, absent = available(dataclasses.replace(plan, **changes), root, named=bool(args.sets))
    detail(args, *(f"left out: {reason}" for reason in absent))
    inputs.check_settings([], trials=plan.trials)
    return Book(args.out, plan, root, args.device, inputs.settings(args), args.plan)
