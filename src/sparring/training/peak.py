"""The peak of a score along a ladder of values, found in few tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache


def peak(ladder: Sequence[float], start: float, score: Callable[[float], float], rise: float = 1.0) -> float:
    """The first peak of the score from `start` on, on the side of its better neighbour in the ladder.

    `start` and the next value are tried, then further values on the better side while the score rises; a value is tried
    once. A step up must raise the score by the factor `rise`.

        peak((0.05, 0.1, 0.2, 0.4), 0.1, validation_metric)
    """

    @cache
    def at(place: int) -> float:
        return score(ladder[place])

    low = ladder.index(start)
    direction = 1 if at(low + 1) > rise * at(low) else -1
    best, needed = (low + 1, rise) if direction > 0 else (low, 1.0)
    while 0 <= best + direction < len(ladder) and at(best + direction) > needed * at(best):
        best += direction
    return ladder[best]
