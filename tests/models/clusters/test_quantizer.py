"""The equations of MSAC against loops over items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.models.clusters.quantizer import LITERAL, ROBUST, MSACSettings, Quantizer
from sparring.models.clusters.stream import ModalityBatch

WIDTHS = {"image": 5, "text": 4, "graph": 3}


def batch_of(n: int = 12, missing: bool = False) -> ModalityBatch:
    rng = np.random.default_rng(0)
    present = np.ones((3, n), dtype=bool)
    if missing:
        present = rng.random((3, n)) < 0.6
        present[:, 0], present[:, 1] = False, [True, False, False]
    rows = [torch.from_numpy(rng.normal(size=(n, width)).astype(np.float32)) for width in WIDTHS.values()]
    rows = [row * torch.from_numpy(there).unsqueeze(1) for row, there in zip(rows, present, strict=True)]
    return ModalityBatch(np.arange(n), tuple(rows), torch.from_numpy(present), bool(present.all()))


def model_of(base: MSACSettings, **change: object) -> Quantizer:
    torch.manual_seed(0)
    model = Quantizer(WIDTHS, replace(base, k_primary=4, k_secondary=3, dim=6, **change))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name != "log_tau":
                weight.copy_(torch.randn_like(weight))
        model.centre.copy_(torch.randn(12))
        model.scale.copy_(torch.tensor([0.5, 2.0, 1.5]))
    return model


def projected(model: Quantizer, batch: ModalityBatch, x: int, i: int) -> np.ndarray:
    """M of equation 3 for one item and modality, by hand in float64."""
    linear = model.project[x]
    row = batch.rows[x][i].double().numpy()
    if model.settings.normalize:
        start = sum(list(WIDTHS.values())[:x])
        row = (row - model.centre[start : start + len(row)].double().numpy()) * float(model.scale[x])
    made = linear.weight.detach().double().numpy() @ row + linear.bias.detach().double().numpy()
    return made / np.linalg.norm(made) if model.settings.normalize else made


@pytest.mark.parametrize("base", [LITERAL, ROBUST], ids=["literal", "robust"])
@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])
def test_loss_is_equation_8(base: MSACSettings, missing: bool) -> None:
    """Alignment, codes and squared errors equal a loop over items and pairs, for every missing modality."""
    model, batch = model_of(base), batch_of(missing=missing)
    n, there = len(batch.items), batch.present.numpy()
    m = {(x, i): projected(model, batch, x, i) for x in range(3) for i in range(n) if there[x, i]}
    z_p, z_s = (book.detach().double().numpy() for book in (model.primary, model.secondary))
    first, second, codes = [], [], []
    for i in range(n):
        mine = [m[x, i] for x in range(3) if there[x, i]]
        r_p = np.mean(mine, axis=0) if mine else np.zeros(6)
        code = int(np.argmin([np.linalg.norm(r_p - z) for z in z_p]))
        r_s = np.concatenate([m[x, i] - z_p[code] if there[x, i] else np.zeros(6) for x in range(3)])
        codes.append(code)
        first.append(np.sum((r_p - z_p[code]) ** 2))
        second.append(min(np.sum((r_s - z) ** 2) for z in z_s))
    parts = model.parts(batch)
    assert parts.primary.tolist() == codes
    np.testing.assert_allclose(parts.primary_error.detach().numpy(), first, rtol=1e-4)
    np.testing.assert_allclose(parts.secondary_error.detach().numpy(), second, rtol=1e-4)

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    tau, total = (1.0, 0.0) if base is LITERAL else (0.07, 0.0)
    for x, y in ((0, 1), (0, 2), (1, 2)):
        both = [i for i in range(n) if there[x, i] and there[y, i]]
        one, other = 0.0, 0.0
        for i in both:
            h = np.exp([cosine(m[x, i], m[y, j]) / tau for j in both])
            back = np.exp([cosine(m[x, j], m[y, i]) / tau for j in both])
            one -= np.log(h[both.index(i)] / h.sum()) / len(both)
            other -= np.log(back[both.index(i)] / back.sum()) / len(both)
        total += one if base is LITERAL else (one + other) / 2
    np.testing.assert_allclose(float(parts.align.detach().sum()), total, rtol=1e-4)
    errors = np.array(first) + np.array(second)
    expected = 2.0 * total + (errors.sum() if base is LITERAL else errors.mean())
    np.testing.assert_allclose(float(model.loss(parts).detach()), expected, rtol=1e-4)


def test_gradients_reach_projections_and_codebooks() -> None:
    """Nothing is detached: squared errors move both sides, except empty codewords; missing rows give no NaN."""
    model, batch = model_of(ROBUST), batch_of(missing=True)
    parts = model.parts(batch)
    (parts.primary_error.sum() + parts.secondary_error.sum()).backward()
    assert all(float(linear.weight.grad.abs().sum()) > 0 for linear in model.project)
    used = torch.zeros(4, dtype=torch.bool)
    used[parts.primary] = True
    assert ((model.primary.grad.abs().sum(1) > 0) == used).all()
    model.zero_grad()
    model.loss(model.parts(batch)).backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)


def test_one_modality_is_not_aligned() -> None:
    """With a single modality there is no pair, and the loss is the squared error."""
    model = Quantizer({"text": 4}, replace(ROBUST, k_primary=3, k_secondary=2, dim=6))
    whole = batch_of()
    parts = model.parts(ModalityBatch(whole.items, whole.rows[1:2], whole.present[1:2], True))
    assert len(parts.align) == 0
    torch.testing.assert_close(model.loss(parts), (parts.primary_error + parts.secondary_error).mean())


def test_temperature_has_a_floor() -> None:
    """A learned temperature is at least 0.01; a fixed one is used unchanged."""
    robust, literal = model_of(ROBUST), model_of(LITERAL)
    with torch.no_grad():
        robust.log_tau.fill_(-20)
    assert float(robust.tau.detach()) == pytest.approx(0.01)
    assert float(literal.tau) == 1.0
    assert not literal.log_tau.requires_grad


@pytest.mark.parametrize(
    "change", [{"k_primary": 0}, {"lr": 0.0}, {"steps": -1}, {"reduce": "max"}, {"k_secondary": 40000}]
)
def test_settings_that_make_no_sense(change: dict[str, object]) -> None:
    """A one-line error names the setting."""
    with pytest.raises(UserError, match=next(iter(change))):
        replace(ROBUST, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no modalities"):
        Quantizer({})
