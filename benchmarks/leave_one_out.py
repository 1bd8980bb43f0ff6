"""Leave-one-set-out for `default` as a whole: a rule that is chosen on all sets but one, reported on that one.

    python benchmarks/leave_one_out.py --data demo --data tiktok_mm --data tafeng --out leave_one_out.jsonl

A rule says how `default` chooses its temperature from the first epochs, when its closed form stays and in which form,
and what else it changes: epochs, bias, width. For each set the towers are trained once at each temperature that a rule
asks for, and once per change at the temperature of the shipped rule. The first epochs of a training are its trial, so
the choice of every rule is read from these records. NDCG@20 is that of the test part, ranked with the validation items
as history.
For each set, the rule with the best mean of log NDCG@20 on the test parts of the other sets is reported on it, beside
the shipped rule, popularity, EASE and iALS (chosen on the validation part, which they do not read as history).

One CPU thread; all of it takes 3 to 10 CPU minutes a set. Records in `--out` are not measured again.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from _shared import DATA, Clock, table
from sparring import Split, build, evaluate, read, split
from sparring.data import load_set
from sparring.data.histories import past_of
from sparring.evaluation.ranking import Evaluation
from sparring.models import spectral_start
from sparring.models.retriever import Retriever
from sparring.training import closed_form, temperature
from sparring.training.closed_form import ClosedFormChoice, add_closed_form
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.peak import peak

EARLY = (1, 2, 3)  # epochs that are validated for the trials, beside every fourth
EPOCHS = 16
CHANGES: dict[str, dict[str, Any]] = {
    "32 epochs": {"epochs": 32},
    "8 epochs": {"epochs": 8},
    "bias from 0": {"popularity": 0.0},
    "bias from counts": {"popularity": 1.0},
    "128 dimensions": {"dim": 128},
    "512 dimensions": {"dim": 512},
}
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "popularity": {},
    "ease": {"lam": (100, 300, 1000)},
    "ials": {"alpha": (0.03, 0.1, 0.3), "reg": (0.001, 0.003, 0.01)},
}
FIXED: dict[str, dict[str, Any]] = {"ials": {"dim": 64}}
BAR = 0.98
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        metavar="SET[:SPLIT]",
        help="demo, or a folder of SPARRING_DATA; repeat",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines of trainings: those in it are read")
    parser.add_argument("--changes", default=",".join(CHANGES), help="changes that are trained beside the temperatures")
    parser.add_argument("--rules", default="", help="beginnings of rules' names: others but the shipped are left out")
    given = parser.parse_args()
    logging.getLogger("sparring").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    changes = [name for name in given.changes.split(",") if name]
    begins = ("shipped", *given.rules.split(",")) if given.rules else ("",)
    rules = {
        name: rule
        for name, rule in RULES.items()
        if name.startswith(begins) and (not rule.change or rule.change in changes)
    }
    report({name: Runs(name, given.out) for name in given.data}, rules)


class Runs(dict[str, Record]):
    """The records of a set by run (a temperature, a change, a baseline); a missing one is measured when asked for."""

    def __init__(self, name: str, out: Path) -> None:
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        super().__init__({each["run"]: each for each in lines if each["set"] == name})
        self.name, self.out = name, out

    @cached_property
    def parts(self) -> Split:
        return parts_of(self.name)

    def __missing__(self, run: str) -> Record:
        parts, clock = self.parts, Clock()
        if run in GRIDS:
            record = baseline(parts, run)
        else:
            tau = SHIPPED.tau(self) if run in CHANGES else float(run.removeprefix("tau "))
            record = trained(parts, {"tau": tau, **CHANGES.get(run, {})})
        line = json.dumps({"set": self.name, "run": run, **record, "cpu": round(clock.read()[0], 1)})
        with self.out.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        self[run] = json.loads(line)
        return self[run]


def parts_of(name: str) -> Split:
    """The split of a set: at random unless the name says how."""
    name, _, how = name.partition(":")
    data = load_set("demo") if name == "demo" else read(DATA / name / "interactions.parquet")
    how = how or ("file" if name == "gowalla_lightgcn" else "random")
    return split(data, how, valid=0.1, test=0.2, seed=0)


def trained(parts: Split, settings: dict[str, Any]) -> Record:
    """The towers of `default` with these settings: validation by epoch, test alone and beside the closed form."""
    given = {"select": "ndcg@20", "epochs": EPOCHS} | settings
    usual, spectral_start.POPULARITY = spectral_start.POPULARITY, given.pop("popularity", spectral_start.POPULARITY)
    run = build("default", parts.train, given)
    spectral_start.POPULARITY = usual
    valid: dict[int, float] = {}

    def after(record: Record) -> None:
        if record["epoch"] in EARLY:
            valid[record["epoch"]] = trainer.ranked().metrics["ndcg@20"]
        elif "ndcg@20" in record:
            valid[record["epoch"]] = record["ndcg@20"]

    trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress(epoch=after))
    with trainer.checkpoints:
        trainer.train()
    trainer.checkpoints.load_best(trainer.state.best_epoch)
    low_rank, few = (beside(trainer, thinned) for thinned in (False, True))
    past = past_of(parts, "test").latest(run.setup.model.history)
    test = {}
    for name, model in {"towers": run.model, "both": low_rank.model, "few": few.model}.items():
        model.remember(past)
        test[name] = tested(model, parts, trainer.listed)
    towers, both = low_rank.ranked
    thinned = few.ranked[-1] if few.choice.neighbours else None
    return {
        "tau": run.setup.temperature.tau,
        "epoch": trainer.state.best_epoch,
        "valid": valid,
        "lam": low_rank.choice.lam,
        "weight": low_rank.choice.weight,
        "errors": standard_errors(both - towers),
        "few": None if thinned is None else few.choice.weight,
        "few_errors": {
            form: -np.inf if thinned is None else standard_errors(thinned - other)
            for form, other in (("towers", towers), ("both", both))
        },
        "test": test,
    }


class Beside(NamedTuple):
    """A model beside a closed form, the choice of it, and NDCG@20 by query: towers, low rank, few weights if tried."""

    model: Retriever
    choice: ClosedFormChoice
    ranked: list[np.ndarray]


def beside(trainer: Trainer, thinned: bool) -> Beside:
    """The best closed form of a kind beside trained towers, whether it gains or not."""
    run, ranked = trainer.run, []

    def rank(model: Retriever, queries: int) -> Evaluation:
        found = trainer.ranked(model, queries)
        if queries == closed_form.QUERIES:
            ranked.append(found.per_query["ndcg@20"])
        return found

    usual = closed_form.ERRORS, closed_form.LARGEST
    closed_form.ERRORS, closed_form.LARGEST = -np.inf, closed_form.LARGEST if thinned else 0
    pairs = trainer.split.train.positives()
    model, choice = add_closed_form(run.model, pairs, run.closed_form, None, rank, "ndcg@20", run.setup.seed)
    closed_form.ERRORS, closed_form.LARGEST = usual
    return Beside(model, choice, ranked)


def standard_errors(gain: np.ndarray) -> float:
    """The mean gain over queries in standard errors of it."""
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5)) if gain.std() > 0 else 0.0


def tested(model: Retriever, parts: Split, listed: torch.Tensor | None) -> float:
    """NDCG@20 on the test part."""
    assert parts.test is not None
    found = evaluate(model, parts.test, parts.seen_for("test"), (20,), ("ndcg",), among=listed)
    return found.metrics["ndcg@20"]


def baseline(parts: Split, recipe: str) -> Record:
    """The test figure of a baseline with the settings that do best on the validation part."""
    best: Record = {}
    grid = GRIDS[recipe]
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        run = build(recipe, parts.train, {"select": "ndcg@20", **FIXED.get(recipe, {}), **chosen})
        trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress())
        with trainer.checkpoints:
            trainer.train()
        if not best or trainer.state.best > best["valid"]:
            trainer.checkpoints.load_best(trainer.state.best_epoch)
            best = {"valid": trainer.state.best, **chosen, "test": tested(run.model, parts, trainer.listed)}
    return best


@dataclass(frozen=True)
class Rule:
    """How `default` chooses its temperature and whether its closed form stays; or a change at the shipped choice."""

    climb: int = 1  # epochs of a trial
    rise: float = temperature.RISES[1]
    finalists: int = 1  # the best temperatures after the climb, which are trained for `final` epochs
    final: int = 0
    errors: float = closed_form.ERRORS
    few: float = (
        0.0  # the least weight of the form at low rank beside which few weights are tried; 0 where it is left out
    )
    fixed: float = 0.0  # a temperature without trials
    change: str = ""

    def tau(self, runs: Runs) -> float:
        """The temperature that the rule takes on a set, from validation figures of the first epochs."""
        if self.fixed:
            return self.fixed
        tried: dict[float, float] = {}

        def score(tau: float) -> float:
            tried[tau] = runs[f"tau {tau}"]["valid"][str(self.climb)]
            return tried[tau]

        best = peak(temperature.LADDER, temperature.START, score, self.rise)
        if self.finalists == 1:
            return best
        near = sorted(tried, key=lambda tau: tried[tau], reverse=True)[: self.finalists]
        return max(near, key=lambda tau: runs[f"tau {tau}"]["valid"][str(self.final)])

    def figure(self, runs: Runs) -> float:
        """NDCG@20 on the test part of a set."""
        record = runs[self.change or f"tau {self.tau(runs)}"]
        form = "both" if record["errors"] > self.errors else "towers"
        weight = record["weight"] if form == "both" else 0.0
        if weight >= self.few and record["few_errors"][form] > self.errors:
            form = "few"
        return float(record["test"][form])


RULES = {
    "shipped": Rule(),
    **{f"1 epoch, {rise} %": Rule(rise=1 + rise / 100) for rise in (0, 2, 4, 5, 8, 10)},
    **{f"2 epochs, {rise} %": Rule(climb=2, rise=1 + rise / 100) for rise in (0, 2, 3, 4)},
    "best two for 4 epochs": Rule(finalists=2, final=4),
    "best two for 8 epochs": Rule(finalists=2, final=8),
    "all for 16 epochs": Rule(rise=1.0, finalists=9, final=16),
    "always 0.1": Rule(fixed=0.1),
    "always 0.14": Rule(fixed=0.14),
    "always 0.2": Rule(fixed=0.2),
    "closed form: always": Rule(errors=-np.inf),
    "closed form: any gain": Rule(errors=0.0),
    "closed form: two errors": Rule(errors=2.0),
    "closed form: never": Rule(errors=np.inf),
    "closed form: low rank alone": Rule(few=np.inf),
    "closed form: few weights where low rank has a weight of 1/2": Rule(few=0.5),
    **{change: Rule(change=change) for change in CHANGES},
}
SHIPPED = RULES["shipped"]


def report(found: dict[str, Runs], rules: dict[str, Rule]) -> None:
    """The figures of all rules, then for each set the rule that the other sets choose."""
    figures = {name: {rule: rules[rule].figure(runs) for rule in rules} for name, runs in found.items()}
    relative = np.log([[row[rule] / row["shipped"] for rule in rules] for row in figures.values()])
    rows = [
        [rule, *(f"{value:.3f}" for value in np.exp(column)), f"{np.exp(column.mean()):.4f}"]
        for rule, column in zip(rules, relative.T, strict=True)
    ]
    print("\nNDCG@20 on the test part, of the shipped rule's\n")
    print(table(["rule", *found, "mean"], rows))
    searched = [rule for rule in rules if not (rules[rule].change or rules[rule].fixed)]
    taus = [[rule, *(f"{rules[rule].tau(runs):g}" for runs in found.values())] for rule in searched]
    print("\nThe temperatures\n")
    print(table(["rule", *found], taus))
    rows, ratios = [], []
    for row, (name, runs) in enumerate(found.items()):
        others = np.delete(relative, row, axis=0)
        chosen = list(rules)[int(others.mean(0).argmax())]
        baselines = {recipe: runs[recipe]["test"] for recipe in GRIDS}
        best = max(baselines, key=lambda recipe: baselines[recipe])
        ratios.append([figures[name][rule] / baselines[best] for rule in (chosen, "shipped")])
        shown = [f"{figures[name][rule]:.4f}" for rule in (chosen, "shipped")]
        rest = [f"{value:.4f}" for value in baselines.values()]
        verdict = [f"{ratio:.3f}{'' if ratio >= BAR else ' NO'}" for ratio in ratios[-1]]
        rows.append([name, chosen, *shown, *rest, best, *verdict])
    print(f"\nLeave one set out: the rule chosen by the others; of the best baseline, at least {BAR}\n")
    head = ["set", "chosen rule", "NDCG@20", "shipped", *GRIDS, "best baseline", "chosen / best", "shipped / best"]
    print(table(head, rows))
    means = np.exp(np.log(ratios).mean(0))
    print(f"\ngeometric means over the sets: chosen {means[0]:.3f}, shipped {means[1]:.3f} of the best baseline")


if __name__ == "__main__":
    main()
