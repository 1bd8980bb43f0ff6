"""A small world whose queries and items have texts, and a tiny transformer to read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import torch

from sparring.data.interactions import Interactions, Split
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world

WORDS = [
    "red",
    "blue",
    "green",
    "shoe",
    "hat",
    "coat",
    "lamp",
    "chair",
    "wool",
    "silk",
    "small",
    "large",
    "old",
    "new",
    "warm",
    "cold",
]


def sentence_folder(out: Path) -> Path:
    """A tiny BERT without dropout, as sentence-transformers saves it: the mean over tokens."""
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(str(tiny_bert(out / "bert", dropout=0.0)), device="cpu").save(str(out / "model"))
    return out / "model"


def text_parts() -> Split:
    """60 queries and 40 items with texts of 0 to 8 words: items name their category, queries those of their items."""
    data = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    draw = np.random.default_rng(0)
    items = [" ".join(draw.choice(WORDS, draw.integers(1, 7))) for _ in range(40)]
    queries = [
        items[data.items[data.queries == query][0]] if (data.queries == query).any() else "" for query in range(60)
    ]
    assert data.item_table is not None
    table = data.item_table.with_columns(pl.Series("text", items))
    data = dataclasses.replace(data, item_table=table, query_table=pl.DataFrame({"text": queries}))
    return split(data, "random", valid=0.1, test=0.2, seed=1)


def ordered_text_parts() -> Split:
    """The same with times: the order of the rows."""

    def timed(part: Interactions | None) -> Interactions | None:
        return None if part is None else dataclasses.replace(part, time=np.arange(len(part)))

    parts = text_parts()
    train = timed(parts.train)
    assert train is not None
    return Split(train, timed(parts.valid), timed(parts.test))


def tiny_bert(folder: Path, dropout: float = 0.1, width: int = 16) -> Path:
    """A random BERT of two layers over WORDS, as a folder that transformers reads."""
    import tokenizers
    import transformers
    from tokenizers import normalizers, pre_tokenizers, processors

    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=40,
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertModel(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
