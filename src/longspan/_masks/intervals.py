"""Programs over intervals: run a traced mod on whole squares of (query, key) indices at once.

What depends on captured tensors and on fixed indices alone is computed once. What depends on the query only, or the key only, is
computed per row and per column of squares, and only the rest per square. Steps whose value is the same everywhere, or about which
nothing can be said, cost nothing per square.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from longspan._masks.interval_rules import RULES, Call, Interval, Operand, Rule, anything, carrier, sound, truth
from longspan._masks.program import Program, op_name
from longspan._masks.program import call as run_call
from longspan._masks.range_lookup import RangeTable, lookup_points

Q, KV, FIXED = 1, 2, 4  # which indices a step depends on, as bits; FIXED: batch or head, where they are not one value
OPAQUE = object()  # nothing is known: a value that is not a scalar, or a float that may be NaN
CREATIONS = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
CONVERSION_KWARGS = frozenset(("dtype", "device", "layout", "pin_memory", "non_blocking", "memory_format"))
AND = frozenset(("bitwise_and", "logical_and", "__and__"))
NOT = frozenset(("bitwise_not", "logical_not"))
COMPARE = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


@dataclass(eq=False, kw_only=True)
class Step:
    """One operation to run on intervals. `whole` [5]: its bounds over the whole domain, then at the domain's four corners."""

    call: Call
    rule: Rule
    args: tuple[Any, ...]
    axes: int
    whole: Interval
    table: RangeTable | None = None
    conjuncts: tuple[Any, ...] = ()
    narrowed: frozenset[Any] = frozenset()


# A condition on one lookup: the lookup, a name, and the condition on a table's entries.
Fact = tuple[Step, Any, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What holds for every index of a domain. `lookups`: for each `index` node, whether all its indices are in 0 … size − 1."""

    int32: bool
    lookups: dict[Node, bool] = field(default_factory=dict)


def bounds(program: Program, captured: Sequence[Tensor], q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> Bounds:
    """Run the program once over the whole domain of indices.

    `int32`: every integer in the program fits 32 bits, tables' entries that are looked up included. A lookup is reported inside
    where its indices provably are; False means that this could not be shown.
    """
    domain = Interpreter(program, captured, b=(0, batch - 1), h=(0, heads - 1), q=(0, q_len - 1), kv=(0, kv_len - 1), strict=False)
    return Bounds(int32=domain.int32, lookups=domain.inside)


class Interpreter:
    """A program bound to captured tensors (on the CPU) and to ranges of indices (inclusive; lo = hi is a fixed index).

    `strict`: a lookup that certainly leaves its table raises ValueError.
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
        self.program, self.strict, self.int32 = program, strict, True
        self.inside: dict[Node, bool] = {}
        self._cache: dict[Any, Any] = {}
        self._tables: dict[Any, RangeTable] = {}
        self._alive: list[Tensor] = []  # keeps the ids in cache keys from being used again
        env: dict[Node, Any] = dict(zip(program.captured_nodes, captured, strict=True))
        env.update({n: OPAQUE for n in program.placeholders if n not in env})
        corners = {Q: (0, 1, 0, 1), KV: (0, 0, 1, 1), FIXED: (0, 0, 0, 0)}
        for node, (lo, hi), axis in zip(program.index_nodes, (b, h, q, kv), (FIXED, FIXED, Q, KV), strict=True):
            points = torch.tensor([(lo, hi)[end] for end in corners[axis]])
            whole = Interval(torch.cat([torch.tensor([lo]), points]), torch.cat([torch.tensor([hi]), points]))
            if axis == FIXED and lo == hi:
                env[node] = torch.tensor(lo)
            else:
                env[node] = Step(
                    call=Call(name=node.name, target=_same_index, dtype=torch.int64), rule=_axis, args=(), axes=axis, whole=whole
                )
            self._note(torch.int64, whole)
        for node in program.graph.nodes:
            if node.op == "get_attr":
                env[node] = node.meta["constant"]
            elif node.op == "call_function":
                env[node] = self._step(node, env)
        result = program.result
        self.out = self._operand(env[result] if isinstance(result, Node) else torch.as_tensor(result))
        self._arrange()

    # -------------------------------------------------------------------------------------------- over the whole domain

    def _step(self, node: Node, env: dict[Node, Any]) -> Any:
        """A concrete tensor, a constant interval, a Step, or OPAQUE."""
        inputs = [env[a] for a in node.all_input_nodes]
        if op_name(node) in CREATIONS and not any(isinstance(v, Tensor) and v.ndim for v in inputs):
            inputs = [torch.zeros((), dtype=a.meta["val"].dtype) for a in node.all_input_nodes]
            env = {**env, **dict(zip(node.all_input_nodes, inputs, strict=True))}
        if all(isinstance(v, Tensor) for v in inputs):
            return self._fold(node, env)
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
        known = name in RULES and kwargs.keys() <= {"rounding_mode"} and not any(a is OPAQUE for a in args) and _scalars_fit(node)
        return self._make(call, RULES[name] if known else None, tuple(args))

    def _fold(self, node: Node, env: dict[Node, Any]) -> Any:
        args: Any = torch.fx.map_arg(node.args, env.__getitem__)
        kwargs: Any = torch.fx.map_arg(node.kwargs, env.__getitem__)
        key = ("fold", node.target, _key(args), _key(kwargs))
        if key not in self._cache:
            try:
                value = run_call(node.target, args, dict(kwargs), torch.device("cpu"))  # type: ignore[arg-type]
            except IndexError as error:
                raise ValueError(f"mask {self.program.name!r} looks outside a captured tensor: {error}") from error
            if isinstance(value, Tensor):
                self._alive.append(value)
                if value.ndim == 0:
                    self._note(value.dtype, self._operand(value))
            self._cache[key] = value
        if op_name(node) == "index":
            indices = [torch.as_tensor(i) for i in args[1] if i is not None]
            self.inside[node] = all(bool((i >= 0).all()) for i in indices)
        return self._cache[key]

    def _operand(self, value: Any) -> Any:
        """A concrete scalar as an interval of one point; the rest as it is."""
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

    def _make(self, call: Call, rule: Rule | None, args: tuple[Any, ...], *, source: Any = None, table: RangeTable | None = None) -> Any:
        """The step, or what stands for it everywhere; equal calls (on one `source`, for lookups) are one step."""
        key = (call.target, call.dtype, _key(args), _key(call.kwargs), id(source))
        if key in self._cache:
            return self._cache[key]
        axes = functools.reduce(operator.or_, (a.axes for a in args if isinstance(a, Step)), 0)
        whole = None
        if rule is not None:
            operands = [a.whole if isinstance(a, Step) else a for a in args]
            whole = rule(call, operands)
            if not sound(call, operands, whole):
                whole = None
        made: Any
        if whole is None:
            constant = anything(call.dtype)
            made = OPAQUE if constant is None else constant
        elif axes == 0 or bool(whole.lo[0] == whole.hi[0]):
            made = constant = Interval(whole.lo[:1], whole.hi[:1])
        else:
            assert rule is not None
            constant = whole
            made = Step(call=call, rule=rule, args=args, axes=axes, whole=whole, table=table)
            if call.name in AND and call.dtype == torch.bool:
                made = self._narrow(made)
        self._note(call.dtype, constant)
        self._cache[key] = made
        return made

    def _note(self, dtype: torch.dtype, value: Any) -> None:
        if dtype.is_floating_point or dtype == torch.bool or not isinstance(value, Interval):
            return
        info = torch.iinfo(torch.int32)
        self.int32 &= bool(value.lo[0] >= info.min) and bool(value.hi[0] <= info.max)

    def _lookup(self, node: Node, env: dict[Node, Any]) -> Any:
        source, places = cast(Any, node.args)
        table = env[source]
        indices: list[Any] = [None if i is None else self._operand(env[i]) for i in places]
        dtype = node.meta["val"].dtype
        call = Call(name="index", target=node.target, dtype=dtype)  # type: ignore[arg-type]
        self.inside[node] = False
        if not isinstance(table, Tensor) or any(i is None or i is OPAQUE for i in indices) or table.ndim != len(indices):
            return self._make(call, None, (OPAQUE, node))
        wholes = [i.whole if isinstance(i, Step) else i for i in indices]
        inside = [bool((w.lo >= 0).all() & (w.hi < n).all()) for w, n in zip(wholes, table.shape, strict=True)]
        self.inside[node] = all(inside)
        for whole, size in zip(wholes, table.shape, strict=True):
            if self.strict and bool(((whole.lo >= size) | (whole.hi < -size)).any()):
                raise ValueError(
                    f"mask {self.program.name!r} looks outside a captured tensor of shape {tuple(table.shape)}: an index reaches "
                    f"{int(whole.hi.max())} where a dim has {size} entries. Is the mask made for other lengths?"
                )
        varying = [i for i, index in enumerate(indices) if isinstance(index, Step)]
        if len(varying) != 1:
            # One number that is seen as a table of any size is looked at once.
            held = table if any(table.stride()) or not table.numel() else table[(0,) * table.ndim]
            least, most = held.amin().reshape(1).to(carrier(dtype)), held.amax().reshape(1).to(carrier(dtype))
            rule: Rule = lambda _, args: lookup_points(table, Interval(least, most), cast(Any, args))  # noqa: E731
            return self._make(call, None if bool(most.isnan()) else rule, tuple(indices), source=table)
        axis = varying[0]
        fixed = [int(index.lo) if i != axis else slice(None) for i, index in enumerate(indices)]
        ranges = self._range_table(table, fixed)
        return self._make(call, partial(_query, ranges, inside[axis]), (indices[axis],), source=ranges, table=ranges)

    def _range_table(self, table: Tensor, fixed: list[Any]) -> RangeTable:
        key = (id(table), *(i if isinstance(i, int) else None for i in fixed))
        if key not in self._tables:
            self._alive.append(table)
            self._tables[key] = RangeTable(table[tuple(fixed)].contiguous())
        return self._tables[key]

    # -------------------------------------------------------------------------------------------- what a conjunction knows

    def _narrow(self, step: Step) -> Step:
        """`(a[i] == b[j]) & (a[i] >= 0)`: where both hold, b[j] >= 0 too, so the entries below 0 (padding) need not be thought of.

        Adds to the conjunction a step that says whether the *kept* entries of the two tables can meet. Without it, padding that
        is scattered over a sequence would keep every pair of ranges overlapping.
        """
        leaves: dict[Any, None] = {}
        done: frozenset[Any] = frozenset()
        for arg in step.args:
            parts = arg.conjuncts if isinstance(arg, Step) and arg.conjuncts else (arg,)
            leaves.update(dict.fromkeys(p for p in parts if isinstance(p, Step)))
            done |= arg.narrowed if isinstance(arg, Step) else frozenset()
        step.conjuncts, step.narrowed = tuple(leaves), done
        facts = [fact for leaf in leaves if (fact := _fact_of(leaf)) is not None]
        for leaf in leaves:
            if leaf.call.name != "eq" or not all(isinstance(a, Step) and a.table is not None for a in leaf.args):
                continue
            sides: tuple[Step, Step] = leaf.args  # type: ignore[assignment]
            kept = [self._kept(mine, other, facts) for mine, other in (sides, sides[::-1])]
            name = (leaf, *(k for k, _ in kept))
            if not any(k for k, _ in kept) or name in step.narrowed:
                continue
            narrow = [self._restricted(side, k, keep) for side, (k, keep) in zip(sides, kept, strict=True)]
            step = _also_meeting(step, narrow)
            step.narrowed |= {name}
        return step

    def _kept(self, mine: Step, other: Step, facts: list[Fact]) -> tuple[frozenset[Any], Tensor | None]:
        """Which entries of my table can take part: by facts about my index, and by facts about the value that equals mine."""
        assert mine.table is not None
        used, keep = set(), None
        for about, name, holds in facts:
            assert about.table is not None
            if about.args[0] is mine.args[0] and about.table.size == mine.table.size:
                values = about.table.values
            elif about is other:
                values = mine.table.values
            else:
                continue
            if (name, id(values)) not in used:
                used.add((name, id(values)))
                keep = holds(values) if keep is None else keep & holds(values)
        return frozenset(used), keep

    def _restricted(self, side: Step, name: frozenset[Any], keep: Tensor | None) -> Any:
        if keep is None or bool(keep.all()):
            return side
        assert side.table is not None
        key = ("kept", id(side.table.values), name)
        if key not in self._tables:
            self._tables[key] = RangeTable(side.table.values, keep)
        ranges = self._tables[key]
        # Bounds of no entry at all (lo > hi) must stay as they are, so this step is made without the checks on values.
        index = side.args[0]
        rule = partial(_query, ranges, False)
        return Step(call=side.call, rule=rule, args=(index,), axes=side.axes, whole=rule(side.call, (index.whole,)), table=ranges)

    # -------------------------------------------------------------------------------------------- over squares

    def _arrange(self) -> None:
        """Part the steps that the result needs into those of rows, of columns and of squares; find what rows and columns hand on."""
        order: list[Step] = []
        seen: set[Step] = set()
        todo: list[tuple[Any, bool]] = [(self.out, False)]
        while todo:
            step, ready = todo.pop()
            if not isinstance(step, Step) or (step in seen and not ready):
                continue
            if ready:
                order.append(step)
                continue
            seen.add(step)
            todo.append((step, True))
            todo += [(a, False) for a in step.args]
        self._parts = {axes: [s for s in order if s.axes == axes] for axes in (Q, KV, Q | KV)}
        read = {a for s in self._parts[Q | KV] for a in s.args if isinstance(a, Step)} | {self.out}
        self._handed = {axes: [s for s in self._parts[axes] if s in read] for axes in (Q, KV)}

    @property
    def constant(self) -> Interval | None:
        """The result, where it is the same (known or not) for every square."""
        if isinstance(self.out, Step):
            return None
        return truth(self.out) if isinstance(self.out, Interval) else anything(torch.bool)

    def along(self, axis: int, lo: Tensor, hi: Tensor) -> list[Interval]:
        """What squares need to know of their rows (axis Q) or columns (axis KV), for index ranges lo … hi [n]."""
        env: dict[Any, Interval] = {}
        for step in self._parts[axis]:
            env[step] = Interval(lo, hi) if step.rule is _axis else _run(step, env)
        return [Interval(*(x.expand(len(lo)) for x in env[s])) for s in self._handed[axis]]

    def squares(self, rows: list[Interval], columns: list[Interval]) -> Interval:
        """Whether the mask must (lo) and may (hi) be true somewhere in each square; rows and columns broadcast against each other."""
        env: dict[Any, Interval] = dict(zip(self._handed[Q] + self._handed[KV], rows + columns, strict=True))
        for step in self._parts[Q | KV]:
            env[step] = _run(step, env)
        return env[self.out]


def _run(step: Step, env: dict[Any, Interval]) -> Interval:
    out = step.rule(step.call, [env[a] if isinstance(a, Step) else a for a in step.args])
    assert out is not None, f"{step.call.name}: sound over the whole domain, so over its parts"
    return out


def _query(table: RangeTable, inside: bool, call: Call, args: Sequence[Operand]) -> Interval:
    index = args[0]
    assert isinstance(index, Interval)
    return table.query(index, inside)


def _same_index(*args: Any) -> Any:
    raise AssertionError("an index is given, not computed")


def _axis(call: Call, args: Sequence[Operand]) -> Interval:
    raise AssertionError("an index is given, not computed")


def _also_meeting(step: Step, sides: Sequence[Step]) -> Step:
    """`step`, false also where the two sides cannot be equal."""
    call = Call(name="meets", target=_same_index, dtype=torch.bool)
    whole = _meets(call, [step.whole, *(s.whole for s in sides)])
    axes = step.axes | sides[0].axes | sides[1].axes
    return Step(call=call, rule=_meets, args=(step, *sides), axes=axes, whole=whole, conjuncts=step.conjuncts, narrowed=step.narrowed)


def _meets(call: Call, args: Sequence[Operand]) -> Interval:
    mask, a, b = args
    assert isinstance(mask, Interval) and isinstance(a, Interval) and isinstance(b, Interval)
    return Interval(mask.lo, mask.hi & (a.lo <= b.hi) & (b.lo <= a.hi))


def _fact_of(leaf: Step) -> Fact | None:
    """What a conjunct says, if it is about one lookup alone."""
    name, args = leaf.call.name, leaf.args
    if leaf.table is not None and leaf.call.dtype == torch.bool:
        return leaf, "true", lambda values: values.bool()
    if name in NOT and isinstance(args[0], Step) and (inner := _fact_of(args[0])) is not None:
        about, label, holds = inner
        return about, ("not", label), lambda values: ~holds(values)
    if name not in COMPARE:
        return None
    lookups = [a for a in args if isinstance(a, Step)]
    if len(lookups) != 1 or lookups[0].table is None or lookups[0].call.name != "index":
        return None
    fixed = [a.lo if isinstance(a, Interval) else a for a in args]
    label = (leaf.call.target, *(id(a) if isinstance(a, Interval) else None if isinstance(a, Step) else a for a in args))
    return lookups[0], label, lambda values: leaf.call.target(*(values if isinstance(a, Step) else a for a in fixed))


def _scalars_fit(node: Node) -> bool:
    """Whether Python integers in a call fit the integer dtype that torch converts them to (it wraps them where they do not)."""
    dtypes = [a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    numbers = [a for a in node.args if type(a) is int]
    if not numbers or any(d.is_floating_point for d in dtypes):
        return True
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    if widest == torch.bool:
        return True
    info = torch.iinfo(widest)
    return all(info.min <= n <= info.max for n in numbers)


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, Interval):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    if isinstance(value, bool | int | float):
        return type(value), value
    return value if isinstance(value, str | None | torch.dtype) else id(value)
