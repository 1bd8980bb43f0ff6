"""How a process ends early: by SIGTERM, with its cleanup, or because its parent has died."""

from __future__ import annotations

import os
import signal
import threading
import time

_POLL = 0.5  # seconds between two looks at the parent
_GRACE = 3.0  # seconds for the cleanup after the parent's death


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Whatever cleans up after Ctrl-C cleans up after this too."""


def raise_on_termination() -> None:
    """Raise `Terminated` in the main thread when SIGTERM arrives, instead of ending without cleanup."""
    signal.signal(signal.SIGTERM, _terminated)


def end_with_parent(parent: int) -> None:
    """End this process within seconds of the death of its parent, even by kill -9; `parent` is the parent's pid."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _terminated(number: int, frame: object) -> None:
    raise Terminated


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)  # a main thread that waits for another rank sees no signal
    os._exit(128 + signal.SIGTERM)
