"""Build the towers that settings describe."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.memory_usage import machine_bytes
from sparring.core.ranks import Group, home, join
from sparring.data.features import Features
from sparring.data.histories import Histories
from sparring.data.interactions import Ids
from sparring.data.texts.encoder import Pooling
from sparring.data.texts.texts import Role, Texts, text_of, tokenized
from sparring.models.encoders import encoder_width, load_encoder, open_encoder
from sparring.models.histories import HistoryTower
from sparring.models.item_corrections import Augmented, Centroids, shared_vectors
from sparring.models.item_to_item import item_to_item
from sparring.models.least_squares import ials_model
from sparring.models.popularity import popularity_model
from sparring.models.retriever import Retriever
from sparring.models.rowwise_tables import RowWiseTable
from sparring.models.settings import ModelSettings, TextSettings
from sparring.models.sharded_tables import ShardedTable
from sparring.models.text import TextTower
from sparring.models.towers import FeatureTower, IdTower


def width(model: ModelSettings, text: TextSettings) -> int:
    """Dimensions of the vectors that are compared: those of the item tower, plus one for an item bias."""
    if model.item_tower == "text" and text.encoder is not None:
        return encoder_width(text.encoder, model.dim) + model.item_bias
    return (model.hidden[-1] if model.item_features else model.dim) + model.item_bias


def retriever(
    model: ModelSettings,
    text: TextSettings,
    ids: Ids,
    past: Histories | None = None,
    saved: Path | None = None,
    *,
    seed: int,
    sparse: bool,
    shards: int = 1,
) -> Retriever:
    """The two towers that the settings ask for, initialised from the seed.

    `saved` is a run folder that text towers are read from; `sparse` gives tables row-sparse gradients; `shards` > 1
    splits the item table into ranges of items.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        n_items = len(ids.item_ids)
        towers = text_towers(model, text, ids, saved, sparse)
        item: TextTower | IdTower | RowWiseTable | ShardedTable | FeatureTower | Centroids | Augmented
        item = towers["item"] if "item" in towers else _item_tower(model, ids, sparse, shards)
        query: nn.Module
        if "query" in towers:
            query = towers["query"]
        elif past is not None:
            inputs = item if model.history_table == "items" else id_table(model, n_items, item.dim, sparse)
            query = HistoryTower(inputs, past, model.history, "mean" if model.pooling == "cls" else model.pooling)
        else:
            query = id_table(model, len(ids.query_ids), item.dim, sparse)
        if model.centroids:
            item = Centroids(item)
        if model.auxiliary:
            shared, private = shared_vectors(n_items, model.auxiliary, model.private)
            item = Augmented(item, shared + private, model.auxiliary_init, sparse, private, seed)
        bias = IdTower(n_items, 1, 0.0, sparse) if model.item_bias else None
        return Retriever(query, item, model.score, item_bias=bias)


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


def _item_tower(
    model: ModelSettings, ids: Ids, sparse: bool, shards: int
) -> IdTower | RowWiseTable | ShardedTable | FeatureTower:
    n_items = len(ids.item_ids)
    if shards > 1:
        return ShardedTable(n_items, model.dim, shards, model.init_std, sparse)
    if not model.item_features:
        return id_table(model, n_items, model.dim, sparse)
    if ids.item_table is None:
        names = ",".join(model.item_features)
        raise UserError(f"item_features={names} needs an items table: give one with --items FILE")
    features = Features.from_table(ids.item_table, model.item_features)
    return FeatureTower(n_items, model.dim, features, model.hidden, init_std=model.init_std, sparse=sparse)


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


def text_sides(model: ModelSettings) -> list[Role]:
    """The sides whose tower reads texts: `query`, `item`, both or none."""
    towers: dict[Role, str] = {"query": model.query_tower, "item": model.item_tower}
    return [side for side, kind in towers.items() if kind == "text"]


def text_towers(
    model: ModelSettings, text: TextSettings, ids: Ids, saved: Path | None = None, sparse: bool = True
) -> dict[str, TextTower]:
    """The text towers that the settings ask for, by side."""
    pooling: Pooling = "cls" if model.pooling == "cls" else "mean"
    towers: dict[str, TextTower] = {}
    for side in text_sides(model):
        if towers and text.share_encoder:
            encoder = towers["query"].encoder
        elif saved is not None:
            encoder = load_encoder(saved / encoder_folder(text, side), pooling, sparse, weights=False)
        else:
            assert text.encoder is not None  # recipes.setup.check refuses it
            encoder = open_encoder(text.encoder, model.dim, pooling, sparse, model.init_std)
        if saved is not None:
            texts = Texts.load(saved / f"{side}_texts")
        else:
            columns = text.query_text if side == "query" else text.item_text
            texts = tokenized(text_of(ids, side, columns), encoder.tokenizer, text.max_len)
        towers[side] = TextTower(encoder, texts, text.max_len)
    return towers


def encoder_folder(text: TextSettings, side: str) -> str:
    """The sub-folder of a run folder that holds the encoder of a side."""
    return "encoder" if text.share_encoder else f"{side}_encoder"
