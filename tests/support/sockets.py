"""A service that listens in a thread of this process, and a client that sees every byte."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from sparring.serving.http.app import Service
from sparring.serving.http.server import Server


class Listening:
    """A service that listens, in a thread of this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = Server(service, listener)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.address: tuple[str, int] = listener.getsockname()
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def connect(self, host: str = "127.0.0.1") -> Connection:
        """A connection from an address of this machine, such as 127.0.0.2."""
        return Connection(self.address, host)

    def ask(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        with self.connect() as connection:
            for part in parts:
                connection.send(part)
                time.sleep(0.02 if len(parts) > 1 else 0)
            return connection.response()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.service.close()


class Connection:
    """A client that sees every byte."""

    def __init__(self, address: tuple[str, int], host: str) -> None:
        self.socket = socket.create_connection(address, timeout=20, source_address=(host, 0))
        self.buffer = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> None:
        data = self.socket.recv(65_536)
        if not data:
            raise ConnectionError("closed")
        self.buffer += data

    def responses(self) -> list[int]:
        """Statuses of all responses until the service closes the connection."""
        statuses = []
        try:
            while True:
                statuses.append(self.response()[0])
        except ConnectionError:
            return statuses

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of the next response."""
        while b"\r\n\r\n" not in self.buffer:
            self.read()
        head, _, rest = self.buffer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        length = int(headers["content-length"])
        while len(rest) < length:
            self.read()
            rest = self.buffer.partition(b"\r\n\r\n")[2]
        self.buffer = rest[length:]
        return int(lines[0].split()[1]), headers, rest[:length]


def request(body: bytes | dict[str, Any], *headers: str, path: str = "/v1/recommend", length: int = -1) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data) if length < 0 else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data
