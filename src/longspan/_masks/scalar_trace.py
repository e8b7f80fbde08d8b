"""Tracing of longspan's own masks without torch's tracer, whose first use imports a thousand modules (sympy, Dynamo, Inductor): 3 to 6 s.

Own masks compute with scalars and look up elements of the tensors that they hold. User code may do more: read values past the dispatcher
(`tolist`), modify tensors, call modules. It is traced by `make_fx`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from longspan._torch_private import DispatchModeOutsideOfDynamo, tree_leaves, tree_map

_INDEX = torch.ops.aten.index.Tensor
_READ = torch.ops.aten._local_scalar_dense.default


class _TooComplex(Exception):
    """An operation that is neither scalar arithmetic nor the lookup of one element."""


class _Recorder(DispatchModeOutsideOfDynamo):
    """Records the operations on scalar CPU tensors in a graph. Tensors that no operation computed are captured by the mod."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.captured = Graph(), dict[str, Tensor]()
        self._nodes: dict[int, tuple[Tensor, Node]] = {}  # by the id of the tensor, which is held

    def add(self, tensor: Tensor, node: Node) -> None:
        """The tensor is the value of the node."""
        node.meta["val"] = torch.empty_like(tensor, device="meta")
        self._nodes[id(tensor)] = tensor, node

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor; of a captured one, the node that reads it."""
        if id(tensor) not in self._nodes:
            name = f"captured_{len(self.captured)}"
            self.captured[name] = tensor
            self.add(tensor, self.graph.create_node("get_attr", name))
        return self._nodes[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise _TooComplex
        if func is _INDEX:
            table, indices = args
            if len(indices) != table.ndim or not all(self._is_scalar(i) for i in indices):
                raise _TooComplex
            result = torch.zeros((), dtype=table.dtype)  # any element: the lookup takes place at another index in every call
        elif all(self._is_scalar(a) for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)):
            result = func(*args, **kwargs)
        else:
            raise _TooComplex
        if not self._is_scalar_tensor(result):
            raise _TooComplex
        node_args, node_kwargs = (tree_map(lambda x: self.node(x) if isinstance(x, Tensor) else x, x) for x in (args, kwargs))
        self.add(result, self.graph.call_function(func, node_args, node_kwargs))
        return result

    def _is_scalar(self, value: Any) -> bool:
        """Whether a tensor is an index of the mod or a result of its operations."""
        return self._is_scalar_tensor(value) and id(value) in self._nodes

    @staticmethod
    def _is_scalar_tensor(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu"


def scalar_trace(fn: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Any:
    """A module of captured tensors with the graph of `fn(*inputs)`, as `make_fx` makes it; None if the mod needs torch's tracer."""
    recorder = _Recorder()
    for i, tensor in enumerate(inputs):
        recorder.add(tensor, recorder.graph.placeholder(f"arg_{i}"))
    try:
        with recorder:
            result = fn(*inputs)
        if not recorder._is_scalar(result):
            return None
    except Exception:  # `_TooComplex`; any other error is torch's tracer's to report
        return None
    recorder.graph.output(recorder.node(result))
    return SimpleNamespace(graph=recorder.graph, **recorder.captured)
