"""Config files of commands: TOML or JSON with the names of the options, or the run.json of a run; and their schema."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparring.cli.parsing import (
    OptionGroup,
    Parser,
    count,
    cutoffs,
    names,
    number,
    share,
    whole,
)
from sparring.core.errors import UserError, did_you_mean

OPTION = "--config"
SETTINGS = "settings"  # the table of what --set sets
_APART = ("config", "config_schema", "help")  # options that no file sets
_LISTS = {"type": "array", "minItems": 1}
# JSON types of options by the function that parses them; any other is text.
_TYPES: dict[Callable[..., Any], dict[str, Any]] = {
    count: {"type": "integer", "minimum": 1},
    whole: {"type": "integer", "minimum": 0},
    number: {"type": "number"},
    share: {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    cutoffs: {"anyOf": [{**_LISTS, "items": {"type": "integer", "minimum": 1}}, {"type": ["integer", "string"]}]},
    names: {"anyOf": [{**_LISTS, "items": {"type": "string"}}, {"type": "string"}]},
}


def add_config(group: OptionGroup) -> None:
    """--config and --config-schema."""
    text = "TOML or JSON file with the names of these options, or a run's run.json; the command line wins"
    group.add_argument(OPTION, type=Path, metavar="FILE", help=text)
    text = "print the JSON schema of that file, and exit"
    group.add_argument("--config-schema", action=_PrintSchema, nargs=0, default=None, help=text)


def expanded(words: list[str], commands: Callable[[], Mapping[str, Parser]]) -> list[str]:
    """The words of a command in which those of its config file stand for --config; `commands` makes new parsers."""
    parser = commands().get(words[0]) if _asks(words) else None
    if parser is None or OPTION not in parser._option_string_actions:
        return words
    for action in parser._actions:  # only what the command line gives
        action.required, action.default = False, argparse.SUPPRESS
    given = vars(parser.parse_known_args(words[1:])[0])
    path = given["config"]
    config = read_config(path, bool(given.get("trust")), given.get("recipe"))
    return [words[0], *_words(config, given, parser, path), *_without(words[1:])]


def _asks(words: list[str]) -> bool:
    """Whether the words name a config file and do not ask for help."""
    named = any(word == OPTION or word.startswith(f"{OPTION}=") for word in words)
    return named and not {"-h", "--help", "--config-schema"} & set(words)


def _without(words: list[str]) -> list[str]:
    """The words without --config and its value."""
    return [
        word
        for before, word in zip([None, *words], words, strict=False)
        if OPTION not in (word, before) and not word.startswith(f"{OPTION}=")
    ]


# Reading


def read_config(path: Path, trust: bool = False, recipe: str | None = None) -> dict[str, Any]:
    """The content of a config file, or the options that train the run of a run.json (or of its folder) again.

    A run.json may come from a stranger, so the code that it names is imported only with `trust`; `recipe` is the
    caller's copy of a recipe that is not ours.
    """
    path = path / "run.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise UserError(f"no such config file: {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path} as {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, not a table of options")
    return _options_of_run(config, path, trust, recipe) if {"format", "setup", "recipe"} <= config.keys() else config


def _options_of_run(meta: Mapping[str, Any], path: Path, trust: bool, recipe: str | None) -> dict[str, Any]:
    """The options of `sparring train` with which a run was trained."""
    from sparring.cli.inputs import COLUMNS, recorded
    from sparring.models import finding as models
    from sparring.recipes.finding import find, is_ours
    from sparring.recipes.settings import given
    from sparring.recipes.setup import parse_setup
    from sparring.training.folder import FORMAT

    if meta["format"] != FORMAT:
        raise UserError(f"{path} was written by another version of Sparring: give the options themselves")
    if "parts" in meta:
        raise UserError(f"{path} is of a fused run, which no single training makes: give the run.json of a source")
    setup = parse_setup(meta["setup"])
    found = meta["recipe"] if trust or is_ours(meta["recipe"]) else recipe
    for kind, name, known in (
        ("recipe", meta["recipe"], found is not None),
        ("model", setup.model.name, trust or models.is_ours(setup.model.name)),
    ):
        if not known:
            raise UserError(f"{path} names the {kind} {name}, which is not part of Sparring: add --trust to import it")
    options: dict[str, Any] = {"recipe": found}
    options[SETTINGS] = given(find(str(found)), setup, meta.get("arguments", {}))
    if meta.get("source"):
        source = recorded(meta, path.parent)
        options |= {"data": source["data"], "k": source["k"]}
        for name, value in source["columns"].items():
            options[f"{name}_column" if name in COLUMNS else name] = "all" if name == "catalogue" else value
        how = source["split"]
        options |= {"split": how["how"], "valid": how["valid"], "test": how["test"], "split_seed": how["seed"]}
    if "warm" in meta:
        options["warm"] = meta["warm"]["run"]
    return {**options, "refit": True} if "refit" in meta else options


def _words(config: Mapping[str, Any], given: Mapping[str, Any], parser: Parser, path: Path) -> Iterator[str]:
    """The options of a config as words, except those that the command line gives."""
    keys = _keys(parser)
    settings = _settings_given(given)
    for key, value in config.items():
        action = keys.get(key.replace("-", "_"))
        if action is None:
            hint = did_you_mean(key, keys)
            raise UserError(f"{path}: unknown key {key!r}{hint}; `{parser.prog} --config-schema` lists them")
        if action.dest == SETTINGS:
            yield from _set(value, settings, path)
        elif action.dest not in given and action.dest not in settings:
            yield from _option(action, key, value, path)


def _keys(parser: Parser) -> dict[str, argparse.Action]:
    """The options that a file may set, by their names in it: the option with underscores."""
    keys: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest in _APART or not action.option_strings:
            continue
        off = isinstance(action, argparse._StoreFalseAction)  # --no-baselines: the key is baselines
        listed = [] if off else [option[2:].replace("-", "_") for option in action.option_strings if option[2:]]
        keys |= dict.fromkeys([action.dest, *listed], action)
    return keys


def _settings_given(given: Mapping[str, Any]) -> set[str]:
    """The flat names of the settings that the command line gives, by --set or by a short form such as --epochs."""
    from sparring.recipes.setup import flat_name

    return {flat_name(name) for name, _ in given.get(SETTINGS, ())} | ({"epochs", "seed", "model"} & given.keys())


def _set(table: object, given: set[str], path: Path) -> Iterator[str]:
    """The words of --set for a table of settings, whose groups may be tables too."""
    from sparring.recipes.setup import flat_name

    if not isinstance(table, dict):
        raise UserError(f"{path}: {SETTINGS} is {table!r}; it must be a table of settings such as dim = 64")
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _set({f"{name}.{key}": each for key, each in value.items()}, given, path)
        elif flat_name(name) not in given:
            yield from ("--set", f"{name}={_text(value)}")


def _option(action: argparse.Action, key: str, value: Any, path: Path) -> list[str]:
    """The words of one option."""
    option = max(action.option_strings, key=len)
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction):
        if not isinstance(value, bool):
            raise UserError(f"{path}: {key} is {value!r}; it must be true or false")
        return [option] if value == action.const else []
    if isinstance(value, bool | dict) or value is None:
        raise UserError(f"{path}: {key} is {value!r}; it must be a value as for {option}")
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):
        return [f"{option}={_text(each)}" for each in value]
    return [f"{option}={_text(value)}"]


def _text(value: object) -> str:
    """A value as the command line has it."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)


# The schema


class _PrintSchema(argparse.Action):
    """Prints the schema and exits, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(json.dumps(schema(parser), indent=2))
        parser.exit()


def schema(parser: Parser) -> dict[str, Any]:
    """The JSON schema of the config file of a command."""
    from sparring.recipes.setup import settings_schema

    properties: dict[str, Any] = {}
    for key, action in _keys(parser).items():
        described = settings_schema() if action.dest == SETTINGS else _described(action)
        properties[key] = {**described, "description": action.help}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{parser.prog} {OPTION}",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _described(action: argparse.Action) -> dict[str, Any]:
    """The schema of an option's value."""
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction):
        return {"type": "boolean"}
    parsed: Any = action.type
    kind = {"type": "string"} if parsed in (None, Path) else _TYPES.get(parsed, {"type": ["string", "number"]})
    kind = {"enum": list(action.choices)} if action.choices is not None else kind
    if not isinstance(action, argparse._AppendAction):
        return kind
    return {"anyOf": [kind, {"type": "array", "items": kind}]}
