"""The towers of a run as ONNX files, each verified against the model before it is kept.

    query.onnx   input `ids` (B,) int64: dense ids of queries; for a history tower `histories` (B, L) int64: dense ids
                 of items, oldest first, padded with -1
    item.onnx    input `ids` (B,) int64: dense ids of items
    *_ids.parquet   row i has the original id of dense id i

The output `vectors` (B, D) float32 is scaled: the score is the inner product. Id, feature and history towers are
supported, text towers and custom modules are not. The graphs are built node by node: the exporter of torch needs the
package onnxscript.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.core.part import n_ids
from sparring.models.histories import HistoryTower
from sparring.models.low_rank_ease import LowRankEase
from sparring.models.parts import Categories, Concat, Dense, Perceptron, Sum, Tags
from sparring.models.retriever import NORM_EPS, Retriever
from sparring.models.towers import IdTower
from sparring.training.trained import Trained

_OPSET, _VERSION = 18, 10  # operators and file format; ONNX Runtime 1.19 and later read them
_LIMIT = 2_000_000_000  # bytes: the maximum size of an ONNX file
_CHECKED = 1000  # ids that are verified
_ROWS = 64  # of them at once: a file gathers the vectors of all items of its histories
_TOLERANCE = 1e-5


def write_onnx(trained: Trained, folder: Path) -> tuple[list[Path], list[str]]:
    """Export the supported towers and the id maps: (files, a line for each unsupported tower).

    ONNX Runtime runs every file on up to a thousand ids before it gets its name; the vectors must equal those of the
    model within 1e-5 of the largest value.

        files, unsupported = write_onnx(load("runs/first"), Path("onnx"))
    """
    for module in ("onnx", "onnxruntime"):
        optional(module, "onnx", "the format ONNX")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the towers")
    model, paths, unsupported = trained.model, [], []
    for side in ("query", "item"):
        tower: nn.Module = getattr(model, side)
        why = _unsupported(tower)
        if why:
            unsupported.append(f"the {side} tower cannot be written as ONNX: {why}")
            continue
        tensors = [*tower.state_dict().values(), *([] if model.closed_form is None else [model.closed_form.directions])]
        size = sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())
        if size > _LIMIT:
            unsupported.append(
                f"the {side} tower cannot be written as ONNX: {size / 1e9:.1f} GB exceed the limit of the format"
            )
            continue
        paths.append(folder / f"{side}.onnx")
        files.write(paths[-1], partial(_write, _graph(model, side), trained, side))
    if not paths:
        raise UserError(f"{trained.folder}: {'; '.join(unsupported)}")
    for name, vocabulary in (("query", trained.ids.query_ids), ("item", trained.ids.item_ids)):
        vocabulary.save(folder / f"{name}_ids.parquet")
        paths.append(folder / f"{name}_ids.parquet")
    return paths, unsupported


def _unsupported(tower: nn.Module) -> str:
    return _unsupported_part(tower.item if isinstance(tower, HistoryTower) else tower)


def _unsupported_part(part: nn.Module) -> str:
    if isinstance(part, Sum | Concat | Perceptron):
        return next(filter(None, map(_unsupported_part, part.parts)), "")
    if isinstance(part, IdTower | Categories | Tags | Dense | nn.Embedding):
        return ""
    return f"{type(part).__name__} is not supported, only id, feature and history towers are"


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
        vectors = _unit(graph, vectors, NORM_EPS)
    if model.closed_form is not None:
        closed = _closed_form(graph, model.closed_form, tower, ids)
        vectors = graph.node("Concat", vectors, closed, axis=1)
    if model.item_bias is not None:
        if side == "item":
            last = _tower(graph, model.item_bias, ids)
            if model.trend is not None:
                last = graph.node("Add", last, graph.node("Gather", graph.table(model.trend.shift.unsqueeze(1)), ids))
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
    if isinstance(tower, Dense):
        return graph.node("Gather", graph.table(tower.values), ids)
    if isinstance(tower, Categories | Tags):
        codes = graph.node("Gather", graph.table(tower.codes), ids)
        vectors = graph.node("Gather", graph.table(tower.values.weight), codes)
        if isinstance(tower, Categories):
            return graph.node("Flatten", vectors, axis=1)
        weights = graph.node("Gather", graph.table(tower.weights.unsqueeze(-1)), ids)
        return graph.node("ReduceSum", graph.node("Mul", vectors, weights), graph.constant(np.array([1])), keepdims=0)
    if isinstance(tower, Sum | Concat):
        parts = [_tower(graph, part, ids) for part in tower.parts]
        return graph.node("Concat", *parts, axis=1) if isinstance(tower, Concat) else graph.node("Sum", *parts)
    assert isinstance(tower, Perceptron)
    joined = _tower(graph, tower.part, ids)
    for layer in tower.layers:
        if isinstance(layer, nn.Linear):
            joined = graph.node("Gemm", joined, graph.table(layer.weight), graph.table(layer.bias), transB=1)
        else:
            joined = graph.node("Relu", joined)
    return joined


def _unit(graph: Graph, vectors: str, eps: float) -> str:
    """Vectors (B, D) at length 1, or divided by eps where they are shorter than that."""
    length = graph.node("ReduceL2", vectors, graph.constant(np.array([-1])), keepdims=1)
    return graph.node("Div", vectors, graph.node("Max", length, graph.constant(np.float32(eps))))


def _closed_form(graph: Graph, form: LowRankEase, tower: nn.Module, ids: str) -> str:
    """Histories (B, L) or items (B,) -> the dimensions of a closed form."""
    if not isinstance(tower, HistoryTower):
        return graph.node("Gather", graph.table(form.directions * form.outputs.unsqueeze(1)), ids)
    present, _, flat = _present(graph, tower, ids)
    rows = graph.node("Gather", graph.table(form.directions * form.gains), flat)
    rows = _reshaped(graph, rows, ids, form.dim)
    mask = graph.node("Unsqueeze", graph.node("Cast", present, to=1), graph.constant(np.array([2])))
    sums = graph.node("ReduceSum", graph.node("Mul", rows, mask), graph.constant(np.array([1])), keepdims=0)
    return _unit(graph, sums, 1e-12)


def _present(graph: Graph, tower: HistoryTower, items: str) -> tuple[str, str, str]:
    """Of histories (B, L): which places the tower reads, the age of each, and the items as one list."""

    def integer(value: int) -> str:
        return graph.constant(np.int64(value))

    known = graph.node("GreaterOrEqual", items, integer(0))
    age = graph.node(
        "Sub", graph.node("CumSum", graph.node("Cast", known, to=7), integer(1), reverse=1), integer(1)
    )  # 7 = int64
    present = graph.node("And", known, graph.node("Less", age, integer(tower.last)))
    flat = graph.node("Reshape", graph.node("Where", present, items, integer(0)), graph.constant(np.array([-1])))
    return present, age, flat


def _reshaped(graph: Graph, vectors: str, items: str, dim: int) -> str:
    """Vectors (B L, dim) as (B, L, dim); the shape is the input's, for an empty batch leaves no L to infer."""
    shape = graph.node("Concat", graph.node("Shape", items), graph.constant(np.array([dim])), axis=0)
    return graph.node("Reshape", vectors, shape, allowzero=1)


def _history(graph: Graph, tower: HistoryTower, items: str) -> str:
    """Histories (B, L) -> vectors (B, D): mean or attention over the last items; a learned vector if there is none."""

    def integer(value: int) -> str:
        return graph.constant(np.int64(value))

    def number(value: float) -> str:
        return graph.constant(np.float32(value))

    present, age, flat = _present(graph, tower, items)
    vectors = _reshaped(graph, _tower(graph, tower.item, flat), items, tower.dim)
    mask = graph.node("Cast", present, to=1)  # 1 = float32
    count = graph.node("ReduceSum", mask, graph.constant(np.array([1])), keepdims=1)
    if tower.pooling == "mean":
        weights = graph.node("Div", mask, graph.node("Max", count, number(1)))
    else:
        key = graph.node("MatMul", vectors, graph.table(tower.key.weight.detach().T))
        key = graph.node("Tanh", graph.node("Add", key, graph.table(tower.key.bias)))
        score = graph.node("MatMul", key, graph.table(tower.context))
        young = graph.node("Min", graph.node("Max", age, integer(0)), integer(tower.last - 1))
        score = graph.node("Add", score, graph.node("Gather", graph.table(tower.recency), young))
        logits = graph.node("Where", present, score, number(float(np.finfo(np.float32).min)))
        weights = graph.node("Mul", graph.node("Softmax", logits, axis=1), mask)
    weighed = graph.node("Mul", vectors, graph.node("Unsqueeze", weights, graph.constant(np.array([2]))))
    pooled = graph.node("ReduceSum", weighed, graph.constant(np.array([1])), keepdims=0)
    return graph.node("Where", graph.node("Greater", count, number(0)), pooled, graph.table(tower.empty))


def _write(graph: Graph, trained: Trained, side: str, path: Path) -> None:
    """Write the file and verify it; it is deleted if its vectors differ from those of the model."""
    graph.save(path)
    given, expected = _sample(trained.model, side)
    vectors = run_onnx(path, given)
    most = float(np.abs(expected).max(initial=0.0)) or 1.0
    worst = float(np.abs(vectors - expected).max(initial=0.0))
    if vectors.shape != expected.shape or not worst <= _TOLERANCE * most:
        path.unlink()
        raise UserError(
            f"the ONNX file of the {side} tower was deleted: its vectors differ from those of the model by {worst:g}"
        )


def run_onnx(path: Path, ids: np.ndarray) -> np.ndarray:
    """Vectors (B, D) of an ONNX tower for dense ids (B,) or histories (B, L), some rows at a time."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name, blocks = session.get_inputs()[0].name, np.array_split(ids, max(1, math.ceil(len(ids) / _ROWS)))
    return np.concatenate([session.run(None, {name: block})[0] for block in blocks])


def _sample(model: Retriever, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of a tower, and the vectors of the model for them."""
    tower: nn.Module = getattr(model, side)
    with torch.no_grad():
        if isinstance(tower, HistoryTower):
            given = _histories(tower)
            return given.numpy(), model.encode_histories(given).float().numpy()
        n = model.n_items if side == "item" else n_ids(tower)
        assert n is not None
        ids = torch.from_numpy(np.unique(np.linspace(0, n - 1, min(n, _CHECKED)).astype(np.int64)))
        encode = model.encode_items if side == "item" else model.encode_queries
        return ids.numpy(), encode(ids).float().numpy()


def _histories(tower: HistoryTower) -> Tensor:
    """Histories of up to a thousand queries, left-padded with -1, and an empty one."""
    rows = torch.from_numpy(np.unique(np.linspace(0, tower.n - 1, min(tower.n, _CHECKED)).astype(np.int64)))
    longest = int(tower.start.diff().max())
    at = tower.start[rows + 1].unsqueeze(1) - torch.arange(longest, 0, -1)
    items = tower.items[at.clamp(min=0)].long() if longest else at
    items = items.masked_fill(at < tower.start[rows].unsqueeze(1), -1)
    return torch.cat([items, torch.full((1, items.shape[1]), -1)])


class Graph:
    """Builds an ONNX model from nodes, constants and tables; values are referred to by name.

    graph = Graph("doubled")
    x = graph.input("x", ("B",))
    graph.output("y", graph.node("Add", x, x), ("B",))
    graph.save(path)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: list[Any] = []
        self._tables: dict[int, tuple[str, np.ndarray]] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, shape: tuple[str | int, ...]) -> str:
        """An int64 input."""
        from onnx import TensorProto, helper

        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
        return name

    def output(self, name: str, value: str, shape: tuple[str | int, ...]) -> None:
        """A float32 output."""
        from onnx import TensorProto, helper

        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator on named values; returns the name of its output."""
        from onnx import helper

        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def table(self, tensor: Tensor) -> str:
        """Add a parameter or buffer of the model, once even if it is used twice."""
        at = tensor.data_ptr()
        if at not in self._tables:
            self._tables[at] = (f"table_{len(self._tables)}", tensor.detach().cpu().contiguous().numpy())
        return self._tables[at][0]

    def constant(self, value: np.ndarray | np.generic) -> str:
        """Add a small constant."""
        array = np.asarray(value)
        name = f"constant_{len(self._tables)}"
        self._tables[-1 - len(self._tables)] = (name, array)
        return name

    def save(self, path: Path) -> None:
        """Validate the graph and write it."""
        import onnx
        from onnx import helper, numpy_helper

        tables = [
            numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
            for name, array in self._tables.values()
        ]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, tables)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_VERSION, producer_name="sparring"
        )
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())
