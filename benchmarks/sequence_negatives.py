"""Negatives under a sequence model: every method at equal tuning, leave-one-out, full ranking.

    python benchmarks/sequence_negatives.py --data amazon_beauty --device cuda --jobs 8 --out beauty.jsonl
    python benchmarks/sequence_negatives.py --data ml1m_mm --device cuda --jobs 8 --out ml1m.jsonl

One model (`--model`, 64 dimensions) and one schedule for all; only negatives and loss differ. Each method tries three
temperatures in its own unit (BIR and XIR square weights, so theirs are twice as high; gBCE has one setting more, with
inner products, as published), chooses by NDCG@10 on the validation part, and repeats its choice over the seeds. Trials
have --trial-epochs at a constant learning rate and a seed of their own; the choice is trained for the epochs of its set
while the rate falls linearly to 0. Results are appended to --out as they come, one line per training, and a second call
continues. The table shows means over seeds, and the share of the catalogue that the first step is contrasted with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from _shared import DATA, table
from sparring import Split, build, fit, read, split
from sparring.recipes.run import Run
from sparring.training.step import sample_steps

# Items of a history as in the published figures; ML-1M has ten times the positions, so its batches are larger.
SETS: dict[str, dict[str, Any]] = {
    "amazon_beauty": {"history": 50, "batch_size": 2048, "lr": 0.001, "epochs": 60},
    "ml1m_mm": {"history": 200, "batch_size": 4096, "lr": 0.002, "epochs": 40},
}
TRIAL = 1000  # the seed of trials, which no final training has
TAU = [{"tau": tau} for tau in (0.03, 0.06, 0.12)]
TWICE = [{"tau": 2 * each["tau"]} for each in TAU]
# name: recipe, arguments, trials
METHODS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "uniform, 256": ("uns", {"n": 256}, TAU),
    "uniform, 2,048": ("uns", {"n": 2048}, TAU),
    "in-batch": ("ssl", {}, TAU),
    "in-batch, logQ": ("ssl_pop", {}, TAU),
    "mixed, logQ": ("mns", {"n": 256}, TAU),
    "gBCE, 256": ("gbce", {"n": 256, "score": "cosine"}, [*TAU, {"score": "dot", "tau": 1.0}]),
    "BIR": ("bir", {}, TWICE),
    "XIR": ("xir", {}, TWICE),
    "DNS, 32": ("dns", {"n": 32}, TAU),
    "MIDX, 256": ("midx", {"n": 256}, TAU),
    "SCE": ("sce", {}, TAU),
    "ESANS": ("esans", {}, TAU),
    "all items": ("full_softmax", {}, TAU),
}


@cache
def parts(data: str) -> Split:
    return split(read(DATA / data / "interactions.parquet"), "leave-last-out")


def training(
    data: str, model: str, device: str, trial_epochs: int, method: str, number: int, seed: int
) -> dict[str, Any]:
    """One training, as a line of the results."""
    recipe, arguments, trials = METHODS[method]
    shared = {"dim": 64, "patience": None, "eval_every": 4, "select": "ndcg@10", "rows": "sequences"}
    length = {"epochs": trial_epochs} if seed == TRIAL else {"schedule": "linear"}
    settings = {**SETS[data], **shared, **length, **arguments, **trials[number], "seed": seed}
    line: dict[str, Any] = {"data": data, "method": method, "trial": number, "seed": seed, **trials[number]}
    began = time.perf_counter()
    try:
        run = build(recipe, parts(data).train, settings, model=model)
        line["share"] = share(run, parts(data))
        fitted = fit(run, parts(data), k=(10,), device=device, metrics=("recall", "ndcg"))
    except Exception as error:  # one method must not end the others
        return line | {"error": f"{type(error).__name__}: {error}"}
    assert fitted.test is not None
    line["valid"] = max(record["ndcg@10"] for record in fitted.history if "ndcg@10" in record)
    line |= {name: fitted.test.metrics[name] for name in ("recall@10", "ndcg@10")}
    seconds = time.perf_counter() - began
    return line | {"best": fitted.best_epoch, "epochs": len(fitted.history), "seconds": round(seconds, 1)}


def share(run: Run, data: Split) -> float:
    """The part of the catalogue among the candidates of the first step."""
    _, _, outcome = next(sample_steps(run, data))
    ids = torch.cat([block.ids.flatten() for bag in outcome.bags for block in bag.plain().blocks])
    return len(ids[ids >= 0].unique()) / data.train.n_items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="amazon_beauty", choices=SETS)
    parser.add_argument("--model", default="sasrec")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trial-epochs", type=int, default=40)
    parser.add_argument("--methods", default=",".join(METHODS), help="names of METHODS, separated by ;")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    chosen = [name for name in METHODS if name in given.methods.split(";")] or list(METHODS)
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(line["method"], line["trial"], line["seed"]): line for line in lines if line["data"] == given.data}

    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:

        def submit(method: str, number: int, seed: int) -> None:
            if (method, number, seed) not in done:
                arguments = (given.data, given.model, given.device, given.trial_epochs, method, number, seed)
                waiting[pool.submit(training, *arguments)] = method

        waiting: dict[Any, str] = {}
        for method in chosen:
            for number in range(len(METHODS[method][2])):
                submit(method, number, TRIAL)
        repeated = {method for method in chosen if _repeat(method, done, given.seeds, submit)}
        while waiting:
            future = next(as_completed(waiting))
            method = waiting.pop(future)
            line = future.result()
            done[method, line["trial"], line["seed"]] = line
            with given.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if method not in repeated and _repeat(method, done, given.seeds, submit):
                repeated.add(method)

    rows = []
    for method in chosen:
        best = _best(method, done)
        if best is None:
            errors = [line["error"] for (name, _, _), line in done.items() if name == method and "error" in line]
            rows.append([method, *["-"] * 5, (errors or ["not run"])[0][:60], "-", "-"])
            continue
        own = [done.get((method, best, seed), {}) for seed in range(given.seeds)]
        found = [line for line in own if "valid" in line]
        if not found:
            rows.append([method, *["-"] * 5, "no seed yet", "-", "-"])
            continue
        figures = [f"{mean(line[name] for line in found):.4f}" for name in ("recall@10", "ndcg@10", "valid")]
        setting = ", ".join(f"{name} {value}" for name, value in METHODS[method][2][best].items())
        epoch = f"{mean(line['best'] for line in found):.0f} of {SETS[given.data]['epochs']}"
        spread = f"{min(line['ndcg@10'] for line in found):.4f} to {max(line['ndcg@10'] for line in found):.4f}"
        rows.append([method, *figures, spread, f"{found[0]['share']:.0%}", setting, epoch, str(len(found))])
    heads = ["R@10", "N@10", "validation N@10", "N@10 of the seeds", "share", "chosen", "best epoch", "seeds"]
    print(table([given.data, *heads], rows))


def _best(method: str, done: dict[tuple[str, int, int], dict[str, Any]]) -> int | None:
    """The trial with the best validation figure; None while one is missing or if all failed."""
    found = [done.get((method, number, TRIAL)) for number in range(len(METHODS[method][2]))]
    if any(line is None for line in found):
        return None
    valid = [line.get("valid", -1.0) for line in found if line is not None]
    return max(range(len(valid)), key=valid.__getitem__) if max(valid) >= 0 else None


def _repeat(method: str, done: dict[tuple[str, int, int], dict[str, Any]], seeds: int, submit: Any) -> bool:
    """Submit the seeds of a method whose trials are done."""
    best = _best(method, done)
    if best is not None:
        for seed in range(seeds):
            submit(method, best, seed)
    return best is not None


if __name__ == "__main__":
    main()
