"""Mods that compute with scalars are traced without torch's tracer, into the same programs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import longspan as ls
from longspan._masks import joint, tracing
from longspan._masks.scalar_trace import scalar_vjp

TABLE, WINDOW, SLOPES = torch.randn(4, 16), torch.tensor(5), torch.nn.Parameter(torch.randn(4))
GAIN, BIAS = torch.tensor(0.5), torch.nn.Parameter(torch.randn(4, 7))
SUBCLASS = TwoTensor(torch.tensor(5), torch.tensor(6))


def _or_none(compute: Any) -> Any:
    """The result of a function, None if it raises."""
    try:
        return compute()
    except Exception:
        return None


MASKS: dict[str, Any] = {
    "full": ls.full(),
    "causal": ls.causal(),
    "window": ls.sliding_window(5, 2),
    "causal documents": ls.causal() & ls.documents([3, 7, 6]),
    "documents": ls.documents([3, 7, 6]),
    "scattered documents of two rows": ls.documents(ids=[[0, 1, 0, -1], [1, 1, 2, 0]]),
    "prefixes": ls.causal() | ls.prefix([3, 4]),
    "complement": ~(ls.prefix(3) | ls.sliding_window(2)),
    "blocks": lambda b, h, q, kv: (q >= kv) & ((q // 5 - kv // 5 < 2) | (kv // 5 % 3 == 0)),
    "captured number": lambda b, h, q, kv: (q - kv < WINDOW) & (q * 2 > WINDOW),
    "lookup": lambda b, h, q, kv: (TABLE[h, kv] > TABLE[0, q]) | (TABLE[h, q] > 0.5),
    "other dtypes": lambda b, h, q, kv: q.to(torch.int32) * 0.5 >= kv.double().clone(),
}
SCORES: dict[str, Any] = {
    "soft cap": lambda s, b, h, q, kv: 30 * torch.tanh(s / 30),
    "alibi": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs().float(),
    "where": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")) + torch.where(b > 0, 0.0, 1.0),
    "constants": lambda s, b, h, q, kv: s * torch.full((), 2.0) + torch.ones_like(s) + s.new_full((), 3),
    "clamped lookup": lambda s, b, h, q, kv: s + TABLE[h, (q - kv).clamp(0, 15)] * WINDOW,
}


@pytest.mark.parametrize(("kind", "name"), [*(("mask", name) for name in MASKS), *(("score", name) for name in SCORES)])
def test_the_program_is_that_of_torchs_tracer(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod = (MASKS if kind == "mask" else SCORES)[name]
    with monkeypatch.context() as context:
        context.setattr(tracing, "fake_trace", lambda *_, **__: pytest.fail("torch's tracer was used"))
        ours = tracing.trace(mod, kind)
    monkeypatch.setattr(tracing, "scalar_trace", lambda *_: None)
    theirs = tracing.trace(mod, kind)
    assert ours.program.key == theirs.program.key
    assert ours.preamble is None and theirs.preamble is None
    assert len(ours.sources) == len(theirs.sources) and all(a is b for a, b in zip(ours.sources, theirs.sources, strict=True))
    values = [(n.op, n.meta["val"].dtype, n.meta["val"].shape) for n in ours.program.graph.nodes if "val" in n.meta]
    assert values == [(n.op, n.meta["val"].dtype, n.meta["val"].shape) for n in theirs.program.graph.nodes if "val" in n.meta]


GRADIENTS: dict[str, Any] = SCORES | {
    "the score": lambda s, b, h, q, kv: s,
    "no score": lambda s, b, h, q, kv: (q - kv).float(),
    "two lookups": lambda s, b, h, q, kv: s * SLOPES[h] + BIAS[h, (q - kv).clamp(0, 6)],
    "both sides of where": lambda s, b, h, q, kv: torch.where(q > kv, s, s * 0.5),
    "clamp": lambda s, b, h, q, kv: s.clamp(-2, 2) + s.clamp_min(SLOPES[h]),
    "maximum": lambda s, b, h, q, kv: torch.maximum(s, SLOPES[h]) + torch.minimum(s, s * 2),
    "power": lambda s, b, h, q, kv: s**3 + torch.atan2(s, SLOPES[h] + 1) / (1 + (q - kv).abs()),
    "functions": lambda s, b, h, q, kv: F.gelu(s) + F.softplus(s, 2.0) + F.hardtanh(s, -2, 1) + F.elu(s, 1.5) + F.mish(s) + F.relu(s),
    "half": lambda s, b, h, q, kv: (s.half() * SLOPES[h].half()).float(),
    "a captured number": lambda s, b, h, q, kv: s * GAIN + WINDOW,
}


def _described(gradient: joint.Joint) -> Any:
    """The graph without the names of its nodes."""
    place = {node: i for i, node in enumerate(gradient.graph.nodes)}
    return gradient.reads, [
        (
            n.op,
            n.target if n.op == "call_function" else None,
            torch.fx.map_arg((n.args, n.kwargs), lambda x: f"%{place[x]}"),
            n.meta["val"].dtype if "val" in n.meta else None,
            n.meta["constant"].item() if "constant" in n.meta else None,
        )
        for n in gradient.graph.nodes
    ]


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_is_that_of_torchs_tracer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = tracing.trace(GRADIENTS[name], "score")
    program, sizes = traced.program, [t.shape for t in traced.sources]
    with monkeypatch.context() as context:
        context.setattr(joint, "fake_trace", lambda *_: pytest.fail("torch's tracer was used"))
        ours = joint.joint_of(program, sizes)
    monkeypatch.setattr(joint, "scalar_vjp", lambda *_: None)
    assert _described(ours) == _described(joint.joint_of(program, sizes))


@pytest.mark.parametrize(
    "vjp",
    [
        lambda x, table: [table.sum() * x],
        lambda x, table: [x.detach().add_(1), x],
        lambda x, table: [x, x.view(()).mul_(2)],
        lambda x, table: [torch.ones_like(x).logical_and_(x)],
        lambda x, table: [torch.mul(x, x, out=torch.zeros_like(x))],
        lambda x, table: [GAIN.add_(x), x],
        lambda x, table: [F.logsigmoid(x)],
        lambda x, table: [x * 2 if x > 0 else x],
        lambda x, table: [(x * 1).set_(y := x * 5), y.add_(1)],
        lambda x, table: [z := x * 1, torch.ops.aten._unsafe_view(z, []).add_(1)],
        lambda x, table: [x * torch.ops.aten.zeros([]).add_(2).tolist()],
        lambda x, table: [x * (2 if x.data_ptr() else 3)],
    ],
)
def test_other_gradients_are_left_to_torchs_tracer(vjp: Any) -> None:
    before = GAIN.clone()
    assert scalar_vjp(vjp, [torch.zeros(()), torch.zeros(3)]) is None
    assert before == GAIN


def test_swapped_tensors_keep_their_values() -> None:
    def vjp(x: Any) -> Any:
        z, y = x * 1, x * 7
        torch.utils.swap_tensors(z, y)
        return [z]

    made = scalar_vjp(vjp, [torch.zeros(())])
    output = next(n for n in made.graph.nodes if n.op == "output")
    assert output.args[0][0].args[1] == 7


def test_the_address_of_an_index_is_not_read() -> None:
    with pytest.raises(ValueError, match="Cannot access data pointer"):
        tracing.trace(lambda b, h, q, kv: (q >= kv) if q.data_ptr() else (q < kv), "mask")


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: q >= int(kv),
        lambda b, h, q, kv: q >= torch.arange(3)[kv],
        lambda b, h, q, kv: q.add_(1) >= kv,
        lambda b, h, q, kv: torch.rand(()) >= 0.5,
        lambda b, h, q, kv: (torch.arange(3) >= q).any(),
        lambda b, h, q, kv: True,
        lambda b, h, q, kv: q >= kv.tolist(),
        lambda b, h, q, kv: q >= kv.numpy().item(),
        lambda b, h, q, kv: q >= len(bytes(kv.untyped_storage())),
        lambda b, h, q, kv: q >= torch.from_dlpack(kv),
        lambda b, h, q, kv: q >= WINDOW.exp(),
        lambda b, h, q, kv: q >= torch.tensor(3),
        lambda b, h, q, kv: q >= kv if kv > 2 else q < kv,
        lambda b, h, q, kv: q < kv if _or_none(lambda: WINDOW.exp()) is None else q >= kv,
        lambda b, h, q, kv: q < kv if _or_none(lambda: q // kv) is None else q >= kv,
        lambda b, h, q, kv: q < kv if _or_none(lambda: TABLE[h]) is None else q >= kv,
        lambda b, h, q, kv: q < kv if _or_none(lambda: int(q)) is None else q >= kv,
        lambda b, h, q, kv: q >= SUBCLASS,
    ],
)
def test_other_mods_are_left_to_torchs_tracer(mod: object) -> None:
    assert tracing.scalar_trace(mod, [torch.zeros((), dtype=torch.int64) for _ in range(4)]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [lambda q, kv: q.float(), lambda q, kv: q.to(torch.int16), lambda q, kv: q > kv])
def test_indices_that_torch_does_not_take_are_rejected(index: Any) -> None:
    with pytest.raises(tracing.ProgramError, match="cannot be traced"):
        tracing.trace(lambda b, h, q, kv: TABLE[h, index(q, kv)] > 0, "mask")


def test_a_first_call_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys, torch.nn.attention.flex_attention; known = set(sys.modules); import longspan as ls;"  # sympy in torch 2.15
        "q = torch.randn(1, 2, 30, 16, requires_grad=True); mask = ls.causal() & ls.documents([10, 20]);"
        "blocks = ls.mask_mod(lambda b, h, q, kv: (q // 8 >= kv // 8) & (kv % 3 != 1));"
        "ls.attention(q, q, q, mask=mask & blocks).sum().backward();"
        "slopes = torch.nn.Parameter(torch.randn(2)); soft = lambda s, b, h, q, kv: 5 * torch.tanh(s * slopes[h] / 5);"
        "ls.attention(q, q, q, mask=mask, score_mod=soft).sum().backward();"
        "print({'sympy', 'torch._dynamo', 'torch._inductor'} & (set(sys.modules) - known))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
