"""Settings of the towers and of the texts they read: two of the groups of a Setup (recipes/setup.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def setting(default: Any, description: str, at_least: float | None = None, positive: bool = False) -> Any:
    """A dataclass field with a one-line description and, for a number, its lower bound."""
    metadata = {"description": description, "at_least": at_least, "positive": positive}
    return (
        field(default_factory=dict, metadata=metadata) if default == {} else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True)
class ModelSettings:
    """The model by name, its two towers, and how their vectors are compared."""

    name: str = setting(
        "towers", "the model (--model), a function that builds the towers; `sparring models` lists them"
    )
    options: Mapping[str, Any] = setting({}, "the model's own options: --set model.OPTION=VALUE")
    dim: int = setting(64, "dimensions of a vector in the tables and of the bag encoder", at_least=1)
    score: Literal["cosine", "dot"] = setting("cosine", "similarity of a query and an item vector")
    init: Literal["normal", "spectral"] = setting(
        "normal", "start of id tables: random numbers, or an SVD of the interactions"
    )
    init_std: float = setting(0.1, "standard deviation of a random start", positive=True)
    query_tower: Literal["id", "features", "history", "text", "constant", "items", "ridge"] = setting(
        "id", "input of the query tower; the last three belong to recipes that are solved, not trained by steps"
    )
    item_tower: Literal["id", "features", "text"] = setting(
        "id", "input of the item tower; id includes the features where columns or vectors are named"
    )
    history: int = setting(50, "most recent items that a history tower reads", at_least=1)
    history_table: Literal["items", "own"] = setting(
        "items", "vectors of the items of a history: the item tower's, or a table of their own"
    )
    pooling: Literal["mean", "sum", "attention", "cls", "last", "auto"] = setting(
        "mean", "how a tower pools items or tokens into one vector; auto is the text encoder's own"
    )
    item_features: tuple[str, ...] = setting((), "columns of the items table that the item tower reads")
    item_vectors: str | None = setting(None, "vectors of the items: FILE.npy, or FILE.npy:IDS; none reads none")
    query_features: tuple[str, ...] = setting((), "columns of the queries table that the query tower reads")
    query_vectors: str | None = setting(None, "vectors of the queries, as item_vectors")
    hidden: tuple[int, ...] = setting(
        (64,), "hidden layers of the perceptron over features; a last layer has dim units"
    )
    feature_dim: int | None = setting(
        None, "dimensions of an id's and a column's vector under the perceptron; none takes dim", at_least=1
    )
    item_bias: bool = setting(False, "add a learned bias per item to its scores")
    auxiliary: int = setting(0, "items that share one free vector in the item tower (DEXA); 0 adds none", at_least=0)
    private: int = setting(0, "most frequent items that have a free vector each (DEXA)", at_least=0)
    auxiliary_init: Literal["xavier", "zeros"] = setting("xavier", "start of the free vectors")
    centroids: bool = setting(False, "add the mean vector of an item's queries in the item tower (PRIME)")
    dropout: float = setting(0.0, "chance that a dimension of a query vector is zeroed in training")
    tables: Literal["auto", "replicated", "sharded"] = setting(
        "auto", "id tables: complete on every rank, or their rows sharded over the ranks"
    )


@dataclass(frozen=True)
class TextSettings:
    """The texts that text towers read, and their encoder."""

    encoder: str | None = setting(None, "bag, wordllama, minilm, auto, a folder, or a model on the Hugging Face hub")
    query_text: tuple[str, ...] = setting((), "columns that form a query's text; empty finds them")
    item_text: tuple[str, ...] = setting((), "columns that form an item's text; empty finds them")
    lora: int = setting(
        0, "rank of the matrices that are trained in place of a transformer's weights (LoRA); 0 trains all", at_least=0
    )
    share_encoder: bool = setting(True, "use one encoder for both towers")
    query_prompt: str | None = setting(None, "words before the text of every query; none takes the encoder's own")
    item_prompt: str | None = setting(None, "words before the text of every item; none takes the encoder's own")
    max_len: int | None = setting(
        32, "tokens of a text that are read; none reads as many as the encoder can", at_least=1
    )
