"""Lookups of a score mod that depend on batch row and head alone: loaded before the loop over tiles, not in each of its steps.

A slope per head (ALiBi) or a learned temperature is the same for all pairs of a head. Inside the loop, its load follows the wait for
the scores and delays the softmax by the load's latency.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.fx import Graph, Node

from longspan._kernels.gpu.codegen import ByKey, Emitter, JointByKey, Options, function_source, loaded
from longspan._masks.joint import Joint
from longspan._masks.program import Program, op_name


def _lookups(graph: Graph) -> dict[int, list[tuple[Any, ...]]]:
    """By captured tensor, the indices of each of its reads; () for a tensor that is read without an index."""
    tables = [n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith("captured_")]
    reads: dict[int, list[tuple[Any, ...]]] = {i: [] for i in range(len(tables))}
    for i, table in enumerate(tables):
        for user in table.users:
            by_index = op_name(user) == "index" and user.args[0] is table if user.op == "call_function" else False
            reads[i].append(tuple(user.args[1]) if by_index else ())  # type: ignore[arg-type]
    return reads


def _uniform(graph: Graph) -> set[Node]:
    """The nodes whose values depend on neither q, kv, the score nor its gradient."""
    uniform: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target) in ("b", "h"):
                uniform.add(node)
        elif node.op == "get_attr" or all(n in uniform for n in node.all_input_nodes):
            uniform.add(node)
    return uniform


@lru_cache(maxsize=1024)
def _hoisted(keyed: JointByKey) -> tuple[int, ...]:
    graphs = [keyed.program.graph, *([] if keyed.joint is None else [keyed.joint.graph])]
    tables = []
    for i in _lookups(graphs[0]):
        # A tensor with lookups at two places, or at places within the tile, stays a pointer.
        one_place = all(len(set(_lookups(g)[i])) <= 1 for g in graphs)
        if one_place and _lookups(graphs[0])[i] and all(_reads_are_uniform(g, i) for g in graphs):
            tables.append(i)
    return tuple(tables)


def _reads_are_uniform(graph: Graph, table: int) -> bool:
    uniform = _uniform(graph)
    return all(not isinstance(i, Node) or i in uniform for at in _lookups(graph)[table] for i in at)


def hoisted_options(program: Program | None, joint: Joint | None, options: Options) -> Options:
    """The options with which a program and its gradient read such lookups from their arguments (`uniform_function`)."""
    return options if program is None or program.kind != "score" else replace(options, hoisted=_hoisted(JointByKey(program, joint)))


@lru_cache(maxsize=1024)
def _uniform_function(keyed: ByKey, options: Options) -> Any:
    emitter = Emitter(keyed.program.graph, replace(options, hoisted=()))
    tables, lookups = list(emitter.captured), _lookups(keyed.program.graph)
    loads = {i: [x for x in lookups[i][0] if isinstance(x, Node)] for i in options.hoisted}
    dependencies: set[Node] = set()
    pending = [n for nodes in loads.values() for n in nodes]
    while pending:
        node = pending.pop()
        if node not in dependencies:
            dependencies.add(node)
            pending += node.all_input_nodes
    emitter.run(dependencies)
    values = [emitter.load(table, lookups[i][0]).text if i in options.hoisted else f"captured[{i}]" for i, table in enumerate(tables)]
    name = f"uniform_{keyed.program.key[:12]}"
    return loaded(function_source(name, "b, h, captured, sizes", [*emitter.lines, f"return ({', '.join(values)},)"]))


def uniform_function(program: Program | None, options: Options) -> Any:
    """f(b, h, captured, sizes) → `captured` with the hoisted tensors replaced by the elements that the program reads; None without any."""
    return None if program is None or not options.hoisted else _uniform_function(ByKey(program), options)
