"""The routes of the page: files, search, values, reports, images and negatives, and the files they must not serve."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fastapi.testclient import TestClient

from sparring.serving.http import pages
from support.made_run import MadeRun, make_run
from support.run_files import approve


def found(client: TestClient, kind: str, text: str, limit: int = 8) -> list[Any]:
    answer = client.get("/page/search", params={"kind": kind, "text": text, "limit": limit})
    assert answer.status_code == 200
    return [each["id"] for each in answer.json()["found"]]


def matching(truth: MadeRun, text: str) -> list[int]:
    """Item ids by match quality, then count, then id, in a plain loop."""
    taken = np.bincount(truth.seen.ravel(), minlength=len(truth.item_ids))
    keys = []
    for row, (id, title) in enumerate(zip(truth.item_ids, truth.table["title"], strict=True)):
        words = text.lower().split()
        if str(id) == text:
            keys.append((0, -taken[row], id))
        elif str(id).startswith(text):
            keys.append((1, -taken[row], id))
        elif title.startswith(" ".join(words)):
            keys.append((2, -taken[row], id))
        elif all(word in title for word in words):
            keys.append((3, -taken[row], id))
    return [id for _, _, id in sorted(keys)]


@pytest.mark.parametrize("text", ["1007", "10", "thing 1", "1 thing", "THING  5", "hing", "9", "none", "[", "%", "\\"])
def test_matches_are_those_of_a_plain_loop_in_its_order(client: TestClient, truth: MadeRun, text: str) -> None:
    """Equal ids, id prefixes, title prefixes, titles with all words; frequent ones first; case does not matter."""
    answer = client.get("/page/search", params={"kind": "item", "text": text, "limit": 50}).json()
    expected = matching(truth, text.lower() if text != "THING  5" else "thing 5")
    assert [each["id"] for each in answer["found"]] == expected[:50]
    assert answer["total"] == len(expected)
    assert found(client, "item", text, limit=3) == expected[:3]


def test_without_a_text_the_most_active_come_first(client: TestClient, truth: MadeRun) -> None:
    """Items by count; all users have five items, so they are in id order."""
    taken = np.bincount(truth.seen.ravel(), minlength=len(truth.item_ids))
    assert found(client, "item", "", limit=5) == [
        truth.item_ids[at] for at in np.lexsort((np.arange(len(taken)), -taken))[:5]
    ]
    assert found(client, "user", "") == [truth.user(row) for row in range(8)]
    assert found(client, "user", "USER-1") == [truth.user(row) for row in range(10, 18)]


def test_search_sees_items_as_they_are_now(client: TestClient, truth: MadeRun) -> None:
    """A new item is found at once, a renamed one only by its new title, a deleted one no longer."""
    renamed, deleted = truth.item_ids[0], truth.item_ids[1]
    items = [{"id": 5, "title": "brand new lamp", "like": [truth.item_ids[3]]}, {"id": renamed, "title": "old lamp"}]
    assert client.put("/v1/items", json={"items": items}).status_code == 200
    assert client.request("DELETE", "/v1/items", json={"ids": [deleted]}).status_code == 200
    assert sorted(map(str, found(client, "item", "lamp"))) == sorted(["5", str(renamed)])
    assert renamed not in found(client, "item", "thing 0")
    assert deleted not in found(client, "item", str(deleted))
    assert client.get("/page/negatives", params={"item": "5"}).json()["state"] == "absent"


@pytest.mark.parametrize(
    "path",
    [
        "../pages.py",
        "..%2fpages.py",
        "%2e%2e/pages.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "none.js",
        "index.html%00.js",
        ".",
        "a" * 5000,
    ],
)
def test_files_are_served_by_their_names_only(client: TestClient, path: str) -> None:
    """No path trick opens a file."""
    answer = client.get(f"/page/files/{path}")
    assert answer.status_code == 404
    assert "detail" in answer.json()


def test_the_page_and_its_files_are_there(client: TestClient) -> None:
    """Every file that the page refers to is served with its type and loads nothing from other hosts."""
    start = client.get("/")
    assert start.status_code == 200
    assert "default-src 'none'" in start.headers["content-security-policy"]
    assert "unsafe" not in start.headers["content-security-policy"]
    folder = Path(pages.__file__).parent / "page"
    for file in folder.iterdir():
        answer = client.get(f"/page/files/{file.name}")
        assert answer.content == file.read_bytes()
        kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
        assert answer.headers["content-type"].startswith(kinds[file.suffix])
        assert "http://" not in file.read_text().replace("http://www.w3.org/", "")
        assert "https://" not in file.read_text()
        assert "innerHTML" not in file.read_text()


IMAGES = {
    "inside.png": 200,
    "deep/er.jpg": 200,
    "./deep/../inside.png": 200,
    "../outside.png": 404,
    "deep/../../outside.png": 404,
    "link.png": 404,
    "notes.txt": 404,
    "run.json": 404,
    "drawing.svg": 404,
    "deep": 404,
    "missing.png": 404,
    "https://example.org/a.png": 404,
    "zero\0byte.png": 404,
    "x" * 5000 + ".png": 404,
    "": 404,
}


def test_images_lie_below_the_run_or_they_are_not_served(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Images inside the run folder are served with their type; files outside, by .., full path or link, are not."""
    truth = make_run(tmp_path / "runs" / "first")
    folder = truth.folder
    (folder / "deep").mkdir()
    for name in ("inside.png", "deep/er.jpg", "notes.txt", "drawing.svg", "../outside.png"):
        (folder / name).write_bytes(b"picture")
    wanted = {**IMAGES, str(folder / "inside.png"): 200, str(folder.parent / "outside.png"): 404}
    values = [*wanted, *[None] * (len(truth.item_ids) - len(wanted))]
    truth.table.with_columns(pl.Series("image", values, dtype=pl.String)).write_parquet(folder / "item_table.parquet")
    approve(folder)
    client = serving(folder)
    (folder / "link.png").symlink_to(folder.parent / "outside.png")  # a run that has one already is not opened
    for id, (value, status) in zip(truth.item_ids, wanted.items(), strict=False):
        answer = client.get("/page/image", params={"item": str(id)})
        assert answer.status_code == status, value[:80]
        assert answer.headers["x-content-type-options"] == "nosniff"
        if status == 200:
            assert answer.content == b"picture"
            assert answer.headers["content-type"] in ("image/png", "image/jpeg")
        else:
            assert "detail" in answer.json()


@pytest.mark.parametrize(
    ("path", "values", "status"),
    [
        ("search", {"kind": "cat"}, 422),
        ("search", {"limit": "0"}, 422),
        ("search", {"limit": "1000"}, 422),
        ("search", {"text": "x" * 201}, 422),
        ("search", {"run": "none"}, 404),
        ("values", {}, 422),
        ("values", {"column": "none"}, 404),
        ("report", {"which": "../../x"}, 422),
        ("report", {"which": "comparison"}, 404),
        ("image", {"item": "none"}, 404),
        ("image", {"item": "1000"}, 404),
        ("negatives", {"item": "none"}, 404),
        ("negatives", {"item": ""}, 422),
    ],
)
def test_bad_questions_get_one_line(client: TestClient, path: str, values: dict[str, str], status: int) -> None:
    """Each bad request gets its status and one line."""
    answer = client.get(f"/page/{path}", params=values)
    assert answer.status_code == status
    assert len(answer.json()["detail"].splitlines()) == 1


def test_values_of_a_column_are_counted(client: TestClient) -> None:
    """The most frequent values come first; columns of fractions, dates and lists have none."""
    answer = client.get("/page/values", params={"column": "category"}).json()["values"]
    assert {each["value"]: each["count"] for each in answer} == {"apple": 20, "bread": 20}
    for column in ("price", "since", "tags"):
        assert client.get("/page/values", params={"column": column}).json() == {"values": []}


def test_a_run_that_is_still_written_shows_what_there_is(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """An incomplete line is skipped, NaN becomes null, and a missing result leaves the metrics empty."""
    lines = [{"epoch": 1, "loss": float("nan"), "ndcg@10": 0.1}, {"epoch": 2, "loss": 0.5, "ndcg@10": 0.2}]
    (truth.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"epoch": 3, "lo')
    approve(truth.folder)
    (run,) = serving(truth.folder).get("/page/runs").json()["runs"]
    assert run["epochs"] == [{"epoch": 1, "loss": None, "ndcg@10": 0.1}, {"epoch": 2, "loss": 0.5, "ndcg@10": 0.2}]
    assert run["test"] == {}
    assert run["best_epoch"] is None
    assert run["reports"] == []
    assert run["problems"] == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_damaged_figures_are_not_shown(truth: MadeRun, serving: Callable[..., TestClient], name: str) -> None:
    """A figure that was changed after training is left out, and the page names its file."""
    (truth.folder / "metrics.jsonl").write_text('{"epoch": 1, "loss": 0.5}\n')
    (truth.folder / "result.json").write_text('{"best_epoch": 1, "test": {"metrics": {"ndcg@10": 0.25}}}\n')
    approve(truth.folder)
    client, shown = serving(truth.folder), {"metrics.jsonl": [{"epoch": 1, "loss": 0.5}], "result.json": 1}
    path = truth.folder / name
    for text in (path.read_text(), path.read_text().replace("5", "9"), None):
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        (run,) = client.get("/page/runs").json()["runs"]
        found = {"metrics.jsonl": run["epochs"], "result.json": run["best_epoch"]}
        whole = text is not None and "9" not in text
        assert found == shown | ({} if whole else {name: [] if name == "metrics.jsonl" else None})
        assert [name in problem for problem in run["problems"]] == ([] if whole else [True])


def test_data_that_is_gone_is_said_and_a_slow_read_is_waited_for(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is asked to retry while the data is read, and gets the reason if that fails."""
    from sparring.core.errors import UserError

    def slow(trained: Any) -> Any:
        time.sleep(0.3)
        raise UserError("the data is no longer there")

    monkeypatch.setattr(pages, "WAIT", 0.05)
    client = serving(truth.folder, read_split=slow)
    states = []
    while not states or (states[-1]["state"] == "working" and len(states) < 100):
        states.append(client.get("/page/negatives", params={"item": "1000"}).json())
    assert states[0] == {"state": "working"}
    assert states[-1] == {"state": "absent", "why": "the data is no longer there"}


def test_negatives_that_cannot_be_had(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service without training data, data beyond the limit and an item added later: each is said in one line."""
    client = serving(truth.folder)
    asked = client.get("/page/negatives", params={"item": "1000"}).json()
    assert asked["state"] == "absent"
    assert "cannot read" in asked["why"]
    client.stop()  # type: ignore[attr-defined]
    client = serving(truth.folder, read_split=lambda trained: pytest.fail("the data was read"))
    assert client.put("/v1/items", json={"items": [{"id": 5, "like": [1000]}]}).status_code == 200
    assert "added after" in client.get("/page/negatives", params={"item": "5"}).json()["why"]
    monkeypatch.setattr(pages, "MAX_PAIRS", -1)
    assert "limit" in client.get("/page/negatives", params={"item": "1000"}).json()["why"]


def test_negatives_are_computed_one_after_another(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than QUEUED computations wait, and no more than CACHED results are kept."""
    go, reads = threading.Event(), list[int]()

    def slow(trained: Any) -> Any:
        go.wait(20)
        reads.append(1)
        raise ValueError("nothing here")

    for name, value in (("QUEUED", 2), ("CACHED", 1), ("WAIT", 0.02)):
        monkeypatch.setattr(pages, name, value)
    client = serving(truth.folder, read_split=slow)

    def ask(row: int) -> str:
        return str(client.get("/page/negatives", params={"item": str(truth.item_ids[row])}).json()["state"])

    def answered(row: int, times: int) -> bool:
        until = time.monotonic() + 10
        while len(reads) < times and time.monotonic() < until:
            time.sleep(0.01)
        return ask(row) == "absent"

    assert [ask(row) for row in (0, 1, 2, 3)] == ["working"] * 4
    go.set()
    assert answered(1, 2)
    assert len(reads) == 2  # the third and the fourth were never queued
    monkeypatch.setattr(pages, "WAIT", 10)
    assert ask(4) == "absent"  # the result of row 0 makes room
    assert len(reads) == 3
    assert ask(0) == "absent"
    assert len(reads) == 4


def test_images_with_impossible_names(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """A name that is too long, or has a zero byte, is no image."""
    truth = make_run(tmp_path / "run")
    names = ["x" * 5000 + ".png", "a\0b.png"]
    table = pl.read_parquet(truth.folder / "item_table.parquet")
    images = pl.Series("image", names + [None] * (len(table) - 2), dtype=pl.String)
    table.with_columns(images).write_parquet(truth.folder / "item_table.parquet")
    approve(truth.folder)
    client = serving(truth.folder)
    for item in truth.item_ids[:2]:
        assert client.get("/page/image", params={"item": str(item)}).status_code == 404
