"""Memory of this process and of this machine, in bytes."""

from __future__ import annotations

import ctypes
import os
import sys


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_bytes() -> int:
    """Peak resident memory of this process; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine_bytes() -> int:
    """Memory of this machine, or the limit of its container."""
    if not hasattr(os, "sysconf"):
        return _windows_bytes()[0]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(physical, int(file.read()))
    except (OSError, ValueError):  # no such limit
        return physical


def available_bytes() -> int:
    """Memory that this process can still take, as the system estimates it, within the limit of its container."""
    if not hasattr(os, "sysconf"):
        return _windows_bytes()[1]
    room = machine_bytes() - resident_bytes()
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
        return min(room, int(line.split()[1]) * 1024)
    except (OSError, StopIteration):
        return room


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _windows_bytes() -> tuple[int, int]:
    """Memory of this machine, and the part of it that is free."""
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return status.total, status.available
