"""A well-behaved client beside hostile ones: its median latency at most doubles, and nobody gets a 5xx.

    python benchmarks/hostile.py --run RUN [--user ID] [--seconds 5]

Each attack comes from a process of its own, while another client asks for one user after another. Its median latency
alone is measured before and after every attack; the quietest half second of each counts, since other work on the
machine only adds to it. The attackers pause 20 ms between two requests (200 ms between two
uploads of megabytes): at full speed they would take a core of their own, and the benchmark would measure the scheduler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from _serve_load import resident, start
from _shared import table

PAUSE = 0.02
HEAD = b"POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
Address = tuple[str, int]


def with_length(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def hold(address: Address, count: int, data: bytes = b"", trickle: bytes = b"") -> None:
    """Keep `count` connections open, each after `data`; those that are cut are opened again."""
    crowd: list[socket.socket] = []
    while True:
        with suppress(OSError):
            while len(crowd) < count:
                crowd.append(socket.create_connection(address, timeout=5))
                crowd[-1].sendall(data)
                time.sleep(10 * PAUSE if len(data) > 10_000 else 0)
        for each in list(crowd):
            each.setblocking(False)
            try:
                if trickle:
                    each.send(trickle)
                if not each.recv(4096):
                    raise ConnectionError
            except BlockingIOError:
                pass
            except OSError:
                each.close()
                crowd.remove(each)
        time.sleep(0.2)


def repeat(address: Address, data: bytes) -> None:
    """Send `data` on a new connection, read until the service closes it or has answered, and start again."""
    while True:
        with suppress(OSError), socket.create_connection(address, timeout=5) as connection:
            connection.settimeout(0.5)
            connection.sendall(data)
            connection.recv(65_536)
        time.sleep(PAUSE)


ATTACKS: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {
    "500 idle connections": (hold, (500,)),
    "200 slow heads": (hold, (200, HEAD, b"X")),
    "40 unfinished uploads of 7 MB": (hold, (40, HEAD + b"Content-Length: 8000000\r\n\r\n" + b" " * 7_000_000)),
    "100 slow bodies": (hold, (100, HEAD + b"Content-Length: 100000\r\n\r\n", b" ")),
    "pipelined garbage": (repeat, (with_length(b'{"user": 1}') * 20 + b"\x00garbage" * 1000,)),
    "header bombs": (repeat, (HEAD + b"X: " + b"x" * 4_000_000,)),
    "10,000 headers": (repeat, (HEAD + b"".join(b"X-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",)),
    "foreign origin": (repeat, (with_length(b"{}", HEAD + b"Origin: http://evil.example\r\n"),)),
    "no content type": (repeat, (with_length(b"{}", b"PUT /v1/items HTTP/1.1\r\nHost: 127.0.0.1\r\n"),)),
    "8 MB of empty strings": (repeat, (with_length(b'{"users": [%s]}' % b",".join([b'""'] * 2_600_000)),)),
    "8 MB of empty lists": (repeat, (with_length(b'{"users": [%s]}' % b",".join([b"[]"] * 2_600_000)),)),
    "deep JSON": (repeat, (with_length(b'{"user": %s' % (b"[" * 90_000)),)),
    "90,000 unknown fields": (
        repeat,
        (with_length(b'{"user": 1, %s}' % b",".join(b'"%x":1' % n for n in range(90_000))),),
    ),
}


def latency(address: Address, body: bytes, seconds: float) -> tuple[float, float]:
    """Median, of the quietest half second, and 99th percentile, in milliseconds, of one request after another."""
    request, times, slices = with_length(body), list[float](), dict[int, list[float]]()
    connection = socket.create_connection(address, timeout=30)
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.sendall(request)
        answer = connection.recv(65_536)
        times.append(time.perf_counter() - began)
        slices.setdefault(int(2 * (end - began)), []).append(times[-1])
        assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
        time.sleep(0.001)
    connection.close()
    return 1e3 * min(map(statistics.median, slices.values())), 1e3 * statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--user", default="1", help="a user of the run")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    args = parser.parse_args()
    body = json.dumps({"user": int(args.user) if args.user.isdigit() else args.user, "k": 10}).encode()
    with tempfile.TemporaryDirectory() as folder:
        url, server = start(args.run, 2, True, Path(folder))
        host, _, port = url.removeprefix("http://").partition(":")
        address = host, int(port)
        rows, worst = [], 0.0
        try:
            latency(address, body, args.seconds)  # warm
            before = latency(address, body, args.seconds)
            for name, (attack, arguments) in ATTACKS.items():
                if args.only not in name:
                    continue
                process = multiprocessing.Process(target=attack, args=(address, *arguments), daemon=True)
                process.start()
                time.sleep(1.0)
                beside, memory = latency(address, body, args.seconds), resident(server.pid)
                process.kill()
                process.join()
                time.sleep(0.5)
                after = latency(address, body, args.seconds)
                ratio = beside[0] / ((before[0] + after[0]) / 2)
                worst = max(worst, ratio)
                cells = (before[0], beside[0], after[0], ratio, beside[1])
                rows.append((name, *(f"{value:.2f}" for value in cells), f"{memory:.0f}"))
                before = after
            with socket.create_connection(address) as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                metrics = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        finally:
            server.terminate()
            began = time.perf_counter()
            server.wait(60)
            stopped = time.perf_counter() - began
    print(table(("beside", "p50 before, ms", "p50 beside", "p50 after", "ratio", "p99 beside", "memory, MB"), rows))
    statuses: dict[str, float] = {}
    for status, count in re.findall(r'sparring_requests_total{[^}]*status="(\d+)"} (\S+)', metrics):
        statuses[status] = statuses.get(status, 0) + float(count)
    print("statuses: " + ", ".join(f"{status} {count:.0f}" for status, count in sorted(statuses.items())))
    print(f"stopped in {stopped:.1f} s")
    print(f"no 5xx: {'yes' if max(statuses) < '500' else 'NO'}")
    print(f"p50 at most doubled: {'yes' if worst <= 2 else 'NO'} ({worst:.2f})")


if __name__ == "__main__":
    main()
