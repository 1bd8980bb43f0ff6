"""Runs on the Hugging Face hub: pushed without the histories of queries unless asked, pulled into a checked copy.

    push("runs/first", "OWNER/NAME")
    load("hf://OWNER/NAME"), load("hf://OWNER/NAME@REVISION")

Histories are in seen.safetensors, in histories.safetensors, and in the model of an item-item matrix. Without them each
query has an empty one, so lists cannot leave out what a query has taken, and towers that read histories know new
queries only (`recommend_history`). A copy is in the cache by its revision, and every file of it is compared with the
manifest. Reading it runs no code (folder.py). HF_TOKEN and HF_ENDPOINT are the client's own.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from sparring.core import files, manifest
from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.data.cache import cache_folder
from sparring.recipes.setup import flat
from sparring.training import checkpoint
from sparring.training import folder as run_folder
from sparring.training.folder import PAST, SEEN, SELECTION
from sparring.training.model_card import published_card
from sparring.training.sources import PARTS

SCHEME = "hf://"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_KEPT_HERE = (  # of use to whoever trained the run, or by query
    *(checkpoint.NAME, checkpoint.PREVIOUS, "per_query.parquet", "fusion_per_query.parquet", "measured.json"),
)
log = logging.getLogger(__name__)


def push(folder: str | Path, name: str, *, with_histories: bool = False, public: bool = False) -> str:
    """Upload a finished run as OWNER/NAME, which then holds exactly this run; returns the address of the commit.

    A new repository is private unless `public`; an existing one stays as it is. Checkpoints, results of single queries,
    an index and the changes of a service are not uploaded, nor are the histories of queries without `with_histories`.
    Ids, columns and vectors of queries are.

        push("runs/first", "OWNER/NAME")
    """
    client, folder = _client(), Path(folder)
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a name on the hub: write OWNER/NAME")
    if not run_folder.read_manifest(folder).finished:
        raise UserError(f"{folder} is not finished: resume its training first")
    with tempfile.TemporaryDirectory(prefix=".push-", dir=folder.resolve().parent) as place:
        staged = Path(place) / "run"
        published(folder, staged, with_histories)
        meta, result = run_folder.read_meta(staged), files.read_json(staged / "result.json")
        card = staged / "README.md"
        files.write_text(card, published_card(card.read_text(encoding="utf-8"), name, meta, result))
        manifest.write_manifest(staged, keep=set(run_folder.read_manifest(staged).files) - {card.name})
        with one_line(f"cannot push to {name}", Exception):  # the client has errors of many kinds
            api = client.HfApi(endpoint=_endpoint())
            api.create_repo(name, private=not public, exist_ok=True)
            done = api.upload_folder(
                repo_id=name,
                folder_path=staged,
                commit_message=f"Run {meta['id']} of Sparring",
                delete_patterns="*",
            )
    return str(done.commit_url)


def published(folder: Path, to: Path, with_histories: bool = False) -> None:
    """Copy a run as it is pushed."""
    listed, meta = run_folder.read_manifest(folder), run_folder.read_meta(folder)
    inner = {name.rpartition("/")[0] for name in listed.files if name.endswith(f"/{manifest.NAME}")}
    for name in listed.files:
        if name.split("/")[0] != SELECTION and name not in _KEPT_HERE and not name.endswith(f"/{manifest.NAME}"):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(listed.path(name), to / name)
    for name in sorted(inner):
        if name.split("/")[0] in (PARTS, "classifiers"):
            published(folder / name, to / name, with_histories)
    public = {name: value if name == "setup" else _without_folders(value) for name, value in meta.items()}
    if not with_histories:
        _without_histories(listed, to, meta)
        public["histories"] = "not published"
    files.write_json(to / "run.json", public)
    manifest.write_manifest(to, apart=run_folder.APART)


def _without_histories(listed: manifest.Manifest, to: Path, meta: dict[str, Any]) -> None:
    """Empty the histories in a copy. Queries that only a history describes count as untrained."""
    seen, state = run_folder.own_tensors(listed, SEEN, meta)
    items = flat(meta["setup"]).get("query_tower") == "items"
    described = False
    for name in ("model.safetensors", PAST):
        tensors, own = run_folder.own_tensors(listed, name, meta) if listed.lists(name) else ({}, {})
        place = "" if name == PAST else "query."
        if f"{place}start" in tensors and f"{place}items" in tensors:
            if not (name == PAST or items):
                raise UserError(
                    f"{listed.folder} computes its vectors from the training pairs: push it with --with-histories"
                )
            described = True
            empty = {f"{place}start": torch.zeros_like(tensors[f"{place}start"])}
            empty |= {key: tensors[key][:0] for key in (f"{place}items", f"{place}time") if key in tensors}
            files.write_tensors(to / name, tensors | empty, own)
    kept = {key: value for key, value in seen.items() if key.startswith("untrained")}
    if described:
        kept["untrained_queries"] = torch.arange(len(seen["start"]) - 1, dtype=torch.int32)
    empty = {"start": torch.zeros_like(seen["start"]), "items": seen["items"][:0]}
    files.write_tensors(to / SEEN, kept | empty, state)


def _without_folders(value: Any) -> Any:
    """Names of files in place of their places on this machine."""
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def pulled(address: str) -> Path:
    """The folder of a copy of hf://OWNER/NAME[@REVISION]; downloaded unless that revision is in the cache.

    A revision is a commit, a branch or a tag, by default the newest commit. A commit in the cache needs no network.
    """
    name, _, revision = address.removeprefix(SCHEME).partition("@")
    if not _NAME.fullmatch(name) or name.startswith("datasets/"):
        raise UserError(f"{address} is not a run on the hub: write hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    place = cache_folder() / "hub" / name
    if re.fullmatch("[0-9a-f]{40}", revision) and (place / revision).is_dir():
        return place / revision
    client = _client()
    with one_line(f"cannot pull {address}", Exception):
        about = client.HfApi(endpoint=_endpoint()).model_info(name, revision=revision or None)
        commit = str(about.sha)
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise UserError(f"cannot pull {address}: the hub named the commit {commit!r:.80}")
        if not any(file.rfilename == manifest.NAME for file in about.siblings):
            raise UserError(f"{address} is not a run: it has no {manifest.NAME}")
        if not (place / commit).is_dir():
            beside = place / f".{commit}.{secrets.token_hex(4)}"
            try:
                client.snapshot_download(name, revision=commit, local_dir=beside, endpoint=_endpoint())
                shutil.rmtree(beside / ".cache", ignore_errors=True)
                _check(beside, address)
                _rename(beside, place / commit)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    log.info("%s is in %s", address, place / commit)
    return place / commit


def _check(folder: Path, address: str) -> None:
    """Refuse a copy that is not exactly what its manifests list."""
    files.check_folder(folder)
    for place in sorted(path.parent for path in folder.rglob(manifest.NAME)):
        for problem in manifest.check_folder(place):
            raise UserError(f"{address} is damaged: {problem.path.relative_to(folder)} ({problem.detail})")


def _rename(folder: Path, to: Path) -> None:
    try:
        os.rename(folder, to)
    except OSError:
        if not to.is_dir():  # unless another process was first
            raise


def _client() -> Any:
    return optional("huggingface_hub", "hub", "the hub")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")
