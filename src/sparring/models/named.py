"""Models by name: one function each, from inputs and settings to a Retriever.

    @model(query_tower="history", batch_size=512)
    def mine(inputs: Inputs, settings: ModelSettings, *, blocks: Annotated[int, "number of blocks"] = 2) -> Retriever:
        item = item_tower(inputs, settings)
        return finished(inputs, settings, Mine(item, inputs.past, blocks), item)

The keyword arguments are the model's options: `--set model.blocks=3`. `sparring.models.finding` finds models of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

from sparring.core.errors import UserError
from sparring.models.build import finished, item_tower, query_tower
from sparring.models.graph import Graph, GraphItems
from sparring.models.inputs import Inputs
from sparring.models.retriever import Retriever
from sparring.models.settings import ModelSettings

Model = Callable[..., Retriever]
F = TypeVar("F", bound=Model)
_USUAL: dict[Model, Mapping[str, object]] = {}


def model(**usual: object) -> Callable[[F], F]:
    """Mark a function as a model that is usually trained with these shared settings, by flat name.

    They replace the recipe's, except those that define its method and those that the user sets.
    """

    def marked(function: F) -> F:
        _USUAL[function] = usual
        return function

    return marked


def usual_settings(function: Model) -> Mapping[str, object]:
    """The shared settings that a model is usually trained with."""
    return _USUAL.get(function, {})


def towers(inputs: Inputs, settings: ModelSettings) -> Retriever:
    """The towers that query_tower, item_tower and the columns of features name."""
    item = item_tower(inputs, settings)
    return finished(inputs, settings, query_tower(inputs, settings, item), item)


@model(query_tower="id", item_tower="id", item_features=(), item_vectors=None, query_features=(), query_vectors=None)
def ids(inputs: Inputs, settings: ModelSettings) -> Retriever:
    """One free vector per query and per item."""
    return towers(inputs, settings)


@model(query_tower="history")
def history(inputs: Inputs, settings: ModelSettings) -> Retriever:
    """A query as the mean, or an attention-weighted mean, of the vectors of its last items; new queries by their items.

    Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016.
    """
    return towers(inputs, settings)


@model()
def features(inputs: Inputs, settings: ModelSettings) -> Retriever:
    """Ids with columns of their tables and vectors of files, through fully connected layers."""
    if not (settings.item_features or settings.item_vectors or settings.query_features or settings.query_vectors):
        table = inputs.ids.item_table
        known = "there is no items table" if table is None else f"the items have {', '.join(table.columns)}"
        options = "item_features=COLUMN,COLUMN, item_vectors=FILE.npy, query_features or query_vectors"
        raise UserError(f"the model features needs columns or vectors: set {options}; {known}")
    return towers(inputs, settings)


@model(encoder="auto")
def text(inputs: Inputs, settings: ModelSettings) -> Retriever:
    """Queries and items by their texts, with one encoder or two."""
    return towers(inputs, settings)


@model(query_tower="id", item_tower="id", item_features=(), optimizer="adam", lr=0.001)
def lightgcn(
    inputs: Inputs, settings: ModelSettings, *, layers: Annotated[int, "layers of propagation"] = 3
) -> Retriever:
    """One free vector per id, averaged with those of its neighbours in the graph of the training pairs (LightGCN).

    Gradients are dense, so it trains with optimizer=adam.
    He et al., LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation, SIGIR 2020.
    """
    if inputs.sparse:
        raise UserError(
            "every step of lightgcn changes all rows of its table, which a row optimiser cannot: set optimizer=adam"
        )
    if layers < 0:
        raise UserError(f"layers must not be negative, got {layers}")
    graph = Graph(inputs.pairs, inputs.n_items, settings.dim, layers, settings.init_std)
    return finished(inputs, settings, graph, GraphItems(graph))


MODELS: dict[str, Model] = {each.__name__: each for each in (towers, ids, history, features, text, lightgcn)}
TABLES = ("towers", "ids")  # models that a recipe's spectral start may fill
