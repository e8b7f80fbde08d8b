"""Programs: traced `score_mod` and `mask_mod` functions in the form that kernels receive.

A program is a graph of aten operations on *scalars*: one score, one batch, head, query and key index, and lookups in
captured tensors. A program holds no tensor and no Python callable, so it is a value: two mods with the same graph are
the same program (equal `key`), whatever tensors they captured.

Inputs, in the order of the graph's placeholders:
    score mods:  score, b, h, q, kv, captured_0, captured_1, …   → score (floating point)
    mask mods:          b, h, q, kv, captured_0, captured_1, …   → bool
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from longspan._torch_private import modes_are_active, number_of, with_vmap, without_source

Kind = Literal["score", "mask"]

# Elementwise aten operations: a graph of these runs on whole tiles by broadcasting.
POINTWISE = frozenset(
    """
    abs add sub rsub mul div floor_divide remainder fmod neg reciprocal square sqrt rsqrt pow exp exp2 expm1 log log2 log10 log1p
    sin cos tan sinh cosh tanh asin acos atan atan2 asinh acosh atanh sigmoid relu silu gelu softplus erf erfc hardtanh leaky_relu
    tanh_backward sigmoid_backward threshold_backward silu_backward gelu_backward softplus_backward hardtanh_backward
    leaky_relu_backward sgn sign floor ceil round trunc frac minimum maximum fmin fmax clamp clamp_min clamp_max where
    eq ne lt le gt ge isnan isinf isfinite signbit logical_and logical_or logical_not logical_xor masked_fill
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
    lerp addcmul addcdiv hypot logaddexp logaddexp2 copysign _to_copy clone detach alias lift_fresh_copy index
    zeros_like ones_like full_like empty_like fill
    """.split()
)


def op_name(node: Node) -> str:
    """The aten name of a call, without its overload: `add`, `index`, `where`."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


@dataclass(frozen=True, kw_only=True)
class CapturedSpec:
    """Dtype and rank of a captured tensor: the part that generated kernel code depends on."""

    dtype: torch.dtype
    ndim: int

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A traced mod; see the module's docstring for the calling convention."""

    kind: Kind
    name: str
    graph: Graph
    captured: tuple[CapturedSpec, ...]
    score_dtype: torch.dtype = torch.float32

    @cached_property
    def placeholders(self) -> list[Node]:
        """All inputs, in calling order."""
        return _placeholders(self.graph)

    @property
    def index_nodes(self) -> list[Node]:
        """The placeholders b, h, q, kv."""
        start = 1 if self.kind == "score" else 0
        return self.placeholders[start : start + 4]

    @property
    def captured_nodes(self) -> list[Node]:
        """The placeholders of the captured tensors."""
        return self.placeholders[(5 if self.kind == "score" else 4) :]

    @cached_property
    def result(self) -> Node:
        """The node whose value the program returns."""
        return _output(self.graph)

    @cached_property
    def uses_batch(self) -> bool:
        """Whether the result depends on the batch index."""
        return bool(self.index_nodes[0].users)

    @cached_property
    def uses_head(self) -> bool:
        """Whether the result depends on the head index."""
        return bool(self.index_nodes[1].users)

    @cached_property
    def uses_position(self) -> bool:
        """Whether the result depends on the query or key position."""
        return bool(self.index_nodes[2].users) or bool(self.index_nodes[3].users)

    @cached_property
    def pointwise(self) -> bool:
        """Whether every value is a scalar and every operation elementwise.

        A pointwise program runs on tiles by broadcasting and compiles to Triton. Other programs run through `torch.vmap`.
        """
        return is_pointwise(self.graph)

    @cached_property
    def key(self) -> str:
        """SHA-256 digest of everything that decides the result; stable across processes."""
        text = f"{self.kind} {self.score_dtype} {[(str(c.dtype), c.ndim) for c in self.captured]}\n{canonical_text(self.graph)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run on broadcastable tensors of equal rank, followed by the captured tensors. Score mods take the score first."""
        return run(self.graph, inputs, pointwise=self.pointwise)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as data: a list of nodes with operations by name."""
        return _rebuild, (self.kind, self.name, _nodes_as_data(self.graph), self.captured, self.score_dtype)

    def __repr__(self) -> str:
        return f"Program({self.kind} {self.name!r}, {len(self.captured)} captured, {self.key[:8]})"


def _output(graph: Graph) -> Any:
    return next(n for n in reversed(graph.nodes) if n.op == "output").args[0]


def is_pointwise(graph: Graph) -> bool:
    """Whether a graph has only elementwise operations on scalars and full lookups in captured tensors."""
    captured = {n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("captured_")}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if op_name(node) not in POINTWISE or node.meta["val"].ndim:
            return False
        if op_name(node) == "index":
            table, indices = node.args
            if table not in captured or any(i is None for i in indices):
                return False
        elif any(a in captured and a.meta["val"].ndim for a in node.all_input_nodes):
            return False
    return True


def canonical_text(graph: Graph) -> str:
    """Text of a graph with nodes numbered in order. Graphs with equal text compute the same values."""
    number: dict[Node, str] = {}

    def show(arg: Any) -> str:
        if isinstance(arg, Node):
            return number[arg]
        if isinstance(arg, list | tuple):
            return "(" + ",".join(map(show, arg)) + ")"
        if isinstance(arg, Tensor):
            return f"{arg.dtype}:{arg.tolist()!r}"
        return "device" if isinstance(arg, torch.device) else repr(arg)

    lines = []
    for node in graph.nodes:
        number[node] = f"%{len(number)}"
        kwargs = ",".join(f"{k}={show(v)}" for k, v in sorted(node.kwargs.items()) if k not in ("device", "pin_memory", "layout"))
        target = node.target if node.op == "placeholder" else str(node.target)
        val = node.meta.get("val")
        dtype = val.dtype if isinstance(val, Tensor) else ""
        constant = show(node.meta["constant"]) if "constant" in node.meta else ""
        lines.append(f"{number[node]} {node.op} {target} ({show(node.args)}) {kwargs} {dtype} {constant}")
    return "\n".join(lines)


def run(graph: Graph, inputs: Sequence[Tensor], *, pointwise: bool) -> Any:
    """Evaluate a scalar graph on tensors; returns the value of its output node, with tuples preserved.

    All inputs except captured tensors have the same rank. Scalars inside the graph are reshaped to that rank, because
    torch promotes dtypes differently between a 0-dim and an n-dim tensor. A graph that is not pointwise is mapped with
    `torch.vmap` over the dims of the inputs.
    """
    if not pointwise:
        return _run_mapped(graph, inputs)
    rank = next(t.ndim for t, n in zip(inputs, _placeholders(graph), strict=True) if not n.name.startswith("captured_"))
    device = inputs[0].device

    def lift(t: Tensor) -> Tensor:
        return t.reshape((1,) * rank) if rank and t.ndim == 0 else t

    env: dict[Node, Any] = {}
    feed = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = lift(next(feed))
        elif node.op == "get_attr":
            env[node] = lift(_constant(node, device))
        elif node.op == "output":
            return torch.fx.map_arg(node.args[0], env.__getitem__)
        else:
            args = torch.fx.map_arg(node.args, env.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, env.__getitem__)
            env[node] = call(node.target, args, kwargs, device)
    raise AssertionError("graph without output")


def _constant(node: Node, device: torch.device) -> Tensor:
    """A literal of the graph as a tensor.

    Under a dispatch mode the literal is created again, because fake tensors do not mix with real ones.
    """
    value: Tensor = node.meta["constant"]
    if value.ndim or not modes_are_active():
        return value.to(device)
    return torch.scalar_tensor(number_of(value), dtype=value.dtype, device=device)


def call(target: Callable[..., Any], args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """Call an operation; a `device` argument recorded at trace time is replaced by `device`."""
    if "device" in kwargs:
        kwargs = {**kwargs, "device": device}
    return target(*args, **kwargs)


def _placeholders(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _run_mapped(graph: Graph, inputs: Sequence[Tensor]) -> Any:
    """Evaluate a graph with reductions or vectors inside, by `torch.vmap` over each dim of the inputs."""
    nodes = _placeholders(graph)
    is_mapped = [not n.name.startswith("captured_") for n in nodes]
    rank = next(t.ndim for t, m in zip(inputs, is_mapped, strict=True) if m)
    shape = torch.broadcast_shapes(*(t.shape for t, m in zip(inputs, is_mapped, strict=True) if m))
    inputs = [t.expand(shape) if m else t for t, m in zip(inputs, is_mapped, strict=True)]
    fn: Callable[..., Any] = _as_module(graph, inputs[0].device)
    for _ in range(rank):
        fn = torch.vmap(fn, in_dims=tuple(0 if m else None for m in is_mapped))
    with with_vmap():
        return fn(*inputs)


def _as_module(graph: Graph, device: torch.device) -> GraphModule:
    """A runnable copy of a graph with constants and factory calls on `device`."""
    root = torch.nn.Module()
    copy = Graph()
    env: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(str(node.target), node.meta["constant"].to(device), persistent=False)
        env[node] = copy.node_copy(node, env.__getitem__)
        if "device" in node.kwargs:
            env[node].kwargs = {**env[node].kwargs, "device": device}
    return without_source(GraphModule(root, copy))


@dataclass(frozen=True)
class _Ref:
    """A reference to a node by its position, for pickled arguments."""

    number: int


def _nodes_as_data(graph: Graph) -> list[tuple[Any, ...]]:
    """The nodes as picklable tuples (op, name, target, args, kwargs, shape, constant); `_rebuild` is the inverse."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    records = []

    def by_number(node: Node) -> Any:
        return _Ref(number[node])

    for node in graph.nodes:
        args, kwargs = (torch.fx.map_arg(a, by_number) for a in (node.args, dict(node.kwargs)))
        target = str(node.target) if node.op == "call_function" else node.target
        value = node.meta.get("val")
        shape = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
        records.append((node.op, node.name, target, _plain(args), _plain(kwargs), shape, node.meta.get("constant")))
    return records


def _plain(arg: Any) -> Any:
    """Convert fx's immutable containers to plain ones, recursively."""
    if isinstance(arg, dict):
        return {k: _plain(v) for k, v in arg.items()}
    return type(arg)(map(_plain, arg)) if type(arg) is tuple else [_plain(a) for a in arg] if isinstance(arg, list) else arg


def _rebuild(kind: Kind, name: str, nodes: list[tuple[Any, ...]], captured: tuple[CapturedSpec, ...], score_dtype: torch.dtype) -> Program:
    """The program of pickled nodes (see `_nodes_as_data`)."""
    graph = Graph()
    graph_nodes: list[Node] = []

    def resolve(arg: Any) -> Any:
        if isinstance(arg, _Ref):
            return graph_nodes[arg.number]
        if isinstance(arg, dict):
            return {k: resolve(v) for k, v in arg.items()}
        return type(arg)(map(resolve, arg)) if type(arg) in (tuple, list) else arg

    for op, node_name, target, args, kwargs, shape, constant in nodes:
        node = graph.create_node(op, _operation(target) if op == "call_function" else target, resolve(args), resolve(kwargs), node_name)
        node.meta["val"] = torch.empty(shape[1], dtype=shape[0], device="meta") if isinstance(shape, tuple) else shape
        if constant is not None:
            with torch.inference_mode(False):  # an inference tensor could not be used in training later
                node.meta["constant"] = constant.clone()
        graph_nodes.append(node)
    return Program(kind=kind, name=name, graph=graph, captured=captured, score_dtype=score_dtype)


def _operation(name: str) -> Any:
    """The torch operation of a name such as `aten.add.Tensor`."""
    operation: Any = torch.ops
    for part in name.split("."):
        operation = getattr(operation, part)
    return operation
