"""sparring serve on the command line: bad input is one line and exit code 2."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from sparring.cli import main
from support.made_run import MadeRun


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve", *words]) == 2
    line = capsys.readouterr().err
    assert len(line.strip().splitlines()) == 1, line
    return line


def test_what_cannot_be_served_is_told_in_one_line(
    truth: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders without runs, invalid ports and times and unreadable tokens raise one-line errors."""
    run, empty = str(truth.folder), tmp_path / "empty"
    empty.touch()
    for words, word in (
        ([], "RUN"),
        ([str(tmp_path / "nothing")], "nothing"),
        ([str(tmp_path)], "run.json"),
        ([run, "--port", "x"], "'x'"),
        ([run, "--port", "99999"], "99999"),
        ([run, "--timeout", "0"], "--timeout"),
        ([run, "--watch", "-1"], "--watch"),
        ([run, "--max-body", "much"], "'much'"),
        ([run, "--threads", "0"], "'0'"),
        ([run, "--workers", "0"], "'0'"),
        ([run, "--workers", "3.5"], "'3.5'"),
        ([run, "--workers", "3", "--limit", "connections=2"], "connections"),
        ([run, "--token-file", str(tmp_path / "none")], "token"),
        ([run, "--token-file", str(empty)], "empty"),
        ([run, "--token", "secret"], "--token"),
        ([run, "--store", "/proc/none/items.sqlite"], "/proc/none"),
        ([run, "--store", str(tmp_path)], "cannot"),
        ([run, "--host", "0.0.0.0"], "SPARRING_TOKEN"),
        ([run, "--host", "no such host", "--port", "0"], "SPARRING_TOKEN"),
        ([run, "--host", "::"], "127.0.0.1"),
        ([run, "--limit", "connection=5"], "'connections'"),
        ([run, "--limit", "head=much"], "head"),
        ([run, "--limit", "client_rate=0"], "client_rate"),
    ):
        assert word in refused(words, capsys), words


def test_a_port_in_use_is_told(truth: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the port and a remedy."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--port" in refused([str(truth.folder), "--port", str(taken.getsockname()[1])], capsys)


def test_workers_need_a_system_that_hands_sockets_over(
    truth: MadeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cannot: the message says so before anything is loaded."""
    monkeypatch.delattr(socket, "send_fds")
    assert "--workers" in refused([str(truth.folder), "--port", "0", "--workers", "2"], capsys)


def test_an_address_of_another_machine_is_told(
    truth: MadeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token any address may be given, but it must be this machine's."""
    monkeypatch.setenv("SPARRING_TOKEN", "secret")
    assert "listen" in refused([str(truth.folder), "--host", "192.0.2.1", "--port", "0"], capsys)


def test_an_empty_token_is_not_taken_for_none(
    truth: MadeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty token variable is an error, not an open service."""
    monkeypatch.setenv("SPARRING_TOKEN", " ")
    assert "SPARRING_TOKEN" in refused([str(truth.folder)], capsys)


def test_a_broken_store_is_told(truth: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken store is an error and is not overwritten."""
    path = truth.folder / "serve" / "items.sqlite"
    path.parent.mkdir()
    path.write_text(json.dumps("not a database" * 100))
    assert "items.sqlite" in refused([str(truth.folder), "--port", "0"], capsys)
    assert path.read_text().startswith('"not a database')
