"""Run: towers, terms of the loss, temperature and settings; compose builds one from a Setup and Terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.part import Part, n_ids
from sparring.core.ranks import launched
from sparring.core.types import Positives
from sparring.data.batches import RandomBatches
from sparring.data.histories import Histories, histories
from sparring.data.interactions import Ids, Interactions
from sparring.data.texts.texts import find_texts
from sparring.losses import Fixed, Learned, Loss, Matryoshka, Symmetric, sampled_softmax
from sparring.models import finding
from sparring.models.build import device_bytes, solved_retriever, table_bytes, text_sides, width
from sparring.models.inputs import Inputs, no_pairs, no_past
from sparring.models.named import TABLES, Model
from sparring.models.retriever import Retriever
from sparring.models.settings import ModelSettings
from sparring.models.spectral_start import start_from
from sparring.negatives import Negatives
from sparring.recipes.setup import SOLVED, SWEPT, ClassifierSettings, Setup, check, check_sharded, parse_options

TAU = 0.12  # the temperature of cosines where none is set and none can be chosen (training/temperature.py)
OWN = "own"  # the name of a model that was passed to compose


@dataclass(frozen=True)
class Term:
    """One summand of the training loss: weight * mean of loss(step, negatives(step))."""

    weight: float
    negatives: Negatives
    loss: Loss = sampled_softmax

    def __post_init__(self) -> None:
        for name, valid, kind in (
            ("weight", isinstance(self.weight, float | int), "a number"),
            ("negatives", isinstance(self.negatives, Negatives), "Negatives"),
            ("loss", callable(self.loss), "a function"),
        ):
            if not valid:
                value = _short_repr(getattr(self, name))
                raise UserError(f"a Term is Term(weight, negatives, loss): its {name} must be {kind}, got {value}")


class Solver(Protocol):
    """Fits a model without steps, in closed form or by sweeps. One epoch of training is one sweep.

    `sweeps` updates the model in place at each `next`, without gradient, on the device of the model, and yields the
    loss per training pair. It starts from the model's current tables, so a resumed run continues. A closed form yields
    once.
    """

    @property
    def closed_form(self) -> bool: ...
    @property
    def weighted(self) -> bool:
        """Whether the weights of interactions count; if not, a pair is 0 or 1."""

    def sweeps(self, model: Retriever, data: Interactions) -> Iterator[float]: ...


@dataclass(frozen=True)
class Run:
    """A complete description of a training: towers, terms, temperature, settings, and the recipe that built it.

    A run is trained by steps on its terms, or it has a solver and no terms.
    """

    model: Retriever
    terms: tuple[Term, ...]
    temperature: nn.Module
    setup: Setup
    recipe: str = "custom"
    arguments: dict[str, Any] | None = None
    batches: RandomBatches | None = None  # a sampler of batches in place of random ones
    solver: Solver | None = None
    closed_form: int = 0  # dimensions of a closed form beside the trained towers (training/closed_form.py)
    trend: bool = False  # whether it follows the demand and knows newcomers (training/trend.py)

    @property
    def classifiers(self) -> ClassifierSettings | None:
        """The settings of the classifiers that are trained after the towers, if any (training/stages.py)."""
        return self.setup.classifiers if self.setup.classifiers.epochs else None

    def modules(self) -> nn.ModuleDict:
        """Everything with parameters or state, by name, for the optimiser and the checkpoint."""
        terms = {f"term{i}": term.negatives for i, term in enumerate(self.terms)}
        losses = {f"loss{i}": term.loss for i, term in enumerate(self.terms) if isinstance(term.loss, nn.Module)}
        batches = {} if self.batches is None else {"batches": self.batches}
        return nn.ModuleDict({"model": self.model, "temperature": self.temperature, **terms, **losses, **batches})


def compose(data: Interactions, setup: Setup, *terms: Term, model: Retriever | None = None) -> Run:
    """A custom run: the terms as given, the temperature from the setup, and the setup's model or one of your own.

    compose(split.train, setup, Term(1.0, negatives), model=Retriever(query_tower, item_tower))
    """
    if not isinstance(data, Interactions):
        raise UserError(f"compose needs the training part, Interactions such as split.train, got {_short_repr(data)}")
    if not isinstance(setup, Setup):
        raise UserError(f"compose needs a Setup, got {_short_repr(setup)}")
    check(setup)
    check_terms(terms, data.n_items)
    if setup.training.optimizer == "solver" or setup.model.query_tower in ("constant", "items", "ridge"):
        why = "optimizer=solver and query_tower=constant, items and ridge are for recipes with a solver"
        raise UserError(f"this run is trained by steps: {why}")
    setup = with_tables(setup, data.n_queries, data.n_items)
    for side in text_sides(setup.model):
        if not getattr(setup.text, f"{side}_text"):
            setup = setup.replaced(**{f"{side}_text": find_texts(data, side)})
    tau = setup.temperature.tau
    if tau is None:
        tau = TAU if setup.model.score == "cosine" else 1.0
        if setup.model.score == "dot" or setup.temperature.learn_tau:
            setup = setup.replaced(tau=tau)
    temperature = Learned(tau) if setup.temperature.learn_tau else Fixed(tau)
    terms = tuple(replace(term, loss=_wrapped(term.loss, setup)) for term in terms)
    dims = setup.training.matryoshka
    if model is not None:
        _check_cuts(dims, _own_model(model, data, setup))
        return Run(model, terms, temperature, setup.replaced(model_name=OWN))
    ids = Ids(data.query_ids, data.item_ids, data.query_table, data.item_table)
    model = build_towers(setup, ids, lambda: histories(data), known=data.positives)
    _check_cuts(dims, model)
    if setup.model.init == "spectral":
        start_from(data.positives(), model, setup.seed, tau)
    return Run(model, terms, temperature, setup)


def _wrapped(loss: Loss, setup: Setup) -> Loss:
    """The loss in both directions and over cut vectors, where the setup asks for them."""
    loss = Symmetric(loss) if setup.training.symmetric else loss
    dims = setup.training.matryoshka
    return Matryoshka(dims, loss, setup.model.score == "cosine") if dims else loss


def _check_cuts(dims: tuple[int, ...], model: Retriever) -> None:
    width = model.dim - (model.item_bias is not None)
    if max(dims, default=0) > width:
        raise UserError(f"matryoshka={max(dims)} exceeds the {width} dimensions of a vector: raise dim or lower it")


def _own_model(model: object, data: Interactions, setup: Setup) -> Retriever:
    """A model that was passed to compose, if it fits the data and no other is asked for."""
    if not isinstance(model, Retriever):
        raise UserError(f"model must be a Retriever(query, item), got {_short_repr(model)}")
    _check_ids(model, data.n_queries, data.n_items)
    if setup.model.name not in (OWN, ModelSettings().name):
        raise UserError(f"this run has a model of its own: leave out the model {setup.model.name}")
    return model


def _check_ids(model: Retriever, n_queries: int, n_items: int) -> None:
    """Refuse a model of more or fewer ids than the data has, as its towers say; a tower need not."""
    queries, items = ("queries", n_queries), ("items", n_items)
    for (ids, n), found in (
        (queries, n_ids(model.query)),
        (items, n_ids(model.item)),
        (items, model.n_items),  # given to a Retriever whose item tower does not say
    ):
        if found not in (None, n):
            raise UserError(f"the model has {found:,} {ids} and the data {n:,}: they must agree")


def solved(
    data: Interactions,
    setup: Setup,
    own: Setup,
    solver: Solver,
    past: Histories | None = None,
    neighbours: int | None = None,
) -> Run:
    """A run with a solver: settings from `own`, except those of `setup` that a solver reads.

    `past` and `neighbours` are for models of items (query_tower=items): each query's items, and the neighbours that an
    item keeps, where it does not keep all.
    """
    read = SOLVED if solver.closed_form else SOLVED | SWEPT
    given = setup.flat()
    setup = own.replaced(**{name: given[name] for name in read})
    check(setup)
    model = solved_retriever(setup.model, data.n_queries, data.n_items, past, neighbours, setup.seed)
    if setup.model.init == "spectral":
        start_from(data.positives(), model, setup.seed)
    return Run(model, (), Fixed(1.0), setup, solver=solver)


def check_terms(terms: tuple[Term, ...], n_items: int) -> None:
    """Refuse terms that cannot be trained: none, other values than Terms, negatives over a larger catalogue."""
    if not terms:
        raise UserError("a run needs at least one Term: compose(data, setup, Term(1.0, negatives))")
    for term in terms:
        if not isinstance(term, Term):
            raise UserError(f"compose needs Terms after the setup, got {_short_repr(term)}: write Term(1.0, negatives)")
        for module in term.negatives.modules():
            if isinstance(module, Part) and module.n_items is not None and module.n_items > n_items:
                size = f"{module.n_items:,} items, but the catalogue has {n_items:,}"
                raise UserError(f"{_short_repr(module)} is over {size}")


def _short_repr(value: object) -> str:
    """A value for an error message: itself if it is short, else its type."""
    return repr(value) if isinstance(value, str | int | float | type(None)) else type(value).__name__


def build_towers(
    setup: Setup,
    ids: Ids,
    recall: Callable[[], Histories] = no_past,
    saved: Path | None = None,
    function: Model | None = None,
    known: Callable[[], Positives] = no_pairs,
) -> Retriever:
    """The model that a setup names, or the function's, initialised from the seed; the others are as in Inputs."""
    settings, name = setup.model, finding.short(setup.model.name)
    inputs = Inputs(
        ids,
        setup.text,
        setup.seed,
        sparse=setup.training.optimizer != "adam",
        shards=1 if setup.classifiers.epochs else setup.classifiers.shards,
        saved=saved,
        recall=recall,
        known=known,
    )
    function = finding.find(setup.model.name) if function is None else function
    options = parse_options(function, settings.options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        model: object = function(inputs, settings, **options)
    if not isinstance(model, Retriever):
        raise UserError(f"the model {name} returned a {type(model).__name__}, not a Retriever")
    if saved is not None:  # the encoder of a text tower may be gone, which its width would be read from
        return model
    _check_ids(model, inputs.n_queries, inputs.n_items)
    expected = width(settings, setup.text)
    if model.dim != expected:
        how = f"end its towers with layers of settings.dim, or set dim={model.dim - settings.item_bias}"
        raise UserError(
            f"the model {name} has vectors of {model.dim} dimensions, not the {expected} it is set to: {how}"
        )
    return model


def with_tables(setup: Setup, n_queries: int, n_items: int) -> Setup:
    """The setup with tables=auto resolved: sharded if tables and optimiser state exceed a device's memory."""
    if setup.model.tables == "sharded":
        check_sharded(setup)
    if setup.model.tables != "auto" or setup.model.name not in TABLES or text_sides(setup.model):
        return setup
    needed = table_bytes(setup.model, setup.training.optimizer, n_queries, n_items)
    room = device_bytes(pick_device("auto"))
    if needed <= room:
        return setup
    sharded = setup.replaced(tables="sharded")
    try:
        check_sharded(sharded)
        if launched() == 1:
            raise UserError("start several ranks: torchrun, or --nproc")
    except UserError as error:
        sizes = f"the tables take {needed / 1e9:,.0f} GB and this device has {room / 1e9:,.0f}"
        raise UserError(f"{sizes}; {error}") from error
    return sharded
