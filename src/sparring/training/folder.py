"""The run folder: the files that training writes, and how they are read back.

    run.json            format number, recipe, arguments, setup, data source, versions: enough to train the run again
    metrics.jsonl       one line per epoch
    result.json         the test metrics of the chosen epoch
    per_query.parquet   the same for every test query, float32, for paired tests: query, recall@10, ndcg@10, ...
    model.safetensors   the towers of the chosen epoch
    checkpoint.safetensors   everything that a resumed training needs (checkpoint.py)
    seen.safetensors    the items each query has taken, the test part apart; queries and items that were never trained
    *_ids.parquet, *_table.parquet   id maps, titles and other columns
    encoder/, query_texts/, item_texts/   text towers: a transformers folder (or a bag), and the tokens
    parts/              of a fused run: a copy of each of its runs (sources.py)
    classifiers/, fusion.safetensors, fusion_per_query.parquet   later stages, where the run has them (stages.py)
    curve.png, README.md   the training curve and a short model card
    manifest.json       length and hash of every file above, and whether training has finished (core/manifest.py)
    index/, serve/, cache/   an index, the changes of a service, computed vectors: each checks itself

The manifest is written when training starts, for the files that will not change, and again at the end, for all. The
model and the checkpoint change in between, so each has a hash of its own content too (core/files.py) and the id of its
run. Readers compare each file with its hash before they use it.

Every file is written beside its target and renamed, so a kill or a full disk leaves the last good one.

A run folder is data, also one from a stranger: tensors are safetensors, and no code that a file of it names is imported
(`recipe_of`). Its files must be regular files inside it (`files.check_folder`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core import files, locks, manifest
from sparring.core.errors import UserError
from sparring.core.files import write_table
from sparring.core.locks import LOCK, HeldError, Lock
from sparring.core.manifest import Manifest
from sparring.core.ranks import rank
from sparring.core.types import Positives, Ranks
from sparring.data.features import Histories
from sparring.data.interactions import Ids, Interactions, Split, Vocabulary
from sparring.evaluation.metrics import LIST_METRICS
from sparring.evaluation.ranking import Evaluation
from sparring.models.build import encoder_folder, solved_retriever, text_sides
from sparring.models.encoders import save_encoder
from sparring.models.retriever import Retriever
from sparring.models.text import text_tower
from sparring.recipes import finding, settings
from sparring.recipes.finding import Recipe, source_digest
from sparring.recipes.run import Run, build_towers
from sparring.recipes.setup import Setup, flat, parse_setup
from sparring.training import checkpoint
from sparring.training.eligibility import Eligibility, seen_tensors, untrained
from sparring.training.fingerprint import method
from sparring.training.model_card import model_card
from sparring.training.step import describe_batch

log = logging.getLogger(__name__)

SEEN = "seen.safetensors"
FORMAT = 3  # of run.json and the files beside it; Sparring 0.1 wrote none
TEXT_FOLDERS = ("encoder", "query_encoder", "item_encoder", "query_texts", "item_texts")
SERVICE = "serve"  # the folder of a service's acknowledged changes: no training may delete it
STARTED = (  # files that training writes first and never again
    *("run.json", SEEN),
    *(f"{side}_{part}.parquet" for side in ("query", "item") for part in ("ids", "table")),
)
APART = ("index", SERVICE, "cache")  # folders that are written after training and check themselves
_ADVICE = "train the run again, or restore it from a copy"
RESULTS = ("metrics.jsonl", "result.json", "per_query.parquet", "measured.json", "curve.png", "README.md")


# Locking


@contextmanager
def claimed(folder: Path, resume: bool, overwrite: bool, ranks: Ranks) -> Iterator[None]:
    """Lock the run folder on rank 0, if training may write there; if that fails, every rank raises."""
    held: Lock | None = None
    refusal: UserError | None = None
    if ranks.rank == 0:
        try:
            held = hold(folder)
            check_free(folder, resume, overwrite)
        except UserError as error:
            refusal = error
    refusal = ranks.share(refusal)
    try:
        if refusal is not None:
            raise refusal
        yield
    finally:
        if held is not None:
            held.release()


def hold(folder: Path) -> Lock:
    """Lock a run folder for this process; the error names the process that holds it."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder for the run")
    try:
        lock = Lock(folder / LOCK)
    except HeldError as error:
        raise UserError(
            f"another training ({error.owner}) writes to {folder}: wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {folder / LOCK}: {error.strerror}") from error
    files.sweep(folder)
    for name in TEXT_FOLDERS:
        if not (folder / name).is_symlink():
            files.sweep(folder / name)
    return lock


def is_held(folder: Path) -> bool:
    """Whether a training is writing to a run folder."""
    return locks.is_held(folder / LOCK)


def check_free(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise unless the folder is empty (but for a service's changes), or its run is to be resumed or overwritten."""
    if resume and overwrite:
        raise UserError("resume and overwrite cannot be combined: choose one")
    if resume or all(path.name in (LOCK, SERVICE) for path in folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{folder} is not empty: choose another folder, or resume or overwrite the run in it")
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} is not a run folder (no run.json), so overwrite does not delete it")
    for lock in sorted(folder.glob(f"*/{LOCK}")):
        if locks.is_held(lock):
            raise UserError(f"{locks.owner(lock)} writes to {lock.parent}: wait for it, or choose another folder")


def delete_run(folder: Path) -> bool:
    """Delete a run and its index, except a service's changes; False, and nothing deleted, where the folder has no run.

    run.json goes last: if interrupted, the rest is still recognised as that run.
    """
    if not (folder / "run.json").is_file():
        return False
    index = " and its index" if (folder / "index").is_dir() else ""
    kept = f"; kept the changes of a service in {folder / SERVICE}" if (folder / SERVICE).is_dir() else ""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "run.json"):
        if path.name == SERVICE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    log.info("deleted the run in %s%s%s", folder, index, kept)
    return True


# Writing


def description(run: Run, split: Split, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The resolved run for run.json: enough to train it again. One training step is run to describe its batch."""
    from importlib.metadata import version

    from sparring import __version__

    parts = {"train": split.train, "valid": split.valid, "test": split.test}
    return {
        "recipe": run.recipe,
        "arguments": run.arguments or {},
        **({"recipe_digest": digest} if (digest := source_digest(run.recipe)) else {}),
        "method": method(run),
        **({"towers": towers} if (towers := custom_towers(run.model)) else {}),
        "source": dict(source or {}),
        "data": {
            "queries": split.train.n_queries,
            "items": split.train.n_items,
            **{name: len(part) for name, part in parts.items() if part is not None},
        },
        "untrained": untrained(split),
        "dim": run.model.dim,
        "batch": describe_batch(run, split).splitlines(),
        "versions": {
            "python": platform.python_version(),
            "sparring": __version__,  # not from the metadata: the package may run from its source folder
            **{name: version(name) for name in ("torch", "polars", "numpy")},
        },
    }


def write_start(
    folder: Path,
    data: Interactions,
    seen: Positives,
    meta: Mapping[str, Any],
    setup: Setup,
    model: Retriever | None = None,
    test: Interactions | None = None,
    warm: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write all that is known before the first step; results of an earlier run are deleted first.

    `warm` has the dense ids of `queries` and `items` that start with the trained vectors of an earlier run.
    """
    for name in (manifest.NAME, "run.json", checkpoint.NAME, checkpoint.PREVIOUS, "model.safetensors", *RESULTS):
        (folder / name).unlink(missing_ok=True)
    data.save_ids(folder)
    if model is not None:
        _write_encoders(folder, model, setup, weights=False)
    run = secrets.token_hex(8)
    files.write_tensors(folder / SEEN, seen_tensors(data, seen, test, model, warm), {"run": run})
    files.write_json(folder / "run.json", {"format": FORMAT, "id": run, **meta, "setup": dataclasses.asdict(setup)})
    manifest.write_manifest(folder, finished=False, apart=APART)


def write_fused_start(folder: Path, split: Split, parts: Sequence[Eligibility], meta: Mapping[str, Any]) -> None:
    """Write the ids and run.json of a fused run; it lists an item, or knows a query, if one of its parts does."""
    split.train.save_ids(folder)
    run = secrets.token_hex(8)
    tensors = seen_tensors(split.train, split.seen_for("test"), split.test, None)
    for side in ("queries", "items"):
        blank = [set(getattr(part, side).tolist()) for part in parts]
        tensors[f"untrained_{side}"] = torch.tensor(sorted(set.intersection(*blank)), dtype=torch.int32)
    files.write_tensors(folder / SEEN, tensors, {"run": run})
    files.write_json(folder / "run.json", {"format": FORMAT, "id": run, **meta})
    manifest.write_manifest(folder, finished=False, apart=APART)


def reopen(folder: Path) -> None:
    """Mark a run as unfinished before more of it is written: only the files that stay as they are remain listed."""
    listed = read_manifest(folder)
    if listed.finished or not listed.files.keys() <= set(STARTED):
        manifest.write_manifest(folder, finished=False, names=(), keep=STARTED, apart=APART)


def finish(folder: Path) -> None:
    """Mark a run as finished and list all its files: the last write of a training."""
    manifest.write_manifest(folder, keep=STARTED, apart=APART)


def _write_encoders(folder: Path, model: Retriever, setup: Setup, weights: bool) -> None:
    """Write the files that rebuild the text towers; with `weights` the encoders also work outside this folder."""
    for side, module in (("query", model.query), ("item", model.item)):
        tower = text_tower(module)
        if tower is not None:
            tower.texts.save(folder / f"{side}_texts")
            save_encoder(tower.encoder, folder / encoder_folder(setup.text, side), weights)


def write_end(
    folder: Path, run: Run, history: list[dict[str, Any]], best_epoch: int, seconds: float, test: Evaluation | None
) -> None:
    """Write the result, the metrics of every test query, the curve and the model card."""
    from sparring.training.curve import training_curve

    reopen(folder)
    meta = read_meta(folder)
    result: dict[str, Any] = {"best_epoch": best_epoch, "epochs": len(history), "train_seconds": round(seconds, 3)}
    result["untrained"] = meta["untrained"]
    if test is not None:
        result["test"] = test.to_dict()
        write_queries(folder, "per_query.parquet", test)  # first: readers of result.json expect it
    _write_encoders(folder, run.model, run.setup, weights=True)
    files.write_json(folder / "result.json", result)
    title = finding.short(run.recipe)
    training_curve(history, folder / "curve.png", title, run.setup.validation.select)
    files.write_text(folder / "README.md", model_card(meta, result, history))


def write_stages(folder: Path, stages: Mapping[str, Evaluation], history: list[dict[str, Any]], ranking: str) -> None:
    """Add the test metrics of later stages and the chosen ranking to the result and the model card."""
    if "fusion" in stages:
        write_queries(folder, "fusion_per_query.parquet", stages["fusion"])
    path = folder / "result.json"
    result = files.read_json(path) | {"stages": {name: test.to_dict() for name, test in stages.items()}}
    result["ranking"] = ranking
    files.write_json(path, result)
    files.write_text(folder / "README.md", model_card(read_meta(folder), result, history))


def write_queries(folder: Path, name: str, test: Evaluation) -> None:
    """One row per test query, by its original id, with the metrics of quality (not those that describe lists)."""
    queries = Vocabulary.load(read_manifest(folder).path("query_ids.parquet")).decode(test.query_ids)
    metrics = {
        key: values.astype(np.float32)
        for key, values in test.per_query.items()
        if key.split("@")[0] not in LIST_METRICS
    }
    write_table(pl.DataFrame({"query": queries, **metrics}), folder / name)


# Reading


def has_run(folder: Path) -> bool:
    """Whether a folder has a run to resume; a run.json alone is from a start that was killed at once."""
    others = (manifest.NAME, "model.safetensors", checkpoint.NAME)
    return (folder / "run.json").is_file() and any((folder / name).is_file() for name in others)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder."""
    return manifest.read_manifest(folder, _ADVICE)


def read_meta(folder: Path) -> dict[str, Any]:
    """run.json of a run folder; folders of other versions of Sparring are refused."""
    from sparring import __version__

    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no run.json")
    files.check_folder(folder)
    if (folder / manifest.NAME).is_file():
        read_manifest(folder).path("run.json")
    meta = files.read_json(path, "train the run again")
    if meta.get("format") != FORMAT:
        versions = meta.get("versions")
        version = versions.get("sparring") if isinstance(versions, dict) else None
        writer = f"Sparring {version}" if version else "another version of Sparring"
        raise UserError(f"{path} was written by {writer}; Sparring {__version__} cannot read it: train the run again")
    read_manifest(folder)  # missing where its writer was killed
    for key, kind in (("setup", dict), ("recipe", str), ("id", str)):
        if key not in meta:
            raise UserError(f"{path} is corrupt: it has no {key}")
        if not isinstance(meta[key], kind):
            raise UserError(f"{path} is corrupt: its {key} is {meta[key]!r:.80}")
    for key in ("arguments", "towers", "source", "data", "untrained", "versions", "warm"):
        if not isinstance(meta.get(key, {}), dict):
            raise UserError(f"{path} is corrupt: its {key} is {meta[key]!r:.80}")
    return meta


def model_hash(folder: Path) -> str:
    """The hash of a run's model file, which tells its vectors from those of any other model."""
    name = "model.safetensors"
    listed = read_manifest(folder).files
    return listed[name][1] if name in listed else manifest.file_hash(folder / name)


def check_same(folder: Path, meta: Mapping[str, Any], setup: Setup) -> None:
    """Raise if a run would resume with another method, settings or data; warn if its recipe's file has changed."""
    before = read_meta(folder)
    before["setup"] = flat(before["setup"])
    now = json.loads(json.dumps({**meta, "setup": setup.flat()}, default=str))
    for part in ("recipe", "arguments", "setup", "method", "data"):
        if before.get(part) != now[part]:
            raise UserError(
                f"{folder} was started {difference(part, before.get(part), now[part])}: resume cannot change it"
            )
    digest = now.get("recipe_digest")
    if rank() == 0 and before.get("recipe_digest", digest) != digest:
        file = now["recipe"].rpartition(":")[0]
        log.warning("%s has changed since this run started; the remaining epochs use the current version", file)


def difference(part: str, old: object, new: object) -> str:
    """The first difference between two settings or mappings, to end a sentence: "with lr=0.1, not 0.2"."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        mapping = isinstance(old, dict) or isinstance(new, dict)
        return f"with other {part}" if mapping else f"with {part}={old}, not {new}"
    name = next(name for name in {**old, **new} if name not in old or name not in new or old[name] != new[name])
    if name not in old:
        return f"without {name}={new[name]}"
    if name not in new:
        return f"with {name}={old[name]}, which is missing now"
    return difference(name, old[name], new[name])


def read_run(
    folder: Path,
    model: Retriever | None = None,
    recipe: str | Recipe | None = None,
    trust: bool = False,
    unfinished: bool = False,
) -> tuple[Retriever, Ids, Eligibility, dict[str, Any]]:
    """The model of a run, its ids, its eligibility and run.json; a run that is not finished only with `unfinished`.

    Custom towers are those of `model`, or built by the recipe that `recipe_of` allows.
    """
    if not folder.is_dir():
        raise UserError(f"no such run folder: {folder}")
    meta, listed = read_meta(folder), read_manifest(folder)
    _check_single(folder, meta)
    if not (unfinished or listed.finished):
        state = "is in progress" if is_held(folder) else "was interrupted"
        resume = f"resume it with `sparring train --out {folder} --resume`"
        how = f"{resume}, or take its best epoch so far with --unfinished (unfinished=True in Python)"
        raise UserError(f"{folder} is not finished, its training {state}: {how}")
    ids, path = Ids.load(folder, listed), folder / "model.safetensors"
    tensors, _ = own_tensors(listed, path.name, meta)
    eligibility = read_eligibility(listed, meta, ids)
    own = model is not None
    if model is None:
        if meta.get("towers"):
            model = _custom_model(folder, meta, ids, eligibility.seen, recipe, trust)
        else:
            model = _described_model(listed, meta, ids, tensors)
    try:
        files.load_tensors(model, tensors, path)
    except UserError as error:
        if own or meta["recipe"] != "custom":
            raise
        hint = "if its Setup does not describe the model, pass that: sparring.load(folder, model=...)"
        raise UserError(f"{error}; {hint}") from error
    return model.eval(), ids, eligibility, meta


def _check_single(folder: Path, meta: Mapping[str, Any]) -> None:
    """Refuse a fused run where only a trained one will do."""
    if "parts" in meta:
        raise UserError(f"{folder} is fused of several runs: give one of those in {folder / 'parts'}")


def _described_model(listed: Manifest, meta: Mapping[str, Any], ids: Ids, tensors: Mapping[str, Tensor]) -> Retriever:
    """The model that the setup in run.json describes, before its weights are read."""
    setup, path = parse_setup(meta["setup"]), listed.folder / "model.safetensors"
    past, n_queries, n_items = None, len(ids.query_ids), len(ids.item_ids)
    if setup.model.query_tower in ("history", "items"):
        if not {"query.start", "query.items"} <= tensors.keys():
            raise UserError(f"{path} does not fit this run: it has no histories for the query tower")
        past = Histories(tensors["query.start"], tensors["query.items"])
    if setup.training.optimizer == "solver":
        width = tensors["query.neighbours"].shape[1] if "query.neighbours" in tensors else None
        columns = n_items if setup.model.query_tower == "items" and width is None else 1
        _check_room(path, n_items, columns)
        return solved_retriever(setup.model, n_queries, n_items, past, width, setup.seed)
    if setup.model.item_tower == "id" and not setup.model.item_features:
        _check_room(path, n_items, setup.model.dim)
    for side in text_sides(setup.model):
        # the weights of the encoder are in the model
        listed.check(encoder_folder(setup.text, side), but=["model.safetensors"])
        listed.check(f"{side}_texts")
    return build_towers(setup, ids, past, listed.folder)


def _check_room(path: Path, rows: int, columns: int) -> None:
    """Raise if a model file is too short for a table of this shape, before memory is taken for it."""
    if 4 * rows * columns > path.stat().st_size:
        shape = f"{rows:,} x {columns:,}"
        raise UserError(f"{path} does not fit this run: it is too short for an item table of {shape} numbers")


def read_eligibility(listed: Manifest, meta: Mapping[str, Any], ids: Ids) -> Eligibility:
    """The items that the queries of a run have taken, and its untrained ids."""
    tensors, _ = own_tensors(listed, SEEN, meta)
    try:
        return Eligibility.read(tensors, len(ids.query_ids), len(ids.item_ids))
    except ValueError as error:
        raise UserError(f"{listed.folder / SEEN} does not fit this run: {error}; train it again") from error


def own_tensors(listed: Manifest, name: str, meta: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of a file that belongs to this run."""
    try:
        tensors, state = listed.tensors(name)
    except UserError:
        checkpoint.own_tensors(listed.folder / name, meta["id"])  # says so if the file is whole, and of another run
        raise
    checkpoint.check_owner(listed.folder / name, state, meta["id"])
    return tensors, state


# Custom towers


def custom_towers(model: Retriever) -> dict[str, str]:
    """The parts of a model that are not of this package, as MODULE:CLASS; a Setup describes all others."""
    parts = {"model": model, "query": model.query, "item": model.item, "item_bias": model.item_bias}
    kinds = {name: type(part) for name, part in parts.items() if part is not None}
    return {
        name: f"{kind.__module__}:{kind.__qualname__}"
        for name, kind in kinds.items()
        if kind.__module__.split(".")[0] != "sparring"
    }


def _custom_model(
    folder: Path, meta: Mapping[str, Any], ids: Ids, seen: Positives, recipe: str | Recipe | None, trust: bool
) -> Retriever:
    """The model of a run with custom towers as its recipe builds it, before its weights are read."""
    if meta["recipe"] == "custom" and recipe is None:
        names = ", ".join(dict.fromkeys(str(kind).rpartition(":")[2] for kind in meta["towers"].values()))
        hint = "pass sparring.load(folder, model=...), or train with a custom recipe (docs/guide/extend.md)"
        raise UserError(f"{folder} has custom towers ({names}) and no recipe that builds them: {hint}")
    setup = parse_setup(meta["setup"])
    data = seen_interactions(ids, seen)
    return settings.build(recipe_of(folder, meta, recipe, trust), data, meta.get("arguments"), setup=setup).model


def recipe_of(
    folder: Path, meta: Mapping[str, Any], recipe: str | Recipe | None = None, trust: bool = False
) -> str | Recipe:
    """The recipe that builds a run: the caller's, else the one in run.json if it is ours or the caller trusts it.

    A folder must not choose the code that runs when it is opened. So a file, a module or an installed package's recipe
    that run.json names is imported only with `trust`, and is logged first.
    """
    _check_single(folder, meta)
    if recipe is not None:
        return recipe
    name = str(meta["recipe"])
    if finding.is_ours(name):
        return name
    if not trust:
        reason = f"{folder} needs code that is not part of Sparring, and opening a folder imports none"
        raise UserError(
            f"{reason}: trust whoever wrote it (trust=True, --trust), or give your copy", "recipe", repr(name)
        )
    log.warning("importing %s, which %s names", name, folder / "run.json")
    return name


def seen_interactions(ids: Ids, seen: Positives) -> Interactions:
    """The training and validation pairs in a run folder, without times and weights."""
    queries = np.repeat(np.arange(len(ids.query_ids), dtype=np.int32), seen.start.diff().numpy())
    items = seen.items.numpy().astype(np.int32)
    return Interactions(
        queries, items, ids.query_ids, ids.item_ids, query_table=ids.query_table, item_table=ids.item_table
    )
