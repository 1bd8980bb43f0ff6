"""The tables and figures of papers, reproduced on any data beside the published figures (published/*.toml).

An experiment is a plan over experiments.study and a function from its runs to tables; nothing here trains by itself.
"""

from __future__ import annotations

from pathlib import Path

from sparring.core.errors import UserError, did_you_mean
from sparring.core.workers import Listener
from sparring.experiments.papers import esans, ngame, page, xir
from sparring.experiments.papers.paper import (
    Experiment,
    ItemModalities,
    PaperDataset,
    PaperMethod,
    Reproduction,
    Results,
    Unsuited,
    seeds,
    train,
)

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "ItemModalities",
    "PaperDataset",
    "PaperMethod",
    "Reproduction",
    "Results",
    "Unsuited",
    "find",
    "reproduce",
    "seeds",
]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for paper in (xir, esans, ngame) for experiment in paper.EXPERIMENTS
}


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        hint = did_you_mean(name, EXPERIMENTS)
        raise UserError(f"unknown reproduction {name!r}{hint}; `sparring reproduce` lists them")
    return EXPERIMENTS[name]


def reproduce(plan: Reproduction, jobs: int = 1, listener: Listener | None = None) -> tuple[Results, Path]:
    """Train unfinished runs and write table.*, figures and the page; return the results and the page's path.

    results, page = reproduce(Reproduction(find("xir-table2"), Path("out"), (dataset,)), jobs=2)
    """
    train(plan, jobs, listener)
    results = plan.experiment.results(plan)
    return results, page.write(plan, results)
