"""Tracing of a Python mod into a scalar `Program`, a preamble and captured tensors.

Operations on captured tensors alone (the exponential in `self.table.exp()[h]`) form the preamble. It runs once per attention call in
plain torch, under autograd; the program captures its results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode

from longspan._masks.program import CapturedSpec, Kind, Program, call, op_name
from longspan._masks.scalar_trace import scalar_trace
from longspan._masks.trace_autograd import AutogradInMod, check_detach
from longspan._torch_modes import without_user_defaults
from longspan._torch_private import (
    DispatchModeOutsideOfDynamo,
    OpOverload,
    fake_trace,
    outside_of_modes,
    sizes_of_values,
    without_saved_tensor_hooks,
    without_source,
)

INPUTS: dict[Kind, tuple[str, ...]] = {"score": ("score", "b", "h", "q", "kv"), "mask": ("b", "h", "q", "kv")}


class ProgramError(ValueError):
    """Raised for a mod that cannot be traced into a program; the message names the mod and the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A program and the origin of its captured tensors.

    Attributes:
        program: The scalar program.
        sources: Tensors that the mod captured.
        preamble: Graph from the sources to the program's captured tensors; None if those are the sources themselves.
        has_read_values: Whether the mod read the value of a captured tensor in Python (`int()`, `if`): the program holds it as a number.
    """

    program: Program
    sources: tuple[Tensor, ...]
    preamble: GraphModule | None
    has_read_values: bool = False

    def captured(self) -> list[Tensor]:
        """Captured tensors of the program, computed from the current values of the sources, differentiably.

        Autocast is off, because the program was traced for fixed dtypes.
        """
        if self.preamble is None:
            return list(self.sources)
        with without_user_defaults():
            return list(self.preamble(*self.sources))


class _IndexAsGather(TorchFunctionMode):
    """Dispatch `table[i, j]` with scalar tensor indices to one `aten.index`; by default torch reads the values of the scalars."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            scalars = all(isinstance(i, Tensor) or type(i) is int for i in index)
            if scalars and any(isinstance(i, Tensor) and i.dtype not in (torch.bool, torch.uint8) for i in index):
                indices = [i if isinstance(i, Tensor) else torch.full((), i, dtype=torch.int64) for i in index]
                return torch.ops.aten.index.Tensor(table, indices)
        return func(*args, **(kwargs or {}))


class _ValueReads(DispatchModeOutsideOfDynamo):
    """Notes whether operations read the value of a tensor in Python. `make_fx` records no read of a captured tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def noting(self, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`fn` in this mode: inside of the tracer's."""

        def noted(*args: Tensor) -> Tensor:
            with self:
                return fn(*args)

        return noted


_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def mod_name(fn: Any) -> str:
    """Name of a mod for messages: of the function, or of its class."""
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__


def trace(fn: Callable[..., Any], kind: Kind, *, score_dtype: torch.dtype = torch.float32, name: str | None = None) -> Traced:
    """Trace a mod over scalar tensors, independently of the caller's inference mode, autocast and dispatch modes.

    Args:
        fn: The mod: (b, h, q, kv) → bool for kind "mask", (score, b, h, q, kv) → float for kind "score".
        kind: "mask" or "score".
        score_dtype: Dtype of the score argument.
        name: Name of the mod in error messages; by default its own.

    Raises:
        TypeError: `fn` is not callable or does not return a tensor.
        ProgramError: The mod mutates a tensor, branches in Python on the value of a tensor, computes with a size that depends on values,
            draws random numbers, changes a gradient other than by operations, `detach` and `torch.no_grad()`, or returns a tensor of the
            wrong shape or dtype.
    """
    name = name or mod_name(fn)
    if not callable(fn):
        raise TypeError(f"{kind}_mod: expected a callable ({', '.join(INPUTS[kind])}) -> Tensor, got {type(fn).__name__}")
    differentiable = torch.is_grad_enabled()
    checked, reads = _checked(fn, kind, name, grad_mode=differentiable), _ValueReads()
    with outside_of_modes(), _errors_named(kind, name), _IndexAsGather(), _default_modes():
        module = scalar_trace(checked, _inputs(kind, score_dtype)) or fake_trace(reads.noting(checked), *_inputs(kind, score_dtype))
        _check_pure(module.graph, kind, name)
        if kind == "score" and differentiable:
            check_detach(module.graph)
        _join_chained_lookups(module.graph)
        module.graph.eliminate_dead_code()
        return replace(_split(module, kind, name, score_dtype), has_read_values=reads.has_read)


def takes_tensors(fn: Callable[..., Any], kind: Kind, more: Sequence[Tensor], *, score_dtype: torch.dtype = torch.float32) -> bool:
    """Whether `fn(*mod_inputs, *more)` can be traced without reading the values of the scalar tensors `more`."""
    try:
        with outside_of_modes(), _IndexAsGather(), _default_modes():
            graph = fake_trace(fn, *_inputs(kind, score_dtype), *more).graph
    except Exception:
        return False
    return all(op_name(node) != "_local_scalar_dense" for node in graph.nodes if isinstance(node.target, OpOverload))


def _inputs(kind: Kind, score_dtype: torch.dtype) -> list[Tensor]:
    """Example inputs of a mod: 0-dim CPU tensors."""
    indices = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(4)]
    return [torch.zeros((), dtype=score_dtype, device="cpu"), *indices] if kind == "score" else indices


@contextmanager
def _default_modes() -> Iterator[None]:
    """Context without inference mode, autograd, autocast and the caller's saved-tensor hooks.

    The constants of a program must be usable in training too. A mod may turn autograd on, and activation checkpointing counts the
    tensors that its hooks see: a trace must look like a cache hit to it.
    """
    # inference_mode(False) turns autograd on, so it must precede no_grad.
    with torch.inference_mode(False), torch.no_grad(), without_user_defaults(), without_saved_tensor_hooks():
        yield


@contextmanager
def _errors_named(kind: Kind, name: str) -> Iterator[None]:
    """Context that converts errors of the trace to ProgramError with the name of the mod."""
    try:
        yield
    except (ProgramError, TypeError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__ or "_local_scalar_dense" in str(error):
            reason = (
                "its Python control flow depends on the value of a tensor (`if`, `while`, `int()`, `.item()`). "
                "Write the choice with torch.where, & and |"
            )
        raise ProgramError(f"{kind}_mod {name!r} cannot be traced: {reason}") from error


def _checked(fn: Callable[..., Any], kind: Kind, name: str, *, grad_mode: bool) -> Callable[..., Tensor]:
    """`fn` with a check of its result's type, shape and dtype, which runs during the trace."""
    expected = "a scalar (0-dim) bool tensor" if kind == "mask" else "a scalar (0-dim) floating-point tensor"

    def checked(*args: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad_mode), AutogradInMod(differentiable=kind == "score" and grad_mode).watch():
            out = fn(*args)
        if not isinstance(out, Tensor):
            raise TypeError(f"{kind}_mod {name!r} must return {expected}, got {type(out).__name__}")
        if out.ndim:
            raise ProgramError(
                f"{kind}_mod {name!r} must return {expected}, got shape {tuple(out.shape)}: reduce it, e.g. with .sum() or .all()"
            )
        dtype_matches = out.dtype == torch.bool if kind == "mask" else out.dtype.is_floating_point
        if not dtype_matches:
            hint = "compare or use .bool()" if kind == "mask" else "use .float() or torch.where(mask, score, -inf)"
            raise ProgramError(f"{kind}_mod {name!r} must return {expected}, got dtype {out.dtype}: {hint}")
        return out

    return checked


def _check_pure(graph: Graph, kind: Kind, name: str) -> None:
    """Raise ProgramError for in-place operations, random numbers, reads of tensor values in Python, and wide unsigned integers in masks."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload):
            continue
        value = node.meta.get("val")
        if kind == "mask" and isinstance(value, Tensor) and value.dtype in _WIDE_UNSIGNED:
            raise ProgramError(
                f"{kind}_mod {name!r} computes with {value.dtype}, for which torch has no minimum: expected bool, uint8, signed integers "
                "or floating point. Convert a captured tensor before its lookup: table.long()[kv]"
            )
        if target._schema.is_mutable:
            raise ProgramError(
                f"{kind}_mod {name!r} mutates a tensor ({target.overloadpacket.__name__}); mods must be pure: "
                "write `x = x + y`, not `x += y`"
            )
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise ProgramError(
                f"{kind}_mod {name!r} draws random numbers ({op_name(node)}); draw them before the call and capture the tensor"
            )
        if op_name(node) == "_local_scalar_dense":
            raise ProgramError(
                f"{kind}_mod {name!r} reads the value of a tensor in Python (`.item()`, `int()`, `float()`); keep the value in a tensor"
            )


def _join_chained_lookups(graph: Graph) -> None:
    """Replace `table[h][q]` by `table[h, q]`: one scalar lookup, without a row tensor in between."""
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) != "index":
            continue
        inner, indices = node.args
        if isinstance(inner, Node) and inner.op == "call_function" and op_name(inner) == "index":
            scalars = [*cast(Any, inner.args[1]), *cast(Any, indices)]
            if all(isinstance(i, Node) and i.meta["val"].ndim == 0 for i in scalars):
                node.args = (inner.args[0], scalars)


def _split(module: GraphModule, kind: Kind, name: str, score_dtype: torch.dtype) -> Traced:
    """Split a trace into the preamble (operations on captured tensors alone) and the scalar program."""
    inputs = INPUTS[kind]
    depends: set[Node] = set()
    constants: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and op_name(node) in _LIKE and not node.meta["val"].ndim:
            constants[node] = _like(node)
        elif node.op == "placeholder" or any(a in depends for a in node.all_input_nodes):
            depends.add(node)
        elif node.op == "call_function" and (value := _constant(node, constants, module)) is not None:
            constants[node] = value

    frontier: list[Node] = []
    for node in module.graph.nodes:
        for used in node.all_input_nodes:
            if (node in depends or node.op == "output") and used not in depends and used not in constants and used not in frontier:
                frontier.append(used)
    _check_shapes(depends, frontier, module, kind, name)
    sources, preamble, order = _preamble(module, frontier, constants)

    graph = Graph()
    env: dict[Node, Node] = {}
    for node, label in zip([n for n in module.graph.nodes if n.op == "placeholder"], inputs, strict=True):
        env[node] = graph.placeholder(label)
        env[node].meta["val"] = node.meta["val"]
    captured: list[Node] = []
    for i, group in enumerate(order):
        placeholder = graph.placeholder(f"captured_{i}")
        placeholder.meta["val"] = torch.empty_like(_value(group[0], module), device="meta")  # a cached program must not keep tensors alive
        captured.append(placeholder)
        env.update(dict.fromkeys(group, placeholder))
    used_constants = [n for n in constants if any(u in depends or u.op == "output" for u in n.users)]
    for node in module.graph.nodes:
        if node in used_constants:
            env[node] = graph.create_node("get_attr", f"constant_{used_constants.index(node)}")
            env[node].meta.update(constant=constants[node], val=constants[node])
        elif node in depends and node.target is torch.ops.aten.masked_fill.Tensor:
            env[node] = _filled(graph, *(env[cast(Node, a)] for a in node.args))
            env[node].meta["val"] = node.meta["val"]
        elif node in depends and node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
        elif node.op == "output":
            graph.output(env[cast(Node, node.args[0])])
    specs = tuple(CapturedSpec(dtype=c.meta["val"].dtype, ndim=c.meta["val"].ndim) for c in captured)
    program = Program(kind=kind, name=name, graph=graph, captured=specs, score_dtype=score_dtype)
    return Traced(program=program, sources=sources, preamble=preamble)


def _filled(graph: Graph, x: Node, hidden: Node, value: Node) -> Node:
    """`where(hidden, value, x)` in place of `x.masked_fill(hidden, value)`, which takes 0-dim values only: programs run on tiles."""
    dtype = x.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})
        value.meta["val"] = torch.empty((), dtype=dtype, device="meta")
    return graph.call_function(torch.ops.aten.where.self, (hidden, value, x))


def _check_shapes(depends: set[Node], frontier: list[Node], module: GraphModule, kind: Kind, name: str) -> None:
    """Raise ProgramError if the program reads a size that depends on the values of a tensor, or has such a shape itself.

    The preamble, and the tensors that the program captures, may have such shapes.
    """

    def unknown(node: Node) -> set[Any]:
        return sizes_of_values(node.meta.get("val"))

    reads_size = not all(isinstance(_value(node, module), Tensor) for node in frontier)
    has_shape = any(unknown(node) - set[Any]().union(*map(unknown, node.all_input_nodes)) for node in depends)
    if reads_size or has_shape:
        raise ProgramError(
            f"{kind}_mod {name!r} computes with a shape that depends on values of a tensor (nonzero, unique, bincount, indexing by bools): "
            "expected sizes that are known without values. Compute such a size before the mod and capture it as a tensor; choose by b, h, "
            "q and kv with torch.where"
        )


def _value(node: Node, module: GraphModule) -> Tensor:
    """Captured tensor of a get_attr node, fake tensor of any other node."""
    return operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else node.meta["val"]


_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})


def _like(node: Node) -> Tensor:
    """Value of `zeros_like(x)`, `x.new_full(…)` and the like for a scalar x: it depends on the dtype of x, not on its value."""
    args, kwargs = (
        torch.fx.map_arg(x, lambda n: torch.zeros((), dtype=n.meta["val"].dtype, device="cpu")) for x in (node.args, node.kwargs)
    )
    return call(cast(Any, node.target), args, cast(Any, kwargs), torch.device("cpu"))


def _constant(node: Node, known: dict[Node, Tensor], module: GraphModule) -> Tensor | None:
    """Value of a scalar that depends on literals alone (`torch.tensor(2.0)`, `full((), 3)`), else None."""
    if not isinstance(node.meta.get("val"), Tensor) or node.meta["val"].ndim:
        return None
    if op_name(node) == "lift_fresh_copy":
        return _value(cast(Node, node.args[0]), module).detach().cpu()
    if all(a in known for a in node.all_input_nodes):
        args, kwargs = (torch.fx.map_arg(x, known.__getitem__) for x in (node.args, node.kwargs))
        return call(cast(Any, node.target), args, cast(Any, kwargs), torch.device("cpu"))
    return None


def _preamble(
    module: GraphModule, frontier: list[Node], constants: dict[Node, Tensor]
) -> tuple[tuple[Tensor, ...], GraphModule | None, list[list[Node]]]:
    """Sources, the graph from them to the captured tensors, and the trace's nodes for each captured tensor.

    Nodes that read the same tensor share one captured tensor. The graph is None if every captured tensor is a source.
    """
    groups: dict[Any, list[Node]] = {}
    for node in frontier:
        groups.setdefault(id(_value(node, module)) if node.op == "get_attr" else node, []).append(node)
    order = list(groups.values())
    if all(n.op == "get_attr" for n in frontier):
        return tuple(_value(group[0], module) for group in order), None, order
    graph = Graph()
    env: dict[Node, Node] = {}
    sources: dict[int, tuple[Tensor, Node]] = {}
    needed = _ancestors(frontier, stop=constants)
    for node in module.graph.nodes:
        if node not in needed:
            continue
        if node in constants:
            value = constants[node]
            env[node] = graph.call_function(torch.ops.aten.scalar_tensor.default, (value.item(),), {"dtype": value.dtype})
        elif node.op == "get_attr":
            tensor = _value(node, module)
            if id(tensor) not in sources:
                sources[id(tensor)] = (tensor, graph.placeholder(f"source_{len(sources)}"))
            env[node] = sources[id(tensor)][1]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[group[0]] for group in order))
    return tuple(t for t, _ in sources.values()), without_source(GraphModule(torch.nn.Module(), graph)), order


def _ancestors(nodes: list[Node], *, stop: Container[Node]) -> set[Node]:
    """`nodes` and their transitive inputs; inputs of nodes in `stop` are not followed."""
    seen, todo = set(nodes), list(nodes)
    while todo:
        node = todo.pop()
        for parent in node.all_input_nodes if node not in stop else ():
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return seen
