"""The towers of a run as ONNX files, each run once and compared with the model before it is kept.

    query.onnx   input `ids` (B,) int64: dense ids of queries; for a history tower `histories` (B, L) int64: dense ids of items, oldest
                 first, -1 where there is none
    item.onnx    input `ids` (B,) int64: dense ids of items
    *_ids.parquet   row i is the original id of dense id i

Output `vectors` (B, D) float32 as they are compared: the score is the inner product. Id, feature and history towers can be written; text
towers and your own modules cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core import files
from sparring.core.errors import UserError
from sparring.models.retriever import NORM_EPS, Retriever
from sparring.models.towers import FeatureTower, HistoryTower, IdTower
from sparring.serving.export.graph import Graph, require_onnx
from sparring.training.trained import Trained

_LIMIT = 2_000_000_000  # bytes: an ONNX file can hold no more
_CHECKED = 1000  # ids that are compared
_TOLERANCE = 1e-5


def write_onnx(trained: Trained, folder: Path) -> tuple[list[Path], list[str]]:
    """Write the towers that can be written and the ids they take: (files, a line for each tower that cannot).

    Every file is run by ONNX Runtime on a thousand ids (all, where fewer) before it gets its name, and must give the model's vectors to
    1e-5 of the largest of them.

        files, cannot = write_onnx(load("runs/first"), Path("onnx"))
    """
    require_onnx()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the towers")
    model, paths, cannot = trained.model, [], []
    for side in ("query", "item"):
        tower: nn.Module = getattr(model, side)
        why = _why_not(tower)
        if why:
            cannot.append(f"the {side} tower cannot be written as ONNX: {why}")
            continue
        size = sum(
            tensor.numel() * tensor.element_size()
            for tensor in {id(t): t for t in tower.state_dict().values()}.values()
        )
        if size > _LIMIT:
            cannot.append(
                f"the {side} tower cannot be written as ONNX: its {size / 1e9:.1f} GB are more than a file can hold"
            )
            continue
        paths.append(folder / f"{side}.onnx")
        files.write(paths[-1], partial(_write, _graph(model, side), trained, side))
    if not paths:
        raise UserError(f"{trained.folder}: {'; '.join(cannot)}")
    for name, vocabulary in (("query", trained.ids.query_ids), ("item", trained.ids.item_ids)):
        vocabulary.save(folder / f"{name}_ids.parquet")
        paths.append(folder / f"{name}_ids.parquet")
    return paths, cannot


def _why_not(tower: nn.Module) -> str:
    inner = tower.item if isinstance(tower, HistoryTower) else tower
    if isinstance(inner, IdTower | FeatureTower | nn.Embedding):
        return ""
    return f"it is of type {type(inner).__name__}; only id, feature and history towers can"


def _graph(model: Retriever, side: str) -> Graph:
    tower: nn.Module = getattr(model, side)
    graph = Graph(f"sparring {side} tower")
    if isinstance(tower, HistoryTower):
        ids = graph.input("histories", ("B", "L"))
        vectors = _history(graph, tower, ids)
    else:
        ids = graph.input("ids", ("B",))
        vectors = _tower(graph, tower, ids)
    if model.score == "cosine":
        length = graph.node("ReduceL2", vectors, graph.constant(np.array([-1])), keepdims=1)
        vectors = graph.node("Div", vectors, graph.node("Max", length, graph.constant(np.float32(NORM_EPS))))
    if model.item_bias is not None:
        if side == "item":
            last = _tower(graph, model.item_bias, ids)
        else:
            first = graph.node("Slice", vectors, *(graph.constant(np.array([at])) for at in (0, 1, 1)))
            last = graph.node(
                "Add", graph.node("Mul", first, graph.constant(np.float32(0))), graph.constant(np.float32(1))
            )
        vectors = graph.node("Concat", vectors, last, axis=1)
    graph.output("vectors", vectors, ("B", model.dim))
    return graph


def _tower(graph: Graph, tower: nn.Module, ids: str) -> str:
    """Ids (n,) -> vectors (n, D)."""
    if isinstance(tower, IdTower | nn.Embedding):
        return graph.node("Gather", graph.table(tower.weight), ids)
    assert isinstance(tower, FeatureTower)
    parts = [] if tower.id is None else [_tower(graph, tower.id, ids)]
    if tower.values is not None:
        codes = graph.node("Gather", graph.table(tower.categorical), ids)
        parts.append(graph.node("Flatten", graph.node("Gather", graph.table(tower.values.weight), codes), axis=1))
    if tower.dense.shape[1]:
        parts.append(graph.node("Gather", graph.table(tower.dense), ids))
    joined = graph.node("Concat", *parts, axis=1)
    for layer in tower.layers:
        if isinstance(layer, nn.Linear):
            joined = graph.node("Gemm", joined, graph.table(layer.weight), graph.table(layer.bias), transB=1)
        else:
            joined = graph.node("Relu", joined)
    return joined


def _history(graph: Graph, tower: HistoryTower, items: str) -> str:
    """Histories (B, L) -> vectors (B, D): the last items' mean or attention, the learned vector where there is none."""

    def whole(value: int) -> str:
        return graph.constant(np.int64(value))

    def number(value: float) -> str:
        return graph.constant(np.float32(value))

    known = graph.node("GreaterOrEqual", items, whole(0))
    age = graph.node(
        "Sub", graph.node("CumSum", graph.node("Cast", known, to=7), whole(1), reverse=1), whole(1)
    )  # 7 = int64
    present = graph.node("And", known, graph.node("Less", age, whole(tower.last)))
    flat = graph.node("Reshape", graph.node("Where", present, items, whole(0)), graph.constant(np.array([-1])))
    # 0 keeps B; L is read from the input, since a batch without rows leaves nothing to infer it from
    shape = graph.node("Concat", graph.node("Shape", items), graph.constant(np.array([tower.dim])), axis=0)
    vectors = graph.node("Reshape", _tower(graph, tower.item, flat), shape, allowzero=1)
    mask = graph.node("Cast", present, to=1)  # 1 = float32
    count = graph.node("ReduceSum", mask, graph.constant(np.array([1])), keepdims=1)
    if tower.pooling == "mean":
        weights = graph.node("Div", mask, graph.node("Max", count, number(1)))
    else:
        key = graph.node("MatMul", vectors, graph.table(tower.key.weight.detach().T))
        key = graph.node("Tanh", graph.node("Add", key, graph.table(tower.key.bias)))
        score = graph.node("MatMul", key, graph.table(tower.context))
        young = graph.node("Min", graph.node("Max", age, whole(0)), whole(tower.last - 1))
        score = graph.node("Add", score, graph.node("Gather", graph.table(tower.recency), young))
        logits = graph.node("Where", present, score, number(float(np.finfo(np.float32).min)))
        weights = graph.node("Mul", graph.node("Softmax", logits, axis=1), mask)
    weighed = graph.node("Mul", vectors, graph.node("Unsqueeze", weights, graph.constant(np.array([2]))))
    pooled = graph.node("ReduceSum", weighed, graph.constant(np.array([1])), keepdims=0)
    return graph.node("Where", graph.node("Greater", count, number(0)), pooled, graph.table(tower.empty))


def _write(graph: Graph, trained: Trained, side: str, path: Path) -> None:
    """Write the file and run it; vectors that differ from the model's leave no file."""
    graph.save(path)
    given, expected = _sample(trained.model, side)
    vectors = run_onnx(path, given)
    most = float(np.abs(expected).max(initial=0.0)) or 1.0
    worst = float(np.abs(vectors - expected).max(initial=0.0))
    if vectors.shape != expected.shape or not worst <= _TOLERANCE * most:
        path.unlink()
        raise UserError(
            f"the ONNX file of the {side} tower does not give the model's vectors: they differ by {worst:g}; nothing was kept"
        )


def run_onnx(path: Path, ids: np.ndarray) -> np.ndarray:
    """Vectors (B, D) that an ONNX tower gives for dense ids (B,), or for histories (B, L)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found: Sequence[Any] = session.run(None, {session.get_inputs()[0].name: ids})
    return np.asarray(found[0])


def _sample(model: Retriever, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of a tower and the vectors that the model gives for them."""
    tower: nn.Module = getattr(model, side)
    with torch.no_grad():
        if isinstance(tower, HistoryTower):
            given = _histories(tower)
            return given.numpy(), model.encode_histories(given).float().numpy()
        n = model.n_items if side == "item" else int(getattr(tower, "n", None) or getattr(tower, "num_embeddings"))  # noqa: B009
        ids = torch.from_numpy(np.unique(np.linspace(0, n - 1, min(n, _CHECKED)).astype(np.int64)))
        encode = model.encode_items if side == "item" else model.encode_queries
        return ids.numpy(), encode(ids).float().numpy()


def _histories(tower: HistoryTower) -> Tensor:
    """What a thousand queries of the run have taken, filled up with -1 at the front, and one query without any."""
    rows = torch.from_numpy(np.unique(np.linspace(0, tower.n - 1, min(tower.n, _CHECKED)).astype(np.int64)))
    longest = int(tower.start.diff().max())
    at = tower.start[rows + 1].unsqueeze(1) - torch.arange(longest, 0, -1)
    items = tower.items[at.clamp(min=0)].long() if longest else at
    items = items.masked_fill(at < tower.start[rows].unsqueeze(1), -1)
    return torch.cat([items, torch.full((1, items.shape[1]), -1)])
