"""Training curves for TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparring.core.errors import UserError


def epoch_writer(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes one epoch's record (loss, validation metrics, tau) as scalars into `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError('TensorBoard is not installed: pip install "sparring[tensorboard]"') from error
    writer: Any = None

    def write(record: Mapping[str, Any]) -> None:
        nonlocal writer
        if writer is None:  # it creates the folder, which must be empty when training starts
            writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
        for name, value in record.items():
            if name != "epoch":
                writer.add_scalar(name.replace("@", "_at_"), value, record["epoch"])
        writer.flush()

    return write
