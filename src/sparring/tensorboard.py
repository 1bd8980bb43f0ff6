"""Training curves for TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparring.errors import UserError


def epoch_writer(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes one epoch's record (loss, validation metrics, tau) as scalars into `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError('TensorBoard is not installed: pip install "sparring[tensorboard]"') from error
    writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "epoch":
                writer.add_scalar(name.replace("@", "_at_"), value, record["epoch"])  # type: ignore[no-untyped-call]
        writer.flush()  # type: ignore[no-untyped-call]

    return write
