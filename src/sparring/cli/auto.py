"""sparring train --recipe auto: contenders on the validation part within a budget, and the best as a run folder."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparring.cli.inputs as inputs
from sparring.cli.screen import bar, detail, evaluation_tables, note, show, table
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.core.workers import Listener
    from sparring.data.interactions import Interactions, Split
    from sparring.experiments.auto import Choice
    from sparring.experiments.search import Budget

AUTO = "auto"
BUDGET = "10m"
RECORD = "auto.json"
SUMMARY = "tries recipes, models and settings on the validation part, and keeps or fuses the best."
# Options of a single training: auto decides what they say.
REFUSED = (
    "model",
    "setup",
    "warm",
    "epochs",
    "ranking",
    "nproc",
    "restarts",
    "shard_tables",
    "track",
    "save_seconds",
    "refit",
)


def asked(args: Namespace) -> bool:
    """Whether a training is to be chosen: by name, or because the folder to resume holds a search."""
    began = args.resume and args.out is not None and (args.out / RECORD).is_file()
    if began and args.recipe not in (None, AUTO):
        raise UserError(
            f"{args.out} was started with the recipe 'auto', not {args.recipe!r}: --resume cannot change it"
        )
    if args.recipe != AUTO and not began and (args.budget is not None or args.jobs != 1):
        option = "--budget" if args.budget is not None else "--jobs"
        raise UserError(f"{option} is for --recipe auto, which trains more than one run")
    return bool(args.recipe == AUTO or began)


def train_auto(args: Namespace) -> int:
    from sparring.core.devices import pick_device
    from sparring.experiments.auto import auto
    from sparring.experiments.search import Budget

    for name in REFUSED:
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} is for a single recipe: auto chooses models and settings itself, so leave it out"
            )
    settings = inputs.settings(args, "seed")
    for name in settings.keys() - {"select", "seed"}:
        raise UserError(f"auto chooses {name} itself: it takes select and seed only; --recipe NAME takes the others")
    pick_device(args.device)
    folder = args.out or Path("runs") / AUTO
    record = _record(folder) if args.resume else {}
    budget = Budget.parse(args.budget or record.get("budget", BUDGET))
    select, seed = settings.get("select", record.get("select")), settings.get("seed", record.get("seed", 0))
    data, parts, source = _again(args, record, folder) if record else _read(args, int(str(seed)))
    select = str(select or f"ndcg@{min(20, data.n_items)}")
    sizes = ", ".join(
        f"{name} {len(part):,}"
        for name, part in (("train", parts.train), ("valid", parts.valid), ("test", parts.test))
        if part is not None
    )
    detail(args, f"auto: {sizes} interactions; budget {budget.text}, by {select} on the validation part")
    with _listening(args.quiet, budget, float(record.get("seconds", 0.0))) as listener:
        try:
            choice = auto(
                parts,
                folder,
                budget=budget.text,
                select=select,
                seed=int(str(seed)),
                k=source["k"],
                jobs=args.jobs,
                device=args.device,
                source=source,
                resume=args.resume,
                overwrite=args.overwrite,
                listener=listener,
            )
        except KeyboardInterrupt as stop:
            raise type(stop)("the same command with --resume continues; finished trials are not run again") from None
    return _show(args, choice)


def _record(folder: Path) -> dict[str, Any]:
    from sparring.core.files import read_json

    path = folder / RECORD
    return read_json(path, "delete the folder, or choose another") if path.is_file() else {}


def _again(args: Namespace, record: dict[str, Any], folder: Path) -> tuple[Interactions, Split, dict[str, Any]]:
    """The data of an interrupted search, its parts and the record of their source."""
    data = inputs.read_recorded(record, folder, args.data, inputs.columns(args))
    return data, inputs.first_split(data, record, folder, args.data), inputs.recorded(record, folder)


def _read(args: Namespace, seed: int) -> tuple[Interactions, Split, dict[str, Any]]:
    """The data, its parts and the record of their source; in time, if it has times and no split was asked for."""
    from sparring.data.splits import split

    if args.data is None:
        raise UserError(f"--data is needed: {inputs.DATA}")
    data = inputs.read_data(args.data, inputs.columns(args))
    k, how = inputs.cutoffs_for(args.k, data.n_items), inputs.split_arguments(args, seed)
    if how["how"] == "auto" and data.time is not None and data.split is None:
        in_time = "leave-last-out" if data.is_order else "temporal"
        try:
            parts = split(data, **{**how, "how": in_time})
        except UserError as error:
            note(f"the data has times and cannot be split by them: {error.message}; it is split at random")
        else:
            detail(args, f"the data has times, so it is split by them (--split {in_time}): the latest part is the test")
            return data, parts, inputs.source(data, args.data, inputs.columns(args), {**how, "how": in_time}, k)
    return data, split(data, **how), inputs.source(data, args.data, inputs.columns(args), how, k)


@contextmanager
def _listening(quiet: bool, budget: Budget, spent: float) -> Iterator[Listener]:
    """A bar over the budget on a terminal; the library logs a line when a trial ends.

    A budget in time shows the time left, at every moment: a closed form takes minutes and reports nothing meanwhile.
    Trials differ too much for that, from a count to a complete training, so a number of them shows the time spent.
    """
    from rich.progress import ProgressColumn, Task, TimeElapsedColumn
    from rich.text import Text

    from sparring.core.workers import Listener
    from sparring.experiments.search import clock

    if quiet:
        yield Listener()
        return
    began, allowed = time.monotonic() - spent, budget.seconds

    class TimeLeft(ProgressColumn):
        def render(self, task: Task) -> Text:
            assert task.total is not None
            task.completed = min(time.monotonic() - began, task.total)
            return Text(f"{clock(task.total - task.completed)} left")

    with bar("trials", TimeElapsedColumn()) if allowed is None else bar("s", TimeLeft()) as drawn:
        done, total = (0, budget.trials) if allowed is None else (spent, allowed)
        task = drawn.add_task("", completed=int(done), total=total, note="", visible=False)

        def begin(phase: str, done: int, total: int) -> None:
            drawn.update(task, description=phase, visible=True)
            if allowed is None:
                drawn.update(task, completed=done)

        def said(name: str, message: Any) -> None:
            drawn.update(task, note=f"{name}, epoch {message['epoch']}")

        def ended(name: str, error: str | None) -> None:
            drawn.update(task, advance=1 if allowed is None else None, note="")

        yield Listener(begin=begin, said=said, ended=ended)


def _show(args: Namespace, choice: Choice) -> int:
    from sparring.core.files import read_json

    detail(args, "", table(choice.rows(), left=2))
    detail(args, *(f"{name}: not tried, {why}" for name, why in choice.left_out.items()))
    if choice.test is not None:
        for each in evaluation_tables(choice.test):
            detail(args, "", each)
    detail(args, "")
    names = " + ".join(trial.name for trial in choice.trials if trial.folder in choice.chosen and trial.value)
    metrics = read_json(choice.folder / "result.json").get("test", {}).get("metrics", {})
    cutoffs = sorted({int(name.split("@")[1]) for name in metrics})
    k = cutoffs[len(cutoffs) // 2] if cutoffs else 0
    figures = ", ".join(f"{name}@{k} {metrics[f'{name}@{k}']:.4f}" for name in ("recall", "ndcg") if metrics)
    show(f"{choice.folder}: {names}, {choice.seconds:.0f} s{f'; test {figures}' if figures else ''}")
    return 0
