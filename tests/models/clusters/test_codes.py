"""Codes: membership of clusters and cells, files and controls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Vocabulary
from sparring.models.clusters import Codes


def some(n: int = 60, k: int = 7, inner: int = 3, ids: Vocabulary | None = None) -> Codes:
    """Codes in which cluster 2 and some cells are empty."""
    rng = np.random.default_rng(0)
    primary = rng.integers(0, k, n)
    primary[primary == 2] = 3
    return Codes(torch.from_numpy(primary), torch.from_numpy(rng.integers(0, inner, n)), torch.randn(k, 4), inner, ids)


def test_the_index_lists_every_cluster_and_cell() -> None:
    """order, start and cell_start give exactly the items that a loop over the codes finds, ascending in each cell."""
    codes = some()
    at = 0
    for p in range(7):
        assert int(codes.start[p]) == at
        for s in range(3):
            assert int(codes.cell_start[3 * p + s]) == at
            mine = [j for j in range(60) if int(codes.primary[j]) == p and int(codes.secondary[j]) == s]
            assert codes.order[at : at + len(mine)].tolist() == mine == codes.items(p, s).tolist()
            at += len(mine)
        assert sorted(codes.items(p).tolist()) == [j for j in range(60) if int(codes.primary[j]) == p]
    assert at == int(codes.start[7]) == int(codes.cell_start[21]) == 60
    assert codes.sizes.tolist() == [int((codes.primary == p).sum()) for p in range(7)]
    assert [int(codes.cell_of[j]) for j in range(60)] == [
        3 * int(codes.primary[j]) + int(codes.secondary[j]) for j in range(60)
    ]


def test_types_are_small() -> None:
    """Codes take 4 and 2 bytes per item, indices are int64, and all are on the CPU."""
    codes = some()
    assert (codes.primary.dtype, codes.secondary.dtype) == (torch.int32, torch.int16)
    assert {codes.order.dtype, codes.start.dtype, codes.cell_start.dtype, codes.cell_of.dtype} == {torch.int64}


@pytest.mark.parametrize(
    "ids", [None, list(range(100, 700, 10)), [f"sku-{n:03d}é" for n in range(60)], ["", *map(str, range(59))]]
)
def test_a_file_gives_everything_back(tmp_path: Path, ids: list[object] | None) -> None:
    """Codes, codewords and ids, numbers or text, are read back unchanged."""
    codes = some(ids=None if ids is None else Vocabulary([f"x{i}" for i in ids] if ids[0] == "" else ids))
    codes.save(tmp_path / "new" / "codes.safetensors")
    again = Codes.load(tmp_path / "new" / "codes.safetensors")
    for name in ("primary", "secondary", "codewords", "order", "start", "cell_start"):
        assert torch.equal(getattr(codes, name), getattr(again, name)), name
    assert again.k_secondary == 3
    assert (codes.ids is None and again.ids is None) or codes.ids.ids.to_list() == again.ids.ids.to_list()  # type: ignore[union-attr]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["codes.safetensors"]


def test_aligned_finds_items_by_their_ids() -> None:
    """In another vocabulary each item keeps its code; an item without a code is named."""
    codes = some(ids=Vocabulary(range(100, 160)))
    other = Vocabulary([155, 101, 130])
    found = codes.aligned(other)
    assert found.primary.tolist() == [int(codes.primary[i - 100]) for i in (101, 130, 155)]
    assert found.secondary.tolist() == [int(codes.secondary[i - 100]) for i in (101, 130, 155)]
    with pytest.raises(UserError, match="2 items, such as 7, have no code"):
        codes.aligned(Vocabulary([7, 101, 9]))
    with pytest.raises(UserError, match="no item ids"):
        some().aligned(other)


def test_from_labels_groups_by_label() -> None:
    """Items share a cluster if they share a label, null included; codewords are means of vectors."""
    labels = ["pear", "apple", None, "pear", "fig", None]
    codes = Codes.from_labels(labels)
    assert codes.k_primary == 4
    assert codes.k_secondary == 1
    for i in range(6):
        for j in range(6):
            assert (labels[i] == labels[j]) == (int(codes.primary[i]) == int(codes.primary[j]))
    vectors = torch.randn(6, 3)
    words = Codes.from_labels(labels, vectors=vectors).codewords
    for i in range(6):
        mean = torch.stack([vectors[j] for j in range(6) if labels[j] == labels[i]]).mean(0)
        torch.testing.assert_close(words[int(codes.primary[i])], mean)
    inner = Codes.from_labels(labels, ["b", "a", "a", "a", "b", "b"])
    assert inner.k_secondary == 2
    assert inner.secondary.tolist() == [1, 0, 0, 0, 1, 1]


def test_random_codes_are_even_and_follow_the_seed() -> None:
    """Cell sizes differ by at most one; the seed determines the codes."""
    codes = Codes.random(1000, 7, 5, seed=3)
    sizes = codes.cell_start.diff()
    assert int(sizes.max() - sizes.min()) <= 1
    assert torch.equal(codes.primary, Codes.random(1000, 7, 5, seed=3).primary)
    assert not torch.equal(codes.primary, Codes.random(1000, 7, 5, seed=4).primary)


def test_shuffled_keeps_sizes_only() -> None:
    """The shuffled control has cells of the same sizes and the same codewords, with other items in them."""
    codes = some(600)
    other = codes.shuffled(1)
    assert torch.equal(codes.cell_start, other.cell_start)
    assert torch.equal(codes.codewords, other.codewords)
    assert not torch.equal(codes.order, other.order)
    assert torch.equal(codes.without_secondary().start, codes.start)
    assert codes.without_secondary().k_secondary == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"primary": torch.tensor([0, 9])}, "primary"),
        ({"secondary": torch.tensor([0, -1])}, "secondary"),
        ({"secondary": torch.tensor([0])}, "codes need"),
        ({"k_secondary": 40000}, "40000"),
        ({"ids": Vocabulary([1])}, "1 ids for 2 codes"),
    ],
)
def test_codes_that_do_not_fit_are_refused(change: dict[str, object], words: str) -> None:
    """A one-line error names the mistake."""
    given: dict[str, object] = {
        "primary": torch.tensor([0, 1]),
        "secondary": torch.tensor([0, 1]),
        "codewords": torch.zeros(2, 4),
        "k_secondary": 3,
    }
    with pytest.raises(ValueError, match=words):
        Codes(**{**given, **change})  # type: ignore[arg-type]


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A missing file, a text file and another safetensors file raise one-line errors."""
    (tmp_path / "text").write_text("no tensors here, whatever it is called")
    files.write_tensors(tmp_path / "other", {"x": torch.zeros(1)})
    for name, words in (("none", "no such file"), ("text", "not a readable"), ("other", "holds no codes")):
        with pytest.raises(UserError, match=words):
            Codes.load(tmp_path / name)
