"""sparring completion: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from sparring.cli.parsing import Commands, Parser
from sparring.core.extras import optional

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(commands: Commands, parser: Callable[[], Parser]) -> None:
    added = commands.add(
        "completion",
        "Print a script that completes the commands, options and files of `sparring` in a shell.",
        "sparring completion bash",
        lambda args: completion(args, parser()),
    )
    added.add_argument("shell", choices=SHELLS, help="shell that reads the script")


def completion(args: Namespace, root: Parser) -> int:
    shtab = optional("shtab", "completion", "a completion script")
    _complete_files(root, shtab.FILE)
    print(shtab.complete(root, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Let every argument that is a path complete to files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_files(each, files)
        elif action.type is Path or action.dest == "data":
            action.complete = files  # type: ignore[attr-defined]
