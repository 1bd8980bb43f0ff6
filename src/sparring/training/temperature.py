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
TRIAL = 2  # epochs of a trial
SHORTEST = 5 * TRIAL  # epochs of a training that is worth trials
log = logging.getLogger(__name__)


def choose_tau(run: Run, split: Split, device: torch.device, ranks: Ranks = ALONE) -> tuple[float, dict[float, float]]:
    """The temperature for a run that sets none, and the validation metric of each that was tried.

    The first epochs are trained at 0.1 and 0.14, then at the next temperature on the better side while the metric
    rises: which of two temperatures is better shows after two epochs. Without a validation part, in a training
    too short for trials, and with tables too large to copy it is TAU.
    """
    short = run.setup.training.epochs < SHORTEST
    if split.valid is None or short or run.setup.model.tables == "sharded":
        return TAU, {}
    tried: dict[float, float] = {}

    def score(tau: float) -> float:
        tried[tau] = _short_training(with_tau(copy.deepcopy(run), tau), split, device, ranks)
        log.info("temperature %s: %s %.4f", tau, run.setup.validation.select, tried[tau])
        return tried[tau]

    return peak(LADDER, START, score), tried


def with_tau(run: Run, tau: float) -> Run:
    """The run with this temperature."""
    return replace(run, temperature=Fixed(tau), setup=run.setup.replaced(tau=tau))


def _short_training(run: Run, split: Split, device: torch.device, ranks: Ranks) -> float:
    """The validation metric after the first epochs of a run."""
    trainer = Trainer(run, split, device, None, TrainingProgress(), ranks)
    return trainer.first(TRIAL)
