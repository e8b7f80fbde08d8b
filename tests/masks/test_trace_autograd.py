"""A mod cannot change gradients in ways that a trace does not record: such mods raise; `detach` and `torch.no_grad()` work as in eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from tests.autograd_functions import StraightThrough
from torch import Tensor
from torch.utils.checkpoint import check_backward_validity, checkpoint

import longspan as ls
from longspan._masks import trace_autograd, tracing
from longspan._masks.tracing import trace
from longspan._torch_private import detach_is_recorded

TABLE = torch.randn(8, dtype=torch.float64, requires_grad=True)
Unary = Callable[[Tensor], Tensor]


class _Reversal(torch.autograd.Function):
    """A Function without operations in its forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


straight_through = StraightThrough.apply  # bound before any trace


@torch.library.custom_op("longspan_test::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    return x.round()


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, grad: 3 * grad)


def _data(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x * 2
    return y


def _detached_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.detach_()
    return y


def _flag_assigned(x: Tensor) -> Tensor:
    y = x.detach()
    y.requires_grad = True
    return y


def _hooked(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: 100 * grad)
    return y


def _caught(x: Tensor) -> Tensor:
    try:
        return straight_through(x)
    except Exception:
        return x


REJECTED: dict[str, tuple[Unary, str]] = {
    "custom Function": (straight_through, "Function 'StraightThrough'"),
    "custom Function with setup_context": (_Reversal.apply, "Function '_Reversal'"),
    "caught error": (_caught, "Function 'StraightThrough'"),
    "reentrant checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=True), "Function 'CheckpointFunction'"),
    "assignment to data": (_data, "assigns to x.data"),
    "detach_": (_detached_in_place, r"calls x.detach_\(\)"),
    "torch.detach_": (lambda x: torch.detach_(x * 1), r"calls x.detach_\(\)"),
    "aten.detach_": (lambda x: torch.ops.aten.detach_.default(x * 1), r"calls x.detach_\(\)"),
    "requires_grad_": (lambda x: x.detach().requires_grad_(), r"calls x.requires_grad_\(\)"),
    "assignment to requires_grad": (_flag_assigned, "setter of x.requires_grad"),
    "hook": (_hooked, "reads requires_grad"),
    "grad_fn": (lambda x: x if x.grad_fn is None else -x, "reads grad_fn"),
    "set_": (lambda x: (x * 1).set_(x * 2), r"mutates a tensor \(set_\)"),
}


def _of_score(fn: Unary) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: fn(score) + 0.0


def _of_lookup(fn: Unary) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score + fn(TABLE[(q - kv).abs()]).to(score.dtype)


def _of_table(fn: Unary) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score + fn(TABLE * 1)[(q - kv).abs()].to(score.dtype)


@pytest.fixture(params=["scalar tracer", "torch's tracer"])
def tracer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch's tracer":
        monkeypatch.setattr(tracing, "scalar_trace", lambda *_: None)


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.usefixtures("tracer")
def test_a_change_of_the_gradient_that_no_operation_records_is_rejected(name: str) -> None:
    fn, message = REJECTED[name]
    for mod in (_of_score(fn), _of_lookup(fn), _of_table(fn)):
        with pytest.raises(ls.ProgramError, match=message):
            tracing.trace(mod, "score")


@pytest.mark.usefixtures("tracer")
def test_a_custom_function_is_allowed_where_no_gradient_flows() -> None:
    tracing.trace(lambda b, h, q, kv: straight_through(q * 0.5) >= kv, "mask")
    tracing.trace(lambda score, b, h, q, kv: score + straight_through(q), "score")
    with torch.no_grad():
        tracing.trace(_of_score(straight_through), "score")


@pytest.mark.usefixtures("tracer")
def test_torch_may_read_the_state_that_a_mod_may_not(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(x: Tensor) -> Tensor:
        print(x)  # reads grad_fn and requires_grad
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            check_backward_validity([x.detach()])
        return x * 2

    tracing.trace(_of_score(printed), "score")
    assert capsys.readouterr().out


def test_an_assignment_to_data_is_rejected_in_a_mask() -> None:
    with pytest.raises(ls.ProgramError, match=r"assigns to x\.data"):
        tracing.trace(lambda b, h, q, kv: _data(q) >= kv, "mask")


def test_custom_functions_of_other_threads_and_of_later_calls_are_not_affected() -> None:
    results: list[Tensor] = []

    def in_a_thread() -> None:
        x = torch.ones((), requires_grad=True)
        results.extend(torch.autograd.grad(_Reversal.apply(x), x))

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        thread = Thread(target=in_a_thread)
        thread.start()
        thread.join()
        return score

    tracing.trace(mod, "score")
    in_a_thread()
    assert results and all(float(g) == -1 for g in results)
    with pytest.raises(ls.ProgramError):
        tracing.trace(_of_score(straight_through), "score")
    in_a_thread()
    assert float(results[-1]) == -1


def _under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
        same = x.to(x.dtype)  # x itself, with its gradient
        with torch.enable_grad():
            z = (x - y) * x
    return x * y + z + same


@torch.no_grad()
def _decorated(x: Tensor) -> Tensor:
    return x.sin()


HONOURED: dict[str, Unary] = {
    "no_grad": _under_no_grad,
    "decorator": lambda x: _decorated(x) * x,
    "custom Function in no_grad": lambda x: x * torch.no_grad()(straight_through)(x),
    "detach": lambda x: x * x.detach(),
    "data": lambda x: x * x.data,
    "straight-through by detach": lambda x: x + (x.round() - x).detach(),
    "custom operator": lambda x: torch.ops.longspan_test.rounded(x) * x,
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}


DETACHES = frozenset(HONOURED) - {"custom operator", "checkpoint"}


@pytest.mark.parametrize("name", HONOURED)
@pytest.mark.parametrize("of", [_of_score, _of_lookup, _of_table])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_are_those_of_eager_autograd(name: str, of: Callable[[Unary], Callable[..., Tensor]]) -> None:
    mod = of(HONOURED[name])
    if of is _of_table and not detach_is_recorded():  # torch 2.14 and later
        with pytest.raises(ls.ProgramError, match="does not record detach") if name in DETACHES else nullcontext():
            tracing.trace(mod, "score")
        return
    q = torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    zero, places = torch.tensor(0), [torch.tensor(n) for n in range(4)]
    scores = q @ q.mT * 3**-0.5
    modified = torch.stack([torch.stack([mod(scores[0, 0, i, j], zero, zero, i, j) for j in places]) for i in places])
    weights = torch.randn(1, 1, 4, 3, dtype=torch.float64)
    leaves = (q, TABLE)
    expected = torch.autograd.grad((modified.softmax(-1) @ q * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    for kernel in ("cpu", "dense"):
        out = ls.attention(q, q, q, score_mod=mod, kernel=kernel)
        got = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e)


def test_scores_that_a_torch_without_records_of_detach_cannot_trace_raise_and_masks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_autograd, "detach_is_recorded", lambda: False)
    score: Any = lambda s, b, h, q, kv: torch.stack([s, s]).sum(0)[...] + s
    with pytest.raises(Exception, match=r"does not record detach, torch\.no_grad\(\) and x\[\.\.\.\] in this kind of score_mod"):
        trace(score, "score")
    with torch.no_grad():
        trace(score, "score")
    trace(lambda b, h, q, kv: (torch.stack([q, kv]).sum(0)[...] + q) * 0.5 > kv, "mask")
