"""How much one request may ask, and how a request that asks for what cannot be is refused."""

from __future__ import annotations

from dataclasses import dataclass

K = 1000  # items of one list
QUERIES = 256  # users, texts or items of one request
IDS = 10_000  # ids in a history, an allow or a deny list
ITEMS = 1000  # items put or deleted by one request
CONDITIONS = 16  # of one filter
FIELDS = 32  # columns asked for
TEXT = 10_000  # characters of a text, a title, a value
ID = 1024  # characters of an id
DIM = 65_536  # numbers of a vector


@dataclass(frozen=True)
class Limits:
    """What the operator may set: size of a body, seconds for an answer, and how many queries may wait to be searched."""

    body: int = 8 * 2**20
    seconds: float = 10.0
    waiting: int = 4096


class Refused(Exception):
    """A request that is not answered: an HTTP status, and one line that says why."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line
