"""Interval evaluation of programs: bounds of a traced mod over squares of (query, key) indices.

Values that depend only on captured tensors and fixed indices are computed once, values that depend only on the query (or only on the
key) once per row (or column) of squares, all other values once per square. Constant and unknown values cost nothing per square.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from longspan._masks.conjunctions import query_table, refine_conjunction
from longspan._masks.interval_rules import RULES, Call, Interval, Rule, carrier, dtype_range, is_sound, may_compute, truth
from longspan._masks.interval_steps import FIXED, KV, IntervalStep, Q, given_index
from longspan._masks.program import Program, op_name
from longspan._masks.program import call as run_call
from longspan._masks.range_lookup import RangeTable, lookup_points

OPAQUE = object()  # an unknown value: not a scalar, or a float that may be NaN
CREATIONS = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
CONVERSION_KWARGS = frozenset(("dtype", "device", "layout", "pin_memory", "non_blocking", "memory_format"))
AND = frozenset(("bitwise_and", "logical_and", "__and__"))


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Facts about a program that hold for every index of its domain.

    `int32`: every integer fits 32 bits, including the table entries that lookups return. `lookups`: for each `index` node, whether all
    its indices are proved to lie in 0 … size − 1.
    """

    int32: bool
    lookups: dict[Node, bool] = field(default_factory=dict)


def bounds(program: Program, captured: Sequence[Tensor], q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> Bounds:
    """Bounds of a program over the whole domain batch × heads × q_len × kv_len. False means "not proved", never "disproved"."""
    domain = Interpreter(program, captured, b=(0, batch - 1), h=(0, heads - 1), q=(0, q_len - 1), kv=(0, kv_len - 1), strict=False)
    return Bounds(int32=domain.fits_int32, lookups=domain.lookups_inside)


class Interpreter:
    """A program bound to captured tensors (on the CPU) and to inclusive ranges of indices; lo = hi fixes an index.

    `strict`: raise ValueError if a lookup is certainly outside its table at a corner of the ranges of q and kv, at the first b and h.
    """

    def __init__(
        self,
        program: Program,
        captured: Sequence[Tensor],
        *,
        b: tuple[int, int],
        h: tuple[int, int],
        q: tuple[int, int],
        kv: tuple[int, int],
        strict: bool = True,
    ) -> None:
        self.program, self.strict, self.fits_int32 = program, strict, True
        self.lookups_inside: dict[Node, bool] = {}
        self._cache: dict[Any, Any] = {}
        self._tables: dict[Any, RangeTable] = {}
        self._alive: list[Tensor] = []  # cache keys hold ids of these tensors, which must not be reused
        env: dict[Node, Any] = dict(zip(program.captured_nodes, captured, strict=True))
        env.update({n: OPAQUE for n in program.placeholders if n not in env})
        # Which end of its range an index takes at each of the four corners of the (q, kv) domain.
        corners = {Q: (0, 1, 0, 1), KV: (0, 0, 1, 1), FIXED: (0, 0, 0, 0)}
        for node, (lo, hi), axis in zip(program.index_nodes, (b, h, q, kv), (FIXED, FIXED, Q, KV), strict=True):
            points = torch.tensor([(lo, hi)[end] for end in corners[axis]])
            domain_bounds = Interval(torch.cat([torch.tensor([lo]), points]), torch.cat([torch.tensor([hi]), points]))
            if axis == FIXED and lo == hi:
                env[node] = torch.tensor(lo)
            else:
                call = Call(name=node.name, target=given_index, dtype=torch.int64)
                env[node] = IntervalStep(call=call, rule=given_index, args=(), axes=axis, domain_bounds=domain_bounds)
            self._track_int32(torch.int64, domain_bounds)
        for node in program.graph.nodes:
            if node.op == "get_attr":
                env[node] = node.meta["constant"]
            elif node.op == "call_function":
                env[node] = self._evaluate_node(node, env)
        result = program.result
        self.result = self._operand(env[result] if isinstance(result, Node) else torch.as_tensor(result))
        self._order_steps()

    # -------------------------------------------------------------------------------------------- over the whole domain

    def _evaluate_node(self, node: Node, env: dict[Node, Any]) -> Any:
        """The value of a node over the whole domain: a concrete tensor, a constant interval, an IntervalStep, or OPAQUE."""
        inputs = [env[a] for a in node.all_input_nodes]
        if op_name(node) in CREATIONS and not node.all_input_nodes[0].meta["val"].ndim:  # of a scalar, only the dtype counts
            inputs = [torch.zeros((), dtype=a.meta["val"].dtype) for a in node.all_input_nodes]
            env = {**env, **dict(zip(node.all_input_nodes, inputs, strict=True))}
        if all(isinstance(v, Tensor) for v in inputs):
            return self._fold_constant(node, env)
        val = node.meta["val"]
        if not isinstance(val, Tensor) or val.ndim:
            return OPAQUE
        if op_name(node) == "index":
            return self._lookup(node, env)
        args: Any = torch.fx.map_arg(node.args, lambda n: self._operand(env[n]))
        name, kwargs = op_name(node), dict(node.kwargs)
        if name == "clamp":
            args = (args[0], *(kwargs.pop(k, a) for k, a in zip(("min", "max"), (*args[1:], None, None), strict=False)))
        if name == "_to_copy":
            kwargs = {k: v for k, v in kwargs.items() if k not in CONVERSION_KWARGS}
        call = Call(name=name, target=node.target, dtype=val.dtype, kwargs=kwargs)  # type: ignore[arg-type]
        has_rule = name in RULES and kwargs.keys() <= {"rounding_mode"} and not any(a is OPAQUE for a in args) and _scalars_fit(node)
        return self._add_step(call, RULES[name] if has_rule else None, tuple(args))

    def _fold_constant(self, node: Node, env: dict[Node, Any]) -> Any:
        """The value of a node with concrete inputs; equal calls are computed once."""
        args: Any = torch.fx.map_arg(node.args, env.__getitem__)
        kwargs: Any = torch.fx.map_arg(node.kwargs, env.__getitem__)
        key = ("fold", node.target, _key(args), _key(kwargs))
        if key not in self._cache:
            try:
                value = run_call(node.target, args, dict(kwargs), torch.device("cpu"))  # type: ignore[arg-type]
            except IndexError as error:
                raise ValueError(
                    f"mask {self.program.name!r} looks outside a captured tensor: {error}; capture a tensor made for this call's sizes"
                ) from error
            if isinstance(value, Tensor):
                self._alive.append(value)
                if value.ndim == 0:
                    self._track_int32(value.dtype, self._operand(value))
            self._cache[key] = value
        if op_name(node) == "index":
            indices = [torch.as_tensor(i) for i in args[1] if i is not None]
            self.lookups_inside[node] = all(bool((i >= 0).all()) for i in indices)
        return self._cache[key]

    def _operand(self, value: Any) -> Any:
        """A concrete scalar as a one-point interval, OPAQUE for other tensors and NaN; any other value unchanged."""
        if not isinstance(value, Tensor):
            return value
        if value.ndim or value.isnan():
            return OPAQUE
        key = ("point", id(value))
        if key not in self._cache:
            self._alive.append(value)
            point = value.detach().reshape(1).to(carrier(value.dtype))
            self._cache[key] = Interval(point, point)
        return self._cache[key]

    def _add_step(
        self, call: Call, rule: Rule | None, args: tuple[Any, ...], *, source: Any = None, table: RangeTable | None = None
    ) -> Any:
        """An IntervalStep for the call; a constant interval or OPAQUE if its bounds are the same everywhere.

        Equal calls (for lookups: in the same `source`) share one step. Without a rule, only the dtype bounds the result.
        """
        key = (call.target, call.dtype, _key(args), _key(call.kwargs), id(source))
        if key in self._cache:
            return self._cache[key]
        axes = functools.reduce(operator.or_, (a.axes for a in args if isinstance(a, IntervalStep)), 0)
        domain_bounds = None
        if rule is not None:
            operands = [a.domain_bounds if isinstance(a, IntervalStep) else a for a in args]
            domain_bounds = rule(call, operands) if may_compute(call, operands) else None
            if not is_sound(call, domain_bounds):
                domain_bounds = None
        value: Any
        if domain_bounds is None:
            value_range = dtype_range(call.dtype)
            value = OPAQUE if value_range is None else value_range
        elif axes == 0 or bool(domain_bounds.lo[0] == domain_bounds.hi[0]):
            value = value_range = Interval(domain_bounds.lo[:1], domain_bounds.hi[:1])
        else:
            assert rule is not None
            value_range = domain_bounds
            value = IntervalStep(call=call, rule=rule, args=args, axes=axes, domain_bounds=domain_bounds, table=table)
            if call.name in AND and call.dtype == torch.bool:
                value = refine_conjunction(value, self._tables)
        self._track_int32(call.dtype, value_range)
        self._cache[key] = value
        return value

    def _track_int32(self, dtype: torch.dtype, value: Any) -> None:
        """Clear `fits_int32` if an integer value may exceed 32 bits."""
        if dtype.is_floating_point or dtype == torch.bool or not isinstance(value, Interval):
            return
        info = torch.iinfo(torch.int32)
        self.fits_int32 &= bool(value.lo[0] >= info.min) and bool(value.hi[0] <= info.max)

    def _lookup(self, node: Node, env: dict[Node, Any]) -> Any:
        """The value of an `index` node with at least one index that is not concrete."""
        table_node, index_nodes = cast(Any, node.args)
        table = env[table_node]
        indices: list[Any] = [None if i is None else self._operand(env[i]) for i in index_nodes]
        dtype = node.meta["val"].dtype
        call = Call(name="index", target=node.target, dtype=dtype)  # type: ignore[arg-type]
        self.lookups_inside[node] = False
        if not isinstance(table, Tensor) or any(i is None or i is OPAQUE for i in indices) or table.ndim != len(indices):
            return self._add_step(call, None, (OPAQUE, node))
        index_bounds = [i.domain_bounds if isinstance(i, IntervalStep) else i for i in indices]
        inside = [bool((i.lo >= 0).all() & (i.hi < size).all()) for i, size in zip(index_bounds, table.shape, strict=True)]
        self.lookups_inside[node] = all(inside)
        for index_range, size in zip(index_bounds, table.shape, strict=True) if self.strict else ():
            too_high, too_low = bool((index_range.lo >= size).any()), bool((index_range.hi < -size).any())
            if too_high or too_low:
                got = f"up to {int(index_range.hi.max())}" if too_high else f"down to {int(index_range.lo.min())}"
                raise ValueError(
                    f"mask {self.program.name!r} looks outside a captured tensor of shape {tuple(table.shape)}: expected indices "
                    f"from {-size} to {size - 1} in a dim of {size} entries, got {got}; "
                    "capture a tensor made for this call's sizes"
                )
        varying = [i for i, index in enumerate(indices) if isinstance(index, IntervalStep)]
        # A constant interval may be the bounds of a value that differs between elements.
        if len(varying) != 1 or any(not torch.equal(i.lo, i.hi) for i in indices if not isinstance(i, IntervalStep)):
            # A scalar expanded to any size is stored once, so reduce a single entry.
            stored = table if any(table.stride()) or not table.numel() else table[(0,) * table.ndim]
            table_bounds = Interval(*(x.reshape(1).to(carrier(dtype)) for x in (stored.amin(), stored.amax())))
            rule: Rule = lambda _, args: lookup_points(table, table_bounds, cast(Any, args))  # noqa: E731
            return self._add_step(call, None if bool(table_bounds.hi.isnan()) else rule, tuple(indices), source=table)
        dim = varying[0]
        row = [int(index.lo) if i != dim else slice(None) for i, index in enumerate(indices)]
        ranges = self._range_table(table, row)
        return self._add_step(call, partial(query_table, ranges, inside[dim]), (indices[dim],), source=ranges, table=ranges)

    def _range_table(self, table: Tensor, row: list[Any]) -> RangeTable:
        """The cached range table of `table[row]`, one dim of a captured tensor."""
        key = (id(table), *(i if isinstance(i, int) else None for i in row))
        if key not in self._tables:
            self._alive.append(table)
            self._tables[key] = RangeTable(table[tuple(row)].contiguous())
        return self._tables[key]

    # -------------------------------------------------------------------------------------------- over squares

    def _order_steps(self) -> None:
        """Sort the steps that the result needs topologically, by axes; list the row and column steps that square steps read."""
        order: list[IntervalStep] = []
        visited: set[IntervalStep] = set()
        stack: list[tuple[Any, bool]] = [(self.result, False)]
        while stack:
            step, args_done = stack.pop()
            if not isinstance(step, IntervalStep) or (step in visited and not args_done):
                continue
            if args_done:
                order.append(step)
                continue
            visited.add(step)
            stack.append((step, True))
            stack += [(a, False) for a in step.args]
        self._steps = {axes: [s for s in order if s.axes == axes] for axes in (Q, KV, Q | KV)}
        read = {a for s in self._steps[Q | KV] for a in s.args if isinstance(a, IntervalStep)} | {self.result}
        self._axis_outputs = {axis: [s for s in self._steps[axis] if s in read] for axis in (Q, KV)}

    @property
    def constant(self) -> Interval | None:
        """Bounds of the result if they are the same for every square (possibly unknown), else None."""
        if isinstance(self.result, IntervalStep):
            return None
        return truth(self.result) if isinstance(self.result, Interval) else dtype_range(torch.bool)

    def evaluate_axis(self, axis: int, lo: Tensor, hi: Tensor) -> list[Interval]:
        """Inputs of `evaluate_squares` for rows (axis Q) or columns (axis KV): one interval [n] per value, for indices lo … hi [n]."""
        env: dict[Any, Interval] = {}
        for step in self._steps[axis]:
            env[step] = Interval(lo, hi) if step.rule is given_index else _run(step, env)
        return [Interval(*(x.expand(len(lo)) for x in env[s])) for s in self._axis_outputs[axis]]

    def evaluate_squares(self, row_values: list[Interval], column_values: list[Interval]) -> Interval:
        """Bounds of the mask in each square; row and column values broadcast against each other.

        lo: every element is visible. hi: some element may be visible.
        """
        env: dict[Any, Interval] = dict(zip(self._axis_outputs[Q] + self._axis_outputs[KV], row_values + column_values, strict=True))
        for step in self._steps[Q | KV]:
            env[step] = _run(step, env)
        return env[self.result]


def _run(step: IntervalStep, env: dict[Any, Interval]) -> Interval:
    """The bounds of a step from the bounds of its operands in `env`."""
    bounds_of_step = step.rule(step.call, [env[a] if isinstance(a, IntervalStep) else a for a in step.args])
    assert bounds_of_step is not None, f"{step.call.name}: sound over the whole domain, so sound over each part"
    return bounds_of_step


def _scalars_fit(node: Node) -> bool:
    """Whether the Python integers in a call fit the dtype that torch converts them to."""
    numbers = [a for a in node.args if type(a) is int]
    dtype = scalar_dtype(node) if numbers else None
    if dtype is None:
        return True
    info = torch.iinfo(dtype)
    return all(info.min <= n <= info.max for n in numbers)


def scalar_dtype(node: Node) -> torch.dtype | None:
    """The integer dtype that torch converts Python integers in a call to, wrapping them silently; None if it converts to another type.

    A quotient of integers is a float: torch then converts operands to the dtype of the result.
    """
    dtypes = [a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    result = getattr(node.meta.get("val"), "dtype", None)
    if not dtypes or any(d.is_floating_point for d in (*dtypes, result) if d is not None):
        return None
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return None if widest == torch.bool else widest


def _key(value: Any) -> Any:
    """A hashable key of call arguments: scalars by type and value (1 == 1.0 == True), tensors and steps by identity."""
    if isinstance(value, list | tuple) and not isinstance(value, Interval):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    if isinstance(value, bool | int | float):
        return type(value), value
    return value if isinstance(value, str | None | torch.dtype) else id(value)
