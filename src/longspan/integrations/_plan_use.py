"""Check that a model's forward used the plan that it was given.

A layer that runs attention without the plan attends to this rank's shard alone: the loss is wrong and nothing else shows it. Three causes
are known: the model runs another attention implementation, its layers do not pass keyword arguments on, or it has no attention layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from longspan.integrations._configs import check_implementation

PLAN = "longspan_plan"


class PlanUse:
    """Attention modules that used the plan of one forward."""

    def __init__(self) -> None:
        self.modules: set[int] = set()


# The forward that this thread is in: None outside of a model, and inside of a model that was not given a plan.
_forward: ContextVar[PlanUse | None] = ContextVar("longspan_forward", default=None)


def used_by(module: nn.Module) -> None:
    """Record that an attention module used the plan of the forward that this thread is in."""
    use = _forward.get()
    if use is not None:
        use.modules.add(id(module))


def check_no_plan_was_dropped(module: nn.Module) -> None:
    """Raise ValueError if an attention module got no plan inside a forward that was given one."""
    if _forward.get() is not None:
        raise ValueError(
            f"longspan: the model was given {PLAN}, but {_described(module)} was called without it: a layer around it does not pass its "
            "keyword arguments on. This model is not supported on several ranks; call it without a plan on one device"
        )


def checked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `__call__` that raises ValueError if the model was given a plan and an attention layer did not use it."""

    @functools.wraps(call)
    def checked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        planned = kwargs.get(PLAN) is not None
        if planned:
            check_implementation(self.config)
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)  # a compiled layer without a plan raises while it is traced
        if planned and _forward.get() is not None:
            return call(self, *args, **kwargs)  # a model inside of the model, which is checked as a whole
        use = PlanUse() if planned else None
        token = _forward.set(use)
        try:
            output = call(self, *args, **kwargs)
        finally:
            _forward.reset(token)
        if use is not None:
            _check_all_used(self, use)
        return output

    return checked_call


def _check_all_used(model: nn.Module, use: PlanUse) -> None:
    unused = [name for name, module in _attention_modules(model) if id(module) not in use.modules]
    if unused or not (use.modules or _any_compiled(model)):
        which = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        raise ValueError(
            f"longspan: {type(model).__name__} was given {PLAN}, but {which or 'no attention layer of it'} "
            f"{'did not use it' if unused else 'used it'}: tokens were mixed within this rank's shard alone, and the loss is wrong. "
            "This model is not supported on several ranks; call it without a plan on one device"
        )


def _attention_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of causal self-attention layers, by transformers' conventions. Compiled parts are left out: they run no Python."""
    if _is_compiled(model):
        return
    if "Attention" in type(model).__name__ and getattr(model, "layer_idx", None) is not None and getattr(model, "is_causal", True):
        yield name, model
    for child_name, child in model.named_children():
        yield from _attention_modules(child, f"{name}.{child_name}" if name else child_name)


def _is_compiled(module: nn.Module) -> bool:
    wrapped = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return wrapped or hasattr(module.forward, "_torchdynamo_orig_callable")


def _any_compiled(model: nn.Module) -> bool:
    return any(_is_compiled(module) for module in model.modules())


def _described(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")
