"""Modalities by NAME=SPEC: every source, aligned by id, cached by content; and the real multimodal sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data import cache
from sparring.data.cache import VectorCache, hashes
from sparring.data.interactions import Split
from sparring.data.modalities import sources, vector_files
from sparring.data.modalities.sources import load_modalities, parse_modalities
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.data.table import from_frame
from sparring.training.trained import run_vectors
from support.run_files import flip

RNG = np.random.default_rng(0)


def catalogue(ids: Sequence[int | str], items: pl.DataFrame | None = None) -> Split:
    """Interactions of these items, each taken by two of three queries."""
    pairs = [(query, item) for i, item in enumerate(ids) for query in (i % 3, (i + 1) % 3)]
    frame = pl.DataFrame({"user_id": [query for query, _ in pairs], "item_id": [item for _, item in pairs]})
    return Split(from_frame(frame, items=items))


class Lengths:
    """A stand-in for an encoder: a text's vector is its length, its first letter and 1; it counts what it is asked."""

    where = "lengths"
    settings: dict[str, Any] = {"encoder": "lengths"}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def __init__(self, where: str, device: str) -> None:
        self.fingerprint = f"lengths-{where}"

    def encode(self, texts: Sequence[str], progress: Callable[[int], None]) -> np.ndarray:
        self.asked.extend(texts)
        progress(len(texts))
        return np.array([[len(text), ord(text[0]) % 100, 1.0] for text in texts], dtype=np.float16)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts passed to the encoder, which a stand-in replaces."""
    monkeypatch.setattr(sources, "TextEncoder", Lengths)
    monkeypatch.setattr(Lengths, "asked", [])
    return Lengths.asked


def write(path: Path, rows: int, width: int = 3) -> np.ndarray:
    array = RNG.normal(size=(rows, width)).astype(np.float16)
    np.save(path, array)
    return array


def test_rows_by_an_items_table_beside(tmp_path: Path) -> None:
    """Rows follow the ids of an equally long items table in the same folder, in any order; absent items are missing."""
    array = write(tmp_path / "image.npy", 4)
    pl.DataFrame({"item_id": [30, 10, 99, 20], "asin": ["a", "b", "c", "d"]}).write_parquet(tmp_path / "items.parquet")
    found = load_modalities({"image": str(tmp_path / "image.npy")}, catalogue([10, 20, 30, 40]))
    assert found.rows(np.arange(3))["image"].tolist() == array[[1, 3, 0]].tolist()
    assert found.present["image"].tolist() == [True, True, True, False]
    assert "by the ids of items.parquet" in found.notes[0]
    assert "1 of 4 items lack it" in found.notes[0]


@pytest.mark.parametrize("kind", ["npy", "text.npy", "parquet", "csv", "tsv"])
def test_rows_by_ids_given(tmp_path: Path, kind: str) -> None:
    """FILE.npy:IDS takes ids from an array of numbers or text, or from a table's item column."""
    array, ids = write(tmp_path / "image.npy", 3), [7, 3, 5]
    path = tmp_path / f"ids.{kind}"
    table = pl.DataFrame({"price": [1, 2, 3], "item_id": ids})
    if kind.endswith("npy"):
        np.save(path, np.array(ids if kind == "npy" else [str(i) for i in ids]))
    elif kind == "parquet":
        table.write_parquet(path)
    else:
        table.write_csv(path, separator="," if kind == "csv" else "\t")
    found = load_modalities({"image": f"{tmp_path / 'image.npy'}:{path}"}, catalogue([3, 5, 7]))
    assert found.rows(slice(None))["image"].tolist() == array[[1, 2, 0]].tolist()


def test_rows_by_number_and_by_order(tmp_path: Path) -> None:
    """Ids from 0 on are row numbers, even if some items are absent; as many text ids as rows are in sorted order."""
    array = write(tmp_path / "image.npy", 6)
    found = load_modalities({"image": str(tmp_path / "image.npy")}, catalogue([0, 2, 5]))
    assert found.rows(slice(None))["image"].tolist() == array[[0, 2, 5]].tolist()
    assert "row = id" in found.notes[0]
    sorted_ids = load_modalities({"image": str(tmp_path / "image.npy")}, catalogue(["f", "b", "a", "e", "c", "d"]))
    assert sorted_ids.rows(slice(None))["image"].tolist() == array.tolist()
    assert "in the order of sorted ids" in sorted_ids.notes[0]


def test_ids_from_one_are_never_taken_for_row_numbers(tmp_path: Path) -> None:
    """Ids 1..5 of a catalogue of 6 would all be valid row numbers, each one off: without ids this is an error."""
    write(tmp_path / "image.npy", 6)
    with pytest.raises(UserError, match="6 rows"):
        load_modalities({"image": str(tmp_path / "image.npy")}, catalogue([1, 2, 3, 4, 5]))


@pytest.mark.parametrize("kind", [pl.List(pl.Float64), pl.Array(pl.Float32, 3)])
def test_a_parquet_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pl.DataType) -> None:
    """Lists are matched by id, null lists and lists with a null are missing, and they are copied once, in blocks."""
    monkeypatch.setattr(vector_files, "_ROWS", 2)
    vectors = [[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0], [7.0, None, 9.0], [10.0, 11.0, 12.0]]
    table = pl.DataFrame({"item_id": [4, 3, 2, 1, 77], "v": pl.Series(vectors, dtype=kind)})
    table.write_parquet(tmp_path / "vectors.parquet")
    spec = {"v": f"{tmp_path / 'vectors.parquet'}:v"}
    for _ in range(2):
        found = load_modalities(spec, catalogue([1, 2, 3, 4, 5]), cache=tmp_path / "cache")
        assert found.rows(slice(None))["v"].tolist() == [
            [0.0] * 3,
            [4.0, 5.0, 6.0],
            [0.0] * 3,
            [1.0, 2.0, 3.0],
            [0.0] * 3,
        ]
        assert len(list((tmp_path / "cache" / "columns").iterdir())) == 1
    table.with_columns(item_id=pl.Series([4, 3, 2, 1, 5])).write_parquet(tmp_path / "vectors.parquet")
    changed = load_modalities(spec, catalogue([1, 2, 3, 4, 5]), cache=tmp_path / "cache")
    assert changed.rows(np.array([4]))["v"].tolist() == [[10.0, 11.0, 12.0]]


def test_text_columns_are_joined_and_empty_texts_are_missing(tmp_path: Path, counted: list[str]) -> None:
    """Columns are joined in order without null and blank ones, and equal texts are encoded once.

    An item without any text lacks the modality, and a note counts such items.
    """
    items = pl.DataFrame(
        {
            "item_id": [1, 2, 3, 4, 5, 6],
            "title": ["red", None, " ", "hat", "red", "x"],
            "tags": [["a", "b"], ["c"], [], None, ["a", "b"], []],
            "year": [1999, None, None, 2001, 1999, None],
        }
    )
    told: list[tuple[str, int, int]] = []
    found = load_modalities(
        {"words": "text:title,tags,year"},
        catalogue([1, 2, 3, 4, 5, 6], items),
        cache=tmp_path,
        progress=lambda name, done, total: told.append((name, done, total)),
    )
    assert sorted(counted) == ["c", "hat. 2001", "red. a, b. 1999", "x"]
    assert found.present["words"].tolist() == [True, True, False, True, True, True]
    assert found.rows(slice(None))["words"][:, 0].tolist() == [15.0, 1.0, 0.0, 9.0, 15.0, 1.0]
    assert told == [("words", 4, 4)]
    assert len(found.notes) == 1
    assert "1 without text" in found.notes[0]


def test_only_what_changed_is_encoded_again(tmp_path: Path, counted: list[str]) -> None:
    """A second load encodes nothing; a changed title or a new item is encoded alone; another encoder encodes all."""
    titles = {i: f"title {i}" for i in range(1, 9)}

    def load(encoder: str = "one") -> list[float]:
        counted.clear()
        items = pl.DataFrame({"item_id": list(titles), "title": list(titles.values())})
        found = load_modalities(
            {"t": "text:title"}, catalogue(list(titles), items), text_encoder=encoder, cache=tmp_path
        )
        return found.rows(slice(None))["t"][:, 0].tolist()

    assert load() == [7.0] * 8
    assert len(counted) == 8
    assert load() == [7.0] * 8
    assert counted == []
    titles[3], titles[9] = "a longer title", "new"
    assert load() == [7.0, 7.0, 14.0, 7.0, 7.0, 7.0, 7.0, 7.0, 3.0]
    assert sorted(counted) == ["a longer title", "new"]
    load("two")
    assert len(counted) == 9


def test_a_stopped_encoding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors encoded before a stop are reused, and a half-written file is ignored."""
    monkeypatch.setattr(cache, "_SEGMENT", 4)
    keys = hashes([str(i) for i in range(10)])
    asked: list[int] = []

    def encode(rows: np.ndarray) -> np.ndarray:
        if len(asked) == 8:
            raise KeyboardInterrupt
        asked.extend(rows.tolist())
        return rows[:, None].astype(np.float32) + 1

    with pytest.raises(KeyboardInterrupt):
        VectorCache(tmp_path).encode(keys, encode)
    (tmp_path / "0half.npy").write_bytes(b"half")  # vectors whose keys were not written yet
    asked.clear()
    parts, at = VectorCache(tmp_path).encode(keys, encode)
    assert asked == [8, 9]
    assert np.concatenate(parts)[at, 0].tolist() == [i + 1.0 for i in range(10)]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_segment_is_encoded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit in any file of the cache gives the same vectors, and a line in the log names the file."""
    keys = hashes([str(i) for i in range(10)])

    def encode(rows: np.ndarray) -> np.ndarray:
        return rows[:, None].astype(np.float32) + 1

    VectorCache(tmp_path).encode(keys, encode)
    for path in sorted(tmp_path.iterdir()):
        flip(path, path.stat().st_size * 8 - 12)
        caplog.clear()
        parts, at = VectorCache(tmp_path).encode(keys, encode)
        assert np.concatenate(parts)[at, 0].tolist() == [i + 1.0 for i in range(10)]
        assert path.name in caplog.text


def test_pictures_of_a_folder_and_of_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are matched to items by name or by a column of paths; absent and broken pictures are missing."""

    class Bytes(Lengths):
        def __init__(self, device: str) -> None:
            self.fingerprint = "bytes"

        def encode(self, files: Sequence[Path], progress: Callable[[int], None]) -> np.ndarray:  # type: ignore[override]
            self.asked.extend(file.name for file in files)
            sizes = [len(file.read_bytes()) for file in files]
            return np.array([[size, 1.0] if size != 5 else [np.nan, np.nan] for size in sizes], dtype=np.float16)

    monkeypatch.setattr(sources, "ImageEncoder", Bytes)
    monkeypatch.setattr(Lengths, "asked", [])
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, content in {
        "1.jpg": "aa",
        "02.PNG": "bbb",
        "3.jpeg": "wrong",
        "9.jpg": "not an item",
        "notes.txt": "no",
    }.items():
        (folder / name).write_text(content)
    paths = [str(folder / "1.jpg"), str(folder / "02.PNG"), str(folder / "3.jpeg"), str(folder / "none.jpg")]
    items = pl.DataFrame({"item_id": [1, 2, 3, 4], "poster": paths, "url": ["https://x/1.jpg"] * 4})
    data = catalogue([1, 2, 3, 4], items)
    for number, spec in enumerate((f"images:{folder}", "images:poster")):
        found = load_modalities({"image": spec}, data, cache=tmp_path / "cache")
        assert found.rows(slice(None))["image"][:, 0].tolist() == [2.0, 3.0, 0.0, 0.0]
        assert "1 without a file, 1 files" in found.notes[0]
        assert len(Bytes.asked) == 3, f"asked again in round {number}"
    with pytest.raises(UserError, match="'url' holds web addresses"):
        load_modalities({"image": "images:url"}, data, cache=tmp_path / "cache")
    with pytest.raises(UserError, match="images:nowhere is neither"):
        load_modalities({"image": "images:nowhere"}, data)


def test_behaviour_is_of_the_training_part_only(parts: Split, tmp_path: Path) -> None:
    """Vectors do not change when the validation and test parts are left out or replaced by others."""
    whole = load_modalities({"b": "behaviour:5"}, parts, cache=tmp_path / "a")
    alone = load_modalities({"b": "behaviour:5"}, Split(parts.train, parts.test, parts.valid), cache=tmp_path / "b")
    assert whole.widths == {"b": 5}
    assert whole.rows(slice(None))["b"].tolist() == alone.rows(slice(None))["b"].tolist()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("nothing", "'nothing'"),
        ("text:plot", "no column 'plot': it has title"),
        ("none.npy", "no such file: none.npy"),
        ("none.parquet:v", "no such file: none.parquet"),
        ("none.parquet", "which column of none.parquet"),
        ("behaviour:0", "behaviour:0 has no dimensions"),
        ("behaviour:runs/none", "no such run folder: runs/none"),
        ("{}/flat.npy", r"has the shape \(4,\)"),
        ("{}/short.npy:{}/ids.npy", "3 rows, .*ids.npy has 4 ids"),
        ("{}/four.npy:{}/twice.npy", "item 2 has 2 rows in"),
        ("{}/four.npy:{}/strange.npy", "none of the ids in"),
        ("{}/four.npy:{}/flat.npy", "not one id per row"),
        ("{}/four.npy:{}/ids.txt", "cannot read ids from"),
        ("{}/zero.npy", "no item has modality 'x'"),
        ("{}/broken.npy", "readable"),
        ("{}/lists.parquet:ragged", "lists of 1 to 2 numbers"),
        ("{}/lists.parquet:item_id", "not lists of numbers"),
        ("{}/lists.parquet:none", "'none': .* item_id, ragged"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, spec: str, match: str) -> None:
    """Every faulty source raises a one-line error that names it."""
    np.save(tmp_path / "flat.npy", np.zeros(4))
    np.save(tmp_path / "short.npy", np.ones((3, 2)))
    np.save(tmp_path / "four.npy", np.ones((4, 2)))
    np.save(tmp_path / "zero.npy", np.zeros((4, 2)))
    np.save(tmp_path / "ids.npy", np.arange(1, 5))
    np.save(tmp_path / "twice.npy", np.array([1, 2, 2, 3]))
    np.save(tmp_path / "strange.npy", np.array([11, 12, 13, 14]))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY")
    pl.DataFrame({"item_id": [1, 2], "ragged": [[1.0], [1.0, 2.0]]}).write_parquet(tmp_path / "lists.parquet")
    items = pl.DataFrame({"item_id": [1, 2, 3, 4], "title": ["a", "b", "c", "d"]})
    with pytest.raises(UserError, match=match) as caught:
        load_modalities(
            {"x": spec.replace("{}", str(tmp_path))},
            catalogue([1, 2, 3, 4], items),
            cache=tmp_path / "cache",
            run_vectors=run_vectors,
        )
    assert "\n" not in str(caught.value)


def test_text_without_an_items_table_is_one_line() -> None:
    """Text needs a table of items, and the error says which option gives one."""
    with pytest.raises(UserError, match="needs an items table: give one with --items"):
        load_modalities({"x": "text:title"}, catalogue([1, 2, 3]))


def test_words_of_the_command_line() -> None:
    """NAME=SPEC is cut at the first equals sign; a word without one, or a name twice, is an error."""
    assert parse_modalities(["a=x.npy", "b=text:t=1"]) == {"a": "x.npy", "b": "text:t=1"}
    wrong = [
        (["a"], "'a'"),
        (["=x"], "write NAME"),
        (["a=x", "a=y"], "'a' is given twice: x and y"),
    ]
    for words, match in wrong:
        with pytest.raises(UserError, match=match):
            parse_modalities(words)


REAL = {
    "ml1m_mm": {"image": "{}/image_feat.npy", "text": "{}/text_feat.npy"},
    "tiktok_mm": {"image": "{}/image_feat.npy", "audio": "{}/audio_feat.npy"},
}


@pytest.mark.parametrize("name", REAL)
def test_real_vectors_are_in_the_rows_of_their_items(real_data: Path, name: str) -> None:
    """On a real set, items get exactly their rows of the file, also if a threshold on ratings drops items.

    MovieLens posters are missing for exactly the films without one in the items table.
    """
    folder = real_data / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    data = read(folder, min_rating=4) if name == "ml1m_mm" else read(folder)
    found = load_modalities({key: spec.replace("{}", str(folder)) for key, spec in REAL[name].items()}, Split(data))
    some = np.array([0, 1, 77, len(found) - 1])
    ids = data.item_ids.decode(some)
    for key, spec in REAL[name].items():
        want = np.load(spec.replace("{}", str(folder)), mmap_mode="r")[ids].astype(np.float32)
        assert np.array_equal(found.rows(some)[key].numpy(), want)
    if name == "ml1m_mm":
        assert data.item_table is not None
        assert len(found) < 3706
        assert np.array_equal(found.present["image"], data.item_table["has_image"].to_numpy())


@pytest.mark.parametrize("name", ["amazon_electronics_2023", "amazon_beauty"])
def test_real_titles(real_data: Path, tmp_path: Path, counted: list[str], name: str) -> None:
    """Every item of the real sets has a title to encode, and most items have behaviour from the training part."""
    if not (real_data / name).is_dir():
        pytest.skip(f"no {real_data / name}")
    parts = split(read(real_data / name))
    found = load_modalities({"text": "text:title", "behaviour": "behaviour:16"}, parts, cache=tmp_path)
    assert found.present["text"].all()
    assert found.present["behaviour"].mean() > 0.95
    some = np.array([0, 5, len(found) - 1])
    titles = parts.train.titles()
    assert titles is not None
    assert found.rows(some)["text"][:, 0].tolist() == [len(titles[i].strip()) for i in some]
    assert set(counted) == {title.strip() for title in titles}
