"""Ports for processes that meet over the network."""

from __future__ import annotations

import socket
from random import SystemRandom


def free_port() -> int:
    """A free port below those that the system hands out by itself, so that no other connection takes it meanwhile."""
    while True:
        port = SystemRandom().randrange(10_240, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
