"""Writing while training runs: tensors are copied between two steps, and a thread writes the copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from sparring.core.memory_usage import machine_bytes

Place = Literal["device", "memory", "nowhere"]
SHARE = 8  # copies take at most 1 / SHARE of the machine's memory; a larger state is written while training waits


class BackgroundWriter:
    """Runs one piece of work at a time in a thread. The next `check`, `wait` or `start` raises its error.

    writer.start(lambda: write(path, copies));   ...;   writer.wait()
    """

    def __init__(self) -> None:
        self._idle = threading.Event()  # a join of the thread, once interrupted, would count it as ended
        self._idle.set()
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Wait for the previous work, then start this."""
        self.wait()
        self._idle.clear()
        threading.Thread(target=self._run, args=(work,), name="sparring-saving").start()

    def busy(self) -> bool:
        return not self._idle.is_set()

    def check(self) -> None:
        """Raise the error of the last work, if it failed."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait for the work to end; its error stays for `check`."""
        self._idle.wait()

    def wait(self) -> None:
        self.join()
        self.check()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # of any kind: training must not continue without it
            self._error = error
        finally:
            self._idle.set()


class Copies:
    """Copies of tensors. Host memory is reused: touching new memory takes five times as long as copying.

    On a GPU with room, copies stay there until `drop`, which saves the transfer; otherwise they go to host memory.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], where: Place) -> dict[str, Tensor]:
        """Copies of the tensors; with nowhere to copy them, the tensors themselves."""
        if where == "nowhere":
            return dict(tensors)
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            device = tensor.device if where == "device" else torch.device("cpu")
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype or copy.device != device:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copies[name] = copy.copy_(tensor.detach())
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # another stream reads them next
        self._copies = copies
        return dict(copies)

    def drop(self) -> None:
        """Free the copies on a GPU."""
        self._copies = {name: copy for name, copy in self._copies.items() if not copy.is_cuda}


def place_for(device: torch.device, needed: int, processes: int = 1) -> Place:
    """The destination of `needed` bytes: the GPU, host memory (shared by `processes`), or none (write directly)."""
    if device.type == "cuda" and 2 * needed < torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "memory" if SHARE * needed * processes <= machine_bytes() else "nowhere"
