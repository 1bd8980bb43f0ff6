"""The interface between a run and its modules: events that training calls, and properties that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, cast

from torch import Tensor, nn

from sparring.core.types import Bag, Corpus, LossOutput, Outcome, Step

Event = Literal["observe", "refresh", "report"]


class Part(nn.Module):
    """A module of a run: a sampler, loss, temperature, tower or batch source. Every method and property has a default.

    The base class is optional. A plain nn.Module has the defaults, and takes part in an event by defining its method.
    All state belongs in registered buffers, so that it is moved, checkpointed and resumed with the run.

        class Seen(Part):
            def observe(self, step, outcome): self.count[step.batch.item_ids] += 1
    """

    in_place: bool = False  # refresh() updates buffers in place, so a captured CUDA graph stays valid
    sparse: bool = False  # the parameter `weight` is a table with sparse gradients, trained by a row rule
    undecayed: bool = False  # weight decay skips the parameter `weight`
    spread: bool = False  # each rank holds some rows of the table `weight`
    n_items: int | None = None  # the size of the catalogue it was built for

    def observe(self, step: Step, outcome: Outcome) -> None:
        """Update buffers after a training step; called without gradient."""

    def refresh(self, corpus: Corpus) -> None:
        """Rebuild state from all item vectors before an epoch; called without gradient."""

    def report(self) -> dict[str, float]:
        """Figures of the epoch that just ended, for its line in metrics.jsonl."""
        return {}

    def inner(self) -> nn.Module | None:
        """The tower that this one wraps."""
        return None


def innermost(module: nn.Module) -> nn.Module:
    """The tower under all towers that wrap it; a tower that wraps none is its own."""
    while isinstance(module, Part) and (inner := module.inner()) is not None:
        module = inner
    return module


def listeners(root: nn.Module, event: Event) -> list[Part]:
    """The modules under `root`, itself included, that define the method of an event."""
    default = getattr(Part, event)
    return [cast(Part, module) for module in root.modules() if getattr(type(module), event, default) is not default]


def n_ids(tower: nn.Module) -> int | None:
    """The number of ids of a tower or a part, if it has one: its `n`, or `num_embeddings` of an nn.Embedding."""
    return getattr(tower, "n", None) or getattr(tower, "num_embeddings", None)


class DetailedLoss(Protocol):
    """A loss whose `detailed` also returns by-products: the draw counts, or notes for its own observe()."""

    def __call__(self, step: Step, bag: Bag) -> Tensor: ...
    def detailed(self, step: Step, bag: Bag) -> LossOutput: ...


def loss_output(loss: Callable[[Step, Bag], Tensor], step: Step, bag: Bag) -> LossOutput:
    """The result of any loss: a function of (step, bag) that returns one value per query, or a DetailedLoss."""
    detailed: Callable[[Step, Bag], LossOutput] | None = getattr(loss, "detailed", None)
    return LossOutput(loss(step, bag)) if detailed is None else detailed(step, bag)
