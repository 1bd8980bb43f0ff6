"""The tables and figures of the papers, on any data, beside the published figures."""

from __future__ import annotations

from pathlib import Path

from sparring.core.errors import UserError
from sparring.core.workers import Listener
from sparring.experiments.papers import page
from sparring.experiments.papers.esans_cost import COST
from sparring.experiments.papers.esans_main import ABLATION, MAIN
from sparring.experiments.papers.esans_sweeps import CODEBOOKS, COUNTS, LAMBDA, OPEN
from sparring.experiments.papers.ngame import NGAME_DEXA
from sparring.experiments.papers.plan import Catalogue, Experiment, Given, Method, Plan, Results, Unsuited, seeds
from sparring.experiments.papers.trainings import train
from sparring.experiments.papers.xir import TABLE_1, TABLE_2, TABLE_4
from sparring.experiments.papers.xir_curves import FIGURE_1, FIGURE_2
from sparring.experiments.papers.xir_sweeps import FIGURE_3, TABLE_5, TABLE_6
from sparring.recipes.setup import nearest

__all__ = [
    "EXPERIMENTS",
    "Catalogue",
    "Experiment",
    "Given",
    "Method",
    "Plan",
    "Results",
    "Unsuited",
    "find",
    "reproduce",
    "seeds",
]

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each for each in (TABLE_1, TABLE_2, TABLE_4, TABLE_5, TABLE_6, FIGURE_1, FIGURE_2, FIGURE_3)
}
EXPERIMENTS |= {each.name: each for each in (MAIN, ABLATION, LAMBDA, COUNTS, CODEBOOKS, OPEN, COST)}
EXPERIMENTS |= {NGAME_DEXA.name: NGAME_DEXA}


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise UserError(f"unknown reproduction {name!r}{nearest(name, EXPERIMENTS)}; `sparring reproduce` lists them")
    return EXPERIMENTS[name]


def reproduce(plan: Plan, jobs: int = 1, listener: Listener | None = None) -> tuple[Results, Path]:
    """Train what is missing and write table.*, figures and the page; what was found, and where the page is.

    results, where = reproduce(Plan(find("xir-table2"), Path("out"), (given,)), jobs=2)
    """
    train(plan, jobs, listener)
    results = plan.experiment.results(plan)
    return results, page.write(plan, results)
