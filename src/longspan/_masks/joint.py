"""Gradients of score programs: from the gradient of the modified score to gradients of the score and of each captured lookup."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from longspan._masks.program import Program, is_pointwise, op_name, run
from longspan._masks.scalar_trace import scalar_vjp
from longspan._torch_private import fake_trace, outside_of_modes

# Operations that autograd records for literals. They have no inputs, so each becomes a constant of the graph.
_CONSTANTS = frozenset({"scalar_tensor", "_efficientzerotensor"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Joint:
    """The gradient graph of a score program: (grad, score, b, h, q, kv, captured…) → (d_score, (d_read…), ((index…)…)).

    Read r is an element of captured tensor `reads[r]` at the scalar indices `index_r` (no indices: the whole tensor).
    The caller accumulates `d_read_r` there. Integer tensors have no reads.
    """

    graph: Graph
    reads: tuple[int, ...]

    @cached_property
    def pointwise(self) -> bool:
        return is_pointwise(self.graph)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]:
        return run(self.graph, inputs, pointwise=self.pointwise)


def joint_of(program: Program, sizes: Sequence[Sequence[int]] | None = None) -> Joint:
    """Differentiate a score program into a graph that runs without autograd.

    `sizes`: shapes of the captured tensors. Required unless the program is pointwise: autograd records the sizes of rows and whole
    tensors in the gradient (for example the divisor of a mean).

    Tracing runs in a thread of its own. Inference mode, autocast, the default device and the dispatch state inside a custom operator
    (where autograd does not record) are thread-local, so none of them changes the graph.
    """
    with outside_of_modes(), ThreadPoolExecutor(1, "longspan-joint") as thread:
        return thread.submit(_joint_of, program, sizes).result()


def _joint_of(program: Program, sizes: Sequence[Sequence[int]] | None) -> Joint:
    if torch.is_anomaly_enabled():  # anomaly mode reads the values of gradients; fake tensors have none
        with torch.autograd.set_detect_anomaly(False):
            return _joint_of(program, sizes)
    reads = _differentiable_reads(program)
    forward = _with_reads_as_inputs(program, [node for _, node in reads])
    vjp = _trace_vjp(forward, program, [node for _, node in reads], _captured_sizes(program, sizes))

    graph = Graph()
    grad = graph.placeholder("grad")
    env: dict[Node, Any] = {}
    for node in program.placeholders:
        env[node] = graph.node_copy(node)
    grad.meta["val"] = program.result.meta["val"]
    index_nodes = [_indices(node) for _, node in reads]
    for node in _in_order(program.graph, [n for _, n in reads] + [i for ix in index_nodes for i in ix]):
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    inner: dict[Node, Any] = {}
    vjp_inputs = iter([grad, *(env[p] for p in program.placeholders), *(env[node] for _, node in reads)])
    for node in vjp.graph.nodes:
        if node.op == "placeholder":
            inner[node] = next(vjp_inputs)
        elif node.op == "get_attr":
            constant = getattr(vjp, str(node.target)).detach()
            inner[node] = graph.create_node("get_attr", f"constant_{len(inner)}_of_gradient")
            inner[node].meta.update(constant=constant, val=constant)
        elif node.op == "call_function" and op_name(node) in _CONSTANTS:
            constant = torch.full((), node.args[0] if op_name(node) == "scalar_tensor" else 0, dtype=node.meta["val"].dtype)
            inner[node] = graph.create_node("get_attr", f"constant_{len(inner)}_of_gradient")
            inner[node].meta.update(constant=constant, val=constant)
        elif node.op == "call_function" and op_name(node) == "detach":
            inner[node] = inner[node.args[0]]
        elif node.op == "output":
            outs = torch.fx.map_arg(node.args[0], inner.__getitem__)
            graph.output((outs[0], tuple(outs[1:]), tuple(tuple(env[i] for i in ix) for ix in index_nodes)))
        else:
            inner[node] = graph.node_copy(node, inner.__getitem__)
    graph.eliminate_dead_code()
    return Joint(graph=graph, reads=tuple(c for c, _ in reads))


def _differentiable_reads(program: Program) -> list[tuple[int, Node]]:
    """(captured index, node) for each lookup in, or whole use of, a floating-point captured tensor."""
    reads: list[tuple[int, Node]] = []
    for i, (spec, node) in enumerate(zip(program.captured, program.captured_nodes, strict=True)):
        if not spec.differentiable:
            continue
        lookups = [u for u in node.users if op_name(u) == "index" and u.args[0] is node and None not in cast(list[Any], u.args[1])]
        reads += [(i, u) for u in lookups]
        if any(u not in lookups for u in node.users):
            reads.append((i, node))
    return reads


def _indices(read: Node) -> list[Node]:
    """The index nodes of a lookup; empty for a captured tensor used whole."""
    return [] if read.op == "placeholder" else list(cast(Sequence[Node], read.args[1]))


def _with_reads_as_inputs(program: Program, reads: list[Node]) -> Graph:
    """The forward graph with each read replaced by a further placeholder."""
    graph = Graph()
    env: dict[Node, Node] = {p: graph.node_copy(p) for p in program.placeholders}
    for i, read in enumerate(reads):
        env[read] = graph.placeholder(f"captured_read_{i}")
    for node in program.graph.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    return graph


def _captured_sizes(program: Program, sizes: Sequence[Sequence[int]] | None) -> dict[Node, tuple[int, ...]]:
    """The shape of each captured placeholder; ones where a pointwise program leaves shapes open."""
    if sizes is None:
        if not program.pointwise:
            raise ValueError(
                f"score_mod {program.name!r} computes with whole captured tensors: expected their shapes, got sizes=None; "
                "pass sizes=[t.shape for t in captured]"
            )
        sizes = [(1,) * spec.ndim for spec in program.captured]
    return {node: tuple(size) for node, size in zip(program.captured_nodes, sizes, strict=True)}


def _trace_vjp(forward: Graph, program: Program, reads: list[Node], sizes: dict[Node, tuple[int, ...]]) -> Any:
    """A module with the graph of the function (grad, *placeholders, *reads) → [d_score, *d_reads]."""

    def vjp(grad: Tensor, *inputs: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            n = len(program.placeholders)
            wrt = [t.detach().requires_grad_() for t in (inputs[0], *inputs[n:])]
            out = run(forward, [wrt[0], *inputs[1:n], *wrt[1:]], pointwise=True)
            if not out.requires_grad:
                _require_autograd(wrt[0])
                return [torch.zeros_like(t) for t in wrt]
            out.register_hook(lambda _: grad)  # as an argument of `grad`, torch would import sympy to compare its size
            grads = torch.autograd.grad(out, wrt, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, wrt, strict=True)]

    def example(node: Node) -> Tensor:
        size = sizes.get(node, ()) if node.op == "placeholder" else sizes[cast(Node, node.args[0])][len(_indices(node)) :]
        return torch.ones(size, dtype=node.meta["val"].dtype)

    grad = torch.zeros((), dtype=program.result.meta["val"].dtype)
    examples = [grad, *(example(p) for p in program.placeholders), *(example(r) for r in reads)]
    if module := scalar_vjp(vjp, examples):
        return module
    module = fake_trace(vjp, *examples)
    # Some backward formulas mutate tensors (such as those of clamp and maximum); programs may not, so functionalize.
    return fake_trace(torch.func.functionalize(module), *examples)


def _require_autograd(leaf: Tensor) -> None:
    """Raise RuntimeError if autograd does not record here, in which case a zero gradient would be silently wrong."""
    if not leaf.neg().requires_grad:
        raise RuntimeError(
            "the gradient of a score_mod cannot be traced: expected autograd to record operations on this thread, but it does not; "
            "report this with your torch version"
        )


def _in_order(graph: Graph, roots: list[Node]) -> list[Node]:
    """`roots` and all their ancestors, in the graph's order."""
    needed, todo = set(roots), list(roots)
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in needed:
                needed.add(parent)
                todo.append(parent)
    return [n for n in graph.nodes if n in needed]
