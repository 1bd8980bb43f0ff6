"""The packages stand in one order, and each imports only those before it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "sparring"
ROOMS = (
    "kernels",
    "core",
    "data",
    "models",
    "negatives",
    "losses",
    "recipes",
    "evaluation",
    "training",
    "experiments",
    "serving",
    "testing",
    "cli",
)
TOP = {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members
            if not members <= set(MODULES):
                names.add(str(node.module))
    return names


def room(module: str) -> str | None:
    """The package of Sparring that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "sparring" and parts[1] in ROOMS else None


def test_the_top_level_is_the_architecture() -> None:
    """The top level holds the packages and the public names, nothing else."""
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries - TOP == set(ROOMS)


@pytest.mark.parametrize("name", [name for name in MODULES if room(name)])
def test_imports_point_one_way(name: str) -> None:
    """A module imports its own package and earlier ones, inside functions too."""
    allowed = ROOMS[: ROOMS.index(str(room(name))) + 1]
    wrong = {module for module in imported(MODULES[name]) if (other := room(module)) and other not in allowed}
    assert not wrong


@pytest.mark.parametrize("name", [name for name in MODULES if room(name)])
def test_rooms_never_import_the_public_names(name: str) -> None:
    """Modules import from defining modules; from the top level only the version."""
    tops = {module for module in imported(MODULES[name]) if module.startswith("sparring.") and not room(module)}
    assert tops <= {"sparring.__version__"}


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "kernels"])
def test_kernels_import_only_torch_and_triton(name: str) -> None:
    """Kernels know tensors, not bags."""
    roots = {module.split(".")[0] for module in imported(MODULES[name])} - {"sparring"}
    assert roots <= {"torch", "triton"} | set(sys.stdlib_module_names)


def test_no_cycles() -> None:
    """No module reaches itself through imports."""
    graph = {
        name: {other for other in MODULES if other != name and other in imported(path)}
        for name, path in MODULES.items()
    }
    del graph["sparring"]  # loads the modules on first access
    for name in graph:
        reached, todo = set(), {name}
        while todo:
            todo = {other for module in todo for other in graph.get(module, ())} - reached
            reached |= todo
        assert name not in reached, f"{name} imports itself through others"


def test_nothing_that_ships_needs_pytest() -> None:
    """sparring.testing is plain asserts: importing it imports neither pytest, hypothesis nor scipy."""
    code = "import sys, sparring.testing; print(sorted({'pytest', 'hypothesis', 'scipy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.strip() == "[]"
