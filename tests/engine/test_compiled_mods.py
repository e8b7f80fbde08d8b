"""Mods of Dynamo's graphs as programs: which values are captured, and which become part of the program. Graphs are made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.test_compiled_parts import attend, compare, noted, qkv
from torch import Tensor
from torch.fx import Node, symbolic_trace

import longspan as ls
from longspan._engine.compiled import _operand, _traced
from longspan._masks.program import Kind
from longspan._masks.tracing import ProgramError
from longspan._torch_private import set_grad_enabled_in_graphs
from longspan.testing import oracle

F32, F64 = torch.float32, torch.float64
TABLE, SMALL = torch.linspace(-1.0, 1.0, 7), torch.arange(7, dtype=torch.int16)
AT = {"b": 1, "h": 2, "q": 5, "kv": 3}


def traced(
    fn: Callable[..., Any], *captured: Any, kind: Kind = "score", dtype: torch.dtype = F32, later: tuple[Any, ...] | None = None
) -> tuple[Tensor, list[str]]:
    """The value of a mod's program at one place, and the names of the values that it captures.

    later: values of the captured operands in the call; by default those of the trace.
    """
    module = symbolic_trace(fn)
    scalars = [torch.full((1,), 0.75, dtype=dtype), *(torch.tensor([i]) for i in AT.values())]
    noted(module, [*scalars, *captured])
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    result = next(n for n in module.graph.nodes if n.op == "output").args[0]
    operand_of = dict(zip(nodes, [*scalars, *(captured if later is None else later)], strict=True))
    made, sources = _traced(module, result, nodes[:5], kind, dtype, operand_of)
    given = [_operand(s, operand_of, stand_in.dtype, torch.device("cpu")) for s, stand_in in zip(sources, made.sources, strict=True)]
    operands = given if made.preamble is None else list(made.preamble(*given))
    places = [t[0] for t in (scalars if kind == "score" else scalars[1:])]
    return made.program(*places, *operands), [s.name if isinstance(s, Node) else "literal" for s in sources]


SCORE = torch.tensor(0.75)
# (mod, captured operands, expected result, names of the sources that the program captures)
MODS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Tensor, list[str]]] = {
    "nothing": (lambda s, b, h, q, kv: s * 2 + (q - kv), (), SCORE * 2 + 2, []),
    "table": (lambda s, b, h, q, kv, t: s + t[h] + b * 10, (TABLE,), SCORE + TABLE[2] + 10, ["t"]),
    "float": (lambda s, b, h, q, kv, n: s * n, (0.1,), SCORE * 0.1, ["n"]),
    "integer": (lambda s, b, h, q, kv, n: torch.where(q < kv + n, s, s * 2), (2,), SCORE * 2, ["n"]),
    "computed integer": (lambda s, b, h, q, kv, n: torch.where(q < kv + (n + 1), s, s * 2), (2,), SCORE, ["n"]),
    # In Python, with 64 bits: the number is part of the program.
    "computed float": (lambda s, b, h, q, kv, n: s * (n / 3.0), (0.1,), SCORE * (0.1 / 3.0), []),
    "float of an integer": (lambda s, b, h, q, kv, n: s * (n / 3), (2,), SCORE * (2 / 3), []),
    "bound": (lambda s, b, h, q, kv, n: s.clamp(-n, n), (0.5,), torch.tensor(0.5), []),
    "number beside a small table": (lambda s, b, h, q, kv, t, n: s + t[h] * n, (SMALL, 3), SCORE + 6, ["t"]),
    "number beside a table": (lambda s, b, h, q, kv, t, n: s + t[h] * n, (TABLE, 0.5), SCORE + TABLE[2] * 0.5, ["t", "n"]),
    "number beside a small table of another mod": (lambda s, b, h, q, kv, t, n: s + kv * n, (SMALL, 3), SCORE + 9, ["n"]),
    "two numbers": (lambda s, b, h, q, kv, n, m: s * n + m, (0.5, 4), SCORE * 0.5 + 4, ["n", "m"]),
    "unused": (lambda s, b, h, q, kv, t, n: s + kv, (TABLE, 0.5), SCORE + 3, []),
    "boxed float": (lambda s, b, h, q, kv, x: s * x.item(), (torch.tensor(0.1, dtype=F64),), SCORE * 0.1, ["item"]),
    "bound from a box": (lambda s, b, h, q, kv, x: s.clamp(-0.25, x.item()), (torch.tensor(0.5, dtype=F64),), torch.tensor(0.5), []),
    "boxed float beside a table": (
        lambda s, b, h, q, kv, t, x: s + t[h] * x.item(), (TABLE, torch.tensor(0.1, dtype=F64)), SCORE + TABLE[2] * 0.1, ["t", "item"],
    ),
    "literal": (lambda s, b, h, q, kv: s + torch.tensor([2.0, 8.0])[b], (), SCORE + 8, ["literal"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_numbers_that_may_change_are_captured_where_a_tensor_gives_the_same_bits(name: str) -> None:
    fn, captured, want, names = MODS[name]
    value, sources = traced(fn, *captured)
    assert value.dtype == F32 and torch.equal(value, want.to(F32)) and sources == names


def test_numbers_and_tables_of_a_call_may_differ_from_those_of_the_trace() -> None:
    """The numbers of a call itself are part of a program that needs Python numbers."""
    scaled = lambda s, b, h, q, kv, n: s * n
    assert traced(scaled, 0.5, later=(0.25,))[0] == 0.75 * 0.25
    bounded = lambda s, b, h, q, kv, n: s.clamp(-n, n)
    assert traced(bounded, 0.5, later=(0.25,))[0] == 0.25
    table = lambda s, b, h, q, kv, t: s + t[h]
    assert traced(table, TABLE, later=(torch.full((7,), 4.0),))[0] == 4.75


def test_a_mask_takes_no_score() -> None:
    keep = torch.tensor([True, False, True, True])
    mask = lambda s, b, h, q, kv, t, n: t[kv] & (q >= kv + n)
    for shift, seen in ((2, True), (3, False)):
        value, sources = traced(mask, keep, shift, kind="mask")
        assert value.dtype == torch.bool and bool(value) is seen and sources == ["t", "n"]


def test_a_score_in_double_precision_captures_doubles() -> None:
    value, sources = traced(lambda s, b, h, q, kv, n: s * n, 0.1, dtype=F64)
    assert value.dtype == F64 and value == 0.75 * 0.1 and sources == ["n"]
    value, sources = traced(lambda s, b, h, q, kv, t, n: s + t[h] * n, TABLE, 0.1, dtype=F64)
    assert value == 0.75 + (TABLE[2] * 0.1).double() and sources == ["t"]  # the table's product has its bits


def test_switches_of_the_grad_mode_stay_in_a_mod() -> None:
    def fn(s: Any, b: Any, h: Any, q: Any, kv: Any, t: Any) -> Any:
        set_grad_enabled_in_graphs(False)
        bias = t[h] * 2
        set_grad_enabled_in_graphs(True)
        return s + bias

    assert traced(fn, TABLE)[0] == 0.75 + TABLE[2] * 2
    with pytest.raises(ProgramError, match="mask_mod of a compiled function mutates a tensor"):
        traced(lambda s, b, h, q, kv: (q >= kv).logical_not_(), kind="mask")


@pytest.mark.parametrize("name", ["b", "s", "table"])
def test_values_that_no_call_has_read_yet_raise(name: str) -> None:
    mods = {
        "b": lambda s, b, h, q, kv, t: s * b.item(), "s": lambda s, b, h, q, kv, t: q * s.item(),
        "table": lambda s, b, h, q, kv, t: s * (t.sum() + 1).item(),
    }  # fmt: skip
    with pytest.raises(ProgramError, match="score_mod of a compiled function"):
        traced(mods[name], TABLE)


def test_a_mask_may_read_a_parameter() -> None:
    tensors, keep = qkv(), torch.linspace(-1.0, 2.0, 31, dtype=F64).requires_grad_()
    out, lse, *_ = attend(tensors, [keep], mask=lambda b, h, q, kv, t: t[kv] > 0)
    want = oracle(*tensors, mask=lambda b, h, q, kv: keep.detach()[kv] > 0, scale=0.3, return_lse=True)
    compare((out, lse), want, tensors)
    assert torch.autograd.grad(out.sum(), keep, allow_unused=True) == (None,)


def test_keys_may_be_chosen_one_by_one() -> None:
    tensors, indices = qkv(), torch.tensor([[[[0, 7, 30]], [[3, 12, -1]]]], dtype=torch.int32)
    out, lse, *_ = attend([*tensors, indices], granularity=1, q_granularity=32, heads_per_choice=2)
    compare((out, lse), oracle(*tensors, mask=ls.selected(indices, 1, 32), scale=0.3, return_lse=True), tensors)


@pytest.mark.parametrize("number", [0.3, 2])
def test_a_boxed_number_reaches_the_operator(number: float) -> None:
    """Dynamo passes a float that may change as a tensor of one element."""
    tensors, box = qkv(), torch.tensor(number, dtype=F64)
    for mod in (lambda s, b, h, q, kv, x: s * x.item() + (q - kv), lambda s, b, h, q, kv, x: s.clamp(-0.4, x.item())):
        out, lse, *_ = attend(tensors, [box], mod)
        want = oracle(*tensors, score_mod=lambda s, b, h, q, kv, mod=mod: mod(s, b, h, q, kv, box), scale=0.3, return_lse=True)
        compare((out, lse), want, tensors)


def test_the_dense_kernel_may_be_transformed_and_others_raise() -> None:
    q, k, v = (t.detach() for t in qkv())
    losses = {kernel: lambda q, kernel=kernel: attend([q, k, v], kernel=kernel)[0].sin().sum() for kernel in ("dense", "cpu")}
    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(oracle(leaf, k, v, scale=0.3).sin().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(losses["dense"])(q), want, atol=1e-10, rtol=1e-10)
    with pytest.raises(RuntimeError, match=r"not supported under torch.vmap or the transforms of torch.func; kernel='dense' supports"):
        torch.func.grad(losses["cpu"])(q)
