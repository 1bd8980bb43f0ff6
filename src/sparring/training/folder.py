"""The run folder: the files that training writes, and how they are read back.

    run.json            format number, recipe, arguments, setup, data source, versions: enough to train the run again
    metrics.jsonl       one line per epoch
    result.json         the test metrics of the chosen epoch, and those of baselines
    per_query.parquet   the same for every test query, float32, for paired tests: query, recall@10, ndcg@10, ...
    model.safetensors   the towers of the chosen epoch
    checkpoint.safetensors   everything that a resumed training needs (checkpoint.py)
    histories.safetensors   the last items of each query in order, where the query tower reads them
    seen.safetensors    the items each query has taken, the test part apart; queries and items that were never trained
    *_ids.parquet, *_table.parquet, *_vectors.npy   id maps, titles and other columns, vectors of files
    encoder/, query_texts/, item_texts/   text towers: a transformers folder (or a bag), and the tokens
    parts/              of a fused run: a copy of each of its runs (sources.py)
    classifiers/, fusion.safetensors, fusion_per_query.parquet   later stages, where the run has them (stages.py)
    selection/          of a refitted run: the run that chose the number of epochs, without a test
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
from functools import partial
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
from sparring.data.cache import hash_of
from sparring.data.histories import Histories
from sparring.data.interactions import Ids, Interactions, Split, Vocabulary
from sparring.data.modalities.vector_files import id_vectors
from sparring.data.texts.texts import Role
from sparring.evaluation.metrics import LIST_METRICS
from sparring.evaluation.ranking import Evaluation
from sparring.models import finding as models
from sparring.models.build import encoder_folder, solved_retriever, text_sides
from sparring.models.encoders import save_encoder
from sparring.models.low_rank_ease import LowRankEase
from sparring.models.named import TABLES, Model
from sparring.models.retriever import Retriever
from sparring.models.text import TextTower
from sparring.models.trend import Trend
from sparring.recipes import finding, settings
from sparring.recipes.finding import Recipe, source_digest
from sparring.recipes.run import OWN, Run, build_towers
from sparring.recipes.setup import Setup, flat, parse_setup
from sparring.training import checkpoint
from sparring.training.eligibility import Eligibility, seen_tensors, untrained
from sparring.training.fingerprint import method
from sparring.training.model_card import model_card
from sparring.training.step import describe_batch

log = logging.getLogger(__name__)

SEEN = "seen.safetensors"
PAST = "histories.safetensors"
FORMAT = 3  # of run.json and the files beside it; Sparring 0.1 wrote none
TEXT_FOLDERS = ("encoder", "query_encoder", "item_encoder", "query_texts", "item_texts")
SELECTION = "selection"  # the folder of the run whose validation chose the epochs of a refit
SERVICE = "serve"  # the folder of a service's acknowledged changes: no training may delete it
STARTED = (  # files that training writes first and never again
    *("run.json", SEEN, PAST),
    *(f"{side}_{part}.parquet" for side in ("query", "item") for part in ("ids", "table")),
    *("query_vectors.npy", "item_vectors.npy"),
)
APART = ("index", SERVICE, "cache")  # folders that are written after training and check themselves
_ADVICE = "train the run again, or restore it from a copy"
RESULTS = ("metrics.jsonl", "result.json", "per_query.parquet", "measured.json", "curve.png", "README.md")


# Locking


@contextmanager
def claimed(folder: Path, resume: bool, overwrite: bool, ranks: Ranks, refit: bool = False) -> Iterator[None]:
    """Lock the run folder on rank 0, if training may write there; if that fails, every rank raises."""
    held: Lock | None = None
    refusal: UserError | None = None
    if ranks.rank == 0:
        try:
            held = hold(folder)
            check_free(folder, resume, overwrite)
            if resume and begun_run(folder) is not None and refit != is_refit(folder):
                started = "without" if refit else "with"
                raise UserError(f"{folder} was started {started} a refit: resume cannot change that")
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
    if not _is_run(folder):
        raise UserError(f"{folder} is not a run folder (no run.json), so overwrite does not delete it")
    for lock in sorted(folder.glob(f"*/{LOCK}")):
        if locks.is_held(lock):
            raise UserError(f"{locks.owner(lock)} writes to {lock.parent}: wait for it, or choose another folder")


def delete_run(folder: Path) -> bool:
    """Delete a run and its index, except a service's changes; False, and nothing deleted, where the folder has no run.

    run.json goes last: if interrupted, the rest is still recognised as that run.
    """
    if not _is_run(folder):
        return False
    index = " and its index" if (folder / "index").is_dir() else ""
    kept = f"; kept the changes of a service in {folder / SERVICE}" if (folder / SERVICE).is_dir() else ""
    _delete_files(folder)
    log.info("deleted the run in %s%s%s", folder, index, kept)
    return True


def _delete_files(folder: Path) -> None:
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == "run.json", path.name == SELECTION)):
        if path.name == SERVICE:
            continue
        if path.is_dir() and not path.is_symlink():
            if path.name == SELECTION:
                _delete_files(path)
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


# Writing


def description(run: Run, split: Split, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The resolved run for run.json: enough to train it again. One training step is run to describe its batch."""
    from importlib.metadata import version

    from sparring import __version__

    parts = {"train": split.train, "valid": split.valid, "test": split.test}
    return {
        "recipe": run.recipe,
        "arguments": run.arguments or {},
        **{f"{kind}_digest": digest for kind, digest in _digests(run).items() if digest},
        "method": method(run),
        **({"vectors": hashes} if (hashes := _vector_hashes(run.setup)) else {}),
        **({"towers": towers} if (towers := custom_towers(run.model)) else {}),
        "source": dict(source or {}),
        "data": {
            "queries": split.train.n_queries,
            "items": split.train.n_items,
            **{name: len(part) for name, part in parts.items() if part is not None},
        },
        **({"repeats": "keep"} if split.train.repeats else {}),
        "untrained": untrained(split),
        "dim": run.model.dim,
        "batch": describe_batch(run, split).splitlines(),
        "versions": {
            "python": platform.python_version(),
            "sparring": __version__,  # not from the metadata: the package may run from its source folder
            **{name: version(name) for name in ("torch", "polars", "numpy")},
        },
    }


def _vector_hashes(setup: Setup) -> dict[str, str]:
    """Hashes of the files of vectors, by setting, to detect changes."""
    files_of = {side: Path(f"{place.partition('.npy')[0]}.npy") for side, place in _vector_files(setup).items()}
    return {f"{side}_vectors": hash_of([file]) for side, file in files_of.items()}


def _digests(run: Run) -> dict[str, str | None]:
    """Hashes of the files of a custom recipe and a custom model."""
    return {"recipe": source_digest(run.recipe), "model": source_digest(run.setup.model.name)}


def write_start(
    folder: Path,
    data: Interactions,
    seen: Positives,
    meta: Mapping[str, Any],
    setup: Setup,
    model: Retriever | None = None,
    test: Interactions | None = None,
    warm: Mapping[str, np.ndarray] | None = None,
    past: Histories | None = None,
) -> None:
    """Write all that is known before the first step; results of an earlier run are deleted first.

    `warm` has the dense ids of `queries` and `items` that start with the trained vectors of an earlier run; `past` has
    the histories that a query tower reads once training is over.
    """
    for name in (manifest.NAME, "run.json", PAST, checkpoint.NAME, checkpoint.PREVIOUS, "model.safetensors", *RESULTS):
        (folder / name).unlink(missing_ok=True)
    data.save_ids(folder)
    for side, place in _vector_files(setup).items():
        vectors = id_vectors(place, data.query_ids if side == "query" else data.item_ids, side)
        files.write(folder / f"{side}_vectors.npy", partial(_write_array, vectors))
    if model is not None:
        _write_encoders(folder, model, setup, weights=False)
    run = secrets.token_hex(8)
    files.write_tensors(folder / SEEN, seen_tensors(data, seen, test, model, warm), {"run": run})
    if past is not None:
        columns = {"start": past.start, "items": past.items, "time": past.time}
        tensors = {name: column for name, column in columns.items() if column is not None}
        files.write_tensors(folder / PAST, tensors, {"run": run, "ordered": past.ordered})
    files.write_json(folder / "run.json", {"format": FORMAT, "id": run, **meta, "setup": dataclasses.asdict(setup)})
    manifest.write_manifest(folder, finished=False, apart=APART)


def _vector_files(setup: Setup) -> dict[Role, str]:
    """The files of vectors that a setup names, by side."""
    places: dict[Role, str | None] = {"query": setup.model.query_vectors, "item": setup.model.item_vectors}
    return {side: place for side, place in places.items() if place}


def _write_array(vectors: np.ndarray, path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, vectors)


def write_fused_start(folder: Path, split: Split, parts: Sequence[Eligibility], meta: Mapping[str, Any]) -> None:
    """Write the ids and run.json of a fused run; it lists an item, or knows a query, if one of its parts does."""
    split.train.save_ids(folder)
    run = secrets.token_hex(8)
    tensors = seen_tensors(split.train, split.before("test"), split.test, None)
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
    items = list(model.item.modules())
    sides: dict[Role, list[Any]] = {
        "item": items,
        "query": [part for part in model.query.modules() if part not in items],
    }
    towers: dict[Role, TextTower] = {}
    for side, parts in sides.items():
        towers.update((side, part) for part in parts if isinstance(part, TextTower))
    prompts: dict[Role, str] = {side: tower.prompt for side, tower in towers.items()}
    for side, tower in towers.items():
        tower.texts.save(folder / f"{side}_texts")
        save_encoder(tower.encoder, folder / encoder_folder(setup.text, side), weights, prompts)


def write_end(
    folder: Path, run: Run, history: list[dict[str, Any]], result: Mapping[str, Any], test: Evaluation | None
) -> None:
    """Write the result, the metrics of every test query, the curve and the model card."""
    from sparring.training.curve import training_curve

    reopen(folder)
    meta = read_meta(folder)
    result = {**result, **{key: meta[key] for key in ("untrained", "refit") if key in meta}}
    if test is not None:
        write_queries(folder, "per_query.parquet", test)  # first: readers of result.json expect it
    _write_encoders(folder, run.model, run.setup, weights=True)
    files.write_json(folder / "result.json", result)
    title = finding.short(run.recipe)
    training_curve(history, folder / "curve.png", title, run.setup.validation.select)
    files.write_text(folder / "README.md", model_card(meta, result, history))


def write_stages(
    folder: Path,
    stages: Mapping[str, Evaluation],
    history: list[dict[str, Any]],
    ranking: str,
    rankings: Mapping[str, float],
) -> None:
    """Add the test metrics of later stages, the chosen ranking and the validation of all to the result and the card."""
    if "fusion" in stages:
        write_queries(folder, "fusion_per_query.parquet", stages["fusion"])
    path = folder / "result.json"
    result = files.read_json(path) | {"stages": {name: test.to_dict() for name, test in stages.items()}}
    result |= {"ranking": ranking, "rankings": dict(rankings)}
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


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or the run that chooses the epochs of a refit."""
    return (folder / "run.json").is_file() or (folder / SELECTION / "run.json").is_file()


def begun_run(folder: Path) -> Path | None:
    """The folder whose run.json a training resumes from: this one, or that of its selection; None without a run."""
    return next((place for place in (folder, folder / SELECTION) if has_run(place)), None)


def is_refit(folder: Path) -> bool:
    """Whether the run in a folder was refitted, or will be."""
    return "refit" in read_meta(folder) if has_run(folder) else has_run(folder / SELECTION)


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
        begun = f"; its epochs are still being chosen in {folder / SELECTION}" * _is_run(folder)
        raise UserError(f"{folder} is not a run folder: it has no run.json{begun}")
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
    for key in ("arguments", "towers", "source", "data", "untrained", "versions", "warm", "refit"):
        if not isinstance(meta.get(key, {}), dict):
            raise UserError(f"{path} is corrupt: its {key} is {meta[key]!r:.80}")
    meta.get("arguments", {}).pop("cpu_epochs", None)  # `default` had it in development: the setup has the epochs
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
    for part in ("recipe", "arguments", "setup", "method", "data", "vectors", "refit", "repeats"):
        if before.get(part) != now.get(part):
            raise UserError(
                f"{folder} was started {difference(part, before.get(part), now.get(part))}: resume cannot change it"
            )
    for kind, name in (("recipe", now["recipe"]), ("model", setup.model.name)):
        digest = now.get(f"{kind}_digest")
        if rank() == 0 and before.get(f"{kind}_digest", digest) != digest:
            file = name.rpartition(":")[0]
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
    model: Retriever | str | Model | None = None,
    recipe: str | Recipe | None = None,
    trust: bool = False,
    unfinished: bool = False,
) -> tuple[Retriever, Ids, Eligibility, dict[str, Any]]:
    """The model of a run, its ids, its eligibility and run.json; a run that is not finished only with `unfinished`.

    A custom model is `model`, or built by the model function that `model_of` allows or the recipe that `recipe_of`
    allows.
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
    setup = parse_setup(meta["setup"])
    own = model if isinstance(model, Retriever) else None
    if own is None and (
        (setup.model.name == OWN and model is None) or (models.is_ours(setup.model.name) and meta.get("towers"))
    ):
        own = _recipe_model(folder, meta, ids, eligibility.seen, recipe, trust)
    if own is None:
        assert not isinstance(model, Retriever)
        built = _described_model(listed, meta, setup, ids, tensors, model_of(folder, setup, model, trust))
    else:
        built, past = own, _read_past(listed, meta, len(ids.query_ids), len(ids.item_ids))
        if past is not None:  # its towers were built with other histories
            built.remember(past)
    if "closed_form.gains" in tensors and built.closed_form is None:
        built = built.with_closed_form(LowRankEase.empty(built.n_items, len(tensors["closed_form.gains"])))
    if "trend.shift" in tensors and built.trend is None:
        built = built.with_trend(Trend(built.n_items))
    try:
        files.load_tensors(built, tensors, path)
    except UserError as error:
        if isinstance(model, Retriever) or meta["recipe"] != "custom":
            raise
        hint = "if its Setup does not describe the model, pass that: sparring.load(folder, model=...)"
        raise UserError(f"{error}; {hint}") from error
    return built.eval(), ids, eligibility, meta


def _check_single(folder: Path, meta: Mapping[str, Any]) -> None:
    """Refuse a fused run where only a trained one will do."""
    if "parts" in meta:
        raise UserError(f"{folder} is fused of several runs: give one of those in {folder / 'parts'}")


def _described_model(
    listed: Manifest, meta: Mapping[str, Any], setup: Setup, ids: Ids, tensors: Mapping[str, Tensor], function: Model
) -> Retriever:
    """The model that a setup describes, before its weights are read."""
    path, n_queries, n_items = listed.folder / "model.safetensors", len(ids.query_ids), len(ids.item_ids)

    def recall() -> Histories:
        past = _read_past(listed, meta, n_queries, n_items)
        if past is None:
            raise UserError(f"{path} does not fit this run: there are no histories for the query tower")
        return past

    if setup.training.optimizer == "solver":
        width = tensors["query.neighbours"].shape[1] if "query.neighbours" in tensors else None
        columns = n_items if setup.model.query_tower == "items" and width is None else 1
        _check_room(path, n_items, columns)
        past = None
        if setup.model.query_tower == "items":
            if not {"query.start", "query.items"} <= tensors.keys():
                raise UserError(f"{path} does not fit this run: it has no items of the queries")
            past = Histories(tensors["query.start"], tensors["query.items"])
        return solved_retriever(setup.model, n_queries, n_items, past, width, setup.seed)
    features = setup.model.item_features or setup.model.item_vectors
    if setup.model.name in TABLES and setup.model.item_tower == "id" and not features:
        _check_room(path, n_items, setup.model.dim)
    for side in _vector_files(setup):
        listed.path(f"{side}_vectors.npy")
    for side in text_sides(setup.model):
        # the weights of the encoder are in the model
        listed.check(encoder_folder(setup.text, side), but=["model.safetensors"])
        listed.check(f"{side}_texts")

    def known() -> Positives:
        if not {"query.start", "query.items"} <= tensors.keys():
            raise UserError(f"{path} does not fit this run: it has no training pairs for the query tower")
        return Positives(tensors["query.start"], tensors["query.items"])

    return build_towers(setup, ids, recall, listed.folder, function, known=known)


def _read_past(listed: Manifest, meta: Mapping[str, Any], n_queries: int, n_items: int) -> Histories | None:
    """The histories in a run folder; None where its model reads none."""
    if not listed.lists(PAST):
        return None
    tensors, state = own_tensors(listed, PAST, meta)
    try:
        Eligibility.read(tensors, n_queries, n_items)  # offsets that rise, items of the catalogue
    except ValueError as error:
        raise UserError(f"{listed.folder / PAST} does not fit this run: {error}; train it again") from error
    return Histories(tensors["start"], tensors["items"], tensors.get("time"), state.get("ordered") is not False)


def _check_room(path: Path, rows: int, columns: int) -> None:
    """Raise if a model file is too short for a table of this shape, before memory is taken for it."""
    if 4 * rows * columns > path.stat().st_size:
        shape = f"{rows:,} x {columns:,}"
        raise UserError(f"{path} does not fit this run: it is too short for an item table of {shape} numbers")


def listed_items(folder: Path) -> Tensor | None:
    """The items that lists of a run may hold; None for all."""
    return eligibility(folder).listed(int(read_meta(folder)["data"]["items"]))


def eligibility(folder: Path) -> Eligibility:
    """The eligibility of the run in a folder."""
    listed, meta = read_manifest(folder), read_meta(folder)
    return read_eligibility(listed, meta, Ids.load(folder, listed))


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


def _recipe_model(
    folder: Path, meta: Mapping[str, Any], ids: Ids, seen: Positives, recipe: str | Recipe | None, trust: bool
) -> Retriever:
    """The model of a run whose recipe builds it, before its weights are read."""
    if meta["recipe"] == "custom" and recipe is None:
        kinds = meta.get("towers", {}).values()
        names = ", ".join(dict.fromkeys(str(kind).rpartition(":")[2] for kind in kinds))
        hint = "pass sparring.load(folder, model=...), or train with a model or a recipe (docs/guide/models.md)"
        towers = f"custom towers ({names})" if names else "a model of its own"
        raise UserError(f"{folder} has {towers} and no recipe that builds them: {hint}")
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
    if not finding.is_ours(name):
        _check_trust(folder, "recipe", name, trust)
    return name


def model_of(folder: Path, setup: Setup, model: str | Model | None = None, trust: bool = False) -> Model:
    """The function that builds a run's model, by the rules of `recipe_of`; the caller's if it is not one of ours."""
    name = setup.model.name
    if models.is_ours(name):
        return models.find(name)
    if model is not None:
        return models.find(model)
    _check_trust(folder, "model", name, trust)
    return models.find(name)


def _check_trust(folder: Path, kind: str, name: str, trust: bool) -> None:
    """Refuse to import code that a folder names, unless the caller trusts it; log it if so."""
    if not trust:
        reason = f"{folder} needs code that is not part of Sparring, and opening a folder imports none"
        raise UserError(f"{reason}: trust whoever wrote it (trust=True, --trust), or give your copy", kind, repr(name))
    log.warning("importing %s, which %s names", name, folder / "run.json")


def seen_interactions(ids: Ids, seen: Positives) -> Interactions:
    """The training and validation pairs in a run folder, without times and weights."""
    queries = np.repeat(np.arange(len(ids.query_ids), dtype=np.int32), seen.start.diff().numpy())
    items = seen.items.numpy().astype(np.int32)
    return Interactions(
        queries, items, ids.query_ids, ids.item_ids, query_table=ids.query_table, item_table=ids.item_table
    )
