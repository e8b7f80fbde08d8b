"""Check that a model's forward used the plan that it was given.

An attention layer without the plan attends to this rank's shard only: the loss is wrong, and nothing else shows it. Known causes: the
model runs another attention implementation, a layer does not pass keyword arguments on, or a layer mixes tokens without attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from longspan.integrations._configs import check_implementation

PLAN_KEYWORD = "longspan_plan"


class PlanUse:
    """The attention modules that used the plan of one forward, by id."""

    def __init__(self) -> None:
        self.module_ids: set[int] = set()


# The forward that this thread is in; None outside of a model, and inside of a model that was not given a plan.
_current_forward: ContextVar[PlanUse | None] = ContextVar("longspan_forward", default=None)


def record_use(module: nn.Module) -> None:
    """Record that an attention module used the plan of the current forward. Compiled code records nothing."""
    if torch.compiler.is_compiling():
        return
    use = _current_forward.get()
    if use is not None:
        use.module_ids.add(id(module))


def check_no_plan_was_dropped(module: nn.Module) -> None:
    """Raise ValueError if an attention module got no plan although the current forward was given one."""
    if not torch.compiler.is_compiling() and _current_forward.get() is not None:
        raise ValueError(
            f"longspan: the model was given {PLAN_KEYWORD}, but {_described(module)} was called without it: a layer around it does not "
            "pass its keyword arguments on. This model is not supported on several ranks; call it without a plan on one device"
        )


def checked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `__call__` that raises ValueError if the model was given a plan and an attention layer did not use it."""

    @functools.wraps(call)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        planned = kwargs.get(PLAN_KEYWORD) is not None
        if planned:
            check_implementation(self.config)
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)  # a layer without a plan raises while it is traced
        if planned and _current_forward.get() is not None:
            return call(self, *args, **kwargs)  # an inner model: the outer one is checked as a whole
        use = PlanUse() if planned else None
        token = _current_forward.set(use)
        try:
            output = call(self, *args, **kwargs)
        finally:
            _current_forward.reset(token)
        if use is not None:
            _check_all_used(self, use)
        return output

    return checked


def _check_all_used(model: nn.Module, use: PlanUse) -> None:
    unused = [name for name, module in _attention_modules(model) if id(module) not in use.module_ids]
    if not unused and (use.module_ids or _any_compiled(model)):
        return
    names = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
    who = f"{names} did not use it" if unused else "no attention layer used it"
    raise ValueError(
        f"longspan: {type(model).__name__} was given {PLAN_KEYWORD}, but {who}: tokens were mixed within this rank's shard only, and the "
        "loss is wrong. This model is not supported on several ranks; call it without a plan on one device"
    )


def _attention_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the causal self-attention layers, by transformers' conventions. Skips compiled modules, which run no Python."""
    if _is_compiled(module):
        return
    if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) is not None and getattr(module, "is_causal", True):
        yield name, module
    for child_name, child in module.named_children():
        yield from _attention_modules(child, f"{name}.{child_name}" if name else child_name)


def _is_compiled(module: nn.Module) -> bool:
    by_module = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return by_module or hasattr(module.forward, "_torchdynamo_orig_callable")


def _any_compiled(model: nn.Module) -> bool:
    return any(_is_compiled(module) for module in model.modules())


def _described(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")
