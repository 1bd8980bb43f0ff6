"""Encoders of text towers by name: opened from a package, a folder or the hub, and saved to a folder.

transformers and sentence-transformers can read the folder of a transformer. The folder of a bag holds config.json,
model.safetensors and, unless its tokens are hashed words, tokenizer.json. Either can be the `encoder` of another run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.data.texts.encoder import Pooling, TextEncoder, text_folder, text_library
from sparring.data.texts.tokenizers import FastTokenizer, WordTokenizer, find_tokenizer, package_folder
from sparring.models.text import BagEncoder, TransformerEncoder

BAGS = ("bag", "wordllama")
_BAG = "sparring-bag"  # model_type in config.json
_WORDLLAMA = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"


def is_bag(name: str) -> bool:
    """Whether an encoder of this name is a bag of token vectors."""
    return name in BAGS or (Path(name).is_dir() and _config(Path(name)).get("model_type") == _BAG)


def encoder_width(name: str, dim: int) -> int:
    """Dimensions of the encoder of this name; a new bag has `dim`."""
    if name in BAGS:
        return dim
    config = _config(text_folder(name))
    return int(next(config[key] for key in ("hidden_size", "dim", "d_model") if key in config))


def open_encoder(
    name: str, dim: int = 256, pooling: Pooling = "mean", sparse: bool = True, init_std: float = 0.1
) -> BagEncoder | TransformerEncoder:
    """The encoder of this name with its initial weights.

    `bag` takes the first `dim` of the 256 dimensions of the package wordllama if it is installed, otherwise random
    vectors of hashed words, both with standard deviation init_std; `wordllama` requires the package. `minilm`, a folder
    or a name on the hub is a transformer (data/texts/encoder.py), unless the folder holds a saved bag.
    """
    package = package_folder("wordllama") if name in BAGS else None
    if package is not None:
        return _wordllama(package, dim, sparse, init_std)
    if name == "bag":
        words = WordTokenizer()
        return BagEncoder(words, torch.empty(words.vocabulary, dim).normal_(0.0, init_std), sparse)
    if name == "wordllama":
        raise UserError(
            "encoder=wordllama needs its package: pip install wordllama, or use encoder=bag with random initial vectors"
        )
    return load_encoder(text_folder(name), pooling, sparse)


def load_encoder(
    folder: Path, pooling: Pooling = "mean", sparse: bool = True, weights: bool = True
) -> BagEncoder | TransformerEncoder:
    """The encoder in a folder; without `weights` only its shape, for the caller to fill."""
    config = _config(folder)
    try:
        if config.get("model_type") == _BAG:
            tokens = folder / "tokenizer.json"
            tokenizer = (
                FastTokenizer(tokens, special=False) if tokens.is_file() else WordTokenizer(int(config["vocabulary"]))
            )
            bag = BagEncoder(tokenizer, torch.zeros(int(config["vocabulary"]), int(config["dim"])), sparse, tokens)
            if weights:
                files.load_tensors(bag, files.read_tensors(folder / "model.safetensors")[0], folder)
            return bag
        source = TextEncoder(folder, "cpu")
        # Many checkpoints are in half precision, which would lose small updates.
        model = (source.load()[1] if weights else _untrained(folder)).float()
        return TransformerEncoder(model, find_tokenizer(folder), pooling, source.max_length, folder / "tokenizer.json")
    except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot load the text encoder in {folder}: {first_line(error)}") from error


def save_encoder(encoder: BagEncoder | TransformerEncoder, folder: Path, weights: bool = True) -> None:
    """Write an encoder to a folder; without `weights` only its shape and tokenizer."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)  # from an earlier run
        if isinstance(encoder, BagEncoder):
            _copy(encoder.tokenizer_file, folder / "tokenizer.json")
            shape = {"model_type": _BAG, "vocabulary": encoder.vectors.n, "dim": encoder.dim}
            files.write_json(folder / "config.json", shape)
            if weights:
                files.write_tensors(folder / "model.safetensors", files.tensors_of(encoder))
            return
        model: Any = encoder.model
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            _copy(encoder.tokenizer_file and encoder.tokenizer_file.with_name(name), folder / name)
        model.config.save_pretrained(folder)
        if weights:
            model.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):  # safetensors makes files that others cannot read
                file.chmod((folder / "config.json").stat().st_mode)
        _for_sentence_transformers(encoder, folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot write {folder}: {first_line(error)}") from error


def _for_sentence_transformers(encoder: TransformerEncoder, folder: Path) -> None:
    """Write the files with which SentenceTransformer(folder) gives the same vectors."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{kind}"}
        for i, (p, kind) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": encoder.dim, "pooling_mode_mean_tokens": encoder.pooling == "mean"}
    files.write_json(
        folder / "1_Pooling" / "config.json", {**pooling, "pooling_mode_cls_token": encoder.pooling == "cls"}
    )
    files.write_json(folder / "sentence_bert_config.json", {"max_seq_length": encoder.longest})
    files.write_json(folder / "modules.json", modules)


def _wordllama(package: Path, dim: int, sparse: bool, init_std: float) -> BagEncoder:
    vectors = safetensors.torch.load_file(package / _WORDLLAMA[0])["embedding.weight"].float()
    if dim > vectors.shape[1]:
        raise UserError(f"dim={dim} exceeds the {vectors.shape[1]} dimensions of wordllama's vectors")
    vectors = vectors[:, :dim] * (
        init_std / vectors.std()
    )  # the scale of random vectors, so one learning rate fits both
    return BagEncoder(find_tokenizer("wordllama"), vectors, sparse, package / _WORDLLAMA[1])


def _untrained(folder: Path) -> nn.Module:
    """An untrained model of the shape in the folder's config."""
    transformers = text_library("transformers")
    model: nn.Module = transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        trust_remote_code=False,
    )
    return model


def _config(folder: Path) -> dict[str, Any]:
    try:
        return files.read_json(folder / "config.json")
    except UserError as error:
        raise UserError(f"{folder} holds no text encoder: {error}") from error


def _copy(file: Path | None, to: Path) -> None:
    """Copy a file over `to`, or delete `to` if there is no such file."""
    if file is None or not file.is_file():
        to.unlink(missing_ok=True)
    elif file.resolve() != to.resolve():
        files.write(to, lambda beside: shutil.copyfile(file, beside))
