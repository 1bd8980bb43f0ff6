"""Imports point one way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "sparring"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file, by its full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def ours(path: Path) -> set[str]:
    """The parts of this package that a file imports: 'negatives', 'train', ..."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("sparring.")}


MODULES = {name_of(path): path for path in FILES}
LOW = [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in {"negatives", "losses", "kernels", "towers", "retriever"}]


def test_the_package_was_found() -> None:
    """The rules below look at real files."""
    assert {"sparring.types", "sparring.losses", "sparring.kernels.chunked", "sparring.negatives.batch"} <= set(MODULES)


def test_types_import_nothing_of_ours_but_their_own_part() -> None:
    """exclusion.py, what never counts, is the floor; types.py stands on it alone."""
    assert ours(MODULES["sparring.exclusion"]) == set()
    assert ours(MODULES["sparring.types"]) == {"exclusion"}


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("sparring.kernels")])
def test_kernels_import_only_torch_and_triton(name: str) -> None:
    """Kernels know tensors, not bags: torch, triton, the standard library, and each other."""
    for module in imported(MODULES[name]):
        root = module.split(".")[0]
        assert root in {"torch", "triton"} or root in sys.stdlib_module_names or module.startswith("sparring.kernels"), module


@pytest.mark.parametrize("name", LOW)
def test_parts_never_import_what_uses_them(name: str) -> None:
    """negatives, losses, kernels and towers know nothing of the loop, the recipes or the command line."""
    assert not ours(MODULES[name]) & {"train", "recipes", "cli", "runs", "report", "evaluation", "serve", "testing"}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(("sparring.cli", "sparring.__main__"))])
def test_only_the_command_line_imports_the_command_line(name: str) -> None:
    """cli is the roof."""
    assert "cli" not in ours(MODULES[name])


def test_nothing_that_ships_needs_pytest() -> None:
    """sparring.testing is plain asserts: importing it does not import pytest, hypothesis or scipy."""
    code = "import sys, sparring.testing; print(sorted({'pytest', 'hypothesis', 'scipy'} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    )
    assert out.stdout.strip() == "[]"


def test_no_cycles() -> None:
    """No module reaches itself through imports."""
    graph = {name: {other for other in MODULES if other != name and other in imported(path)} for name, path in MODULES.items()}
    for name in graph:
        graph[name] -= {other for other in graph[name] if name.startswith(other + ".")}  # a package initialises before its modules
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        assert state.get(name) != 1, f"cycle: {' -> '.join([*trail, name])}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for other in sorted(graph[name]):
            visit(other, [*trail, name])
        state[name] = 2

    for name in graph:
        visit(name, [])
