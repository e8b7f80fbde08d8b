"""Lookups that are uniform over a tile.

A clamped relative position bias reads one element for all distant pairs, so for nearly every tile of a long sequence. An index that is
monotonic in q and in kv has its minimum and maximum in two corners of a tile. Where these agree, one load serves the whole tile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.fx import Graph, Node

from longspan._kernels.gpu.codegen import ByKey, Emitter, Options, function_source, loaded
from longspan._kernels.gpu.lookup_bounds import behind
from longspan._masks.program import Program, op_name

Growth = tuple[int, int]  # with q, with kv: 1 never falls, −1 never rises, 0 stays
STAYS: Growth = (0, 0)


def growths(graph: Graph) -> dict[Node, Growth | None]:
    """The monotonicity of each integer value in q and kv; None where it is not known."""
    growth_of: dict[Node, Growth | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = str(node.target)
            growth_of[node] = {"q": (1, 0), "kv": (0, 1), "b": STAYS, "h": STAYS}.get(name)
        elif node.op == "get_attr":
            growth_of[node] = STAYS
        elif node.op == "call_function":
            growth_of[node] = _of_call(node, growth_of)
    return growth_of


def _of_call(node: Node, growth_of: dict[Node, Growth | None]) -> Growth | None:
    name, args = op_name(node), node.args
    operands = [growth_of.get(a) if isinstance(a, Node) else STAYS for a in args if isinstance(a, Node | int | bool)]
    if name == "index" or any(o is None for o in operands) or any(isinstance(a, float) for a in args):
        return None
    known = [o for o in operands if o is not None]
    value = node.meta.get("val")
    if value is None or value.is_floating_point():
        return None
    if all(o == STAYS for o in known) and not any(isinstance(a, list | tuple) for a in args):
        return STAYS
    if node.kwargs:
        return None
    if name in ("clamp", "clamp_min", "clamp_max", "minimum", "maximum") or (name == "add" and len(args) == 2):
        return _both(known)
    if name == "sub" and len(args) == 2:
        return _both([known[0], _turned(known[1])])
    if name == "neg":
        return _turned(known[0])
    if name in ("mul", "floor_divide") and isinstance(args[1], int) and args[1] > 0:
        return known[0]
    return None


def _turned(growth: Growth) -> Growth:
    return -growth[0], -growth[1]


def _both(growths: list[Growth]) -> Growth | None:
    """The monotonicity of a function that increases with each of its operands."""
    out = []
    for signs in zip(*growths, strict=True):
        if {1, -1} <= set(signs):
            return None
        out.append(max(signs, key=abs))
    return out[0], out[1]


def _lookup(program: Program) -> tuple[Node, int, Growth] | None:
    """(lookup, which index, its monotonicity) of the one lookup that varies within tiles, if its index is monotonic in q and kv."""
    known = growths(program.graph)
    varying = [
        (node, i, known.get(index))
        for node in program.graph.nodes
        if node.op == "call_function" and op_name(node) == "index"
        for i, index in enumerate(node.args[1])  # type: ignore[arg-type]
        if isinstance(index, Node) and known.get(index) != STAYS
    ]
    if len(varying) != 1:
        return None
    node, i, growth = varying[0]
    return None if growth is None or 0 in growth else (node, i, growth)


@lru_cache(maxsize=1024)
def _flat(keyed: ByKey, options: Options) -> tuple[Any, Any] | None:
    program = keyed.program
    lookup = None if program.kind != "score" or options.big_tables else _lookup(program)
    if lookup is None:
        return None
    node, which, growth = lookup
    index: Node = node.args[1][which]  # type: ignore[index, assignment]
    emitter = Emitter(program.graph, options)
    emitter.run(behind([index]))
    value = emitter.value(index)
    name = program.key[:12]
    source = function_source(f"index_{name}", "b, h, q, kv, captured, sizes", [*emitter.lines, f"return {value.text}"])
    low, high = (", ".join(f"{axis}_{'first' if g == sign else 'last'}" for axis, g in zip(("q", "kv"), growth)) for sign in (1, -1))
    corners = (
        f"\n\n@triton.jit\ndef corners_{name}(b, h, q_first, q_last, kv_first, kv_last, captured, sizes):\n"
        f"    low = index_{name}(b, h, {low}, captured, sizes)\n"
        f"    high = index_{name}(b, h, {high}, captured, sizes)\n"
        "    return low, high\n"
    )
    whole = Emitter(program.graph, options)
    whole.given[node] = {which: replace(value, text="at", dims=frozenset())}
    whole.run()
    tile = whole.as_tile(whole.value(program.result), "score")
    flat = function_source(f"flat_{name}", "score, b, h, q, kv, at, captured, sizes", [*whole.lines, f"return {tile}"])
    return loaded(source + corners), loaded(flat)


def flat_functions(program: Program | None, options: Options) -> tuple[Any, Any]:
    """(corners, flat) of a score whose one lookup may be the same all over a tile, else Nones.

    corners(b, h, q_first, q_last, kv_first, kv_last, captured, sizes): the smallest and the largest index in the tile.
    flat(score, b, h, q, kv, at, captured, sizes): the score where both are `at`.
    """
    return (program and _flat(ByKey(program), options)) or (None, None)
