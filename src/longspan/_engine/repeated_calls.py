"""Repeated calls with a plan: their checked options, looked up by a guard over q, k and v.

Options of calls with a mask, score_mod, sink or max scores depend on more than layouts and are not cached. The checks of a call over a mesh
(`longspan._engine.call_agreement`) and the agreement of all ranks are not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.values import CallOptions
from longspan._kernels.registry import torch_settings
from longspan._plan.plan_data import PlanData
from longspan._torch_private import nothing_intercepts_calls, tensor_guard, tensors_can_be_guarded

_LAYOUTS = 4  # of q, k and v, per plan, scale, kernel and use of lse


class _Repeated(NamedTuple):
    """A call that was made. Holds no tensor."""

    guard: Callable[..., bool]
    settings: Hashable
    options: CallOptions


class RepeatedCalls:
    """Options of calls with a plan: the latest layouts of each kind of call, at most 16 kinds per plan."""

    def __init__(self) -> None:
        self._by_plan: DerivedCache[PlanData, list[_Repeated]] = DerivedCache(16)

    def options(self, plan: PlanData, q: Any, k: Any, v: Any, options: Any) -> CallOptions | None:
        """The options of an earlier call like this one, whose arguments are not checked yet; None if there was none.

        options: `AttendOptions`.
        """
        kind = _kind(options)
        known = None if kind is None else self._by_plan.peek(plan, kind)
        if known is None or not tensors_can_be_guarded(q, k, v):
            return None
        for repeated in known:
            if repeated.guard(q, k, v) and repeated.settings == torch_settings():
                return repeated.options if nothing_intercepts_calls() and not is_invariant() else None
        return None

    def add(self, plan: PlanData, q: Tensor, k: Tensor, v: Tensor, options: Any, checked: CallOptions) -> None:
        """Note a call whose arguments were checked. Not one that something intercepts, nor one in `longspan.invariant()`."""
        kind = _kind(options)
        if kind is None or is_invariant() or not nothing_intercepts_calls() or q is k or q is v or k is v:  # a guard needs distinct objects
            return
        known = self._by_plan.get(plan, kind, list)
        known.insert(0, _Repeated(tensor_guard(q, k, v), torch_settings(), checked))
        del known[_LAYOUTS:]


def _kind(options: Any) -> Hashable:
    """The arguments besides tensors, by which repeated calls are looked up; None for calls that are not."""
    mask, score_mod, scale, sink, kernel, max_scores, _, return_lse = options
    if mask is not None or score_mod is not None or sink is not None or max_scores:
        return None
    if (scale is not None and (type(scale) is not float or not scale)) or type(kernel) is not str:
        return None
    return scale, kernel, bool(return_lse)


repeated_calls = RepeatedCalls()
