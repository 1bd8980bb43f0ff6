"""One training step of a run, up to its loss; and what its batch contains, in words."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparring.composition import Run
from sparring.data.batches import RandomBatches, query_rows
from sparring.data.interactions import Split
from sparring.types import Bag, Outcome, Positives, Step


def contrast(
    run: Run, query_ids: Tensor, item_ids: Tensor, generator: torch.Generator, positives: Positives | None = None
) -> tuple[Tensor, Step, Outcome]:
    """One step's loss per query (B,), with what observers are told: encode, gather each term's bag, score it."""
    model, setup = run.model, run.setup

    # on a CPU bfloat16 is slower than float32
    half = torch.autocast(query_ids.device.type, torch.bfloat16, enabled=setup.precision == "bf16" and query_ids.is_cuda)

    def encode(ids: Tensor) -> Tensor:  # negatives call it too, later
        with half:
            return in_chunks(setup.chunk, model.encode_items, ids).float()

    with half:
        q = in_chunks(setup.chunk, model.encode_queries, query_ids, item_ids).float()
    v = encode(item_ids)
    if setup.dropout and model.training:  # from the run's generator, which is in its checkpoint
        q = model.dropped(q, setup.dropout, generator)
    step = Step(query_ids, item_ids, q, v, run.temperature(query_ids), encode, generator, positives, model.encode_mixtures)
    bags: list[Bag] = []
    total = torch.zeros((), device=q.device)
    for term in run.terms:
        bag = term.negatives(step)
        total = total + term.weight * term.loss(step, bag)
        bags.append(bag)
    return total, step, Outcome(total.detach(), tuple(bags))


def in_chunks(size: int | None, encode: Callable[..., Tensor], *ids: Tensor) -> Tensor:
    """Encode ids (of one shape, several columns) `size` at a time, keeping only the vectors (gradient cache); None: all at once.

    The backward pass hands each chunk its part of the gradient of the vectors, encodes it again, the random state as before, and goes on
    into the tower; so what a tower keeps for its gradient never exceeds one chunk, at the price of a second forward pass. The gradient is
    that of encoding all at once.

    Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
    """
    if size is None or ids[0].numel() <= size:
        return encode(*ids)
    chunks = zip(*(column.flatten().split(size) for column in ids), strict=True)
    vectors = torch.cat([checkpoint(encode, *chunk, use_reentrant=False) for chunk in chunks])
    return vectors.unflatten(0, ids[0].shape)


def describe_batch(run: Run, split: Split) -> str:
    """What one training batch of this run contains, term by term: sources, counts, corrections, masks. It draws from its own generator."""
    setup, (queries, items) = run.setup, split.train.pairs()
    device = next(run.model.parameters()).device
    generator = torch.Generator(device).manual_seed(setup.seed)
    drawn = query_rows(split.train, setup.draw) if setup.rows == "queries" else None
    rows = next(RandomBatches(len(split.train if drawn is None else drawn), setup.batch_size, setup.seed).epoch(0))
    if drawn is not None:
        rows = drawn.pairs(rows, torch.Generator().manual_seed(setup.seed))
    positives = split.train.positives()
    positives = Positives(positives.start.to(device), positives.items.to(device))
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        _, _, outcome = contrast(run, queries[rows].long().to(device), items[rows].long().to(device), generator, positives)
    lines: list[str] = []
    for term, bag in zip(run.terms, outcome.bags, strict=True):
        name = getattr(term.loss, "__name__", type(term.loss).__name__)
        lines += [f"{term.weight:g} x {name} over", *(f"  {line}" for line in bag.describe().splitlines())]
    return "\n".join(lines)
