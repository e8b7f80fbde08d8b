"""Lookups of a mod made before the scores are ready, so that their latency overlaps with the computation of the scores.

uniform: depend on batch row and head only (an ALiBi slope, a learned temperature): loaded once, before the loop over tiles.
early: depend on anything but the score (a bias per head and key, a mask's document numbers): loaded one tile ahead by the decode kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.fx import Graph, Node

from longspan._kernels.gpu.codegen import ByKey, Emitter, JointByKey, Options, element_places, function_source, loaded
from longspan._kernels.gpu.lookup_bounds import behind
from longspan._masks.joint import Joint
from longspan._masks.program import Program, op_name

_UNIFORM = ("b", "h")  # inputs that places of lookups may depend on
_EARLY = ("b", "h", "q", "kv", "captured")


def _lookups(graph: Graph) -> dict[int, list[tuple[Any, ...]]]:
    """By captured tensor, the indices of each of its reads; () for a tensor that is read without an index."""
    tables = [n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith("captured_")]
    reads: dict[int, list[tuple[Any, ...]]] = {i: [] for i in range(len(tables))}
    for i, table in enumerate(tables):
        for user in table.users:
            by_index = op_name(user) == "index" and user.args[0] is table if user.op == "call_function" else False
            reads[i].append(tuple(user.args[1]) if by_index else ())  # type: ignore[arg-type]
    return reads


def _following(graph: Graph, inputs: Sequence[str]) -> set[Node]:
    """The nodes whose values depend on placeholders of these names alone."""
    known: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target).split("_")[0] in inputs:
                known.add(node)
        elif node.op == "get_attr" or all(n in known for n in node.all_input_nodes):
            known.add(node)
    return known


@lru_cache(maxsize=1024)
def _hoisted(keyed: JointByKey, inputs: Sequence[str], max_places: int | None = None) -> tuple[int, ...]:
    """The captured tensors that a program and its gradient read at so many places at most, which depend on these inputs alone."""
    graphs = [keyed.program.graph, *([] if keyed.joint is None else [keyed.joint.graph])]
    tables = []
    for i in _lookups(graphs[0]):
        few = max_places is None or all(len(set(_lookups(g)[i])) <= max_places for g in graphs)
        if few and _lookups(graphs[0])[i] and all(_reads_follow(g, i, inputs) for g in graphs):
            tables.append(i)
    return tuple(tables)


def _reads_follow(graph: Graph, table: int, inputs: Sequence[str]) -> bool:
    known = _following(graph, inputs)
    return all(not isinstance(i, Node) or i in known for at in _lookups(graph)[table] for i in at)


def hoisted_options(program: Program | None, joint: Joint | None, options: Options) -> Options:
    """The options with which a program and its gradient read uniform lookups from their arguments (`uniform_function`)."""
    if program is None or program.kind != "score":
        return options
    # A tensor with lookups at two places stays a pointer: a gradient may read one of them only.
    return replace(options, hoisted=_hoisted(JointByKey(program, joint), _UNIFORM, 1))


def early_options(program: Program | None, options: Options) -> Options:
    """The options with which a mod reads early lookups from its arguments (`early_function`), and converts them where it uses them: a
    conversion a tile ahead would wait for the element.
    """
    return options if program is None else replace(options, hoisted=_hoisted(JointByKey(program, None), _EARLY), raw=True)


@lru_cache(maxsize=1024)
def _lookup_function(keyed: ByKey, options: Options, name: str, inputs: Sequence[str]) -> Any:
    emitter = Emitter(keyed.program.graph, replace(options, hoisted=()))
    tables, elements = list(emitter.captured), element_places(keyed.program.graph, options.hoisted)
    emitter.run(behind([x for _, indices in elements for x in indices if isinstance(x, Node)]))
    loads = {}
    for (i, indices), place in elements.items():
        loads[place] = emitter.load_text(tables[i], indices)[0] if options.raw else emitter.load(tables[i], indices).text
    values = [loads.get(i, f"captured[{i}]") for i in range(max(len(tables), *(i + 1 for i in loads)))]
    parameters = ", ".join([*(x for x in inputs if x != "captured"), "captured", "sizes"])
    return loaded(function_source(f"{name}_{keyed.program.key[:12]}", parameters, [*emitter.lines, f"return ({', '.join(values)},)"]))


def uniform_function(program: Program | None, options: Options) -> Any:
    """f(b, h, captured, sizes) → `captured` with the elements that the program reads in place of hoisted tensors; None without any."""
    return None if program is None or not options.hoisted else _lookup_function(ByKey(program), options, "uniform", _UNIFORM)


def early_function(program: Program | None, options: Options) -> Any:
    """f(b, h, q, kv, captured, sizes), as `uniform_function`."""
    return None if program is None or not options.hoisted else _lookup_function(ByKey(program), options, "early", _EARLY)
