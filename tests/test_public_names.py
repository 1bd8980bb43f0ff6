"""The public names: listed once at run time and once for type checkers, and both lists agree."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import sparring

PACKAGE = Path(sparring.__file__).parent
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def stub_names() -> dict[str, str]:
    """{name: module} that the stub declares."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def test_the_stub_lists_the_public_names() -> None:
    """Type checkers see the names that can be imported, from the modules that define them."""
    stub = stub_names()
    assert set(stub) == set(sparring.__all__)
    for name, module in stub.items():
        assert getattr(sparring, name) is getattr(importlib.import_module(module), name)


def test_unknown_names_are_refused() -> None:
    """A misspelt name raises AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="reed"):
        sparring.reed  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_what_lives_there(package: str) -> None:
    """Every package has a docstring, and every name in its __all__ exists."""
    module = importlib.import_module(f"sparring.{package}")
    assert module.__doc__
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_the_package_is_typed() -> None:
    """py.typed ships with the package, so type checkers read its annotations."""
    assert (PACKAGE / "py.typed").is_file()
