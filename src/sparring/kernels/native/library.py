"""Compile the C++ files of this folder with the system's compiler, keep the library in the user's cache, and load it.

The first process on a machine compiles for a few seconds and says so; later ones load the file. Its name holds a hash
of all that it was made from (sources, flags, compiler, processor) and one of its content, so a stale or damaged file is
never loaded. Nor is one from a folder that other users may write to. Where there is no compiler, or anything fails,
`function` answers None, one line says why, and callers run their torch code. `SPARRING_NATIVE=0` has the same effect.

The kernels use the OpenMP runtime that torch has loaded, so `torch.set_num_threads` and OMP_NUM_THREADS hold for them,
and a process never has two runtimes. ctypes releases the GIL during a call.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
active = os.environ.get("SPARRING_NATIVE", "1") != "0"  # tests and benchmarks switch it off and on

HERE = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: it would switch denormal numbers off in the whole process. Loops that may be reordered say so.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-semantic-interposition",
)
PROCESSOR = ("-march=native", "-mcpu=native")  # the first is for x86, the second for compilers that want it on ARM
PROBLEMS = (OSError, RuntimeError, subprocess.SubprocessError)  # of compiling and loading
SECONDS = 300  # after which a compiler counts as stuck
_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float, "d": ctypes.c_double}
_loading = threading.Lock()
_found: dict[str, Callable[..., int] | None] = {}


def function(name: str, signature: str) -> Callable[..., int] | None:
    """The kernel of this name, or None where callers have to run their torch code.

    `signature` has one letter per argument: p pointer, l int64, i int, f float, d double. Kernels return an int.
    """
    if not active:
        return None
    if name not in _found:
        with _loading:
            loaded = library()
        if loaded is None:
            _found[name] = None
        else:
            kernel = getattr(loaded, f"sparring_{name}")
            kernel.argtypes, kernel.restype = [_KINDS[letter] for letter in signature], ctypes.c_int
            _found[name] = kernel
    return _found[name]


def plain(*tensors: Tensor) -> bool:
    """Whether tensors have memory that a kernel can read: of the CPU, and none of a tracer's that only have shapes."""
    return all(t.is_cpu and type(t) in (Tensor, nn.Parameter) for t in tensors)


@cache
def library() -> ctypes.CDLL | None:
    """The library of all kernels, compiled if need be; None, with one line that says why, if that fails."""
    try:
        return opened(folder())
    except PROBLEMS as problem:
        log.info("native kernels are off (%s): PyTorch's take their place, and training is slower", problem)
        return None


def folder() -> Path:
    """The folder of compiled kernels: `native` in $SPARRING_HOME, else in sparring in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("SPARRING_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(home) if home else Path(base) / "sparring") / "native"


def opened(where: Path) -> ctypes.CDLL:
    """The library in a folder, compiled if need be; raises one of PROBLEMS if that fails."""
    compiler = _compiler()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(where)
    openmp = _openmp()
    key = _key(compiler, openmp is not None)
    for path in _kept(where, key):
        try:
            return ctypes.CDLL(str(path))
        except OSError as problem:  # such as a C library that this machine lacks
            log.debug("%s does not load: %s", path, problem)
    return _load(_compile(compiler, where, key, openmp is not None))


def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if path := shutil.which(name):
            return os.path.realpath(path)
    raise RuntimeError(f"no C++ compiler: {named or ', '.join(COMPILERS)}")


def _check_owner(where: Path) -> None:
    """Raise unless the folder is this user's and no other user may write to it: a library is code."""
    if not hasattr(os, "getuid"):
        raise RuntimeError(f"{platform.system()} is not supported")
    found = where.stat()
    if found.st_uid != os.getuid():
        raise RuntimeError(f"{where} belongs to another user: set SPARRING_HOME to a folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"other users may write to {where}: run chmod go-w {where}")


def _key(compiler: str, parallel: bool) -> str:
    about = os.stat(compiler)
    made_from = [*FLAGS, *PROCESSOR, str(parallel), compiler, str(about.st_size), str(about.st_mtime_ns)]
    made_from += [platform.platform(), _processor()]
    digest = hashlib.sha256("\n".join(made_from).encode())
    for source in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """The processor and its instruction sets: a library for one may end a process on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _kept(where: Path, key: str) -> Iterator[Path]:
    """Libraries in the folder under this key that are this user's and whose content has the hash in their name."""
    for path in sorted(where.glob(f"{key}-*.so")):
        if path.stat().st_uid == os.getuid() and path.name == _name(key, path.read_bytes()):
            yield path


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:20]}.so"


def _compile(compiler: str, where: Path, key: str, parallel: bool) -> Path:
    """Compile into the folder under a temporary name, then rename: other processes see a complete file or none."""
    log.info("compiling native kernels for this machine, once: %s", where)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=where, prefix="building-") as room:
        made = Path(room) / "kernels.so"
        for processor in PROCESSOR:
            problem = _run(compiler, made, processor, parallel)
            if problem is None:
                break
        else:
            raise RuntimeError(f"{Path(compiler).name} failed: {problem}")
        final = where / _name(key, made.read_bytes())
        made.chmod(0o600)
        made.replace(final)
    log.debug("compiled native kernels in %.1f s", time.monotonic() - began)
    return final


def _run(compiler: str, made: Path, processor: str, parallel: bool) -> str | None:
    """Compile all files into one library; the first line of the error, if there is one.

    OpenMP is not linked: its symbols are found in the runtime that torch has loaded.
    """
    sources = [str(path) for path in sorted(HERE.glob("*.cpp"))]
    objects = [str(made.with_name(f"{Path(source).stem}.o")) for source in sources]
    threads = ["-fopenmp"] if parallel else ["-fopenmp-simd"]
    commands = [
        [compiler, *FLAGS, processor, *threads, "-c", source, "-o", out]
        for source, out in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        problems = [problem for problem in pool.map(_problem, commands) if problem is not None]
    return problems[0] if problems else _problem([compiler, "-shared", "-o", str(made), *objects])


def _problem(command: list[str]) -> str | None:
    """Run a compiler; the first line of its error, if there is one."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603
    if not done.returncode:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return lines[0] if lines else f"exit code {done.returncode}"


class _Address(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses, with its symbols made visible to our library; None: kernels run alone.

    Both GNU's runtime and LLVM's and Intel's have the entry points that GCC's code calls.
    """
    try:
        mine = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        place = _Address()
        ctypes.CDLL(None).dladdr(ctypes.cast(mine.GOMP_parallel, ctypes.c_void_p), ctypes.byref(place))
        return ctypes.CDLL(os.fsdecode(place.file), mode=ctypes.RTLD_GLOBAL) if place.file else None
    except (OSError, AttributeError):
        return None
