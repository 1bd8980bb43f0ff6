"""The profile of a run's negatives: popularity, accidental hits and, if the truth is known, false negatives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from sparring.core.partition import drawn_blocks
from sparring.core.types import Outcome, Step
from sparring.data.interactions import Split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.evaluation.metrics import STRATA, popularity_percentile, popularity_strata
from sparring.recipes.run import Run
from sparring.training.step import sample_steps


def profile(run: Run, split: Split, batches: int = 4, world: SyntheticWorld | None = None) -> dict[str, float]:
    """The negatives of a few training batches, each candidate of a query weighted by its draws.

    popularity       mean popularity percentile (0.5: as popular as training positives)
    head, mid, tail  share of each stratum, each of which has a third of the training interactions
    accidental       share of known positives of the query, before the method masks any by id
    synthetic        share of synthetic vectors, which are no items of the catalogue
    false_negatives  share of items that the query would like and never took; only if `world` has the truth

    All shares but `synthetic` are of items, and absent if there are none. If draws are known only in sum over the
    queries of a batch (closed-form resampling), each query is assigned an equal part. The run is left unchanged. A run
    with a solver draws none: its profile is empty.

        profile(fitted.run, split)["popularity"]
    """
    if run.solver is not None:
        return {}
    device = next(run.model.parameters()).device
    percentile = torch.from_numpy(popularity_percentile(split.train.counts())).to(device)
    stratum = torch.from_numpy(popularity_strata(split.train.counts())).to(device)
    sums: dict[str, float] = dict.fromkeys(("items", "synthetic", "popularity", "accidental", "false_negatives"), 0.0)
    strata = torch.zeros(len(STRATA), dtype=torch.float64, device=device)
    with torch.no_grad():
        for _, step, outcome in islice(sample_steps(run, split), batches):
            assert step.positives is not None
            for ids, weight in _weighted_candidates(step, outcome):
                mass = (weight.sum(0) if ids.dim() == 1 else weight).double()
                real = ids >= 0
                items, item_mass = ids[real], mass[real]
                sums["items"] += float(item_mass.sum())
                sums["synthetic"] += float(mass[~real].sum())
                sums["popularity"] += float((percentile[items] * item_mass).sum())
                sums["accidental"] += float(weight[step.positives.of(step.query_ids).hits(ids)].double().sum())
                strata += torch.bincount(stratum[items], item_mass, len(STRATA))
                if world is not None:
                    wrong = world.false_negatives(step.query_ids.cpu(), ids.cpu())
                    sums["false_negatives"] += float((wrong * weight.cpu()).double().sum())
    shares = {"synthetic": sums["synthetic"] / max(sums["items"] + sums["synthetic"], 1e-300)}
    if sums["items"]:
        mean = {name: value / sums["items"] for name, value in sums.items()}
        shares["popularity"] = mean["popularity"]
        shares |= dict(zip(STRATA, (strata / sums["items"]).tolist(), strict=True))
        shares |= {name: mean[name] for name in ("accidental", *(() if world is None else ("false_negatives",)))}
    return shares


def _weighted_candidates(step: Step, outcome: Outcome) -> Iterator[tuple[Tensor, Tensor]]:
    """The ids of every block, shared (C,) or (B, C), and the draws (B, C) of each for each query."""
    b = len(step.q)
    for block, counts in drawn_blocks(step, outcome):
        if counts is None:
            for part in block.plain():
                yield part.ids.long(), (~torch.isneginf(part.log_w)).float().expand(b, part.ids.shape[-1])
        else:
            counts = counts.float()
            yield block.ids.long(), counts if counts.dim() == 2 else (counts / b).expand(b, len(counts))
