"""The library of native kernels: compiled once, kept safely, and done without where that fails."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparring.kernels.native import library
from sparring.kernels.native.library import function

SOURCE = 'extern "C" int sparring_answer(int a) { return a + 41; }\n'
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, library.COMPILERS)), reason="needs a C++ compiler: c++, g++ or clang++"
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the library, which is one small file here."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(library, "HERE", sources)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "native"


def loaded() -> library.ctypes.CDLL | None:
    return library.library.__wrapped__()


def answer() -> int | None:
    made = loaded()
    return None if made is None else int(made.sparring_answer(1))


@needs_compiler
def test_the_second_process_finds_the_library(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first use compiles and says so in one line; the next loads the same file and says nothing."""
    caplog.set_level(logging.INFO)
    assert answer() == 42
    assert [record.message for record in caplog.records] == [
        f"compiling native kernels for this machine, once: {small}"
    ]
    (kept,) = small.iterdir()
    written = kept.stat().st_mtime_ns
    assert answer() == 42
    assert [path.stat().st_mtime_ns for path in small.iterdir()] == [written]
    assert len(caplog.records) == 1


@needs_compiler
def test_changed_sources_are_compiled_again(small: Path) -> None:
    """A library from other sources has another name, so it is not loaded."""
    assert answer() == 42
    (library.HERE / "answer.cpp").write_text(SOURCE.replace("41", "1"))
    assert answer() == 2
    assert len(list(small.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"no library"])
def test_a_damaged_file_is_replaced(small: Path, damage: bytes) -> None:
    """A file whose content does not have the hash in its name is never loaded."""
    assert answer() == 42
    (kept,) = small.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # the mapped file must stay as it is
    kept.write_bytes(whole[:-100] + damage)
    assert answer() == 42
    assert kept.read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(small: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is loaded from it, even if a good library is there; one line names the folder and the remedy."""
    assert answer() == 42
    small.chmod(mode)
    caplog.set_level(logging.INFO)
    assert loaded() is None
    assert [f"chmod go-w {small}" in record.message for record in caplog.records] == [True]


@needs_compiler
def test_a_folder_of_another_user_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in a folder that belongs to someone else is not loaded."""
    assert answer() == 42
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert loaded() is None


def test_without_a_compiler_there_is_one_line_and_no_library(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a compiler kernels are off, and the line says so."""
    monkeypatch.setenv("PATH", str(small))
    caplog.set_level(logging.INFO)
    assert loaded() is None
    assert ["no C++ compiler" in record.message for record in caplog.records] == [True]


@needs_compiler
def test_sources_that_do_not_compile_leave_nothing_behind(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failed build is one line with the compiler's error, and the folder stays empty."""
    (library.HERE / "answer.cpp").write_text("nonsense")
    caplog.set_level(logging.INFO)
    assert loaded() is None
    assert "error" in caplog.records[-1].message
    assert "\n" not in caplog.records[-1].message
    assert list(small.iterdir()) == []


def test_a_folder_that_cannot_be_made(small: Path) -> None:
    """A file in the place of the folder switches kernels off, and raises nothing."""
    small.parent.write_text("a file")
    assert loaded() is None


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """$SPARRING_HOME goes before $XDG_CACHE_HOME, and that before ~/.cache."""
    monkeypatch.setenv("SPARRING_HOME", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert library.folder() == Path("/a/native")
    monkeypatch.delenv("SPARRING_HOME")
    assert library.folder() == Path("/b/sparring/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert library.folder() == Path("/c/.cache/sparring/native")


CHILD = """
import sys
from pathlib import Path
from sparring.kernels.native import library
library.HERE = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(library.library().sparring_answer(1))
"""


@needs_compiler
def test_two_processes_at_once(small: Path) -> None:
    """Both compile and load a complete library, and one file remains."""
    command = [sys.executable, "-c", CHILD, str(library.HERE)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for child in both:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in both:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.communicate()[0] for child in both] == ["42\n", "42\n"]
    assert len(list(small.iterdir())) == 1


@needs_compiler
def test_the_kernels_run_on_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one OpenMP runtime in the process after loading, and torch.set_num_threads holds for kernels."""
    monkeypatch.setattr(library, "active", True)
    threads = function("threads", "")
    assert threads is not None
    before = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            assert threads() == n
    finally:
        torch.set_num_threads(before)
    runtime = library._openmp()
    assert runtime is not None
    assert Path(torch.__file__).parent in Path(runtime._name).parents


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, every kernel is None."""
    monkeypatch.setattr(library, "active", False)
    assert function("threads", "") is None
