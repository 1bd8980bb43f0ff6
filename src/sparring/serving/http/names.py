"""Original ids to dense ids and back, one at a time and quickly: what a request needs many thousand times a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import polars as pl

from sparring.data.interactions import Vocabulary


class Names:
    """A vocabulary that is asked for few ids at a time.

    Text that spells an integer finds it, and the other way round, as in Vocabulary. Integers are found by bisection, texts by their
    hashes: 16 bytes an id, and no work that grows with the number of ids.

        Names(Vocabulary(["a", "b"])).find(["b", "z"])      # array([1, -1])
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids = vocabulary.ids
        self._whole = vocabulary.kind == "int"
        if self._whole:
            self._keys, self._order = self.ids.to_numpy(), None
        else:
            hashes = np.fromiter(map(hash, self.ids), np.int64, len(self.ids))
            self._order = np.argsort(hashes, kind="stable")
            self._keys = hashes[self._order]
        self._sorted = memoryview(
            self._keys.data
        )  # bisected in Python: numpy gives the interpreter away for it, and waits to get it back

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Sequence[int | str]) -> np.ndarray:
        """Dense ids, -1 where unknown."""
        return np.fromiter(map(self.find_one, ids), np.int64, len(ids))

    def find_one(self, asked: int | str) -> int:
        if self._order is None:
            number = asked if isinstance(asked, int) else _integer(asked)
            if number is None or not len(self._sorted) or number > self._sorted[-1]:
                return -1
            at = number - self._sorted[0]  # right at once where ids follow one another
            if not 0 <= at < len(self._sorted) or self._sorted[at] != number:
                at = bisect_left(self._sorted, number)
            return at if self._sorted[at] == number else -1
        text = str(asked)
        key = hash(text)
        at = bisect_left(self._sorted, key)
        while at < len(self._sorted) and self._sorted[at] == key:
            dense = int(self._order[at])
            if self.ids[dense] == text:
                return dense
            at += 1
        return -1

    def of(self, dense: np.ndarray) -> list[int | str]:
        """Original ids of dense ids."""
        if self._order is None:
            return self._keys[dense].tolist()  # type: ignore[no-any-return]
        return self.ids.gather(pl.Series(dense)).to_list()


def _integer(text: str) -> int | None:
    """The number that a text spells as Python would write it; '007' and ' 7' are texts."""
    if len(text) > 20 or not text.lstrip("-").isdecimal() or not text.isascii():
        return None
    number = int(text) if text.count("-") <= 1 and text[0] in "-0123456789" else None
    return number if number is not None and str(number) == text else None
