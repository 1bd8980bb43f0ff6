"""MSAC: item clusters learned from several modalities and kept up to date as the catalogue changes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.files import AnyPath, read_section, write_tensors
from sparring.data.interactions import Vocabulary
from sparring.models.clusters import learning
from sparring.models.clusters.codes import Codes
from sparring.models.clusters.learning import ClusterProgress, CodedItems, Learning, silent
from sparring.models.clusters.quantizer import ROBUST, MSACSettings, Quantizer
from sparring.models.clusters.stream import ModalityRows, Stream


@dataclass(frozen=True)
class Drift:
    """The fit of codebooks to a catalogue that has changed.

    `error` is the mean squared distance from a primary vector to its codeword. `outside` is the share of items farther
    from their codeword than 95 % of the items were when the codebooks were learned (0.05 if nothing has changed).
    `changed` is the share of known items that would get another primary cluster, or another cell, if assigned today.
    """

    items: int
    new: int  # items that have no code yet
    error_learned: float
    error_known: float | None  # None if there are no such items
    error_new: float | None
    outside_known: float | None
    outside_new: float | None
    changed_primary: float | None
    changed_cell: float | None


class MSAC:
    """Item clusters from several modalities: aligned projections, a primary and a secondary codebook (ESANS, stage 1).

    `fit` learns in stages (see Quantizer for the equations): alignment alone, both codebooks by k-means, then
    everything jointly. Codewords that lose their items are moved, and a final pass assigns all items. With the ROBUST
    settings every non-empty primary cluster holds at least `min_size` items, and none is empty unless the items have
    too few distinct vectors; LITERAL guarantees nothing. Items are read in blocks, so memory grows by only about 20
    bytes per item.

    The clusters follow the catalogue: `assign` codes new items, `drift` measures how well the codebooks still fit, and
    `update` continues learning from the current state. A codeword keeps its number, so clusters keep their identity.
    Learned projections cannot read vectors from another encoder or from a new factorisation: `refit` adapts such a
    modality.

        msac = MSAC(modalities.widths, replace(ROBUST, k_primary=100));  codes = msac.fit(modalities, data.item_ids)
        msac.save("codes.safetensors", codes);  MSAC.load("codes.safetensors").assign(tomorrow, ids, known=codes)

    Xing et al., ESANS, WWW 2025, section 3.2.
    """

    def __init__(
        self, widths: dict[str, int], settings: MSACSettings = ROBUST, device: str | torch.device = "cpu"
    ) -> None:
        self.settings = settings
        self.model = Quantizer(widths, settings).to(device)
        self.history: list[dict[str, Any]] = []  # one record per 50 steps
        self.learned: dict[str, float] = {}  # errors of the items when the codebooks were last learned

    def fit(self, modalities: ModalityRows, ids: Vocabulary | None = None, progress: ClusterProgress = silent) -> Codes:
        """Learn from scratch and code all items; `ids` are their original ids, which the codes keep."""
        settings, stream = self.settings, self._stream(modalities)
        _check_size(len(stream), settings)
        device = self.model.alive.device
        self.model, self.history = Quantizer(self.model.widths, settings).to(device), []
        if settings.normalize:
            learning.scale_inputs(self.model, stream)
        joint = Learning(self.model, stream, self.history, progress)
        joint.run("aligning", settings.warmup if self.model.pairs else 0, quantise=False)
        progress("k-means", 0, 1)
        learning.start_codebooks(self.model, stream)
        joint.run("learning", settings.steps, quantise=True)
        return self._settled(stream, ids, progress)

    def update(
        self,
        modalities: ModalityRows,
        ids: Vocabulary | None = None,
        steps: int = 500,
        progress: ClusterProgress = silent,
    ) -> Codes:
        """Continue learning for `steps` joint steps on the current catalogue, and code all its items."""
        stream = self._stream(modalities, seed=len(self.history))
        _check_size(len(stream), self.settings)
        self._check_learned()
        Learning(self.model, stream, self.history, progress).run("updating", steps, quantise=True)
        return self._settled(stream, ids, progress)

    def assign(
        self,
        modalities: ModalityRows,
        ids: Vocabulary | None = None,
        known: Codes | None = None,
        progress: ClusterProgress = silent,
    ) -> Codes:
        """Codes of all items under the current codebooks; items in `known` (by id) keep theirs and are not read."""
        self._check_learned()
        stream = self._stream(modalities)
        if known is None:
            return self._codes(learning.encode(self.model, stream, progress=progress), ids)
        self._check_codes(known)
        row = _known_rows(known, ids, len(stream))
        old = torch.from_numpy(np.flatnonzero(row >= 0))
        new = torch.from_numpy(np.flatnonzero(row < 0))
        fresh, coded = learning.encode(self.model, stream, new.numpy(), progress), CodedItems(len(stream))
        coded.primary[new], coded.secondary[new] = fresh.primary, fresh.secondary
        coded.primary[old], coded.secondary[old] = known.primary[row[old]], known.secondary[row[old]]
        return self._codes(coded, ids)

    def drift(
        self, modalities: ModalityRows, known: Codes, ids: Vocabulary | None = None, progress: ClusterProgress = silent
    ) -> Drift:
        """Measure how well the codebooks fit the current items, compared with when they were learned."""
        self._check_learned()
        self._check_codes(known)
        stream = self._stream(modalities)
        coded = learning.encode(self.model, stream, progress=progress)
        rows = torch.from_numpy(_known_rows(known, ids, len(stream)))
        old = rows >= 0
        row = rows[old]
        error = coded.errors[:, 0]
        moved = coded.primary[old] != known.primary[row]
        return Drift(
            items=len(stream),
            new=int((~old).sum()),
            error_learned=self.learned["error"],
            error_known=_mean(error[old]),
            error_new=_mean(error[~old]),
            outside_known=_mean(error[old] > self.learned["limit"]),
            outside_new=_mean(error[~old] > self.learned["limit"]),
            changed_primary=_mean(moved),
            changed_cell=_mean(moved | (coded.secondary[old] != known.secondary[row])),
        )

    def refit(self, name: str, modalities: ModalityRows, known: Codes, ids: Vocabulary | None = None) -> None:
        """Adapt a modality whose vectors come from another encoder or a new factorisation.

        Its projection is fitted by least squares, so that known items land where their codes and their other modalities
        put them. Nothing else changes; `update` may follow.
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
        row = torch.from_numpy(_known_rows(known, ids, len(stream)))
        primary, secondary = (
            torch.where(row >= 0, codes[row.clamp(min=0)].long(), -1) for codes in (known.primary, known.secondary)
        )
        learning.refit(self.model, stream, which, primary, secondary)

    def vectors(self, modalities: ModalityRows, items: np.ndarray) -> Tensor:
        """(n, dim): primary vectors of these items, which are compared with the primary codewords."""
        return learning.vectors_of(self.model, self._stream(modalities), items).cpu()

    def save(self, path: AnyPath, codes: Codes) -> None:
        """Write codes and codebooks to one safetensors file; Codes.load reads the codes alone."""
        tensors, meta = codes.tensors()
        tensors |= {f"msac.{name}": tensor for name, tensor in self.model.state_dict().items()}
        settings = dataclasses.asdict(self.settings)
        own = {"widths": self.model.widths, "settings": settings, "history": self.history, "learned": self.learned}
        write_tensors(path, tensors, {**meta, "msac": own})

    @classmethod
    def load(cls, path: AnyPath, device: str | torch.device = "cpu") -> MSAC:
        """Read a file written by `save`."""
        tensors, meta = read_section(path, "msac")
        try:
            msac = cls(meta["widths"], MSACSettings(**meta["settings"]), device)
            msac.model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"{path} does not fit this version: {' '.join(str(error).split())[:200]}; cluster again"
            ) from error
        msac.history, msac.learned = meta["history"], meta["learned"]
        return msac

    def _stream(self, modalities: ModalityRows, seed: int = 0) -> Stream:
        for name, width in self.model.widths.items():
            if name not in modalities.names:
                raise UserError(
                    f"modality {name!r} is missing: these clusters were learned from {', '.join(self.model.names)}"
                )
            if modalities.widths[name] != width:
                raise UserError(
                    f"modality {name!r} has width {modalities.widths[name]}, but the clusters were learned from {width}"
                )
        return Stream(modalities, self.settings.seed + seed, self.model.alive.device, self.model.names)

    def _settled(self, stream: Stream, ids: Vocabulary | None, progress: ClusterProgress) -> Codes:
        coded = learning.settle(self.model, stream, progress)
        error = np.sort(coded.errors[:, 0].numpy())
        limit = error[min(int(0.95 * len(error)), len(error) - 1)]
        self.learned = {
            "error": float(error.mean()),
            "limit": float(limit),
            "secondary_error": float(coded.errors[:, 1].mean()),
        }
        return self._codes(coded, ids)

    def _codes(self, coded: CodedItems, ids: Vocabulary | None) -> Codes:
        return Codes(coded.primary, coded.secondary, self.model.primary, self.settings.k_secondary, ids)

    def _check_learned(self) -> None:
        if not self.learned:
            raise UserError("these codebooks are not trained: call fit first")

    def _check_codes(self, known: Codes) -> None:
        if (known.k_primary, known.k_secondary) != (self.settings.k_primary, self.settings.k_secondary):
            mine = f"{self.settings.k_primary} x {self.settings.k_secondary}"
            raise UserError(
                f"the known codes are {known.k_primary} x {known.k_secondary}, but these codebooks are {mine}"
            )


def _known_rows(known: Codes, ids: Vocabulary | None, n: int) -> np.ndarray:
    """(n,): row of each item among the known ones, -1 if unknown; by position if there are no ids."""
    if known.ids is not None and ids is not None:
        return known.ids.encode(ids.ids)
    return np.where(np.arange(n) < len(known), np.arange(n), -1)


def _rewidened(model: Quantizer, widths: dict[str, int], which: int) -> Quantizer:
    """The model with another width for one modality, whose projection must be fitted."""
    widened = Quantizer(widths, model.settings).to(model.alive.device)
    centres, kept = list(model.centre.split(tuple(model.widths.values()))), model.state_dict()
    centres[which] = centres[which].new_zeros(tuple(widths.values())[which])
    kept |= {"centre": torch.cat(centres), f"project.{which}.weight": widened.state_dict()[f"project.{which}.weight"]}
    widened.load_state_dict(kept)
    return widened


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _check_size(n: int, settings: MSACSettings) -> None:
    least = 2 * settings.min_size if settings.revive_every else 1  # twice, since clusters are never all of one size
    if n < settings.k_primary * least:
        raise UserError(
            f"k_primary {settings.k_primary} is too many for {n:,} items: choose at most {max(n // least, 1)}"
        )
    if n < settings.k_secondary:
        raise UserError(f"k_secondary {settings.k_secondary} is too many for {n:,} items: choose at most {n}")
