"""The plans of one batch for all layers of a model: one without a window and one per window, over one layout."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from longspan._comm.mesh import MeshLike
from longspan._masks.algebra import Mask
from longspan._masks.constructors import sliding_window
from longspan._planner.plan import Plan
from longspan._planner.plan_set import PlanSet
from longspan._planner.planning import plan

FULL, SLIDING = "full", "sliding"


class ModelPlans(PlanSet):
    """Plans by name: "full", and "sliding" for layers with a window ("sliding 512" and so on for further windows).

    Shards and positions are common to all. A window that `prepare_batch` did not know is planned when a layer first asks for it, over the
    same layout, the same on every rank.

    documents_from_positions: whether documents were derived from position_ids. A model that would not do so on one process raises.
    position_rule: how tokens were numbered (`position_rule` of the config); None if the batch had position_ids.
    """

    documents_from_positions: bool = False
    position_rule: str | None = None

    def __init__(self, plans: dict[str, Plan], *, mask: Mask, windows: Mapping[int, str], options: Mapping[str, Any]) -> None:
        super().__init__(plans)
        self._mask, self._windows, self._options = mask, dict(windows), dict(options)
        self._lock = threading.Lock()

    def of(self, window: int | None, heads: int | None = None, kv_heads: int | None = None) -> Plan:
        """The plan for layers of this window, None for layers without one, and of these heads."""
        if window is not None and window not in self._windows:
            self._add(window)
        name = FULL if window is None else self._windows[window]
        made = self._plans[name]
        planned = (made.data.heads, made.data.kv_heads)
        if heads is None or None in planned or planned == (heads, kv_heads):
            return made
        # A few models have layers with other numbers of heads than their config says.
        other = f"{name}, {heads} heads, {kv_heads} KV heads"
        if other not in self._plans:
            with self._lock:
                self._plans[other] = self._over_same_layout(window, {"heads": heads, "kv_heads": kv_heads})
        return self._plans[other]

    def _add(self, window: int) -> None:
        with self._lock:
            if window not in self._windows:
                name = window_name(window, len(self._windows))
                self._plans[name] = self._over_same_layout(window, {})
                self._windows[window] = name

    def _over_same_layout(self, window: int | None, heads: Mapping[str, int | None]) -> Plan:
        full = self._plans[FULL]
        strategy = full.strategy if full.data.head_axis is not None else "auto"
        options = {**self._options, **heads, "layout": full.layout, "strategy": strategy}
        mask = self._mask if window is None else self._mask & sliding_window(window)
        return plan(mask, full.data.q_len, full.mesh, **options)

    def on(self, mesh: Any) -> ModelPlans:
        """The same plans as another rank's, or on another mesh of equal shape."""
        plans = {name: plan.on(mesh) for name, plan in self._plans.items()}
        made = ModelPlans(plans, mask=self._mask, windows=self._windows, options=self._options)
        made.documents_from_positions, made.position_rule = self.documents_from_positions, self.position_rule
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"documents_from_positions": self.documents_from_positions, "position_rule": self.position_rule}
        return _unpickle, (self._plans, self._mask, self._windows, self._options), state


def _unpickle(plans: dict[str, Plan], mask: Mask, windows: dict[int, str], options: dict[str, Any]) -> ModelPlans:
    return ModelPlans(plans, mask=mask, windows=windows, options=options)


def window_name(window: int, windows_before: int) -> str:
    """The name of a window's plan: "sliding" for the first, "sliding 512" for further ones."""
    return SLIDING if not windows_before else f"{SLIDING} {window}"


def model_plans(mask: Mask, seq_len: int, mesh: MeshLike, windows: list[int], options: Mapping[str, Any]) -> ModelPlans:
    """Plans for layers without a window and with each of these. `options`: for `longspan.plan`."""
    names = {window: window_name(window, i) for i, window in enumerate(windows)}
    masks = {FULL: mask, **{name: mask & sliding_window(window) for window, name in names.items()}}
    plans = plan(masks, seq_len, mesh, **options)
    later_options = {name: value for name, value in options.items() if name not in ("layout", "strategy", "stages")}
    return ModelPlans(dict(plans), mask=mask, windows=names, options=later_options)
