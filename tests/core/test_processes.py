"""How processes end early: by SIGTERM, with their cleanup, or soon after their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, time
from pathlib import Path
from sparring.core import processes

processes._POLL, processes._GRACE = 0.05, 0.3
processes.raise_on_termination()
if sys.argv[2] == "deaf":  # as in a call that waits for another rank
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
processes.end_with_parent(os.getppid())
try:
    Path(sys.argv[1], "pid").write_text(str(os.getpid()))
    time.sleep(60)
except processes.Terminated:
    Path(sys.argv[1], "note").write_text("cleaned up")
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["hearing", "deaf"])
def test_a_process_ends_soon_after_its_parent(tmp_path: Path, kind: str) -> None:
    """If the parent is killed with -9, a child cleans up and ends; one that hears no signal ends without cleanup."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(tmp_path), kind], env=environment) as parent:
        pid = int(_wait_for(tmp_path / "pid"))
        parent.kill()
    end = time.monotonic() + 20
    while _alive(pid):
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.02)
    assert (tmp_path / "note").exists() == (kind == "hearing")


def test_sigterm_is_an_exception_in_the_main_thread(tmp_path: Path) -> None:
    """SIGTERM to a process with a living parent runs its cleanup."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "hearing"], env=environment) as child:
        _wait_for(tmp_path / "pid")
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    assert (tmp_path / "note").read_text() == "cleaned up"


def _wait_for(path: Path) -> str:
    end = time.monotonic() + 20
    while not path.is_file() or not path.read_text():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.02)
    return path.read_text()


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("given", "expected", "spins"),
    [({}, "PASSIVE", 1000), ({"GOMP_SPINCOUNT": "70"}, "PASSIVE", 70), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None)],
)
def test_threads_soon_sleep_while_they_wait_unless_told_otherwise(
    given: dict[str, str], expected: str, spins: int | None
) -> None:
    """In a process that imports sparring first, PyTorch's OpenMP itself reports the policy when it is loaded."""
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    library = next(Path(found.origin).parent.glob("lib/libgomp*"), None)
    if library is None:
        pytest.skip("this build of PyTorch does not come with GNU OpenMP")
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | given
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"import ctypes, sparring; ctypes.CDLL({str(library)!r})"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert f"OMP_WAIT_POLICY = '{expected}'" in shown
    assert (f"GOMP_SPINCOUNT = '{spins}'" in shown) is (spins is not None)
