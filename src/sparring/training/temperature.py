"""The temperature of a run that sets none: the best on the validation part after a short training."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import torch

from sparring.core.types import ALONE, Ranks
from sparring.data.interactions import Split
from sparring.losses import Fixed
from sparring.recipes.run import TAU, Run
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.peak import peak

LADDER = (0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)
START = 0.1
RISES = {1: 1.06, 2: 1.03}  # the gain after so many epochs that is worth a higher temperature: it shrinks later on
SHORTEST = 10  # epochs of a training that is worth trials
LONG = 24  # and of one that is worth trials of two epochs
log = logging.getLogger(__name__)


def choose_tau(run: Run, split: Split, device: torch.device, ranks: Ranks = ALONE) -> tuple[float, dict[float, float]]:
    """The temperature for a run that sets none, and the validation metric of each that was tried.

    The first epoch, of a long training the first two, is trained at 0.1 and 0.14, then at the next temperature on the
    better side while the metric rises. High temperatures learn faster and end lower, so a higher one has to be ahead
    by a factor of RISES. Without a validation part, in a training too short for trials, and with tables too large to
    copy it is TAU.
    """
    epochs = run.setup.training.epochs_on(device.type)
    if split.valid is None or epochs < SHORTEST or run.setup.model.tables == "sharded":
        return TAU, {}
    first = 2 if epochs >= LONG else 1
    tried: dict[float, float] = {}

    def score(tau: float) -> float:
        tried[tau] = _short_training(with_tau(copy.deepcopy(run), tau), split, device, ranks, first)
        log.info("temperature %s: %s %.4f", tau, run.setup.validation.select, tried[tau])
        return tried[tau]

    return peak(LADDER, START, score, RISES[first]), tried


def with_tau(run: Run, tau: float) -> Run:
    """The untrained run with this temperature; where an item bias starts at counts (spectral_start.py), it follows."""
    bias = run.model.item_bias
    if run.setup.model.init == "spectral" and bias is not None:
        with torch.no_grad():
            for weight in bias.parameters():
                weight.mul_(tau / float(run.temperature(torch.zeros(1, dtype=torch.long, device=weight.device))))
    return replace(run, temperature=Fixed(tau), setup=run.setup.replaced(tau=tau))


def _short_training(run: Run, split: Split, device: torch.device, ranks: Ranks, epochs: int) -> float:
    """The validation metric after the first epochs of a run."""
    return Trainer(run, split, device, None, TrainingProgress(), ranks).first(epochs)
