"""Folders from strangers: every reader refuses a trap in one line, runs nothing, and reads nothing outside the folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import safetensors.torch
import torch
from support.settings import quick_words

import sparring
from sparring.cli.main import execute, main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.types import ALONE
from sparring.data.interactions import Split
from sparring.data.prepared.preparation import prepare
from sparring.data.texts.encoder import TextEncoder
from sparring.data.texts.texts import Texts, tokenize
from sparring.experiments.diagnose.samplers import load_for_diagnosis
from sparring.models.clusters import MSAC, Codes
from sparring.models.encoders import load_encoder, open_encoder, save_encoder
from sparring.recipes.settings import build
from sparring.serving.index.run_index import build_index, open_index
from sparring.training import run_vectors, shards
from sparring.training.warm_start import warm_start

Reader = Callable[[Path], object]

SECONDS = 30  # a reader that waits for a FIFO, or reads 100 GB, takes longer
HUGE = 100 * 2**30
EVIL = "import os; open(os.environ['CANARY'], 'w').close()\ndef recipe(data, setup=None): ...\n"


# The watch: everything that Python opens, imports or runs


class Watch:
    """The events of the audit hook while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        self.ran: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            self.opened.append(os.path.abspath(os.fsdecode(args[0])))
        elif event in ("pickle.find_class", "os.system", "subprocess.Popen", "marshal.load", "socket.connect"):
            self.ran.append(f"{event} {args!r:.200}")
        elif event == "import" and str(args[0]).startswith("evil"):
            self.ran.append(f"import {args[0]}")


WATCH = Watch()
sys.addaudithook(WATCH)


class Guarded:
    """A place with a secret file outside of every folder, and a canary that code of a trap would leave behind."""

    def __init__(self, place: Path) -> None:
        self.outside = place / "outside"
        self.outside.mkdir()
        self.canary = place / "canary"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Fail if anything runs, if a file outside is opened, or if it takes too long."""

        def stop(*_: object) -> None:
            raise TimeoutError("a reader waits")

        WATCH.opened, WATCH.ran, WATCH.on = [], [], True
        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            WATCH.on = False
        assert not self.canary.exists(), "code of the folder ran"
        assert not WATCH.ran, WATCH.ran
        stolen = [path for path in WATCH.opened if Path(path).is_relative_to(self.outside)]
        assert not stolen, stolen

    def refuses(self, reader: Reader, folder: Path) -> str:
        """The one line with which a reader refuses a folder."""
        with self.watched(), pytest.raises(UserError) as error:
            reader(folder)
        line = str(error.value)
        assert len(line.splitlines()) == 1
        assert "SECRET" not in line
        return line


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """The working folder and the search path of modules hold modules that leave the canary when imported."""
    here = Guarded(tmp_path)
    work = tmp_path / "work"
    (work / "evilpackage").mkdir(parents=True)
    for name in ("evil.py", "evilpackage/__init__.py", "evilpackage/inner.py"):
        (work / name).write_text(EVIL)
    monkeypatch.setenv("CANARY", str(here.canary))
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    return here


# The folders


@pytest.fixture(scope="module")
def made(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an index, its data, prepared data, tokens, a bag encoder, shards, and codes."""
    place = tmp_path_factory.mktemp("made")
    train = parts.train
    pairs = pl.DataFrame({"user_id": train.queries, "item_id": train.items})
    pairs.write_parquet(place / "pairs.parquet")
    words = ["train", "--data", str(place / "pairs.parquet"), "--recipe", "uns", "--quiet", "--out", str(place / "run")]
    assert main([*words, *quick_words(epochs=1)]) == 0
    build_index(sparring.load(place / "run"), kind="exact")
    prepare(place / "pairs.parquet", place / "prepared")
    tokenize(["red shoes", "a hat"], "words", 8).save(place / "texts")
    bag = open_encoder("bag", dim=4)
    save_encoder(bag, place / "bag")
    shards.write_tables(place / "tables", {"x": torch.arange(12.0).view(6, 2), "y": torch.tensor(3)}, ALONE)
    Codes.random(train.n_items, 3, 2, ids=train.item_ids).save(place / "codes" / "codes.safetensors")
    return place


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A fresh copy of one of the folders."""

    def copy(name: str) -> Path:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        return Path(shutil.copytree(made / name, tmp_path / name))

    return copy


@pytest.fixture(scope="module")
def readers(made: Path) -> dict[str, dict[str, Reader]]:
    """Every function and command that opens a folder, by the kind of folder."""
    own = sparring.split(sparring.read(made / "pairs.parquet"))
    someone = str(own.train.query_ids.ids[0])

    def command(name: str, *words: str) -> Reader:
        return lambda folder: execute([name, str(folder), *words])

    def resume(folder: Path) -> object:
        return execute(["train", "--resume", "--quiet", "--device", "cpu", "--out", str(folder)])

    def served(folder: Path) -> object:
        from sparring.serving.http.served_run import load_served

        return load_served(folder, "run")

    fresh = build("uns", own.train, {"dim": 8})
    runs: dict[str, Reader] = {
        "load": sparring.load,
        "recommend": command("recommend", "--query", someone),
        "evaluate": command("evaluate", "--json"),
        "export": command("export", "--to", "parquet", "--quiet"),
        "resume": resume,
        "diagnose": lambda folder: load_for_diagnosis(folder, own),
        "warm start": lambda folder: warm_start(fresh.model, own, folder),
        "vectors of a run": lambda folder: run_vectors(folder, own),
    }
    if find_spec("fastapi") is not None:
        runs["serve"] = served
    empty = {"x": torch.zeros(6, 2), "y": torch.tensor(0)}
    return {
        "run": runs,
        "run/index": {"index": lambda folder: open_index(folder.parent)},
        "prepared": {"read": sparring.read},
        "texts": {"tokens": Texts.load},
        "bag": {"bag": load_encoder},
        "tables": {"shards": lambda folder: shards.read_tables(folder, empty, ALONE)},
        "codes": {
            "codes": lambda folder: Codes.load(folder / "codes.safetensors"),
            "clusters": lambda folder: MSAC.load(folder / "codes.safetensors"),
        },
    }


# The files that a reader needs; it may open a folder without the others
NEEDED = {
    "run": ["run.json", "model.safetensors", "seen.safetensors", "query_ids.parquet", "item_ids.parquet"],
    "run/index": ["index.json", "vectors-*.npy", "ids-*.npy"],
    "prepared": ["prepared.json", "queries.npy", "items.npy", "start.npy", "item_ids.parquet"],
    "texts": ["texts.npy", "start.npy", "tokens.npy"],
    "bag": ["config.json", "model.safetensors"],
    "tables": ["index.json", "0-of-1.safetensors"],
    "codes": ["codes.safetensors"],
}
FILES = [(kind, name) for kind, names in NEEDED.items() for name in names]
LINKED = ("run", "run/index", "prepared")  # folders that people exchange: no link may lead out of them


def test_the_folders_open(made: Path, readers: dict[str, dict[str, Reader]], guarded: Guarded) -> None:
    """Without a trap every reader accepts its folder (codes hold no clusters to update)."""
    for kind, each in readers.items():
        for name, reader in each.items():
            if name != "clusters":
                with guarded.watched():
                    reader(made / kind)


class Bomb:
    """Unpickling it leaves the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (os.environ["CANARY"], "w")


def traps(guarded: Guarded) -> dict[str, Callable[[Path], object]]:
    """Ways to replace a file by a trap."""

    def link(path: Path) -> None:
        outside = guarded.outside / path.name
        shutil.move(path, outside)
        path.symlink_to(outside)

    def fifo(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def device(path: Path) -> None:
        path.unlink()
        path.symlink_to("/dev/zero")

    def pickled(path: Path) -> None:
        path.write_bytes(pickle.dumps(Bomb()))

    def zipped(path: Path) -> None:
        torch.save(Bomb(), path)

    def objects(path: Path) -> None:
        with open(path, "wb") as file:
            np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)

    def sparse(path: Path) -> None:
        os.truncate(path, HUGE)

    def deep(path: Path) -> None:
        path.write_text("[" * 100_000)

    return {
        "link": link, "fifo": fifo, "device": device, "pickle": pickled, "torch": zipped, "objects": objects,
        "sparse": sparse, "deep": deep,
    }  # fmt: skip


@pytest.mark.parametrize("trap", ["link", "fifo", "device", "pickle", "torch", "objects", "sparse", "deep"])
def test_every_reader_refuses_a_trap_in_any_file(
    trap: str, copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded
) -> None:
    """A link out of the folder, a FIFO, a device, a pickle, a torch archive, an array of objects, a file of 100 GB or
    endless nesting, in place of any file that is read: one line, nothing runs, nothing outside is opened."""
    for kind, pattern in FILES:
        if trap == "link" and kind not in LINKED:
            continue
        folder = copied(kind.split("/")[0]) / Path(*kind.split("/")[1:])
        path = next(folder.glob(pattern))
        traps(guarded)[trap](path)
        for name, reader in readers[kind].items():
            with_ids = pattern.endswith("ids.parquet") and name in ("diagnose", "resume")
            if with_ids and trap not in ("link", "fifo", "device"):  # these two rebuild the ids from the data
                continue
            if (
                pattern == "seen.safetensors"
                and name in ("diagnose", "resume")
                and trap not in ("link", "fifo", "device")
            ):
                continue
            if name == "resume" and pattern == "model.safetensors" and trap not in ("link", "fifo", "device"):
                continue  # the checkpoint has it
            line = guarded.refuses(reader, folder)
            assert str(folder) in line or str(folder.parent) in line, (kind, pattern, name, line)
