"""The parser: one-line errors, types of values, and options that several commands share."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sparring.core.choices import RANKINGS
from sparring.core.errors import UserError, did_you_mean

OptionGroup = argparse._ActionsContainer  # a parser, or a group of its options
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt", start=1)
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the closest valid name, and whose help ends with an example."""

    def __init__(self, *, prog: str | None = None, description: str = "", example: str = "", add_help: bool = True):
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.replace(chr(10), ' ')}; see {self.prog} --help")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Raise the error for words that no argument takes."""
        options = [option for action in self._actions for option in action.option_strings]
        hint = did_you_mean(words[0].split("=")[0], options) if words[0].startswith("-") else ""
        self.error(f"unknown argument {words[0]!r}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(choices)}{hint}")


class Commands:
    """The commands of a parser. `named` has the parser of each by its name, such as "train" or "data show"."""

    def __init__(self, parser: Parser, named: dict[str, Parser] | None = None, prefix: str = "", **options: Any):
        self.named, self.prefix = {} if named is None else named, prefix
        self._group = parser.add_subparsers(parser_class=Parser, **{"metavar": "COMMAND", **options})

    def add(self, name: str, purpose: str, example: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        """Add a command: the sentence and the example of its help, and the function that runs it."""
        summary = purpose[0].lower() + purpose[1:].rstrip(".")
        parser: Parser = self._group.add_parser(name, help=summary, description=purpose, example=example)
        parser.set_defaults(parser=parser, command=run)
        self.named[self.prefix + name] = parser
        return parser


def name_users(parser: Parser) -> None:
    """Give each option with query in its name a second one with user: --query-column and --user-column are one."""
    for action in parser._actions:
        for option in list(action.option_strings):
            other = option.replace("queries", "users").replace("query", "user")
            if other not in parser._option_string_actions:
                action.option_strings = [*action.option_strings, other]
                parser._option_string_actions[other] = action


def command_line(args: argparse.Namespace) -> str:
    """The command as it was typed, for reports."""
    return shlex.join(["sparring", *args.words])


def place(word: str) -> Path | str:
    """The type of an argument that is a path or an address, such as s3://BUCKET/FILE.parquet."""
    return word if "://" in word else Path(word)


class HubRun(str):
    """The address of a run on the hub; `pull_runs` puts the folder of its copy in its place."""


def run_place(word: str) -> Path | HubRun:
    """The type of an argument that names a run."""
    return HubRun(word) if word.startswith("hf://") else Path(word)


def pull_runs(args: argparse.Namespace) -> None:
    """Download the runs of the hub that a command names."""

    def folder(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(folder, value))
        if isinstance(value, HubRun):
            from sparring.training.hub import pulled

            return pulled(value)
        return value

    for name, value in vars(args).items():
        setattr(args, name, folder(value))


# Options that several commands share


def add_run(group: OptionGroup) -> None:
    text = "run folder written by `sparring train`, or hf://OWNER/NAME[@REVISION] on the hub"
    group.add_argument("run", type=run_place, metavar="RUN", help=text)
    add_code(group)


def add_code(group: OptionGroup, text: str = "recipe of the run, if it is your own: FILE.py:FUNCTION") -> None:
    group.add_argument("--recipe", metavar="NAME", help=text)
    group.add_argument("--model", metavar="NAME", help=text.replace("recipe of", "model of"))
    add_trust(group)


def add_trust(group: OptionGroup) -> None:
    text = (
        "import the recipe and model that the run folder names: it runs code, so only for folders of people you trust"
    )
    group.add_argument("--trust", action="store_true", help=text)


def add_unfinished(group: OptionGroup) -> None:
    text = "also take a run whose training was interrupted: its best epoch so far"
    group.add_argument("--unfinished", action="store_true", help=text)


def add_device(group: OptionGroup) -> None:
    group.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda (default: auto)")


def add_set(
    group: OptionGroup, text: str = "change a setting: dim=256 or, with its group, model.dim=256; repeatable"
) -> None:
    group.add_argument(
        "--set", type=setting, action="append", default=[], dest="settings", metavar="NAME=VALUE", help=text
    )


def add_jobs(group: OptionGroup) -> None:
    text = "parallel trainings, with one thread each if more than one (default: 1)"
    group.add_argument("--jobs", type=count, default=1, metavar="N", help=text)


def add_ranking(group: OptionGroup, default: str = "the best on the validation part") -> None:
    text = f"towers alone, or for a run with classifiers those alone or both (default: {default})"
    group.add_argument("--ranking", choices=RANKINGS, default=None, help=text)


def add_novelty(group: OptionGroup) -> None:
    text = "correct scores for the popularity of items, 0 (not) to 1 (default: the run's setting, novelty)"
    group.add_argument("--novelty", type=novelty, metavar="N", help=text)


def add_baselines(group: OptionGroup) -> None:
    text = "do not measure popularity, TF-IDF of texts and the best cheap baseline as well"
    group.add_argument("--no-baselines", action="store_false", dest="baselines", help=text)


def add_json(group: OptionGroup) -> None:
    group.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_quiet(group: OptionGroup) -> None:
    group.add_argument("--quiet", action="store_true", help="print only the last line, warnings and errors")


# Types of values: each returns the value or raises a one-line error


def whole(text: str, least: int = 0) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def count(text: str) -> int:
    return whole(text, least=1)


def counts(text: str) -> list[int]:
    """2048,8192 -> [2048, 8192]."""
    return [count(part) for part in text.split(",")]


def cutoffs(text: str) -> tuple[int, ...]:
    """50,10,20 -> (10, 20, 50)."""
    return tuple(sorted(set(counts(text))))


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: it must be at least 0 and less than 1")
    return value


def target(text: str) -> float:
    """A recall: above 0, at most 1."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a recall: it must be above 0 and at most 1")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds: it must be above 0")
    return value


def novelty(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a novelty: it must be between 0 and 1")
    return value


def novelties(text: str) -> tuple[float, ...]:
    """0,0.3 -> (0.0, 0.3); curve -> 0.0, 0.1, ... 1.0."""
    if text.strip() == "curve":
        return tuple(step / 10 for step in range(11))
    return tuple(sorted({novelty(part) for part in text.split(",")}))


def constants(text: str) -> tuple[float, float]:
    """0.55,1.5 -> (0.55, 1.5)."""
    values = [number(part) for part in text.split(",")]
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers such as 0.55,1.5")
    return values[0], values[1]


def setting(text: str) -> tuple[str, str]:
    """lr=0.01 -> ("lr", "0.01")."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value, such as lr=0.01")
    return name.strip().replace("-", "_"), value.strip()


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):  # pick_device says that mps comes later
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: auto, cpu or cuda")
    return text


def names(text: str) -> tuple[str, ...]:
    """uns,bir -> ("uns", "bir")."""
    values = tuple(part.strip() for part in text.split(",") if part.strip())
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list: separate values by commas")
    return values


def size(text: str) -> int:
    """500MB -> 500,000,000; also kB, GB, KiB, MiB, GiB, or bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*?)(?:ytes?)?\s*", text.lower())
    value = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    return int(value)
