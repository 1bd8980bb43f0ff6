"""Values as words of a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings as name=value."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()
    )


def command_lines(command: str) -> str:
    """A shell command with each option on its own line; browsers would break long lines inside an option."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    return "".join(
        (" \\\n    " if word.startswith("--") else " " if place else "") + word for place, word in enumerate(words)
    )


def distinct(values: Iterable[str]) -> str:
    """Each value once, in order of appearance."""
    return "; ".join(dict.fromkeys(values))


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)
