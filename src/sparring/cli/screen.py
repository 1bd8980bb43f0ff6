"""The screen: lines and tables on stdout, notes on stderr, progress bars on a terminal, the log of the library."""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from sparring.core.choices import RANKINGS

if TYPE_CHECKING:  # rich is imported on first use: `sparring --help` prints without it
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text

    from sparring.evaluation.ranking import Evaluation
    from sparring.training.loop import TrainingProgress
    from sparring.training.trained import Trained


@cache
def console() -> Console:
    """Standard output. In a pipe it is wide enough that no title is cut."""
    from rich.console import Console

    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=max(screen.width, 160))


def show(*parts: RenderableType) -> None:
    """Print lines, literally and unwrapped, and tables."""
    from rich.table import Table

    for part in parts:
        console().print(part, markup=False, soft_wrap=not isinstance(part, Table))


def heading(line: str) -> Text:
    """A bold line."""
    from rich.text import Text

    return Text(line, style="bold")


def detail(args: Namespace, *parts: RenderableType) -> None:
    """Print, unless --quiet or --json was given."""
    if not quiet(args):
        show(*parts)


def result(args: Namespace, records: Sequence[object], *parts: RenderableType) -> int:
    """Print the result of a command, with --json as one line of JSON per record; the exit code."""
    if getattr(args, "json", False):
        print("\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    else:
        show(*parts)
    return 0


def quiet(args: Namespace) -> bool:
    return getattr(args, "quiet", False) or getattr(args, "json", False)


def note(line: str, kind: str = "note") -> None:
    """Print a note on stderr, so that stdout has only the result."""
    print(f"sparring: {kind}: {line}", file=sys.stderr)


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            show(record.getMessage())
        else:
            note(" ".join(record.getMessage().split()), record.levelname.lower())


def note_untrained(trained: Trained) -> None:
    """Note how many items no list can hold, if any."""
    n = len(trained.eligibility.items)
    if n:
        which = f"{n:,} items have" if n > 1 else "1 item has"
        note(f"{which} no training pair and cannot be recommended")


@contextmanager
def logged(quiet: bool) -> Iterator[None]:
    """Print the log of the library: INFO on stdout unless quiet and on rank 0 only, warnings on stderr."""
    logger = logging.getLogger("sparring")
    handlers, level = logger.handlers, logger.level
    logger.handlers = [_Printer()]
    logger.setLevel(logging.WARNING if quiet or os.environ.get("RANK", "0") != "0" else logging.INFO)
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.setLevel(level)


# Tables


def table(rows: Sequence[Sequence[object]], title: str | None = None, left: int = 1) -> Table:
    """A table whose first row is the header; the first `left` columns are text, the others figures."""
    from rich.table import Table
    from rich.text import Text

    filled = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="")
    for i, name in enumerate(rows[0]):
        text = i < left
        filled.add_column(
            str(name),
            justify="left" if text else "right",
            overflow="fold" if text else "ellipsis",
            no_wrap=not text,
        )
    for row in rows[1:]:
        filled.add_row(*(Text(str(cell)) for cell in row))  # Text: a title such as "[sic]" is not markup
    return filled


def evaluation_tables(result: Evaluation) -> list[Table]:
    """All metrics by cutoff; the strata at the middle cutoff; ten bins by training count, if there are propensities."""
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
        tables.append(table([["items by popularity", *columns], *body]))
    if result.bins and any(label.startswith("psp") for label in labels):
        columns = ["least", "most", "items", "pairs", f"precision@{k}", f"recall@{k}"]
        titles = ["training pairs from", "to", "items", "test pairs", f"part of precision@{k}", f"recall@{k}"]
        body = [
            [f"{row[name]:,.0f}" if i < 4 else f"{row[name]:.4f}" for i, name in enumerate(columns)]
            for row in result.bins
        ]
        tables.append(table([titles, *body], left=0))
    return tables


def stages_table(stages: Mapping[str, Evaluation]) -> Table:
    """One row per ranking of a run with classifiers, named as --ranking names them, at every cutoff."""
    titles = {stage: ranking for ranking, stage in RANKINGS.items()}
    kinds = ("precision", "ndcg", "psp", "recall")  # of any dialect
    names = [name for name in next(iter(stages.values())).metrics if name.split("@")[0].split("_")[0] in kinds]
    names.sort(key=lambda name: int(name.split("@")[1]))
    rows = [
        [titles.get(stage, stage), *(_figure(test.metrics.get(name)) for name in names)]
        for stage, test in stages.items()
    ]
    return table([["ranking", *names], *rows])


def beside_table(name: str, own: Evaluation, baselines: Mapping[str, Evaluation]) -> Table:
    """A run beside its baselines: recall and ndcg at every cutoff."""
    names = [each for each in own.metrics if each.startswith(("recall", "ndcg"))]
    names.sort(key=lambda each: int(each.split("@")[1]))
    rows = {name: own, **{f"{each} (baseline)": result for each, result in baselines.items()}}
    body = [[title, *(_figure(result.metrics.get(each)) for each in names)] for title, result in rows.items()]
    return table([["beside baselines", *names], *body])


def behind(own: Evaluation, baselines: Mapping[str, Evaluation]) -> list[str]:
    """A line for each baseline that does better than a run."""
    from sparring.training.baselines import behind, headline

    metric = headline(own.metrics)
    return behind(metric, own.metrics[metric], {name: each.metrics[metric] for name, each in baselines.items()})


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) > 1 else f"{value:.4f}"


# Progress


def bar(unit: str, clock: ProgressColumn | None = None) -> Progress:
    """A progress bar on stdout, drawn on a terminal only."""
    from sparring.core.progress_bar import bar_on

    return bar_on(console(), unit, clock)


@contextmanager
def progress(unit: str, quiet: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback that draws a bar on a terminal: the name of the stage, the number done, the total."""
    with bar(unit) as drawn:
        task, stage = drawn.add_task("", total=None, note="", visible=False), ""

        def update(name: str, done: int, total: int | None) -> None:
            nonlocal stage
            if name != stage:
                drawn.reset(task)
                stage = name
            drawn.update(task, description=name, completed=done, total=total, visible=not quiet)

        yield update


def training_progress(quiet: bool) -> AbstractContextManager[TrainingProgress]:
    """Callbacks for `fit`: a bar on a terminal and a line per epoch; nothing if quiet."""
    from sparring.training.loop import TrainingProgress
    from sparring.training.progress import progress_on

    return nullcontext(TrainingProgress()) if quiet else progress_on(console())
