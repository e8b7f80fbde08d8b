"""Tighter bounds for conjunctions: `(a[i] == b[j]) & (a[i] >= 0)` implies `b[j] >= 0`.

Negative document ids often mark padding. Padding that is scattered over a sequence makes the value ranges of all tiles overlap, so no
tile could be proved empty from the equality alone. Here the ranges are restricted to the entries that the whole conjunction admits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan._masks.interval_rules import Call, Interval, Operand
from longspan._masks.interval_steps import IntervalStep, given_index
from longspan._masks.range_lookup import RangeTable

NOT = frozenset(("bitwise_not", "logical_not"))
COMPARE = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))

# A condition on one lookup: the lookup, a hashable label, and the condition as a function of the table's entries.
Condition = tuple[IntervalStep, Any, Callable[[Tensor], Tensor]]


def refine_conjunction(step: IntervalStep, tables: dict[Any, RangeTable]) -> IntervalStep:
    """A conjunction that is also false where the admitted entries of two lookups, compared by `==`, have disjoint ranges.

    `tables` caches the restricted range tables.
    """
    leaves: dict[Any, None] = {}
    refinements: frozenset[Any] = frozenset()
    for arg in step.args:
        conjuncts = arg.conjuncts if isinstance(arg, IntervalStep) and arg.conjuncts else (arg,)
        leaves.update(dict.fromkeys(c for c in conjuncts if isinstance(c, IntervalStep)))
        refinements |= arg.refinements if isinstance(arg, IntervalStep) else frozenset()
    step.conjuncts, step.refinements = tuple(leaves), refinements
    conditions = [condition for leaf in leaves if (condition := _condition_of(leaf)) is not None]
    for leaf in leaves:
        if leaf.call.name != "eq" or not all(isinstance(a, IntervalStep) and a.table is not None for a in leaf.args):
            continue
        sides: tuple[IntervalStep, IntervalStep] = leaf.args  # type: ignore[assignment]
        admitted = [_admitted_entries(side, other, conditions) for side, other in (sides, sides[::-1])]
        refinement = (leaf, *(labels for labels, _ in admitted))
        if not any(labels for labels, _ in admitted) or refinement in step.refinements:
            continue
        restricted = [_restrict(side, labels, keep, tables) for side, (labels, keep) in zip(sides, admitted, strict=True)]
        step = _and_overlap(step, restricted)
        step.refinements |= {refinement}
    return step


def _condition_of(leaf: IntervalStep) -> Condition | None:
    """The condition that a conjunct states about a single lookup; None if it states another fact."""
    name, args = leaf.call.name, leaf.args
    if leaf.table is not None and leaf.call.dtype == torch.bool:
        return leaf, "true", lambda values: values.bool()
    if name in NOT and isinstance(args[0], IntervalStep) and (inner := _condition_of(args[0])) is not None:
        lookup, label, holds = inner
        return lookup, ("not", label), lambda values: ~holds(values)
    if name not in COMPARE:
        return None
    lookups = [a for a in args if isinstance(a, IntervalStep)]
    if len(lookups) != 1 or lookups[0].table is None or lookups[0].call.name != "index":
        return None
    if any(isinstance(a, Interval) and not torch.equal(a.lo, a.hi) for a in args):
        return None  # an unknown value, bounded only by its dtype: it differs between elements
    constants = [a.lo if isinstance(a, Interval) else a for a in args]
    label = (leaf.call.target, *(id(a) if isinstance(a, Interval) else None if isinstance(a, IntervalStep) else a for a in args))
    return lookups[0], label, lambda values: leaf.call.target(*(values if isinstance(a, IntervalStep) else a for a in constants))


def _admitted_entries(side: IntervalStep, other: IntervalStep, conditions: list[Condition]) -> tuple[frozenset[Any], Tensor | None]:
    """Labels of the conditions that apply to a side of `side == other`, and the entries of its table that meet them, [n] bool.

    A condition applies if it is about a lookup at the same index, or about `other`, whose value equals that of `side`. Integers of
    two widths are compared in the wider dtype, because a scalar of the condition may overflow the narrower one. Other pairs of dtypes
    are skipped: entries that are equal after rounding may differ in the condition.
    """
    assert side.table is not None
    labels, keep = set(), None
    for lookup, label, holds in conditions:
        assert lookup.table is not None
        if lookup.args[0] is side.args[0] and lookup.table.size == side.table.size:
            values = lookup.table.values
            wide = values.dtype
        elif lookup is other and (common := _common_dtype(side.table.values.dtype, lookup.table.values.dtype)) is not None:
            values, wide = side.table.values, common
        else:
            continue
        if (label, id(values), wide) not in labels:
            labels.add((label, id(values), wide))
            admitted = holds(values.to(wide))
            keep = admitted if keep is None else keep & admitted
    return frozenset(labels), keep


def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The dtype that holds every value of two integer dtypes, or of two equal dtypes; None for other pairs."""
    if a == b:
        return a
    if any(dtype.is_floating_point or dtype == torch.bool for dtype in (a, b)):
        return None
    return torch.promote_types(a, b)


def _restrict(side: IntervalStep, labels: frozenset[Any], keep: Tensor | None, tables: dict[Any, RangeTable]) -> IntervalStep:
    """The lookup `side` with bounds over the entries in `keep` alone."""
    if keep is None or bool(keep.all()):
        return side
    assert side.table is not None
    key = ("restricted", id(side.table.values), labels)
    if key not in tables:
        tables[key] = RangeTable(side.table.values, keep)
    table = tables[key]
    # Not `Interpreter._add_step`: a range without an admitted entry has lo > hi, which the soundness checks would reject.
    index = side.args[0]
    rule = partial(query_table, table, False)
    domain_bounds = rule(side.call, (index.domain_bounds,))
    return IntervalStep(call=side.call, rule=rule, args=(index,), axes=side.axes, domain_bounds=domain_bounds, table=table)


def query_table(table: RangeTable, inside: bool, call: Call, args: Sequence[Operand]) -> Interval:
    """Rule of a lookup with one varying index; bind `table` and `inside` with `partial`."""
    index = args[0]
    assert isinstance(index, Interval)
    return table.query(index, inside)


def _and_overlap(step: IntervalStep, sides: Sequence[IntervalStep]) -> IntervalStep:
    """`step & (the ranges of both sides overlap)`."""
    call = Call(name="overlap", target=given_index, dtype=torch.bool)
    return IntervalStep(
        call=call,
        rule=_overlap,
        args=(step, *sides),
        axes=step.axes | sides[0].axes | sides[1].axes,
        domain_bounds=_overlap(call, [step.domain_bounds, *(s.domain_bounds for s in sides)]),
        conjuncts=step.conjuncts,
        refinements=step.refinements,
    )


def _overlap(call: Call, args: Sequence[Operand]) -> Interval:
    mask, a, b = args
    assert isinstance(mask, Interval) and isinstance(a, Interval) and isinstance(b, Interval)
    return Interval(mask.lo, mask.hi & (a.lo <= b.hi) & (b.lo <= a.hi))
