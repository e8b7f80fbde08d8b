"""Masks of comparisons of kv with values of the query's row: causal masks, windows, packed documents, prefixes and their combinations.

Each comparison becomes a bound, one per row: kv < bound. A thread of a tensor-core tile holds two of every eight columns of a row. It
computes a word with a bit for each of its columns that is below the bound, and combines these words as the mask combines the comparisons:
about 12 instructions per row and comparison instead of 2 per pair. Lookups by query are loaded once for all KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from longspan._kernels.gpu.codegen import ByKey, Emitter, Options, function_source, loaded
from longspan._kernels.gpu.lookup_bounds import behind
from longspan._kernels.gpu.typed_values import INT32_MAX, INTS, type_of
from longspan._masks.program import Program, op_name

_AND = ("bitwise_and", "logical_and", "__and__")
_OR = ("bitwise_or", "logical_or", "__or__")
_NOT = ("bitwise_not", "logical_not")
_MAX_BOUNDS = 6  # comparisons; each takes two registers per thread
_UNBOUNDED = 2**62  # sums of larger integers may overflow


class _Unsupported(Exception):
    """Raised for a mask that is not a combination of such comparisons."""


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """kv · `kv` + Σ sign · value + `constant`. `terms`: (node that does not depend on kv, sign), in the order of their names."""

    kv: int = 0
    terms: tuple[tuple[Node, int], ...] = ()
    constant: int = 0

    def plus(self, other: _Sum, sign: int) -> _Sum:
        """self + sign · other."""
        signs = dict(self.terms)
        for node, s in other.terms:
            signs[node] = signs.get(node, 0) + sign * s
        terms = tuple(sorted(((n, s) for n, s in signs.items() if s), key=lambda term: term[0].name))
        return _Sum(kv=self.kv + sign * other.kv, terms=terms, constant=self.constant + sign * other.constant)


def _is_bool(arg: Any) -> bool:
    return isinstance(arg, Node) and arg.meta["val"].dtype is torch.bool


class _Bounds:
    """The bounds of a mask's comparisons, and the mask as an expression of them: the text of a bitwise expression, or a bool."""

    def __init__(self, program: Program, options: Options) -> None:
        self.emitter = Emitter(program.graph, options)
        self.on_kv: set[Node] = set()
        for node in program.graph.nodes:
            if str(node.target) == "kv" if node.op == "placeholder" else any(n in self.on_kv for n in node.all_input_nodes):
                self.on_kv.add(node)
        self.texts: list[str] = []
        self._known: dict[Any, int] = {}

    def _emitted(self, node: Node) -> Any:
        self.emitter.run({n for n in behind([node]) if n not in self.emitter.env})
        return self.emitter.value(node)

    def sum(self, arg: Any) -> _Sum:
        """An integer value as a sum."""
        if isinstance(arg, int) and not isinstance(arg, bool):
            return _Sum(constant=arg)
        if not isinstance(arg, Node) or type_of(arg.meta["val"].dtype) not in INTS:
            raise _Unsupported
        if arg.op == "placeholder" and str(arg.target) == "kv":
            return _Sum(kv=1)
        name = op_name(arg) if arg.op == "call_function" else ""
        # A sum of narrower integers may wrap, and the bound would not: such a sum is one term.
        if name in ("add", "sub") and len(arg.args) == 2 and not arg.kwargs and arg.meta["val"].dtype is torch.int64:
            return self.sum(arg.args[0]).plus(self.sum(arg.args[1]), 1 if name == "add" else -1)
        if arg in self.on_kv:
            raise _Unsupported
        return _Sum(terms=((arg, 1),))

    def expression(self, node: Node) -> str | bool:
        """A condition of the mask as text over the words `below_i`, or a bool if it is constant."""
        if node not in self.on_kv:
            return self._of_row(node)
        name = op_name(node)
        if name in _NOT and _is_bool(node.args[0]):
            value = self.expression(node.args[0])  # type: ignore[arg-type]
            return not value if isinstance(value, bool) else f"~{value}"
        if name in _AND + _OR and all(map(_is_bool, node.args)):
            a, b = (self.expression(arg) for arg in node.args)  # type: ignore[arg-type]
            neutral = name in _AND
            if isinstance(a, bool) or isinstance(b, bool):
                known, rest = (a, b) if isinstance(a, bool) else (b, a)
                return rest if known is neutral else known
            return f"({a} {'&' if neutral else '|'} {b})"
        if name in ("lt", "le", "gt", "ge"):
            left, right = self.sum(node.args[0]), self.sum(node.args[1])
            return self._comparison(name, left.plus(right, -1), is_sum=_Sum(kv=1) not in (left, right))
        raise _Unsupported

    def _of_row(self, node: Node) -> str | bool:
        """A condition that does not depend on kv."""
        if node.op == "call_function" and op_name(node) == "ge" and node.args[1] == 0 and self._emitted(node.args[0]).nonneg:  # type: ignore[arg-type]
            return True
        value = self._emitted(node)
        if value.type != "bool":
            raise _Unsupported
        return bool(value.literal) if value.literal is not None else self._bound(node, f"tl.where({value.text}, {INT32_MAX}, 0)")

    def _comparison(self, name: str, difference: _Sum, *, is_sum: bool) -> str:
        """difference < 0, ≤ 0, > 0 or ≥ 0. is_sum: the mask compares a sum that contains kv, not kv itself."""
        if abs(difference.kv) != 1 or any(abs(s) != 1 for _, s in difference.terms):
            raise _Unsupported
        sign = -difference.kv  # kv ± (terms + constant) on one side, and the bound on the other
        below = (name in ("lt", "le")) == (difference.kv == 1)
        strict = name in ("lt", "gt")
        # kv < bound, kv ≤ bound; otherwise not (kv ≤ bound), not (kv < bound).
        inclusive = int(strict != below)
        terms, constant = [(n, sign * s) for n, s in difference.terms], sign * difference.constant
        values = [self._emitted(n) for n, _ in terms]
        if any(v.type not in INTS for v in values):
            raise _Unsupported
        size = abs(constant) + sum(v.bound for v in values)
        if size >= _UNBOUNDED and (is_sum or (len(terms), constant) != (1, 0)):
            raise _Unsupported
        type = "int64" if size > INT32_MAX or any(v.type == "int64" for v in values) else "int32"
        text = f"tl.cast({constant}, tl.{type})"
        for value, (_, s) in zip(values, terms, strict=True):
            text += f" {'+' if s > 0 else '-'} {self.emitter.text(value, type)}"
        if size >= _UNBOUNDED and terms[0][1] < 0:
            raise _Unsupported
        text = f"(tl.minimum(tl.maximum({text}, -1), {INT32_MAX - 1})).to(tl.int32) + {inclusive}"
        below_bound = self._bound((tuple(terms), constant, inclusive), text)
        return below_bound if below else f"~{below_bound}"

    def _bound(self, key: Any, text: str) -> str:
        """The name of the bits below a bound."""
        if key not in self._known:
            self._known[key] = len(self.texts)
            self.texts.append(text)
        return f"below_{self._known[key]}"


@lru_cache(maxsize=1024)
def _functions(keyed: ByKey, options: Options) -> tuple[Any, Any] | None:
    """`bounds_functions` of a program; None if it has another form or too many comparisons."""
    program = keyed.program
    bounds = _Bounds(program, options)
    try:
        expression = bounds.expression(program.result)
    except _Unsupported:
        return None
    if isinstance(expression, bool) or len(bounds.texts) > _MAX_BOUNDS:
        return None
    name = program.key[:12]
    lines = [*bounds.emitter.lines, f"return ({', '.join(bounds.texts)},)"]
    select = [f"below_{i} = bits_below(bounds[{i}] - kv_first, columns)" for i in range(len(bounds.texts))]
    select.append(f"return {expression}")
    return (
        loaded(function_source(f"bounds_{name}", "b, h, q, captured, sizes", lines)),
        loaded(function_source(f"visible_{name}", "bounds, kv_first, columns", select)),
    )


def bounds_functions(program: Program | None, options: Options) -> tuple[Any, Any]:
    """(bounds, visible) of a mask that is a combination of comparisons of kv with values of the row, else Nones.

    bounds(b, h, q, captured, sizes): a tuple of int32 bounds, each of q's shape or a scalar.
    visible(bounds, kv_first, columns): the mask of a tile of at most 128 columns that begins at position kv_first, as words with a bit for
        each column (`bits_below`).
    """
    return (program and _functions(ByKey(program), options)) or (None, None)
