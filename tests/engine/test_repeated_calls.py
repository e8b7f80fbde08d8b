"""Repeated calls with a plan: recognised by their tensors' layouts; a call that differs is not taken for one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.engine.call_cases import deterministic, strided
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import attention as attention_module
from longspan._engine.attention import AttendOptions
from longspan._engine.repeated_calls import repeated_calls
from longspan.testing import oracle, virtual_world

TOKENS = 40


def tensors(seed: int = 0, *, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, tokens, 8, generator=generator, dtype=torch.float64).to(dtype) for h in (4, 2, 2)]


def repeated_plan(**options: Any) -> Any:
    """A plan of one rank, after one call with it."""
    plan = ls.plan(ls.causal(), TOKENS, ls.Mesh.abstract(1), heads=4, kv_heads=2)
    ls.attention(*tensors(), plan=plan, kernel="cpu", **options)
    return plan


def is_repeated(plan: Any, qkv: list[Any], **options: Any) -> bool:
    given = AttendOptions(**{"kernel": "cpu", "return_lse": False, "plan": plan, **options})
    return repeated_calls.options(plan.data, *qkv, given) is not None


def test_a_repeated_call_is_not_checked_again_and_reads_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = attention_module._checked_scale
    monkeypatch.setattr(attention_module, "_checked_scale", lambda *args: (checked.append(1), check(*args))[1])
    plan = ls.plan(ls.causal(), TOKENS, ls.Mesh.abstract(2), layout="head_tail", strategy="ring", heads=4, kv_heads=2)

    def rank(mesh: Any) -> list[list[Tensor]]:
        mine = plan.on(mesh)
        by_call = []
        for seed in range(4):
            shards = [mine.shard(t, 2).requires_grad_() for t in tensors(seed)]
            out = ls.attention(*shards, plan=mine, kernel="cpu")
            grads = torch.autograd.grad(out.square().sum(), shards)
            by_call.append([mine.unshard(t, 2) for t in (out.detach(), *grads)])
        return by_call

    results = virtual_world(2).run(rank)[0]
    assert len(checked) == 2, "once per rank"
    for seed, got in enumerate(results):
        leaves = [t.requires_grad_() for t in tensors(seed)]
        out, _ = oracle(*leaves, mask=ls.causal(), return_lse=True)
        for a, b in zip(got, (out.detach(), *torch.autograd.grad(out.square().sum(), leaves)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def _negated(t: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(t), -t).conj().imag


class _SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


OTHER_TENSORS: dict[str, Callable[[], list[Any]]] = {
    "length": lambda: tensors(tokens=TOKENS - 1),
    "strides": lambda: [strided(t) for t in tensors()],
    "dtype": lambda: tensors(dtype=torch.float32),
    "gradient": lambda: [t.requires_grad_() for t in tensors()],
    "negated view": lambda: [_negated(tensors()[0]), *tensors()[1:]],
    "subclass": lambda: [tensors()[0].as_subclass(_Subclass), *tensors()[1:]],
    "meta device": lambda: [t.to("meta") for t in tensors()],
    "sparse": lambda: [tensors()[0].to_sparse(), *tensors()[1:]],
    "no tensor": lambda: [1.0, *tensors()[1:]],
    "same object": lambda: [tensors()[0], *[tensors()[1]] * 2],
    "nested": lambda: [torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])] * 3,
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_a_call_with_other_tensors_is_checked(name: str) -> None:
    plan = repeated_plan()
    assert is_repeated(plan, tensors(1))
    assert not is_repeated(plan, OTHER_TENSORS[name]())
    assert is_repeated(plan, tensors(2))


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.5}, {"scale": 1}, {"scale": 0.0}, {"kernel": "auto"}, {"kernel": "none"}, {"return_lse": True}, {"max_scores": True},
     {"mask": ls.causal()}, {"sink": torch.zeros(4)}, {"score_mod": lambda s, b, h, q, kv: s}],
    ids=lambda options: " ".join(options) + f" {[v for v in options.values() if isinstance(v, int | float | str)]}",
)  # fmt: skip
def test_a_call_with_other_arguments_is_checked(options: dict[str, Any]) -> None:
    assert not is_repeated(repeated_plan(), tensors(), **options)


MODES: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu"),
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
    "invariant": ls.invariant,
    "function mode": _SeesFunctions,
    "dispatch mode": _SeesOperators,
    "default device": lambda: torch.device("meta"),
    "forward-mode differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", MODES)
def test_a_call_in_another_mode_is_checked(name: str) -> None:
    plan, qkv = repeated_plan(), tensors(1)
    with MODES[name]():
        assert is_repeated(plan, qkv) == (name == "none")


def test_a_call_under_a_transform_is_checked() -> None:
    plan, recognised = repeated_plan(), []
    torch.vmap(lambda q, k, v: (recognised.append(is_repeated(plan, [q, k, v])), q)[1])(*(torch.stack([t, t]) for t in tensors()))
    assert recognised == [False]


def test_calls_with_a_mod_a_sink_or_in_a_mode_are_not_remembered() -> None:
    for options in ({"score_mod": lambda s, b, h, q, kv: s * 0.5}, {"sink": torch.zeros(4, dtype=torch.float64)}):
        assert not is_repeated(repeated_plan(**options), tensors())
    with ls.invariant():
        plan = repeated_plan()
    assert not is_repeated(plan, tensors())


def test_remembered_calls_are_bounded_and_dropped_with_their_plan() -> None:
    plan = repeated_plan()
    for i in range(40):
        ls.attention(*tensors(), plan=plan, kernel="cpu", scale=0.1 + i)
    for tokens in (8, 16, 32, 64, 128, 256):  # other strides
        padded = [torch.zeros(1, t.shape[1], TOKENS, tokens, dtype=t.dtype)[..., :8] for t in tensors()]
        ls.attention(*padded, plan=plan, kernel="cpu")
    cache = repeated_calls._by_plan
    assert cache.count(plan.data) <= 16 and all(len(known) <= 4 for known in cache.values_of(plan.data).values())
    data, inputs = weakref.ref(plan.data), tensors()
    tensor = weakref.ref(inputs[0])
    ls.attention(*inputs, plan=plan, kernel="cpu")
    del plan, inputs
    gc.collect()
    assert data() is None and tensor() is None
