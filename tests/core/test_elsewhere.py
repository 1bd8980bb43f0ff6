"""macOS and Windows: no module needs, when it is imported, what only Linux has, and locks hold there as here."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import sparring
from sparring.cli.parsing import device
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from support import elsewhere

PACKAGE = Path(sparring.__file__).parent
# Modules for GPUs, which `kernels` imports only where Triton is.
TRITON = {
    path for path in (PACKAGE / "kernels").glob("*.py") if re.search(r"^(import|from) triton", path.read_text(), re.M)
}
# The modules that ask whether a name is there before they use it. /proc and /sys need no list: a file may be missing.
GUARDED = {"core/devices.py", "core/files.py", "core/memory_usage.py", "serving/http/connection.py"}
GUARDED |= {"serving/http/server.py", "serving/http/workers.py", "serving/http/worker.py"}  # the last by the one before


def elsewhere_python(libraries: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process without the names that other systems lack, hidden once it has imported the libraries."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    words = [sys.executable, elsewhere.__file__, libraries, code, *arguments]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment, text=True, **streams)  # type: ignore[call-overload, no-any-return]


LIBRARIES = (
    "asyncio fastapi faiss httptools matplotlib.figure multiprocessing.pool orjson polars prometheus_client rich "
)
LIBRARIES += "safetensors.torch subprocess torch torch.distributed torch.testing xxhash"
IMPORTS = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from sparring.core import memory_usage
from sparring.core.devices import usable_cores
assert memory_usage.machine_bytes() == {elsewhere.TOTAL}
assert memory_usage.available_bytes() == {elsewhere.FREE}
assert memory_usage.resident_bytes() == memory_usage.peak_bytes() == 0
assert usable_cores() >= 1
"""


def test_every_module_imports_without_the_names_of_linux() -> None:
    """No fcntl, resource, uvloop, Triton, fork, affinity or /proc: all modules import, and memory is still known."""
    names = []
    for path in sorted(set(PACKAGE.rglob("*.py")) - TRITON):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    names.remove("sparring.__main__")
    process = elsewhere_python(LIBRARIES, IMPORTS, *names)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def test_names_of_linux_are_used_behind_a_guard() -> None:
    """A name or module that another system lacks occurs only in the modules that provide for its absence."""
    lacking = {(home.__name__, name) for home, names in elsewhere.NAMES.items() for name in names}
    found = {}
    for path in sorted(set(PACKAGE.rglob("*.py")) - TRITON):
        for node in ast.walk(ast.parse(path.read_text())):
            used = isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in lacking
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
                used = any((str(node.module), each.name) in lacking for each in node.names)
            if used or any(name.split(".")[0] in elsewhere.MODULES for name in names):
                found[path.relative_to(PACKAGE).as_posix()] = ast.unparse(node)
    outside = {place: use for place, use in found.items() if place not in GUARDED and not place.startswith("kernels/")}
    assert not outside
    assert set(found) >= GUARDED, "a module no longer needs a guard"


LOCKS = """
import os, pathlib, sys
from filelock import FileLock, SoftFileLock
from sparring.core.locks import HeldError, Lock, is_held
assert FileLock is SoftFileLock
path = pathlib.Path(sys.argv[1])
assert not is_held(path)
lock = Lock(path)
assert is_held(path)
lock.release()
assert not path.exists()
lock = Lock(path)
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""
ASKS = """
import pathlib, sys
from sparring.core.locks import HeldError, Lock, is_held
path = pathlib.Path(sys.argv[1])
held = is_held(path)
try:
    Lock(path).release()
    print(held, "free")
except HeldError as error:
    print(held, error.owner)
"""


def test_locks_without_locks_of_the_system(tmp_path: Path) -> None:
    """Without file locks of the system, a lock excludes other processes and names its holder until its release."""
    path = tmp_path / ".lock"

    def asked() -> str:
        answer, errors = elsewhere_python("", ASKS, str(path)).communicate(timeout=60)
        assert answer, errors
        return answer.strip()

    with elsewhere_python("", LOCKS, str(path)) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert asked() == f"True process {holder.pid} on {socket.gethostname()}"
        print(file=holder.stdin, flush=True)
        assert holder.stdout.readline() == "released\n"
        assert asked() == "False free"
        holder.kill()
    assert not path.exists()


def test_the_gpu_of_a_mac_is_refused_in_one_line() -> None:
    """Whatever PyTorch offers, `mps` is an error that says what to use."""
    with pytest.raises(UserError, match="--device cpu"):
        pick_device(device("mps"))
