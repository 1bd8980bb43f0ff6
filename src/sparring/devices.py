"""Where to compute: a device by its name."""

from __future__ import annotations

import torch

from sparring.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device of this name; "auto" is the first GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but PyTorch finds no GPU: use --device cpu")
    return device
