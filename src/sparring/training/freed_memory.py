"""Freed memory stays with the process: a training step allocates what the step before it freed.

By default glibc returns memory to the system once some megabytes at the end of its heap are free, and the next step
pays for fresh pages, one after the other even if several threads touch them.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

KEPT = 256 << 20  # bytes at the end of the heap
_LARGEST = 32 << 20  # the largest blocks that glibc takes from its heap
_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


@cache
def keep_freed() -> None:
    """Keep up to KEPT bytes, from now on; nothing where another allocator than glibc's serves, or its settings are set.

    Those are MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ and GLIBC_TUNABLES.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MAP, _LARGEST)
    mallopt(_TRIM, KEPT)
