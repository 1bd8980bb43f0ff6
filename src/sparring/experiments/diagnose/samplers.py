"""The runs that `sparring diagnose` measures: one from its folder, and its towers with other recipes' negatives."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.part import listeners
from sparring.core.types import Corpus
from sparring.data.interactions import Split
from sparring.models import finding as models
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.models.named import Model
from sparring.models.settings import ModelSettings
from sparring.recipes import finding, settings
from sparring.recipes.finding import Recipe
from sparring.recipes.run import OWN, Run
from sparring.recipes.setup import parse_setup
from sparring.training.checkpoint import own_tensors
from sparring.training.folder import model_of, read_meta, recipe_of
from sparring.training.step import check_steps, sample_steps

WARM_STEPS = 50  # fill a cache or a memory as in training, and let a streaming estimate see the usual items


def load_for_diagnosis(
    folder: Path,
    split: Split,
    device: torch.device | str = "cpu",
    recipe: str | Recipe | None = None,
    trust: bool = False,
    model: str | Model | None = None,
) -> Run:
    """A run from its folder: the towers of the chosen epoch, or of the checkpoint, and the checkpoint's other state.

    A recipe or a model that is not part of Sparring must be given or trusted, as in `load`. Without a checkpoint, the
    caches and memories of its negatives are refilled (see `warm_up`).
    """
    meta = read_meta(folder)
    setup = parse_setup(meta["setup"])
    if meta["recipe"] == "custom" and recipe is None:
        how = "diagnose it in Python, or train it with a custom recipe"
        raise UserError(f"{folder} was composed in Python, so no recipe builds its negatives: {how}")
    # the initial values of the towers are overwritten, so they need no costly initialisation
    builder = recipe_of(folder, meta, recipe, trust)
    name = setup.model.name
    function = None if name == OWN or models.is_ours(name) else model_of(folder, setup, model, trust)
    run = settings.build(builder, split.train, meta["arguments"], setup=setup.replaced(init="normal"), model=function)
    check_steps(run)
    run = replace(run, setup=run.setup.replaced(init=setup.model.init))
    towers, checkpoint = folder / "model.safetensors", folder / "checkpoint.safetensors"
    if not towers.is_file() and not checkpoint.is_file():
        raise UserError(f"{folder} has neither a model nor a checkpoint yet: train it for at least one epoch")
    if checkpoint.is_file():
        tensors, _ = own_tensors(checkpoint, meta["id"])
        modules = {
            name.removeprefix("module."): tensor for name, tensor in tensors.items() if name.startswith("module.")
        }
        files.load_tensors(run.modules(), modules, checkpoint)
    if towers.is_file():
        files.load_tensors(run.model, own_tensors(towers, meta["id"])[0], towers)
    run.modules().to(device).eval()
    warm_up(run, split, 0 if checkpoint.is_file() else WARM_STEPS)
    return run


def with_negatives_of(name: str | Recipe, run: Run, split: Split, steps: int = WARM_STEPS) -> Run:
    """A run with the negatives and the loss of a recipe, on the towers, temperature and batch size of another run.

    If the recipe has a number n of shared candidates, it is set so that both runs have equally many, at most four
    batches full; if a batch alone has as many, n is the batch size. Candidates drawn for each query keep the recipe's
    number.
    """
    recipe = finding.find(name)
    arguments = settings.own_arguments(recipe)
    chosen: dict[str, Any] = {"opens": 0} if "opens" in arguments else {}
    built = _on(run, name, split, chosen)
    default = arguments.get("n", (int, None))[1]
    candidates, shared = candidate_count(built, split)
    if isinstance(default, int) and shared:
        size = min(run.setup.batches.batch_size, len(split.train))
        most, both_shared = candidate_count(run, split)
        wanted = default + (min(most, 4 * size) if both_shared else size) - candidates
        chosen["n"] = wanted if wanted >= 1 else size
        built = _on(run, name, split, chosen)
    warm_up(built, split, steps)
    return built


def _on(run: Run, name: str | Recipe, split: Split, chosen: dict[str, Any]) -> Run:
    setup = run.setup.replaced(init="normal")
    if setup.model.name == OWN:  # the towers that the recipe builds are replaced: any will do
        setup = setup.replaced(model_name=ModelSettings().name, model_options={})
    built = settings.build(name, split.train, chosen, setup=setup)
    check_steps(built)
    built = replace(built, model=run.model, temperature=run.temperature, setup=run.setup)
    built.modules().to(next(run.model.parameters()).device).eval()
    return built


def candidate_count(run: Run, split: Split) -> tuple[int, bool]:
    """The number of candidates of a query in a batch, and whether all queries share them."""
    with torch.no_grad():
        _, _, outcome = next(sample_steps(run, split))
    blocks = [block for bag in outcome.bags for block in bag.plain().blocks]
    return sum(block.ids.shape[-1] for block in blocks), all(block.shared for block in blocks)


@torch.no_grad()
def warm_up(run: Run, split: Split, steps: int) -> None:
    """Refresh the negatives and losses of a run, then let them observe `steps` batches; nothing is trained."""
    parts = nn.ModuleList(
        [term.negatives for term in run.terms] + [term.loss for term in run.terms if isinstance(term.loss, nn.Module)]
    )
    device = next(run.model.parameters()).device
    generator = torch.Generator(device).manual_seed(run.setup.seed)
    corpus = Corpus(
        0, run.model.item_vectors(), run.model.encode_queries, split.train.positives().to(device), generator
    )
    if steps and isinstance(run.batches, ClusteredBatches):  # the first clusters, of the current query vectors
        if run.batches.keeps:
            everyone = torch.arange(split.train.n_queries, device=device)
            run.batches.memory.copy_(run.model.query_vectors(everyone))
        run.batches.refresh(replace(corpus, epoch=run.batches.start))
    for module in listeners(parts, "refresh"):
        module.refresh(corpus)
    observers = listeners(parts, "observe")
    if not observers:
        return
    for _, step, outcome in islice(sample_steps(run, split), steps):
        for observer in observers:
            observer.observe(step, outcome)
