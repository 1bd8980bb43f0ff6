"""Vectors of items, from memory or disk, against plain indexing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.modalities.modalities import Modalities, Modality

RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(20, 6)).astype(np.float16)
TEXT = RNG.normal(size=(20, 4)).astype(np.float32)
IMAGE[3], IMAGE[7, 2], IMAGE[8, 0] = 0.0, np.nan, np.inf
TEXT[0], TEXT[19] = np.nan, 0.0


def expected(array: np.ndarray, index: list[int]) -> list[list[float]]:
    """Row by row: the row, or zeros if it is all zero or has a non-finite value."""
    rows = [[float(value) for value in array[i]] for i in index]
    return [row if any(row) and all(abs(value) < float("inf") for value in row) else [0.0] * len(row) for row in rows]


@pytest.mark.parametrize("index", [[5], [0, 3, 7, 8, 19], [4, 4, 2, 19], list(range(6, 12)), []])
def test_rows_are_those_of_the_arrays(index: list[int]) -> None:
    """Rows have the requested order, are float32 tensors, and are zero where missing."""
    rows = Modalities.from_arrays({"image": IMAGE, "text": TEXT}).rows(np.array(index, dtype=np.int64))
    for name, array in (("image", IMAGE), ("text", TEXT)):
        assert rows[name].dtype == torch.float32
        assert rows[name].shape == (len(index), array.shape[1])
        assert rows[name].tolist() == expected(array, index)


def test_what_is_known_of_them() -> None:
    """Names, widths and presence are right: a row of zeros or with a non-finite value is missing."""
    modalities = Modalities.from_arrays({"image": IMAGE, "text": TEXT})
    assert len(modalities) == 20
    assert modalities.names == ("image", "text")
    assert modalities.widths == {"image": 6, "text": 4}
    assert np.flatnonzero(~modalities.present["image"]).tolist() == [3, 7, 8]
    assert np.flatnonzero(~modalities.present["text"]).tolist() == [0, 19]
    assert modalities.only(["text"]).names == ("text",)


@pytest.mark.parametrize("size", [1, 7, 20, 50])
def test_blocks_cover_all_items_in_order(size: int) -> None:
    """Blocks of any size concatenate to all rows."""
    modalities = Modalities.from_arrays({"image": IMAGE, "text": TEXT})
    blocks = list(modalities.blocks(size))
    assert all(len(rows["image"]) <= size for _, rows in blocks)
    assert [i for index, _ in blocks for i in range(index.start, index.stop)] == list(range(20))
    assert torch.cat([rows["text"] for _, rows in blocks]).tolist() == expected(TEXT, list(range(20)))


def test_a_slice_is_its_indices() -> None:
    """A slice gives the rows of its indices, also with a step and an open end."""
    modalities = Modalities.from_arrays({"text": TEXT})
    for index in (slice(2, 9), slice(None), slice(15, None), slice(1, 18, 4)):
        want = modalities.rows(np.arange(20)[index])["text"]
        assert torch.equal(modalities.rows(index)["text"], want)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.bool_])
def test_every_number_type_becomes_float32(dtype: type) -> None:
    """Rows are float32 for every numeric type, and the file's array is never changed."""
    array = (RNG.normal(size=(5, 3)) * 3).astype(dtype)
    before = array.copy()
    modality = Modality("x", (array,))
    modality.rows(np.array([0, 1, 2]))[:] = 9.0
    modality.rows(slice(0, 5))[:] = 9.0
    assert np.array_equal(array, before)
    assert modality.rows(slice(None)).dtype == torch.float32


def test_parts_and_places() -> None:
    """Item i is row at[i] of the concatenated parts; -1 is missing."""
    parts = (TEXT[1:4], TEXT[4:5], TEXT[5:12])
    whole = np.concatenate(parts)
    at = np.array([10, -1, 3, 0, 2, 2, -1, 4])
    modality = Modality("text", parts, at)
    want = [[0.0] * 4 if place < 0 else whole[place].tolist() for place in at]
    assert len(modality) == 8
    assert modality.present.tolist() == [place >= 0 for place in at]
    assert modality.rows(np.arange(8)).tolist() == want
    assert modality.rows(np.array([6, 0, 4])).tolist() == [want[6], want[0], want[4]]
    assert Modality("text", (whole,), at).rows(np.arange(8)).tolist() == want


def test_a_memory_map_gives_the_same(tmp_path: Path) -> None:
    """Rows of a file on disk equal those in memory, read at once, in blocks, or repeatedly."""
    np.save(tmp_path / "image.npy", IMAGE)
    mapped = Modalities.from_arrays({"image": np.load(tmp_path / "image.npy", mmap_mode="r")})
    for _ in range(3):
        for index, rows in mapped.blocks(6):
            assert rows["image"].tolist() == expected(IMAGE, list(range(index.start, index.stop)))
        assert mapped.rows(np.array([9, 1]))["image"].tolist() == expected(IMAGE, [9, 1])


def test_a_file_is_never_in_memory_whole(tmp_path: Path) -> None:
    """Reading a 400 MB file in blocks and scattered runs raises the peak memory by far less."""
    pytest.importorskip("resource")
    np.lib.format.open_memmap(tmp_path / "big.npy", mode="w+", dtype=np.float16, shape=(200_000, 1000))[:] = np.float16(
        0.5
    )
    code = f"""
import resource, numpy as np
from sparring.data.modalities import Modalities
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
modalities = Modalities.from_arrays({{"x": np.load({str(tmp_path / "big.npy")!r}, mmap_mode="r")}})
total = sum(float(rows["x"].sum()) for _, rows in modalities.blocks(4096))
runs = np.random.default_rng(0).permutation(200_000 // 100)
for start in range(0, len(runs), 40):
    total += float(modalities.rows((runs[start : start + 40, None] * 100 + np.arange(100)).ravel())["x"].sum())
print(int(total), peak() - before)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    ).stdout.split()
    assert int(out[0]) == 200_000 * 1000
    assert int(out[1]) < 200, f"{out[1]} MB more for a file of 400 MB"


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({}, "there is no modality"),
        ({"a": TEXT, "b": TEXT[:9]}, "'b' has 9 rows, 'a' has 20"),
        ({"a": TEXT[:, 0]}, "'a' must be a table of numbers"),
        ({"a": np.array([["x"]])}, "'a' must be a table of numbers"),
        ({"a": np.zeros((4, 0))}, "'a' has vectors of no numbers"),
    ],
)
def test_errors_are_one_line_that_names_the_modality(arrays: dict[str, np.ndarray], match: str) -> None:
    """Invalid arrays raise an error that names the modality."""
    with pytest.raises(UserError, match=match) as caught:
        Modalities.from_arrays(arrays)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The error for an unknown modality lists the known ones."""
    with pytest.raises(UserError, match="no modality 'sound'; there are image, text"):
        Modalities.from_arrays({"image": IMAGE, "text": TEXT}).only(["sound"])
