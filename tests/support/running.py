"""A service in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx


class Running:
    """A service in its own process."""

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        words = [sys.executable, "-m", "sparring", "serve", str(folder), "--port", "0", "--quiet", *more]
        self.log = log
        with open(log, "wb") as to:
            self.process = subprocess.Popen(words, stderr=to, env=environment())
        deadline = time.monotonic() + 120
        while not (found := re.search(r'"url":"([^"]+)/"', log.read_text())):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.05)
        self.url = found[1]
        self.http = self.client()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, limits=httpx.Limits(keepalive_expiry=None))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
