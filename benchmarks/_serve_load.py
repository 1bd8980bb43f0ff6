"""The load of benchmarks/serve.py: wrk, a client that checks answers, upserts, a broken index and a swap."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
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


def start(run: Path, threads: int, quiet: bool, folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a service over a run in a separate process; return its address and the process."""
    log = folder / "serve.log"
    command = [
        sys.executable,
        "-m",
        "sparring",
        "serve",
        str(run),
        "--port",
        "0",
        "--threads",
        str(threads),
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


def drive(url: str, seconds: int) -> dict[str, str]:
    """Run wrk with requests for random single users."""
    body = f'string.format(\'{{"user":%d,"k":{K}}}\', math.random(0, {USERS - 1}))'
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n')
        script.write(f"request = function()\n  return wrk.format(nil, nil, nil, {body})\nend\n")
        script.flush()
        words = [
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


def resident(pid: int) -> float:
    """Megabytes of the service's own memory; mapped files are left out, since the system may drop them."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


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
