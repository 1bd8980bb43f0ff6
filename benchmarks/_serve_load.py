"""The load of benchmarks/serve.py: wrk, requests at a fixed rate, a client that checks answers, upserts, a swap."""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sparring.serving.index.run_index import FOLDER

USERS, SEEN, K, CONNECTIONS = 100_000, 20, 10, 32


@dataclass
class Seen:
    """The answers and failures that the checking client recorded."""

    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # (user, answer), in order
    wrong: list[str] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    generations: set[int] = field(default_factory=set)
    upserts: int = 0
    facts: dict[str, str] = field(default_factory=dict)


def start(
    run: Path, threads: int, quiet: bool, folder: Path, workers: int = 1, cores: Sequence[int] = ()
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a service over a run in separate processes, on these cores; return its address and the process."""
    log, store = folder / f"serve-{workers}.log", run / "serve" / f"items-{workers}.sqlite"
    command = [
        *on(cores),
        sys.executable,
        "-m",
        "sparring",
        "serve",
        str(run),
        "--port",
        "0",
        "--threads",
        str(threads),
        "--workers",
        str(workers),
        "--store",
        str(store),
        *(["--quiet"] if quiet else []),
    ]
    with open(log, "wb") as to:
        server = subprocess.Popen(command, stderr=to)
    for _ in range(1200):
        time.sleep(0.1)
        found = re.search(r'"url":"([^"]+)/"', log.read_text()[:20_000])
        if found:
            return found[1], server
        if server.poll() is not None:
            sys.exit(log.read_text())
    sys.exit("the service did not start")


def on(cores: Sequence[int]) -> list[str]:
    """The words that keep a command on these cores; none: it may use all."""
    return ["taskset", "-c", ",".join(map(str, cores))] if cores else []


def drive(url: str, seconds: int, cores: Sequence[int] = ()) -> dict[str, str]:
    """Run wrk with requests for random single users."""
    body = f'string.format(\'{{"user":%d,"k":{K}}}\', math.random(0, {USERS - 1}))'
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n')
        script.write(f"request = function()\n  return wrk.format(nil, nil, nil, {body})\nend\n")
        script.flush()
        words = [
            *on(cores),
            "wrk",
            "-t1",
            f"-c{CONNECTIONS}",
            f"-d{seconds}s",
            "--latency",
            "--timeout",
            "20s",
            "-s",
            script.name,
            f"{url}/v1/recommend",
        ]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = {
        name: (re.search(pattern, text) or ["", "0"])[1]
        for name, pattern in {
            "requests": r"(\d+) requests in",
            "rate": r"Requests/sec:\s+([\d.]+)",
            "p50": r"(?m)^\s+50%\s+(\S+)",
            "p99": r"(?m)^\s+99%\s+(\S+)",
            "failed": r"Non-2xx or 3xx responses: (\d+)",
            "socket": r"Socket errors: (.*)",
        }.items()
    }
    return found


@dataclass
class Paced:
    """Latencies in milliseconds of requests at a fixed rate, from the moment at which each was due."""

    ms: np.ndarray
    failed: int
    asked: float  # requests per second
    sent: float

    def at(self, percent: float) -> float:
        return float(np.percentile(self.ms, percent))


def pace(url: str, rate: float, seconds: float) -> Paced:
    """Requests of random users that arrive at random times, `rate` per second on average, whatever the service does.

    Each goes to a connection that is free, or waits for one. Latency counts from its own time, so a service that
    stands still is charged for every request that was due meanwhile.
    """
    rng = np.random.default_rng(5)
    due = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    users = rng.integers(0, USERS, len(due))
    host, _, port = url.removeprefix("http://").partition(":")
    sockets = {}
    for _ in range(CONNECTIONS):
        each = socket.create_connection((host, int(port)))
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
        sockets[each.fileno()] = each
    poll = select.epoll()
    for file in sockets:
        poll.register(file, select.EPOLLIN)
    head = f"POST /v1/recommend HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: "
    bodies = [f'{{"user":{user},"k":{K}}}' for user in users.tolist()]
    requests = [f"{head}{len(body)}\r\n\r\n{body}".encode() for body in bodies]
    free, busy = deque(sockets), dict[int, int]()  # connection -> request
    unread = dict.fromkeys(sockets, b"")
    done, failed, next_one, n = np.full(len(due), np.nan), 0, 0, len(due)
    times, began = due.tolist(), time.perf_counter()
    end = began + seconds + 10
    while next_one < n or busy:
        now = time.perf_counter()
        if now > end:
            break
        while next_one < n and times[next_one] <= now - began and free:
            file = free.popleft()
            sockets[file].send(requests[next_one])
            busy[file] = next_one
            next_one += 1
        wait = times[next_one] - (time.perf_counter() - began) if next_one < n and free else 0.1
        # epoll rounds a timeout up to milliseconds, select does not
        if wait > 0 and not select.select([poll], [], [], wait)[0]:
            continue
        for file, _ in poll.poll(0):
            data = unread[file] + sockets[file].recv(65536)
            mark = data.find(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", data[: mark + 2]) if mark >= 0 else None
            if length is None or len(data) < mark + 4 + int(length[1]):
                if not data:
                    raise ConnectionError("the service closed a connection")
                unread[file] = data
                continue
            unread[file] = b""
            failed += not data.startswith(b"HTTP/1.1 200")
            done[busy.pop(file)] = time.perf_counter() - began
            free.append(file)
    took = time.perf_counter() - began
    for each in sockets.values():
        each.close()
    ms = (done - due) * 1e3
    late = int(np.isnan(ms).sum())
    return Paced(np.where(np.isnan(ms), np.inf, ms), failed + late, rate, (n - late) / took)


def processes(pid: int) -> list[int]:
    """A process and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def resident(pid: int) -> float:
    """Megabytes of the service's own memory; mapped files are left out, since the system may drop them."""
    found = (re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{each}/status").read_text()) for each in processes(pid))
    return sum(int(each[1]) for each in found if each) / 1024


def cpu_seconds(pid: int) -> float:
    """User and system time of a service."""
    total = 0
    for each in processes(pid):
        words = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def listen(url: str, stop: threading.Event, seen: Seen) -> None:
    """Request users now and then and keep the answers; they are checked after the load, so as not to add to it."""
    rng = np.random.default_rng(3)
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            user = int(rng.integers(0, USERS))
            answer = client.post("/v1/recommend", json={"user": user, "k": K})
            if answer.status_code == 200:
                seen.answers.append((user, answer.json()))
            else:
                seen.wrong.append(f"user {user}: {answer.status_code} {answer.text[:100]}")
            time.sleep(0.25)


def check(seen: Seen, users: np.ndarray, items: np.ndarray, taken: np.ndarray) -> None:
    """Compare every answer with the exact one of the run that it names."""
    for user, body in seen.answers:
        seen.generations.add(body["generation"])
        q = users[(user + (body["generation"] != seen.answers[0][1]["generation"])) % USERS]
        scores = items @ q
        scores[taken[user]] = -np.inf
        truth = set(np.argpartition(-scores, K)[:K].tolist())
        listed = [each for each in body["results"][0]["items"] if isinstance(each["id"], int)]
        ids = np.array([each["id"] for each in listed])
        given = np.array([each["score"] for each in listed])
        right = (
            not np.isin(ids, taken[user]).any()
            and np.abs(scores[ids] - given).max() < 1e-4
            and bool((np.diff(given) <= 1e-6).all())
        )
        right &= len(body["results"][0]["items"]) == K and all(
            each["title"] == f"{each['id']} of many" for each in listed
        )
        if not right:
            seen.wrong.append(f"user {user}, generation {body['generation']}: {body['results'][0]['items'][:3]}")
        seen.recall.append(len(truth & set(ids.tolist())) / K)


def disturb(url: str, items: int, upserts: int, seconds: float, second: Path, seen: Seen) -> None:
    """Upserts throughout; a damaged index after a third of the time, the swap half way."""
    rng, began = np.random.default_rng(4), time.perf_counter()
    offered = swapped = False
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(upserts):
            like = int(rng.integers(0, items))
            put = client.put(
                "/v1/items", json={"items": [{"id": f"new-{number}", "title": f"new {number}", "like": [like]}]}
            )
            if put.status_code != 200:
                seen.wrong.append(f"upsert {number}: {put.status_code} {put.text[:100]}")
                continue
            seen.upserts += 1
            if number % 20 == 0:
                found = client.post("/v1/similar", json={"item": like, "k": 3}).json()["results"][0]["items"]
                if f"new-{number}" not in [each["id"] for each in found]:
                    seen.wrong.append(f"new-{number} was acknowledged and not found")
            passed = (time.perf_counter() - began) / seconds
            if passed > 0.33 and not offered:
                offered = True
                answer = client.post("/v1/reload", json={"run": str(broken(second).resolve())})
                seen.facts["broken index"] = f"{answer.status_code}: {answer.json()['detail'][-90:]}"
                if answer.status_code != 422:
                    seen.wrong.append(f"a broken index was answered with {answer.status_code}")
            if passed > 0.5 and not swapped:
                swapped = True
                answer = client.post("/v1/reload", json={"run": str(second.resolve())})
                seen.facts["swap"] = f"{answer.status_code}: {answer.text[:160]}"
                if answer.status_code != 200:
                    seen.wrong.append(f"the swap was answered with {answer.status_code}")
            wait = began + seconds * 0.9 * (number + 1) / upserts - time.perf_counter()
            if wait > 0:
                time.sleep(wait)


def broken(second: Path) -> Path:
    """The second run with one byte of its index changed; unchanged files are links."""
    folder = second.parent / "broken"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(second, folder, copy_function=os.link)
    path = next((folder / FOLDER).glob("ids-*"))
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.unlink()
    path.write_bytes(content)
    return folder
