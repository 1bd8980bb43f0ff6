"""sparring doctor: the facts that a bug report needs, and what is wrong with this installation."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparring.cli.parsing import Commands, add_json
from sparring.cli.screen import result

Facts = dict[str, str]
Problems = list[str]
_LEAST = 2**30  # bytes of memory or disk that any training needs
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")  # those that matrices use
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "POLARS_MAX_THREADS")
_NOT_LISTED = ("bench", "dev", "docs")  # extras for work on Sparring itself


def add_doctor(commands: Commands) -> None:
    purpose = "Print versions, devices, extras and settings for a bug report, and what is wrong."
    add_json(commands.add("doctor", purpose, "sparring doctor", doctor))


def doctor(args: Namespace) -> int:
    """Print the sections, then one line per problem; 1 if there is any."""
    problems: Problems = []
    found = {name: section(problems) for name, section in SECTIONS.items()}
    lines = []
    for name, facts in found.items():
        width = max(map(len, facts), default=0)
        lines += [name, *(f"  {fact:{width}}  {value}" for fact, value in facts.items()), ""]
    lines += [f"wrong: {problem}" for problem in problems] or ["nothing is wrong"]
    result(args, [{**found, "wrong": problems}], *lines)
    return 1 if problems else 0


def versions(problems: Problems) -> Facts:
    """Sparring, Python, the system, and every dependency with the version that is installed."""
    from sparring import __version__

    facts = {"sparring": f"{__version__} in {_short(Path(__file__).parents[1])}"}
    facts["python"] = f"{platform.python_version()} in {_short(Path(sys.executable))}"
    facts["system"] = platform.platform()
    try:
        built = metadata.version("sparring")
    except metadata.PackageNotFoundError:
        problems.append("Sparring is not installed, so its dependencies are not known: pip install sparring")
        return facts
    if built != __version__:
        problems.append(f"Sparring {__version__} runs, but {built} is installed: is an older copy on PYTHONPATH?")
    for name, needed, version in _requirements(""):
        facts[name] = version or "missing"
        if version is None or not needed.contains(version, prereleases=True):
            problems.append(f"{name} {version or 'is missing'}, needed is {needed}: pip install --upgrade sparring")
    return facts


def devices(problems: Problems) -> Facts:
    """The processor and its instructions, memory, and every GPU that PyTorch can use."""
    from sparring.core.memory_usage import available_bytes, machine_bytes

    flags = " ".join(flag for flag in _FLAGS if flag in _cpu("flags", "Features").split())
    facts = {"processor": _cpu("model name") or platform.processor() or platform.machine(), "instructions": flags}
    facts["memory"] = f"{_size(machine_bytes())}, {_size(available_bytes())} available"
    if available_bytes() < _LEAST:
        problems.append(f"only {_size(available_bytes())} of memory are available: close other programs")
    try:
        import torch

        torch.from_numpy(importlib.import_module("numpy").zeros(1))
    except Exception as error:  # a broken library: whatever it raises
        problems.append(f"PyTorch does not work ({' '.join(str(error).split())[:200]}): install it again")
        return facts
    from sparring.core.devices import usable_cores

    facts["cores"] = f"{usable_cores()} usable of {os.cpu_count()}"
    facts["PyTorch uses"] = torch.backends.cpu.get_cpu_capability()
    facts["PyTorch's CUDA"] = torch.version.cuda or "none: a build for CPUs"
    facts["Triton"] = _version("triton") or "missing"
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        facts[f"cuda:{i}"] = f"{about.name}, {_size(about.total_memory)}, capability {about.major}.{about.minor}"
    if torch.backends.mps.is_available():
        facts["mps"] = "present, not supported yet: Sparring uses the CPU"
    if Path("/dev/nvidia0").exists() and not torch.cuda.is_available():
        why = "the driver is too old for it" if torch.version.cuda else "this build is for CPUs"
        problems.append(f"there is an NVIDIA GPU that PyTorch cannot use ({why}): see pytorch.org/get-started")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        problems.append("the fused kernels for GPUs need Triton: pip install triton")
    return facts


def threads(problems: Problems) -> Facts:
    """Threads of PyTorch, and the variables that set them."""
    try:
        import torch
    except Exception:  # `devices` has said so
        return {}
    from sparring.core.devices import usable_cores

    facts = {"PyTorch": f"{torch.get_num_threads()}, {torch.get_num_interop_threads()} between operations"}
    facts |= {name: os.environ.get(name, "not set") for name in _THREADS}
    if torch.get_num_threads() > usable_cores():
        more = f"{torch.get_num_threads()} threads share {usable_cores()} cores"
        problems.append(f"{more}, which is slow: set OMP_NUM_THREADS={usable_cores()}")
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        problems.append("OMP_WAIT_POLICY=active lets waiting threads spin, which is slow on a shared machine: unset it")
    return facts


def extras(problems: Problems) -> Facts:
    """Every extra: its packages with their versions, or those that are missing."""
    facts = {}
    for extra in sorted(_extras()):
        there, missing = [], []
        for name, needed, version in _requirements(extra):
            if version is None:
                missing.append(name)
                continue
            there.append(f"{name} {version}")
            if not needed.contains(version, prereleases=True):
                how = f'pip install --upgrade "sparring[{extra}]"'
                problems.append(f"{name} {version} is installed, the extra {extra} needs {needed}: {how}")
        parts = [", ".join(there), f"missing: {', '.join(missing)}" if missing else ""]
        facts[extra] = "; ".join(filter(None, parts))
    return facts


def places(problems: Problems) -> Facts:
    """The folder of downloads and vectors, its size, and the space that is left there and here."""
    from sparring.data.cache import cache_folder

    cache = cache_folder()
    sizes = [path.stat().st_size for path in cache.rglob("*") if path.is_file()]
    facts = {"cache": f"{_short(cache)}, {len(sizes)} files, {_size(sum(sizes))} (SPARRING_HOME changes it)"}
    for name, folder in (("disk of the cache", cache), ("disk of this folder", Path.cwd())):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        facts[name] = f"{_size(free)} free"
        if free < _LEAST:
            problems.append(f"the {name} has only {_size(free)} left: free some space")
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            how = "set SPARRING_HOME to another folder" if folder is cache else "work in another folder"
            problems.append(f"cannot write to {_short(there)} ({error.strerror}): {how}")
    return facts


def tools(problems: Problems) -> Facts:
    """What parts of Sparring use where it is: a C++ compiler, what it compiled, and FAISS."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl"))
    compiler = next(filter(None, map(shutil.which, names)), None)
    first = _first_line([compiler, "--version"]) if compiler else "none"
    if _version("faiss-cpu") and _version("faiss-gpu-cuvs"):
        how = 'pip uninstall faiss-cpu faiss-gpu-cuvs, then pip install "sparring[gpu-index]"'
        problems.append(f"faiss-cpu and faiss-gpu-cuvs are both installed, and each overwrites the other: {how}")
    return {"compiler": first, "native kernels": _native_kernels(), "FAISS": _faiss()}


def _faiss() -> str:
    """The version of FAISS, and whether it can build graphs on a GPU; if not, the reason."""
    from sparring.core.errors import UserError
    from sparring.serving.index.faiss_backends import cagra_problem, require_faiss

    try:
        return f"{require_faiss().__version__}, {cagra_problem() or 'builds cagra on a GPU'}"
    except UserError as error:
        return f"none: {error}"


def _native_kernels() -> str:
    """Whether the CPU kernels run, and where they are; if not, the reason."""
    from sparring.kernels.native import library

    if not library.active:
        return "off: SPARRING_NATIVE=0"
    try:
        library.opened(library.folder())
    except library.PROBLEMS as problem:
        return f"off, training on a CPU is slower: {problem}"
    return f"on, in {_short(library.folder())}"


SECTIONS: dict[str, Callable[[Problems], Facts]] = {
    "versions": versions,
    "devices": devices,
    "threads": threads,
    "extras": extras,
    "places": places,
    "tools": tools,
}


def _extras() -> set[str]:
    try:
        return set(metadata.metadata("sparring").get_all("Provides-Extra") or ()) - set(_NOT_LISTED)
    except metadata.PackageNotFoundError:
        return set()


def _requirements(extra: str) -> Iterator[tuple[str, Any, str | None]]:
    """(package, versions that Sparring accepts, version that is installed) of an extra; "" for what all need."""
    from packaging.requirements import Requirement

    for text in metadata.requires("sparring") or ():
        needed = Requirement(text)
        ours = bool(extra) == bool(needed.marker and "extra" in str(needed.marker))
        if ours and (needed.marker is None or needed.marker.evaluate({"extra": extra})):
            yield needed.name, needed.specifier, _version(needed.name)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu(*names: str) -> str:
    """A line of Linux's description of the processor; "" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in names), "")


def _first_line(words: list[str]) -> str:
    """The first line that a program prints."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return f"{words[0]}, which does not start"
    return next(iter((done.stdout or done.stderr).splitlines()), words[0])


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _short(path: Path) -> str:
    """A path without the name of the user."""
    home = Path.home()
    return (Path("~") / path.relative_to(home)).as_posix() if path.is_relative_to(home) else str(path)
