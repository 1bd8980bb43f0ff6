"""The README works as written: its Python runs, its commands parse, its extras and links exist, its lines are short."""

from __future__ import annotations

import re
import shlex
import tomllib
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparring
from sparring.cli.main import parser
from sparring.data import Interactions, Vocabulary, make_world
from sparring.testing import NegativesContract

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/guide/*.md")), ROOT / "docs" / "index.md"]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All Python of the README, run in order in one namespace; a small world with such ids replaces the demo set."""
    data = make_world(queries=400, items=200, exposure=0.4, seed=1).interactions
    world: Interactions = replace(data, query_ids=Vocabulary(list(range(1000, 1400))))
    namespace: dict[str, Any] = {"__name__": "readme"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparring.data, "load_set", lambda name: world)
        namespace["folder"] = tmp_path_factory.mktemp("readme")
        patch.chdir(namespace["folder"])
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_python_blocks_run(names: dict[str, Any]) -> None:
    """The quick start trains, measures baselines beside its run, does better than popularity, and recommends."""
    fitted = names["fitted"]
    assert fitted.test.metrics["ndcg@20"] > fitted.baselines["popularity"].metrics["ndcg@20"] > 0
    assert len(fitted.history) == 3
    assert fitted.recommend([1042], k=10).equals(sparring.load(names["folder"] / "runs/mine").recommend([1042], k=10))


def test_own_sampler_keeps_the_contract(names: dict[str, Any]) -> None:
    """The sampler of the README passes every test that its contract inherits."""
    proof = names["TestStratified"]()
    tests = [getattr(proof, name) for name in dir(NegativesContract) if name.startswith("test_")]
    assert len(tests) > 5
    skipped = set()
    for test in tests:
        try:
            test()
        except unittest.SkipTest:
            skipped.add(test.__name__)
    assert skipped == {"test_log_count_is_the_formula"}  # no formula was stated to test against


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    """The command line parses every sparring command of a page."""
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^ *(sparring .*)$", text, re.MULTILINE):
        _, unknown = parser()[0].parse_known_args(shlex.split(command.partition(" > ")[0], comments=True)[1:])
        assert not unknown, command


def test_every_page_is_checked() -> None:
    """The README and the guide show enough commands for the test above to mean something."""
    commands = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("sparring ")]
    assert len(commands) > 40


@pytest.mark.parametrize("page", [*PAGES[1:], *ROOT.glob("*.md")], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture of a page is a file of the repository or a generated page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|href)="([^":]+)"', text):
        assert (page.parent / target).exists() or "reference/" in target, target


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_named_modules_exist(page: str) -> None:
    """Every `package/module.py` that a page names is a module of the library."""
    modules = re.findall(r"`(?:src/sparring/)?([a-z_]+/[a-z_/]+\.py)`", (ROOT / page).read_text())
    assert modules
    for module in modules:
        assert (ROOT / "src" / "sparring" / module).exists() or (ROOT / module).exists(), module


def test_one_way_to_install() -> None:
    """Pages use the same names for extras, all of them exist, and the README lists each user-facing one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")):
        for words in re.findall(r"pip install [^\s]*sparring.*", path.read_text()):
            name = re.match(r'pip install (?:sparring\b(?!\[)|"sparring\[([\w{},-]+)\]")', words)
            assert name, f"{path}: {words}"
            assert set((name[1] or "serve").split(",")) <= {*extras, "NAME", "{extra}"}, f"{path}: {words}"
    listed = re.search(r"Extras: (.*?)\.\n", README, re.DOTALL)
    assert listed
    assert set(re.findall(r"`([\w-]+)`", listed[1])) == set(extras) - {
        "demo",
        "dev",
        "docs",
        "bench",
        "pgserver",
        "moto",
    }


def test_lines_are_short() -> None:
    """The first code is on the first screen, and no line of prose is longer than 120 characters."""
    lines = README.splitlines()
    assert next(i for i, line in enumerate(lines, 1) if line.startswith("```")) <= 15
    assert [line for line in lines if len(line) > 120] == []
