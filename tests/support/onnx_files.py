"""ONNX files of a run, run by ONNX Runtime beside the run's own model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring import load
from sparring.serving.export import write_onnx


def check_onnx(run: Path, folder: Path) -> None:
    """Both towers give the vectors of the model, for every item and for short, empty and complete histories."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    trained = load(run)
    model = trained.model
    assert not write_onnx(trained, folder)[1]
    item, query = (runtime.InferenceSession(str(folder / f"{side}.onnx")) for side in ("item", "query"))
    items = item.run(None, {"ids": np.arange(model.n_items)})[0]
    np.testing.assert_allclose(items, model.item_vectors().numpy(), rtol=1e-4, atol=1e-5)
    rows = np.array([[3, -1, 5, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
    with torch.no_grad():
        expected = model.encode_histories(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(query.run(None, {"histories": rows})[0], expected, atol=1e-5)
