"""Checks of the cache's arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def integer(value: Any, what: str, *, least: int) -> int:
    """The value as an int of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: expected an integer, got {type(value).__name__}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{what}: expected an integer >= {least}, got {value}")
    return number


def integers(values: Any, what: str, *, least: int = 0) -> list[int]:
    """The values as ints: one integer, an iterable of integers or a CPU tensor."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise TypeError(f"{what}: expected integers on the host, got a tensor on {values.device}; reading it would synchronise")
        values = values.tolist()
    if not isinstance(values, Iterable):
        values = [values]
    return [integer(v, what, least=least) for v in values]


def is_several(values: Any) -> bool:
    """Whether a value is an iterable of integers, not one integer."""
    return isinstance(values, Iterable) and not (isinstance(values, Tensor) and values.ndim == 0)


def one_each(values: Any, count: int, what: str, *, least: int = 0) -> list[int]:
    """`count` ints: one integer for all, or one for each."""
    several = is_several(values)
    numbers = integers(values, what, least=least)
    if not several:
        return numbers * count
    if len(numbers) != count:
        raise ValueError(f"{what}: expected one integer, or one for each of the {count} sequences, got {len(numbers)}")
    return numbers
