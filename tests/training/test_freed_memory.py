"""Memory that a step frees serves the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, resource, torch
from sparring.training.freed_memory import keep_freed

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        tensors = [torch.ones(n << 20) for n in (1, 2, 3)]
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds

torch.set_num_threads(1)
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages, which some systems always give, are few
keep_freed()
faults(3)
print(faults(10))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_pages_are_fresh_once() -> None:
    """Tensors of 24 MiB are 6,144 pages: later rounds touch few new ones, but most where a setting says so."""

    def faults(**settings: str) -> float:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
        done = subprocess.run([sys.executable, "-c", CODE], env=plain | settings, capture_output=True, check=True)
        return float(done.stdout)

    assert faults() < 600
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > 3000
