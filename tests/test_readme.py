"""What the README shows works as it stands."""

from __future__ import annotations

import re
import shlex
import tomllib
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparring.cli import arguments
from sparring.data import public_sets
from sparring.data.interactions import Interactions, Vocabulary
from sparring.data.synthetic import make_world
from sparring.testing import NegativesContract

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All Python of the README, run in order in one namespace; the demo set is a small world with the same kind of ids."""
    data = make_world(queries=60, items=80, exposure=0.4, seed=1).interactions
    world: Interactions = replace(data, query_ids=Vocabulary(list(range(1000, 1060))))
    namespace: dict[str, Any] = {"__name__": "readme"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public_sets, "load", lambda name, progress=None: world)
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_python_blocks_run(names: dict[str, Any]) -> None:
    """The quick start trains, measures and recommends."""
    assert names["fitted"].test.metrics["recall@20"] > 0
    assert len(names["fitted"].history) == 3


def test_own_sampler_keeps_the_contract(names: dict[str, Any]) -> None:
    """The sampler of the README passes every test that its two-line contract inherits."""
    proof = names["TestStratified"]()
    tests: list[Callable[[], None]] = [
        getattr(proof, name) for name in dir(NegativesContract) if name.startswith("test_")
    ]
    assert len(tests) > 5
    skipped = set()
    for test in tests:
        try:
            test()
        except unittest.SkipTest:
            skipped.add(test.__name__)
    assert skipped == {"test_log_count_is_the_formula", "test_gradient_bias_falls"}  # what nobody stated


def test_commands_parse() -> None:
    """Every sparring command of the README is one that the command line accepts."""
    commands = re.findall(r"^sparring .*$", README, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        _, rest = arguments.parser()[0].parse_known_args(shlex.split(command, comments=True)[1:])
        assert not rest


def test_one_way_to_install() -> None:
    """Extras are named alike everywhere, all of them exist, and the README lists each that a user may want."""
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    for path in (root / "README.md", *root.glob("docs/*.md"), *root.glob("src/**/*.py")):
        for line in path.read_text().splitlines():
            for said in re.findall(r"pip install [^\s]*sparring.*", line):
                name = re.match(r'pip install "sparring\[([\w{}-]+)\]"', said)
                assert name, f"{path}: {said}"
                assert name[1] in {*extras, "NAME", "{extra}"}, f"{path}: {said}"
    listed = re.search(r"^Extras.*$", README, re.MULTILINE)
    assert listed
    assert set(re.findall(r"`([\w-]+)`", listed[0])) == set(extras) - {"demo", "dev", "bench", "pgserver"}


@pytest.mark.parametrize("page", ["modalities.md", "serving.md"])
def test_commands_of_pages_parse(page: str) -> None:
    """Commands that go on where others ended are written as the command line takes them."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    commands = re.findall(r"^sparring .*$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        _, rest = arguments.parser()[0].parse_known_args(shlex.split(command, comments=True)[1:])
        assert not rest


def test_length() -> None:
    """At most 120 lines, with the first code by line 15."""
    lines = README.splitlines()
    assert len(lines) <= 120
    assert next(i for i, line in enumerate(lines, 1) if line.startswith("```")) <= 15
