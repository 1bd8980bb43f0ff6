"""The argument parser of every command: errors of one line, and an example under its help."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from sparring.core.errors import UserError, did_you_mean


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
            message = f"{message.split(':')[0]}: {choice[1]!r} is not one of {', '.join(choices)}{did_you_mean(choice[1], choices)}"
        raise UserError(f"{message.replace(chr(10), ' ')}; see {self.prog} --help")

    def unknown(self, words: list[str]) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        word = words[0]
        self.error(
            f"unknown argument {word!r}{did_you_mean(word.split('=')[0], options) if word.startswith('-') else ''}"
        )
