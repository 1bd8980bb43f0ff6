"""Training of MSAC: warm-up, k-means, joint steps, revival of codewords, final assignment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.models.clusters.kmeans import k_means, nearest
from sparring.models.clusters.quantizer import Parts, Quantizer
from sparring.models.clusters.stream import ModalityBatch, Stream

ClusterProgress = Callable[[str, int, int], None]  # phase, steps done, steps in total
PER_WORD = 128  # items per codeword sampled for k-means
SAMPLED = 32  # items per codeword sampled for a revival
RAMP = 50  # steps of learning-rate warm-up, while Adam has no gradient statistics
SPLITS = 5  # most passes over the catalogue to make all clusters large enough


class CodedItems:
    """Codes and squared errors of items."""

    def __init__(self, n: int) -> None:
        self.primary, self.secondary = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int16)
        self.errors = torch.zeros(n, 2)  # of the primary vector and of the residuals

    def put(self, start: int, parts: tuple[Tensor, Tensor, Tensor]) -> int:
        primary, secondary, errors = parts
        end = start + len(primary)
        self.primary[start:end], self.secondary[start:end], self.errors[start:end] = primary, secondary, errors
        return end


def silent(phase: str, done: int, total: int) -> None:
    """Report no progress."""


@torch.no_grad()
def encode(
    model: Quantizer, stream: Stream, items: np.ndarray | None = None, progress: ClusterProgress = silent
) -> CodedItems:
    """Codes and errors of all items, or of these, in one pass."""
    coded = CodedItems(len(stream) if items is None else len(items))
    done = 0
    for batch in stream.through(items):
        projected = model.projections(batch)
        vectors = model.primary_vectors(projected, batch)
        primary = model.primary_codes(vectors)
        words = model.primary[primary]
        residuals = model.residuals(projected, batch, words)
        secondary = model.secondary_codes(residuals)
        first = (vectors - words).square().sum(1)
        second = (residuals - model.secondary[secondary]).square().sum(1)
        done = coded.put(done, (primary, secondary, torch.stack([first, second], 1)))
        progress("assigning", done, len(coded.primary))
    return coded


@torch.no_grad()
def vectors_of(model: Quantizer, stream: Stream, items: np.ndarray) -> Tensor:
    """(n, dim): the primary vectors of these items."""
    vectors, done = torch.empty(len(items), model.settings.dim, device=model.alive.device), 0
    for batch in stream.through(items):
        vectors[done : done + len(batch.items)] = model.primary_vectors(model.projections(batch), batch)
        done += len(batch.items)
    return vectors


@torch.no_grad()
def scale_inputs(model: Quantizer, stream: Stream, which: Sequence[int] | None = None) -> None:
    """Centre and scale the inputs of all modalities, or of these, to mean square 1, from a sample of items."""
    batch = stream.gather(stream.sample(8192, 1))
    centres = list(model.centre.split(tuple(model.widths.values())))
    for index in range(len(centres)) if which is None else which:
        rows = batch.rows[index][batch.present[index]]
        centres[index] = rows.mean(0) if len(rows) else torch.zeros_like(centres[index])
        spread = float((rows - centres[index]).square().mean().sqrt()) if len(rows) > 1 else 1.0
        model.scale[index] = 1 / spread if spread > 0 else 1.0
    model.centre.copy_(torch.cat(centres))


@torch.no_grad()
def refit(model: Quantizer, stream: Stream, which: int, primary: Tensor, secondary: Tensor) -> None:
    """Fit the projection of one modality by least squares to the positions that known items (codes >= 0) had.

    Codes give the position of each modality to within a cell: z_p + z_s. The mean deviation of the item's other
    modalities from their coded positions is added.
    """
    device, widths = model.alive.device, tuple(model.widths.values())
    if model.settings.normalize:
        scale_inputs(model, stream, (which,))
    square = torch.zeros(widths[which] + 1, widths[which] + 1, dtype=torch.float64, device=device)
    product = torch.zeros(widths[which] + 1, model.settings.dim, dtype=torch.float64, device=device)
    other = torch.ones(len(widths), 1, device=device)
    other[which] = 0
    for batch in stream.through():
        at = torch.from_numpy(batch.items)
        first, second = primary[at].to(device), secondary[at].to(device)
        here = batch.present[which] & (first >= 0)
        inner = model.secondary[second.clamp(min=0)].unflatten(1, (len(widths), -1)).transpose(0, 1)
        coded = model.primary[first.clamp(min=0)] + inner  # (modalities, B, dim)
        there = (batch.present * other).unsqueeze(2)
        off = ((model.projections(batch) - coded) * there).sum(0) / there.sum(0).clamp(min=1)
        rows = batch.rows[which][here].double()
        if model.settings.normalize:
            rows = (rows - model.centre.split(widths)[which]) * model.scale[which]
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype, device=device)], 1)
        square += rows.T @ rows
        product += rows.T @ (coded[which] + off)[here].double()
    square += 1e-4 * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=device)
    solution, linear = torch.linalg.solve(square, product).float(), model.project[which]
    linear.weight.copy_(solution[:-1].T)  # type: ignore[operator]
    linear.bias.copy_(solution[-1])  # type: ignore[operator]


@torch.no_grad()
def start_codebooks(model: Quantizer, stream: Stream) -> None:
    """Initialise both codebooks by k-means, the second on the residuals of the first."""
    generator = torch.Generator().manual_seed(model.settings.seed)
    k, k_inner = len(model.primary), len(model.secondary)
    model.primary.copy_(k_means(vectors_of(model, stream, stream.sample(k * PER_WORD, 2)), k, generator))
    batch = stream.gather(stream.sample(k_inner * PER_WORD, 3))
    projected = model.projections(batch)
    words = model.primary[model.primary_codes(model.primary_vectors(projected, batch))]
    model.secondary.copy_(k_means(model.residuals(projected, batch, words), k_inner, generator))


class Learning:
    """Warm-up and joint steps of a model: its optimiser and its batches."""

    def __init__(
        self, model: Quantizer, stream: Stream, history: list[dict[str, Any]], progress: ClusterProgress
    ) -> None:
        settings = model.settings
        books = [model.primary, model.secondary]
        others = [
            weight
            for weight in model.parameters()
            if weight.requires_grad and all(weight is not book for book in books)
        ]
        groups = [
            {"params": others, "rate": settings.lr},
            {"params": books, "rate": settings.lr * settings.codebook_rate},
        ]
        self.model, self.stream, self.history, self.progress = model, stream, history, progress
        self.optimizer = torch.optim.Adam(groups, lr=settings.lr)
        self.batches: Iterator[ModalityBatch] = stream.batches(settings.batch_size)
        self.seen = float(history[-1]["epoch"]) if history else 0.0

    def run(self, what: str, steps: int, quantise: bool) -> None:
        """Take steps, of alignment alone or of the full loss; a record of history every 50."""
        settings, window = self.model.settings, Window()
        for step, batch in enumerate(islice(self.batches, steps), 1):
            share = self._share(step, steps) if quantise and settings.decay else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = group["rate"] * share
            parts = self.model.parts(batch, quantise)
            loss = self.model.loss(parts)
            self.optimizer.zero_grad()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
            window.add(parts, len(batch.items))
            self.seen += len(batch.items) / len(self.stream)
            if quantise and settings.revive_every and step % settings.revive_every == 0 and step < steps:
                window.revived += revive(self.model, self.stream, len(self.history), self.optimizer)
            if step % 50 == 0 or step == steps:
                line = {"phase": what, "step": step, "epoch": self.seen, "tau": float(self.model.tau.detach())}
                self.history.append(line | window.close())
                window = Window()
                self.progress(what, step, steps)

    def _share(self, step: int, steps: int) -> float:
        return min(step / RAMP, 1.0) * (1 - (step - 1) / steps)


class Window:
    """Sums over the steps since the last record, read from the device only when closed."""

    def __init__(self) -> None:
        self.revived, self.items = 0, 0
        self.total: Tensor | None = None

    def add(self, parts: Parts, n: int) -> None:
        align = parts.align.detach().sum() / max(len(parts.align), 1)
        one = (
            torch.stack([align, parts.primary_error.detach().mean(), parts.secondary_error.detach().mean(), parts.norm])
            * n
        )
        self.total = one if self.total is None else self.total + one
        self.items += n

    def close(self) -> dict[str, float]:
        assert self.total is not None
        align, first, second, norm = (self.total / self.items).tolist()
        return {
            "align": align,
            "primary_error": first,
            "secondary_error": second,
            "norm": norm,
            "revived": self.revived,
        }


@torch.no_grad()
def revive(model: Quantizer, stream: Stream, seed: int, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Give codewords with too few items a part of the largest clusters; returns how many.

    Too few means, in a sample of the items, below a tenth of an equal share or below min_size.
    """
    k = len(model.primary)
    items = stream.sample(k * SAMPLED, 4 + seed)
    vectors = vectors_of(model, stream, items)
    own = model.primary_codes(vectors)
    sizes = torch.bincount(own, minlength=k)
    few = max(model.settings.min_size * len(items) / len(stream), 0.1 * len(items) / k)
    moved = split_largest(model, sizes, sizes < few, lambda donor: vectors[own == donor], seed)
    if optimizer is not None and model.primary in optimizer.state:
        optimizer.state[model.primary]["exp_avg"][moved] = 0  # momentum of the old position
    return len(moved) // 2


@torch.no_grad()
def split_largest(
    model: Quantizer, sizes: Tensor, small: Tensor, items_of: Callable[[int], Tensor], seed: int
) -> Tensor:
    """Move each small codeword into the currently largest cluster and split that by 2-means; returns moved codewords.

    Placing the codeword on an item would not do: in many dimensions an item is closer to its cluster's centre than to
    any other item, so the codeword would win that item alone.
    """
    generator = torch.Generator().manual_seed(seed)
    size = sizes.double().cpu()
    size[small.cpu()] = 0
    parts: dict[int, Tensor] = {}
    moved: list[int] = []
    for word in small.nonzero().flatten().tolist():
        while True:
            donor = int(size.argmax())
            if float(size[donor]) < 2 * model.settings.min_size:
                return torch.tensor(moved, dtype=torch.long, device=sizes.device)
            points = parts[donor] if donor in parts else items_of(donor)
            centres = _halves(points, generator) if len(points) > 1 else None
            if centres is not None:
                break
            size[donor] = 0  # all its items coincide
        own = nearest(points, centres)
        for half, index in enumerate((donor, word)):
            model.primary[index], parts[index] = centres[half], points[own == half]
        size[donor], size[word] = (float(size[donor]) * len(parts[index]) / len(points) for index in (donor, word))
        model.alive[word] = True
        moved += [donor, word]
    return torch.tensor(moved, dtype=torch.long, device=sizes.device)


def _halves(points: Tensor, generator: torch.Generator) -> Tensor | None:
    """Two centres of points, started on both sides of their mean; None if the points coincide."""
    mean = points.mean(0)
    away = points[int(torch.randint(len(points), (1,), generator=generator))] - mean
    if float(away.norm()) <= 1e-5 * float(points.norm(dim=1).mean()):
        away = points[int((points - mean).norm(dim=1).argmax())] - mean
        if float(away.norm()) <= 1e-5 * float(points.norm(dim=1).mean()):
            return None
    centres = torch.stack([mean - 0.1 * away, mean + 0.1 * away])
    for _ in range(5):
        own = nearest(points, centres)
        if own.min() == own.max():
            return None
        centres = torch.stack([points[own == 0].mean(0), points[own == 1].mean(0)])
    return centres


@torch.no_grad()
def settle(model: Quantizer, stream: Stream, progress: ClusterProgress = silent) -> CodedItems:
    """Codes of all items; with revival, every non-empty primary cluster has at least min_size items.

    Codewords with fewer are moved into the largest clusters. Those that still have fewer after a few rounds are
    retired.
    """
    least, k = model.settings.min_size, len(model.primary)
    if not model.settings.revive_every:
        return encode(model, stream, progress=progress)
    for round in range(SPLITS):
        coded = encode(model, stream, progress=progress)
        sizes = torch.bincount(coded.primary, minlength=k)
        if not bool((sizes < least).any()) or round == SPLITS - 1:
            break
        own = coded.primary.numpy()

        def items_of(donor: int, own: np.ndarray = own, round: int = round) -> Tensor:
            mine = np.flatnonzero(own == donor)
            chosen = np.random.default_rng((round, donor)).choice(mine, min(len(mine), 1024), replace=False)
            return vectors_of(model, stream, np.sort(chosen))

        if not len(split_largest(model, sizes, sizes < least, items_of, round)):
            break
    model.alive.copy_(sizes >= least)
    lost = np.flatnonzero(~model.alive.cpu().numpy()[coded.primary.numpy()])
    if len(lost):  # retiring a codeword changes the codes of its own items only
        again, index = encode(model, stream, lost), torch.from_numpy(lost)
        coded.primary[index], coded.secondary[index], coded.errors[index] = again.primary, again.secondary, again.errors
    return coded
