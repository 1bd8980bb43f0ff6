"""Devices by name."""

from __future__ import annotations

import ctypes
import os

import torch

from sparring.core.errors import UserError
from sparring.core.ranks import launched, local_rank, local_world

_BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver


def pick_device(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one. Processes that train together use one GPU each."""
    several = launched() > 1
    if name.startswith("mps"):
        raise UserError(f"{name!r}, Apple's GPU, is not supported yet: use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank()}" if name == "cuda" and several else name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was requested, but PyTorch finds no GPU: use --device cpu")
    if device.type == "cuda" and several and (processes := local_world()) > torch.cuda.device_count():
        raise UserError(
            f"{processes} processes need a GPU each, and this machine has {torch.cuda.device_count()}: "
            "start fewer, or use --device cpu"
        )
    return device


def sleep_for_gpus() -> None:
    """From now on, sleep while waiting for a GPU; call it before the first use of one.

    By default CUDA spins, and a process that waits takes a core from the others that share the GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU, or none of NVIDIA's
        return
    count = ctypes.c_int()
    if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for number in range(count.value):
            driver.cuDevicePrimaryCtxSetFlags_v2(number, _BLOCKING_SYNC)


def hardware(device: torch.device) -> str:
    """The hardware of a device, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"


def usable_cores() -> int:
    """CPU cores that this process may use, where the system says so; otherwise those of the machine."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
