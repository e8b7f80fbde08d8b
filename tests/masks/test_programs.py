"""Tracing mods into programs: accepted and rejected mods, and equality of the values of programs and mods."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longspan._masks.joint import joint_of
from longspan._masks.program import Program
from longspan._masks.tracing import ProgramError, mod_name, trace

TABLE = torch.randn(5, 7)
UNSIGNED = {dtype: torch.arange(9).to(dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)}


def indices(batch: int = 2, heads: int = 3, queries: int = 5, keys: int = 7) -> tuple[Tensor, ...]:
    """Index tensors b, h, q, kv that broadcast to [batch, heads, queries, keys]."""
    sizes = (batch, heads, queries, keys)
    return tuple(torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(sizes))


def test_a_captured_tensor_becomes_one_input_however_often_it_is_used() -> None:
    ids, bias = torch.arange(9), nn.Parameter(torch.randn(3))
    traced = trace(lambda s, b, h, q, kv: s + bias[h] * (ids[q] == ids[kv]) + bias[h], "score")
    assert [t is x for t, x in zip(traced.sources, (bias, ids), strict=True)] == [True, True]
    assert traced.program.pointwise
    assert traced.preamble is None


def test_operations_on_captured_tensors_alone_run_in_the_preamble_with_gradients() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    traced = trace(lambda s, b, h, q, kv: s + weight.softmax(-1).sum(0)[h], "score")
    (captured,) = traced.captured()
    torch.testing.assert_close(captured, weight.softmax(-1).sum(0))
    assert captured.requires_grad
    assert traced.program.pointwise


def test_chained_lookups_become_one_lookup() -> None:
    traced = trace(lambda b, h, q, kv: TABLE[q][kv] > 0, "mask")
    assert traced.program.pointwise
    torch.testing.assert_close(traced.program(*indices(), *traced.captured()).expand(2, 3, 5, 7), (TABLE > 0).expand(2, 3, 5, 7))


def test_mods_with_vector_operations_run_through_vmap() -> None:
    vectors = torch.randn(9, 6, requires_grad=True)
    traced = trace(lambda s, b, h, q, kv: s * (vectors[q] * vectors[kv]).sum(), "score")
    assert not traced.program.pointwise
    score = torch.randn(2, 3, 5, 7)
    expected = score * (vectors[:5] @ vectors[:7].T)
    torch.testing.assert_close(traced.program(score, *indices(), *traced.captured()), expected)


@pytest.mark.parametrize(
    "fill", [nn.Parameter(torch.tensor(1.5)), torch.tensor(-2.5, dtype=torch.float64), torch.tensor(3), torch.tensor(float("-inf"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_fill_takes_a_value_in_a_tensor(fill: Tensor, dtype: torch.dtype) -> None:
    """A captured one, or a result; masked_fill itself takes no value with dims."""
    score = torch.randn(2, 3, 5, 7, dtype=dtype)
    b, h, q, kv = indices()
    for mod in (
        lambda s, b, h, q, kv: s.masked_fill(q < kv, fill),
        lambda s, b, h, q, kv: s.masked_fill(q < kv, s * 2 + fill),
        lambda s, b, h, q, kv: s.masked_fill(s > 0, s),
    ):
        traced = trace(mod, "score", score_dtype=dtype)
        want = _filled(mod, score)
        got = traced.program(score, b, h, q, kv, *traced.captured())
        assert got.dtype == dtype and torch.equal(got, want)


def _filled(mod: Callable[..., Tensor], score: Tensor) -> Tensor:
    """The mod of each pair by itself, as torch computes it of numbers."""
    pairs = torch.cartesian_prod(*(torch.arange(n) for n in score.shape))
    return torch.stack([mod(score[tuple(pair)], *pair) for pair in pairs]).view(score.shape)


def test_equal_mods_have_equal_keys_whatever_tensors_they_captured() -> None:
    def make(size: float, ids: Tensor) -> Program:
        return trace(lambda b, h, q, kv: (q - kv < size) & (ids[q] == ids[kv]), "mask").program

    a, b = make(3, torch.arange(5)), make(3, torch.zeros(99, dtype=torch.int64))
    assert a.key == b.key
    assert make(4, torch.arange(5)).key != a.key
    assert make(3, torch.arange(5, dtype=torch.int32)).key != a.key


def test_the_gradient_graph_equals_autograd() -> None:
    table, gain = torch.randn(12, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    fns = [
        lambda s, b, h, q, kv: gain * torch.tanh(s) + table[q - kv + 6],
        lambda s, b, h, q, kv: torch.where(q > kv, s * table[q].exp(), torch.minimum(s.clamp(min=-0.5), table[h])),
        lambda s, b, h, q, kv: torch.maximum(s, table[kv]) ** 2 + s.detach() * gain,
        lambda s, b, h, q, kv: table[h] * gain,
        lambda s, b, h, q, kv: s.masked_fill(q > kv, gain) + s.masked_fill(s > 0, table[h]),
    ]
    for fn in fns:
        traced = trace(fn, "score", score_dtype=torch.float64)
        joint = joint_of(traced.program)
        score = torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)
        out = traced.program(score, *indices(), *traced.captured()).expand(2, 3, 5, 7)
        grad = torch.randn(2, 3, 5, 7, dtype=out.dtype)
        d_score, d_reads, read_indices = joint(grad, score.detach(), *indices(), *(t.detach() for t in traced.captured()))
        expected_d_score, *expected_grads = torch.autograd.grad(out, [score, *traced.sources], grad, allow_unused=True)
        expected_d_score = torch.zeros_like(score) if expected_d_score is None else expected_d_score
        torch.testing.assert_close(d_score.expand(2, 3, 5, 7), expected_d_score, check_dtype=False)
        totals = [torch.zeros_like(t) for t in traced.sources]
        for captured, d_read, index in zip(joint.reads, d_reads, read_indices, strict=True):
            full = d_read.expand(2, 3, 5, 7).to(totals[captured].dtype)
            where = [i.expand(2, 3, 5, 7) for i in index]
            totals[captured] = totals[captured].index_put(where, full, accumulate=True) if where else totals[captured] + full.sum()
        for total, expected in zip(totals, expected_grads, strict=True):
            torch.testing.assert_close(total, torch.zeros_like(total) if expected is None else expected)


def branching(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s if q > kv else -s


def in_place(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    s += 1
    return s


REJECTED = [
    (branching, "score", "score_mod 'branching'.*Python control flow depends on the value of a tensor.*torch.where"),
    (in_place, "score", "score_mod 'in_place' mutates a tensor.*`x = x \\+ y`"),
    (lambda s, b, h, q, kv: s * q.item(), "score", "reads the value of a tensor in Python"),
    (lambda s, b, h, q, kv: s + torch.rand(()), "score", "draws random numbers"),
    (lambda s, b, h, q, kv: s[None], "score", r"floating-point tensor, got shape \(1,\)"),
    (lambda s, b, h, q, kv: q, "score", "got dtype torch.int64: use .float"),
    (lambda b, h, q, kv: TABLE[q] > 0, "mask", r"bool tensor, got shape \(7,\): reduce it"),
    (lambda b, h, q, kv: q * 1.0, "mask", "got dtype torch.float32: compare"),
    (lambda b, h, q, kv: UNSIGNED[torch.uint16][q] == UNSIGNED[torch.uint16][kv], "mask", r"with torch.uint16.*table\.long\(\)\[kv\]"),
    (lambda b, h, q, kv: UNSIGNED[torch.uint32][kv] < 3, "mask", "computes with torch.uint32"),
    (lambda b, h, q, kv: UNSIGNED[torch.uint64][kv].long() < q, "mask", "computes with torch.uint64"),
    (lambda b, h, q, kv: q > kv.nothing, "mask", "cannot be traced: .*no attribute 'nothing'"),
]


COUNTS = torch.tensor([0, 2, 2, 5])
UNKNOWN_SIZES: dict[str, tuple[Any, str]] = {
    "nonzero, its size": (lambda s, b, h, q, kv: s * COUNTS.nonzero().shape[0], "score"),
    "unique, its size": (lambda b, h, q, kv: q < COUNTS.unique().numel(), "mask"),
    "bincount, its size": (lambda b, h, q, kv: q % COUNTS.bincount().shape[0] == kv, "mask"),
    "half of a size": (lambda s, b, h, q, kv: s * (COUNTS.nonzero().shape[0] / 2), "score"),
    "nonzero of an index": (lambda s, b, h, q, kv: s * (COUNTS - h).nonzero().sum(), "score"),
    "size of a nonzero of an index": (lambda b, h, q, kv: (COUNTS - h).nonzero().shape[0] > q, "mask"),
    "unique of an index": (lambda b, h, q, kv: (COUNTS - h).unique().numel() > q, "mask"),
    "a mask of an index": (lambda s, b, h, q, kv: s + COUNTS[q < COUNTS].sum(), "score"),
}


@pytest.mark.parametrize(("fn", "kind"), UNKNOWN_SIZES.values(), ids=UNKNOWN_SIZES)
def test_sizes_that_depend_on_values_raise_with_the_name_of_the_mod(fn: Any, kind: Any) -> None:
    fn.__name__ = fn.__qualname__ = "sized"
    with pytest.raises(ProgramError, match=rf"^{kind}_mod 'sized' computes with a shape that depends on values .*\. Compute such a size"):
        trace(fn, kind)


def test_captured_tensors_may_have_shapes_that_depend_on_values() -> None:
    counts, score = COUNTS.clone(), torch.randn(2, 3, 5, 7)
    mods: list[Any] = [
        lambda s, b, h, q, kv: s + counts.unique()[h % 2],
        lambda s, b, h, q, kv: s + counts.nonzero().sum(),
        lambda s, b, h, q, kv: s + torch.cat([counts[counts > 1], h[None]]).sum(),
        lambda s, b, h, q, kv: s + torch.arange(counts.nonzero().shape[0]).sum(),
    ]
    heads = torch.arange(3).view(1, 3, 1, 1)
    traced = [trace(fn, "score") for fn in mods]
    for values in ([0, 2, 2, 5], [1, 0, 0, 7], [3, 4, 5, 6]):
        counts.copy_(torch.tensor(values))
        added = [
            counts.unique()[heads % 2], counts.nonzero().sum(), counts[counts > 1].sum() + heads, sum(range(counts.count_nonzero().item()))
        ]  # fmt: skip
        for one, more in zip(traced, added, strict=True):
            torch.testing.assert_close(one.program(score, *indices(), *one.captured()), score + more)


@pytest.mark.parametrize(("fn", "kind", "match"), REJECTED, ids=[m for _, _, m in REJECTED])
def test_a_mod_that_cannot_be_traced_raises_with_its_name_and_the_reason(fn: object, kind: str, match: str) -> None:
    with pytest.raises(ProgramError, match=match):
        trace(fn, kind)  # type: ignore[arg-type]


def test_a_mask_may_convert_a_table_of_wide_unsigned_integers_before_the_lookup() -> None:
    traced = trace(lambda b, h, q, kv: UNSIGNED[torch.uint32].long()[kv] <= q, "mask")
    q, kv = torch.arange(5)[:, None], torch.arange(7)
    assert torch.equal(traced.program(torch.tensor(0), torch.tensor(0), q, kv, *traced.captured()), kv <= q)


@pytest.mark.parametrize("value", [True, 1.0, None])
def test_a_mod_that_returns_no_tensor_raises(value: object) -> None:
    with pytest.raises(TypeError, match="must return a scalar"):
        trace(lambda s, b, h, q, kv: value, "score")  # type: ignore[arg-type,return-value]


@contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


ACTIVE_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
}
WEIGHT, VECTORS = torch.randn(4, 3, requires_grad=True), torch.randn(9, 6)
MODS = {
    "softcap": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "bias": lambda s, b, h, q, kv: s + TABLE[h, (q - kv).clamp(0, 6)].exp(),
    "preamble": lambda s, b, h, q, kv: s + (WEIGHT @ WEIGHT.T).sum(0)[h],
    "constant": lambda s, b, h, q, kv: torch.maximum(s, torch.full((), 0.25)) * torch.full_like(s, 3.0),
    "vectors": lambda s, b, h, q, kv: s * (VECTORS[q] @ VECTORS[kv]),
}


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize("active_mode", ACTIVE_MODES.values(), ids=ACTIVE_MODES)
def test_programs_and_gradients_do_not_depend_on_the_modes_active_during_tracing(active_mode: Any, mod: Any) -> None:
    plain = trace(mod, "score")
    with active_mode():
        traced = trace(mod, "score")
    assert traced.program.key == plain.program.key
    with active_mode():
        joint = joint_of(traced.program) if traced.program.pointwise else None
    if joint is not None:
        assert str(joint.graph) == str(joint_of(plain.program).graph)
    constants = [n.meta["constant"] for g in (traced.program.graph, joint and joint.graph) if g for n in g.nodes if "constant" in n.meta]
    assert all(type(t) is Tensor and t.device.type == "cpu" and not t.is_inference() for t in constants)


@torch.library.custom_op("longspan_tests::joint_below_an_operator", mutates_args=())
def trace_inside_operator(x: Tensor) -> Tensor:
    TRACED_GRADIENTS.append(joint_of(trace(MODS["softcap"], "score").program))
    return x.clone()


TRACED_GRADIENTS: list[Any] = []


def test_a_gradient_traced_inside_a_custom_operator_is_not_zero() -> None:
    trace_inside_operator(torch.zeros(3))
    (joint,) = TRACED_GRADIENTS
    score, index = torch.randn(2, 3), [torch.zeros(1, 1, dtype=torch.int64)] * 4
    torch.testing.assert_close(joint(torch.ones(2, 3), score, *index)[0], 1 - (score / 20).tanh().square())


def test_a_mod_that_does_not_depend_on_the_score_has_gradient_zero() -> None:
    joint = joint_of(trace(lambda s, b, h, q, kv: (s > 0).float() - (q - kv), "score").program)
    score, index = torch.randn(2, 3), [torch.zeros(1, 1, dtype=torch.int64)] * 4
    assert not joint(torch.ones(2, 3), score, *index)[0].any()


def test_the_preamble_keeps_its_dtype_under_autocast() -> None:
    traced = trace(MODS["preamble"], "score")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (captured,) = traced.captured()
    assert captured.dtype == torch.float32 and captured.requires_grad


def test_a_program_unpickled_in_inference_mode_supports_backward() -> None:
    scale = torch.full((), 1.5)
    data = pickle.dumps(trace(lambda s, b, h, q, kv: s * torch.tensor(2.5), "score").program)
    with torch.inference_mode():
        program = pickle.loads(data)
    score = torch.randn(2, 3, requires_grad=True)
    program(score * scale, *[torch.zeros(1, 1, dtype=torch.int64)] * 4).sum().backward()
    torch.testing.assert_close(score.grad, torch.full((2, 3), 3.75))


def test_programs_know_the_indices_that_they_use_and_whether_they_are_elementwise() -> None:
    table, cube = torch.arange(12).view(3, 4), torch.zeros(2, 3, 4, dtype=torch.int64)
    scalar = torch.tensor(3)
    cases: list[tuple[Any, tuple[bool, bool, bool, bool]]] = [  # uses the batch index, the head, a position; elementwise
        (lambda b, h, q, kv: q > 3, (False, False, True, True)),
        (lambda b, h, q, kv: kv > 3, (False, False, True, True)),
        (lambda b, h, q, kv: b > h, (True, True, False, True)),
        (lambda b, h, q, kv: h > 0, (False, True, False, True)),
        (lambda b, h, q, kv: table[h, q] > scalar, (False, True, True, True)),
        (lambda b, h, q, kv: cube[1, h, kv] == q, (False, True, True, True)),
        (lambda b, h, q, kv: (table.T[q] > 3).all(), (False, False, True, False)),
        (lambda b, h, q, kv: (table[h] > 3).all(), (False, True, False, False)),
        (lambda b, h, q, kv: (table > q).any(), (False, False, True, False)),
        (lambda b, h, q, kv: cube[b].sum() == kv, (True, False, True, False)),
    ]
    for mod, expected in cases:
        program = trace(mod, "mask").program
        assert (program.uses_batch, program.uses_head, program.uses_position, program.pointwise) == expected
    score = trace(lambda s, b, h, q, kv: s + table[b, kv] + scalar, "score").program
    assert (score.uses_batch, score.uses_head, score.uses_position, score.pointwise) == (True, False, True, True)
    assert [n.name for n in score.index_nodes] == ["b", "h", "q", "kv"] and len(score.captured_nodes) == len(score.captured) == 2
    assert not trace(lambda s, b, h, q, kv: s + b, "score").program.uses_position


def test_messages_name_a_mod_by_its_function_or_its_class() -> None:
    class Named:
        __name__ = "a name"

    def mod() -> None: ...

    assert mod_name(mod).endswith("<locals>.mod") and mod_name(Named()) == "a name"
    assert mod_name(partial(mod)) == "partial"
