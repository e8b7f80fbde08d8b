"""A bounded cache of values derived from long-lived objects: plans, block tables and tilings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock, RLock
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from longspan._torch_modes import default_modes

Owner = TypeVar("Owner")
Value = TypeVar("Value")
_MISSING: Any = object()


class _Entries(Generic[Value]):
    """The values of one owner, least recently used first."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.values: OrderedDict[Hashable, Value] = OrderedDict()


class DerivedCache(Generic[Owner, Value]):
    """Values of one type derived from owners: at most `size` per owner, least recently used dropped first, all of them with the owner.

    The order of use is updated while at least half of `size` is in use. Owners are held weakly: a training run makes a new plan, or a new
    block table, every step. A value must therefore not refer to its owner. Thread-safe: while one thread derives a value, other threads
    that ask for a value of the same owner wait.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = Lock()
        self._owners: WeakKeyDictionary[Owner, _Entries[Value]] = WeakKeyDictionary()

    def get(self, owner: Owner, key: Hashable, derive: Callable[[], Value]) -> Value:
        """The value under `key`, derived at the first call."""
        entries = self._entries(owner)
        with entries.lock:
            known = entries.values.get(key, _MISSING)
            if known is not _MISSING:
                if 2 * len(entries.values) >= self._size:  # each use of a key of layouts and programs hashes it again
                    entries.values.move_to_end(key)
                return cast(Value, known)
            with default_modes():
                value = derive()
            entries.values[key] = value
            if len(entries.values) > self._size:
                entries.values.popitem(last=False)
            return value

    def peek(self, owner: Owner, key: Hashable) -> Value | None:
        """The value under `key`, or None if it was not derived."""
        entries = self._owners.get(owner)
        value = None if entries is None else entries.values.get(key)
        if entries is not None and value is not None and 2 * len(entries.values) >= self._size:
            try:
                entries.values.move_to_end(key)
            except KeyError:  # another thread dropped it meanwhile
                return None
        return value

    def values_of(self, owner: Owner) -> OrderedDict[Hashable, Value]:
        """The values of an owner, for lookups that do not change the order of use. They change as values are derived and dropped."""
        return self._entries(owner).values

    def __contains__(self, owner_and_key: tuple[Owner, Hashable]) -> bool:
        """Whether a value of an owner is cached: `(owner, key) in cache`."""
        owner, key = owner_and_key
        entries = self._owners.get(owner)
        return entries is not None and key in entries.values

    def count(self, owner: Owner) -> int:
        """Number of values of an owner."""
        entries = self._owners.get(owner)
        return 0 if entries is None else len(entries.values)

    def _entries(self, owner: Owner) -> _Entries[Value]:
        entries = self._owners.get(owner)
        if entries is None:
            with self._lock:
                entries = self._owners.setdefault(owner, _Entries())
        return entries
