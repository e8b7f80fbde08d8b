"""Interception of torch's attention functions, however they were imported.

While a context is active in any thread, two of torch's functions run other code:

- `F.scaled_dot_product_attention` is a builtin. Torch function modes see every call of it. A mode belongs to one thread.
- `flex_attention` and `checkpoint` are Python functions that no mode sees, and a patched module attribute would miss references imported
  before. So the *code object* of the two functions is replaced by one that asks the calling thread's modes first and otherwise runs the
  original. The original code returns with the end of the last mode. A thread without a mode always gets torch's own function.
- `F.multi_head_attention_forward` is overridable, so a mode sees this function but not the SDPA call inside. The mode runs its body with
  the name `scaled_dot_product_attention` bound to the mode's own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

SDPA = F.scaled_dot_product_attention
CHECKPOINT = torch.utils.checkpoint.checkpoint
MHA = F.multi_head_attention_forward
REASON = "longspan plans and communicates here; use longspan.attention(q, k, v, plan=…) to compile a whole model into one graph"

_probe = torch.empty(0)  # torch tells whether a mode is active only for some argument


def _flex_code(*args: Any, **kwargs: Any) -> Any:
    from longspan._dropin.intercept import hidden

    return hidden["flex"](args, kwargs)


def _checkpoint_code(*args: Any, **kwargs: Any) -> Any:
    from longspan._dropin.intercept import dispatch_checkpoint

    return dispatch_checkpoint(args, kwargs)


def _copy(fn: Any, namespace: dict[str, Any] | None = None) -> Any:
    """A function with the same code as fn, and fn's globals or another namespace."""
    made = types.FunctionType(fn.__code__, fn.__globals__ if namespace is None else namespace, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


_undecorated_checkpoint: Any = inspect.unwrap(CHECKPOINT)  # torch wraps it to keep Dynamo out
_original_flex, _original_checkpoint = _copy(flex_attention), _copy(_undecorated_checkpoint)
_swaps: list[tuple[Any, types.CodeType, types.CodeType]] = [  # function, its code, the code that asks modes
    (flex_attention, flex_attention.__code__, _flex_code.__code__),
    (_undecorated_checkpoint, _undecorated_checkpoint.__code__, _checkpoint_code.__code__),
]


def _dispatch_flex(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if has_torch_function((_probe,)):
        return handle_torch_function(flex_attention, (_probe,), *args, **kwargs)
    return _original_flex(*args, **kwargs)


# Functions that Dynamo must not trace. Filled when the first mode is entered: importing the compiler takes seconds.
hidden: dict[str, Callable[..., Any]] = {}


def hide_from_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, at which compiled code breaks its graph."""
    disabled: Callable[..., Any] = torch.compiler.disable(fn, reason=REASON)  # type: ignore[attr-defined]
    return disabled


def dispatch_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`checkpoint`, asking the calling thread's modes first."""
    if has_torch_function((_probe,)):
        return handle_torch_function(CHECKPOINT, (_probe,), *args, **kwargs)
    return _original_checkpoint(*args, **kwargs)


class _CodeSwap:
    """The replaced code of torch's functions, in place while at least one mode of this process is active."""

    def __init__(self) -> None:
        self._active_modes, self._lock = 0, Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, n: int) -> None:
        with self._lock:
            if not hidden:
                hidden["flex"] = hide_from_dynamo(_dispatch_flex)
            self._active_modes += n
            for fn, original, asking in _swaps:
                fn.__code__ = asking if self._active_modes else original


_code_swap = _CodeSwap()


class AttentionMode(TorchFunctionMode):
    """A torch function mode that replaces the attention calls of one thread.

    sdpa, flex: called with the arguments of torch's functions.
    rerun:      wraps a function given to `checkpoint`, which calls it now and again when it recomputes.
    other:      called as other(fn, args, kwargs) for every other torch function.
    """

    def __init__(
        self,
        *,
        sdpa: Callable[..., Any] = SDPA,
        flex: Callable[..., Any] = flex_attention,
        rerun: Callable[[Any], Any] | None = None,
        other: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.sdpa, self.flex, self.rerun, self.other = sdpa, flex, rerun, other

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return self.sdpa(*args, **kwargs)
        if func is flex_attention:
            return self.flex(*args, **kwargs)
        if func is CHECKPOINT and self.rerun is not None:
            return CHECKPOINT(self.rerun(args[0]), *args[1:], **kwargs)
        if func is MHA:
            return _multi_head_attention(self.sdpa, args, kwargs)
        if self.other is None or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        return self.other(func, args, kwargs)


@contextmanager
def intercepting(mode: AttentionMode) -> Iterator[None]:
    """A context in which the mode is active in this thread."""
    with _code_swap(), mode:
        yield


def _multi_head_attention(sdpa: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.multi_head_attention_forward` with another SDPA inside."""
    bound = inspect.signature(MHA).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["need_weights"]:
        raise ValueError(
            "multi_head_attention: expected need_weights=False, got True: no rank holds the attention weights of the whole sequence; "
            "call the module with need_weights=False"
        )
    namespace = {**MHA.__globals__, "scaled_dot_product_attention": sdpa, "has_torch_function": lambda tensors: False}
    return _copy(MHA, namespace)(*args, **kwargs)
