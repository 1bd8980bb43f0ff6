"""The price of novelty: quality, coverage and recall of rarer items of a run at several values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparring.core.types import Positives
from sparring.evaluation.accumulator import Pairs
from sparring.evaluation.metrics import STRATA, parse
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.experiments.report.tables import Cell, Column, Row, Table, TableRows
from sparring.training.trained import Trained

VALUES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
KEPT = 0.95  # share of NDCG that `largest` keeps


@dataclass(frozen=True)
class NoveltyCurve:
    """The evaluation of a run at several values of novelty, 0 first, in ascending order."""

    k: int
    points: Mapping[float, Evaluation]
    dialect: str = "standard"

    def table(self) -> Table:
        """A row per value; `kept` is the share of NDCG at novelty 0, `head_share` that of head items in lists."""
        key = {name: parse(name, self.dialect).key(self.k) for name in ("recall", "ndcg", "coverage")}
        rows: list[Row] = []
        for novelty, found in self.points.items():
            row: Row = {"novelty": novelty, **{name: found.metrics[each] for name, each in key.items()}}
            row["kept"] = self.kept(novelty)
            for stratum in STRATA:
                values = found.strata.get(stratum, {})
                row |= {stratum: values.get(key["recall"]), f"{stratum}_share": values.get(f"share@{self.k}")}
            rows.append(row)
        figures = [Column(key[name], f"{{{name}:.4f}}") for name in ("recall", "ndcg")]
        strata = [Column(f"{key['recall']} {name}", f"{{{name}:.4f}}") for name in STRATA]
        shares = [Column("kept", "{kept:.1%}"), Column(key["coverage"], "{coverage:.4f}")]
        shares += [Column("head items", "{head_share:.1%}")]
        return Table((Column("novelty", "{novelty:g}"), *figures, *shares, *strata), rows)

    def kept(self, novelty: float) -> float:
        """The share of the NDCG at novelty 0."""
        key = parse("ndcg", self.dialect).key(self.k)
        first = self.points[0.0].metrics[key]
        return self.points[novelty].metrics[key] / first if first else 1.0

    def largest(self, kept: float = KEPT) -> float:
        """The largest value up to which every value keeps this share of NDCG."""
        return float(largest(self.table().rows, kept)["novelty"] or 0)


def largest(rows: TableRows, kept: float = KEPT) -> Mapping[str, Cell]:
    """The last row of a curve's table up to which every row keeps this share of NDCG."""
    return list(itertools.takewhile(lambda row: float(row["kept"] or 0) >= kept, rows))[-1]


def novelty_curve(
    trained: Trained,
    test: Pairs,
    seen: Positives,
    values: Sequence[float] = VALUES,
    k: int = 20,
    dialect: str = "standard",
    device: torch.device | None = None,
    **given: Any,
) -> NoveltyCurve:
    """Rank the same part at several values of novelty and at 0; `given` are further arguments of `evaluate`.

    curve = novelty_curve(load("runs/first", novelty=0), split.test, split.seen_for("test"))
    print(curve.table().markdown(), curve.largest(0.95))
    """
    listed = trained.eligibility.listed(len(trained.ids.item_ids))
    points = {}
    for novelty in sorted({0.0, *values}):
        model = trained.with_novelty(novelty).model.to(device or trained.model.device)
        points[novelty] = evaluate(
            model, test, seen, (k,), ("recall", "ndcg", "coverage"), dialect, among=listed, **given
        )
    return NoveltyCurve(k, points, dialect)
