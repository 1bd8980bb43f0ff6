"""Writing beside training: tensors are copied where they are between two steps, and a thread writes the copies while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from sparring.core.memory import machine_bytes

Place = Literal["device", "memory", "nowhere"]
SHARE = 8  # copies take at most this part of the machine's memory; a larger state is written while training waits


class Background:
    """One piece of work at a time in a thread. What it raised is raised again by the next `check`, `wait` or `start`.

    background.start(lambda: write(path, copies));   ...;   background.wait()
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Wait for the work before, then begin this."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="sparring-saving")
        self._thread.start()

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what went wrong, once it has."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait for the work to end, however it does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        self.join()
        self.check()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is, training must hear of it
            self._error = error


class Copies:
    """Copies of tensors. On a CPU their memory is kept for the next ones: touching it anew takes five times as long as copying.

    On a GPU with room they stay there until `drop`, so that taking them costs no transfer; else they go to the machine's memory.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], where: Place) -> dict[str, Tensor]:
        """What the tensors are now; with nowhere to copy them, the tensors themselves."""
        if where == "nowhere":
            return dict(tensors)
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            device = tensor.device if where == "device" else torch.device("cpu")
            copy = self._kept.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype or copy.device != device:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copies[name] = copy.copy_(tensor.detach())
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # another stream reads them next
        self._kept = copies
        return dict(copies)

    def drop(self) -> None:
        """Forget those that lie on a GPU."""
        self._kept = {name: copy for name, copy in self._kept.items() if not copy.is_cuda}


def place(device: torch.device, needed: int, processes: int = 1) -> Place:
    """Where copies of so many bytes may lie, when so many processes of this machine make some."""
    if device.type == "cuda" and 2 * needed < torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "memory" if SHARE * needed * processes <= machine_bytes() else "nowhere"
