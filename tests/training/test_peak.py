"""The peak of a score along a ladder."""

from __future__ import annotations

import numpy as np
import pytest

from sparring.training.peak import peak


@pytest.mark.parametrize("top", range(6))
@pytest.mark.parametrize("start", range(5))
def test_a_score_with_one_peak_is_climbed_to_it_and_no_value_is_tried_twice(top: int, start: int) -> None:
    """Besides the values on the way, at most one beyond each end of it is tried."""
    ladder, tried = [2.0**i for i in range(6)], []

    def score(value: float) -> float:
        tried.append(value)
        return -abs(np.log2(value) - top)

    assert peak(ladder, ladder[start], score) == ladder[top]
    assert len(tried) == len(set(tried)) <= abs(top - start) + 3


def test_of_two_peaks_the_near_one_is_taken() -> None:
    scores = dict(zip([1.0, 2.0, 3.0, 4.0, 5.0], [9.0, 1.0, 2.0, 1.5, 8.0], strict=True))
    assert peak(list(scores), 2.0, scores.__getitem__) == 3.0
    assert peak(list(scores), 4.0, scores.__getitem__) == 5.0
    assert peak(list(scores), 1.0, scores.__getitem__) == 1.0


def test_a_step_up_must_gain_a_factor_and_a_step_down_anything() -> None:
    scores = dict(zip([1.0, 2.0, 3.0, 4.0], [1.01, 1.0, 1.06, 1.09], strict=True))
    assert peak(list(scores), 2.0, scores.__getitem__, rise=1.05) == 3.0
    assert peak(list(scores), 2.0, scores.__getitem__, rise=1.07) == 1.0
