"""The package never unpickles, evaluates or runs a string: nothing that it reads can become code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "sparring"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen")}
# Weights of an installed package, which has no other format; torch's restricted reader takes tensors only.
ALLOWED = {("data/modalities/images.py", "torch.load")}


def forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every import and call that can run code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.ImportFrom):
            pairs = ((node.module, each.name) for each in node.names)
            yield from ((node.lineno, ".".join(map(str, pair))) for pair in pairs if pair in LOADERS)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                yield node.lineno, called.id
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                pair = (called.value.id, called.attr)
                restricted = any(word.arg == "weights_only" and _is(word.value, True) for word in node.keywords)
                if pair in LOADERS:
                    yield node.lineno, ".".join(pair) + ("" if restricted or pair[1] != "load" else " of anything")
            for word in node.keywords:
                if word.arg in ("allow_pickle", "shell", "trust_remote_code") and not _is(word.value, False):
                    yield node.lineno, f"{word.arg}={ast.unparse(word.value)}"


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_that_is_read_becomes_code() -> None:
    """No module of the package imports a pickler or calls eval, exec, torch.load, yaml.load, a shell, or pickled
    arrays."""
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, name in forbidden(ast.parse(path.read_text(encoding="utf-8")))
        if (path.relative_to(SOURCE).as_posix(), name) not in ALLOWED
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "import shelve as s",
        "torch.load(f)",
        "torch.load(f, weights_only=True)",
        "from torch import load",
        "yaml.load(f)",
        "eval(x)",
        "exec(x)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "os.system(x)",
    ],
)
def test_the_search_finds(line: str) -> None:
    """Each forbidden form is found, so the test above can fail."""
    assert list(forbidden(ast.parse(line)))
