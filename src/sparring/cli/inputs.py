"""What a command is given: its data (a file or a set by name, the columns, the split) and what run.json records of it; its settings."""

from __future__ import annotations

import hashlib
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.cli.values import number, share
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Interactions, Split
    from sparring.data.synthetic import SyntheticWorld

SPLITS = ("auto", "file", "random", "temporal", "leave-last-out")
COLUMNS = {
    "query": "who: user, customer, query",
    "item": "what: item, product, document",
    "time": "when, for temporal and leave-last-out splits",
    "weight": "weight of a pair",
    "rating": "rating, for --min-rating",
    "label": "1 where taken, 0 where shown and not taken",
    "split": "train, valid or test",
}


def add_several(parser: ArgumentParser) -> None:
    """--data, as often as there are data sets, with the options of their columns."""
    known = "a file, a folder of parts, the name of a set, or world:QUERIESxITEMS, whose truth is known; repeatable"
    parser.add_argument("--data", action="append", default=[], metavar="FILE_OR_NAME", help=known)
    add_columns(parser)


def add_columns(parser: ArgumentParser) -> None:
    """The options that `columns` reads."""
    group = parser.add_argument_group("columns (guessed from common names where not given)")
    group.add_argument(
        "--items", type=Path, metavar="FILE", help="table of items: an id column, title, category, any other"
    )
    group.add_argument("--queries", type=Path, metavar="FILE", help="table of queries")
    for name, text in COLUMNS.items():
        group.add_argument(f"--{name}-column", metavar="NAME", help=text)
    group.add_argument("--min-rating", type=number, metavar="X", help="keep pairs rated at least X")


def add_split(parser: ArgumentParser) -> None:
    """--split, --valid and --test."""
    group = parser.add_argument_group("split")
    group.add_argument(
        "--split",
        choices=SPLITS,
        default="auto",
        help="auto: the file's own if it has one, else random (default: auto)",
    )
    group.add_argument(
        "--valid",
        type=share,
        default=0.1,
        metavar="SHARE",
        help="share of the training part for validation (default: 0.1)",
    )
    group.add_argument(
        "--test", type=share, default=0.2, metavar="SHARE", help="share of the pairs for the test (default: 0.2)"
    )


def columns(args: Namespace) -> dict[str, Any]:
    """The reader's arguments that were given on the command line."""
    given: dict[str, Any] = {name: getattr(args, f"{name}_column") for name in COLUMNS}
    given["min_rating"] = args.min_rating
    for name in ("items", "queries"):
        path = getattr(args, name)
        given[name] = None if path is None else str(path.resolve())
    return {name: value for name, value in given.items() if value is not None}


def read_data(where: str, given: Mapping[str, Any]) -> Interactions:
    """Interactions of a file or folder, or of a set by name where there is no such file."""
    from sparring.data.reading import read

    if Path(where).exists():
        return read(where, **given)
    made = world(where)
    if made is not None:
        return made.interactions
    if Path(where).suffix or "/" in where:
        raise UserError(f"no such file or folder: {where}")
    from sparring.data.public_sets import find_set, load_set

    name = find_set(where).name
    if given:
        option = f"--{min(given).replace('_', '-')}" + ("-column" if min(given) in COLUMNS else "")
        raise UserError(f"{option} is for files: the columns of the data set {name!r} are known")
    with download_bar(name) as progress:
        return load_set(name, progress)


def world(where: str) -> SyntheticWorld | None:
    """The made-up world, with its truth, that world:QUERIESxITEMS or world:QUERIESxITEMS:SEED names; None for any other name."""
    if not where.startswith("world:") or Path(where).exists():
        return None
    from sparring.data.synthetic import make_world

    found = re.fullmatch(r"world:(\d+)x(\d+)(?::(\d+))?", where)
    if found is None:
        raise UserError(
            f"{where!r} is not a world: write world:QUERIESxITEMS, such as world:2000x1000, or world:2000x1000:SEED"
        )
    return make_world(int(found[1]), int(found[2]), seed=int(found[3] or 0))


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """What a download reports its bytes to: a bar that shows only on a terminal, and only once bytes arrive."""
    from rich.progress import DownloadColumn, Progress

    from sparring.cli.screen import console

    screen = console()
    with Progress(
        *Progress.get_default_columns(),
        DownloadColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as bar:
        task = bar.add_task(name, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextmanager
def token_bar() -> Iterator[None]:
    """A bar for texts that are tokenised inside; it shows only on a terminal, and only once some are done."""
    from rich.progress import MofNCompleteColumn, Progress

    from sparring.cli.screen import console
    from sparring.data.texts.texts import reporting

    screen = console()
    bar = Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    with bar:
        task = bar.add_task("reading texts", total=None, visible=False)
        with reporting(lambda what, done, total: bar.update(task, completed=done, total=total, visible=True)):
            yield


def source(args: Namespace, data: Interactions, seed: int) -> dict[str, Any]:
    """What run.json must hold so that the same parts can be made again."""
    where = _place(args.data)
    split = {"how": args.split, "valid": args.valid, "test": args.test, "seed": seed}
    return {"data": where, "columns": columns(args), "split": split, "fingerprint": fingerprint(data), "k": args.k}


def fingerprint(data: Interactions) -> str:
    """A short hash of the pairs and of what splits them: data that was changed since a run began is noticed."""
    from sparring.data.prepared.format import Prepared

    if isinstance(data, Prepared):
        return data.checksum
    digest = hashlib.blake2b(f"{data.n_queries} {data.n_items}".encode(), digest_size=8)
    for column in (data.queries, data.items, data.time, data.split, *(data.hidden or ())):
        digest.update(b"" if column is None else column.data)
    return digest.hexdigest()


def recorded(meta: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The source that a run recorded."""
    found = meta.get("source") or {}
    if "data" not in found:
        raise UserError(f"{folder / 'run.json'} does not say where its data came from: give --data")
    return dict(found)


def read_recorded(meta: Mapping[str, Any], folder: Path, where: str | None, given: Mapping[str, Any]) -> Interactions:
    """The data of a run, read as its training read it; or other data, from a place given now."""
    if where is not None and (not meta.get("source") or _place(where) != meta["source"]["data"]):
        return read_data(where, given)
    found = recorded(meta, folder)
    if "/" in found["data"] and not Path(found["data"]).exists():
        raise UserError(f"the data of {folder} is no longer at {found['data']}: give --data")
    return read_data(found["data"], {**found["columns"], **given})


def _place(where: str) -> str:
    """A file by its full path, so that it is found from anywhere; a set by its name."""
    return str(Path(where).resolve()) if Path(where).exists() else where


def split_as(data: Interactions, meta: Mapping[str, Any], folder: Path, given: str | None = None) -> Split:
    """The parts of a run's data, made as its training made them; `given` is where the data was read from, if not where it was then."""
    from sparring.data.splits import split

    found = recorded(meta, folder)
    if fingerprint(data) != found["fingerprint"]:
        if given is not None and _place(given) != found["data"]:
            raise UserError(
                f"{given} is not what {folder} was trained on, which was {found['data']}: its interactions are others"
            )
        raise UserError(f"{found['data']} is not what {folder} was trained on: its interactions have changed since")
    return split(data, **found["split"])


def cutoffs_for(asked: tuple[int, ...] | None, n_items: int) -> list[int]:
    """The cutoffs asked for, or the usual ones that the catalogue allows."""
    if asked is None:
        return [k for k in (10, 20, 50) if k <= n_items] or [n_items]
    if asked[-1] > n_items:
        raise UserError(f"cutoff {asked[-1]} in --k is larger than the catalogue of {n_items:,} items")
    return list(asked)


TEXTS_READ = "no query of the test part is trained on: its text is read (--set encoder=auto)"


def only_texts_help(asked: Mapping[str, object], *data: Split) -> bool:
    """Whether nothing is said of towers, and in all data both sides have texts and no test query is trained on: ids say nothing of it."""
    import numpy as np

    from sparring.data.texts.texts import has_texts

    if asked.keys() & {"encoder", "query_tower", "item_tower"}:
        return False
    for parts in data:
        if parts.test is None or not (has_texts(parts.train, "query") and has_texts(parts.train, "item")):
            return False
        if np.isin(parts.test.queries, parts.train.queries).any():
            return False
    return True


def settings(args: Namespace, *short: str) -> dict[str, object]:
    """What --set asks for, and options such as --epochs N that are short for it; none may come twice."""
    asked: dict[str, object] = dict(args.settings)
    for name in short:
        value = getattr(args, name)
        if value is not None and name in asked:
            raise UserError(f"{name} is set twice: by --{name.replace('_', '-')} and by --set {name}={asked[name]}")
        if value is not None:
            asked[name] = value
    return asked
