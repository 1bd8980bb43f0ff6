"""Settings for text towers, shared by all recipes."""

from __future__ import annotations

import torch

from sparring.models.encoders import is_bag
from sparring.recipes.setup import Setup

BAG = Setup.of(
    dim=256,
    tau=0.02,
    query_tower="text",
    item_tower="text",
    encoder="bag",
    batch_size=1024,
    epochs=10,
    lr=0.01,
    schedule="linear",
    warmup=100,
    patience=None,
)
TRANSFORMER = BAG.replaced(encoder="minilm", tau=0.05, lr=2e-4, weight_decay=0.01, precision="bf16", pooling="auto")


def default_encoder() -> str:
    """The choice of encoder=auto: a transformer if there is a GPU to train it, else a bag of token vectors."""
    return "minilm" if torch.cuda.is_available() else "bag"


def text_setup(encoder: str) -> Setup:
    """The Setup that `--set encoder=NAME` starts from: cosines, a warm-up, then a linear decay to 0."""
    return (BAG if is_bag(encoder) else TRANSFORMER).replaced(encoder=encoder)
