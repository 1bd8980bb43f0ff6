"""An ONNX graph, node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sparring.core.errors import UserError

_OPSET, _VERSION = 18, 10  # of the operators and of the file; read by ONNX Runtime 1.19 and later


def require_onnx() -> None:
    """An error that names the extra, where ONNX or its runtime is missing."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise UserError('ONNX files need onnx and onnxruntime: pip install "sparring[onnx]"') from error
    del onnx


class Graph:
    """Nodes with names of their own, constants and tables; saved as an ONNX model.

    graph = Graph("doubled");  x = graph.input("x", ("B",));  graph.output("y", graph.node("Add", x, x), ("B",));  graph.save(path)
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
        """An operator on named values; the name of what it gives."""
        from onnx import helper

        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def table(self, tensor: Tensor) -> str:
        """A parameter or buffer of the model; one that is used twice is kept once."""
        at = tensor.data_ptr()
        if at not in self._tables:
            self._tables[at] = (f"table_{len(self._tables)}", tensor.detach().cpu().contiguous().numpy())
        return self._tables[at][0]

    def constant(self, value: np.ndarray | np.generic) -> str:
        """A small constant; whole numbers are int64."""
        array = np.asarray(value)
        name = f"constant_{len(self._tables)}"
        self._tables[-1 - len(self._tables)] = (name, array)
        return name

    def save(self, path: Path) -> None:
        """Check the graph and write it."""
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
