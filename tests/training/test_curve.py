"""The picture of a training in its folder."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from sparring.data.interactions import Split
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from support.settings import quick


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize("validated", [True, False])
def test_a_training_draws_its_curve(validated: bool, parts: Split, tmp_path: Path) -> None:
    """curve.png is a picture with ink on both halves if there is a validation part, and on the left half if not."""
    given = parts if validated else Split(parts.train, None, parts.test)
    fit(build("ssl", parts.train, quick(epochs=3)), given, tmp_path / "run", k=(10,), device="cpu")
    image = matplotlib.image.imread(tmp_path / "run" / "curve.png")
    assert image.shape[1] > image.shape[0] > 100
    assert image[:, : image.shape[1] // 2, :3].std() > 0.01
    assert not validated or image[:, image.shape[1] // 2 :, :3].std() > 0.01
