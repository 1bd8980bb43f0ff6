"""AGENTS.md and llms.txt are true: the Python runs, the commands parse, the links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from sparring.cli.main import parser
from sparring.data.synthetic_world import make_world
from support.settings import quick

ROOT = Path(__file__).parents[1]
AGENTS = (ROOT / "AGENTS.md").read_text()


def test_the_five_calls_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of AGENTS.md, with a smaller setting, reads, splits, builds, fits and recommends."""
    world = make_world(120, 80, exposure=0.4, seed=1).interactions
    users = [f"u{query}" for query in world.queries]
    pl.DataFrame({"user_id": users, "item_id": world.items}).write_csv(tmp_path / "interactions.csv")
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", AGENTS, re.DOTALL)
    assert '{"epochs": 3}' in code
    names: dict[str, Any] = {}
    exec(code.replace('{"epochs": 3}', repr(quick(closed_form=0))), names)
    assert names["lists"].columns == ["query", "rank", "item", "score"]
    assert len(names["lists"]) == 10
    assert 0 <= names["fitted"].test.metrics["ndcg@20"] <= 1


def test_commands_parse() -> None:
    """The command line takes every sparring command of AGENTS.md."""
    commands = re.findall(r"^(sparring .*)$", AGENTS, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        assert not parser()[0].parse_known_args(shlex.split(command, comments=True)[1:])[1], command


def test_places_exist() -> None:
    """Every link of the two files, every folder of the table and every make target exists; lines are short."""
    text = AGENTS + (ROOT / "llms.txt").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target
    for row in re.findall(r"^\|.*`src/sparring/.*$", AGENTS, re.MULTILINE):
        for name in re.findall(r"`(?:src/sparring/)?(\w+)`", row):
            assert (ROOT / "src" / "sparring" / name).is_dir(), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", AGENTS, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for test in re.findall(r"tests/\w+/\w+\.py", AGENTS):
        assert (ROOT / test).is_file()
    assert not [line for line in text.splitlines() if len(line) > 120]
