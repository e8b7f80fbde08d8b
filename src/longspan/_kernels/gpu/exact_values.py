"""Which values of a program must be what torch computes to the last bit: those that a jump hangs on.

`floor`, a comparison, a conversion to integers: where one of these follows, the last bit of its operand can change the result for good
(41 · (1/41) is below 1, and its floor is 0). Elsewhere a last bit is a rounding error among others.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from longspan._masks.program import op_name

# Floating point in and out, with jumps in between. All that makes integers or truth values of floats jumps too.
_JUMPS = frozenset(
    """
    floor ceil trunc round frac floor_divide remainder fmod sgn sign copysign pow
    threshold_backward leaky_relu_backward hardtanh_backward
    """.split()
)


def decisive(graph: Graph) -> frozenset[Node]:
    """The nodes whose value reaches a jump."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (node in found or _jumps(node)):
            found.update(node.all_input_nodes)
    return frozenset(found)


def _jumps(node: Node) -> bool:
    if not node.meta["val"].dtype.is_floating_point:
        return True
    name = op_name(node)
    if name == "pow":
        return isinstance(node.args[1], Node)
    return name in _JUMPS or node.kwargs.get("rounding_mode") is not None
