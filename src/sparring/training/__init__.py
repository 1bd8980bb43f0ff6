"""Training: steps, the loop, optimisers, checkpoints, the run folder, and finished runs read back from it.

Nothing here compares runs, builds an index or prints: messages go to loggers under `sparring`, progress to callbacks.
"""

from sparring.training.fitting import Fitted, fit
from sparring.training.fusing import FusedRun, fuse
from sparring.training.hub import push
from sparring.training.loop import TrainingProgress
from sparring.training.sentence_transformers import NegativesLoss, hard_negatives
from sparring.training.shims import lightning_callback, transformers_callback
from sparring.training.step import describe_batch, sample_steps
from sparring.training.tracking import track
from sparring.training.trained import Trained, load, run_vectors

__all__ = [
    "Fitted",
    "FusedRun",
    "NegativesLoss",
    "Trained",
    "TrainingProgress",
    "describe_batch",
    "fit",
    "fuse",
    "hard_negatives",
    "lightning_callback",
    "load",
    "push",
    "run_vectors",
    "sample_steps",
    "track",
    "transformers_callback",
]
