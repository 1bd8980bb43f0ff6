"""Fitting a run: the training step, the loop, optimisers, checkpoints, and the run folder that they leave.

Methods are not here: a trainer sees terms, bags and losses only.
"""

from sparring.training.fitting import Fitted, fit
from sparring.training.step import describe_batch
from sparring.training.trained import Trained, load

__all__ = ["Fitted", "Trained", "describe_batch", "fit", "load"]
