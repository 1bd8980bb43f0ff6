"""What `sparring diagnose` measures: a run as its folder left it, and other recipes' negatives put in place of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.types import Corpus, Outcome, Step
from sparring.data.batches import RandomBatches
from sparring.data.interactions import Split
from sparring.experiments.diagnose.measures import positives_on
from sparring.negatives import Negatives
from sparring.recipes import finding, settings
from sparring.recipes.finding import Recipe
from sparring.recipes.run import Run
from sparring.recipes.setup import parse_setup
from sparring.training import trained
from sparring.training.custom_towers import recipe_of
from sparring.training.step import contrast

WARM_STEPS = 50  # after which a cache or a memory holds what it would in training, and a streaming estimate knows the usual items


def own(folder: Path, split: Split, device: torch.device | str = "cpu") -> Run:
    """A run as its folder has it: the towers of the chosen epoch, where there is one, else of the checkpoint; the rest of the checkpoint.

    Without a checkpoint, what its negatives remember is filled anew (see `warm`).
    """
    meta = trained.read_meta(folder)
    setup = parse_setup(meta["setup"])
    if meta["recipe"] == "custom":
        how = "diagnose it there (docs/diagnose.md), or train it by a recipe of your own (docs/extending.md)"
        raise UserError(f"{folder} was composed in Python, and no recipe can be found that makes its negatives: {how}")
    # whatever the towers start from is overwritten, so they need no costly start
    run = settings.build(recipe_of(folder, meta), split.train, meta["arguments"], setup=setup.replaced(init="normal"))
    run = replace(run, setup=setup)
    model, checkpoint = folder / "model.safetensors", folder / "checkpoint.safetensors"
    if not model.is_file() and not checkpoint.is_file():
        raise UserError(f"{folder} has neither a model nor a checkpoint yet: train it for at least one epoch")
    if checkpoint.is_file():
        tensors, _ = files.read_tensors(checkpoint)
        modules = {
            name.removeprefix("module."): tensor for name, tensor in tensors.items() if name.startswith("module.")
        }
        files.load_tensors(run.modules(), modules, checkpoint)
    if model.is_file():
        files.load_tensors(run.model, files.read_tensors(model)[0], model)
    run.modules().to(device).eval()
    warm(run, split, 0 if checkpoint.is_file() else WARM_STEPS)
    return run


def opponent(name: str | Recipe, run: Run, split: Split, steps: int = WARM_STEPS) -> Run:
    """The negatives and the loss of a recipe, by name or itself, on the towers, temperature and batch size of a run.

    Where the recipe has a number n of shared candidates it is set so that both offer equally many, at most four batches full; where that
    cannot be, because a batch alone holds as many, to the batch size. Candidates drawn for each query keep the recipe's own number.
    """
    recipe = finding.find(name)
    arguments = settings.own_arguments(recipe)
    given: dict[str, Any] = {"opens": 0} if "opens" in arguments else {}
    found = _on(run, name, split, given)
    default = arguments.get("n", (int, None))[1]
    offered, shared = offers(found, split)
    if isinstance(default, int) and shared:
        size = min(run.setup.batches.batch_size, len(split.train))
        most, alike = offers(run, split)
        wanted = default + (min(most, 4 * size) if alike else size) - offered
        given["n"] = wanted if wanted >= 1 else size
        found = _on(run, name, split, given)
    warm(found, split, steps)
    return found


def _on(run: Run, name: str | Recipe, split: Split, given: dict[str, Any]) -> Run:
    made = settings.build(name, split.train, given, setup=run.setup.replaced(init="normal"))
    made = replace(made, model=run.model, temperature=run.temperature, setup=run.setup)
    made.modules().to(next(run.model.parameters()).device).eval()
    return made


def offers(run: Run, split: Split) -> tuple[int, bool]:
    """How many candidates a batch offers to a query, and whether all queries share them."""
    _, outcome = next(_steps(run, split))
    blocks = [block for bag in outcome.bags for block in bag.plain().blocks]
    return sum(block.ids.shape[-1] for block in blocks), all(block.shared for block in blocks)


@torch.no_grad()
def warm(run: Run, split: Split, steps: int) -> None:
    """Let the negatives and losses of a run rebuild what they keep of the catalogue, then remember `steps` batches; nothing is trained."""
    parts = nn.ModuleList(
        [term.negatives for term in run.terms] + [term.loss for term in run.terms if isinstance(term.loss, nn.Module)]
    )
    device = next(run.model.parameters()).device
    generator = torch.Generator(device).manual_seed(run.setup.seed)
    corpus = Corpus(0, run.model.item_vectors(), run.model.encode_queries, positives_on(split, device), generator)
    kept: list[Any] = list(parts.modules())
    for module in kept:
        if hasattr(module, "refresh"):
            module.refresh(corpus)
    observers = [
        module for module in kept if hasattr(module, "observe") and type(module).observe is not Negatives.observe
    ]
    if not observers:
        return
    for step, outcome in islice(_steps(run, split), steps):
        for observer in observers:
            observer.observe(step, outcome)


@torch.no_grad()
def _steps(run: Run, split: Split) -> Iterator[tuple[Step, Outcome]]:
    device = next(run.model.parameters()).device
    queries, items = (column.long().to(device) for column in split.train.pairs())
    generator = torch.Generator(device).manual_seed(run.setup.seed)
    positives = positives_on(split, device)
    for rows in RandomBatches(len(split.train), run.setup.batches.batch_size, run.setup.seed).epoch(0):
        at = rows.to(device)
        _, step, outcome = contrast(run, queries[at], items[at], generator, positives)
        yield step, outcome
