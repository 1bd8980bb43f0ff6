"""Devices, and how a process waits for them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sparring.core import devices


class Driver:
    """The part of CUDA's driver that is asked: two GPUs, and the flags that they were given."""

    def __init__(self, works: bool) -> None:
        self.works, self.flags = works, dict[int, int]()

    def cuInit(self, flags: int) -> int:
        return 0 if self.works else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDevicePrimaryCtxSetFlags_v2(self, number: int, flags: int) -> int:
        self.flags[number] = flags
        return 0


def test_a_process_sleeps_while_it_waits_for_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU gets CU_CTX_SCHED_BLOCKING_SYNC, which CUDA's headers define as 4; without GPUs nothing happens."""
    for works, flags in ((True, {0: 4, 1: 4}), (False, {})):
        driver = Driver(works)
        monkeypatch.setattr(ctypes, "CDLL", lambda name, driver=driver: {"libcuda.so.1": driver}[name])
        devices.sleep_for_gpus()
        assert driver.flags == flags

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    devices.sleep_for_gpus()
