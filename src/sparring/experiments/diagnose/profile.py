"""The profile of a run's negatives: popularity, accidental hits and, if the truth is known, false negatives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from sparring.core.partition import drawn_blocks
from sparring.core.types import Outcome, Step
from sparring.data.interactions import Split
from sparring.data.synthetic import World
from sparring.evaluation.metrics import STRATA, popularity_percentile, popularity_strata
from sparring.recipes.run import Run
from sparring.training.step import sample_steps

Places = tuple[Tensor, Tensor]  # ids, shared (C,) or (B, C), and the weight (B, C) of each place


def profile(run: Run, split: Split, batches: int = 4, world: World | None = None) -> dict[str, float]:
    """The negatives of a few training batches, each candidate of a query weighted by its draws.

    popularity       mean popularity percentile (0.5: as popular as training positives)
    head, mid, tail  share of each stratum, each of which has a third of the training interactions
    accidental       share of known positives of the query, before the method masks any by id
    synthetic        share of synthetic vectors, which are no items of the catalogue
    false_negatives  share of items that the query would like and never took; only if `world` has the truth

    All shares but `synthetic` are of items, and absent if there are none. If draws are known only in sum over the
    queries of a batch (closed-form resampling), each query is assigned an equal part. The run is left unchanged.

        profile(fitted.run, split)["popularity"]
    """
    device = next(run.model.parameters()).device
    percentile = torch.from_numpy(popularity_percentile(split.train.counts())).to(device)
    stratum = torch.from_numpy(popularity_strata(split.train.counts())).to(device)
    total = torch.zeros(
        4 + len(STRATA), dtype=torch.float64, device=device
    )  # popularity, accidental, false, synthetic, strata
    real = 0.0
    with torch.no_grad():
        for _, step, outcome in islice(sample_steps(run, split), batches):
            assert step.positives is not None
            for ids, weight in _places(step, outcome):
                mass = weight.sum(0) if ids.dim() == 1 else weight
                known, mass = ids >= 0, mass.double()
                found, mass_known = ids[known], mass[known]
                row, column = step.positives.of(step.query_ids).hits(ids)
                real += float(mass_known.sum())
                total[0] += (percentile[found] * mass_known).sum()
                total[1] += weight[row, column].double().sum()
                total[3] += mass[~known].sum()
                total[4:] += torch.bincount(stratum[found], mass_known, len(STRATA))
                if world is not None:
                    total[2] += (
                        (world.false_negatives(step.query_ids.cpu(), ids.cpu()) * weight.cpu())
                        .double()
                        .sum()
                        .to(device)
                    )
    made_up = float(total[3])
    result = {"synthetic": made_up / max(real + made_up, 1e-300)}
    if real == 0:
        return result
    shares = (total / real).tolist()
    result |= {"popularity": shares[0], **dict(zip(STRATA, shares[4:], strict=True)), "accidental": shares[1]}
    return result | ({"false_negatives": shares[2]} if world is not None else {})


def _places(step: Step, outcome: Outcome) -> Iterator[Places]:
    """The candidates of every block, and how often each was drawn for each query."""
    b = len(step.q)
    for block, counts in drawn_blocks(step, outcome):
        if counts is None:
            for part in block.plain():
                yield part.ids.long(), (~torch.isneginf(part.log_w)).float().expand(b, part.ids.shape[-1])
        else:
            counts = counts.float()
            yield block.ids.long(), counts if counts.dim() == 2 else (counts / b).expand(b, len(counts))
