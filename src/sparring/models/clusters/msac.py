"""Clusters of items learned from several modalities, kept up to date as the catalogue changes: MSAC."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.tensor_files import Where, load_tensors, save_tensors
from sparring.data.interactions import Vocabulary
from sparring.models.clusters import learning as training
from sparring.models.clusters.codes import Codes
from sparring.models.clusters.learning import Found, Progress, nothing
from sparring.models.clusters.quantizer import ROBUST, Quantizer, Settings
from sparring.models.clusters.stream import Modalities, Stream


@dataclass(frozen=True)
class Drift:
    """How well codebooks still fit a catalogue.

    `error` is the mean squared distance from a primary vector to its codeword; `outside` the share of items that lie farther from theirs
    than 95 % of the items did when the codebooks were learned (0.05 where nothing has changed); `changed` the share of known items that
    would have another primary cluster, or another cell, if they were assigned today.
    """

    items: int
    new: int  # items that have no code yet
    error_learned: float
    error_known: float | None  # None where there are no such items
    error_new: float | None
    outside_known: float | None
    outside_new: float | None
    changed_primary: float | None
    changed_cell: float | None


class MSAC:
    """Clusters of items from all their modalities at once: projections that align them, a primary and a secondary codebook (MSAC of ESANS).

    `fit` learns (see Quantizer for the equations): some steps of alignment alone, both codebooks by k-means, then all jointly; codewords
    that lose their items are moved, and a last pass assigns all items. With the ROBUST settings every primary cluster that holds items
    holds at least `min_size`, and all do unless the items have too few distinct vectors; LITERAL promises nothing. Items are read
    in blocks: memory does not grow with the catalogue, but for some 20 bytes an item.

    The clusters follow a catalogue: `assign` codes new items at once, `drift` tells how well the codebooks still fit, `update` goes on
    learning from the present state. A codeword keeps its number, so a cluster remains the same cluster. Vectors of another encoder, or of a
    factorisation made anew, mean nothing to projections that were learned before: `refit` takes such a modality over.

        msac = MSAC(modalities.widths, replace(ROBUST, k_primary=100));  codes = msac.fit(modalities, data.item_ids)
        msac.save("codes.safetensors", codes);  MSAC.load("codes.safetensors").assign(tomorrow, ids, known=codes)

    Xing et al., ESANS, WWW 2025, section 3.2.
    """

    def __init__(self, widths: dict[str, int], settings: Settings = ROBUST, device: str | torch.device = "cpu") -> None:
        self.settings = settings
        self.model = Quantizer(widths, settings).to(device)
        self.history: list[dict[str, Any]] = []  # one line per 50 steps
        self.learned: dict[str, float] = {}  # errors of the items when the codebooks were last learned

    def fit(self, modalities: Modalities, ids: Vocabulary | None = None, progress: Progress = nothing) -> Codes:
        """Learn from the beginning, and code all items; `ids` are their original ids, which the codes keep."""
        settings, stream = self.settings, self._stream(modalities)
        _check_size(len(stream), settings)
        device = self.model.alive.device
        self.model, self.history = Quantizer(self.model.widths, settings).to(device), []
        if settings.normalize:
            training.scale_inputs(self.model, stream)
        learning = training.Learning(self.model, stream, self.history, progress)
        learning.run("aligning", settings.warmup if self.model.pairs else 0, quantise=False)
        progress("k-means", 0, 1)
        training.start_codebooks(self.model, stream)
        learning.run("learning", settings.steps, quantise=True)
        return self._settled(stream, ids, progress)

    def update(
        self, modalities: Modalities, ids: Vocabulary | None = None, steps: int = 500, progress: Progress = nothing
    ) -> Codes:
        """Go on learning for some joint steps from the present state, on the catalogue as it is now, and code all its items."""
        stream = self._stream(modalities, seed=len(self.history))
        _check_size(len(stream), self.settings)
        self._check_learned()
        training.Learning(self.model, stream, self.history, progress).run("updating", steps, quantise=True)
        return self._settled(stream, ids, progress)

    def assign(
        self,
        modalities: Modalities,
        ids: Vocabulary | None = None,
        known: Codes | None = None,
        progress: Progress = nothing,
    ) -> Codes:
        """The codes of all items under the present codebooks; items that `known` has (by their ids) keep theirs and are not read."""
        self._check_learned()
        stream = self._stream(modalities)
        if known is None:
            return self._codes(training.encode(self.model, stream, progress=progress), ids)
        self._check_codes(known)
        at = _places(known, ids, len(stream))
        old = torch.from_numpy(np.flatnonzero(at >= 0))
        new = torch.from_numpy(np.flatnonzero(at < 0))
        fresh, found = training.encode(self.model, stream, new.numpy(), progress), Found(len(stream))
        found.primary[new], found.secondary[new] = fresh.primary, fresh.secondary
        found.primary[old], found.secondary[old] = known.primary[at[old]], known.secondary[at[old]]
        return self._codes(found, ids)

    def drift(
        self, modalities: Modalities, known: Codes, ids: Vocabulary | None = None, progress: Progress = nothing
    ) -> Drift:
        """How well the codebooks fit the items now, against how they fitted when they were learned; nothing is changed."""
        self._check_learned()
        self._check_codes(known)
        stream = self._stream(modalities)
        found = training.encode(self.model, stream, progress=progress)
        places = torch.from_numpy(_places(known, ids, len(stream)))
        old = places >= 0
        at = places[old]
        error = found.errors[:, 0]
        moved = found.primary[old] != known.primary[at]
        return Drift(
            items=len(stream),
            new=int((~old).sum()),
            error_learned=self.learned["error"],
            error_known=_mean(error[old]),
            error_new=_mean(error[~old]),
            outside_known=_mean(error[old] > self.learned["limit"]),
            outside_new=_mean(error[~old] > self.learned["limit"]),
            changed_primary=_mean(moved),
            changed_cell=_mean(moved | (found.secondary[old] != known.secondary[at])),
        )

    def refit(self, name: str, modalities: Modalities, known: Codes, ids: Vocabulary | None = None) -> None:
        """Take over a modality whose vectors come from another encoder, or from a factorisation made anew.

        Its projection is fitted by least squares so that known items come to lie where their codes and their other modalities say that they
        were. Everything else stays as it is; `update` may follow.
        """
        self._check_learned()
        self._check_codes(known)
        if name not in self.model.names:
            raise UserError(
                f"modality {name!r} is unknown: these clusters were learned from {', '.join(self.model.names)}"
            )
        which = self.model.names.index(name)
        if name in modalities.names and modalities.widths[name] != self.model.widths[name]:
            widths = {**self.model.widths, name: modalities.widths[name]}
            self.model = _rewidened(self.model, widths, which)
        stream = self._stream(modalities)
        at = torch.from_numpy(_places(known, ids, len(stream)))
        primary, secondary = (
            torch.where(at >= 0, codes[at.clamp(min=0)].long(), -1) for codes in (known.primary, known.secondary)
        )
        training.refit(self.model, stream, which, primary, secondary)

    def vectors(self, modalities: Modalities, items: np.ndarray) -> Tensor:
        """(n, dim): what primary codewords are compared with, of some items."""
        return training.vectors_of(self.model, self._stream(modalities), items).cpu()

    def save(self, path: Where, codes: Codes) -> None:
        """Codes and everything that assigns and updates them in one safetensors file; Codes.load reads the codes alone."""
        tensors, meta = codes.tensors()
        tensors |= {f"msac.{name}": tensor for name, tensor in self.model.state_dict().items()}
        settings = dataclasses.asdict(self.settings)
        own = {"widths": self.model.widths, "settings": settings, "history": self.history, "learned": self.learned}
        save_tensors(path, tensors, {**meta, "msac": own})

    @classmethod
    def load(cls, path: Where, device: str | torch.device = "cpu") -> MSAC:
        """Read what `save` wrote."""
        tensors, meta = load_tensors(path, "msac")
        try:
            made = cls(meta["widths"], Settings(**meta["settings"]), device)
            made.model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"{path} does not fit this version: {' '.join(str(error).split())[:200]}; cluster again"
            ) from error
        made.history, made.learned = meta["history"], meta["learned"]
        return made

    def _stream(self, modalities: Modalities, seed: int = 0) -> Stream:
        for name, width in self.model.widths.items():
            if name not in modalities.names:
                raise UserError(
                    f"modality {name!r} is missing: these clusters were learned from {', '.join(self.model.names)}"
                )
            if modalities.widths[name] != width:
                raise UserError(
                    f"modality {name!r} has width {modalities.widths[name]}; these clusters were learned from width {width}"
                )
        return Stream(modalities, self.settings.seed + seed, self.model.alive.device, self.model.names)

    def _settled(self, stream: Stream, ids: Vocabulary | None, progress: Progress) -> Codes:
        found = training.settle(self.model, stream, progress)
        error = np.sort(found.errors[:, 0].numpy())
        limit = error[min(int(0.95 * len(error)), len(error) - 1)]
        self.learned = {
            "error": float(error.mean()),
            "limit": float(limit),
            "secondary_error": float(found.errors[:, 1].mean()),
        }
        return self._codes(found, ids)

    def _codes(self, found: Found, ids: Vocabulary | None) -> Codes:
        return Codes(found.primary, found.secondary, self.model.primary, self.settings.k_secondary, ids)

    def _check_learned(self) -> None:
        if not self.learned:
            raise UserError("these codebooks have learned nothing yet: call fit first")

    def _check_codes(self, known: Codes) -> None:
        if (known.k_primary, known.k_secondary) != (self.settings.k_primary, self.settings.k_secondary):
            mine = f"{self.settings.k_primary} x {self.settings.k_secondary}"
            raise UserError(
                f"the known codes are {known.k_primary} x {known.k_secondary}, these codebooks {mine}: they do not belong together"
            )


def _places(known: Codes, ids: Vocabulary | None, n: int) -> np.ndarray:
    """(n,): where each item is among the known ones, -1 where it is not; by number where there are no ids."""
    if known.ids is not None and ids is not None:
        return known.ids.encode(ids.ids)
    return np.where(np.arange(n) < len(known), np.arange(n), -1)


def _rewidened(model: Quantizer, widths: dict[str, int], which: int) -> Quantizer:
    """The same model but for one modality of another width, whose projection is to be fitted."""
    made = Quantizer(widths, model.settings).to(model.alive.device)
    centres, kept = list(model.centre.split(tuple(model.widths.values()))), model.state_dict()
    centres[which] = centres[which].new_zeros(tuple(widths.values())[which])
    kept |= {"centre": torch.cat(centres), f"project.{which}.weight": made.state_dict()[f"project.{which}.weight"]}
    made.load_state_dict(kept)
    return made


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _check_size(n: int, settings: Settings) -> None:
    least = 2 * settings.min_size if settings.revive_every else 1  # twice: clusters are never all of one size
    if n < settings.k_primary * least:
        raise UserError(
            f"k_primary {settings.k_primary} is too many for {n:,} items: choose at most {max(n // least, 1)}"
        )
    if n < settings.k_secondary:
        raise UserError(f"k_secondary {settings.k_secondary} is too many for {n:,} items: choose at most {n}")
