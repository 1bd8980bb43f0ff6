"""What needs no training: BM25 over the words, and the encoder as it comes; measured once for a data set and kept in OUT/DATA."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.propensity import inverse_propensities
from sparring.evaluation.ranking import Evaluation, evaluate, evaluate_lists
from sparring.experiments.papers.cells import read_json
from sparring.experiments.papers.plan import Given, Method, Plan
from sparring.recipes import settings

BM25, ZERO_SHOT = "BM25", "encoder, untrained"


def references(plan: Plan, given: Given, method: Method) -> dict[str, dict[str, Any]]:
    """The evaluation of each, as Evaluation.to_dict has it, or {"error": why there is none}; the encoder is that of this method."""
    path = plan.out / given.name / "references.json"
    kept = read_json(path) if path.is_file() else {}
    parts = plan.experiment.protocol.parts(given.data, 0)
    found: dict[str, dict[str, Any]] = {}
    for name, measure in ((BM25, _bm25), (ZERO_SHOT, _untrained)):
        try:
            found[name] = kept[name] if name in kept else measure(plan, given, method, parts).to_dict()
        except UserError as error:
            found[name] = {"error": str(error)}
    files.write_json(path, {name: each for name, each in found.items() if "error" not in each})
    return found


def _bm25(plan: Plan, given: Given, method: Method, parts: Split) -> Evaluation:
    from sparring.data.texts.texts import text_of
    from sparring.evaluation.bm25 import bm25

    assert parts.test is not None
    k, seen, counts = plan.cutoffs(given), parts.seen_for("test"), parts.train.counts()
    ids = np.unique(parts.test.queries)
    lists, _ = bm25(text_of(given.data, "item"), text_of(given.data, "query")[ids], max(k), seen, ids)
    weights = parts.test.propensity
    if weights is None:  # as `evaluate` has them
        weights = inverse_propensities(counts, int((seen.start.diff() > 0).sum()))
    metrics = plan.experiment.protocol.metrics
    return evaluate_lists(lists, parts.test, given.data.n_items, k, metrics, counts=counts, propensity=weights)


def _untrained(plan: Plan, given: Given, method: Method, parts: Split) -> Evaluation:
    assert parts.test is not None
    device = pick_device(plan.device)
    model = settings.build(method.recipe, parts.train, method.settings, setup=plan.experiment.setup).model.to(device)
    seen, k = parts.seen_for("test"), plan.cutoffs(given)
    with torch.no_grad():
        seen = seen.to(device)
        return evaluate(model, parts.test, seen, k, plan.experiment.protocol.metrics, counts=parts.train.counts())
