"""The argument parser of every command: errors of one line, and an example under its help."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from sparring.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with the nearest valid name, and whose help ends with an example."""

    def __init__(
        self,
        *,
        prog: str | None = None,
        description: str | None = None,
        example: str | None = None,
        add_help: bool = True,
    ):
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if choice:
            choices = [name.strip(" '\"") for name in choice[2].split(",")]
            message = f"{message.split(':')[0]}: {choice[1]!r} is not one of {', '.join(choices)}{nearest(choice[1], choices)}"
        raise UserError(f"{message.replace(chr(10), ' ')}; see {self.prog} --help")

    def unknown(self, words: list[str]) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        word = words[0]
        self.error(f"unknown argument {word!r}{nearest(word.split('=')[0], options) if word.startswith('-') else ''}")


def nearest(name: str, names: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
