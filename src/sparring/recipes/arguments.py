"""Types of recipe arguments: descriptions, ranges for tuning, and the arguments that many recipes share.

alpha: Annotated[float, Range(0.0, 1.0), "exponent of the item counts"] = 1.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from sparring.negatives import Correction, DrawMethod, ExcludeKind


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, uniform or log-uniform."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class OneOf:
    """Unordered values; when left empty, all values of an argument declared as a Literal."""

    values: tuple[Any, ...] = ()


Form = Literal["paper", "release"]

AsIn = Annotated[Form, "follow the paper, or its released code where the two differ"]
Corrected = Annotated[Correction, "correction of logits for how often a candidate is drawn (logQ)"]
Excluded = Annotated[ExcludeKind, "excluded from a query's negatives: its positive, all its known positives, or none"]
PerQuery = Annotated[bool, "draw for each query instead of once for the batch"]
Redrawn = Annotated[DrawMethod, "how candidates are redrawn; expected is the closed form"]
UniformDraws = Annotated[int, "uniform draws from the catalogue"]
