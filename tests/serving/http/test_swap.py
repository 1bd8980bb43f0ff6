"""A newer run replaces an older one completely or not at all, and item changes carry over."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from sparring.core.errors import UserError
from sparring.serving.http import runs, served_run
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.server import _watch
from sparring.serving.http.store import Store
from sparring.serving.index import Index, index_files
from sparring.serving.index.run_index import FOLDER
from sparring.training.folder import delete_run, hold, model_hash
from sparring.training.trained import load
from support.made_run import DIM, MadeRun, make_run
from support.run_files import approve, change_tensors


def index_of(truth: MadeRun) -> None:
    """Build an exact index in a run folder, as `sparring index` does."""
    vectors = load(truth.folder).model.item_vectors().numpy()
    meta = {"model": model_hash(truth.folder), "measured": {"recall": 1.0}}
    Index(vectors, np.arange(len(vectors)), meta=meta).save(truth.folder / FOLDER)


def best(client: TestClient, user: str = "user-02", k: int = 4, **more: Any) -> list[Any]:
    answer = client.post("/v1/recommend", json={"user": user, "k": k, **more})
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["results"][0]["items"]]


def expected(truth: MadeRun, row: int = 2, k: int = 4) -> list[int]:
    return [item for item, _ in truth.best(truth.users[row], k, truth.seen[row].tolist())]


def test_a_newer_run_answers_after_the_reload(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Another folder, or the same one rewritten, is served after the reload; the generation rises."""
    old, new = make_run(tmp_path / "old", 1), make_run(tmp_path / "new", 2)
    client = serving(old.folder)
    assert best(client) == expected(old)
    answer = client.post("/v1/reload", json={"run": str(new.folder)}).json()
    assert (answer["run"], answer["generation"], answer["items"]) == ("old", 2, 60)
    assert best(client) == expected(new) != expected(old)
    newest = make_run(new.folder, 3)
    assert best(client) == expected(new)
    assert client.post("/v1/reload", json={}).json()["generation"] == 3
    assert best(client) == expected(newest)


def test_changes_fit_a_run_of_another_shape(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """The folder is rewritten with other dimensions and another type of column: items put by `like` move, items put
    by vector wait, values of the wrong type are dropped, and the log names the waiting items."""
    old = make_run(tmp_path / "run", 1)
    client = serving(old.folder)
    items = [{"id": 1, "like": [old.item_ids[3]], "year": 1999, "category": "tea"}, {"id": 2, "vector": [1.0] * DIM}]
    assert client.put("/v1/items", json={"items": items}).status_code == 200
    client.stop()  # type: ignore[attr-defined]
    assert delete_run(old.folder) is not None
    new = make_run(tmp_path / "run", 2, dim=DIM + 3)
    assert new.table is not None
    new.table.with_columns(category=np.arange(len(new.table))).write_parquet(new.folder / "item_table.parquet")
    approve(new.folder)
    events: list[tuple[str, dict[str, object]]] = []
    registry = RunRegistry(
        [new.folder],
        Store(new.folder / "serve" / "items.sqlite"),
        log=lambda event, **facts: events.append((event, facts)),
    )
    served = registry.served()
    at = served.catalogue.find([1])
    np.testing.assert_allclose(served.vectors(at)[0], new.items[3], rtol=1e-5)
    assert (served.catalogue.values(at, "year"), served.catalogue.values(at, "category")) == ([1999], [None])
    assert served.waiting == {"2": 2}
    assert [(event, facts["items"], facts["first"]) for event, facts in events] == [("items wait", 1, 2)]
    registry.close()


def test_no_request_is_dropped_or_mixed_during_swaps(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """While two runs alternate, every response is complete and comes from the run of its generation."""
    runs = [make_run(tmp_path / "a", 1), make_run(tmp_path / "b", 2)]
    client = serving(runs[0].folder)
    wrong: list[str] = []
    seen: set[int] = set()
    stop = threading.Event()

    def ask() -> None:
        at = 0
        while not stop.is_set():
            at = (at + 1) % 40
            answer = client.post("/v1/recommend", json={"user": f"user-{at:02}", "k": 4})
            if answer.status_code != 200:
                wrong.append(answer.text)
                continue
            body = answer.json()
            seen.add(body["generation"])
            if [item["id"] for item in body["results"][0]["items"]] != expected(runs[(body["generation"] - 1) % 2], at):
                wrong.append(str(body))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(6):
        assert client.post("/v1/reload", json={"run": str(runs[(turn + 1) % 2].folder)}).status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(seen) > 1


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no model": lambda run: (run / "model.safetensors").unlink(),
    "half a model": lambda run: (run / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:500]),
    "no ids": lambda run: (run / "item_ids.parquet").unlink(),
    "broken ids": lambda run: (run / "item_ids.parquet").write_bytes(b"PAR1" * 10),
    "other ids": lambda run: shutil.copy(run / "query_ids.parquet", run / "item_ids.parquet"),
    "no seen": lambda run: (run / "seen.safetensors").unlink(),
    "no run.json": lambda run: (run / "run.json").unlink(),
    "empty run.json": lambda run: (run / "run.json").write_text("{}"),
    "strange setup": lambda run: (run / "run.json").write_text(json.dumps({"recipe": "x", "setup": {"dim": "many"}})),
    "index of another model": lambda run: (run / FOLDER / index_files.META).write_text(
        (run / FOLDER / index_files.META).read_text().replace('"model": "', '"model": "0')
    ),
    "half an index": lambda run: next((run / FOLDER).glob("vectors-*")).write_bytes(b"\x93NUMPY"),
    "one bit of the index": lambda run: flip(next((run / FOLDER).glob("vectors-*"))),
    "no index.json but files": lambda run: (run / FOLDER / index_files.META).write_text("{"),
    "folder gone": lambda run: shutil.rmtree(run),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_broken_run_is_refused_and_the_last_good_one_answers(
    tmp_path: Path, serving: Callable[..., TestClient], damage: str
) -> None:
    """422 with the folder in the message; generation and responses stay, and a good run can still be loaded."""
    good, bad = make_run(tmp_path / "good", 1), make_run(tmp_path / "bad", 2)
    index_of(bad)
    client = serving(good.folder)
    DAMAGE[damage](bad.folder)
    answer = client.post("/v1/reload", json={"run": str(bad.folder)})
    assert (answer.status_code, len(answer.json()["detail"].splitlines())) == (422, 1), answer.text
    assert str(bad.folder) in answer.json()["detail"]
    assert best(client) == expected(good)
    assert client.get("/readyz").json()["generation"] == 1
    mended = make_run(tmp_path / "mended", 3)
    index_of(mended)
    assert client.post("/v1/reload", json={"run": str(mended.folder)}).status_code == 200
    assert best(client) == expected(mended)


def test_a_diverged_model_is_refused(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """NaN in the vectors is detected before the swap."""
    good, bad = make_run(tmp_path / "good", 1), make_run(tmp_path / "bad", 2)
    change_tensors(bad.folder, "model", **{"item.weight": torch.full(bad.items.shape, float("nan"))})
    client = serving(good.folder)
    assert client.post("/v1/reload", json={"run": str(bad.folder)}).status_code == 422
    assert best(client) == expected(good)


@pytest.mark.parametrize(
    "path", ["/etc", "/", "..", "../../..", "{root}/../..", "\x00", "x" * 5000, "~", "{root}/link"]
)
def test_runs_are_loaded_from_the_allowed_folders_only(
    truth: MadeRun, serving: Callable[..., TestClient], tmp_path: Path, path: str
) -> None:
    """Path tricks, links included, get a 4xx."""
    root = truth.folder.parent
    elsewhere = make_run(tmp_path / "elsewhere" / "run", 2)
    (root / "link").symlink_to(elsewhere.folder)
    client = serving(truth.folder)
    answer = client.post("/v1/reload", json={"run": path.replace("{root}", str(root))})
    assert answer.status_code in (403, 422), answer.text
    assert best(client) == expected(truth)
    assert client.post("/v1/reload", json={"run": str(elsewhere.folder)}).status_code == 403
    assert (
        serving(truth.folder, store=tmp_path / "s", roots=[tmp_path])
        .post("/v1/reload", json={"run": str(elsewhere.folder)})
        .status_code
        == 200
    )


def test_changes_go_with_the_swap(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """In a new model `like` is recomputed, a vector waits, an item that was trained meanwhile gets its trained vector
    and keeps its columns, a deleted one stays deleted. Back in the old model the vector is restored."""
    old, new = make_run(tmp_path / "old", 1, items=60), make_run(tmp_path / "new", 2, items=70)
    client = serving(old.folder)
    known_later = new.item_ids[65]
    items = [
        {"id": "liked", "like": [old.item_ids[4]]},
        {"id": "given", "vector": [2.0] * DIM, "title": "Given"},
        {"id": known_later, "title": "Put by hand", "like": [old.item_ids[0]]},
        {"id": old.item_ids[5], "title": "Renamed"},
    ]
    assert client.put("/v1/items", json={"items": items}).status_code == 200
    client.request("DELETE", "/v1/items", json={"ids": [old.item_ids[6]]})
    answer = client.post("/v1/reload", json={"run": str(new.folder)}).json()
    assert answer["waiting"] == ["given"]
    found = client.post("/v1/similar", json={"item": new.item_ids[0], "k": 100}).json()["results"][0]["items"]
    scores, titles = {item["id"]: item["score"] for item in found}, {item["id"]: item["title"] for item in found}
    assert scores["liked"] == pytest.approx(scores[new.item_ids[4]], rel=1e-4)
    assert "given" not in scores
    assert old.item_ids[6] not in scores
    assert titles[known_later] == "Put by hand"
    assert titles[old.item_ids[5]] == "Renamed"
    assert client.post("/v1/reload", json={"run": str(old.folder)}).json()["waiting"] == []
    found = client.post("/v1/similar", json={"item": old.item_ids[0], "k": 100}).json()["results"][0]["items"]
    assert {item["id"]: item["score"] for item in found}["given"] == pytest.approx(2.0 * old.items[0].sum(), rel=1e-4)


def test_an_item_that_the_new_run_knows_gets_its_vector(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """A trained vector replaces a provisional one."""
    old, new = make_run(tmp_path / "old", 1, items=60), make_run(tmp_path / "new", 2, items=70)
    client = serving(old.folder)
    item = new.item_ids[65]
    client.put("/v1/items", json={"items": [{"id": item, "like": [old.item_ids[0]]}]})
    client.post("/v1/reload", json={"run": str(new.folder)})
    found = client.post("/v1/similar", json={"item": new.item_ids[3], "k": 100}).json()["results"][0]["items"]
    assert {each["id"]: each["score"] for each in found}[item] == pytest.approx(
        float(new.items[65] @ new.items[3]), rel=1e-4
    )


def test_a_swap_is_remembered(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """A restart serves the swapped run, or the given one on request or if the swapped one is gone."""
    old, new = make_run(tmp_path / "old", 1), make_run(tmp_path / "new", 2)
    first = serving(old.folder)
    first.post("/v1/reload", json={"run": str(new.folder)})
    first.stop()  # type: ignore[attr-defined]
    second = serving(old.folder)
    assert best(second) == expected(new)
    second.stop()  # type: ignore[attr-defined]
    third = serving(old.folder, as_given=True)
    assert best(third) == expected(old)
    third.stop()  # type: ignore[attr-defined]
    shutil.rmtree(new.folder)
    assert best(serving(old.folder)) == expected(old)


def test_a_run_that_changes_on_disk_is_swapped_in(tmp_path: Path) -> None:
    """The watch reloads a rewritten folder, and retries a broken one only after it changes."""
    truth = make_run(tmp_path / "run", 1)
    registry = RunRegistry([truth.folder], Store(tmp_path / "items.sqlite"))
    stop = threading.Event()
    watch = threading.Thread(target=_watch, args=(registry, 0.05, stop))
    watch.start()
    try:
        make_run(truth.folder, 2)
        wait(lambda: registry.served().generation == 2)
        (truth.folder / "model.safetensors").write_bytes(b"broken")
        time.sleep(0.4)
        assert registry.served().generation == 2
        make_run(truth.folder, 3)
        wait(lambda: registry.served().generation == 3)
        held = hold(truth.folder)  # like a training that writes the best epoch so far
        make_run(truth.folder, 4)
        time.sleep(0.4)
        assert registry.served().generation == 3
        held.release()
        wait(lambda: registry.served().generation == 4)
    finally:
        stop.set()
        watch.join()
        registry.close()


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_run_of_before_leaves_the_memory(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Searcher, routes and metrics hold no reference once its requests are answered."""
    old, new = make_run(tmp_path / "old", 1), make_run(tmp_path / "new", 2)
    client = serving(old.folder)
    best(client)
    kept = weakref.ref(client.service.registry.served())  # type: ignore[attr-defined]
    client.get("/v1/info")
    client.get("/metrics")
    client.post("/v1/reload", json={"run": str(new.folder)})
    gc.collect()
    assert kept() is None


def test_serving_leaves_out_the_test_part_and_what_was_never_trained(
    tmp_path: Path, serving: Callable[..., TestClient]
) -> None:
    """A user's lists, with and without an index, contain neither; the run reports how many items are untrained."""
    truth = make_run(tmp_path / "run", 4)
    taken, blank = [int(row) for row in range(60) if row not in truth.seen[2].tolist()][:5], [40, 41]
    start = torch.zeros(len(truth.users) + 1, dtype=torch.long)
    start[3:] = len(taken)  # of user 2
    tensors = {"test_start": start, "test_items": torch.tensor(taken, dtype=torch.int32)}
    change_tensors(truth.folder, "seen", **tensors, untrained_items=torch.tensor(blank, dtype=torch.int32))
    for with_index in (False, True):
        if with_index:
            index_of(truth)
        client = serving(truth.folder)
        without = [*truth.seen[2].tolist(), *taken, *blank]
        assert best(client, k=60) == [item for item, _ in truth.best(truth.users[2], 60, without)]
        assert sorted(best(client, k=60, exclude_seen=False)) == sorted(
            set(truth.item_ids) - {truth.item_ids[row] for row in blank}
        )
        assert "2 items" in client.get("/v1/info").json()["run"]["notes"][0]
        assert len(client.get("/v1/users/user-02").json()["history"]) == len(truth.seen[2]) + len(taken)
        answer = client.post("/v1/recommend", json={"history": [truth.item_ids[3], truth.item_ids[40]], "k": 3}).json()[
            "results"
        ][0]
        assert answer["unknown"] == [truth.item_ids[40]]
        assert client.post("/v1/similar", json={"item": truth.item_ids[40]}).status_code == 404
        new = {"id": "new", "like": [truth.item_ids[41]]}  # an invalid place
        assert client.put("/v1/items", json={"items": [new]}).status_code == 422
        client.stop()  # type: ignore[attr-defined]


def test_an_item_that_was_never_trained_can_be_put(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Columns alone do not list it; `like` does, also in the next run that has not trained on it."""
    old, new = make_run(tmp_path / "old", 4), make_run(tmp_path / "new", 5)
    for truth in (old, new):
        change_tensors(truth.folder, "seen", untrained_items=torch.tensor([40], dtype=torch.int32))
    client, item = serving(old.folder), old.item_ids[40]
    assert client.put("/v1/items", json={"items": [{"id": item, "price": 3.0}]}).status_code == 200
    assert item not in best(client, k=60, exclude_seen=False)
    assert client.get(f"/v1/items/{item}").json()["placed"] is False
    assert client.put("/v1/items", json={"items": [{"id": item, "like": [old.item_ids[7]]}]}).status_code == 200
    assert item in best(client, k=60, exclude_seen=False)
    assert client.post("/v1/reload", json={"run": str(new.folder)}).status_code == 200
    found = client.post("/v1/recommend", json={"user": "user-02", "k": 60}).json()["results"][0]["items"]
    scores = {each["id"]: each["score"] for each in found}
    assert scores[item] == pytest.approx(float(new.users[2] @ new.items[7]), rel=1e-4)
    assert client.request("DELETE", "/v1/items", json={"ids": [item]}).status_code == 200
    assert client.put("/v1/items", json={"items": [{"id": item, "price": 4.0}]}).status_code == 200
    assert item not in best(client, k=60, exclude_seen=False)


def test_a_failing_watch_says_so_and_goes_on(
    tmp_path: Path, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic, an unfinished run and a damaged table show in /readyz and the log, and the next good run is loaded."""
    truth = make_run(tmp_path / "run", 1)
    client = serving(truth.folder)
    registry, events = client.service.registry, list[tuple[str, Any]]()  # type: ignore[attr-defined]
    registry.log = lambda event, **facts: events.append((event, facts))
    stop, load = threading.Event(), runs.load_served

    class Panic(BaseException):
        pass

    def panics(*_: Any) -> None:
        raise Panic("out of range")

    watch = threading.Thread(target=_watch, args=(registry, 0.05, stop))
    watch.start()

    def degraded(word: str) -> bool:
        state = client.get("/readyz")
        return state.status_code == 200 and word in str(state.json().get("problems"))

    try:
        monkeypatch.setattr(runs, "load_served", panics)
        make_run(truth.folder, 2)
        wait(lambda: degraded("out of range"))
        monkeypatch.setattr(runs, "load_served", load)
        approve(make_run(truth.folder, 3).folder, finished=False)
        wait(lambda: degraded("not finished"))
        assert str(tmp_path) not in client.get("/readyz").text
        make_run(truth.folder, 4)
        (truth.folder / "item_table.parquet").write_bytes(b"PAR1" + b"\xff" * 200 + b"\x40\x00\x00\x00PAR1")
        wait(lambda: degraded("item_table.parquet"))
        assert best(client) == expected(truth)
        newest = make_run(truth.folder, 5)
        wait(lambda: client.get("/readyz").json()["status"] == "ready")
        assert best(client) == expected(newest)
    finally:
        stop.set()
        watch.join()
    failures = [facts["why"] for event, facts in events if event == "watch failed"]
    for word in ("out of range", "not finished", "parquet"):
        assert any(word in why for why in failures), failures


def test_only_finished_runs_are_served(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """An unfinished run is refused at the start and by a reload, and taken where the operator allows it."""
    good, half = make_run(tmp_path / "good", 1), make_run(tmp_path / "half", 2)
    approve(half.folder, finished=False)
    with pytest.raises(UserError, match="not finished"):
        RunRegistry([half.folder], Store(tmp_path / "a.sqlite"))
    client = serving(good.folder)
    answer = client.post("/v1/reload", json={"run": str(half.folder)})
    assert (answer.status_code, "not finished" in answer.json()["detail"]) == (422, True)
    assert best(client) == expected(good)
    held = hold(half.folder)
    assert "in progress" in client.post("/v1/reload", json={"run": str(half.folder)}).json()["detail"]
    held.release()
    registry = RunRegistry([half.folder], Store(tmp_path / "b.sqlite"), unfinished=True)
    assert registry.reload()[0].generation == 2
    registry.close()


def test_a_sibling_of_the_root_is_outside(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """A folder whose path only begins with that of an allowed folder is refused."""
    inside, evil = make_run(tmp_path / "runs" / "a", 1), make_run(tmp_path / "runs-evil" / "a", 2)
    client = serving(inside.folder)
    assert client.post("/v1/reload", json={"run": str(evil.folder)}).status_code == 403
    assert client.post("/v1/reload", json={"run": str(inside.folder)}).status_code == 200


def test_a_run_that_is_written_while_it_is_read_is_refused(
    tmp_path: Path, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that replaces the model during a reload mixes no two runs: the previous one keeps serving."""
    good, other = make_run(tmp_path / "good", 1), make_run(tmp_path / "other", 2)
    client, read = serving(good.folder), served_run.runs.load

    def overtaken(folder: Path, *model: Any, **how: Any) -> Any:
        trained = read(folder, *model, **how)
        make_run(other.folder, 3)
        return trained

    monkeypatch.setattr(served_run.runs, "load", overtaken)
    answer = client.post("/v1/reload", json={"run": str(other.folder)})
    assert (answer.status_code, "while it was read" in answer.json()["detail"]) == (422, True)
    assert best(client) == expected(good)


@pytest.mark.parametrize(("items", "dim", "word"), [(59, 8, "59 items"), (60, 7, "7 dimensions")])
def test_an_index_of_another_shape_is_refused(
    tmp_path: Path, serving: Callable[..., TestClient], items: int, dim: int, word: str
) -> None:
    """An index that claims to be of this model and has other items or dimensions is refused in one line."""
    good, bad = make_run(tmp_path / "good", 1), make_run(tmp_path / "bad", 2)
    vectors = np.ones((items, dim), np.float32)
    Index(vectors, np.arange(items), meta={"model": model_hash(bad.folder)}).save(bad.folder / FOLDER)
    client = serving(good.folder)
    answer = client.post("/v1/reload", json={"run": str(bad.folder)})
    assert (answer.status_code, word in answer.json()["detail"]) == (422, True), answer.text
    assert best(client) == expected(good)


def test_diverged_queries_are_refused(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """Sound items with query vectors of infinities are not swapped in."""
    good, bad = make_run(tmp_path / "good", 1), make_run(tmp_path / "bad", 2)
    change_tensors(bad.folder, "model", **{"query.weight": torch.full(bad.users.shape, float("inf"))})
    answer = serving(good.folder).post("/v1/reload", json={"run": str(bad.folder)})
    assert (answer.status_code, "diverged" in answer.json()["detail"]) == (422, True), answer.text


def test_one_reload_at_a_time(
    tmp_path: Path, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second reload gets 409 while the first one loads; a change that arrives meanwhile is in the new run."""
    old, new = make_run(tmp_path / "old", 1), make_run(tmp_path / "new", 2)
    client, load, loading, go = serving(old.folder), runs.load_served, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        served = load(*given)
        loading.set()
        go.wait(20)
        return served

    monkeypatch.setattr(runs, "load_served", slow)
    answers: list[int] = []
    first = threading.Thread(
        target=lambda: answers.append(client.post("/v1/reload", json={"run": str(new.folder)}).status_code)
    )
    first.start()
    assert loading.wait(20)
    assert client.post("/v1/reload", json={"run": str(new.folder)}).status_code == 409
    assert client.put("/v1/items", json={"items": [{"id": "late", "like": [old.item_ids[3]]}]}).status_code == 200
    go.set()
    first.join()
    assert answers == [200]
    assert "late" in best(client, k=61, exclude_seen=False)


def test_a_service_needs_a_run(tmp_path: Path) -> None:
    """A registry without folders is refused."""
    store = Store(tmp_path / "items.sqlite")
    with pytest.raises(UserError, match="at least one run"):
        RunRegistry([], store)
    store.close()
