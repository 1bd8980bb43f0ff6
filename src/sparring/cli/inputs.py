"""The inputs of a command: data, columns, split, modalities and settings, and their record in run.json."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.cli.parsing import number, share
from sparring.cli.screen import detail, progress
from sparring.core.choices import SPLITS
from sparring.core.errors import UserError

if TYPE_CHECKING:
    from sparring.data.interactions import Interactions, Split
    from sparring.data.modalities.modalities import Modalities
    from sparring.data.synthetic_world import SyntheticWorld
    from sparring.recipes.finding import Recipe
    from sparring.recipes.run import Run
    from sparring.recipes.setup import Setup

COLUMNS = {
    "query": "the query: a user, a customer, a search",
    "item": "the item: a product, a document",
    "time": "time, for temporal and leave-last-out splits",
    "weight": "weight of a pair",
    "rating": "rating, for --min-rating",
    "label": "1 for a positive, 0 for an item that was shown and not taken",
    "split": "train, valid or test",
}
DATA = (
    "a file, a folder of Parquet parts, an address such as s3://BUCKET/FILE.parquet, the name of a data set, "
    "or world:QUERIESxITEMS for synthetic data"
)
TEXTS_READ = "no test query is in the training part, so the texts are encoded (--set encoder=auto)"


# Options


def add_data(parser: ArgumentParser, text: str = DATA, **options: Any) -> None:
    """--data, with the options of its columns."""
    parser.add_argument("--data", metavar="FILE_OR_NAME", help=text, **options)
    add_columns(parser)


def add_several(parser: ArgumentParser, required: bool = True) -> None:
    """--data, repeatable, with the options of its columns."""
    text = f"{DATA}; or world:QUERIESxITEMS, a synthetic world with known truth; repeatable"
    add_data(parser, text, action="append", default=[], required=required)


def add_columns(parser: ArgumentParser) -> None:
    """The options that `columns` reads."""
    group = parser.add_argument_group("columns (recognised by common names unless given)")
    group.add_argument("--items", metavar="FILE", help="table of items: an id, a title, a category, ...")
    group.add_argument("--queries", metavar="FILE", help="table of queries")
    text = "items that exist: those of the interactions, or all of the items table (default: interactions)"
    group.add_argument("--catalogue", choices=("interactions", "all"), default="interactions", help=text)
    for name, text in COLUMNS.items():
        group.add_argument(f"--{name}-column", metavar="NAME", help=text)
    group.add_argument("--min-rating", type=number, metavar="X", help="keep pairs rated at least X")
    text = "merge a pair's rows into one, or keep each row, and then never mask seen items (default: merge)"
    group.add_argument("--repeats", choices=("merge", "keep"), default="merge", help=text)


def add_split(parser: ArgumentParser) -> None:
    """--split, --valid and --test."""
    group = parser.add_argument_group("split")
    text = "auto: the split of the file if it has one, else random (default: auto)"
    group.add_argument("--split", choices=SPLITS, default="auto", help=text)
    text = "share of the training part held out for validation (default: 0.1)"
    group.add_argument("--valid", type=share, default=0.1, metavar="SHARE", help=text)
    text = "share of the pairs held out for the test (default: 0.2)"
    group.add_argument("--test", type=share, default=0.2, metavar="SHARE", help=text)


def add_modalities(parser: ArgumentParser) -> None:
    """--modality NAME=SPEC, --text-encoder and --cache, for a command that has --device."""
    group = parser.add_argument_group("modalities")
    text = (
        "vectors of the items, repeatable; SPEC: FILE.npy, FILE.npy:IDS, FILE.parquet:COLUMN, text:COLUMN,..., "
        "images:FOLDER, images:COLUMN, behaviour (from the training interactions), behaviour:RUN (from a finished run)"
    )
    group.add_argument("--modality", action="append", default=[], metavar="NAME=SPEC", help=text)
    text = "folder or hub name of a sentence encoder (default: minilm)"
    group.add_argument("--text-encoder", default="minilm", metavar="NAME", help=text)
    text = "cache of encoded vectors (default: $SPARRING_HOME, else ~/.cache/sparring)"
    group.add_argument("--cache", metavar="FOLDER", help=text)


def columns(args: Namespace) -> dict[str, Any]:
    """The reader's arguments that were given on the command line."""
    from sparring.data.remote import is_remote

    given: dict[str, Any] = {name: getattr(args, f"{name}_column") for name in COLUMNS}
    given["min_rating"] = args.min_rating
    given["catalogue"] = True if args.catalogue == "all" else None
    given["repeats"] = "keep" if args.repeats == "keep" else None
    for name in ("items", "queries"):
        path = getattr(args, name)
        given[name] = path if path is None or is_remote(path) else str(Path(path).resolve())
    return {name: value for name, value in given.items() if value is not None}


def option(argument: str) -> str:
    """The option of an argument of the library: time -> --time-column, min_rating -> --min-rating."""
    return f"--{argument.replace('_', '-')}" + ("-column" if argument in COLUMNS else "")


def message(error: UserError) -> str:
    """The line of an error, which names the option where the library names its argument."""
    if not error.argument:
        return " ".join(str(error).split())
    value = "NAME" if error.value == "..." else error.value
    return f"{' '.join(error.message.split())}; use {option(error.argument)} {value}"


def split_arguments(args: Namespace, seed: int) -> dict[str, Any]:
    """The arguments of `split`, which run.json records; --split-seed replaces the seed."""
    asked = getattr(args, "split_seed", None)
    return {"how": args.split, "valid": args.valid, "test": args.test, "seed": seed if asked is None else asked}


# Reading


def read_data(where: str, given: Mapping[str, Any]) -> Interactions:
    """The interactions of a file or folder, or of a data set by name if there is no such file."""
    from sparring.data.reading import read
    from sparring.data.remote import check_scheme, is_remote

    if is_remote(where) or Path(where).exists():
        return read(where, **given)
    check_scheme(where)
    synthetic = world(where)
    if synthetic is not None:
        return replace(synthetic.interactions, repeats="repeats" in given)
    if Path(where).suffix or "/" in where:
        raise UserError(f"no such file or folder: {where}")
    from sparring.data.public_sets import find_set, load_set

    name, unread = find_set(where).name, sorted(given.keys() - {"repeats"})
    if unread:
        raise UserError(f"{option(unread[0])} is for files: the columns of the data set {name!r} are known")
    with progress("bytes") as update:
        return load_set(name, lambda done, total: update(name, done, total), given.get("repeats", "merge"))


def world(where: str) -> SyntheticWorld | None:
    """The synthetic world named world:QUERIESxITEMS or world:QUERIESxITEMS:SEED; None for any other name."""
    if not where.startswith("world:") or Path(where).exists():
        return None
    from sparring.data.synthetic_world import named_world

    return named_world(where)


def read_modalities(args: Namespace, split: Split) -> Modalities:
    """The modalities of a command: a bar on a terminal while they are encoded, then a line for each."""
    from sparring.data.modalities.sources import SPECS, load_modalities, parse_modalities
    from sparring.training.trained import run_vectors

    specs = parse_modalities(args.modality)
    if not specs:
        raise UserError(f"no modality is given: add --modality NAME=SPEC, where SPEC is {SPECS}")
    with progress("items") as update:
        modalities = load_modalities(
            specs,
            split,
            text_encoder=args.text_encoder,
            cache=args.cache,
            device=args.device,
            progress=update,
            run_vectors=partial(run_vectors, recipe=args.recipe, trust=args.trust, model=args.model),
        )
    detail(args, *modalities.notes)
    return modalities


def source(data: Interactions, where: str, given: Mapping[str, Any], split: Mapping[str, Any], k: list[int]) -> Any:
    """The record in run.json from which the same parts are read again."""
    from sparring.data.fingerprints import fingerprint

    place = {"data": _place(where), "columns": dict(given), "split": dict(split)}
    return {**place, "fingerprint": fingerprint(data), "k": k}


def recorded(meta: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The source that a run recorded."""
    record = meta.get("source") or {}
    if "data" not in record:
        raise UserError(f"{folder / 'run.json'} does not record where its data came from: give --data")
    kinds: dict[str, Any] = {"data": str, "columns": dict, "fingerprint": str, "k": list, "split": dict}
    rule: dict[str, Any] = {"how": str, "valid": (int, float), "test": (int, float), "seed": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    if not wrong:
        split = record["split"]
        wrong = [name for name, kind in rule.items() if not isinstance(split.get(name), kind)]
        wrong += list(split.keys() - rule.keys())
    if wrong:
        raise UserError(f"{folder / 'run.json'} is corrupt: its source has no usable {wrong[0]}; train the run again")
    for name in record["columns"].keys() - {*COLUMNS, "min_rating", "items", "queries", "catalogue", "repeats"}:
        raise UserError(f"{folder / 'run.json'} is corrupt: its source has the column {name!r}; train the run again")
    return dict(record)


def read_recorded(meta: Mapping[str, Any], folder: Path, where: str | None, given: Mapping[str, Any]) -> Interactions:
    """The data of a run, read as in its training; or other data, if `where` is another place."""
    if where is not None and _place(where) != (meta.get("source") or {}).get("data"):
        return read_data(where, given)
    from sparring.data.remote import is_remote

    record = recorded(meta, folder)
    if where is None and is_remote(record["data"]):  # a folder from a stranger must not choose what is read
        raise UserError(f"the data of {folder} is at {record['data']}: give --data to read it from there")
    if not is_remote(record["data"]) and "/" in record["data"] and not Path(record["data"]).exists():
        raise UserError(f"the data of {folder} is no longer at {record['data']}: give --data")
    return read_data(record["data"], {**record["columns"], **given})


def _place(where: str) -> str:
    """A file by its absolute path, a data set by its name."""
    return str(Path(where).resolve()) if Path(where).exists() else where


def split_recorded(data: Interactions, meta: Mapping[str, Any], folder: Path, where: str | None = None) -> Split:
    """The parts that a run was trained and tested on; those of a refitted run have no validation part.

    `where` is the place that the data was read from, if another.
    """
    parts = first_split(data, meta, folder, where)
    return parts.joined() if "refit" in meta else parts


def first_split(data: Interactions, meta: Mapping[str, Any], folder: Path, where: str | None = None) -> Split:
    """The parts of a run's data before a refit joins them."""
    from sparring.data.fingerprints import fingerprint
    from sparring.data.splits import split

    record = recorded(meta, folder)
    if fingerprint(data) != record["fingerprint"]:
        if where is not None and _place(where) != record["data"]:
            raise UserError(f"{where} is not the training data of {folder}, which was {record['data']}")
        raise UserError(f"{record['data']} has changed since {folder} was trained on it")
    return split(data, **record["split"])


def cutoffs_for(asked: tuple[int, ...] | None, n_items: int) -> list[int]:
    """The cutoffs given by --k, or the defaults that the catalogue allows."""
    if asked is None:
        return [k for k in (10, 20, 50) if k <= n_items] or [n_items]
    if asked[-1] > n_items:
        raise UserError(f"cutoff {asked[-1]} in --k is larger than the catalogue of {n_items:,} items")
    return list(asked)


# Settings


def settings(args: Namespace, *short: str) -> dict[str, object]:
    """The settings of --set by flat name, and of short forms such as --epochs N; none may occur twice."""
    from sparring.recipes.setup import flat_name

    asked: dict[str, object] = {flat_name(name): value for name, value in args.settings}
    for name in short:
        value = getattr(args, name)
        if value is not None and name in asked:
            raise UserError(f"{name} is set twice: by --{name.replace('_', '-')} and by --set {name}={asked[name]}")
        if value is not None:
            asked[name] = value
    return asked


def build(
    name: str | Recipe,
    data: Interactions,
    asked: Mapping[str, object],
    base: Setup | None = None,
    setup: Setup | None = None,
) -> Run:
    """The run of a recipe, with a bar on a terminal while its texts are tokenised."""
    from sparring.data.texts.texts import reporting
    from sparring.recipes import settings

    with progress("texts") as update, reporting(update):
        return settings.build(name, data, asked, base, setup=setup)


def base_setup(args: Namespace) -> Setup | None:
    """The Setup of the recipe that --setup names."""
    from sparring.recipes.finding import find
    from sparring.recipes.settings import own_setup

    return None if args.setup is None else own_setup(find(args.setup))


def check_settings(
    recipes: Iterable[tuple[str, Mapping[str, object]]], base: Setup | None = None, trials: int = 0
) -> None:
    """Raise for wrong settings of a recipe, or a missing tuner, before the data is read."""
    from sparring.recipes.finding import find
    from sparring.recipes.settings import resolve

    for name, asked in recipes:
        resolve(find(name), asked, base)
    if trials:
        from sparring.experiments.tuning import require_optuna

        require_optuna()


def only_texts_help(asked: Mapping[str, object], *data: Split) -> bool:
    """Whether only texts can help: no tower is chosen, both sides have texts, and no test query is trained on."""
    import numpy as np

    from sparring.data.texts.texts import has_texts

    if asked.keys() & {"encoder", "query_tower", "item_tower"}:
        return False
    return all(
        parts.test is not None
        and has_texts(parts.train, "query")
        and has_texts(parts.train, "item")
        and not np.isin(parts.test.queries, parts.train.queries).any()
        for parts in data
    )
