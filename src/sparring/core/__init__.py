"""Values that samplers, losses and towers exchange, and tools that all packages need: errors, files, ranks, workers.

Nothing here knows about data, models or methods.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring.core.errors import UserError as UserError
    from sparring.core.exclusion import Exclude as Exclude
    from sparring.core.exclusion import Positives as Positives
    from sparring.core.part import Part as Part
    from sparring.core.topk import top_k as top_k
    from sparring.core.types import Bag as Bag
    from sparring.core.types import Batch as Batch
    from sparring.core.types import Candidates as Candidates
    from sparring.core.types import Corpus as Corpus
    from sparring.core.types import LossOutput as LossOutput
    from sparring.core.types import Outcome as Outcome
    from sparring.core.types import Provenance as Provenance
    from sparring.core.types import Step as Step

# Loaded on first use: the command line needs UserError, and `sparring --help` must not wait for torch.
_HOMES = {
    "Bag": "types",
    "Batch": "types",
    "Candidates": "types",
    "Corpus": "types",
    "Exclude": "exclusion",
    "LossOutput": "types",
    "Outcome": "types",
    "Part": "part",
    "Positives": "exclusion",
    "Provenance": "types",
    "Step": "types",
    "UserError": "errors",
    "top_k": "topk",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparring.core' has no attribute {name!r}")
    return getattr(import_module(f"sparring.core.{_HOMES[name]}"), name)
