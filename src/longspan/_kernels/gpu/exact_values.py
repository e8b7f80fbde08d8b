"""Values of a program that must equal torch's to the last bit: operands of discontinuous operations.

After `floor`, a comparison or a conversion to integers, the last bit of the operand can change the result: 41 · (1/41) is below 1, and its
floor is 0. Elsewhere a difference in the last bit is an ordinary rounding error.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from longspan._masks.program import op_name

# Discontinuous operations with floating-point results. Operations from floats to integers or bools are discontinuous too.
_DISCONTINUOUS = frozenset(
    """
    floor ceil trunc round frac floor_divide remainder fmod sgn sign copysign pow
    threshold_backward leaky_relu_backward hardtanh_backward
    """.split()
)


def decisive(graph: Graph) -> frozenset[Node]:
    """The nodes that a discontinuous operation depends on."""
    nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (node in nodes or _is_discontinuous(node)):
            nodes.update(node.all_input_nodes)
    return frozenset(nodes)


def _is_discontinuous(node: Node) -> bool:
    if not node.meta["val"].dtype.is_floating_point:
        return True
    name = op_name(node)
    if name == "pow":
        return isinstance(node.args[1], Node)
    return name in _DISCONTINUOUS or node.kwargs.get("rounding_mode") is not None
