"""Train RecTools' SASRec in its own interpreter and print the seconds of each epoch as JSON; started by sequences.py.

python _rectools_child.py SEQUENCES.npz LOSS THREADS EPOCHS
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, Trainer
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

from _shared import Clock

SECONDS: list[tuple[float, float]] = []  # CPU and wall, of each epoch; RecTools copies a trainer and its callbacks


class Epochs(Callback):  # type: ignore[misc]
    """Adds the seconds of each epoch to the list."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.clock = Clock()

    def on_train_epoch_end(self, *_: Any) -> None:
        SECONDS.append(self.clock.read())


def main() -> None:
    source, loss, threads, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    with np.load(source) as file:
        users, items = file["queries"], file["items"]
    times = pd.to_datetime(np.arange(len(users)), unit="s")  # rows are in order
    table = pd.DataFrame({Columns.User: users, Columns.Item: items, Columns.Weight: 1.0, Columns.Datetime: times})

    def trainer(**_: Any) -> Trainer:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return Trainer(
            max_epochs=epochs, min_epochs=epochs, accelerator="cpu", logger=False, callbacks=[Epochs()], **quiet
        )

    model = SASRecModel(
        n_blocks=2,
        n_heads=1,
        n_factors=64,
        session_max_len=200,
        dropout_rate=0.1,
        loss=loss,
        n_negatives=256,
        batch_size=128,
        lr=0.001,
        get_trainer_func=trainer,
    )
    model.fit(Dataset.construct(table))
    print(json.dumps(SECONDS))


if __name__ == "__main__":
    main()
