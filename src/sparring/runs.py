"""The run folder: what training leaves behind, and how it is read back.

    run.json            recipe, arguments, setup, data source, versions: enough to run it again
    metrics.jsonl       one line per epoch
    result.json         the test metrics of the chosen epoch
    per_query.parquet   the same of every single test query, float32, for paired tests: query, recall@10, ndcg@10, ...
    model.safetensors   the towers of the chosen epoch
    checkpoint.safetensors   everything that training needs to go on
    seen.safetensors    what each query has already taken
    *_ids.parquet, *_table.parquet   id maps, titles and other columns
    encoder/, query_texts/, item_texts/   of text towers: a folder that transformers reads (or a bag's own), and the tokens of all texts
    curve.png, README.md   the training curve and a short model card

Every file is written beside its target and renamed, so a kill or a full disk leaves the last good one. Tensors are safetensors:
nothing executable is ever loaded from the folder. Towers of your own are built by the recipe that run.json names (rebuilt.py).
"""

from __future__ import annotations

import dataclasses
import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring import disk
from sparring.composition import Run, Setup, encoder_folder, retriever
from sparring.contrast import describe_batch
from sparring.data.features import Histories
from sparring.data.interactions import Ids, Interactions, Split, Vocabulary, write_table
from sparring.described import method
from sparring.dist import rank
from sparring.encoded import item_vectors, mean_query
from sparring.errors import UserError
from sparring.evaluation import Evaluation, top_k
from sparring.metrics import LIST_METRICS
from sparring.pretrained import save_encoder
from sparring.rebuilt import own_model, own_towers
from sparring.recipes.finding import source_digest
from sparring.retriever import Retriever
from sparring.settings import parse_setup, short
from sparring.towers import HistoryTower
from sparring.towers_text import text_tower
from sparring.types import Positives


@dataclass(frozen=True)
class Trained:
    """A finished run, ready to recommend: towers, id maps, titles, what each query has seen."""

    folder: Path
    model: Retriever
    ids: Ids
    seen: Positives
    meta: dict[str, Any]

    def recommend(self, queries: Sequence[object] | str | int, k: int = 10, with_seen: bool = False) -> pl.DataFrame:
        """The k best items of each query (original ids): query, rank, item, title where known, score; seen items left out."""
        asked = _listed(queries)
        dense = self.ids.query_ids.encode(asked)
        if (dense < 0).any():
            stranger = asked[int(np.argmax(dense < 0))]
            raise UserError(f"query {stranger!r} is not in the training data of {self.folder}; a new one is known by its history of items")
        at = torch.from_numpy(dense)
        scores, items = self._best(self.model.query_vectors(at), k, None if with_seen else self.seen, at)
        return self._named(np.asarray(asked), scores, items)

    def recommend_history(self, items: Sequence[object] | str | int, k: int = 10, with_seen: bool = False) -> pl.DataFrame:
        """The k best items for a new query known only by its items, oldest first; a warning names those that the run does not know.

        Through the query tower where it reads histories, else by the mean of the items' vectors (see `reads_histories`).
        """
        asked = _listed(items)
        dense = self.ids.item_ids.encode(asked)
        unknown = [repr(asked[at]) for at in np.flatnonzero(dense < 0)[:5]] + (["..."] if (dense < 0).sum() > 5 else [])
        known = torch.from_numpy(dense[dense >= 0])
        if not len(known):
            raise UserError(f"no item of the history ({', '.join(unknown)}) is in the training data of {self.folder}")
        if unknown:
            warnings.warn(f"left out of the history, since {self.folder} does not know them: {', '.join(unknown)}", stacklevel=2)
        with torch.no_grad():
            if self.reads_histories:
                vector = self.model.encode_histories(known.unsqueeze(0))
            else:
                vector = torch.from_numpy(mean_query(self.model, self.item_vectors()[known].float().numpy()))
        seen = Positives(torch.tensor([0, len(known.unique())]), known.unique().int())
        scores, best = self._best(vector, k, None if with_seen else seen, torch.zeros(1, dtype=torch.long))
        return self._named(np.asarray(["history"]), scores, best)

    @property
    def reads_histories(self) -> bool:
        """Whether a history goes through the query tower; if not, the mean of its items' vectors stands for it."""
        return isinstance(self.model.query, HistoryTower)

    def recommend_text(self, texts: Sequence[str], k: int = 10) -> pl.DataFrame:
        """The k best items for new queries known only by their texts; needs a query tower that reads text."""
        texts = [texts] if isinstance(texts, str) else texts
        scores, best = self._best(self.encode_texts(texts, "query"), k, None, torch.arange(len(texts)))
        return self._named(np.asarray(texts), scores, best)

    def item_vectors(self) -> Tensor:
        """Vectors (N, D) of all items; those of text towers are computed once and kept beside the run."""
        return item_vectors(self.model, self.folder)

    def encode_texts(self, texts: Sequence[str], side: Literal["query", "item"]) -> Tensor:
        """Vectors (n, D) of new queries or new items known only by their texts, as they are compared."""
        try:
            return self.model.encode_texts(texts, side)
        except ValueError as error:
            raise UserError(f"{error} (encoder=bag)") from error

    def _best(self, q: Tensor, k: int, seen: Positives | None, at: Tensor) -> tuple[Tensor, Tensor]:
        if not 1 <= k <= self.model.n_items:
            raise UserError(f"k is {k}; it must be between 1 and the {self.model.n_items:,} items of the catalogue")
        return top_k(q, self.item_vectors(), k, seen, at)

    def _named(self, queries: np.ndarray, scores: Tensor, items: Tensor) -> pl.DataFrame:
        row, rank = np.nonzero(items.numpy() >= 0)
        dense = items.numpy()[row, rank]
        table = pl.DataFrame({"query": queries[row], "rank": rank + 1, "item": self.ids.item_ids.decode(dense)})
        if self.ids.item_table is not None and "title" in self.ids.item_table.columns:
            table = table.with_columns(self.ids.item_table["title"].gather(dense))
        return table.with_columns(pl.Series("score", scores.numpy()[row, rank]))


def _listed(ids: Sequence[object] | str | int) -> list[object]:
    """Ids as a list; one by itself is a list of one."""
    return [ids] if isinstance(ids, (str, int, np.integer)) else list(ids)


def load(folder: str | Path, model: Retriever | None = None) -> Trained:
    """Read a finished run. Towers of your own are built by the run's recipe, or where it had none are given as `model`, as for training.

        load("runs/xir").recommend([1042], k=10)
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such run folder: {folder}")
    meta = read_meta(folder)
    ids = Ids.load(folder)
    tensors, _ = disk.read_tensors(folder / "model.safetensors")
    taken, _ = disk.read_tensors(folder / "seen.safetensors")
    seen = Positives(taken["start"], taken["items"])
    given = model is not None
    if model is None and meta.get("towers"):
        model = own_model(folder, meta, ids, seen)
    if model is None:
        setup: Setup = parse_setup(meta["setup"])
        past = None
        if setup.query_tower == "history":
            if not {"query.start", "query.items"} <= tensors.keys():
                raise UserError(f"{folder / 'model.safetensors'} does not fit this run: it has no histories for the history tower")
            past = Histories(tensors["query.start"], tensors["query.items"])
        model = retriever(setup, ids, past, folder)
    try:
        disk.load_tensors(model, tensors, folder / "model.safetensors")
    except UserError as error:
        if given or meta["recipe"] != "custom":
            raise
        raise UserError(f"{error}; a model that is not as its Setup says is given as sparring.load(folder, model=...)") from error
    return Trained(folder, model.eval(), ids, seen, meta)


def read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no run.json")
    try:
        meta = json.loads(path.read_text())
        meta["setup"], meta["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is corrupt: {str(error).splitlines()[0]}") from error
    return dict(meta)


def check_same(folder: Path, meta: Mapping[str, Any], setup: Setup) -> None:
    """Refuse to go on with a run under other settings than it was begun with; warn where the file of its recipe is another."""
    before = read_meta(folder)
    now = json.loads(json.dumps({**meta, "setup": dataclasses.asdict(setup)}, default=str))
    for part in ("recipe", "arguments", "setup", "method", "data"):
        old, new = before.get(part), now[part]
        if old == new or (part == "method" and old is None):  # folders of before it was recorded
            continue
        raise UserError(f"{folder} was begun {difference(part, old, new)}: resume cannot change it")
    digest = now.get("recipe_digest")
    if rank() == 0 and before.get("recipe_digest", digest) != digest:
        file = now["recipe"].rpartition(":")[0]
        warnings.warn(f"{file} has changed since this run was begun: what is left of it is trained as the file is now", stacklevel=1)


def difference(part: str, old: object, new: object) -> str:
    """What differs between two settings, or the first of several in a dict, in words that go on from "was begun"."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"with other {part}" if isinstance(old, dict) or isinstance(new, dict) else f"with {part}={old}, not {new}"
    name = next(name for name in {**old, **new} if name not in old or name not in new or old[name] != new[name])
    if name not in old:
        return f"without {name}={new[name]}"
    return f"with {name}={old[name]}" + (f", not {new[name]}" if name in new else ", which is missing now")


def write_start(
    folder: Path, data: Interactions, seen: Positives, meta: Mapping[str, Any], setup: Setup, model: Retriever | None = None
) -> None:
    """What is known before the first step: the resolved run, the id maps, what each query has seen."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder for the run")
    # what an earlier run left here must not be resumed, or taken for the result, of this one
    results = ("metrics.jsonl", "result.json", "per_query.parquet", "measured.json", "curve.png", "README.md")
    for name in ("run.json", "checkpoint.safetensors", "checkpoint.previous.safetensors", "model.safetensors", *results):
        (folder / name).unlink(missing_ok=True)
    data.save_ids(folder)
    if model is not None:
        _write_encoders(folder, model, setup, weights=False)
    disk.write_tensors(folder / "seen.safetensors", {"start": seen.start, "items": seen.items})
    disk.write_json(folder / "run.json", {**meta, "setup": dataclasses.asdict(setup)})


def _write_encoders(folder: Path, model: Retriever, setup: Setup, weights: bool) -> None:
    """What text towers need to be built again; with `weights` the encoders are whole, and of use outside this folder."""
    for side, module in (("query", model.query), ("item", model.item)):
        tower = text_tower(module)
        if tower is not None:
            tower.texts.save(folder / f"{side}_texts")
            save_encoder(tower.encoder, folder / encoder_folder(setup, side), weights)


def description(run: Run, split: Split, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The resolved run for run.json: enough to run it again."""
    from importlib.metadata import version

    from sparring import __version__

    parts = {"train": split.train, "valid": split.valid, "test": split.test}
    return {
        "recipe": run.recipe,
        "arguments": run.arguments or {},
        **({"recipe_digest": digest} if (digest := source_digest(run.recipe)) else {}),
        "method": method(run),
        **({"towers": towers} if (towers := own_towers(run.model)) else {}),
        "source": dict(source or {}),
        "data": {
            "queries": split.train.n_queries,
            "items": split.train.n_items,
            **{name: len(part) for name, part in parts.items() if part is not None},
        },
        "batch": describe_batch(run, split).splitlines(),
        "versions": {
            "python": platform.python_version(),
            "sparring": __version__,  # not from the metadata: the package may run from its source folder
            **{name: version(name) for name in ("torch", "polars", "numpy")},
        },
    }


def write_end(
    folder: Path, run: Run, history: list[dict[str, Any]], best_epoch: int, seconds: float, test: Evaluation | None
) -> None:
    """The result, the values of single queries, the curve and the model card."""
    from sparring.card import model_card
    from sparring.plots import training_curve

    meta = read_meta(folder)
    result: dict[str, Any] = {"best_epoch": best_epoch, "epochs": len(history), "train_seconds": round(seconds, 3)}
    if test is not None:
        result |= {"test": test.to_dict()}
        write_table(_single_queries(folder, test), folder / "per_query.parquet")  # before the result: who sees that one finds this
    _write_encoders(folder, run.model, run.setup, weights=True)
    disk.write_json(folder / "result.json", result)
    disk.write(folder / "curve.png", lambda file: training_curve(history, file, short(run.recipe), run.setup.select))
    disk.write(folder / "README.md", lambda file: file.write_text(model_card(meta, result, history)))


def _single_queries(folder: Path, test: Evaluation) -> pl.DataFrame:
    """One row per test query, by its original id; what describes lists rather than how good they are is left out."""
    ids = Vocabulary.load(folder / "query_ids.parquet").decode(test.query_ids)
    ranked = {key: values.astype(np.float32) for key, values in test.per_query.items() if key.split("@")[0] not in LIST_METRICS}
    return pl.DataFrame({"query": ids, **ranked})
