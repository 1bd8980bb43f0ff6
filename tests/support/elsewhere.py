"""A Python without the names that macOS or Windows lacks. As a script: `python elsewhere.py LIBRARIES CODE ARGUMENTS`.

Libraries are imported first: on those systems they have branches of their own. Only filelock is imported afterwards,
and finds no locks of the system.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import multiprocessing.context
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = ("fcntl", "grp", "posix", "pwd", "pty", "resource", "termios", "tty", "triton", "uvloop")
NAMES: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC"),
        *("chown", "fchmod", "fchown", "fork", "forkpty", "geteuid", "getgid", "getloadavg", "getpgid", "getuid"),
        *("killpg", "mkfifo", "nice", "posix_fadvise", "posix_fallocate", "pread", "preadv", "process_cpu_count"),
        *("pwrite", "sched_getaffinity", "sched_setaffinity", "setpgid", "setsid", "statvfs", "sync", "sysconf"),
        *("uname", "wait4", "waitid"),
    ),
    signal: ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "SIGUSR2", "alarm"),
    socket: ("SO_REUSEPORT", "send_fds", "recv_fds"),
    multiprocessing.context: ("ForkProcess", "ForkServerProcess", "ForkContext", "ForkServerContext"),
}
TOTAL, FREE = 16 * 2**30, 5 * 2**30


def memory(status: Any) -> int:
    """Fill a MEMORYSTATUSEX as Windows would: its total is at byte 8, its free part at byte 16."""
    start = ctypes.addressof(status._obj)
    assert ctypes.c_uint32.from_address(start).value == ctypes.sizeof(status._obj) == 64
    ctypes.c_uint64.from_address(start + 8).value = TOTAL
    ctypes.c_uint64.from_address(start + 16).value = FREE
    return 1


_open = open


def open_here(file: Any, *arguments: Any, **options: Any) -> Any:
    """Open a file, unless it is of Linux alone."""
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return _open(file, *arguments, **options)


def hide(libraries: list[str]) -> None:
    """Import the libraries that are installed, then take names and modules away from all that is imported later."""
    for name in libraries:
        with suppress(ImportError):  # an extra
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] in ("filelock", "sparring")]:
        del sys.modules[name]  # torch has imported filelock
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment]  # a later import of it raises ImportError
    for home, names in NAMES.items():
        for name in names:
            if hasattr(home, name):
                delattr(home, name)
    methods = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    for method in ("fork", "forkserver"):
        del methods[method]
    multiprocessing.context._default_context._default_context = methods["spawn"]  # type: ignore[attr-defined]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
    builtins.open = open_here  # type: ignore[assignment]
    ctypes.windll = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=memory))  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", "only soft file lock is available")


if __name__ == "__main__":
    hide(sys.argv.pop(1).split())
    code = sys.argv.pop(1)
    exec(code, {"__name__": "elsewhere"})
