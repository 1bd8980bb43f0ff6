"""One training step of a run up to its loss, and the steps of an epoch: the one place where a batch is drawn.

    tensors of a step (`TrainingRows.batches`) -> its pairs and their context (`TrainingRows.drawn`) -> `training_step`

The trainer takes this path, and so does everything that reports on a run's batches (`sample_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparring.core.errors import UserError
from sparring.core.part import loss_output
from sparring.core.types import ALONE, Bag, Batch, LossOutput, Outcome, Positives, Ranks, SharedQueries, Step
from sparring.data.batches import RandomBatches, batches_for, query_rows
from sparring.data.histories import (
    Before,
    Context,
    Given,
    SequenceBatches,
    SetBatches,
    Windows,
    check_sequences,
    histories,
)
from sparring.data.interactions import Interactions, Split
from sparring.data.weights import spread
from sparring.kernels.chunked import half_gradients
from sparring.kernels.native.draws import order
from sparring.kernels.native.ids import taken
from sparring.models.retriever import Retriever
from sparring.recipes.run import Run, Solver, Term
from sparring.recipes.setup import Setup


def training_step(
    run: Run,
    query_ids: Tensor,
    item_ids: Tensor,
    generator: torch.Generator,
    positives: Positives | None = None,
    ranks: Ranks = ALONE,
    context: Context | None = None,
) -> tuple[Tensor, Step, Outcome]:
    """The loss of each row (B,), with step and outcome for observers: encode, gather each term's bag, score it.

    The ids are those of the complete batch, the same on every rank; the losses are those of this rank's rows. The
    context says what a tower of histories may read for each row; without one it reads all it knows.
    """
    model, setup = run.model.towers, run.setup

    # on a CPU towers compute in float32
    half = torch.autocast(
        query_ids.device.type, torch.bfloat16, enabled=setup.training.precision == "bf16" and query_ids.is_cuda
    )

    def encoded(ids: Tensor) -> Tensor:
        with half:
            return as_compared(in_chunks(setup.batches.chunk, model.encode_items, ids))

    def encode(ids: Tensor) -> Tensor:  # for negatives
        return ranks.gather(encoded(ranks.own(ids)), len(ids)) if ids.dim() == 1 else encoded(ids)

    def encode_mixtures(ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        if ids.dim() > 2:  # per query: nothing to share among ranks
            return model.encode_mixtures(ids, weights, layer)
        return ranks.gather(model.encode_mixtures(ranks.own(ids), ranks.own(weights), layer), len(ids))

    own_queries, own_items = ranks.own(query_ids), ranks.own(item_ids)
    own_context = None if context is None else context.own(ranks)
    with half:
        if isinstance(own_context, Before):
            q = in_chunks(setup.batches.chunk, _encode_before(model), own_queries, own_context.places)
        elif own_context is None:
            q = in_chunks(setup.batches.chunk, model.encode_queries, own_queries)
        elif isinstance(own_context, Given):
            q = model.encode_queries(own_context.queries, own_context.each_once())
        else:
            q = model.encode_queries(own_queries, own_context)
        q = as_compared(q)
    v = encoded(own_items)
    of_sets = isinstance(own_context, Given)
    if setup.model.dropout and model.training:  # from the run's generator, which is in its checkpoint
        rows = len(q) if of_sets else len(query_ids)
        uniform = torch.rand(rows, q.shape[1] - (model.item_bias is not None), generator=generator, device=q.device)
        q = model.dropped(q, setup.model.dropout, uniform if of_sets else ranks.own(uniform))
    shared = None
    if isinstance(own_context, Given):
        sets = SharedQueries(q, own_context.queries.long(), own_context.rows)
        q = q.index_select(0, own_context.rows)
        shared = sets if len(sets.q) < len(q) else None
    batch = Batch(query_ids, item_ids, q, v, ranks, grouped=isinstance(context, Windows | Given))
    step = Step(
        own_queries,
        own_items,
        q,
        v,
        run.temperature(own_queries),
        encode,
        generator,
        positives,
        encode_mixtures,
        batch,
        model.item_layers(),
        shared,
        model.item_bias is not None,
    )
    bags: list[Bag] = []
    outputs: list[LossOutput] = []
    total: Tensor | None = None
    for term in run.terms:
        bag = term.negatives(step)
        _check_bag(term, bag)
        with half_gradients(setup.training.precision in ("auto", "bf16")):
            output = loss_output(term.loss, step, bag)
        _check_losses(term, output.losses, q.shape[:1])
        losses = output.losses if term.weight == 1 else term.weight * output.losses
        total = losses if total is None else total + losses
        bags.append(bag)
        outputs.append(output._replace(losses=output.losses.detach()))
    assert total is not None
    return total, step, Outcome(total.detach(), tuple(bags), tuple(outputs))


def _encode_before(model: Retriever) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, places: model.encode_queries(ids, Before(places))


def _check_bag(term: Term, bag: object) -> None:
    """Raise if a custom sampler returned no Bag. Neither this nor `_check_losses` waits for the device."""
    if not isinstance(bag, Bag):
        raise UserError(
            f"{type(term.negatives).__name__}.forward returned a {type(bag).__name__}; "
            "it must return a Bag: Bag((candidates,))"
        )


def _check_losses(term: Term, losses: object, rows: torch.Size) -> None:
    """Raise unless a custom loss returned one value per query: a mean over queries would train another method."""
    if not isinstance(losses, Tensor) or losses.shape != rows:
        name = getattr(term.loss, "__name__", type(term.loss).__name__)
        returned = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise UserError(f"the loss {name} returned {returned}; it must return one value per query, shape {tuple(rows)}")


def as_compared(vectors: Tensor) -> Tensor:
    """Vectors as they are compared: float32 after autocast; float64 models keep their precision."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


def in_chunks(size: int | None, encode: Callable[..., Tensor], *ids: Tensor) -> Tensor:
    """Encode columns of ids `size` at a time, keeping only the vectors (gradient cache); None: all at once.

    The backward pass encodes each chunk again, with the same random state, and passes its part of the vectors' gradient
    into the tower. Activations therefore never exceed one chunk, at the cost of a second forward pass. The gradient
    equals that of encoding everything at once.

    Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021.
    """
    if size is None or ids[0].numel() <= size:
        return encode(*ids)
    chunks = zip(*(column.flatten().split(size) for column in ids), strict=True)
    vectors = torch.cat([checkpoint(encode, *chunk, use_reentrant=False) for chunk in chunks])
    return vectors.unflatten(0, ids[0].shape)


class TrainingRows:
    """The rows of a run's training data on a device: which rows share a batch, and what each row stands for.

    A row is a pair of the training data; with rows=queries a query, for which one of its pairs is drawn each time; with
    rows=sequences a position of a query's sequence; with rows=sets one of the items of a query that are not given.
    Batches are `run.batches` where the run composes its own (NGAME), else random.

        rows = TrainingRows(run, split.train)
        for step in rows.batches.steps(0): pairs, context = rows.drawn(step, generator)
    """

    def __init__(self, run: Run, train: Interactions, device: torch.device | str = "cpu") -> None:
        check_rows(run.setup, train)
        setup, model = run.setup, run.model
        self.kind = setup.batches.rows
        self.queries, self.items = (column.to(device) for column in train.pairs())
        self.by_query = query_rows(train, setup.batches.draw, device) if self.kind == "queries" else None
        self.at: Tensor | None = None  # (places,) the pair at each place
        self.places: Tensor | None = None  # (pairs,) the place of each pair
        readers = model.past_readers()
        self.given = setup.batches.given if readers else 0.0  # without a reader every item is a target
        if readers or self.kind in ("sequences", "sets"):
            past = histories(train)
            model.remember(past)
            assert past.pairs is not None
            self.at = past.pairs.to(device)
            self.places = torch.empty_like(self.at).scatter_(0, self.at, torch.arange(len(train), device=device))
        size, seed = setup.batches.batch_size, setup.seed
        self.batches: RandomBatches
        if run.batches is not None:
            self.batches = run.batches
        elif self.kind == "sequences":
            self.batches = SequenceBatches(past, setup.model.history, size, seed)
        elif self.kind == "sets":
            self.batches = SetBatches(past, setup.model.history, round(size / (1 - self.given)), seed)
        else:
            self.batches = batches_for(train, self.by_query, size, seed)

    def drawn(self, step: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, Context | None]:
        """(R,) the index of one training pair for each row of a step, and what may predict it."""
        if self.kind == "sequences":
            assert self.at is not None
            places, slots, windows = step
            return self.at[places], Windows(windows, slots)
        if self.kind == "sets":
            assert self.at is not None
            places, owners = step
            mixed = order(len(places), generator)
            rows, given = mixed.tensor_split([self.count(step)])
            sets = len(places) if places.is_cuda else int(owners[-1]) + 1  # a recorded step needs one shape
            queries = self.queries.new_zeros(sets).scatter_(0, owners, self.queries[self.at[places]])
            return self.at[places[rows]], Given(places[given], owners[given], owners[rows], queries)
        pairs = step[0] if self.by_query is None else self.by_query.pairs(step[0], generator)
        return pairs, self.before(pairs)

    def count(self, step: tuple[Tensor, ...]) -> int:
        """Rows of a step."""
        n = len(step[0])
        return n - int(self.given * n) if self.kind == "sets" else n

    def before(self, pairs: Tensor) -> Before | None:
        """The context of these pairs, each by itself; None if no tower reads histories."""
        return None if self.places is None else Before(self.places.to(pairs.device)[pairs])

    def ids(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and the items (B,) of these pairs."""
        return taken(self.queries, pairs), taken(self.items, pairs)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(at most n,) pairs of distinct random rows, as an epoch would meet them; rows on the CPU only."""
        if self.kind in ("sequences", "sets"):
            return torch.randperm(len(self.items), generator=generator)[:n]
        rows = torch.randperm(self.batches.n_rows, generator=generator)[:n]
        return rows if self.by_query is None else self.by_query.pairs(rows, generator)

    def around(self, pairs: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """A batch of `size` pairs: these (of distinct rows), then pairs of rows they meet in training; CPU only.

        Rows of sequences and sets meet random pairs here, each read by itself.
        """
        if self.kind in ("sequences", "sets"):
            return RandomBatches(len(self.items), size).around(pairs, size, generator)
        if self.by_query is None:
            return self.batches.around(pairs, size, generator)
        rows = self.batches.around(torch.searchsorted(self.by_query.queries, self.queries[pairs]), size, generator)
        return torch.cat([pairs, self.by_query.pairs(rows[len(pairs) :], generator)])


def check_rows(setup: Setup, train: Interactions) -> None:
    """Refuse training data that has no rows of the kind that a setup asks for."""
    if setup.batches.rows == "sequences":
        check_sequences(train)


def sample_steps(
    run: Run, split: Split, epoch: int = 0, *, seed: int | None = None, batches: Iterable[Tensor] | None = None
) -> Iterator[tuple[Tensor, Step, Outcome]]:
    """The steps of an epoch as training takes them, with the current model; nothing is updated, refreshed or observed.

    Rows, the pairs drawn for them and their order are the trainer's for this epoch, given the current `run.batches`.
    Random draws come from a generator seeded with `seed`, by default the run's: in epoch 0 the trainer's own numbers,
    unless a refresh before it draws some. `batches` replaces the epoch's batches by other training pairs (B,).

        for losses, step, outcome in islice(sample_steps(run, split), 4): outcome.bags[0].describe()
    """
    check_steps(run)
    device = run.model.device
    generator = torch.Generator(device).manual_seed(run.setup.seed if seed is None else seed)
    rows = TrainingRows(run, split.train, device)
    positives = split.train.positives().to(device)
    if batches is None:
        drawn = (rows.drawn(step, generator) for step in rows.batches.steps(epoch, device=device))
    else:
        drawn = ((pairs.to(device), rows.before(pairs.to(device))) for pairs in batches)
    for pairs, context in drawn:
        yield training_step(run, *rows.ids(pairs), generator, positives, context=context)


def check_steps(run: Run) -> None:
    """Refuse a run that is not trained by steps."""
    if run.solver is not None:
        raise UserError(f"{run.recipe} is {_how_solved(run.solver)}")


def _how_solved(solver: Solver) -> str:
    return f"solved {'in closed form' if solver.closed_form else 'by sweeps'}; it draws no negatives"


def describe_batch(run: Run, split: Split) -> str:
    """The first training batch of a run: sources, counts, corrections and masks by term, and the weights of pairs.

    The run is unchanged. A run with a solver has no batches; one line says how it is solved.
    """
    if run.solver is not None:
        weights = "" if split.train.weight is None or run.solver.weighted else "\nweights of interactions do not count"
        return f"{_how_solved(run.solver)}{weights}"
    device = run.model.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        _, _, outcome = next(sample_steps(run, split))
    lines: list[str] = []
    for term, bag in zip(run.terms, outcome.bags, strict=True):
        name = getattr(term.loss, "__name__", type(term.loss).__name__)
        lines += [f"{term.weight:g} x {name} over", *(f"  {line}" for line in bag.describe().splitlines())]
    if split.train.weight is not None:
        lines.append(
            f"each loss times the weight of its pair, divided by the mean weight: {spread(split.train.weight)}"
        )
    return "\n".join(lines)
