"""Attention under torch.compile, part by part: graphs made by hand take the place of Dynamo's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node, symbolic_trace

import longspan as ls
from longspan._engine import compiled
from longspan._engine.attention import AttendOptions
from longspan._engine.compiled import _attend_hop, _grad_mode_switches, _is_in_place, _needed, _number, _operand, _stand_in, _would_widen
from longspan._masks.tracing import ProgramError
from longspan._torch_private import set_grad_enabled_in_graphs
from longspan.testing import oracle, virtual_world

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 4, 2, 20, 31, 16, 8


def qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((BATCH, HEADS, Q_LEN, DIM), (BATCH, KV_HEADS, KV_LEN, DIM), (BATCH, KV_HEADS, KV_LEN, V_DIM))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


class Noting(Interpreter):
    """Notes the value of each node, as Dynamo does."""

    def run_node(self, n: Node) -> Any:
        value = n.meta["example_value"] = super().run_node(n)
        return value


def noted(module: GraphModule, operands: Sequence[Any]) -> GraphModule:
    Noting(module).run(*operands)
    return module


def attend(
    tensors: Sequence[Tensor], extra: Sequence[Any] = (), score: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The operator over a graph whose inputs come in another order than its tags. extra: captured values, the last inputs of mods."""
    given = {
        "has_score": score is not None, "has_mask": mask is not None, "has_sink": False, "has_plan": False, "scale": 0.3, "kernel": "cpu",
        "max_scores": False, "returned": True, "granularity": 0, "q_granularity": 0, "heads_per_choice": 0,
    } | options  # fmt: skip
    count, captured = len(tensors), len(extra)
    scalars = [torch.zeros(1, dtype=torch.float64), *(torch.zeros(1, dtype=torch.int64) for _ in range(4))]

    def body(args: Sequence[Any]) -> tuple[Any, ...]:
        numbers, inputs, indices = args[:captured], args[captured : captured + count][::-1], args[captured + count : captured + count + 5]
        results = [*([score(*indices, *numbers)] if score else []), *([mask(*indices[1:], *numbers)] if mask else [])]
        return (*(x.clone() for x in args[-3:]), *results, *(x.new_empty((0,)) for x in (*indices, *inputs)))

    out = torch.zeros(BATCH, HEADS, Q_LEN, V_DIM, dtype=torch.float64)
    operands = [*extra, *tensors[::-1], *scalars, out, out[..., 0].clone(), out[..., 0].clone()]
    return _attend_hop(noted(symbolic_trace(make_positional(body, len(operands))), operands), *operands, **given)


def make_positional(body: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function of one sequence as a function of `count` arguments."""
    names = ", ".join(f"x{i}" for i in range(count))
    namespace: dict[str, Any] = {"body": body}
    exec(f"def forward({names}):\n    return body([{names}])", namespace)  # fx traces named arguments only
    return namespace["forward"]  # type: ignore[no-any-return]


def compare(got: Sequence[Tensor], want: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    grads = [torch.autograd.grad(x[0].sin().sum() + x[1].cos().sum(), leaves) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("mods", ["", "score", "mask", "score mask"])
def test_results_are_those_of_dense_attention_whatever_the_order_of_operands(kernel: str, sink: bool, mods: str) -> None:
    tensors, sinks = qkv(), torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    bias = torch.linspace(-2, 2, HEADS, dtype=torch.float64).requires_grad_()
    keep = torch.arange(KV_LEN) % 4 != 1
    score = (lambda s, b, h, q, kv, *t: s * 0.5 + t[0][h] * (q - kv)) if "score" in mods else None
    mask = (lambda b, h, q, kv, *t: t[-1][kv] & (q + 9 >= kv)) if "mask" in mods else None
    extra = [bias, keep] if "score" in mods else [keep] if mask else []
    out, lse, row_max, *rest = attend(
        [*tensors, *([sinks] if sink else [])], extra, score, mask, has_sink=sink, kernel=kernel, max_scores=True
    )
    want = oracle(
        *tensors, mask=mask and (lambda b, h, q, kv: mask(b, h, q, kv, keep)), scale=0.3, sink=sinks if sink else None, return_lse=True,
        score_mod=score and (lambda s, b, h, q, kv: score(s, b, h, q, kv, bias)),
    )  # fmt: skip
    leaves = [*tensors, *([sinks] if sink else []), *([bias] if score else [])]
    compare((out, lse), want, leaves)
    assert row_max.shape == (BATCH, HEADS, Q_LEN) and bool((row_max <= lse + 1e-9).all())
    assert len(rest) == len(mods.split()) + 5 + 3 + sink and all(r.shape == (0,) for r in rest)
    assert attend(tensors, kernel=kernel)[2].shape == (0,)


def test_a_choice_of_keys_reaches_its_operator() -> None:
    tensors = qkv()
    indices = torch.tensor([[[[0, 1]], [[3, -1]]]], dtype=torch.int32)
    out, lse, *_ = attend([*tensors, indices], mask=lambda b, h, q, kv: q + 12 >= kv, granularity=4, q_granularity=32, heads_per_choice=2)
    mask = ls.selected(indices, 4, 32) & ls.mask_mod(lambda b, h, q, kv: q + 12 >= kv)
    compare((out, lse), oracle(*tensors, mask=mask, scale=0.3, return_lse=True), tensors)
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    with_sink = attend([*tensors, sinks, indices], has_sink=True, granularity=4, q_granularity=32, heads_per_choice=2)
    want = oracle(*tensors, mask=ls.selected(indices, 4, 32), scale=0.3, sink=sinks, return_lse=True)
    compare(with_sink[:2], want, [*tensors, sinks])


def test_a_plan_reaches_its_operator_and_the_dense_kernel_raises() -> None:
    def run(mesh: ls.Mesh) -> None:
        plan, tensors = ls.plan(ls.causal(), (Q_LEN, KV_LEN), mesh), qkv()
        sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
        out, lse, *_ = attend([*tensors, sinks, plan.token], has_sink=True, has_plan=True)
        compare((out, lse), oracle(*tensors, mask=ls.causal(), scale=0.3, sink=sinks, return_lse=True), [*tensors, sinks])
        with pytest.raises(NotImplementedError, match="with a plan does not compile"):
            attend([*tensors, plan.token], has_plan=True, kernel="dense")

    virtual_world(1).run(run)


def test_graph_breaks_and_invariant_calls_raise() -> None:
    with pytest.raises(RuntimeError, match="a graph break in a mod"):
        compiled.attend_compiled(*qkv(), AttendOptions(), mask=None, scale=1.0, returned=True)
    with ls.invariant(), pytest.raises(NotImplementedError, match=r"invariant\(\) does not support torch.compile"):
        attend(qkv())


@pytest.mark.parametrize("number", [7, 2.5])
def test_a_number_of_a_mod_is_captured_as_a_tensor_or_read(number: float) -> None:
    tensors = qkv()
    for mod in (lambda s, b, h, q, kv, n: s + (q - kv) * n, lambda s, b, h, q, kv, n: s.clamp(-n, n)):
        out, lse, *_ = attend(tensors, [number], mod)
        want = oracle(*tensors, score_mod=lambda s, b, h, q, kv, mod=mod: mod(s, b, h, q, kv, number), scale=0.3, return_lse=True)
        compare((out, lse), want, tensors)


# ---------------------------------------------------------------------------------------------------------------------- operands


def test_operands_are_handed_over_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def note(body: Any, *operands: Tensor, **options: Any) -> tuple[Tensor, ...]:
        calls.append((body, operands, options))
        return operands[0], operands[1], operands[2].clone().requires_grad_()

    monkeypatch.setattr(compiled, "_attend_hop", note)
    q, k, v = qkv(torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    sink, plan = torch.zeros(HEADS), ls.plan(ls.causal(), (Q_LEN, KV_LEN), ls.Mesh.abstract(1))
    chosen = ls.selected(torch.zeros(1, 2, 1, 1).int(), 16, 32)
    score = lambda s, b, h, i, j: s + 10 * b + 100 * h + 1000 * i + 10000 * j
    only = ls.mask_mod(lambda b, h, i, j: (b == 4) & (h == 1) & (i == 5) & (j == 3))
    for options, mask, selection, of_choice in (
        (AttendOptions(), None, None, 0),
        (AttendOptions(score_mod=score, sink=sink, max_scores=True, kernel="cpu"), only, None, 0),
        (AttendOptions(sink=sink, plan=plan), None, None, 0),
        (AttendOptions(), ls.causal(), chosen, 1),
        (AttendOptions(), None, replace(chosen, heads_per_choice=2), 2),
    ):
        out, lse, row_max = compiled.attend_compiled(q, k, v, options, mask=mask, scale=0.25, returned=False, selection=selection)
        body, operands, given = calls[-1]
        strides = HEADS * Q_LEN * V_DIM, V_DIM, HEADS * V_DIM, 1  # the order of q's
        assert (out.shape, out.dtype, out.stride()) == ((BATCH, HEADS, Q_LEN, V_DIM), q.dtype, strides)
        assert (lse.shape, lse.dtype) == ((BATCH, HEADS, Q_LEN), torch.float32)
        assert row_max.shape == ((BATCH, HEADS, Q_LEN) if options.max_scores else (0,)) and not row_max.requires_grad
        assert [(t.shape, t.dtype) for t in operands[3:8]] == [((1,), torch.float32), *[((1,), torch.int64)] * 4]
        assert operands[3].requires_grad and not any(t.requires_grad for t in operands[4:8])
        expected = [q, k, v, *([sink] if options.sink is not None else []), *([plan.token] if options.plan is not None else [])]
        expected += [] if selection is None else [selection.indices]
        assert all(a is b for a, b in zip(operands[8:], expected, strict=True))
        has = {"score": options.score_mod is not None, "mask": mask is not None, "sink": options.sink is not None}
        assert given == {
            "has_score": has["score"], "has_mask": has["mask"], "has_sink": has["sink"], "has_plan": options.plan is not None,
            "scale": 0.25, "kernel": options.kernel, "max_scores": options.max_scores, "returned": False,
            "granularity": 16 if of_choice else 0, "q_granularity": 32 if of_choice else 0, "heads_per_choice": of_choice,
        }  # fmt: skip
        values = (*operands[:3], torch.tensor([2.0]), *(torch.tensor([i]) for i in (4, 1, 5, 3)), *operands[8:])
        results = body(*values)
        mods = [*([35142.0] if has["score"] else []), *([True] if mask is not None else [])]
        assert [r.item() for r in results[3 : 3 + len(mods)]] == mods
        assert [r.shape for r in results[:3]] == [t.shape for t in operands[:3]]
        tags = results[3 + len(mods) :]
        assert [(t.shape, t.dtype) for t in tags] == [((0,), x.dtype) for x in values[3:]]


def placeholder(name: str, value: Any) -> Node:
    node = Graph().placeholder(name)
    node.meta["example_value"] = value
    return node


def test_captured_values_are_operands_numbers_or_literals() -> None:
    cpu, f32 = torch.device("cpu"), torch.float32
    table, length = torch.arange(3), placeholder("n", 5)
    node = placeholder("t", table)
    assert _operand(node, {node: table}, f32, cpu) is table
    number = _operand(length, {length: 7}, f32, cpu)
    assert number.shape == () and number.dtype == f32 and float(number) == 7
    literal = _operand(torch.tensor([1, 2]), {}, torch.int32, cpu)
    assert literal.tolist() == [1, 2] and literal.dtype == torch.int32
    graph = Graph()
    boxed = graph.placeholder("boxed")
    item = graph.call_method("item", (boxed,))
    read = _operand(item, {boxed: torch.tensor(2.5, dtype=torch.float64)}, f32, cpu)
    assert read.dtype == f32 and float(read) == 2.5
    for node in (boxed, item):
        node.meta["example_value"] = 2.5
        assert _number(node, {boxed: torch.tensor(3.5)}) == 3.5
    item.meta["example_value"] = 2
    value = _number(item, {boxed: torch.tensor(3)})
    assert value == 3 and type(value) is int
    assert _number(item, {boxed: torch.zeros(1).as_subclass(type("Fake", (Tensor,), {}))}) == 2


def test_stand_ins_have_the_dtypes_and_sizes_of_operands() -> None:
    table = _stand_in(placeholder("t", torch.zeros(3, 5, dtype=torch.int16)), torch.float32)
    assert table.shape == (3, 5) and table.dtype == torch.int16
    numbers = [_stand_in(placeholder("n", value), torch.bfloat16) for value in (2, 2.5, True)]
    assert [(t.shape, t.dtype) for t in numbers] == [((), torch.int64), ((), torch.bfloat16), ((), torch.int64)]


@pytest.mark.parametrize(
    ("numbers", "dtypes", "widens"),
    [
        ([], [], False),
        ([2.5], [], False),
        ([2.5], [torch.float32], False),
        ([2.5], [torch.float64], True),
        ([2.5], [torch.float32, torch.bfloat16], True),
        ([2], [torch.float64], False),
        ([2], [torch.int32, torch.bool, torch.int64], False),
        ([2], [torch.int16], True),
        ([2.5], [torch.int8], True),
        ([1, 2.5], [torch.float16], True),
    ],
)
def test_a_tensor_for_a_number_would_widen_other_dtypes(numbers: list[float], dtypes: list[torch.dtype], widens: bool) -> None:
    assert _would_widen(numbers, [torch.zeros(1, dtype=d) for d in dtypes], torch.float32) is widens


@pytest.mark.parametrize(
    ("name", "in_place"),
    [
        ("add_", True), ("iadd", True), ("setitem", True), ("clamp_", True), ("add", False), ("__and__", False), ("and_", False),
        ("or_", False), ("not_", False), ("is_", False), ("imul", True), ("_", True), ("item", False),
    ],
)  # fmt: skip
def test_names_tell_operations_in_place(name: str, in_place: bool) -> None:
    assert _is_in_place(name) is in_place


def test_nodes_of_a_result_are_those_that_it_is_computed_from() -> None:
    graph = Graph()
    x, y, z = (graph.placeholder(n) for n in "xyz")
    total = graph.call_function(operator.add, (x, y))
    twice = graph.call_function(operator.mul, (total, total))
    unused = graph.call_function(operator.neg, (z,))
    assert _needed(graph, twice) == {x, y, total, twice} and _needed(graph, unused) == {z, unused} and _needed(graph, x) == {x}


def test_grad_mode_switches_are_found_and_operations_in_place_raise() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    off = graph.call_function(set_grad_enabled_in_graphs, (False,))
    graph.call_function(operator.and_, (x, x))
    on = graph.call_function(set_grad_enabled_in_graphs, (True,))
    graph.placeholder("add_")  # a name of an input, not an operation
    assert _grad_mode_switches(graph, "mask") == {off, on}
    for add in (lambda g, x: g.call_method("mul_", (x, 2)), lambda g, x: g.call_function(operator.iadd, (x, x))):
        other = Graph()
        add(other, other.placeholder("x"))
        with pytest.raises(ProgramError, match=r"score_mod of a compiled function mutates a tensor \((mul_|iadd)\); mods must be pure"):
            _grad_mode_switches(other, "score")
