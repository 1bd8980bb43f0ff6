"""Folders from strangers: every reader refuses a trap in one line, runs nothing, and reads nothing outside them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import sparring
from sparring.cli.main import execute, main
from sparring.core import files, manifest
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
from sparring.training.folder import APART, hold
from sparring.training.warm_start import warm_start
from support.settings import effort, quick_words

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


def forge(folder: Path) -> None:
    """Make seals and manifests fit the files of a folder, as whoever wrote a trap would; they prove no origin."""
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    if any(not path.is_file() or path.stat().st_size > 2**30 for path in found):
        return  # to hash it would take forever
    for path in found:
        if path.name == "index.json" and not path.is_symlink():
            with suppress(ValueError, TypeError, RecursionError):
                value = dict(json.loads(path.read_text()))
                value.pop("seal", None)
                manifest.write_sealed(path, value)
    for path in sorted(found, key=lambda path: -len(path.parts)):
        if path.name == manifest.NAME:
            manifest.write_manifest(path.parent, apart=APART if (path.parent / "run.json").is_file() else ())


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
        """The one line with which a reader refuses a folder whose hashes fit."""
        forge(folder)
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
    for name in effort(("evaluate", "export", "vectors of a run"), ()):  # they open a run as `recommend` does
        del runs[name]
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
    "run": [
        "run.json",
        "model.safetensors",
        "seen.safetensors",
        "query_ids.parquet",
        "item_ids.parquet",
        "checkpoint.safetensors",
    ],
    "run/index": ["index.json", "vectors-*.npy", "ids-*.npy"],
    "prepared": ["prepared.json", "queries.npy", "items.npy", "start.npy", "item_ids.parquet"],
    "texts": ["texts.npy", "start.npy", "tokens.npy"],
    "bag": ["config.json", "model.safetensors"],
    "tables": ["index.json", "0-of-1.safetensors"],
    "codes": ["codes.safetensors"],
}
FILES = [(kind, name) for kind, names in NEEDED.items() for name in names]
# Resuming and diagnosing build the ids from the data again; only they read the checkpoint.
TRAINING = {"run.json", "model.safetensors", "checkpoint.safetensors"}
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
            training = name in ("resume", "diagnose")
            unread = pattern not in TRAINING if training else pattern == "checkpoint.safetensors"
            if kind == "run" and unread and trap not in ("link", "fifo", "device"):  # these lock all of the folder
                continue
            line = guarded.refuses(reader, folder)
            assert str(folder.parent if kind == "run/index" else folder) in line
            assert trap != "link" or "leads out" in line


@pytest.mark.parametrize("towers", [True, False])
def test_no_recipe_that_a_folder_names_is_imported(
    towers: bool, copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded
) -> None:
    """A file, a module beside the command, a package, a path that leads back, or an installed recipe: none is imported.
    Readers that need the recipe refuse; the others build the towers from the settings."""
    folder = copied("run")
    (folder / "evil.py").write_text(EVIL)
    meta = json.loads((folder / "run.json").read_text())
    for recipe in (
        f"{folder}/evil.py:recipe", "evil:recipe", "evilpackage.inner:recipe", "/proc/self/cwd/../run/evil.py:recipe",
        "evil", "evil.py:recipe", "os:system", "\x1b[2J:recipe", "a\nb:c",
    ):  # fmt: skip
        named = {"towers": {"query": "evil:Tower", "item": "evil:Tower"}} if towers else {}
        (folder / "run.json").write_text(json.dumps({**meta, "recipe": recipe, **named}))
        for name, reader in readers["run"].items():
            if towers or name in ("resume", "diagnose"):
                line = guarded.refuses(reader, folder)
                assert "not part of Sparring" in line
                assert line.isprintable()
            else:
                forge(folder)
                with guarded.watched():
                    reader(folder)


def test_only_the_caller_chooses_the_code(copied: Callable[[str], Path], guarded: Guarded) -> None:
    """trust=True imports the recipe that run.json names, and so does the caller's own recipe: the watch sees both."""
    folder = copied("run")
    meta = json.loads((folder / "run.json").read_text())
    towers = {"towers": {"query": "evil:Tower", "item": "evil:Tower"}}
    for how in ({"trust": True}, {"recipe": "evil:recipe"}):
        (folder / "run.json").write_text(json.dumps({**meta, "recipe": "evil:recipe", **towers}))
        forge(folder)
        with pytest.raises(AssertionError, match="ran"), guarded.watched(), pytest.raises(UserError):
            sparring.load(folder, **how)  # type: ignore[arg-type]
        guarded.canary.unlink()
        for name in [name for name in sys.modules if "evil" in name]:
            del sys.modules[name]


@pytest.mark.parametrize("name", [Path("x"), "../outside/x", "/etc/passwd", "..", "", "a/../b", 5, None, "x\0y"])
def test_names_in_descriptions_are_plain(
    name: object, copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded
) -> None:
    """index.json, a manifest, the index of shards and a checkpoint cannot name a file outside their folder, not even
    a faithful copy (`x`)."""
    index, prepared, tables = copied("run") / "index", copied("prepared"), copied("tables")
    outside = guarded.outside / "x"
    name = str(outside) if isinstance(name, Path) else name
    meta = json.loads((index / "index.json").read_text())
    shutil.copy(index / meta["files"]["vectors"]["name"], outside)
    meta["files"]["vectors"]["name"] = name
    (index / "index.json").write_text(json.dumps(meta))
    guarded.refuses(readers["run/index"]["index"], index)
    listed = manifest.read_sealed(prepared / manifest.NAME, "")
    if name and isinstance(name, str) and ("/" in name or name == ".."):
        listed["files"] = {name: [outside.stat().st_size, manifest.file_hash(outside)], **listed["files"]}
        manifest.write_sealed(prepared / manifest.NAME, listed)
        with guarded.watched(), pytest.raises(UserError, match="lists"):
            sparring.read(prepared)
    meta = json.loads((tables / "index.json").read_text())
    shutil.copy(tables / meta["shards"][0]["name"], outside)
    meta["shards"][0]["name"] = name
    (tables / "index.json").write_text(json.dumps(meta))
    guarded.refuses(readers["tables"]["shards"], tables)
    if name:
        run = copied("run")
        tensors, state = files.read_tensors(run / "checkpoint.safetensors")
        files.write_tensors(run / "checkpoint.safetensors", tensors, {**state, "tables": name})
        guarded.refuses(readers["run"]["resume"], run)


def test_folders_that_are_links(
    copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded, tmp_path: Path
) -> None:
    """A sub-folder that is a link out of the run is refused; a link to a run, or between its files, is not."""
    folder = copied("run")
    (tmp_path / "named").symlink_to(folder)
    (folder / "again.json").symlink_to("run.json")
    forge(folder)
    with guarded.watched():
        sparring.load(tmp_path / "named")
    shutil.move(folder / "index", guarded.outside / "index")
    (folder / "index").symlink_to(guarded.outside / "index")
    for reader in (*readers["run"].values(), open_index):
        assert "leads out" in guarded.refuses(reader, folder)


def test_nothing_is_written_through_a_link(
    copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded
) -> None:
    """A lock, a temporary file or a store that is a link out of the run is refused; its target keeps its content."""
    victim = guarded.outside / "victim"
    victim.write_text("SECRET")
    for name in (".lock", ".checkpoint.safetensors.0123abcd.tmp", "serve/items.sqlite", "encoder"):
        folder = copied("run")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(guarded.outside if name == "encoder" else victim)
        guarded.refuses(readers["run"]["resume"], folder)
        guarded.refuses(lambda folder: execute(["serve", str(folder), "--port", "0"]), folder)
        if name == ".lock":
            guarded.refuses(lambda folder: hold(folder), folder)
        assert victim.read_text() == "SECRET"


def test_sizes_that_take_all_memory(copied: Callable[[str], Path], guarded: Guarded) -> None:
    """Settings that promise larger tables than the model file holds are refused before memory is taken."""
    folder = copied("run")
    meta = json.loads((folder / "run.json").read_text())
    meta["setup"]["model"]["dim"] = 10**12
    (folder / "run.json").write_text(json.dumps(meta))
    assert "too short" in guarded.refuses(sparring.load, folder)


@pytest.mark.parametrize("state", [[1], "x", 5, {"tables": 7}, {"epoch": "x", "done": []}])
def test_states_of_other_types(
    state: object, copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded
) -> None:
    """A checkpoint whose state is no object, or has other fields, is refused."""
    folder = copied("run")
    tensors, _ = files.read_tensors(folder / "checkpoint.safetensors")
    files.write_tensors(folder / "checkpoint.safetensors", tensors, state)  # type: ignore[arg-type]
    assert str(folder) in guarded.refuses(readers["run"]["resume"], folder)


@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [[]], 1e300, True])
def test_descriptions_of_other_types(
    value: object, copied: Callable[[str], Path], readers: dict[str, dict[str, Reader]], guarded: Guarded
) -> None:
    """Any value of run.json replaced by one of another type: the run opens all the same, or one line refuses it."""
    folder = copied("run")
    meta = json.loads((folder / "run.json").read_text())
    changed = [{**meta, key: value} for key in meta]
    changed += [{**meta, "setup": {**meta["setup"], key: value}} for key in meta["setup"]]
    changed += [{**meta, "source": {**meta["source"], key: value}} for key in meta["source"]]
    for each in changed:
        (folder / "run.json").write_text(json.dumps(each))
        forge(folder)
        for name in readers["run"].keys() & {"load", "evaluate", "diagnose"}:
            lines = []
            with guarded.watched():
                try:
                    readers["run"][name](folder)
                except UserError as error:
                    lines = str(error).splitlines()
            assert len(lines) <= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {**t, "items": t["items"] + 10**6},
        lambda t: {**t, "items": t["items"] - 10},
        lambda t: {**t, "start": t["start"] * 1000},
        lambda t: {**t, "start": t["start"].flip(0)},
        lambda t: {**t, "start": t["start"][:-1]},
        lambda t: {**t, "start": t["start"].float()},
        lambda t: {**t, "untrained_items": torch.tensor([-5])},
        lambda t: {"items": t["items"]},
        lambda t: {},
    ],
)
def test_lists_that_point_elsewhere(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    copied: Callable[[str], Path],
    guarded: Guarded,
) -> None:
    """Offsets and ids outside the run are refused: a kernel would read other memory with them."""
    folder = copied("run")
    tensors, meta = files.read_tensors(folder / "seen.safetensors")
    files.write_tensors(folder / "seen.safetensors", {k: t.contiguous() for k, t in change(tensors).items()}, meta)
    assert "seen.safetensors" in guarded.refuses(sparring.load, folder)


# Parquet and .npz


def varint(value: int) -> bytes:
    """A number as Parquet's footer writes it: zigzag, seven bits per byte."""
    value, out = 2 * value, b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def test_tables_with_hostile_metadata(
    copied: Callable[[str], Path],
    readers: dict[str, dict[str, Reader]],
    guarded: Guarded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids whose footer promises 2^40 rows, ids that are lists or structures, and a few bytes that unfold to more rows
    than fit into memory are refused."""
    folder = copied("run")
    path = folder / "item_ids.parquet"
    n = len(files.read_table(path))
    content = path.read_bytes()
    size = struct.unpack("<I", content[-8:-4])[0]
    body, footer = content[: -8 - size], content[-8 - size : -8]
    footer = footer.replace(varint(n), varint(2**40))
    path.write_bytes(body + footer + struct.pack("<I", len(footer)) + b"PAR1")
    guarded.refuses(sparring.load, folder)
    for ids in ([[1], [2]], [{"a": 1}, {"a": 2}], [b"x", b"y"], [None, None], [1.5, 2.5]):
        pl.DataFrame({"id": ids}).write_parquet(path)
        guarded.refuses(sparring.load, folder)
    pl.DataFrame({"id": np.zeros(2_000_000, dtype=np.int64)}).write_parquet(path)
    assert path.stat().st_size < 2**20
    monkeypatch.setattr(files, "machine_bytes", lambda: 2**20)
    assert "memory" in guarded.refuses(sparring.load, folder)


def test_archives_that_unfold(tmp_path: Path, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """An .npz whose arrays promise more than they hold, unfold to more than the memory, or hold objects is refused."""
    from sparring.data.formats import xc

    def member(shape: tuple[int, ...], content: bytes, descr: str = "<i4") -> bytes:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
        return head.getvalue() + content

    zeros = bytes(2**24)
    path = tmp_path / "labels.npz"
    for name, content in {
        "promise": member((2**45,), b"1234"),
        "overflow": member((2**62, 2**62), b""),
        "negative": member((-(2**40),), b"1234"),
        "objects": member((1,), pickle.dumps(Bomb()), "|O"),
        "bomb": member((2**22,), zeros),
        "no array": pickle.dumps(Bomb()),
    }.items():
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("indices.npy", content)
        if name == "bomb":
            monkeypatch.setattr(xc, "machine_bytes", lambda: 2**20)
        assert "labels.npz" in guarded.refuses(xc.read_labels, path), name


# Text encoders


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random BERT of one layer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoders") / "tiny"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "shoe"]
    (folder / "vocab.txt").write_text("\n".join(words))
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def put(folder: Path, name: str, **entries: object) -> None:
    """Add entries to a JSON file of a folder."""
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **entries}))


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(Bomb(), folder / "pytorch_model.bin")


def in_another_format(folder: Path) -> None:
    without_weights(folder)
    put(folder, "model.safetensors.index.json", metadata={}, weight_map={"embeddings": "pytorch_model.bin"})


def slow_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    put(folder, "tokenizer_config.json", tokenizer_class="TransfoXLTokenizer")
    (folder / "vocab.pkl").write_bytes(pickle.dumps(Bomb()))


ENCODERS: dict[str, Callable[[Path], object]] = {
    "remote model": lambda folder: put(folder, "config.json", auto_map={"AutoModel": "evil.Model"}),
    "remote part": lambda folder: put(folder, "config.json", text_config={"auto_map": {"AutoModel": "evil.Model"}}),
    "remote tokenizer": lambda folder: put(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": "evil.T"}),
    "kernel of the hub": lambda folder: put(folder, "config.json", attn_implementation="evil/kernel"),
    "weights elsewhere": lambda folder: put(folder, "config.json", transformers_weights="../x.safetensors"),
    "quantizer": lambda folder: put(folder, "config.json", quantization_config={"quant_method": "evil"}),
    "adapter": lambda folder: put(folder, "adapter_config.json", base_model_name_or_path="evil/model"),
    "module": lambda folder: (folder / "modules.json").write_text('[{"path": "", "type": "evil.Module"}]'),
    "pickled weights": without_weights,
    "weights in another format": in_another_format,
    "weights outside": lambda folder: put(folder, "model.safetensors.index.json", weight_map={"a": "../b.safetensors"}),
    "slow tokenizer": slow_tokenizer,
}


@pytest.mark.parametrize("trap", ENCODERS)
def test_encoders_bring_no_code(trap: str, tiny: Path, tmp_path: Path, guarded: Guarded) -> None:
    """An encoder that names code, weights that are not safetensors or a slow tokenizer is refused in one line."""
    folder = Path(shutil.copytree(tiny, tmp_path / "encoder"))
    with guarded.watched():
        TextEncoder(folder, "cpu").load()
    (folder / "evil.py").write_text(EVIL)
    ENCODERS[trap](folder)
    guarded.refuses(lambda place: TextEncoder(place, "cpu").load(), folder)
    guarded.refuses(load_encoder, folder)
