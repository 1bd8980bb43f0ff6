"""Memory of this process and of this machine, in bytes."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """What this process holds in memory now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_bytes() -> int:
    """The most that this process ever held in memory."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine_bytes() -> int:
    """The memory of this machine, or what its container may use of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(whole, int(file.read()))
    except (OSError, ValueError):  # no such limit
        return whole
