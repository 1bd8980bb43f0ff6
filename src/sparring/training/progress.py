"""The progress of a training on a screen: a bar over the steps of an epoch, and a line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console

from sparring.core.progress_bar import bar_on
from sparring.training.loop import TrainingProgress

_REDRAW = 0.2  # seconds between two readings of the loss, which wait for a GPU


def reporting(progress: TrainingProgress | bool | None, first: bool) -> AbstractContextManager[TrainingProgress]:
    """The callbacks that `fit` calls: those given; a bar on stderr, by default if that is a terminal; or none.

    Only the `first` of several ranks reports.
    """
    if isinstance(progress, TrainingProgress) and first:
        return nullcontext(progress)
    if first and (sys.stderr.isatty() if progress is None else progress):
        return progress_on(Console(file=sys.stderr, highlight=False))
    return nullcontext(TrainingProgress())


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
