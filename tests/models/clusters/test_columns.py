"""Vectors of items from the columns of their table."""

from __future__ import annotations

import numpy as np
import polars as pl

from sparring.models.clusters.columns import column_vectors

TITLES = ["Red shoe", "red, old shoe", "blue hat", "Blue hat!", None, "lonely", "red hat", "blue shoe"]


def test_items_are_close_by_the_words_that_they_share() -> None:
    """Items of the same words have the same direction, items without a shared word are orthogonal, and an item
    without a word that another has is a row of zeros. Vectors have length 1."""
    table = pl.DataFrame({"title": [*TITLES, *["green sock"] * 8]})
    vectors = column_vectors(table, dim=4)["title"]
    assert vectors.shape == (16, 4)
    near = vectors @ vectors.T
    assert near[2, 3] > 0.999  # the same words, whatever their case
    assert abs(near[0, 9]) < 1e-3  # no word in common
    assert near[0, 1] > near[0, 2] + 0.2  # "old" is nobody else's word
    assert not vectors[[4, 5]].any()
    np.testing.assert_allclose(np.linalg.norm(vectors[[0, 1, 2, 3, 6, 7, 9]], axis=1), 1.0, atol=1e-5)


def test_columns_that_say_nothing_are_left_out() -> None:
    """Lists of texts count by element, vectors are taken as they are, zero where missing; numbers, words of a single
    item, one word for all, and vectors of several lengths are left out."""
    table = pl.DataFrame(
        {
            "tags": [["a b", "c"], ["a b"], ["c"], ["a"]] * 2,
            "picture": [[0.5, 1.0], None, [2.0, 3.0], [4.0, 5.0]] * 2,
            "ragged": [[0.5], [1.0, 2.0], None, None] * 2,
            "price": [1.0, 2.0, 3.0, 4.0] * 2,
            "code": [f"x{j}" for j in range(8)],
            "same": ["one"] * 8,
        },
        schema_overrides={"picture": pl.List(pl.Float32), "ragged": pl.List(pl.Float32)},
    )
    found = column_vectors(table)
    assert set(found) == {"tags", "picture"}
    np.testing.assert_array_equal(found["picture"], np.array([[0.5, 1], [0, 0], [2, 3], [4, 5]] * 2, dtype=np.float32))
