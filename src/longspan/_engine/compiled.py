"""Attention under torch.compile: mods, which are Python callables, become programs of the opaque operator.

Custom operators take no callables, and Dynamo has no public way to trace a callable into a value. FlexAttention uses a higher-order
operator: Dynamo traces the callable into a subgraph and lifts captured tensors into operands. `BaseHOP` gives other operators the same
treatment. In AOTAutograd, where our higher-order operator is a plain Python call, the subgraph is traced like any mod and the custom
operator is called. The compiled graph contains the custom operator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from longspan._engine import ops
from longspan._engine.checks import reject_transforms
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.selected_ops import attend_selected
from longspan._engine.spec import Spec
from longspan._kernels.dense import Scoring, dense_attention
from longspan._kernels.protocol import like_query, state_dtype
from longspan._masks.algebra import Mask
from longspan._masks.program import Kind
from longspan._masks.tracing import ProgramError, Traced, takes_tensors, trace
from longspan._torch_modes import without_user_defaults
from longspan._torch_private import BaseHOP, outside_of_modes, set_grad_enabled_in_graphs

if TYPE_CHECKING:
    from longspan._engine.attention import AttendOptions
    from longspan._masks.selected import Selected

_GRAPH_BREAK = (
    "longspan.attention under torch.compile: a graph break in a mod, whose reason torch has logged (fullgraph=True raises it). A mod must "
    "not read the value of a tensor in Python, as int() and .item() do: keep the value in a tensor, or call the attention uncompiled"
)
_SCALARS = ("score", "b", "h", "q", "kv")


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, *, mask: Mask | None, scale: float, returned: bool,
    selection: Selected | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attend` as Dynamo traces it. returned: whether lse may get a gradient. selection: chosen keys, with `mask` as the rest of the mask.

    Operands reach the operator in an order of Dynamo's choosing, with equal ones merged. The body therefore returns, after its results, an
    empty tensor made from each argument: these tell which operand is which.
    """
    score_mod, sink, max_scores = options.score_mod, options.sink, options.max_scores
    plan = None if options.plan is None else options.plan.token
    tensors = [_hand_hop(cast(GraphModule, _copied), t)[0] for t in (q, k, v, sink) if t is not None]
    tensors += [] if plan is None else [plan]
    tensors += [] if selection is None else [selection.indices]
    chosen = (0, 0, 0) if selection is None else (selection.granularity, selection.q_granularity, selection.heads_per_choice or 1)
    # One-element vectors, not scalars: indexing with a scalar tensor makes Dynamo ask for its value.
    # The score requires a gradient where q or k does: otherwise Dynamo inlines the forward of a custom autograd Function.
    score = q.new_zeros((1,), dtype=state_dtype(q.dtype)) + q[..., :0].sum() + k[..., :0].sum()
    scalars = [score, *(q.new_zeros((1,), dtype=torch.int64) for _ in range(4))]
    mods = _Mods(score_mod, mask)
    rows = q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))
    outputs = [like_query(q, v.shape[-1], q.dtype), rows, rows if max_scores else rows.new_empty((0,))]

    def body(
        out: Tensor, rows: Tensor, row_max: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *args: Tensor
    ) -> tuple[Tensor, ...]:
        results = mods(score, b, h, i, j)
        tags = [t.new_empty((0,)) for t in (score, b, h, i, j, *args)]
        return (out.clone(), rows.clone(), row_max.clone(), *results, *tags)

    results = _attend_hop(
        cast(GraphModule, body),
        *outputs,
        *scalars,
        *tensors,
        has_score=score_mod is not None,
        has_mask=mask is not None,
        has_sink=sink is not None,
        has_plan=plan is not None,
        scale=scale,
        kernel=options.kernel,
        max_scores=max_scores,
        returned=returned,
        granularity=chosen[0],
        q_granularity=chosen[1],
        heads_per_choice=chosen[2],
    )
    return results[0], results[1], results[2].detach()


class _Mods:
    """The mods of one call.

    An object made during compilation, because Dynamo loses the source of a function in the closure of another function, and then rejects
    the tensors in the closure of the inner one (a mod made by a factory outside).
    """

    def __init__(self, score_mod: Callable[..., Tensor] | None, mask: Mask | None) -> None:
        self.score_mod = score_mod
        self.mask = mask

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        results = []
        if self.score_mod is not None:
            results.append(self.score_mod(score, b, h, i, j))
        if self.mask is not None:
            results.append(self.mask(b, h, i, j))
        return results


class _AttendHop(BaseHOP):
    def __init__(self) -> None:
        super().__init__("longspan_attend")

    def __call__(
        self,
        subgraph: GraphModule,
        *operands: Any,
        has_score: bool,
        has_mask: bool,
        has_sink: bool,
        has_plan: bool,
        scale: float,
        kernel: str,
        max_scores: bool,
        returned: bool,
        granularity: int,
        q_granularity: int,
        heads_per_choice: int,
    ) -> tuple[Tensor, ...]:
        has_selection = granularity > 0
        if not isinstance(subgraph, GraphModule):
            raise RuntimeError(_GRAPH_BREAK)
        if is_invariant():
            raise NotImplementedError("longspan.invariant() does not support torch.compile; call the attention uncompiled")
        if kernel != "dense":
            reject_transforms(planned=has_plan)
        placeholders = [n for n in subgraph.graph.nodes if n.op == "placeholder"]
        outputs = next(n for n in subgraph.graph.nodes if n.op == "output").args[0]
        count = len(_SCALARS) + 3 + has_sink + has_plan + has_selection
        tags, results = outputs[-count:], list(outputs[3:-count])
        operand_of = dict(zip(placeholders, operands, strict=True))
        scalars = [_source(tag) for tag in tags[: len(_SCALARS)]]
        q, k, v, *rest = (operand_of[_source(tag)] for tag in tags[len(_SCALARS) :])
        with outside_of_modes():
            score = _traced(subgraph, results.pop(0), scalars, "score", state_dtype(q.dtype), operand_of) if has_score else None
            mask = _traced(subgraph, results.pop(0), scalars, "mask", torch.float32, operand_of) if has_mask else None
            mask_program, score_program = (None if mod is None else mod[0].program for mod in (mask, score))
            spec = Spec(mask=mask_program, score=score_program, kernel=kernel, lse=returned)
            if kernel != "dense":
                spec = ops.specs.pin(spec)
        if spec.score is not None and spec.score.pointwise:
            spec.joint(())  # trace the gradient now, not when the compiled code runs

        def captured(mod: tuple[Traced, list[Node | Tensor]] | None) -> list[Tensor]:
            if mod is None:
                return []
            traced, nodes = mod
            sources = [_operand(n, operand_of, stand_in.dtype, q.device) for n, stand_in in zip(nodes, traced.sources, strict=True)]
            with without_user_defaults():
                return sources if traced.preamble is None else list(traced.preamble(*sources))

        mask_captured = [t.detach().to(q.device) for t in captured(mask)]
        sink = rest[0] if has_sink else None
        plan = rest[-1] if has_plan else None
        if kernel == "dense":
            if plan is not None:
                raise NotImplementedError("kernel='dense' with a plan does not compile: it reads the plan in Python. Call it uncompiled")
            scoring = Scoring(
                scale=scale, mask=spec.mask, mask_captured=mask_captured, score=spec.score, score_captured=captured(score)
            )  # fmt: skip
            with without_user_defaults():
                out, lse, row_max = dense_attention(q, k, v, scoring, sink=sink)
        elif has_selection:
            numbers = granularity, q_granularity, heads_per_choice
            out, lse = attend_selected(q, k, v, sink, rest[-1], mask_captured, captured(score), spec.handle, scale, *numbers)
            row_max = lse
        else:
            out, lse, row_max = ops.attend(q, k, v, sink, mask_captured, captured(score), plan, spec.handle, scale, max_scores)
        return (out, lse, row_max if max_scores else lse.new_empty((0,)), *(q.new_empty((0,)) for _ in outputs[3:]))


_attend_hop = _AttendHop()


class _HandHop(BaseHOP):
    """Identity. Dynamo, which traces the body, sees a copy.

    Dynamo rejects higher-order operators with two operands of one storage, because their graph might write to them. Ours does not, and q, k
    and v are often views of one projection.
    """

    def __init__(self) -> None:
        super().__init__("longspan_hand")

    def __call__(self, subgraph: GraphModule, *operands: Any) -> tuple[Tensor, ...]:
        return tuple(t for t in operands if isinstance(t, Tensor))  # one tensor, and possibly symbolic sizes


_hand_hop = _HandHop()


def _copied(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor.clone(),)


def _source(tag: Any) -> Node:
    """The placeholder of a tag."""
    return tag.args[0]


def _traced(
    module: GraphModule, result: Node, scalars: list[Node], kind: Kind, dtype: torch.dtype, operand_of: dict[Node, Any]
) -> tuple[Traced, list[Node | Tensor]]:
    """One result of Dynamo's subgraph as a program, and its captured values in the order of the program's sources.

    Captured values are placeholders, numbers read from them (Dynamo passes a float as a tensor of one element), and tensors that the mod
    made (`table[[1, 2]]`). A number that may change between calls (a length, a soft cap) is captured as a scalar tensor where the mod can
    take one. Where the mod needs a Python number (`x.clamp(0, n)`, `float(n)`), the program is specialized to its value, and torch
    recompiles for others.
    """
    graph = Graph()
    env: dict[Node, Node] = {}
    needed = _needed(module.graph, result) | _grad_mode_switches(module.graph, kind)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder" and (n in needed or n in scalars)]
    items = [n for n in module.graph.nodes if n in needed and (n.op, n.target) == ("call_method", "item")]
    inputs += [n for n in items if n.args[0] in inputs and n.args[0] not in scalars]
    for node in inputs:
        env[node] = graph.placeholder(node.name)
    for node in module.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[result])
    part = GraphModule(module, graph)
    lifted = [n for n in inputs if n not in scalars]
    stand_ins: dict[Node, Any] = {n: _stand_in(n, dtype) for n in lifted}
    mod_scalars = scalars if kind == "score" else scalars[1:]
    numbers = [n for n in lifted if not isinstance(n.meta["example_value"], Tensor)]

    def mod(*args: Tensor) -> Tensor:
        values = dict(zip([*mod_scalars, *numbers], args, strict=False))
        return part(*(values[n] if n in values else stand_ins.get(n, args[0]) for n in inputs))

    if numbers:
        # Python computes with 64-bit floats. A scalar tensor may have fewer bits.
        exact = all(not _is_float(n.meta.get("example_value")) for n in needed if n not in inputs)
        read = [n.args[0] for n in inputs if n.op != "placeholder"]
        exact &= not _would_widen(
            [n.meta["example_value"] for n in numbers], [stand_ins[n] for n in lifted if n not in [*numbers, *read]], dtype
        )
        if not exact or not takes_tensors(mod, kind, [stand_ins[n] for n in numbers], score_dtype=dtype):
            stand_ins |= {n: _number(n, operand_of) for n in numbers}
    traced = trace(mod, kind, score_dtype=dtype, name=f"{kind}_mod of a compiled function")
    return traced, [next((n for n in lifted if stand_ins[n] is source), source) for source in traced.sources]


def _operand(node: Node | Tensor, operand_of: dict[Node, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A captured value as a tensor: an operand, a number as a scalar tensor, or a new tensor of literals."""
    if isinstance(node, Tensor):
        return torch.tensor(node.tolist(), dtype=dtype, device=device)
    if node.op != "placeholder":
        return cast(Tensor, operand_of[cast(Node, node.args[0])]).to(device, dtype)
    value = operand_of[node]
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def _is_float(value: Any) -> bool:
    return isinstance(value, float | torch.SymFloat)


def _would_widen(numbers: list[Any], tensors: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether a scalar tensor in place of a number could change the dtype of results: wider than half precision or than small integers, or
    narrower than a tensor with more bits than the score.
    """
    floats = any(map(_is_float, numbers)) and any(t.dtype.is_floating_point and t.dtype != dtype for t in tensors)
    return floats or any(not t.dtype.is_floating_point and t.dtype != torch.bool and t.dtype.itemsize < 4 for t in tensors)


def _number(node: Node, operand_of: dict[Node, Any]) -> int | float:
    """The present value of a number. AOTAutograd traces with symbols, and torch recompiles for other values. A backend without it
    (`backend="eager"`) calls the operator every time with the values themselves, when the example of Dynamo is an old one.
    """
    value = operand_of[node if node.op == "placeholder" else cast(Node, node.args[0])]
    if type(value) is Tensor:  # no subclass: fake tensors have no value
        value = value.item()
    elif isinstance(value, Tensor):
        value = node.meta["example_value"]
    return float(value) if _is_float(value) else int(value)


def _stand_in(node: Node, dtype: torch.dtype) -> Tensor:
    """A real tensor in place of an operand, for tracing: dtype and sizes matter. dtype: that of the score. A number becomes a scalar tensor
    of this dtype, which leaves the score's dtype unchanged, as a Python number would.
    """
    value = node.meta["example_value"]
    if isinstance(value, Tensor):
        return torch.empty([1 if not isinstance(s, int) else s for s in value.shape], dtype=value.dtype)
    return torch.zeros((), dtype=dtype if _is_float(value) else torch.int64)


_LOGICAL = frozenset("and_ or_ not_ is_".split())  # pure functions of `operator`
_IN_PLACE = frozenset("setitem iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split())


def _grad_mode_switches(graph: Graph, kind: Kind) -> set[Node]:
    """The nodes of Dynamo's graph that begin or end `torch.no_grad()`. Raises ProgramError for in-place operations.

    Neither kind of node is an input of the mod's result.
    """
    switches: set[Node] = set()
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]
        if node.op in ("call_function", "call_method") and _is_in_place(name):
            raise ProgramError(
                f"{kind}_mod of a compiled function mutates a tensor ({name}); mods must be pure: write `x = x + y`, not `x += y`"
            )
        if node.target is set_grad_enabled_in_graphs:
            switches.add(node)
    return switches


def _is_in_place(name: str) -> bool:
    """Whether a function or method of this name mutates its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _LOGICAL)


def _needed(graph: Graph, root: Node) -> set[Node]:
    seen, todo = {root}, [root]
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return seen
