"""Calls of torch's attention, caught wherever their functions were imported.

`F.scaled_dot_product_attention` is a builtin that torch function modes see, whoever holds a reference to it. Modes belong to a thread and
nest; nothing else decides what a call does.

`flex_attention` and `checkpoint` are plain Python functions that no mode is asked about. Patching a module's attribute would miss every
reference that was imported before. So, while a mode of ours is active in any thread, the *code* of those two function objects is one
that asks the calling thread's modes first, as torch's own overridable functions do, and otherwise runs the original. The code is put
back when the last mode is left. Which code is in place decides no result: a thread without a mode gets torch's own function.

`F.multi_head_attention_forward` is overridable, so that a mode sees it instead of the SDPA inside of it: its body is run with that one
name bound to ours.
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
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

SDPA = F.scaled_dot_product_attention
CHECKPOINT = torch.utils.checkpoint.checkpoint
MHA = F.multi_head_attention_forward
REASON = "longspan plans and communicates here; use longspan.attention(q, k, v, plan=…) to compile a whole model into one graph"

_probe = torch.empty(0)  # a plain tensor: whether a mode is active can be asked only about an argument


def _flex_code(*args: Any, **kwargs: Any) -> Any:
    from longspan._dropin.intercept import uncompiled

    return uncompiled["flex"](args, kwargs)


def _checkpoint_code(*args: Any, **kwargs: Any) -> Any:
    from longspan._dropin.intercept import ask_for_checkpoint

    return ask_for_checkpoint(args, kwargs)


def _copy(fn: Any) -> Any:
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


_undecorated_checkpoint: Any = inspect.unwrap(CHECKPOINT)  # torch wraps it to keep Dynamo out
_plain_flex, _plain_checkpoint = _copy(flex_attention), _copy(_undecorated_checkpoint)
_codes: list[tuple[Any, types.CodeType, types.CodeType]] = [
    (flex_attention, flex_attention.__code__, _flex_code.__code__),
    (_undecorated_checkpoint, _undecorated_checkpoint.__code__, _checkpoint_code.__code__),
]


def _ask_for_flex(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if has_torch_function((_probe,)):
        return handle_torch_function(flex_attention, (_probe,), *args, **kwargs)
    return _plain_flex(*args, **kwargs)


# Dynamo is not to look into these. Filled when the first mode is entered: importing the compiler takes seconds.
uncompiled: dict[str, Callable[..., Any]] = {}


def out_of_compilers_sight(fn: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compiler.disable(fn, reason=REASON)  # type: ignore[attr-defined]
    return found


def ask_for_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if has_torch_function((_probe,)):
        return handle_torch_function(CHECKPOINT, (_probe,), *args, **kwargs)
    return _plain_checkpoint(*args, **kwargs)


class _InPlace:
    """How many modes of this process need torch's functions to ask."""

    def __init__(self) -> None:
        self.count, self.lock = 0, Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, n: int) -> None:
        with self.lock:
            if not uncompiled:
                uncompiled["flex"] = out_of_compilers_sight(_ask_for_flex)
            self.count += n
            for fn, plain, asking in _codes:
                fn.__code__ = asking if self.count else plain


_asking = _InPlace()


class AttentionMode(TorchFunctionMode):
    """Sends a thread's attention calls elsewhere.

    `sdpa` and `flex` take the arguments of torch's functions. `again(fn)`: fn as checkpoint is to call it, now and when it recomputes.
    `other(fn, args, kwargs)`: every call that is no attention.
    """

    def __init__(
        self,
        *,
        sdpa: Callable[..., Any] = SDPA,
        flex: Callable[..., Any] = flex_attention,
        again: Callable[[Any], Any] | None = None,
        other: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.sdpa, self.flex, self.again, self.other = sdpa, flex, again, other

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return self.sdpa(*args, **kwargs)
        if func is flex_attention:
            return self.flex(*args, **kwargs)
        if func is CHECKPOINT and self.again is not None:
            return CHECKPOINT(self.again(args[0]), *args[1:], **kwargs)
        if func is MHA:
            return _multi_head(self.sdpa, args, kwargs)
        if self.other is None or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        return self.other(func, args, kwargs)


@contextmanager
def intercepting(mode: AttentionMode) -> Iterator[None]:
    """The mode, active in this thread."""
    with _asking(), mode:
        yield


def _multi_head(sdpa: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(MHA).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["need_weights"]:
        raise ValueError(
            "multi_head_attention: with need_weights=True torch computes the whole matrix of weights, which no rank holds; "
            "call the module with need_weights=False"
        )
    body: Any = _copy(MHA)
    names = {**MHA.__globals__, "scaled_dot_product_attention": sdpa, "has_torch_function": lambda tensors: False}
    made = types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)
    made.__kwdefaults__ = body.__kwdefaults__
    return made(*args, **kwargs)


def is_plain(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter)
