"""One training step of a run, up to its loss; and what its batch contains, in words."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparring.core.errors import UserError
from sparring.core.part import loss_output
from sparring.core.types import ALONE, Bag, Batch, LossOutput, Outcome, Positives, Ranks, Step
from sparring.data.batches import batches_for, query_rows
from sparring.data.interactions import Split
from sparring.recipes.run import Run, Term


def contrast(
    run: Run,
    query_ids: Tensor,
    item_ids: Tensor,
    generator: torch.Generator,
    positives: Positives | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Step, Outcome]:
    """One step's loss per query (B,), with what observers are told: encode, gather each term's bag, score it.

    The ids are those of the whole batch, the same on every rank; the losses are of this rank's rows.
    """
    model, setup = run.model, run.setup

    # on a CPU bfloat16 is slower than float32
    half = torch.autocast(
        query_ids.device.type, torch.bfloat16, enabled=setup.training.precision == "bf16" and query_ids.is_cuda
    )

    def encoded(ids: Tensor) -> Tensor:
        with half:
            return as_compared(in_chunks(setup.batches.chunk, model.encode_items, ids))

    def encode(ids: Tensor) -> Tensor:  # negatives call it, later
        return ranks.gather(encoded(ranks.own(ids)), len(ids)) if ids.dim() == 1 else encoded(ids)

    def encode_mixtures(ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        if ids.dim() > 2:  # each query's own
            return model.encode_mixtures(ids, weights, layer)
        return ranks.gather(model.encode_mixtures(ranks.own(ids), ranks.own(weights), layer), len(ids))

    own_queries, own_items = ranks.own(query_ids), ranks.own(item_ids)
    with half:
        q = as_compared(in_chunks(setup.batches.chunk, model.encode_queries, own_queries, own_items))
    v = encoded(own_items)
    if setup.model.dropout and model.training:  # from the run's generator, which is in its checkpoint
        uniform = torch.rand(
            len(query_ids), q.shape[1] - (model.item_bias is not None), generator=generator, device=q.device
        )
        q = model.dropped(q, setup.model.dropout, ranks.own(uniform))
    batch = Batch(query_ids, item_ids, q, v, ranks)
    step = Step(
        own_queries, own_items, q, v, run.temperature(own_queries), encode, generator, positives, encode_mixtures, batch
    )
    bags: list[Bag] = []
    outputs: list[LossOutput] = []
    total = torch.zeros((), device=q.device)
    for term in run.terms:
        bag = term.negatives(step)
        _check_bag(term, bag)
        output = loss_output(term.loss, step, bag)
        _check_losses(term, output.losses, q.shape[:1])
        total = total + term.weight * output.losses
        bags.append(bag)
        outputs.append(output._replace(losses=output.losses.detach()))
    return total, step, Outcome(total.detach(), tuple(bags), tuple(outputs))


def _check_bag(term: Term, bag: object) -> None:
    """Refuse what a sampler of one's own gave, by its type; here and below nothing waits for the device."""
    if not isinstance(bag, Bag):
        raise UserError(
            f"{type(term.negatives).__name__}.forward gave a {type(bag).__name__}; it must give a Bag: Bag((candidates,))"
        )


def _check_losses(term: Term, losses: object, rows: torch.Size) -> None:
    """The same of a loss, by its shape: a mean over the queries would train too, as something else."""
    if not isinstance(losses, Tensor) or losses.shape != rows:
        name = getattr(term.loss, "__name__", type(term.loss).__name__)
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise UserError(f"the loss {name} gave {found}; it must give one value per query, shape {tuple(rows)}")


def as_compared(vectors: Tensor) -> Tensor:
    """Vectors of autocast are compared in float32; those of a float64 model stay."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


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
    device = run.model.device
    generator = torch.Generator(device).manual_seed(setup.seed)
    drawn = query_rows(split.train, setup.batches.draw) if setup.batches.rows == "queries" else None
    rows = next(batches_for(split.train, drawn, setup.batches.batch_size, setup.seed).epoch(0))
    if drawn is not None:
        rows = drawn.pairs(rows, torch.Generator().manual_seed(setup.seed))
    positives = split.train.positives().to(device)
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        _, _, outcome = contrast(
            run, queries[rows].long().to(device), items[rows].long().to(device), generator, positives
        )
    lines: list[str] = []
    for term, bag in zip(run.terms, outcome.bags, strict=True):
        name = getattr(term.loss, "__name__", type(term.loss).__name__)
        lines += [f"{term.weight:g} x {name} over", *(f"  {line}" for line in bag.describe().splitlines())]
    return "\n".join(lines)
