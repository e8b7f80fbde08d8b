"""The gradient of a score program: from the gradient of the new score to those of the old score and of each captured lookup."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from longspan._masks.program import Program, is_pointwise, op_name, run
from longspan._torch_private import outside_of_modes

# What autograd writes for literals: no inputs, so each becomes a constant of the graph.
_CONSTANTS = frozenset({"scalar_tensor", "_efficientzerotensor"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Joint:
    """A graph (grad, score, b, h, q, kv, captured…) → (d_score, (d_read…), ((index…)…)).

    Read r took an element of captured tensor `reads[r]` at the scalar indices `index_r` (none for a tensor used whole); its
    gradient is to be added there. Reads of a tensor that holds integers do not appear.
    """

    graph: Graph
    reads: tuple[int, ...]

    @cached_property
    def pointwise(self) -> bool:
        return is_pointwise(self.graph)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]:
        return run(self.graph, inputs, pointwise=self.pointwise)


def joint_of(program: Program, sizes: Sequence[Sequence[int]] | None = None) -> Joint:
    """Differentiate a score program once, as a graph; no autograd is needed to run it.

    `sizes`: of the captured tensors. A program that is `pointwise` does without: it reads numbers. In the gradient of one that computes
    with rows or whole tensors, autograd writes their sizes down (a mean's is divided by them).

    The graph is the same wherever this is called: in inference mode, below an operator (where autograd does not record), under autocast
    or a default device. All of these belong to the caller's thread, so the work is done in a thread of its own.
    """
    with outside_of_modes(), ThreadPoolExecutor(1, "longspan-joint") as thread:
        return thread.submit(_joint_of, program, sizes).result()


def _joint_of(program: Program, sizes: Sequence[Sequence[int]] | None) -> Joint:
    if torch.is_anomaly_enabled():  # it asks gradients for their values, which those of a trace do not have
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
    feed = [grad, *(env[p] for p in program.placeholders), *(env[node] for _, node in reads)]
    feeds = iter(feed)
    for node in vjp.graph.nodes:
        if node.op == "placeholder":
            inner[node] = next(feeds)
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
    found: list[tuple[int, Node]] = []
    for i, (spec, node) in enumerate(zip(program.captured, program.captured_nodes, strict=True)):
        if not spec.differentiable:
            continue
        lookups = [u for u in node.users if op_name(u) == "index" and u.args[0] is node and None not in cast(list[Any], u.args[1])]
        found += [(i, u) for u in lookups]
        if any(u not in lookups for u in node.users):
            found.append((i, node))
    return found


def _indices(read: Node) -> list[Node]:
    return [] if read.op == "placeholder" else list(cast(Sequence[Node], read.args[1]))


def _with_reads_as_inputs(program: Program, reads: list[Node]) -> Graph:
    """The forward graph with further placeholders, one per read, in place of the reads."""
    graph = Graph()
    env: dict[Node, Node] = {p: graph.node_copy(p) for p in program.placeholders}
    for i, read in enumerate(reads):
        env[read] = graph.placeholder(f"captured_read_{i}")
    for node in program.graph.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    return graph


def _captured_sizes(program: Program, sizes: Sequence[Sequence[int]] | None) -> dict[Node, tuple[int, ...]]:
    if sizes is None:
        if not program.pointwise:
            raise ValueError(f"score_mod {program.name!r}: it computes with whole tensors: expected the sizes of those captured, got None")
        sizes = [(1,) * spec.ndim for spec in program.captured]
    return {node: tuple(size) for node, size in zip(program.captured_nodes, sizes, strict=True)}


def _trace_vjp(forward: Graph, program: Program, reads: list[Node], sizes: dict[Node, tuple[int, ...]]) -> GraphModule:
    def vjp(grad: Tensor, *inputs: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            n = len(program.placeholders)
            wrt = [t.detach().requires_grad_() for t in (inputs[0], *inputs[n:])]
            out = run(forward, [wrt[0], *inputs[1:n], *wrt[1:]], pointwise=True)
            if not out.requires_grad:
                _require_autograd(wrt[0])
                return [torch.zeros_like(t) for t in wrt]
            grads = torch.autograd.grad(out, wrt, grad, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, wrt, strict=True)]

    def example(node: Node) -> Tensor:
        size = sizes.get(node, ()) if node.op == "placeholder" else sizes[cast(Node, node.args[0])][len(_indices(node)) :]
        return torch.empty(size, dtype=node.meta["val"].dtype)

    grad = torch.zeros((), dtype=program.result.meta["val"].dtype)
    examples = [example(p) for p in program.placeholders] + [example(r) for r in reads]
    module = make_fx(vjp, tracing_mode="fake", _allow_non_fake_inputs=True)(grad, *examples)
    # Autograd works in place here and there (clamp, maximum); a program has values only.
    return make_fx(torch.func.functionalize(module), tracing_mode="fake", _allow_non_fake_inputs=True)(grad, *examples)


def _require_autograd(leaf: Tensor) -> None:
    """Raise where nothing requires a gradient because autograd does not record, not because the program is constant."""
    if not leaf.neg().requires_grad:
        raise RuntimeError("the gradient of a score_mod cannot be traced here: autograd does not record operations on this thread")


def _in_order(graph: Graph, roots: list[Node]) -> list[Node]:
    """`roots` and all they need, in the graph's order."""
    needed, todo = set(roots), list(roots)
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in needed:
                needed.add(parent)
                todo.append(parent)
    return [n for n in graph.nodes if n in needed]
