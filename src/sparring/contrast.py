"""One training step of a run, up to its loss; and what its batch contains, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.composition import Run
from sparring.data.batches import RandomBatches
from sparring.data.interactions import Split
from sparring.types import Bag, Outcome, Positives, Step


def contrast(
    run: Run, query_ids: Tensor, item_ids: Tensor, generator: torch.Generator, positives: Positives | None = None
) -> tuple[Tensor, Step, Outcome]:
    """One step's loss per query (B,), with what observers are told: encode, gather each term's bag, score it."""
    model, setup = run.model, run.setup
    with torch.autocast(query_ids.device.type, torch.bfloat16, enabled=setup.precision == "bf16"):
        q, v = model.encode_queries(query_ids, item_ids), model.encode_items(item_ids)
    step = Step(query_ids, item_ids, q.float(), v.float(), run.temperature(query_ids), model.encode_items, generator, positives)
    bags: list[Bag] = []
    total = torch.zeros((), device=q.device)
    for term in run.terms:
        bag = term.negatives(step)
        total = total + term.weight * term.loss(step, bag)
        bags.append(bag)
    return total, step, Outcome(total.detach(), tuple(bags))


def describe_batch(run: Run, split: Split) -> str:
    """What one training batch of this run contains, term by term: sources, counts, corrections, masks. It draws from its own generator."""
    rows = next(RandomBatches(len(split.train), run.setup.batch_size, run.setup.seed).epoch(0))
    queries, items = split.train.pairs()
    device = next(run.model.parameters()).device
    generator = torch.Generator(device).manual_seed(run.setup.seed)
    positives = split.train.positives()
    positives = Positives(positives.start.to(device), positives.items.to(device))
    with torch.no_grad():
        _, _, outcome = contrast(run, queries[rows].long().to(device), items[rows].long().to(device), generator, positives)
    lines: list[str] = []
    for term, bag in zip(run.terms, outcome.bags, strict=True):
        name = getattr(term.loss, "__name__", "loss")
        lines += [f"{term.weight:g} x {name} over", *(f"  {line}" for line in bag.describe().splitlines())]
    return "\n".join(lines)
