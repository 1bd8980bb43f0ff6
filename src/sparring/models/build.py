"""Build the towers that settings describe."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import nn

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.memory_usage import machine_bytes
from sparring.core.ranks import Group, home, join
from sparring.data.features import Features
from sparring.data.histories import Histories
from sparring.data.texts.encoder import Pooling, own_prompt
from sparring.data.texts.texts import Role, Texts, text_of, tokenized
from sparring.models.encoders import add_lora, encoder_place, encoder_width, load_encoder, open_encoder
from sparring.models.hashed import HashedIds
from sparring.models.histories import HistoryTower, PastReader
from sparring.models.inputs import Inputs
from sparring.models.item_corrections import Augmented, Centroids, shared_vectors
from sparring.models.item_to_item import item_to_item
from sparring.models.least_squares import ials_model
from sparring.models.parts import DescribedHistory, FeatureTower
from sparring.models.popularity import popularity_model
from sparring.models.retriever import Retriever
from sparring.models.rowwise_tables import RowWiseTable
from sparring.models.settings import ModelSettings, TextSettings
from sparring.models.sharded_tables import ShardedTable
from sparring.models.text import BagEncoder, TextTower, TransformerEncoder, prompted
from sparring.models.towers import HistoryReader, IdTower, width_of


def width(model: ModelSettings, text: TextSettings) -> int:
    """Dimensions of the vectors that are compared: those of the item tower, plus one for an item bias."""
    if model.item_tower == "text" and text.encoder is not None:
        return encoder_width(text.encoder, model.dim) + model.item_bias
    return model.dim + model.item_bias


Tower = TextTower | IdTower | HashedIds | RowWiseTable | ShardedTable | FeatureTower


def item_tower(inputs: Inputs, settings: ModelSettings) -> Tower:
    """The item tower that the settings describe: ids, ids with features, or texts."""
    if settings.item_tower == "text":
        return text_tower_of(inputs, settings, "item")
    n_items, sparse = inputs.n_items, inputs.sparse
    if inputs.shards > 1:
        return ShardedTable(n_items, settings.dim, inputs.shards, settings.init_std, sparse)
    if settings.item_tower == "id" and not _described(settings, "item"):
        return id_table(settings, n_items, settings.dim, sparse)
    return feature_tower(inputs, settings, "item", settings.dim, with_id=settings.item_tower == "id")


def query_tower(inputs: Inputs, settings: ModelSettings, item: Tower) -> nn.Module:
    """The query tower that the settings describe: ids, columns, the history of items, with columns or not, or texts."""
    kind, described = settings.query_tower, _described(settings, "query")
    if kind == "text":
        shared = item.encoder if isinstance(item, TextTower) and inputs.text.share_encoder else None
        return text_tower_of(inputs, settings, "query", shared)
    if kind == "history":
        pooling: Literal["sum", "mean", "attention"] = (
            "sum" if settings.pooling == "sum" else "attention" if settings.pooling == "attention" else "mean"
        )
        history = HistoryTower(history_items(inputs, settings, item), inputs.past, settings.history, pooling)
        return with_columns(inputs, settings, history)
    if kind == "id" and not described:
        return id_table(settings, inputs.n_queries, item.dim, inputs.sparse)
    return feature_tower(inputs, settings, "query", item.dim, with_id=kind == "id")


def with_columns(inputs: Inputs, settings: ModelSettings, history: PastReader) -> HistoryReader:
    """A tower of histories, plus that of the queries' columns and vectors where the settings name some."""
    if not _described(settings, "query"):
        return history
    return DescribedHistory(history, feature_tower(inputs, settings, "query", width_of(history), with_id=False))


def check_described(inputs: Inputs, settings: ModelSettings) -> None:
    """Refuse columns that no table has, and vectors that do not fit their ids."""
    sides: tuple[Role, ...] = ("query", "item")
    for side in sides:
        _read_features(inputs, settings, side)


def _described(settings: ModelSettings, side: Role) -> bool:
    """Whether a tower reads columns or vectors."""
    return bool(
        settings.query_features or settings.query_vectors
        if side == "query"
        else settings.item_features or settings.item_vectors
    )


def feature_tower(inputs: Inputs, settings: ModelSettings, side: Role, dim: int, with_id: bool) -> FeatureTower:
    """The tower over the columns and vectors of a side."""
    features, vectors = _read_features(inputs, settings, side)
    return FeatureTower(
        inputs.n_queries if side == "query" else inputs.n_items,
        dim,
        features,
        settings.hidden,
        with_id,
        settings.init_std,
        inputs.sparse,
        vectors,
        settings.feature_dim,
    )


def _read_features(inputs: Inputs, settings: ModelSettings, side: Role) -> tuple[Features | None, np.ndarray | None]:
    """The columns and the vectors that the settings name for a side."""
    if side == "query":
        table, columns, place = inputs.ids.query_table, settings.query_features, settings.query_vectors
    else:
        table, columns, place = inputs.ids.item_table, settings.item_features, settings.item_vectors
    if columns and table is None:
        tables = "queries" if side == "query" else "items"
        names = ",".join(columns)
        raise UserError(f"{side}_features={names} needs a table of {tables}: give one with --{tables} FILE")
    features = Features.from_table(table, columns) if columns and table is not None else None
    return features, inputs.vectors(side, place) if place else None


def history_items(inputs: Inputs, settings: ModelSettings, item: Tower) -> nn.Module:
    """The tower that encodes the items of histories: the item tower, or a table of its own."""
    if settings.history_table == "items":
        return item
    return id_table(settings, inputs.n_items, item.dim, inputs.sparse)


def finished(inputs: Inputs, settings: ModelSettings, query: nn.Module, item: nn.Module) -> Retriever:
    """The Retriever of two towers, with the additions to the item tower and the bias that the settings ask for."""
    n_items, sparse = inputs.n_items, inputs.sparse
    if settings.centroids:
        item = Centroids(item)
    if settings.auxiliary:
        shared, private = shared_vectors(n_items, settings.auxiliary, settings.private)
        item = Augmented(item, shared + private, settings.auxiliary_init, sparse, private, inputs.seed)
    bias = IdTower(n_items, 1, 0.0, sparse) if settings.item_bias else None
    return Retriever(query, item, settings.score, n_items=n_items, item_bias=bias)


def solved_retriever(
    model: ModelSettings, n_queries: int, n_items: int, past: Histories | None, neighbours: int | None, seed: int
) -> Retriever:
    """The towers of a run with a solver, before its first sweep."""
    if model.query_tower == "constant":
        return popularity_model(n_queries, n_items)
    if model.query_tower == "ridge":
        return ials_model(n_queries, n_items, model.dim, model.init_std, seed)
    assert past is not None
    return item_to_item(past, n_items, neighbours)


def id_table(model: ModelSettings, n: int, dim: int, sparse: bool) -> IdTower | RowWiseTable:
    """A table of ids: complete in every process, or with tables=sharded its rows spread over the ranks."""
    if model.tables == "sharded":
        ranks = join(pick_device("auto"))
        if isinstance(ranks, Group):
            return RowWiseTable(n, dim, model.init_std, ranks, home())
    return IdTower(n, dim, model.init_std, sparse)


def table_bytes(model: ModelSettings, optimizer: str, n_queries: int, n_items: int) -> int:
    """Bytes of the id tables and of their optimiser's state.

    A row takes 4 dim bytes. row-adam adds two such rows and a number, row-adagrad a number, adam three such rows.
    """
    per_row = {"row-adam": 12 * model.dim + 4, "row-adagrad": 4 * model.dim + 4, "adam": 16 * model.dim}[optimizer]
    return per_row * (n_items + (n_queries if model.query_tower == "id" else 0))


def device_bytes(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def has_tables(model: ModelSettings) -> bool:
    """Whether a model is made of tables of ids alone, which can start from an SVD."""
    described = _described(model, "query") or _described(model, "item")
    return (
        model.name in ("towers", "ids", "history", "sets")
        and model.query_tower in ("id", "history")
        and model.item_tower == "id"
        and model.tables != "sharded"
        and not described
    )


def text_sides(model: ModelSettings) -> list[Role]:
    """The sides whose tower reads texts: `query`, `item`, both or none."""
    towers: dict[Role, str] = {"query": model.query_tower, "item": model.item_tower}
    return [side for side, kind in towers.items() if kind == "text"]


def text_tower_of(
    inputs: Inputs, settings: ModelSettings, side: Role, encoder: BagEncoder | TransformerEncoder | None = None
) -> TextTower:
    """The text tower of a side, with its own encoder unless one is given."""
    text, saved, shared = inputs.text, inputs.saved, encoder is not None
    pooling: Pooling | None = "mean"
    if settings.pooling in ("cls", "last", "auto"):
        pooling = None if settings.pooling == "auto" else settings.pooling
    if encoder is None and saved is not None:
        encoder = load_encoder(saved / encoder_folder(text, side), pooling, inputs.sparse, weights=False)
    elif encoder is None:
        if text.encoder is None:
            raise UserError("a text tower needs an encoder: set encoder to bag, wordllama, minilm, or a folder")
        encoder = open_encoder(text.encoder, settings.dim, pooling, inputs.sparse, settings.init_std)
    if text.lora and not shared:
        add_lora(encoder, text.lora)
    length = encoder.longest if text.max_len is None else text.max_len
    prompt = text.query_prompt if side == "query" else text.item_prompt
    if prompt is None:
        folder = saved / encoder_folder(text, side) if saved is not None else encoder_place(text.encoder)
        prompt = "" if folder is None else own_prompt(folder, side)
    if saved is not None:
        return TextTower(encoder, Texts.load(saved / f"{side}_texts"), length, prompt)
    columns = text.query_text if side == "query" else text.item_text
    texts = prompted(text_of(inputs.ids, side, columns), prompt)
    return TextTower(encoder, tokenized(texts, encoder.tokenizer, length), length, prompt)


def encoder_folder(text: TextSettings, side: str) -> str:
    """The sub-folder of a run folder that holds the encoder of a side."""
    return "encoder" if text.share_encoder else f"{side}_encoder"
