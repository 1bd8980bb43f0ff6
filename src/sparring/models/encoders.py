"""Encoders of text towers by name: opened from a package, a folder or the hub, and saved to a folder.

transformers and sentence-transformers can read the folder of a transformer. The folder of a bag holds config.json,
model.safetensors and, unless its tokens are hashed words, tokenizer.json; sentence-transformers then reads it as a
StaticEmbedding. Either can be the `encoder` of another run, and so can a StaticEmbedding that it has saved.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from sparring.core import files
from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.data.texts.encoder import (
    Dense,
    Pooling,
    TextEncoder,
    head_shape,
    load_head,
    module_kinds,
    plain_tensors,
    text_folder,
    text_library,
)
from sparring.data.texts.tokenizers import FastTokenizer, WordTokenizer, find_tokenizer, package_folder
from sparring.models.text import BagEncoder, TransformerEncoder

BAGS = ("bag", "wordllama")
_BAG = "sparring-bag"  # model_type in config.json
_STATIC = "0_StaticEmbedding"  # in the folder of a bag, for sentence-transformers
_WORDLLAMA = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"


def is_bag(name: str) -> bool:
    """Whether an encoder of this name is a bag of token vectors."""
    if name in BAGS or not Path(name).is_dir():
        return name in BAGS
    return _static(Path(name)) is not None or _is_ours(Path(name))


def encoder_place(name: str | None) -> Path | None:
    """The folder of the encoder of this name; None for a new bag."""
    return None if name is None or name in BAGS else text_folder(name)


def encoder_width(name: str, dim: int) -> int:
    """Dimensions of the encoder of this name; a new bag has `dim`."""
    if name in BAGS:
        return dim
    folder = text_folder(name)
    static = _static(folder)
    if static is not None and not _is_ours(folder):
        return _static_vectors(static).shape[1]
    config = _config(folder)
    wide = [] if config.get("model_type") == _BAG else [shape["outputs"] for shape in head_shape(folder) if shape]
    if wide:
        return int(wide[-1])
    return int(next(config[key] for key in ("hidden_size", "dim", "d_model") if key in config))


def open_encoder(
    name: str, dim: int = 256, pooling: Pooling | None = "mean", sparse: bool = True, init_std: float = 0.1
) -> BagEncoder | TransformerEncoder:
    """The encoder of this name with its initial weights.

    `bag` takes the first `dim` of the 256 dimensions of the package wordllama if it is installed, otherwise random
    vectors of hashed words, both with standard deviation init_std; `wordllama` requires the package. `minilm`, a folder
    or a name on the hub is a transformer (data/texts/encoder.py), unless the folder holds a saved bag or a
    StaticEmbedding. Without a pooling, the folder's own is taken.
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
    folder: Path, pooling: Pooling | None = "mean", sparse: bool = True, weights: bool = True
) -> BagEncoder | TransformerEncoder:
    """The encoder in a folder, pooled as it says itself if pooling is None.

    Without `weights` only its shape is read, for the caller to fill.
    """
    static = _static(folder)
    if static is not None and not _is_ours(folder):
        vectors = _static_vectors(static)
        return BagEncoder(
            FastTokenizer(static / "tokenizer.json", special=False), vectors, sparse, static / "tokenizer.json"
        )
    config = _config(folder)
    kinds = OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError
    with one_line(f"cannot load the text encoder in {folder}", *kinds):
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
        tokens, pooling = folder / "tokenizer.json", pooling or source.pooling
        head = load_head(folder, weights)
        return TransformerEncoder(model, find_tokenizer(folder), pooling, source.max_length, tokens, head)


def add_lora(encoder: BagEncoder | TransformerEncoder, rank: int) -> None:
    """Freeze a transformer and add trained matrices of this rank to all its linear layers; its head stays trained.

        W x  ->  W x + 2 B A x,   A (rank, in) random, B (out, rank) zero at the start

    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
    """
    if isinstance(encoder, BagEncoder):
        raise UserError(f"lora={rank} is for transformers, and this encoder is a bag of token vectors: set lora=0")
    peft = optional("peft", "lora", "LoRA")
    linear = [name for name, part in encoder.model.named_modules() if type(part) is nn.Linear]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear, lora_dropout=0.0, bias="none")
    encoder.model = peft.inject_adapter_in_model(config, encoder.model)
    for name, parameter in encoder.model.named_parameters():
        parameter.requires_grad = "lora_" in name


def _merged(model: nn.Module) -> nn.Module:
    """A transformer with the matrices of LoRA added to its weights; without any, the model itself."""
    adapted = [name for name, part in model.named_modules() if hasattr(part, "get_delta_weight")]
    if not adapted:
        return model
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name in adapted:
            layer: Any = model.get_submodule(name)
            layer.base_layer.weight += layer.get_delta_weight(layer.active_adapters[0])
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer.base_layer)
    return model


def save_encoder(
    encoder: BagEncoder | TransformerEncoder,
    folder: Path,
    weights: bool = True,
    prompts: Mapping[Literal["query", "item"], str] | None = None,
) -> None:
    """Write an encoder to a folder with the prompts of each side; without `weights` only its shape and tokenizer."""
    with one_line(f"cannot write {folder}", OSError, safetensors.SafetensorError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)  # from an earlier run
        if isinstance(encoder, BagEncoder):
            _copy(encoder.tokenizer_file, folder / "tokenizer.json")
            shape = {"model_type": _BAG, "vocabulary": encoder.vectors.n, "dim": encoder.dim}
            files.write_json(folder / "config.json", shape)
            _write_prompts(folder, prompts or {})
            if weights:
                files.write_tensors(folder / "model.safetensors", files.tensors_of(encoder))
                _as_static(encoder, folder)
            return
        model: Any = _merged(encoder.model) if weights else encoder.model
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            _copy(encoder.tokenizer_file and encoder.tokenizer_file.with_name(name), folder / name)
        model.config.save_pretrained(folder)
        if weights:
            model.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):  # safetensors makes files that others cannot read
                file.chmod((folder / "config.json").stat().st_mode)
        _write_prompts(folder, prompts or {})
        _for_sentence_transformers(encoder, folder, weights)


def _for_sentence_transformers(encoder: TransformerEncoder, folder: Path, weights: bool) -> None:
    """Write the files with which SentenceTransformer(folder) gives the same vectors."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
    width = int(encoder.model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    pooling = {"word_embedding_dimension": width, **{name: encoder.pooling == mode for mode, name in modes.items()}}
    files.write_json(folder / "1_Pooling" / "config.json", pooling)
    for at, layer in enumerate(encoder.head, 2):
        kinds.append((f"{at}_{type(layer).__name__}", type(layer).__name__))
        place = folder / kinds[-1][0]
        place.mkdir(exist_ok=True)
        if isinstance(layer, Dense):
            name = f"torch.nn.modules.{'linear' if layer.activation == 'Identity' else 'activation'}.{layer.activation}"
            linear = layer.linear
            shape = {"in_features": linear.in_features, "out_features": linear.out_features}
            files.write_json(
                place / "config.json", {**shape, "bias": linear.bias is not None, "activation_function": name}
            )
            if weights:
                _write_plain(place / "model.safetensors", layer.state_dict())
    files.write_json(folder / "sentence_bert_config.json", {"max_seq_length": encoder.longest})
    _write_modules(folder, kinds)


def _write_modules(folder: Path, kinds: list[tuple[str, str]]) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{kind}"}
        for i, (p, kind) in enumerate(kinds)
    ]
    files.write_json(folder / "modules.json", modules)


def _write_prompts(folder: Path, prompts: Mapping[Literal["query", "item"], str]) -> None:
    """Write the prompts where sentence-transformers reads them; `own_prompt` reads them back."""
    named = {"query": prompts.get("query", ""), "document": prompts.get("item", "")}
    files.write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": named, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def _write_plain(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file without our own hash, for readers of other libraries."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    files.write(path, lambda file: safetensors.torch.save_file(plain, file, {"format": "pt"}))


def _as_static(encoder: BagEncoder, folder: Path) -> None:
    """Write a second copy of a bag that sentence-transformers opens as a StaticEmbedding, weights multiplied in.

    Hashed words are no tokenizer that it knows: a bag of them has none. It reads texts of any length.
    """
    place = folder / _STATIC
    if encoder.tokenizer_file is None or not (folder / "tokenizer.json").is_file():
        (folder / "modules.json").unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        return
    place.mkdir(exist_ok=True)
    _copy(folder / "tokenizer.json", place / "tokenizer.json")
    _write_plain(place / "model.safetensors", {"embedding.weight": encoder.vectors.weight * encoder.weights.weight})
    _write_modules(folder, [(_STATIC, "StaticEmbedding")])


def _static(folder: Path) -> Path | None:
    """The folder of the StaticEmbedding with which a sentence encoder starts, if it does."""
    kinds = module_kinds(folder)
    if not kinds or kinds[0][0] != "StaticEmbedding":
        return None
    others = [kind for kind, _ in kinds[1:] if kind != "Normalize"]
    if others:
        raise UserError(f"{folder} has a module {others[0]} after its StaticEmbedding, which is not supported")
    return kinds[0][1]


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a bag that we saved; a StaticEmbedding of others may have no config.json."""
    return os.path.lexists(folder / "config.json") and _config(folder).get("model_type") == _BAG


def _static_vectors(place: Path) -> Tensor:
    """The vectors of a StaticEmbedding, one row for each token."""
    if not (place / "tokenizer.json").is_file():
        raise UserError(f"cannot load the text encoder in {place}: it has no tokenizer.json")
    tensors = plain_tensors(place)
    vectors = tensors.get("embedding.weight", tensors.get("embeddings") if len(tensors) == 1 else None)
    if vectors is None or vectors.dim() != 2:
        names = ", ".join(tensors) or "nothing"
        raise UserError(f"{place} holds {names}: a StaticEmbedding has the matrix embedding.weight")
    return vectors.float()


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
