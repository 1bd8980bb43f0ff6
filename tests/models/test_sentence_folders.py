"""Folders of sentence-transformers: opened and written with pooling, heads, prompts and static embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.texts.encoder import TextEncoder, own_prompt
from sparring.data.texts.texts import tokenize
from sparring.models import scorers
from sparring.models.encoders import encoder_width, is_bag, load_encoder, save_encoder
from sparring.models.text import BagEncoder, TextTower
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.trained import load
from support.texts import WORDS, text_parts, tiny_bert

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

TEXTS = ["red", "blue hat", "old lamp of wool", "small chair red shoe"]
PROMPTS = {"query": "new ", "document": "old "}
HEADS: dict[str, list[Any]] = {
    "mean": [],
    "cls": [modules.Normalize()],
    "lasttoken": [modules.Dense(16, 6, activation_function=nn.Tanh()), modules.Normalize()],
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"), dropout=0.0)


def theirs(bert: Path, out: Path, pooling: str) -> Any:
    """A model of the library with this pooling, its head and prompts, saved by the library."""
    inner = modules.Transformer(str(bert))
    model = library.SentenceTransformer(
        modules=[inner, modules.Pooling(16, pooling), *HEADS[pooling]], prompts=PROMPTS, device="cpu"
    )
    model.save(str(out))
    return model


def vectors(encoder: Any, texts: list[str]) -> np.ndarray:
    """Vectors by our tower."""
    found: np.ndarray = (
        TextTower(encoder.eval(), tokenize(texts, encoder.tokenizer, 16), 16).encode_texts(texts).numpy()
    )
    return found


@pytest.mark.parametrize("pooling", HEADS)
def test_what_the_library_saved_is_read_and_written_back(bert: Path, tmp_path: Path, pooling: str) -> None:
    """Pooling, Dense and Normalize of a saved model give the library's vectors, also after we have saved it again."""
    model = theirs(bert, tmp_path / "theirs", pooling)
    want = model.encode(TEXTS)
    encoder = load_encoder(tmp_path / "theirs", None)
    np.testing.assert_allclose(vectors(encoder, TEXTS), want, rtol=1e-4, atol=1e-5)
    assert encoder_width(str(tmp_path / "theirs"), 3) == want.shape[1] == encoder.dim
    save_encoder(encoder, tmp_path / "ours", prompts={"query": "new ", "item": "old "})
    again = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), want, rtol=1e-4, atol=1e-5)
    assert again.prompts == PROMPTS
    np.testing.assert_array_equal(vectors(load_encoder(tmp_path / "ours", None), TEXTS), vectors(encoder, TEXTS))
    unit = want / np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose(TextEncoder(tmp_path / "theirs", "cpu").encode(TEXTS), unit, rtol=0, atol=2e-3)


@pytest.mark.parametrize("pooling", HEADS)
def test_vectors_of_a_guide_are_those_of_the_library(bert: Path, tmp_path: Path, pooling: str) -> None:
    """Queries and items have their own prompts, in blocks of any size; every vector has length 1."""
    model = theirs(bert, tmp_path / "theirs", pooling)
    encode = scorers.text_vectors(str(tmp_path / "theirs"), "cpu")
    for role, by_role in (("query", model.encode_query), ("item", model.encode_document)):
        want = by_role(TEXTS, normalize_embeddings=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(scorers, "_BLOCK", 3)
            found = encode(TEXTS, role)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    assert encode([], "item").shape == (0, want.shape[1])


def test_a_run_keeps_prompts_pooling_and_head(bert: Path, tmp_path: Path) -> None:
    """Trained from such a folder, a run reads its prompts, and the library opens its encoder with equal vectors."""
    theirs(bert, tmp_path / "theirs", "lasttoken")
    parts: Split = text_parts()
    settings = {"encoder": str(tmp_path / "theirs"), "epochs": 1, "batch_size": 32, "max_len": 12, "n": 8}
    run = build("uns", parts.train, settings)
    fit(run, parts, tmp_path / "run", k=(10,), device="cpu")
    trained = load(tmp_path / "run")
    model = library.SentenceTransformer(str(tmp_path / "run" / "encoder"), device="cpu")
    for side, encode in (("query", model.encode_query), ("item", model.encode_document)):
        found = trained.encode_texts(WORDS, side).numpy()  # type: ignore[arg-type]
        assert found.shape == (16, 6)
        np.testing.assert_allclose(found, encode(WORDS), rtol=1e-4, atol=1e-5)
    assert own_prompt(tmp_path / "run" / "encoder", "item") == "old "
    other = build("uns", parts.train, {**settings, "query_prompt": "red ", "item_prompt": ""})
    assert other.model.query.prompt == "red "
    assert other.model.item.prompt == ""


def test_bags_are_static_embeddings(tmp_path: Path) -> None:
    """The library's StaticEmbedding opens as a bag, and a bag with a tokenizer opens as its StaticEmbedding."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: at for at, w in enumerate(WORDS)}, unk_token="red"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    static = library.SentenceTransformer(modules=[modules.StaticEmbedding(words, embedding_dim=5)], device="cpu")
    static.save(str(tmp_path / "theirs"))
    assert is_bag(str(tmp_path / "theirs"))
    assert encoder_width(str(tmp_path / "theirs"), 3) == 5
    bag = load_encoder(tmp_path / "theirs")
    assert isinstance(bag, BagEncoder)
    np.testing.assert_allclose(vectors(bag, TEXTS), static.encode(TEXTS), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        bag.weights.weight.uniform_(0.5, 2.0)
    save_encoder(bag, tmp_path / "ours")
    again = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), vectors(bag, TEXTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(vectors(load_encoder(tmp_path / "ours"), TEXTS), vectors(bag, TEXTS))
    run = build("uns", text_parts().train, {"encoder": str(tmp_path / "theirs"), "epochs": 1})
    assert run.model.dim == 5


def test_heads_bring_no_code_and_no_surprise(bert: Path, tmp_path: Path) -> None:
    """Other modules, activations, pickled weights, paths outside the folder and prompts left out are one line."""
    theirs(bert, tmp_path, "lasttoken")
    listed = json.loads((tmp_path / "modules.json").read_text())
    dense = tmp_path / listed[2]["path"]
    config, weights = (dense / "config.json").read_text(), (dense / "model.safetensors").read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            load_encoder(tmp_path, None)

    (dense / "config.json").write_text(config.replace("activation.Tanh", "activation.Evil"))
    refused("dense layer")
    (dense / "config.json").write_text(config)
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")
    refused(r"no model\.safetensors")
    (dense / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("cannot load the text encoder")
    (dense / "model.safetensors").write_bytes(weights)
    for change, match in (
        ({"type": "sentence_transformers.models.LSTM"}, "LSTM"),
        ({"path": "../elsewhere"}, "plain name"),
    ):
        (tmp_path / "modules.json").write_text(json.dumps([*listed[:2], {**listed[2], **change}]))
        refused(match)
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    refused("prompt")


def test_lora_trains_small_matrices_and_saves_a_complete_model(bert: Path, tmp_path: Path) -> None:
    """Only LoRA's matrices and no weight of the transformer change; the saved encoder gives the run's vectors."""
    pytest.importorskip("peft")
    parts = text_parts()
    settings = {"encoder": str(bert), "epochs": 1, "batch_size": 32, "max_len": None, "n": 8, "lora": 2, "lr": 0.01}
    run = build("uns", parts.train, settings)
    encoder = run.model.item.encoder
    assert run.model.item.max_len == encoder.longest == 40
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    fit(run, parts, tmp_path / "run", k=(10,), device="cpu")
    moved = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    trained = load(tmp_path / "run")
    assert torch.equal(trained.model.item_vectors(), run.model.item_vectors())
    assert not list((tmp_path / "run" / "encoder").glob("adapter*"))
    model = library.SentenceTransformer(str(tmp_path / "run" / "encoder"), device="cpu")
    want = model.encode(WORDS, normalize_embeddings=True)
    np.testing.assert_allclose(trained.encode_texts(WORDS, "item").numpy(), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="bag"):
        build("uns", parts.train, {"encoder": "bag", "lora": 2})
