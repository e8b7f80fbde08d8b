"""Gradients of 16-bit weights that several chunks share, summed in float32 and rounded once.

Autograd sums the gradients of a tensor's uses in the tensor's dtype. Here each chunk uses an alias of the weight, whose gradient it widens;
the sum over chunks runs in float32, and the weight gets one gradient. Its hooks run once, as without chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan._torch_private import forward_mode_is_active, is_transformed

_TRANSPOSES = ("T", "mT", "H", "mH")  # attributes of a tensor that autograd differentiates
_OF_LEAVES = ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")  # methods for the parameter itself


class _Sum(torch.autograd.Function):
    """A float32 stand-in of a weight, without memory of its own: its gradient is the sum of the aliases' gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_empty((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _Alias(torch.autograd.Function):
    """The weight, for one chunk."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # autograd widens it to the dtype of the stand-in


def aliases(weight: Tensor) -> Callable[[], Tensor]:
    """A function that returns `weight` for one chunk: an alias if sums of its gradients would be rounded to 16 bits, else the weight."""
    if not _is_rounded(weight):
        return lambda: weight
    total, data = _Sum.apply(weight), weight.detach()
    return lambda: _Alias.apply(total, data)


def _is_rounded(weight: Any) -> bool:
    """DTensors keep their own dtype of sums, and torch.compile its own order. Forward-mode differentiation sums no gradients."""
    return (
        type(weight) in (Tensor, torch.nn.Parameter)
        and weight.requires_grad
        and weight.is_floating_point()
        and weight.dtype.itemsize == 2
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not forward_mode_is_active()
        and not is_transformed(weight)
    )


class Aliases(Protocol):
    """What stands in for parameters while a chunk is computed."""

    def takes(self, parameter: torch.nn.Parameter) -> bool: ...

    def alias(self, parameter: torch.nn.Parameter) -> Tensor: ...


class WideSums:
    """Runs chunks of a function so that gradients of parameters that it gives to torch functions are summed in float32."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._fn = fn
        self._aliases: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}  # by id; holds the parameter, so that ids stay unique

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._fn(x)
        with Replaced(self):
            return self._fn(x)

    def takes(self, parameter: torch.nn.Parameter) -> bool:
        return _is_rounded(parameter)

    def alias(self, parameter: torch.nn.Parameter) -> Tensor:
        if id(parameter) not in self._aliases:
            self._aliases[id(parameter)] = parameter, aliases(parameter)
        return self._aliases[id(parameter)][1]()


class Replaced(TorchFunctionMode):
    """Torch functions get aliases of this chunk in place of the parameters that `sums` takes.

    What is no torch function gets the parameter, such as the `apply` of a custom `torch.autograd.Function`: autograd then sums its
    gradients in 16 bits. Setting a module's parameters to aliases would reach it, and would be seen by other threads.
    """

    def __init__(self, sums: Aliases) -> None:
        super().__init__()
        self._sums = sums
        self._of_chunk: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        descriptor, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__") and getattr(descriptor, "__name__", "") not in _TRANSPOSES
        if is_attribute or name in _OF_LEAVES:
            return func(*args, **kwargs)
        return func(*map(self._replaced, args), **{key: self._replaced(a) for key, a in kwargs.items()})

    def _replaced(self, argument: Any) -> Any:
        if isinstance(argument, torch.nn.Parameter) and self._sums.takes(argument):
            if id(argument) not in self._of_chunk:
                self._of_chunk[id(argument)] = self._sums.alias(argument)
            return self._of_chunk[id(argument)]
        if type(argument) in (list, tuple):
            return type(argument)(map(self._replaced, argument))
        return argument
