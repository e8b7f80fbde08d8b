"""Values during code generation: source text, type, and bounds."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

INT32_MAX = 2**31 - 1
# Integers up to here are exact in float32.
EXACT_FLOAT = 2**24

INTS = ("int32", "int64")
FLOATS = ("float32", "float64")

_TYPES = {
    torch.bool: "bool",
    torch.uint8: "int32",
    torch.int8: "int32",
    torch.int16: "int32",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bfloat16: "float32",
    torch.float16: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
}
_BOUNDS = {torch.uint8: 2**8, torch.int8: 2**7, torch.int16: 2**15, torch.int32: 2**31, torch.bool: 1}

Literal = bool | int | float
Dims = frozenset[str]


class Unsupported(Exception):
    """An operation that code generation does not support; the message names it."""


def type_of(dtype: torch.dtype) -> str:
    """The type in which values of a torch dtype are computed, at least 32 bits wide."""
    if dtype not in _TYPES:
        raise Unsupported(f"values of dtype {dtype}")
    return _TYPES[dtype]


def bound_of(dtype: torch.dtype) -> int:
    """Upper bound of |value| for an integer dtype."""
    return _BOUNDS.get(dtype, 2**63)


def wrapped_number(number: int, dtype: torch.dtype) -> int:
    """An integer modulo 2^bits, in the range of an integer dtype."""
    info = torch.iinfo(dtype)
    return (number - info.min) % (info.max - info.min + 1) + info.min


@dataclass(frozen=True, kw_only=True)
class Value:
    """One SSA value.

    `dims`: the subset of q and kv that it varies along. `bound`: integers only, |value| <= bound. `floated`: a template and operands that
    compute the same integer in float32 more cheaply: a difference of two vectors is converted as two vectors, not as a tile.
    """

    text: str
    type: str
    dims: Dims = frozenset()
    bound: int = 2**63
    nonneg: bool = False
    literal: Literal | None = None
    floated: tuple[str, tuple[Value, ...]] | None = None

    def to(self, type: str) -> str:
        """The value as an expression of another type."""
        if self.literal is not None:
            return spell(self.literal, type)
        if type == self.type:
            return self.text
        if type == "bool":
            return f"({self.text} != 0)"
        if type == "float32" and self.floated is not None and self.bound < EXACT_FLOAT:
            template, operands = self.floated
            return "(" + template.format(*(o.to(type) for o in operands)) + ")"
        return f"{self.text}.to(tl.{type})"


def spell(value: Literal, type: str) -> str:
    """A literal in Triton source."""
    if type in FLOATS:
        number = float(value)
        if type == "float64" and math.isfinite(number) and not _is_float32(number):  # Triton takes a number in its source for a float32
            (bits,) = struct.unpack("<q", struct.pack("<d", number))
            return f"tl.cast(tl.cast({bits}, tl.int64), tl.float64, bitcast=True)"
        return repr(number) if math.isfinite(number) else f'float("{number}")'
    return str(bool(value)) if type == "bool" else str(int(value))


def _is_float32(number: float) -> bool:
    return abs(number) <= torch.finfo(torch.float32).max and struct.unpack("f", struct.pack("f", number))[0] == number


def constant(value: Literal) -> Value:
    """The value of a literal."""
    if isinstance(value, bool):
        return Value(text=str(value), type="bool", literal=value, bound=1)
    if isinstance(value, int):
        return Value(
            text=str(value), type="int32" if abs(value) <= INT32_MAX else "int64", literal=value, bound=abs(value), nonneg=value >= 0
        )
    return Value(text=spell(value, "float32"), type="float32", literal=value)


def materialized(value: Value) -> Value:
    """A literal as a device scalar, where Triton needs a tensor. Other values unchanged."""
    if value.literal is None:
        return value
    type = "int1" if value.type == "bool" else value.type
    literal = int(value.literal) if value.type == "bool" else value.literal
    text = f"tl.cast({spell(literal, value.type) if value.type != 'bool' else literal}, tl.{type})"
    return Value(text=text, type=value.type, bound=value.bound, nonneg=value.nonneg)
