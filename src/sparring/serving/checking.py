"""Checks of everything that Sparring wrote to a folder: a run with its index, store and caches, or one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparring.core import files, manifest
from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.core.manifest import HashProgress, Problem, check_folder, is_finished, read_manifest
from sparring.data.prepared.format import is_prepared
from sparring.serving.index import index_files
from sparring.serving.index.run_index import FOLDER as INDEX
from sparring.training import folder as run_folder
from sparring.training.sources import PARTS


@dataclass(frozen=True)
class Checked:
    """The outcome of a check: the kind of folder, its files and bytes, and every difference."""

    kind: str
    files: int
    bytes: int
    problems: list[Problem]


def check(path: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Checked:
    """Compare every file of a run, an index, prepared data or a store with its hash.

    `progress(done, total)` counts bytes.

        for problem in check("runs/first").problems: print(problem)
    """
    path = Path(path)
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    done, total = 0, sum(file.stat().st_size for file in found)

    def advance(n: int) -> None:
        nonlocal done
        done += n
        progress(done, total)

    kind, checks = _kind(path)
    return Checked(kind, len(found), total, list(checks(path, advance)))


Check = Callable[[Path, HashProgress], Iterator[Problem]]


def _kind(path: Path) -> tuple[str, Check]:
    if path.is_file():
        return "store", _store
    if (path / "run.json").is_file():
        return ("run" if _says_finished(path) else "unfinished run"), _run
    if (path / index_files.META).is_file():
        return "index", _index
    if is_prepared(path):
        return "prepared data", _listed
    if any(path.glob("*.sqlite")):
        return "store", _stores
    if (path / manifest.NAME).is_file():
        return "folder", _listed
    problem = "is neither a run, an index, prepared data nor a store" if path.exists() else "does not exist"
    raise UserError(f"{path} {problem}: give a folder or a store that Sparring wrote")


def _run(folder: Path, progress: HashProgress) -> Iterator[Problem]:
    problems = check_folder(folder, progress)
    yield from problems
    yield from _owners(folder, progress, {problem.path for problem in problems})
    for part in [folder / "classifiers", folder / run_folder.SELECTION, *sorted((folder / PARTS).glob("*"))]:
        if part.is_dir():
            yield from _run(part, progress)
    if (folder / INDEX).is_dir():
        yield from _index(folder / INDEX, progress)
        yield from _index_of(folder)
    yield from _stores(folder / run_folder.SERVICE, progress)
    for path in sorted((folder / "cache").glob("*.safetensors")):
        yield from _tensors(path, progress)


def _owners(folder: Path, progress: HashProgress, named: set[Path]) -> Iterator[Problem]:
    """Files of tensors that another run wrote, or, if no manifest lists them yet, whose own hash does not match.

    Files that are `named` already are left out.
    """
    try:
        run, listed = run_folder.read_meta(folder)["id"], read_manifest(folder)
    except UserError:
        return  # check_folder has named run.json or the manifest
    for path in sorted(set(folder.glob("*.safetensors")) - named):
        if path.name not in listed.files and not listed.finished:
            problems = list(_tensors(path, progress))
            yield from problems
            if problems:
                continue
        try:
            owner = files.read_state(path).get("run", run)
        except UserError:
            continue  # damaged, and named before
        if owner != run:
            yield Problem(path, "damaged", "it belongs to another run")


def _index(folder: Path, progress: HashProgress) -> Iterator[Problem]:
    yield from index_files.check_index(folder, progress)


def _index_of(run: Path) -> Iterator[Problem]:
    try:
        same = index_files.read_meta(run / INDEX).get("model") == run_folder.model_hash(run)
    except (UserError, OSError):
        return  # damaged, and named before
    if not same:
        yield Problem(run / INDEX / index_files.META, "damaged", "it was built from another model")


def _stores(folder: Path, progress: HashProgress) -> Iterator[Problem]:
    for path in sorted(folder.glob("*.sqlite")):
        yield from _store(path, progress)


def _store(path: Path, progress: HashProgress) -> Iterator[Problem]:
    optional("orjson", "serve", "the check of a service's store")
    from sparring.serving.http.store import check_store

    yield from check_store(path)
    progress(path.stat().st_size)


def _tensors(path: Path, progress: HashProgress) -> Iterator[Problem]:
    try:
        files.map_tensors(path)
    except UserError as error:
        yield Problem(path, "damaged", manifest.reason(error))
    progress(path.stat().st_size)


def _listed(folder: Path, progress: HashProgress) -> Iterator[Problem]:
    yield from check_folder(folder, progress)


def _says_finished(folder: Path) -> bool:
    try:
        return is_finished(folder)
    except UserError:
        return True  # its damaged manifest is named
