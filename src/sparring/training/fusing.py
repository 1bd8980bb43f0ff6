"""Fuse finished runs: the weights of their lists are chosen on the validation part, and the result is a run folder."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparring.core import files, manifest
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.list_fusion import Pool, query_weights
from sparring.core.locks import LOCK
from sparring.core.types import ALONE
from sparring.data.interactions import Interactions, Split
from sparring.evaluation.metrics import parse
from sparring.evaluation.ranking import Evaluation, evaluate, evaluate_lists
from sparring.models.named import Model
from sparring.recipes.finding import Recipe
from sparring.training import checkpoint
from sparring.training import folder as run_folder
from sparring.training.eligibility import Eligibility, untrained
from sparring.training.fitting import METRICS
from sparring.training.loop import sample_queries, selected
from sparring.training.sources import BY, DEPTH, PARTS, By, Source, Sources, difference, is_fused
from sparring.training.trained import Trained, load
from sparring.training.trend import know

_QUERIES = 5_000  # of the validation part that weights are chosen on
_GRID = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ROUNDS = 10
_BLOCK = 256
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusedRun:
    """Fused runs: how, with which weights, and the figures that chose them and those of the test part."""

    model: Sources
    valid: dict[str, float]  # `select` of each run and of each way to fuse
    test: Evaluation | None
    parts: dict[str, Evaluation]  # the test metrics of each run alone


def fuse(
    runs: Sequence[str | Path],
    split: Split,
    out: str | Path | None = None,
    *,
    by: By | Literal["auto"] = "auto",
    select: str = "ndcg@20",
    depth: int = DEPTH,
    k: Sequence[int] = (10, 20, 50),
    device: str = "auto",
    overwrite: bool = False,
    recipe: str | Recipe | None = None,
    trust: bool = False,
    model: str | Model | None = None,
) -> FusedRun:
    """Make one retriever of several finished runs over the same split, and measure it on the test part.

    `by` fuses standardised scores or reciprocal ranks (`Sources`); auto takes the better one by `select` on the
    validation part, which also chooses the weights. A single run with all the weight is among the choices. Refitted
    runs have seen that part, so the runs that chose their epochs (the folder `selection` of each) choose. With `out`
    the runs are copied into that folder, which then evaluates, recommends and serves like any run. `model`,
    `recipe` and `trust` as in `load`.

        fused = sparring.fuse(["runs/ease", "runs/default"], split, "runs/fused");  print(fused.test)
    """
    where, folder = pick_device(device), None if out is None else Path(out)
    if by not in (*BY, "auto"):
        raise UserError(f"by is {by!r}; it must be scores, ranks or auto")
    if depth < 1:
        raise UserError(f"depth is {depth}; each run must list at least 1 item")
    metric, cutoff = selected(select)
    parse(metric)
    if folder is not None:
        for run in map(Path, runs):
            inner, outer = sorted((run.resolve(), folder.resolve()), key=lambda path: -len(path.parts))
            if inner.is_relative_to(outer):
                raise UserError(f"the run {run} and {folder} are one inside the other: choose another folder")
    if split.valid is None or not len(split.valid):
        raise UserError("fuse chooses weights on the validation part, and this split has none: train with --valid 0.1")
    if cutoff > split.train.n_items:
        raise UserError(
            f"the cutoff of select={select} exceeds the {split.train.n_items:,} items: choose a smaller one"
        )
    load_sources = partial(_sources, runs, split, model=model, recipe=recipe, trust=trust)
    sources = load_sources()
    with nullcontext() if folder is None else run_folder.claimed(folder, False, overwrite, ALONE):
        merged = Sources(sources, "scores", [1.0] * len(sources), depth).to(where)
        know(merged, split, "valid")  # a finished run knows the validation part
        valid, (way, weights) = _chosen(merged, split, BY if by == "auto" else (by,), metric, cutoff)
        if _refitted(runs):
            sources, split = load_sources(again=True), split.joined()
            merged = Sources(sources, way, weights, depth).to(where)
        know(merged, split, "test")
        merged.by, merged.weights = way, torch.tensor(weights, device=where)
        shown = ", ".join(f"{source.name} {weight:.2f}" for source, weight in zip(sources, weights, strict=True))
        log.info("fused by %s: %s", merged.by, shown)
        fused = FusedRun(merged, valid, *_tested(merged, split, k))
        if folder is not None:
            if overwrite:
                run_folder.delete_run(folder)
            _write(fused, split, folder, select)
    return fused


def _tested(model: Sources, split: Split, k: Sequence[int]) -> tuple[Evaluation | None, dict[str, Evaluation]]:
    """The test metrics of the fused lists and of each source alone."""
    if split.test is None or not len(split.test):
        return None, {}
    n_items = split.train.n_items
    cutoffs = [each for each in k if each <= n_items] or [n_items]
    seen, counts = split.seen_for("test").to(model.device), split.train.counts()
    fused, *parts = (
        evaluate(each, split.test, seen, cutoffs, METRICS, counts=counts)
        for each in (model, *(source.model for source in model.sources))
    )
    return fused, dict(zip((source.name for source in model.sources), parts, strict=True))


def _refitted(runs: Sequence[str | Path]) -> bool:
    """Whether runs were refitted; all of them or none must be."""
    found = {run_folder.is_refit(Path(run)): run for run in runs}
    if len(found) > 1:
        one = Path(found[True])
        reason = f"{one} was refitted and {found[False]} was not"
        raise UserError(f"{reason}: refit all runs, or give {one / run_folder.SELECTION}")
    return True in found


def _sources(
    runs: Sequence[str | Path],
    split: Split,
    again: bool = False,
    model: str | Model | None = None,
    recipe: str | Recipe | None = None,
    trust: bool = False,
) -> list[Source]:
    """The runs that may choose weights on the validation part; with `again` the refitted ones themselves.

    They must fit together: finished, over the same ids, split as this split is.
    """
    if len(runs) < 2:
        raise UserError(f"fuse makes one run of several: give at least two, not {len(runs)}")
    loaded: dict[str, Trained] = {}
    refitted = _refitted(runs)
    for at, place in enumerate(map(Path, runs)):
        if place.resolve() in (Path(other).resolve() for other in runs[:at]):
            raise UserError(f"{place} is given twice: give each run once")
        if is_fused(place):
            raise UserError(f"{place} is itself fused of several runs: give the runs in {place / PARTS}")
        chooser = place / run_folder.SELECTION if refitted and not again else place
        trained = load(chooser, model, recipe=recipe, trust=trust, novelty=0)
        name, number = place.resolve().name, 2
        while name in loaded:
            name, number = f"{place.resolve().name}-{number}", number + 1
        loaded[name] = trained
    train, first = split.train, next(iter(loaded.values()))
    for trained in loaded.values():
        if missing := difference(first.ids, trained.ids):
            raise UserError(f"{trained.folder} cannot be fused with {first.folder}: it has {missing}")
        ours, theirs = (each.meta.get("source") or {} for each in (first, trained))
        for part in ("fingerprint", "split"):
            if part in ours and part in theirs and ours[part] != theirs[part]:
                how = (
                    "on other data" if part == "fingerprint" else run_folder.difference(part, theirs[part], ours[part])
                )
                raise UserError(f"{trained.folder} was trained {how}, unlike {first.folder}: fuse runs of one split")
        own = trained.ids.item_ids.ids.equals(train.item_ids.ids) and trained.ids.query_ids.ids.equals(
            train.query_ids.ids
        )
        seen, known = split.before("test"), trained.seen
        if not (own and torch.equal(seen.start, known.start) and torch.equal(seen.items, known.items.to(seen.items))):
            raise UserError(f"{trained.folder} was trained on another split than the one given: fuse with its own")
    return [Source(name, each.folder, each.model, each.eligibility) for name, each in loaded.items()]


# Weights


@dataclass(frozen=True)
class FusionGain:
    """How much better fused lists are than those of the best run, on queries that did not choose the weights."""

    best: str  # the run that is best alone
    gain: float
    error: float  # standard error of the gain, over queries
    used: tuple[str, ...]  # the runs that have a weight on both halves of the queries
    seconds: float = 0.0  # that the judgement took
    rank_seconds: float = 0.0  # to rank a query with all runs
    weights: Mapping[str, float] = field(default_factory=dict)  # of the runs, as the mean over both halves


def fusion_gain(
    runs: Sequence[str | Path],
    split: Split,
    *,
    by: By = "scores",
    select: str = "ndcg@20",
    depth: int = DEPTH,
    device: str = "auto",
) -> FusionGain:
    """Judge a fusion before it is made: weights fitted to one half of the validation queries rank the other half.

    The best run alone is chosen on all of these queries, so the comparison favours it.

        judged = fusion_gain(["runs/ease", "runs/default"], split);  judged.gain > judged.error
    """
    began, (metric, k) = time.monotonic(), selected(select)
    sources = _sources(runs, split)
    model = Sources(sources, by, [1.0] * len(sources), depth).to(pick_device(device))
    know(model, split, "valid")
    loaded = time.monotonic()
    pooled, seen = _Pooled.of(model, split, by == "scores", metric, k), split.seen_for("valid").to(model.device)
    each_seconds = (time.monotonic() - loaded) / max(len(pooled.queries), 1)
    alone = [
        evaluate(each.model, pooled.valid, seen, (k,), (metric,), among=each.eligibility.listed(split.train.n_items))
        for each in sources
    ]
    best = int(np.argmax([next(iter(each.metrics.values())) for each in alone]))
    order = np.random.default_rng(0).permutation(len(pooled.queries))
    halves = np.sort(order[::2]), np.sort(order[1::2])
    fused, shares = np.zeros(len(order)), np.zeros((2, len(sources)))
    for number, (half, other) in enumerate((halves, halves[::-1])):
        *_, (_, weights) = _best_way(pooled.part(half), (by,))
        fused[other], shares[number] = pooled.part(other).values(by, weights), weights
    names = [source.name for source in sources]
    used = sorted(name for number, name in enumerate(names) if (shares[:, number] > 0).all())
    gains = fused - next(iter(alone[best].per_query.values()))
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else np.inf
    means = dict(zip(names, shares.mean(0).tolist(), strict=True))
    seconds = time.monotonic() - began
    return FusionGain(names[best], float(gains.mean()), error, tuple(used), seconds, each_seconds, means)


@dataclass(frozen=True, eq=False)
class _Pooled:
    """The candidates of validation queries by source, and the metric that weights are chosen by."""

    pool: Pool
    known: Tensor  # (B, S): the sources that know each query
    valid: Interactions
    queries: np.ndarray  # (B,) ascending
    metric: str
    k: int

    @classmethod
    def of(cls, model: Sources, split: Split, scored: bool, metric: str, k: int) -> _Pooled:
        assert split.valid is not None
        valid = sample_queries(split.valid, _QUERIES, 0)
        pool, known = _pool(model, valid, Eligibility(split.seen_for("valid")), k, scored)
        return cls(pool, known, valid, np.unique(valid.queries), metric, k)

    def part(self, rows: np.ndarray) -> _Pooled:
        """The part of these rows, in ascending order."""
        at, pool = torch.from_numpy(rows), self.pool
        scores = None if pool.scores is None else pool.scores[at]
        valid = self.valid.subset(np.isin(self.valid.queries, self.queries[rows]))
        part = Pool(pool.items[at], pool.ranks[at], scores)
        return replace(self, pool=part, known=self.known[at], valid=valid, queries=self.queries[rows])

    def ranked(self, way: By, weights: Sequence[float]) -> Evaluation:
        features = self.pool if way == "scores" else Pool(self.pool.items, self.pool.ranks, None)
        lists = features.best(query_weights(torch.tensor(weights), self.known), self.k)[1]
        return evaluate_lists(lists.numpy(), self.valid, self.valid.n_items, (self.k,), (self.metric,))

    def value(self, way: By, weights: Sequence[float]) -> float:
        """The metric of the lists that these weights give."""
        return next(iter(self.ranked(way, weights).metrics.values()))

    def values(self, way: By, weights: Sequence[float]) -> np.ndarray:
        """(B,) the same for each query."""
        return next(iter(self.ranked(way, weights).per_query.values())).astype(np.float64)


def _only(source: int, n: int) -> list[float]:
    """All the weight for one of n sources."""
    return [float(other == source) for other in range(n)]


def _chosen(
    model: Sources, split: Split, ways: Sequence[By], metric: str, k: int
) -> tuple[dict[str, float], tuple[By, list[float]]]:
    """(the metric of each source and of each way to fuse, the best way and its weights), on the validation part."""
    alone, scores, best = _best_way(_Pooled.of(model, split, "scores" in ways, metric, k), ways)
    names = [source.name for source in model.sources]
    values = {**dict(zip(names, alone, strict=True)), **{f"fused by {way}": score for way, score in scores.items()}}
    figures = ", ".join(f"{name} {each:.4f}" for name, each in values.items())
    log.info("%s@%d on the validation part: %s", metric, k, figures)
    return values, best


def _best_way(pooled: _Pooled, ways: Sequence[By]) -> tuple[list[float], dict[By, float], tuple[By, list[float]]]:
    """The metric of each source alone, that of each way with its best weights, and the best way with its weights."""
    n = pooled.known.shape[1]
    alone = {way: [pooled.value(way, _only(source, n)) for source in range(n)] for way in ways}
    found = {way: _climbed(partial(pooled.value, way), alone[way]) for way in ways}
    best = max(ways, key=lambda way: found[way][0])
    return alone[ways[0]], {way: score for way, (score, _) in found.items()}, (best, found[best][1])


def _climbed(value: Any, alone: Sequence[float]) -> tuple[float, list[float]]:
    """The best value and its weights: from the best source, move towards one source at a time while that helps."""
    n = len(alone)
    start = int(np.argmax(alone))
    best, weights = alone[start], [float(source == start) for source in range(n)]
    for _ in range(_ROUNDS):
        before = best
        for source in range(n):
            trials = [
                [(1 - step) * weight + step * (other == source) for other, weight in enumerate(weights)]
                for step in _GRID
                if weights[source] < 1
            ]
            scores = [value(trial) for trial in trials]
            if scores and max(scores) > best:
                best, weights = max(scores), trials[int(np.argmax(scores))]
        if best == before:
            break
    return best, weights


def _pool(model: Sources, valid: Interactions, seen: Eligibility, k: int, scored: bool) -> tuple[Pool, Tensor]:
    """The candidates of the validation queries in ascending order, and which sources know each query (B, S)."""
    pools, known = [], []
    with torch.no_grad():
        for ids in torch.from_numpy(np.unique(valid.queries)).long().split(_BLOCK):
            q = model.query_vectors(ids)
            pool = model.pool(q, max(k, model.depth), seen.taken(ids), "scores" if scored else "ranks")
            pools.append(pool.cpu())
            known.append(torch.stack([part.any(1) for part in model.parted(q)], 1).cpu())
    scores = torch.cat([pool.scores for pool in pools if pool.scores is not None]) if scored else None
    whole = Pool(torch.cat([pool.items for pool in pools]), torch.cat([pool.ranks for pool in pools]), scores)
    return whole, torch.cat(known)


# The folder


def _write(fused: FusedRun, split: Split, folder: Path, select: str) -> None:
    """Write a fused run, with copies of its runs; the manifest of the finished run is the last file."""
    from sparring import __version__

    model, metas = fused.model, {each.name: run_folder.read_meta(each.folder) for each in fused.model.sources}
    weights = {
        source.name: round(float(weight), 6) for source, weight in zip(model.sources, model.weights, strict=True)
    }
    first = next(iter(metas.values()))
    parts = [
        {
            "name": source.name,
            "run": str(source.folder.resolve()),
            "id": metas[source.name]["id"],
            "recipe": metas[source.name]["recipe"],
            "model": run_folder.model_hash(source.folder),
            "weight": weights[source.name],
        }
        for source in model.sources
    ]
    meta = {
        "recipe": "fused",
        "arguments": {"by": model.by, "depth": model.depth, "select": select},
        "parts": parts,
        "source": first.get("source", {}),
        "data": first.get("data", {}),
        **({"repeats": "keep"} if split.train.repeats else {}),
        "untrained": untrained(split),
        **({"refit": refit} if (refit := _refit(metas)) else {}),
        "dim": model.dim,
        "versions": {**first.get("versions", {}), "sparring": __version__},
        "setup": {},
    }
    run_folder.write_fused_start(folder, split, [source.eligibility for source in model.sources], meta)
    for source in model.sources:
        _copy(source.folder, folder / PARTS / source.name)
    state = {
        "run": checkpoint.run_id(folder),
        "by": model.by,
        "depth": model.depth,
        "parts": [source.name for source in model.sources],
        "models": [part["model"] for part in parts],
    }
    files.write_tensors(folder / "model.safetensors", {"weights": model.weights.cpu()}, state)
    result: dict[str, Any] = {"valid": fused.valid, "weights": weights, "untrained": meta["untrained"]}
    if fused.test is not None:
        run_folder.write_queries(folder, "per_query.parquet", fused.test)
        result["test"] = fused.test.to_dict()
        result["parts"] = {name: test.to_dict() for name, test in fused.parts.items()}
    files.write_json(folder / "result.json", result)
    files.write_text(folder / "README.md", _card(meta, result, select))
    run_folder.finish(folder)


def _refit(metas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The record of a fusion of refitted runs: the epochs of each, and the interactions of both trainings."""
    records = {name: meta["refit"] for name, meta in metas.items() if "refit" in meta}
    if not records:
        return None
    first = next(iter(records.values()))
    epochs = {name: record["epochs"] for name, record in records.items()}
    return {"epochs": epochs, "train": first["train"], "interactions": first["interactions"]}


def _copy(run: Path, to: Path) -> None:
    """Copy a finished run and its index, without its checkpoint, caches, service, classifiers and selection.

    The runs are fused by their towers, so an index for another ranking stays behind.

    The hashes in the manifest of the copy are those of the original, so a fault of the copy is found.
    """
    listed = run_folder.read_manifest(run).files
    behind = ("checkpoint", "classifiers/", "fusion", f"{run_folder.SELECTION}/")
    kept = [name for name in listed if not name.startswith(behind)]
    about = run / "index" / "index.json"
    by_towers = about.is_file() and files.read_json(about).get("ranking", "towers") == "towers"
    indexed = [path for path in about.parent.rglob("*") if path.is_file() and path.name != LOCK] if by_towers else []
    names = [*kept, *(str(path.relative_to(run)) for path in indexed)]
    for name in (manifest.NAME, *names):
        files.write(to / name, lambda path, name=name: shutil.copyfile(run / name, path))  # type: ignore[misc]
    manifest.write_manifest(to, names=(), keep=kept, apart=run_folder.APART)


def _card(meta: Mapping[str, Any], result: Mapping[str, Any], select: str) -> str:
    """A short model card: the runs, their weights and figures."""
    by = {"scores": "standardised scores", "ranks": "reciprocal ranks"}[meta["arguments"]["by"]]
    tests = {**result.get("parts", {}), "fused": result.get("test")}
    refit = meta.get("refit")
    again = (
        f"Then each run was trained again on all {refit['interactions']:,} interactions of both parts." if refit else ""
    )
    lines = [
        "# A retriever fused of several runs",
        "",
        f"The best {meta['arguments']['depth']} items of each run, fused by {by}. Weights were chosen by {select} on",
        "the validation part; the other figures are of the test part.",
        *([again] if refit else []),
        "",
        "| run | recipe | weight | validation | recall@20 | ndcg@20 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    rows = [(part["name"], part["recipe"].rpartition(":")[2], f"{part['weight']:.2f}") for part in meta["parts"]]
    for name, kind, weight in [*rows, ("fused", "", "")]:
        valid = result["valid"][name if kind else f"fused by {meta['arguments']['by']}"]
        metrics = (tests.get(name) or {}).get("metrics", {})
        figures = (f"{metrics[each]:.4f}" if each in metrics else "" for each in ("recall@20", "ndcg@20"))
        lines.append(f"| {name} | {kind} | {weight} | {valid:.4f} | {' | '.join(figures)} |")
    use = ["", "```python", "import sparring", "", 'sparring.load("THIS_FOLDER").recommend([QUERY_ID], k=10)', "```"]
    return "\n".join([*lines, *use]) + "\n"
