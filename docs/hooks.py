"""Pages generated when the site is built: the Python reference from `__all__`, commands from argparse, settings."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent / "src"))

PACKAGES = {
    "sparring": "The names that most programs need.",
    "sparring.core": "The values that samplers and losses exchange.",
    "sparring.data": "Interactions: read, clean, split, batch; public and synthetic sets; modalities.",
    "sparring.models": "Towers, the retriever, clusters of items.",
    "sparring.negatives": "Samplers and the algebra that combines them.",
    "sparring.losses": "Losses and temperatures.",
    "sparring.recipes": "One function per published method.",
    "sparring.evaluation": "Ranking, metrics, statistics.",
    "sparring.training": "Fitting a run and reading its folder.",
    "sparring.experiments": "The estimator; comparing, tuning and diagnosing.",
    "sparring.serving": "Indexes, exports and the service.",
    "sparring.testing": "The contracts that every sampler and every tower keeps.",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections whose pages are found by looking: methods, lab, and the packages of the reference."""
    for section in config.nav or []:
        for title, pages in section.items():
            if title in ("Methods", "Lab"):
                folder = title.lower()
                names = sorted(path.name for path in (ROOT / folder).glob("*.md") if path.name != "index.md")
                pages[:] = [f"{folder}/index.md", *(f"{folder}/{name}" for name in names)]
            elif title == "Reference":
                pages += [{package: f"reference/{package}.md"} for package in PACKAGES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"index": _packages(), "commands": _commands(), "settings": _settings()}
    pages |= {package: _package(package) for package in PACKAGES}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _packages() -> str:
    rows = [f"| [`{name}`]({name}.md) | {text} |" for name, text in PACKAGES.items()]
    intro = (
        "# Reference\n\nThe public API is every name that one of these packages lists in `__all__`. Everything else is "
        "private and may change without notice.\n\n| package | content |\n|---|---|\n"
    )
    more = "\n\nThe command line has its own pages: [commands](commands.md) and [settings](settings.md).\n"
    return intro + "\n".join(rows) + more


def _package(name: str) -> str:
    """A page with an entry for every public class and function, and a list of the other public names."""
    package = importlib.import_module(name)
    text = (inspect.getdoc(package) or "").strip()
    entries, others = [], []
    for public in getattr(package, "__all__", ()):
        value = getattr(package, public)
        if isinstance(value, ModuleType):
            others.append(f"- [`{value.__name__}`]({value.__name__}.md)")
        elif (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("sparring"):
            entries.append(f"::: {value.__module__}.{value.__qualname__}")
        else:
            others.append(f"- `{public}`: {_value(value)}")
    listed = "\n\n".join(["## Also public", "\n".join(others)]) if others else ""
    return "\n\n".join(part for part in (f"# {name}", text, *entries, listed) if part) + "\n"


def _value(value: object) -> str:
    """A constant or a type alias in a few words."""
    choices = getattr(value, "__args__", None)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    text = str(value)
    return f"`{text}`" if len(text) < 100 else f"a `{type(value).__name__}`"


def _commands() -> str:
    from sparring.cli.main import parser as command_parsers

    _, commands = command_parsers()
    lines = [
        "# Commands",
        "",
        "Every command prints this with `--help`. Bad input is a one-line error and exit code 2.",
        "",
    ]
    for name, parser in commands.items():
        lines += [f"## sparring {name} {{ #{name.replace(' ', '-')} }}", "", _escaped(parser.description or ""), ""]
        if parser.epilog:
            lines += ["```", parser.epilog.removeprefix("example:").strip(), "```", ""]
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
            if not actions:
                continue
            title = (group.title or "").removesuffix(":")
            lines += [f"**{_escaped(title[:1].upper() + title[1:])}**", "", "| option | meaning |", "|---|---|"]
            lines += [f"| {_option(action)} | {_escaped(_help(action, parser))} |" for action in actions] + [""]
    return "\n".join(lines)


def _option(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else " " + _metavar(action)
    if not action.option_strings:
        return _code(_metavar(action))
    return ", ".join(_code(flag + value) for flag in action.option_strings)


def _code(text: str) -> str:
    return f"<code>{text.replace('|', '&#124;')}</code>"


def _metavar(action: argparse.Action) -> str:
    name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return name if isinstance(name, str) else " ".join(name)


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _settings() -> str:
    """A table for each group of settings, and one for those without a group."""
    from sparring.recipes.setup import GROUPS, SETTINGS, Setup, type_name

    defaults = Setup().flat()
    lines = [
        "# Settings",
        "",
        "Settings that every recipe shares, with the defaults of `Setup`. A recipe may start from others: "
        "`sparring recipes NAME` prints those, and the arguments of the recipe itself. Give a setting by its short name"
        " or with its group: `--set dim=256` and `--set model.dim=256` are the same.",
        "",
    ]
    for group in (*GROUPS, ""):
        text = inspect.getdoc(GROUPS[group]) if group else "Settings without a group."
        lines += [f"## {group or 'others'}", "", _escaped(text or ""), ""]
        lines += ["| setting | default | type | meaning |", "|---|---|---|---|"]
        for setting in SETTINGS.values():
            if setting.group == group:
                cells = (
                    _code(setting.name),
                    _code(_default(defaults[setting.name])),
                    type_name(setting.kind),
                    setting.description,
                )
                lines.append(f"| {cells[0]} | {cells[1]} | {_escaped(cells[2])} | {_escaped(cells[3])} |")
        lines.append("")
    return "\n".join(lines)


def _default(value: object) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "empty"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
