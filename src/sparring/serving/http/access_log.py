"""The log: one JSON object a line on stderr."""

from __future__ import annotations

import datetime
import sys
import time
from typing import IO

import orjson

_LATE = 0.2  # seconds that lines of requests may wait to be written together


class Log:
    """say("swapped", run="first", generation=2)  ->  {"time":"2026-11-15T15:00:00+00:00","event":"swapped","run":"first","generation":2}"""

    def __init__(self, to: IO[bytes] | None = None, requests: bool = True) -> None:
        self._to = to
        self.requests = requests
        self._flushed = 0.0

    def say(self, event: str, **facts: object) -> None:
        line = {"time": datetime.datetime.now(datetime.UTC), "event": event, **facts}
        to = self._to or sys.stderr.buffer
        to.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE, default=str))
        now = time.monotonic()
        if event != "request" or now - self._flushed > _LATE:
            self._flushed = now
            to.flush()
