"""A progress bar on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Count(ProgressColumn):
    """Done and total with their unit, and a note."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else f"{task.total:,.0f}"
        return Text(f"{task.completed:,.0f}/{total} {self.unit}  {task.fields['note']}")


def bar_on(screen: Console, unit: str, clock: ProgressColumn | None = None) -> Progress:
    """A progress bar, drawn on a terminal only: name, count, note, clock."""
    count = DownloadColumn() if unit == "bytes" else _Count(unit)
    columns = (TextColumn("{task.description}"), BarColumn(), count, clock or TimeRemainingColumn())
    drawn = screen.is_terminal
    # rich before 14.3 ends a bar that it did not draw with an empty line
    return Progress(*columns, console=screen if drawn else Console(quiet=True), transient=True, disable=not drawn)
