"""Backward passes that a kernel has prepared: which call takes them, by a guard or by a key. A function stands for the kernel's pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.engine.call_cases import BIAS, CAUSAL, biased, deterministic, qkv
from torch import Tensor

import longspan as ls
from longspan._engine import one_device, prepared_call
from longspan._engine.prepared_call import PreparedCall, _backward_key

NAMES = ("q", "k", "v", "out", "lse", "grad")
SLOPES = torch.nn.Parameter(torch.linspace(0.1, 0.4, 4))


def two_tables(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s * SLOPES[h] + BIAS[kv]


@dataclass
class Pass:
    """A call and its tensors; `seen`: what its prepared backward pass was called with."""

    call: PreparedCall
    tensors: dict[str, Tensor]
    captured: list[Tensor]
    needs: tuple[bool, ...]
    seen: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __call__(self, *tensors: Any) -> Any:
        self.seen.append((*tensors[:6], *tensors[6]))
        return *(torch.ones(n) for n in (2, 3, 4)), [torch.ones(5, dtype=torch.float64), None][: len(tensors[6])]

    def key(self, **changes: Any) -> Any:
        q, k, v, out, lse, grad = (self.tensors | changes).values()
        return _backward_key(q, k, v, out, lse, grad, self.captured, self.needs)

    def again(self, captured: list[Tensor] | None = None, needs: tuple[bool, ...] | None = None, **changes: Tensor) -> Any:
        q, k, v, out, lse, grad = (self.tensors | changes).values()
        saved = (q, k, v, None, out, lse, *self.call.mask_captured, *(self.captured if captured is None else captured))
        with torch.no_grad():
            return self.call.backward_again(saved, grad, self.needs if needs is None else needs)


def made(prepared: list[PreparedCall], tables: int = 0, mask: Any = CAUSAL) -> Pass:
    """A call with a prepared backward pass. tables: tensors that its score_mod captures."""
    tensors, mod = qkv(), (None, biased, two_tables)[tables]
    for _ in range(3):
        out = ls.attention(*tensors, mask=mask, score_mod=mod)
    captured = [BIAS] if tables == 1 else [SLOPES, BIAS][:tables]
    q, k, v = (t.detach() for t in tensors)
    named = {"q": q, "k": k, "v": v, "out": out.detach(), "lse": torch.zeros(1, 4, 40), "grad": torch.zeros(1, 4, 40, 16)}
    one = Pass(prepared[-1], named, [t.detach() for t in captured], (True,) * tables)
    one.call._backwards[one.key()] = (one.call._kernel, one.call._work, one)
    return one


def misaligned(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def by_guard(one: Pass, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> bool:
    """Whether a call takes the recent pass without a key."""
    one.seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(one.call, "_prepared_backward", lambda *_: None)
        result = one.again(**changes)
    assert (result is not None) == bool(one.seen)
    return result is not None


@pytest.mark.parametrize("tables", [0, 1, 2])
@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL & ls.documents([13, 27])], ids=str)
def test_a_pass_gets_the_saved_tensors_and_gives_gradients_in_their_dtypes(
    tables: int, mask: ls.Mask, prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(prepared, tables, mask)
    for _ in range(2):
        one.seen.clear()
        dq, dk, dv, sink, *captured = one.again()
        assert [len(g) for g in (dq, dk, dv)] == [2, 3, 4] and sink is None
        assert [None if g is None else g.dtype for g in captured] == [torch.float32, None][:tables]
        ((*got,),) = one.seen
        assert len(got) == 6 + tables and all(a is b for a, b in zip(got, [*one.tensors.values(), *one.captured], strict=True))
        assert by_guard(one, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_a_recent_pass_is_not_taken_for_misaligned_or_strided_tensors(
    name: str, prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(prepared, 1)
    one.again()
    x = one.tensors[name]
    assert by_guard(one, monkeypatch, **{name: x.clone()})
    wider = torch.zeros(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]]
    assert not by_guard(one, monkeypatch, **{name: misaligned(x)}) and not by_guard(one, monkeypatch, **{name: wider})
    assert one.again(**{name: misaligned(x)}) is None and one.again(**{name: wider}) is None


def test_a_recent_pass_is_not_taken_for_other_tables_needs_or_settings(
    prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(prepared, 2)
    one.again()
    slopes, bias = one.captured
    assert by_guard(one, monkeypatch) and by_guard(one, monkeypatch, captured=[slopes.clone(), bias.clone()])
    assert not by_guard(one, monkeypatch, captured=[misaligned(slopes), bias])
    assert not by_guard(one, monkeypatch, captured=[slopes, misaligned(bias)])
    assert not by_guard(one, monkeypatch, needs=(True, False))
    with deterministic():
        assert not by_guard(one, monkeypatch)
        assert one.again() is None


@pytest.mark.parametrize("which", [0, 1, "q"])
def test_a_pass_of_misaligned_tensors_is_looked_up_by_its_key(
    which: Any, prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(prepared, 2)
    if which == "q":
        one.tensors["q"] = misaligned(one.tensors["q"])
    else:
        one.captured[which] = misaligned(one.captured[which])
    one.call._backwards[one.key()] = (one.call._kernel, one.call._work, one)  # type: ignore[assignment]
    assert one.again() is not None
    assert not by_guard(one, monkeypatch) and one.call._recent_backward is None


def test_a_key_depends_on_alignments_and_not_on_addresses(prepared: list[PreparedCall]) -> None:
    one = made(prepared, 2)
    before = one.key()
    one.captured = [t.clone() for t in one.captured]
    assert one.key(**{name: x.clone() for name, x in one.tensors.items()}) == before


def test_a_pass_is_not_taken_in_a_capture_for_second_derivatives_or_batched_gradients(
    prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(prepared)
    saved = [*list(one.tensors.values())[:3], None, *list(one.tensors.values())[3:5]]
    assert one.again() is not None
    assert one.call.backward_again(saved, one.tensors["grad"], ()) is None  # create_graph=True
    monkeypatch.setattr(prepared_call, "is_captured", lambda q: True)
    assert one.again() is None
    monkeypatch.undo()
    monkeypatch.setattr(prepared_call, "is_batched_gradient", lambda grad: True)
    assert one.again() is None
    monkeypatch.undo()
    one.call._no_prepared_backward = True  # a call with a sink
    assert one.again() is None


def test_prepared_passes_are_for_gradients_of_out_alone(prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked = made(prepared), []
    monkeypatch.setattr(one.call, "backward_again", lambda *arguments: asked.append(arguments))
    leaves = [one.tensors[name].requires_grad_() for name in "qkv"]
    out, lse = one.call(*leaves, None, [], lse=True)
    for with_out, with_lse in ((True, False), (True, True), (False, True)):
        asked.clear()
        results = [x for x, used in ((out, with_out), (lse, with_lse)) if used]
        torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], retain_graph=True)
        assert bool(asked) is (not with_lse)


def test_gradients_of_lse_and_negated_gradients_of_prepared_calls(prepared: list[PreparedCall]) -> None:
    tensors, grad = qkv(), torch.randn(1, 4, 40, 16)
    for times in range(4):
        results = [ls.attention(*tensors, mask=CAUSAL, return_lse=True, kernel=kernel) for kernel in ("auto", "dense")]
        for loss in (lambda out, lse: lse.sum(), lambda out, lse: lse.sum() + (out * grad).sum()):
            got, want = (torch.autograd.grad(loss(*r), tensors, retain_graph=True, allow_unused=True) for r in results)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b)
        assert times < 2 or not prepared[-1]._backwards
    got, want = (torch.autograd.grad(r[0], tensors, torch._neg_view(grad), retain_graph=True) for r in results)
    torch.testing.assert_close(got, want)
    assert len(prepared[-1]._backwards) == 1  # of out alone, though the call returned lse


@pytest.mark.parametrize("name", ["q", "k", "v", "sink", "slopes", "bias"])
def test_one_tensor_that_requires_gradients_is_enough(name: str, prepared: list[PreparedCall]) -> None:
    q, k, v = qkv(grad=False)
    given = {"q": q, "k": k, "v": v, "sink": torch.zeros(4), "slopes": SLOPES.detach().clone(), "bias": BIAS.detach().clone()}
    given[name].requires_grad_()
    slopes, bias = given["slopes"], given["bias"]
    for _ in range(4):
        out = ls.attention(q, k, v, sink=given["sink"], score_mod=lambda s, b, h, i, j: s * slopes[h] + bias[j])
        assert out.requires_grad
    (grad,) = torch.autograd.grad(out.sin().sum(), given[name])
    assert prepared and bool(grad.any())


def test_lse_of_a_prepared_call_is_contiguous(prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, forward = qkv(grad=False), one_device.forward_by

    def strided(*args: Any, **options: Any) -> Any:
        state = forward(*args, **options)
        state.lse = state.lse.transpose(1, 2).contiguous().transpose(1, 2)
        return state

    monkeypatch.setattr(one_device, "forward_by", strided)
    for _ in range(4):
        out, lse = ls.attention(*tensors, mask=CAUSAL, return_lse=True)
    assert prepared and lse.is_contiguous() and out.shape == (1, 4, 40, 16)
