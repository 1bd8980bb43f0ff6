"""kill -9 during puts, swaps and index saves: the next start serves the last good state and every acknowledged change.

SPARRING_PROOF=full kills more often.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sparring.serving.index import Index
from sparring.serving.index.run_index import FOLDER
from sparring.training.folder import model_hash
from sparring.training.trained import load
from support.made_run import MadeRun, make_run
from support.running import Running, environment
from support.settings import effort

KILLS, UPSERT_KILLS = effort(3, 50), effort(8, 200)
SAVE = """
import sys, time
from pathlib import Path
from sparring.serving.index import Index
index = Index.load(sys.argv[1])
while True:
    index.save(sys.argv[1])
    time.sleep(0.02)
"""


class Doings:
    """Requested and acknowledged changes, over all kills."""

    def __init__(self, runs: list[MadeRun]) -> None:
        self.runs = runs
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.unsure: set[str] = set()  # requested, but killed before the acknowledgement
        self.current, self.asked = runs[0], runs[0]
        self.puts = self.swaps = 0

    def put(self, http: httpx.Client, stop: threading.Event) -> None:
        while not stop.is_set():
            name = f"new-{self.puts}"
            self.puts += 1
            self.unsure.add(name)
            try:
                answer = http.put("/v1/items", json={"items": [{"id": name, "title": name, "like": [1000]}]})
                assert answer.status_code == 200, answer.text
                self.there.add(name)
                if self.puts % 3 == 0:
                    self.there.discard(name)
                    assert http.request("DELETE", "/v1/items", json={"ids": [name]}).status_code == 200
                    self.gone.add(name)
                self.unsure.discard(name)
            except httpx.TransportError:
                return

    def swap(self, http: httpx.Client, stop: threading.Event) -> None:
        while not stop.is_set():
            self.asked = self.runs[self.swaps % 2]
            self.swaps += 1
            try:
                answer = http.post("/v1/reload", json={"run": str(self.asked.folder)})
            except httpx.TransportError:
                return
            if answer.status_code == 200:
                self.current = self.asked
            else:
                assert answer.status_code == 422, answer.text  # its index was being saved twice at once
                self.asked = self.current

    def check(self, http: httpx.Client) -> None:
        folder = http.get("/v1/info").json()["run"]["folder"]
        assert folder in {str(self.current.folder), str(self.asked.folder)}
        truth = next(run for run in self.runs if str(run.folder) == folder)
        self.current = self.asked = truth
        for row in (0, 17, 39):
            body = {"user": truth.user(row), "k": 5, "allow": truth.item_ids}
            found = http.post("/v1/recommend", json=body).json()["results"][0]["items"]
            expected = truth.best(truth.users[row], 5, truth.seen[row].tolist())
            assert [item["id"] for item in found] == [item for item, _ in expected]
            np.testing.assert_allclose([item["score"] for item in found], [score for _, score in expected], rtol=1e-4)
        listed = http.post("/v1/similar", json={"item": 1000, "k": 1000}).json()["results"][0]["items"]
        titles: dict[Any, str] = {item["id"]: item["title"] for item in listed}
        for name in self.there - self.unsure:
            title = titles.get(name) or http.get("/v1/item", params={"id": name}).json().get(
                "title"
            )  # a list has at most 1,000 items
            assert title == name, f"{name} was acknowledged and is lost"
        for name in self.gone - self.unsure:
            assert name not in titles, f"{name} was deleted and is back"


@pytest.mark.slow
@pytest.mark.timeout(60 * (KILLS + 2))
def test_nothing_acknowledged_is_lost_by_a_kill(tmp_path: Path) -> None:
    """After every kill the next start finds a consistent state with all acknowledged changes."""
    runs = [make_run(tmp_path / "runs" / name, seed) for name, seed in (("a", 1), ("b", 2))]
    for run in runs:
        vectors = load(run.folder).model.item_vectors().numpy()
        meta = {"model": model_hash(run.folder)}
        Index(vectors, np.arange(len(vectors)), meta=meta).save(run.folder / FOLDER)
    doings, rng = Doings(runs), np.random.default_rng(0)
    service = Running(runs[0].folder, tmp_path / "log")
    try:
        for _ in range(KILLS):
            savers = [
                subprocess.Popen([sys.executable, "-c", SAVE, str(run.folder / FOLDER)], env=environment())
                for run in runs
            ]
            stop, before = threading.Event(), doings.puts
            work = [threading.Thread(target=each, args=(service.http, stop)) for each in (doings.put, doings.swap)]
            for thread in work:
                thread.start()
            time.sleep(float(rng.uniform(0.5, 4.0)))
            service.kill()
            for saver in savers:
                saver.send_signal(signal.SIGKILL)
                saver.wait()
            stop.set()
            for thread in work:
                thread.join()
            assert doings.puts > before
            service = Running(runs[0].folder, tmp_path / "log")
            doings.check(service.http)
    finally:
        service.kill()
    assert doings.there
    assert doings.swaps > KILLS


# A process that has imported everything and forks a service for each line: a start takes a fraction of a second.
NURSERY = """
import os, signal, sys
from sparring.cli import main
from sparring.serving.http import app, server
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(line.strip(), os.O_WRONLY | os.O_CREAT), 2)
        os._exit(main(["serve", sys.argv[1], "--port", "0", "--quiet"]))
    print(pid, flush=True)
"""


class Upserts:
    """One client's puts and deletes of its own items; after a kill each item is as acknowledged, or as asked last."""

    def __init__(self, client: int) -> None:
        self.client, self.turn = client, 0
        self.acknowledged: dict[str, str | None] = {}
        self.asked: dict[str, str | None] = {}  # without an acknowledgement

    def work(self, http: httpx.Client) -> None:
        while True:
            self.turn += 1
            name, title = f"item-{self.client}-{self.turn % 40}", f"title {self.turn}"
            gone = self.turn % 5 == 0 and self.acknowledged.get(name) is not None
            self.asked[name] = None if gone else title
            items = {"ids": [name]} if gone else {"items": [{"id": name, "title": title, "like": [1000]}]}
            try:
                answer = http.request("DELETE" if gone else "PUT", "/v1/items", json=items)
            except httpx.TransportError:
                return
            assert answer.status_code == 200, answer.text
            self.acknowledged[name] = self.asked.pop(name)

    def check(self, titles: dict[Any, str]) -> None:
        for name in {*self.acknowledged, *self.asked}:
            allowed = {self.acknowledged.get(name), self.asked.get(name, self.acknowledged.get(name))}
            assert titles.get(name) in allowed, (name, titles.get(name), allowed)
            self.acknowledged[name] = titles.get(name)
        self.asked.clear()


@pytest.mark.timeout(60 + 10 * UPSERT_KILLS)
def test_an_acknowledged_upsert_survives_any_kill(tmp_path: Path) -> None:
    """Kills at random instants, during puts and deletes by two clients: each item is in a state that is allowed."""
    run, rng, clients = make_run(tmp_path / "run", 1), np.random.default_rng(7), [Upserts(0), Upserts(1)]
    words = [sys.executable, "-c", NURSERY, str(run.folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=environment(), **pipes) as nursery:  # type: ignore[call-overload]
        try:
            for turn in range(UPSERT_KILLS + 1):
                log = tmp_path / f"log-{turn}"
                nursery.stdin.write(f"{log}\n")
                nursery.stdin.flush()
                pid = int(nursery.stdout.readline())
                with httpx.Client(base_url=started(log), timeout=30) as http:
                    answer = http.post("/v1/similar", json={"item": 1000, "k": 1000}).json()
                    listed = {item["id"]: item["title"] for item in answer["results"][0]["items"]}
                    for client in clients:
                        client.check(listed)
                    with ThreadPoolExecutor(2) as pool:
                        work = [pool.submit(client.work, http) for client in clients]
                        time.sleep(float(rng.uniform(0.0, 0.4)))
                        os.kill(pid, signal.SIGKILL)
                    for each in work:
                        each.result()
        finally:
            nursery.kill()
    assert min(client.turn for client in clients) > UPSERT_KILLS


def started(log: Path) -> str:
    """The address of a service, once its log has it."""
    deadline = time.monotonic() + 60
    while not (found := re.search(r'"url":"([^"]+)/"', log.read_text() if log.exists() else "")):
        assert time.monotonic() < deadline, "the service did not start"
        time.sleep(0.01)
    return found[1]


def test_a_stop_is_clean(tmp_path: Path) -> None:
    """SIGTERM gives exit code 0 and `stopped` in the log, and the next service can open the store."""
    run = make_run(tmp_path / "run", 1)
    service = Running(run.folder, tmp_path / "log")
    try:
        assert service.http.put("/v1/items", json={"items": [{"id": "new", "like": [1000]}]}).status_code == 200
        second = subprocess.run(
            [sys.executable, "-m", "sparring", "serve", str(run.folder), "--port", "0"],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(),
        )
        assert (second.returncode, "in use by another service" in second.stderr) == (2, True), second.stderr
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
        assert '"event":"stopped"' in service.log.read_text()
    finally:
        service.kill()
