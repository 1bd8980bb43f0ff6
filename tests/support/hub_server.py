"""A stand-in of the HTTP API of the Hugging Face hub for models, as far as its own client uses it; all in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by commit, the newest last

    def commit(self, name: str) -> str | None:
        """The commit that a branch or a commit names, None if there is none."""
        if name == "main":
            return list(self.commits)[-1] if self.commits else None
        return name if name in self.commits else None


@dataclass
class Hub:
    """The address of a stand-in, its repositories, and the files that were downloaded."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        path = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials"})
        if path[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.repositories:
                return self._answer(409, {"error": "You already created this model repo", "url": self._url(name)})
            private = asked.get("visibility", "private" if asked.get("private") else "public") == "private"
            self.hub.repositories[name] = Repository(private)
            return self._answer(200, {"url": self._url(name), "name": name})
        if path[:2] == ["api", "validate-yaml"]:
            head = json.loads(body)["content"].split("---")[1]
            assert head.strip().startswith("library_name:")
            return self._answer(200, {"errors": [], "warnings": []})
        api = path[:2] == ["api", "models"]
        name = "/".join(path[2:4] if api else path[:2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if not api:
            return self._file(repository, path[3], "/".join(path[4:]))
        action, revision = path[4] if len(path) > 4 else "revision", path[5] if len(path) > 5 else "main"
        if action == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if action == "commit":
            return self._commit(name, repository, body)
        commit = repository.commit(revision)
        if commit is None and repository.commits:
            return self._answer(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit] if commit else {}
        if action == "tree":
            rows = [
                {"type": "file", "path": one, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for one, data in files.items()
            ]
            return self._answer(200, rows)
        about = {"id": name, "modelId": name, "sha": commit, "private": repository.private, "tags": [], "downloads": 0}
        return self._answer(200, {**about, "likes": 0, "siblings": [{"rfilename": one} for one in files]})

    do_GET = do_HEAD = do_POST = _serve

    def _commit(self, name: str, repository: Repository, body: bytes) -> None:
        files = dict(list(repository.commits.values())[-1]) if repository.commits else {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = hashlib.sha1(repr((len(repository.commits), sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = files
        self._answer(200, {"success": True, "commitOid": commit, "commitUrl": f"{self._url(name)}/commit/{commit}"})

    def _file(self, repository: Repository, revision: str, name: str) -> None:
        commit = repository.commit(revision)
        data = repository.commits[commit].get(name) if commit else None
        if commit is None or data is None:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.hub.downloads.append(name)
        head = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        self._send(200, data, "application/octet-stream", head)

    def _url(self, name: str) -> str:
        return f"{self.hub.address}/{name}"

    def _answer(self, status: int, body: object, head: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), "application/json", head or {})

    def _send(self, status: int, data: bytes, kind: str, head: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **head}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A new stand-in; a client needs its address in HF_ENDPOINT and TOKEN in HF_TOKEN."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
