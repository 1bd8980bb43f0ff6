"""sparring doctor: true facts, and one line with advice for each thing that is wrong."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sparring
from sparring.cli import doctor, main
from sparring.core import devices
from sparring.kernels.native import library

Report = dict[str, Any]


@pytest.fixture
def examined(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> Callable[[], Report]:
    """The report of this environment, whose cache is empty; the exit code must say whether something is wrong."""
    monkeypatch.setenv("SPARRING_HOME", f"{tmp_path}/home")
    monkeypatch.setattr(devices, "usable_cores", lambda: 64)

    def examine() -> Report:
        capsys.readouterr()
        code = main(["doctor", "--json"])
        report: Report = json.loads(capsys.readouterr().out)
        assert code == (1 if report["wrong"] else 0)
        return report

    return examine


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that packages have these versions; None is a missing one."""
    true = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name.replace("-", "_"), true(name)))


def test_the_facts_are_true(examined: Callable[[], Report], capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, threads and extras are those of this environment, and the text names every section and its facts."""
    report = examined()
    assert report["versions"]["sparring"].split()[0] == sparring.__version__
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["threads"]["PyTorch"].split(",")[0] == str(torch.get_num_threads())
    assert set(report["extras"]) >= {"serve", "text", "tune"}
    main(["doctor"])
    text = capsys.readouterr().out
    for name, facts in report.items():
        if name != "wrong":
            assert name in text
            assert all(fact in text for fact in facts)


def test_old_and_missing_packages(examined: Callable[[], Report], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency that is old or missing is wrong, as is an old package of an extra; a missing extra is a fact."""
    before = examined()["wrong"]
    installed(monkeypatch, polars="1.2", xxhash=None, fastapi="0.1", optuna=None)
    report = examined()
    assert report["versions"]["xxhash"] == "missing"
    assert report["extras"]["tune"] == "missing: optuna"
    lines = [line for line in report["wrong"] if line not in before]
    assert [line.split()[0] for line in lines] == ["polars", "xxhash", "fastapi"]
    assert "1.2" in lines[0]
    assert ">=" in lines[0]
    assert "sparring[serve]" in lines[2]


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"cores": 0}, "OMP_NUM_THREADS=0"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY"),
        ({"SPARRING_HOME": "/proc/none"}, "SPARRING_HOME"),
        ({"free": 2**20}, "1 MiB left"),
        ({"version": "9.9"}, "Sparring 9.9 runs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_harm(
    changes: dict[str, Any], mention: str, examined: Callable[[], Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many threads, spinning threads, a cache that cannot be written, a full disk, two copies: a line each."""
    before = examined()["wrong"]
    usage = namedtuple("usage", "total used free")
    for name, value in changes.items():
        if name == "cores":
            monkeypatch.setattr(devices, "usable_cores", lambda: 0)
        elif name == "free":
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, changes["free"]))
        elif name == "version":
            monkeypatch.setattr(sparring, "__version__", value)
        else:
            monkeypatch.setenv(name, value)
    lines = [line for line in examined()["wrong"] if line not in before]
    assert lines
    assert all(mention in line or "disk" in line for line in lines)
    assert any(mention in line for line in lines)


def test_native_kernels_say_why_they_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a compiler, in a folder that others may write to, and where they are switched off."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path))
    monkeypatch.setattr(library, "active", True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler: no-such-compiler" in doctor.tools([])["native kernels"]
    monkeypatch.setenv("CXX", "true")
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    assert "chmod go-w" in doctor.tools([])["native kernels"]
    monkeypatch.setattr(library, "active", False)
    assert doctor.tools([])["native kernels"] == "off: SPARRING_NATIVE=0"


def test_two_packages_of_faiss(examined: Callable[[], Report], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages that share the module faiss are wrong; the facts say whether it builds graphs on a GPU."""
    pytest.importorskip("faiss")
    installed(monkeypatch, faiss_cpu="1.15.1", faiss_gpu_cuvs="1.15.1")
    assert any("faiss-gpu-cuvs" in line and "sparring[gpu-index]" in line for line in examined()["wrong"])
    installed(monkeypatch, faiss_cpu="1.15.1", faiss_gpu_cuvs=None)
    report = examined()
    assert not any("faiss-gpu-cuvs" in line for line in report["wrong"])
    assert "cagra" in report["tools"]["FAISS"]
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert "sparring[serve]" in examined()["tools"]["FAISS"]
