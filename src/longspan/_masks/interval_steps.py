"""One operation of a program over intervals, and the index axes that it depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan._masks.interval_rules import Call, Interval, Rule
from longspan._masks.range_lookup import RangeTable

Q, KV, FIXED = 1, 2, 4  # bits of the indices that a step depends on; FIXED: batch or head, over a range of values


@dataclass(eq=False, kw_only=True)
class IntervalStep:
    """An operation to run on intervals.

    `args` are steps, constant intervals and Python scalars. `axes` are bits of Q, KV and FIXED. `domain_bounds` [5] are the bounds over
    the whole domain, then at its four corners. `table` is set for a lookup with one varying index. `conjuncts` and `refinements` are set
    for a conjunction (see `longspan._masks.conjunctions`).
    """

    call: Call
    rule: Rule
    args: tuple[Any, ...]
    axes: int
    domain_bounds: Interval
    table: RangeTable | None = None
    conjuncts: tuple[Any, ...] = ()
    refinements: frozenset[Any] = frozenset()


def given_index(*args: Any) -> Any:
    """Rule and target of a step whose interval is an input of the evaluation."""
    raise AssertionError("an index is an input; expected its interval to be passed in, not computed")
