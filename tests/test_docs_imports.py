"""README, docs and examples import public names only: those in `__all__` of `sparring` or of one of its packages."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparring

ROOT = Path(__file__).parents[1]
PUBLIC_MODULES = {  # they need an extra or matplotlib, so no package imports them
    "sparring.core.figure_style",
    "sparring.training.sentence_transformers",
    "sparring.training.text_evaluation",
    "sparring.training.text_trainer",
}


def sources() -> Iterator[tuple[str, str]]:
    """(where, Python) of every fenced block, script and notebook."""
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        blocks = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
        for number, (indent, block) in enumerate(blocks, 1):
            text = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
            yield f"{page.relative_to(ROOT)}, block {number}", text
    for script in sorted(ROOT.glob("examples/*.py")):
        yield str(script.relative_to(ROOT)), script.read_text()
    for notebook in sorted(ROOT.glob("examples/**/*.ipynb")):
        cells = json.loads(notebook.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        yield str(notebook.relative_to(ROOT)), "\n".join(code)


def public_names(module: str) -> list[str]:
    """The names in a package's `__all__`; for a public module, all top-level names without an underscore."""
    if module in PUBLIC_MODULES:
        tree = ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text())
        return [
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        ]
    imported = importlib.import_module(module)
    return list(getattr(imported, "__all__", ())) if hasattr(imported, "__path__") else []


def private_names(text: str) -> list[str]:
    """The imported or dotted names of a source that are not public."""
    private = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparring":
            listed = public_names(str(node.module))
            private += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in listed]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "sparring"]
            private += [name for name in names if name != "sparring"]
        elif isinstance(node, ast.Attribute):
            private += _private_attribute(ast.unparse(node))
    return private


def _private_attribute(dotted: str) -> list[str]:
    """`sparring.name` must be listed by `sparring`, and `sparring.package.name` by the package."""
    parts = dotted.split(".")
    if parts[0] != "sparring" or not all(part.isidentifier() for part in parts):
        return []
    if parts[1] not in sparring.__all__:
        return [dotted]
    owner = getattr(sparring, parts[1])
    listed = getattr(owner, "__all__", None) if len(parts) > 2 and not isinstance(owner, type) else None
    return [dotted] if listed is not None and parts[2] not in listed else []


@pytest.mark.parametrize(("where", "text"), [pytest.param(*found, id=found[0]) for found in sources()])
def test_only_public_names(where: str, text: str) -> None:
    """Pages import only public names, so that copied code keeps working."""
    assert private_names(text) == []


def test_private_names_are_found() -> None:
    """A private module, a private name of a public package, and a private attribute are each reported."""
    assert private_names("from sparring.core.types import Bag") == ["sparring.core.types.Bag"]
    assert private_names("from sparring.negatives import merged") == ["sparring.negatives.merged"]
    assert "sparring.cli" in private_names("import sparring\nsparring.cli.main()")
    assert private_names("from sparring.negatives import InBatch\nimport sparring\nsparring.read('x')") == []
