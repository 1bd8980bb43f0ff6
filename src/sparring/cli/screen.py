"""What the command line prints: tables, and the progress of a training."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sparring.evaluation.ranking import Evaluation
    from sparring.training.loop import TrainingProgress as Listener
    from sparring.training.trained import Trained

_REDRAW = 0.2  # seconds: reading a loss waits for a GPU, so it is read this often at most


def console() -> Console:
    """Where everything but errors goes. In a pipe, wide enough that no title is cut."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=max(screen.width, 160))


def tell(line: str) -> None:
    """A note or a warning: on stderr, so that what is printed stays what was asked for."""
    print(f"sparring: {line}", file=sys.stderr)


def tell_of_towers(trained: Trained) -> None:
    """A note where a run ranks by its classifiers too, and what was asked for cannot."""
    if trained.how() == "fused":
        tell(
            "note: this is of the towers alone: the classifiers of this run are left out, which `recommend` and `evaluate` use"
        )


@contextmanager
def telling() -> Iterator[None]:
    """Print warnings of the library, and of libraries below it, on stderr, one line each."""

    def warn(message: object, *_: object, **__: object) -> None:
        tell(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings(), _attached(_Printer(logging.WARNING, warn)):
        warnings.showwarning = warn
        yield


class _Printer(logging.Handler):
    """Prints the messages of one level and above, or with `most` up to another."""

    def __init__(self, level: int, write: Callable[[str], None], most: int = logging.CRITICAL) -> None:
        super().__init__(level)
        self.write, self.most = write, most

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno <= self.most:
            self.write(record.getMessage())


@contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    """The handler on the logger of the library, which lets its level pass meanwhile."""
    logger = logging.getLogger("sparring")
    level = logger.level
    logger.setLevel(min(handler.level, logger.getEffectiveLevel()))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def table(rows: Sequence[Sequence[object]], title: str | None = None, left: int = 1) -> Table:
    """A table whose first row is the header; the first `left` columns are text, the others figures."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="")
    for i, name in enumerate(rows[0]):
        made.add_column(
            str(name),
            justify="left" if i < left else "right",
            overflow="fold" if i < left else "ellipsis",
            no_wrap=i >= left,
        )
    for row in rows[1:]:
        made.add_row(*(Text(str(cell)) for cell in row))  # Text: a title such as "[sic]" is not markup
    return made


def evaluation_tables(result: Evaluation) -> list[Table]:
    """All metrics by cutoff; then the strata at the middle cutoff, and ten bins where propensities say that the tail matters."""
    cutoffs = sorted({int(name.split("@")[1]) for name in result.metrics})
    labels = dict.fromkeys(name.split("@")[0] for name in result.metrics)
    rows: list[list[object]] = [["metric", *(f"@{k}" for k in cutoffs)]]
    rows += [[label, *(_figure(result.metrics.get(f"{label}@{k}")) for k in cutoffs)] for label in labels]
    tables = [table(rows)]
    k = cutoffs[len(cutoffs) // 2]
    if result.strata:
        ranked = [f"{label}@{k}" for label in labels if label.startswith(("recall", "ndcg"))]
        columns = ["items", "queries", *ranked, f"share@{k}", f"coverage@{k}"]
        columns = [name for name in columns if any(name in values for values in result.strata.values())]
        body = [
            [stratum, *(_figure(values.get(name)) for name in columns)] for stratum, values in result.strata.items()
        ]
        tables.append(table([["items that are", *columns], *body]))
    if result.bins and any(label.startswith("psp") for label in labels):
        columns = ["least", "most", "items", "pairs", f"precision@{k}", f"recall@{k}"]
        titles = ["trained at least", "at most", "items", "test pairs", f"adds to precision@{k}", f"recall@{k}"]
        body = [
            [f"{row[name]:,.0f}" if i < 4 else f"{row[name]:.4f}" for i, name in enumerate(columns)]
            for row in result.bins
        ]
        tables.append(table([titles, *body], left=0))
    return tables


def stages_table(stages: Mapping[str, Evaluation]) -> Table:
    """The rankings of a training in stages, one row each, at every cutoff, by the names that --ranking has."""
    shown = {"knn": "encoder", "clf": "classifiers", "fusion": "fused"}
    first = next(iter(stages.values())).metrics
    names = [
        name for name in first if name.split("@")[0].split("_")[0] in ("precision", "ndcg", "psp", "recall")
    ]  # of any dialect
    names.sort(key=lambda name: int(name.split("@")[1]))
    rows = [
        [shown.get(stage, stage), *(_figure(test.metrics.get(name)) for name in names)]
        for stage, test in stages.items()
    ]
    return table([["ranking", *names], *rows])


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) > 1 else f"{value:.4f}"


def epoch_line(record: Mapping[str, Any]) -> str:
    """One epoch in one line: loss, validation metrics, time."""
    parts = [f"epoch {record['epoch']:>3}", f"loss {record['loss']:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in record.items() if "@" in name]
    parts.append(f"{record['seconds']:.1f} s")
    return "  ".join(parts)


@contextmanager
def listening(screen: Console, quiet: bool, intro: Sequence[str] = ()) -> Iterator[Listener]:
    """Callbacks for `fit`: a bar on a terminal, a line per epoch and the library's log anywhere; nothing where quiet."""
    from sparring.training.loop import TrainingProgress as Listener

    if quiet:
        yield Listener()
        return
    with bar_of(screen, "steps", TimeRemainingColumn()) as bar:
        lines = _Lines(screen, bar, intro)
        with _attached(_Printer(logging.INFO, lines.say, most=logging.INFO)):
            yield Listener(start=lines.start, step=lines.step, epoch=lines.epoch)


def bar_of(screen: Console, unit: str, clock: ProgressColumn) -> Progress:
    """A bar that shows on a terminal only: name, how many of how many, a note, a clock."""
    count = TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit + "  {task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(), count, clock)
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def both(
    first: Callable[[dict[str, Any]], None], second: Callable[[dict[str, Any]], None]
) -> Callable[[dict[str, Any]], None]:
    """A listener that tells two."""

    def listener(record: dict[str, Any]) -> None:
        first(record)
        second(record)

    return listener


class _Lines:
    def __init__(self, screen: Console, bar: Progress, intro: Sequence[str]) -> None:
        self.screen, self.bar, self.intro = screen, bar, intro
        self.epochs, self.steps, self.drawn = 0, 0, 0.0
        self.task = bar.add_task("training", total=None, note="", visible=False)

    def start(self, epochs: int, steps: int) -> None:
        self.epochs, self.steps = epochs, steps
        lines, self.intro = self.intro, ()  # once, though there may be several stages
        for line in lines:
            self.say(line)

    def step(self, epoch: int, step: int, loss: Callable[[], float]) -> None:
        now = time.monotonic()
        if self.bar.disable or (now - self.drawn < _REDRAW and step < self.steps):
            return
        self.drawn = now
        name = f"epoch {epoch + 1} of at most {self.epochs}"
        self.bar.update(
            self.task, description=name, total=self.steps, completed=step, note=f"loss {loss():.4f}", visible=True
        )

    def epoch(self, record: dict[str, Any]) -> None:
        self.bar.reset(self.task, visible=False)
        self.say(epoch_line(record))

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, soft_wrap=True)
