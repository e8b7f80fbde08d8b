"""Modes of the caller that longspan steps out of, and what it asks torch about them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from longspan import _torch_private as private
from longspan._derived_cache import DerivedCache
from longspan._torch_modes import default_modes, without_user_defaults


class Seen(TorchFunctionMode):
    """A function mode of the user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_tensors_of_default_modes_can_be_used_by_autograd_on_the_cpu() -> None:
    with default_modes():
        assert torch.is_grad_enabled()
    with torch.inference_mode(), torch.device("meta"):
        with default_modes():
            made = torch.zeros(2)
            assert not made.is_inference() and made.device.type == "cpu" and not torch.is_grad_enabled()
        assert torch.zeros(2).is_inference() and torch.zeros(2).device.type == "meta"
    with torch.device("meta"), default_modes():
        assert torch.is_grad_enabled() and torch.zeros(2).device.type == "cpu"
    with Seen(), default_modes():
        assert torch.zeros(2).device.type == "cpu"
    with torch.no_grad(), default_modes():
        assert not torch.is_grad_enabled()


def test_user_defaults_are_off_inside_and_back_outside() -> None:
    @without_user_defaults()
    def product(depth: int = 1) -> tuple[torch.dtype, str]:
        x = torch.ones(2, 2)
        return product(depth - 1) if depth else ((x @ x).dtype, x.device.type)

    with torch.autocast("cpu", torch.bfloat16):
        assert product() == (torch.float32, "cpu") and torch.is_autocast_enabled("cpu")
        with torch.device("meta"):
            assert product() == (torch.float32, "cpu") and torch.zeros(1).device.type == "meta"
        with pytest.raises(KeyError), without_user_defaults():
            assert not torch.is_autocast_enabled("cpu")
            raise KeyError
        assert torch.is_autocast_enabled("cpu")
    with without_user_defaults():
        assert torch.zeros(1).device.type == "cpu"


def asked() -> list[bool]:
    return [
        private.nothing_intercepts_calls(), private.modes_are_active(), private.function_modes_are_active(),
        private.foreign_function_modes_are_active(), private.transform_is_active(), private.forward_mode_is_active(),
    ]  # fmt: skip


def test_modes_and_transforms_are_seen() -> None:
    plain = [True, False, False, False, False, False]
    assert asked() == plain
    with Dispatched():
        assert asked() == [False, True, False, False, False, False]
    with torch.device("cpu"):
        assert asked() == [False, False, True, False, False, False]
    with Seen():
        assert asked() == [False, False, True, True, False, False]
    with torch.device("cpu"), Seen():
        assert asked() == [False, False, True, True, False, False]
    with torch.autograd.forward_ad.dual_level():
        assert asked() == [False, False, False, False, False, True]
    inside: list[Any] = []

    def mapped(x: torch.Tensor) -> torch.Tensor:
        inside.append((asked(), private.is_transformed(x), private.is_transformed(1)))
        return x

    torch.vmap(mapped)(torch.ones(2))
    assert inside == [([False, False, False, False, True, False], True, False)] and not private.is_transformed(torch.ones(1))
    assert asked() == plain


def test_empty_tensors_are_on_the_device_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made = private.empty_on_device_of(torch.zeros(1), (2, 3), torch.int32)
    assert made.shape == (2, 3) and made.dtype == torch.int32 and made.device.type == "cpu"
    assert private.empty_on_device_of(torch.zeros(1, device="meta"), (2,), torch.int32).device.type == "meta"
    calls: list[Any] = []
    monkeypatch.setattr(private, "empty_on_current_device", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(private, "current_cuda_device", lambda: 1)
    like: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 1, device="meta")
    for size in ((2, 3, 4), (5,), (), (3, 0, 2)):
        private.empty_on_device_of(like, size, torch.float16)
        assert calls[-1] == (size, torch.empty(size).stride(), torch.float16) and type(calls[-1][0]) is tuple
    like.get_device = lambda: 0
    assert private.empty_on_device_of(like, (2,), torch.float16).device.type == "meta" and len(calls) == 4


def test_guards_hold_for_tensors_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(2, 3), torch.zeros(4)
    guard = private.tensor_guard(x, y)
    assert guard(torch.ones(2, 3), torch.ones(4)) and not guard(torch.ones(3, 2), torch.ones(4)) and not guard(torch.ones(2, 3), y.double())
    assert private.tensors_can_be_guarded(x, x, y) and not private.tensors_can_be_guarded(x, None, y)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    for tensors in ((nested, x, x), (x, nested, x), (x, x, nested)):
        assert not private.tensors_can_be_guarded(*tensors)
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    assert not private.tensor_guard(x)(x)


def test_calls_of_autograd_functions_are_seen_with_the_grad_mode() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
            return x * times

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return grad, None

    apply: Callable[..., torch.Tensor] = Double.apply
    seen: list[Any] = []
    x = torch.ones(2)
    with private.intercepted_autograd_functions(lambda cls, args, enabled: seen.append((cls, args[-1], enabled))):
        apply(x, 2)
        with torch.no_grad():
            apply(x, 3)
        inner: list[Any] = []
        with private.intercepted_autograd_functions(lambda cls, args, enabled: inner.append(args[-1])):
            apply(x, 4)
        apply(x, 5)
    apply(x, 6)
    assert seen == [(Double, 2, True), (Double, 3, False), (Double, 5, True)] and inner == [4]
    assert "__getattribute__" not in vars(private.FunctionMeta)


class Owner:
    """Owners are held weakly."""


def test_values_are_dropped_by_last_use_once_half_are_in_use() -> None:
    cache: DerivedCache[Owner, int] = DerivedCache(4)
    owner, derived = Owner(), []

    def get(key: int) -> int:
        return cache.get(owner, key, lambda: derived.append(key) or 10 * key)  # type: ignore[func-returns-value]

    assert [get(1), get(1), cache.peek(owner, 1), cache.peek(owner, 2), cache.count(owner)] == [10, 10, 10, None, 1]
    assert cache.peek(Owner(), 1) is None and cache.count(Owner()) == 0
    assert (owner, 1) in cache and (owner, 2) not in cache and (Owner(), 1) not in cache
    get(2)
    get(1)  # of two values, half of the size: the order of use changes
    assert list(cache.values_of(owner)) == [2, 1]
    cache.peek(owner, 2)
    assert list(cache.values_of(owner)) == [1, 2]
    for key in (3, 4, 5):
        get(key)
    assert list(cache.values_of(owner)) == [2, 3, 4, 5] and derived == [1, 2, 3, 4, 5] and cache.count(owner) == 4
    large: DerivedCache[Owner, int] = DerivedCache(5)
    for key in (1, 2, 1):
        large.get(owner, key, lambda: 0)
    large.peek(owner, 1)
    assert list(large.values_of(owner)) == [1, 2]  # less than half
    large.get(owner, 3, lambda: 0)
    large.get(owner, 1, lambda: 0)
    assert list(large.values_of(owner)) == [2, 3, 1]


def test_values_are_derived_outside_of_modes_of_the_caller() -> None:
    cache: DerivedCache[Owner, torch.Tensor] = DerivedCache(2)
    with torch.inference_mode(), torch.device("meta"):
        made = cache.get(Owner(), 0, lambda: torch.zeros(1))
    assert made.device.type == "cpu" and not made.is_inference()
