"""The progress of a training on a screen: a bar over the steps of an epoch, and a line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

from rich.console import Console

from sparring.core.progress_bar import bar_on
from sparring.training.loop import TrainingProgress

_REDRAW = 0.2  # seconds between two readings of the loss, which wait for a GPU


@contextmanager
def reporting(
    progress: TrainingProgress | bool | None,
    callbacks: Sequence[TrainingProgress],
    settings: Mapping[str, Any],
    first: bool,
) -> Iterator[TrainingProgress]:
    """All callbacks that `fit` calls, after `begin`; an exception is passed on after their `end`.

    Only the `first` of several ranks reports.
    """
    with _shown(progress, first) as shown:
        called = together([shown, *callbacks]) if first else shown
        try:
            called.begin(settings)
            yield called
        except BaseException:
            called.end(None)
            raise


def inner(callbacks: TrainingProgress) -> TrainingProgress:
    """The callbacks for a training inside another one, which calls `begin` and `end` itself."""
    nothing = TrainingProgress()
    return replace(callbacks, begin=nothing.begin, end=nothing.end)


def _shown(progress: TrainingProgress | bool | None, first: bool) -> AbstractContextManager[TrainingProgress]:
    """The callbacks given; a bar on stderr, by default if that is a terminal; or none."""
    if isinstance(progress, TrainingProgress) and first:
        return nullcontext(progress)
    if first and (sys.stderr.isatty() if progress is None else progress):
        return progress_on(Console(file=sys.stderr, highlight=False))
    return nullcontext(TrainingProgress())


def together(callbacks: Sequence[TrainingProgress]) -> TrainingProgress:
    """One set of callbacks that calls all of these, in order; it saves or stops where any of them says so."""
    if len(callbacks) == 1:
        return callbacks[0]

    def each(name: str) -> Any:
        def call(*values: Any) -> bool:
            answers = [bool(getattr(one, name)(*values)) for one in callbacks]  # all are called
            return any(answers)

        return call

    return TrainingProgress(**{field.name: each(field.name) for field in fields(TrainingProgress)})


@contextmanager
def progress_on(screen: Console) -> Iterator[TrainingProgress]:
    """Callbacks that draw a bar, if the screen is a terminal, and print a line per epoch."""
    with bar_on(screen, "steps") as drawn:
        task = drawn.add_task("training", total=None, note="", visible=False)
        epochs, steps, last = 0, 0, 0.0

        def start(n_epochs: int, n_steps: int) -> None:
            nonlocal epochs, steps
            epochs, steps = n_epochs, n_steps

        def step(epoch: int, step: int, loss: Callable[[], float]) -> None:
            nonlocal last
            now = time.monotonic()
            if drawn.disable or (now - last < _REDRAW and step < steps):
                return
            last, name, value = now, f"epoch {epoch + 1} of at most {epochs}", f"loss {loss():.4f}"
            drawn.update(task, description=name, total=steps, completed=step, note=value, visible=True)

        def epoch(record: dict[str, Any]) -> None:
            drawn.reset(task, visible=False)
            screen.print(epoch_line(record), markup=False, soft_wrap=True)

        yield TrainingProgress(start=start, step=step, epoch=epoch)


def epoch_line(record: Mapping[str, Any]) -> str:
    """One epoch in one line: loss, validation metrics, time."""
    parts = [f"epoch {record['epoch']:>3}", f"loss {record['loss']:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in record.items() if "@" in name]
    parts.append(f"{record['seconds']:.1f} s")
    return "  ".join(parts)
