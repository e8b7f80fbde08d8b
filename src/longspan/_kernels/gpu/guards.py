"""Where values of a program reach its result, and where a condition discards them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from longspan._masks.program import Program, op_name

_AND = frozenset(("bitwise_and", "logical_and", "__and__"))
_OR = frozenset(("bitwise_or", "logical_or", "__or__"))


def reached(program: Program, env: dict[Node, Any], seen: Tensor) -> dict[Node, Tensor]:
    """For each node, the pairs where its value certainly reaches the result.

    `env`: the value of every node. `seen`: the pairs whose result is used. A condition that depends on the score is certain nowhere.
    """
    unsure = _from_score(program)
    counts: dict[Node, Tensor] = {program.result: seen} if isinstance(program.result, Node) else {}
    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and node in counts:
            for operand, where in _operands(node, env, unsure):
                mine = counts[node] if where is None else counts[node] & where
                counts[operand] = counts[operand] | mine if operand in counts else mine
    return counts


def _from_score(program: Program) -> set[Node]:
    """The nodes that depend on the score."""
    nodes: set[Node] = {program.placeholders[0]} if program.kind == "score" else set()
    for node in program.graph.nodes:
        if any(a in nodes for a in node.all_input_nodes):
            nodes.add(node)
    return nodes


def _operands(node: Node, env: dict[Node, Any], unsure: set[Node]) -> Iterator[tuple[Node, Tensor | None]]:
    """Each operand, and where the node's value depends on it; None is everywhere."""
    name, args = op_name(node), node.args
    given: dict[int, Tensor | None] = {}
    if name == "where":
        given = {1: _holds(args[0], env, unsure, True), 2: _holds(args[0], env, unsure, False)}
    elif name == "masked_fill":
        given = {0: _holds(args[1], env, unsure, False), 2: _holds(args[1], env, unsure, True)}
    elif name in _AND | _OR and node.meta["val"].dtype == torch.bool:
        given = {i: _holds(args[1 - i], env, unsure, name in _AND) for i in (0, 1)}
    elif name == "mul":
        given = {i: None if args[1 - i] in unsure else _holds(args[1 - i], env, unsure, True) for i in (0, 1)}
    for i, arg in enumerate(args):
        if isinstance(arg, Node):
            yield arg, given.get(i)
        elif isinstance(arg, list | tuple):
            yield from ((a, None) for a in arg if isinstance(a, Node))
    yield from ((a, None) for a in node.kwargs.values() if isinstance(a, Node))


def _holds(condition: Any, env: dict[Node, Any], unsure: set[Node], wanted: bool) -> Tensor:
    """Where a value is certainly true (not 0), or false."""
    if condition in unsure:
        return torch.zeros(1, 1, 1, dtype=torch.bool)
    value = env[condition] if isinstance(condition, Node) else torch.full((1, 1, 1), condition)
    return (value != 0) if wanted else (value == 0)
