"""A bounded cache of values derived from plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock, RLock
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from longspan._plan.plan_data import PlanData
from longspan._torch_modes import settled

Value = TypeVar("Value")


class _Entries(Generic[Value]):
    """The values of one plan, least recently used first."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.values: OrderedDict[Hashable, Value] = OrderedDict()


class DerivedCache(Generic[Value]):
    """Values of one type derived from plans: at most `size` per plan, least recently used dropped first, and all of them with the plan.

    Plans are held weakly: a training run makes a new plan every step. A value must therefore not refer to its plan. Safe for threads: while
    one thread derives a value, others that ask for a value of the same plan wait.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = Lock()
        self._plans: WeakKeyDictionary[PlanData, _Entries[Value]] = WeakKeyDictionary()

    def get(self, plan: PlanData, key: Hashable, derive: Callable[[], Value]) -> Value:
        """The value under `key`, derived at the first call."""
        entries = self._entries(plan)
        with entries.lock:
            if key in entries.values:
                entries.values.move_to_end(key)
                return entries.values[key]
            with settled():
                value = derive()
            entries.values[key] = value
            if len(entries.values) > self._size:
                entries.values.popitem(last=False)
            return value

    def __contains__(self, plan_and_key: tuple[PlanData, Hashable]) -> bool:
        """Whether a value of a plan is there: `(plan, key) in cache`."""
        plan, key = plan_and_key
        entries = self._plans.get(plan)
        return entries is not None and key in entries.values

    def count(self, plan: PlanData) -> int:
        """Number of values of a plan."""
        entries = self._plans.get(plan)
        return 0 if entries is None else len(entries.values)

    def _entries(self, plan: PlanData) -> _Entries[Value]:
        entries = self._plans.get(plan)
        if entries is None:
            with self._lock:
                entries = self._plans.setdefault(plan, _Entries())
        return entries
