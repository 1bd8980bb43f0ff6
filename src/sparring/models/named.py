"""Models by name: one function each, from inputs and settings to a Retriever.

    @model(query_tower="history", batch_size=512)
    def mine(inputs: Inputs, settings: ModelSettings, *, blocks: Annotated[int, "number of blocks"] = 2) -> Retriever:
        item = item_tower(inputs, settings)
        return finished(inputs, settings, Mine(item, inputs.past, blocks), item)

The keyword arguments are the model's options: `--set model.blocks=3`. `sparring.models.finding` finds models of others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from torch import nn

from sparring.core.errors import UserError
from sparring.models.attention import HstuBlock, LigrBlock, SasRecBlock
from sparring.models.build import finished, history_items, item_tower, query_tower, with_columns
from sparring.models.graph import Graph, GraphItems
from sparring.models.hashed import HashedIds
from sparring.models.inputs import Inputs
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
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
    """A query as the mean, sum or attention-weighted mean of its last items' vectors; new queries by their items.

    Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016.
    """
    return towers(inputs, settings)


_SEQUENCES: dict[str, object] = {
    "rows": "sequences",
    "dim": 128,
    "history": 50,
    "score": "cosine",
    "tau": 0.07,
    "item_bias": False,
    "dropout": 0.0,
    "init_std": 0.02,
    "batch_size": 8192,
    "optimizer": "adam",
    "lr": 1e-3,
    "weight_decay": 0.0,
    "schedule": "step",
    "lr_decay": 1.0,
    "epochs": 100,
    "patience": 10,
}


def _of_blocks(positions: bool = True) -> Callable[[Callable[..., nn.Module]], Model]:
    """A model of blocks over the items of a query in order. The function makes a block; its options join the shared."""

    def made(block: Callable[..., nn.Module]) -> Model:
        def build(
            inputs: Inputs,
            settings: ModelSettings,
            *,
            blocks: Annotated[int, "blocks, one after another"] = 2,
            heads: Annotated[int, "heads of attention"] = 1,
            inner_dropout: Annotated[float, "dropout inside the network"] = 0.3,
            **own: Any,
        ) -> Retriever:
            if not inputs.past.ordered:
                raise UserError("a sequence model needs an order, and the data has no times: name their column", "time")
            if blocks < 1:
                raise UserError("a sequence model needs at least one block: set model.blocks=1 or more")
            if settings.history < 2:
                raise UserError(f"a sequence model reads at least two items, not history={settings.history}")
            if not 0 <= inner_dropout < 1:
                raise UserError(f"model.inner_dropout must be at least 0 and below 1, got {inner_dropout}")
            parts = [block(inputs, settings, heads, inner_dropout, **own) for _ in range(blocks)]
            item = item_tower(inputs, settings)
            read = history_items(inputs, settings, item)
            query = SequenceTower(read, inputs.past, settings.history, parts, inner_dropout, positions)
            return finished(inputs, settings, with_columns(inputs, settings, query), item)

        shared, more = (list(inspect.signature(each).parameters.values()) for each in (build, block))
        options = [each for each in more if each.kind is each.KEYWORD_ONLY]
        build.__signature__ = inspect.Signature([*shared[:-1], *options])  # type: ignore[attr-defined]
        build.__annotations__ |= {each.name: each.annotation for each in options}
        build.__name__, build.__qualname__, build.__doc__ = block.__name__, block.__qualname__, block.__doc__
        return model(**_SEQUENCES)(build)

    return made


@_of_blocks()
def sasrec(inputs: Inputs, settings: ModelSettings, heads: int, dropout: float) -> nn.Module:
    """The items of a query in order through causal self-attention, trained at every position (SASRec).

    Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018.
    """
    return SasRecBlock(settings.dim, heads, dropout)


@_of_blocks()
def ligr(
    inputs: Inputs,
    settings: ModelSettings,
    heads: int,
    dropout: float,
    *,
    multiplier: Annotated[int, "width of the feed-forward network, in units of dim"] = 4,
) -> nn.Module:
    """SASRec with the gated layers of LiGR (eSASRec).

    Tikhonovich et al., eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion, RecSys 2025.
    """
    return LigrBlock(settings.dim, heads, dropout, multiplier)


@_of_blocks(positions=False)
def hstu(inputs: Inputs, settings: ModelSettings, heads: int, dropout: float) -> nn.Module:
    """The items of a query through attention without softmax, with biases for distance in places and time (HSTU).

    Zhai et al., Actions Speak Louder than Words, ICML 2024.
    """
    return HstuBlock(settings.dim, heads, dropout, settings.history, inputs.past.time is not None)


@model(query_tower="history", pooling="mean", rows="sets", history=200, history_table="own")
def sets(inputs: Inputs, settings: ModelSettings) -> Retriever:
    """A query as the sum or mean of its items, trained by giving a random part of them and predicting the rest.

    Liang et al., Variational Autoencoders for Collaborative Filtering, WWW 2018 (Mult-DAE).
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
    if (settings.query_tower, settings.item_tower) != ("id", "id"):
        raise UserError("the model lightgcn averages vectors of ids: set query_tower=id and item_tower=id")
    _check_ids_alone(settings)
    graph = Graph(inputs.pairs, inputs.n_items, settings.dim, layers, settings.init_std)
    return finished(inputs, settings, graph, GraphItems(graph))


@model(query_tower="id", item_tower="id", item_features=(), item_vectors=None, query_features=(), query_vectors=None)
def hashed(
    inputs: Inputs, settings: ModelSettings, *, buckets: Annotated[int, "rows of each table"] = 65_536
) -> Retriever:
    """Ids that share the rows of a table of fixed size, by two hashes and a learned mixture.

    With query_tower=history, a query is its last items, whose vectors are hashed.
    Svenstrup et al., Hash Embeddings for Efficient Word Representations, NeurIPS 2017.
    """
    if settings.query_tower not in ("id", "history") or settings.item_tower != "id":
        raise UserError("the model hashed has tables of ids: set item_tower=id, and query_tower=id or history")
    _check_ids_alone(settings, queries=settings.query_tower == "id")
    if settings.tables == "sharded" or inputs.shards > 1:
        raise UserError("the tables of the model hashed are not sharded: choose fewer buckets, or the model ids")
    item = HashedIds(inputs.ids.item_ids.ids, buckets, settings.dim, settings.init_std, inputs.sparse)
    if settings.query_tower == "history":
        return finished(inputs, settings, query_tower(inputs, settings, item), item)
    query = HashedIds(inputs.ids.query_ids.ids, buckets, settings.dim, settings.init_std, inputs.sparse)
    return finished(inputs, settings, query, item)


def _check_ids_alone(settings: ModelSettings, queries: bool = True) -> None:
    """Refuse columns and vectors, which a model of ids alone would not read; `queries`: also those of queries."""
    names = ("item_features", "item_vectors", *(("query_features", "query_vectors") if queries else ()))
    for name in names:
        if getattr(settings, name):
            raise UserError(
                f"the model {settings.name} reads ids alone: leave out {name}, or choose the model features"
            )


MODELS: dict[str, Model] = {
    each.__name__: each for each in (towers, ids, history, sets, sasrec, ligr, hstu, lightgcn, hashed, features, text)
}
TABLES = ("towers", "ids")  # models that a recipe's spectral start may fill
