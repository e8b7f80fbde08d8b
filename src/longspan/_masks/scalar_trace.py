"""Tracing of scalar mods and their gradients without torch's tracer, whose first use imports a thousand modules (sympy, Dynamo, Inductor):
3 to 6 s, then 30 ms per mod.

Most mods compute with scalars and look up elements of tensors. Their operations are recorded by a dispatch mode. The inputs are tensors
without memory: code that reads a value past the dispatcher (`tolist`, `numpy`, `data_ptr`) raises. What does more (operations on whole
captured tensors, random numbers, in-place operations of the mod, reads of values) is traced by `make_fx`, which also reports its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Parameter

from longspan._masks.trace_autograd import AutogradError
from longspan._torch_private import DispatchModeOutsideOfDynamo, TensorWithoutMemory, identity, tree_leaves, tree_map

_INDEX = torch.ops.aten.index.Tensor
_DEVICE = torch.ops.prim.device.default
_READ = torch.ops.aten._local_scalar_dense.default
# Operations without torch's tag "pointwise" whose results share no memory with their operands.
_MAKE_MEMORY = {getattr(torch.ops.aten, name) for name in ("masked_fill", "fill", "empty_like", "zeros_like", "ones_like", "full_like")}


class _TooComplex(Exception):
    """An operation that is neither scalar arithmetic nor the lookup of one element."""


class _Recorder(DispatchModeOutsideOfDynamo):
    """Records operations on scalars in a graph. Tensors that no operation computed are captured by the mod."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.captured = Graph(), dict[str, Tensor]()
        self._known: dict[int, tuple[Tensor, Node, Tensor]] = {}  # by the tensor's identity, which is held; the last: its example
        self._varying: set[int] = set()  # identities of tensors that depend on an input
        self._captured_nodes: dict[int, Node] = {}  # by the tensor's identity
        self.is_complete = True  # False once an operation was not recorded: the mod may catch the error and compute something else

    def add(self, tensor: Tensor, node: Node, example: Tensor, *, varying: bool) -> None:
        """The tensor stands for the node's value; `example`: some value of its shape and dtype; `varying`: it depends on an input."""
        node.meta["val"] = torch.empty_like(example, device="meta")
        self._known[identity(tensor)] = tensor, node, example
        if varying:
            self._varying.add(identity(tensor))

    def input(self, name: str, example: Tensor) -> Tensor:
        """An argument of the function: a number like `example`, or, where that has dims, a table that the function may look up."""
        node = self.graph.placeholder(name)
        if example.ndim:
            self._captured_nodes[identity(example)] = node
            return example
        number = TensorWithoutMemory(example.dtype)
        self.add(number, node, example, varying=True)
        return number

    def is_known(self, value: Any) -> bool:
        """Whether a tensor is an input, a constant or a result of operations."""
        return isinstance(value, Tensor) and identity(value) in self._known

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor; of a captured one, the node that reads it."""
        if self.is_known(tensor):
            return self._known[identity(tensor)][1]
        if type(tensor) not in (Tensor, Parameter):  # a subclass has operations of its own
            raise _TooComplex
        if identity(tensor) not in self._captured_nodes:
            name = f"captured_{len(self.captured)}"
            self.captured[name] = tensor
            node = self._captured_nodes[identity(tensor)] = self.graph.create_node("get_attr", name)
            node.meta["val"] = torch.empty_like(tensor, device="meta")
        return self._captured_nodes[identity(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # of a tensor subclass, asked by torch's C++, which ends the process at an error
            return func(*args)
        try:
            return self._record(func, args, kwargs or {})
        except Exception:
            self.is_complete = False
            raise

    def _record(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The result of an operation, which is added to the graph."""
        if func is _READ or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise _TooComplex
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        varying = any(identity(x) in self._varying for x in operands)
        if not varying and not all(map(self.is_known, operands)):  # operations on captured tensors alone are the preamble
            raise _TooComplex
        if func is _INDEX:
            table, indices = args
            if len(indices) != table.ndim or not all(isinstance(i, Tensor) and _is_index(i) for i in indices):
                raise _TooComplex
            example = torch.zeros((), dtype=table.dtype)  # any element: the lookup takes place at another index in every call
        elif any(x.ndim for x in operands):
            raise _TooComplex
        else:
            example = func(*tree_map(self._example, args), **tree_map(self._example, kwargs))
        if not isinstance(example, Tensor) or example.ndim or example.device.type != "cpu":
            raise _TooComplex
        result = TensorWithoutMemory(example.dtype) if operands else example  # a constant has a value
        node_args, node_kwargs = (tree_map(lambda x: self.node(x) if isinstance(x, Tensor) else x, x) for x in (args, kwargs))
        self.add(result, self.graph.call_function(func, node_args, node_kwargs), example, varying=varying)
        return result

    def _example(self, x: Any) -> Any:
        """An operand with a value on the CPU."""
        if not isinstance(x, Tensor):
            return x
        return self._known[identity(x)][2] if self.is_known(x) else torch.zeros((), dtype=x.dtype)


def _is_index(tensor: Tensor) -> bool:
    """Whether a tensor is a number that torch takes as an index."""
    return tensor.ndim == 0 and tensor.dtype in (torch.int32, torch.int64)


class _GradientRecorder(_Recorder):
    """Records gradient formulas too, some of which (such as those of clamp and maximum) change a result in place."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: set[int] = set()  # identities of tensors that may share their memory with another

    def _record(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        if not func._schema.is_mutable:
            result = super()._record(func, args, kwargs)
            if not _makes_memory(func):
                self._shared.update(identity(x) for x in (result, *args) if isinstance(x, Tensor))
            return result
        changed, operation = args[0], _out_of_place(func)
        if not isinstance(changed, TensorWithoutMemory) or not _makes_memory(operation):
            raise _TooComplex
        result = super()._record(operation, args, kwargs)
        if identity(changed) in self._shared or not self.is_known(changed) or result.dtype != changed.dtype:
            raise _TooComplex
        _, node, example = self._known[identity(result)]
        self.add(changed, node, example, varying=True)
        return cast(Tensor, changed)


def _makes_memory(func: Any) -> bool:
    """Whether the results of an operation share no memory with its operands. Schemas do not say it of all (`_unsafe_view`)."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _MAKE_MEMORY


def _out_of_place(func: Any) -> Any:
    """The operator `op(x, …)` of an operator `op_(x, …)`."""
    namespace, _, name = func._schema.name.partition("::")
    if not name.endswith("_"):
        raise _TooComplex
    return getattr(getattr(getattr(torch.ops, namespace), name[:-1]), func._overloadname)


def scalar_trace(fn: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Any:
    """A module of captured tensors with the graph of `fn(*inputs)`, as `make_fx` makes it; None if the mod needs torch's tracer."""
    return _traced(_Recorder(), fn, inputs)


def scalar_vjp(fn: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Any:
    """Like `scalar_trace`, for a function that computes gradients by autograd."""
    return _traced(_GradientRecorder(), fn, inputs)


def _traced(recorder: _Recorder, fn: Callable[..., Tensor | list[Tensor]], inputs: Sequence[Tensor]) -> Any:
    values = [recorder.input(f"arg_{i}", tensor) for i, tensor in enumerate(inputs)]
    try:
        with recorder:
            results = fn(*values)
        if not recorder.is_complete or not all(map(recorder.is_known, tree_leaves(results))):
            return None
    except AutogradError:
        raise
    except Exception:  # `_TooComplex`; any other error is torch's tracer's to report
        return None
    recorder.graph.output(tree_map(recorder.node, results))
    return SimpleNamespace(graph=recorder.graph, **recorder.captured)
