"""Autograd inside a mod: `torch.no_grad()` is honoured, other ways to change a gradient raise.

A trace records operations on tensors without autograd; the gradient of a `score_mod` is derived from them. A custom
`torch.autograd.Function` would lose its backward, a hook would not run, and `x.data = y` would leave no trace at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.overrides import TorchFunctionMode

from longspan._torch_private import detach_is_recorded, intercepted_autograd_functions, tree_leaves

_aten: Any = torch.ops.aten
_DATA_SETTERS = frozenset({Tensor.data.__set__})  # type: ignore[attr-defined]
# The replacement that the error names, by function, for a mod whose gradient is needed.
_INSTEAD = {
    Tensor.detach_: "x = x.detach()",
    torch.detach_: "x = x.detach()",
    _aten.detach_.default: "x = x.detach()",
    Tensor.requires_grad_: "x.detach(), or set requires_grad before the attention call",
    Tensor.requires_grad.__set__: "x.detach(), or set requires_grad before the attention call",  # type: ignore[attr-defined]
    Tensor.register_hook: "operations that torch differentiates",
    Tensor.retain_grad: "a captured tensor, which gets a gradient",
}
# Properties that would be wrong for values of a trace, because autograd does not record them.
_STATE = {
    Tensor.requires_grad.__get__: "requires_grad",  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: "grad_fn",  # type: ignore[union-attr]
    Tensor.is_leaf.__get__: "is_leaf",  # type: ignore[attr-defined]
}


# torch's autograd Functions that a trace may ignore: all of custom operators, and the one that saves the inputs of a checkpoint.
_IGNORED_MODULE, _IGNORED_FUNCTION = "torch._library.autograd", ("torch.utils.checkpoint", "_NoopSaveInputs")


class AutogradError(Exception):
    """Raised inside a mod that changes a gradient in a way that a trace cannot follow."""


class AutogradInMod(TorchFunctionMode):
    """The torch function mode in which a mod is traced. `differentiable`: the mod is a score_mod and autograd is on for the call.

    `error`: the first error that was raised. It is raised again at the end, because a mod may catch it and compute something else.
    """

    def __init__(self, *, differentiable: bool) -> None:
        super().__init__()
        self.differentiable = differentiable
        self.error: AutogradError | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context in which the mod runs. Raises the first error at the end if the mod caught it."""
        with intercepted_autograd_functions(self._custom_function), self:
            yield
        if self.error is not None:
            raise self.error

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DATA_SETTERS:
            self._reject("it assigns to x.data; write x = y.detach()")
        if not self.differentiable:
            return func(*args, **(kwargs or {}))
        if func in _INSTEAD:
            self._reject(f"it calls {_name(func)}, which changes the gradient without an operation; use {_INSTEAD[func]}")
        if func in _STATE and _is_traced_float(args[0]) and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            self._reject(f"it reads {_STATE[func]} of a value of the mod, which is unknown during the trace; do not depend on it")
        result = func(*args, **(kwargs or {}))
        return result if torch.is_grad_enabled() else _without_gradient(result, (args, kwargs))

    def _custom_function(self, cls: type, args: tuple[Any, ...], grad_is_enabled: bool) -> None:
        """Reject a custom Function that could propagate a gradient."""
        if cls.__module__ == _IGNORED_MODULE or (cls.__module__, cls.__name__) == _IGNORED_FUNCTION:
            return
        floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(args))
        if self.differentiable and floats and grad_is_enabled:
            self._reject(
                f"it calls the torch.autograd.Function {cls.__qualname__!r}, whose backward cannot be traced. Write the gradient with "
                "operations that torch differentiates (straight-through: x + (f(x) - x).detach()), register a torch.library.custom_op "
                "with register_autograd, or call it in torch.no_grad()"
            )

    def _reject(self, reason: str) -> None:
        error = AutogradError(reason)
        self.error = self.error or error
        raise error


def check_detach(graph: Graph) -> None:
    """Raise AutogradError for a graph of `make_fx` in which `detach`, explicit or by `torch.no_grad()`, cannot be told from a view."""
    if any(node.target is _aten.alias.default for node in graph.nodes) and not detach_is_recorded():
        raise AutogradError(
            f"torch {torch.__version__} does not record detach, torch.no_grad() and x[...] in this kind of score_mod; "
            "detach captured tensors before the call, or use torch 2.11 to 2.13"
        )


def _is_traced_float(tensor: Tensor) -> bool:
    """Whether a tensor is a floating-point value of the trace, not a captured tensor, whose autograd state is real."""
    return type(tensor) not in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return "the setter of x.requires_grad" if name == "__set__" else f"x.{name.split('.')[0]}()"


def _without_gradient(result: Any, inputs: Any) -> Any:
    """The result of a function in `torch.no_grad()`: detached, but an input that is returned as it is keeps its gradient."""
    if isinstance(result, tuple | list):
        return type(result)(_without_gradient(r, inputs) for r in result) if any(isinstance(r, Tensor) for r in result) else result
    if not isinstance(result, Tensor) or not result.is_floating_point() or any(result is x for x in tree_leaves(inputs)):
        return result
    return result.detach()
