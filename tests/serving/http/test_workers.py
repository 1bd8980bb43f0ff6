"""sparring serve --workers 2: changes, swaps, deaths, counters and the end are those of one service."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sparring.core.errors import UserError
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.store import Change, Store
from sparring.serving.http.workers import Workers, share_of
from support.made_run import MadeRun, make_run
from support.running import Running

CONNECTIONS = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[MadeRun]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "first", 1), make_run(folder / "second", 2)]


@pytest.fixture(scope="module")
def service(runs: list[MadeRun], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    service = Running(runs[0].folder, tmp_path_factory.mktemp("log") / "log", "--workers", "2")
    yield service
    service.process.terminate()
    assert service.process.wait(60) == 0


@pytest.fixture
def clients(service: Running) -> Iterator[list[httpx.Client]]:
    """Connections of which each worker has some."""
    with ExitStack() as stack:
        clients = [stack.enter_context(service.client()) for _ in range(CONNECTIONS)]
        assert wait(lambda: clients[0].get("/readyz").status_code == 200)
        assert len({worker(client, service) for client in clients}) == 2
        yield clients


def worker(client: httpx.Client, service: Running) -> int:
    """The process that has the other end of a connection."""
    response = client.get("/healthz")
    port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    inode = connected(service)[port]
    return next(pid for pid in children(service.process.pid) if f"socket:[{inode}]" in open_files(pid))


def connected(service: Running) -> dict[int, str]:
    """The ports of the clients of a service, and the inodes of its own ends of the connections."""
    here, found = f":{int(service.url.rpartition(':')[2]):04X}", {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, own, other, state, *words = line.split()
        if own.endswith(here) and state == "01":  # established
            found[int(other.rpartition(":")[2], 16)] = words[5]
    return found


def open_files(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(file))
        except OSError:  # closed meanwhile
            continue
    return found


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait(until: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return True


def put(client: httpx.Client, **item: Any) -> None:
    answer = client.put("/v1/items", json={"items": [item]})
    assert answer.status_code == 200, answer.text


def neighbours(client: httpx.Client, item: int) -> list[Any]:
    answer = client.post("/v1/similar", json={"item": item, "k": 1000})
    assert answer.status_code == 200, answer.text
    return [(each["id"], each["title"]) for each in answer.json()["results"][0]["items"]]


def test_a_change_is_in_the_next_answer_of_every_worker(clients: list[httpx.Client], runs: list[MadeRun]) -> None:
    """Whichever worker acknowledges a put or a deletion, every worker has it in its next answer."""
    item = runs[0].item_ids[0]
    for turn in range(12):
        writer, other = clients[turn % CONNECTIONS], clients[(turn + 1) % CONNECTIONS]
        name = f"new-{turn}"
        put(writer, id=name, title=name, price=1.5, like=[item])
        assert all((name, name) in neighbours(client, item) for client in clients)
        assert other.request("DELETE", "/v1/items", json={"ids": [name]}).status_code == 200
        assert not any((name, name) in neighbours(client, item) for client in clients)
        put(writer, id=name, title="again", like=[item])  # from here on without a price
        found = [client.get(f"/v1/items/{name}").json() for client in clients]
        assert all(each == found[0] and each["columns"].get("price") is None for each in found)
        assert len({tuple(neighbours(client, item)) for client in clients}) == 1  # ties in one order


def test_changes_from_many_connections_at_once(clients: list[httpx.Client], runs: list[MadeRun]) -> None:
    """Writers at both workers at once lose nothing: each finds its own change at the other worker, all have all."""
    item, before = runs[0].item_ids[1], clients[0].get("/v1/info").json()["changed"]

    def write(number: int) -> None:
        mine, others = clients[number], clients[number + 3]
        for turn in range(8):
            name = f"many-{number}-{turn}"
            put(mine, id=name, title=name, like=[item])
            assert (name, name) in neighbours(others, item)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert {client.get("/v1/info").json()["changed"] for client in clients} == {before + 24}
    names = {f"many-{number}-{turn}" for number in range(3) for turn in range(8)}
    assert all(names <= {id for id, _ in neighbours(client, item)} for client in clients)


def test_a_swap_under_load_never_mixes_runs(clients: list[httpx.Client], runs: list[MadeRun]) -> None:
    """Every list is that of the run whose generation it names, and none is older than an answer before it."""
    generation = clients[0].get("/readyz").json()["generation"]
    folders: dict[int, MadeRun] = {generation: runs[0]}
    newest, stop = [generation], threading.Event()
    answers: list[tuple[int, int, list[Any]]] = []

    def ask(client: httpx.Client) -> None:
        row = 0
        while not stop.is_set():
            row, least = (row + 1) % 40, newest[0]
            answer = client.post("/v1/recommend", json={"user": runs[0].user(row), "k": 5, "allow": runs[0].item_ids})
            body = answer.json()
            assert body["generation"] >= least
            newest[0] = max(newest[0], body["generation"])
            answers.append((body["generation"], row, [each["id"] for each in body["results"][0]["items"]]))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, client) for client in clients[:4]]
        try:
            for turn in range(1, 5):
                run = runs[turn % 2]
                answer = clients[4 + turn % 2].post("/v1/reload", json={"run": str(run.folder)})
                assert answer.status_code == 200, answer.text
                folders[answer.json()["generation"]] = run
                assert [client.get("/readyz").json()["generation"] for client in clients[4:]] == [generation + turn] * 2
        finally:
            stop.set()
        for each in asking:
            each.result()
    assert {generation for generation, _, _ in answers} >= {generation, generation + 4}
    for number, row, listed in answers:
        run = folders[number]
        assert listed == [item for item, _ in run.best(run.users[row], 5, run.seen[row].tolist())]


def test_a_run_that_one_worker_refuses_is_served_by_none(
    clients: list[httpx.Client], runs: list[MadeRun], service: Running
) -> None:
    """A damaged run is a 422, and every worker stays with the old one."""
    before = [client.get("/readyz").json() for client in clients]
    broken = make_run(runs[0].folder.parent / "broken", 3)
    (broken.folder / "model.safetensors").write_bytes(b"broken")
    for client in clients[:2]:
        answer = client.post("/v1/reload", json={"run": str(broken.folder)})
        assert (answer.status_code, "still serving" in answer.json()["detail"]) == (422, True)
    assert [client.get("/readyz").json() for client in clients] == before
    assert clients[0].post("/v1/reload", json={"run": str(runs[0].folder.parent / "none")}).status_code == 422
    assert clients[0].post("/v1/reload", json={"run": "/"}).status_code == 403


def test_the_metrics_of_any_worker_are_those_of_the_service(clients: list[httpx.Client], runs: list[MadeRun]) -> None:
    """Requests to all connections are summed, whichever worker is asked."""

    def count(client: httpx.Client) -> tuple[float, float]:
        text = client.get("/metrics").text
        found = re.search(r'sparring_requests_total\{path="/v1/recommend",status="200"\} (\S+)', text)
        searched = re.search(r"(?m)^sparring_queries_searched_total (\S+)", text)
        assert searched
        return float(found[1]) if found else 0.0, float(searched[1])

    before = count(clients[0])
    for number in range(20):
        clients[number % CONNECTIONS].post("/v1/recommend", json={"users": [runs[0].user(1), runs[0].user(2)]})
    assert {count(client) for client in clients} == {(before[0] + 20, before[1] + 40)}


def write(client: httpx.Client, prefix: str, item: int, stop: threading.Event) -> list[str]:
    """Put items until told to stop, or until the connection is cut: those that were acknowledged."""
    names: list[str] = []
    while not stop.is_set():
        name = f"{prefix}-{len(names)}"
        try:
            put(client, id=name, title=name, like=[item])
        except httpx.TransportError:
            break
        names.append(name)
    assert names
    return names


def test_a_killed_worker_returns_with_every_change(service: Running, runs: list[MadeRun]) -> None:
    """kill -9 of a worker: the other's connections go on, and the new worker knows what was acknowledged meanwhile.

    A new worker does not serve a run that was rewritten since the others loaded it.
    """
    with service.client() as one, service.client() as two:
        killed, kept = worker(one, service), worker(two, service)
        assert killed != kept
        item = runs[0].item_ids[2]
        with ThreadPoolExecutor(2) as pool:  # it dies while it writes, or waits for its turn
            stop = threading.Event()
            writing = [pool.submit(write, client, name, item, stop) for client, name in ((one, "one"), (two, "two"))]
            time.sleep(0.3)
            os.kill(killed, signal.SIGKILL)
            time.sleep(0.3)
            stop.set()
            acknowledged = [name for each in writing for name in each.result()]
        put(two, id="meanwhile", title="meanwhile", like=[item])
        assert ("meanwhile", "meanwhile") in neighbours(two, item)
        assert wait(lambda: '"event":"worker ready"' in service.log.read_text())
        assert two.get("/readyz").status_code == 200
        assert worker(two, service) == kept
        with ExitStack() as stack:
            clients = [stack.enter_context(service.client()) for _ in range(CONNECTIONS)]
            pids = {worker(client, service) for client in clients}
            assert (len(pids), kept in pids, killed in pids) == (2, True, False)
            listed = [dict(neighbours(client, item)) for client in clients]
            assert all({"meanwhile", *acknowledged} <= each.keys() and each == listed[0] for each in listed)
            assert {client.get("/readyz").json()["generation"] for client in clients} == {
                two.get("/readyz").json()["generation"]
            }

            killed = next(pid for pid in map(partial(worker, service=service), clients) if pid != kept)
        make_run(runs[0].folder, 5)  # rewritten, not yet reloaded
        os.kill(killed, signal.SIGKILL)
        assert wait(lambda: "changed on the disk" in service.log.read_text())
        assert two.get("/readyz").status_code == 503
        assert two.post("/v1/reload", json={}).status_code == 200
        assert wait(lambda: two.get("/readyz").status_code == 200)
        new = make_run(runs[0].folder.parent / "same", 5)
        with service.client() as three, service.client() as four:
            for client in (two, three, four):
                body = {"user": new.user(3), "k": 5, "allow": new.item_ids}
                found = client.post("/v1/recommend", json=body).json()["results"][0]["items"]
                assert [each["id"] for each in found] == [
                    id for id, _ in new.best(new.users[3], 5, new.seen[3].tolist())
                ]


def test_a_watched_run_and_the_limits_of_a_client_and_the_end(tmp_path: Path) -> None:
    """The watch swaps for all workers and its failure is shown by all; a client's limits hold over all workers.

    SIGTERM ends every process with exit code 0.
    """
    run = make_run(tmp_path / "run", 1)
    service = Running(
        run.folder, tmp_path / "log", "--workers", "2", "--watch", "0.2", "--limit", "client_connections=4"
    )
    pids = children(service.process.pid)
    try:
        with ExitStack() as stack:
            clients = [stack.enter_context(service.client()) for _ in range(4)]
            assert {client.get("/readyz").json()["generation"] for client in clients} == {1}
            assert len({worker(client, service) for client in clients}) == 1  # the limits of a client are one worker's
            make_run(run.folder, 2)
            assert wait(lambda: clients[0].get("/readyz").json()["generation"] == 2)
            (run.folder / "model.safetensors").write_bytes(b"broken")
            assert wait(lambda: clients[0].get("/readyz").json()["status"] == "degraded")
            assert clients[0].get("/readyz").json()["generation"] == 2
            clients.append(stack.enter_context(service.client()))
            assert clients[4].get("/readyz").json()["status"] == "degraded"
            assert wait(lambda: len(connected(service)) == 4)  # the longest idle one was cut for the fifth
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
        assert service.log.read_text().count('"event":"stopped"') == 1
        assert wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    finally:
        service.kill()


def test_workers_that_stop_and_workers_that_all_die(tmp_path: Path) -> None:
    """A stopped worker delays one change, and no other until it goes on; after the death of all, new ones serve what is
    on the disk."""
    run = make_run(tmp_path / "run", 1)
    service = Running(run.folder, tmp_path / "log", "--workers", "2")
    try:
        with service.client() as one, service.client() as two:
            stopped = worker(two, service)
            assert worker(one, service) != stopped
            os.kill(stopped, signal.SIGSTOP)
            began = time.monotonic()
            put(one, id="first", title="first", like=[run.item_ids[0]])
            middle = time.monotonic()
            put(one, id="second", title="second", like=[run.item_ids[0]])
            assert middle - began > 9
            assert time.monotonic() - middle < 5
            assert one.get("/readyz").status_code == 503
            assert one.get("/metrics").status_code == 200
            assert "no answer for 10 s" in service.log.read_text()
            os.kill(stopped, signal.SIGCONT)
            assert {("first", "first"), ("second", "second")} <= set(neighbours(two, run.item_ids[0]))
            assert wait(lambda: one.get("/readyz").status_code == 200)
            assert worker(two, service) == stopped
            new = make_run(run.folder, 5)
            for pid in (worker(one, service), stopped):
                os.kill(pid, signal.SIGKILL)
        with service.client() as three:
            assert wait(lambda: answered(three, "/readyz") == 200)
            body = {"user": new.user(3), "k": 5, "allow": new.item_ids}
            found = three.post("/v1/recommend", json=body).json()["results"][0]["items"]
        assert [each["id"] for each in found] == [id for id, _ in new.best(new.users[3], 5, new.seen[3].tolist())]
    finally:
        service.kill()


def answered(client: httpx.Client, path: str) -> int:
    """The status of an answer; 0 if the connection was lost."""
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no descriptors, the log says so, and the next attempt comes after twice the time."""
    later: list[tuple[Any, ...]] = []
    said: list[dict[str, Any]] = []
    parent = object.__new__(Workers)
    parent._stopping, parent._loop = False, SimpleNamespace(call_later=lambda *words: later.append(words))  # type: ignore[assignment]
    parent.log = lambda event, **facts: said.append({"event": event, **facts})  # type: ignore[assignment]
    monkeypatch.setattr(
        parent, "_start", lambda number, wait: (_ for _ in ()).throw(OSError(24, "Too many open files"))
    )
    parent._restart(1, 0.2)
    assert [(wait, words) for wait, _, *words in later] == [(0.4, [1, 0.4])]
    assert said == [{"event": "worker not started", "worker": 1, "why": "[Errno 24] Too many open files"}]


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """kill -9 of the parent leaves no worker behind, and the next service opens the store with every change."""
    run = make_run(tmp_path / "run", 1)
    service = Running(run.folder, tmp_path / "log", "--workers", "2")
    pids = children(service.process.pid)
    put(service.http, id="kept", title="kept", like=[run.item_ids[0]])
    service.kill()
    assert wait(lambda: not any(alive(pid) for pid in pids), 20)
    service = Running(run.folder, tmp_path / "log2")
    try:
        assert ("kept", "kept") in neighbours(service.http, run.item_ids[0])
    finally:
        service.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Others:
    """What the other workers have published."""

    def __init__(self) -> None:
        self.state = 0, 1

    def published(self) -> tuple[int, int]:
        return self.state

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reload(self, name: str, folder: Path) -> float:
        raise AssertionError


def test_a_registry_follows_what_others_publish(tmp_path: Path) -> None:
    """It is behind from the moment of publication, and takes over changes and the prepared run, and no other run."""
    old, new = make_run(tmp_path / "old", 1), make_run(tmp_path / "new", 2)
    others, path = Others(), tmp_path / "items.sqlite"
    theirs = Store(path)
    registry = RunRegistry([old.folder], Store(path, held=True), peers=others)
    try:
        item = old.item_ids[0]
        theirs.write([Change("new", {"price": 1.5}, like=[item])])
        theirs.write([Change("new", deleted=True)])
        theirs.write([Change("new", {"title": "again"}, like=[item])])
        assert not registry.behind
        others.state = 3, 1
        assert registry.behind
        registry.catch_up()
        assert not registry.behind
        catalogue = registry.served().catalogue
        assert catalogue.row(registry.served().find_item("new")) == {"title": "again"}
        own = catalogue.row(registry.served().find_item(item))["price"]
        theirs.write([Change(item, {"price": 99.0})])
        others.state = 4, 1
        registry.catch_up()
        assert catalogue.row(registry.served().find_item(item))["price"] == 99.0
        theirs.write([Change(item, deleted=True)])
        theirs.write([Change(item)])  # seen as one change: the run's own price again
        others.state = 6, 1
        registry.catch_up()
        assert catalogue.row(registry.served().find_item(item))["price"] == own
        assert registry.put([{"id": "mine", "like": [item]}])[0] == 7
        others.state = 7, 2
        with pytest.raises(RequestError, match="stopping"):  # nothing was prepared
            registry.catch_up()
        assert (registry.behind, registry.served().folder) == (True, old.folder)
        registry.prepare(2, "old", new.folder)
        assert registry.served().folder == old.folder
        registry.catch_up()
        assert (registry.behind, registry.served().folder, registry.served().generation) == (False, new.folder, 2)
        assert registry.served().listed(registry.served().find_item("mine"))
    finally:
        registry.close()
        theirs.close()


def test_a_change_that_arrives_while_a_run_is_prepared_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's change comes after the store was read for the new run; once swapped in, the run has it."""
    old, new = make_run(tmp_path / "old", 1), make_run(tmp_path / "new", 2)
    others, path = Others(), tmp_path / "items.sqlite"
    theirs = Store(path)
    registry = RunRegistry([old.folder], Store(path, held=True), peers=others)
    try:
        read = registry.store.since

        def since(sequence: int) -> Iterator[Change]:
            rows = list(read(sequence))
            if not theirs.last():
                theirs.write([Change("late", like=[new.item_ids[0]])])
                others.state = 1, 1
                registry.catch_up()
            return iter(rows)

        monkeypatch.setattr(registry.store, "since", since)
        registry.prepare(2, "old", new.folder)
        others.state = 1, 2
        registry.catch_up()
        assert registry.served().folder == new.folder
        assert registry.served().listed(registry.served().find_item("late"))
    finally:
        registry.close()
        theirs.close()


def test_limits_are_shared_out() -> None:
    """The workers together have the limits of the service, and each has room for the largest body and request."""
    limits = Limits(connections=101, waiting=2000, buffered=100, body=40)
    parts = share_of(limits, 4)
    assert (parts.connections, parts.waiting, parts.buffered) == (25, 500, 40)
    assert share_of(limits, 2).buffered == 50
    assert share_of(limits, 20).waiting == 256
    assert share_of(Limits(waiting=64), 4).waiting == 64
    with pytest.raises(UserError, match="connections"):
        share_of(Limits(connections=3), 4)
