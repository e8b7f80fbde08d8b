"""Code generation: from the pointwise graph of a mask or score program to a `@triton.jit` function.

    mask:   f(b, h, q, kv, captured, sizes)                               → bool
    score:  f(score, b, h, q, kv, captured, sizes)                        → float32, of the score's shape
    joint:  f(grad, score, b, h, q, kv, valid, captured, sizes, grads)    → float32 gradient of the score before the program;
            adds the gradients of lookups into `grads`, where `valid`

b, h are scalars, q and kv int32 vectors that broadcast to a tile ([M, 1] and [1, N], or the other way round; a joint that adds
gradients needs q along dim 0). `captured`: contiguous tensors. `sizes`: all their sizes in one tuple, packed (`launch.pack_sizes`).

Integers have 32 bits where bounds on the operands prove that this is enough, else 64: values wrap where torch's do, and nowhere else.
Indices are clamped into their tensor, since padding rows compute arbitrary ones. Quotients, roots and products that a discontinuous
operation depends on (`exact_values.decisive`) are rounded as torch rounds them.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, Node

from longspan._kernels.gpu import device_library as library
from longspan._kernels.gpu.emitters import EMITTERS
from longspan._kernels.gpu.exact_values import decisive
from longspan._kernels.gpu.typed_values import (
    INT32_MAX,
    INTS,
    Unsupported,
    Value,
    bound_of,
    constant,
    materialized,
    type_of,
    wrapped_number,
)
from longspan._masks.intervals import scalar_dtype
from longspan._masks.joint import Joint
from longspan._masks.program import Program, op_name

# Two classes of length, so that a new length rarely compiles a program again.
SHORT, LONG = 2**23, 2**31 - 1
_MAX_HEADS = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compile options: with the graph, they determine a program's source.

    `max_position`: upper bound of positions. `fast`: approximate tanh and reciprocals where nothing discontinuous depends on them
    (`exact_values.decisive`), for 16-bit inputs. `big_tables`: a captured tensor has 2³¹ elements or more. `interpreted`: for Triton's
    interpreter, which has no inline assembly. `hoisted`: captured tensors whose elements in use are in `captured` instead of the
    pointer (`element_places`), `raw`: in the dtype of the tensor. `direct`: lookups go from global memory to registers
    (`device_library.load_direct`).
    """

    max_position: int = SHORT
    fast: bool = False
    big_tables: bool = False
    interpreted: bool = False
    hoisted: tuple[int, ...] = ()
    raw: bool = False
    direct: bool = False


# The value of an int32 or int64 modulo 2^bits, by its dtype in torch.
_WRAPS = {torch.uint8: "{0} & 255", torch.int8: "tl.cast({0}, tl.int8)", torch.int16: "tl.cast({0}, tl.int16)", torch.int32: "{0}"}
_WRAP_ONCE = "tl.where({0} > 32767, {0} - 65536, tl.where({0} < -32768, {0} + 65536, {0}))"
# Operations of which every result is in the range of the operands: the bound 128 of int8 stands for −128, never for 128.
_CHOOSING = frozenset(
    "minimum maximum fmin fmax clamp clamp_min clamp_max relu where masked_fill clone detach alias remainder fmod bitwise_and bitwise_or "
    "bitwise_xor bitwise_not __and__ __or__ __xor__ bitwise_right_shift __rshift__".split()
)
_UNCONVERTED = ("pow", "full_like")  # calls whose numbers are not converted to the dtype of their operands


def element_places(graph: Graph, hoisted: Sequence[int]) -> dict[tuple[int, tuple[Any, ...]], int]:
    """By captured tensor and indices, the place in `captured` of each element that a program reads of hoisted tensors.

    The first element of a tensor takes the place of the tensor; others follow all tensors. Indices are () for a 0-dim tensor.
    """
    tables = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith("captured_"))}
    places: dict[tuple[int, tuple[Any, ...]], int] = {}
    for table, number in tables.items():
        if number in hoisted:
            reads = [n for n in table.users if op_name(n) == "index" and n.args[0] is table]
            for indices in dict.fromkeys(tuple(n.args[1]) for n in reads) or [()]:  # type: ignore[arg-type]
                further = len(tables) + len(places) - len({t for t, _ in places})
                places[number, indices] = further if any(t == number for t, _ in places) else number
    return places


class Emitter:
    """The lines of source of one graph, written in the order of its nodes."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.graph = graph
        self.options = options
        self.decisive = decisive(graph)
        self.lines: list[str] = []
        self.env: dict[Node, Any] = {}
        self.captured: dict[Node, int] = {}
        self.first_size = [0]
        self._floats: dict[tuple[str, str], str] = {}
        self.given: dict[Node, dict[int, Value]] = {}  # indices of lookups that are known
        self._elements = element_places(graph, options.hoisted)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)

    def _placeholder(self, node: Node) -> None:
        name = str(node.target)
        tile = frozenset({"q", "kv"})
        if name.startswith("captured_"):
            self.captured[node] = len(self.captured)
            self.first_size.append(self.first_size[-1] + node.meta["val"].ndim)
        elif name in ("score", "grad"):
            self.env[node] = Value(text=name, type="float32", dims=tile)
        elif name in ("q", "kv"):
            bound = self.options.max_position
            self.env[node] = Value(text=name, type="int32", dims=frozenset({name}), bound=bound, nonneg=True)
        else:
            self.env[node] = Value(text=name, type="int32", bound=_MAX_HEADS, nonneg=True)

    def hold(self, value: Value) -> Value:
        """The value, assigned to a new variable."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {value.text}")
        return replace(value, text=name)

    def let(self, text: str, operands: Sequence[Value], *, type: str, **known: Any) -> Value:
        dims = frozenset[str]().union(*(o.dims for o in operands))
        return self.hold(Value(text=text, type=type, dims=dims, **known))

    def text(self, value: Value, type: str) -> str:
        """The value converted to a type. Each conversion is emitted once."""
        if value.literal is not None or value.type == type:
            return value.to(type)
        key = (value.text, type)
        if key not in self._floats:
            self._floats[key] = self.hold(Value(text=value.to(type), type=type)).text
        return self._floats[key]

    def value(self, arg: Any) -> Any:
        """The value of a node or a literal; any other argument unchanged."""
        if isinstance(arg, Node):
            if arg in self.captured and arg not in self.env:
                self.env[arg] = self.load(arg, [])
            return self.env[arg]
        return constant(arg) if isinstance(arg, bool | int | float) else arg

    def run(self, only: Collection[Node] | None = None) -> None:
        for node in self.graph.nodes if only is None else (n for n in self.graph.nodes if n in only):
            if node.op == "get_attr":
                self.env[node] = constant(node.meta["constant"].item())
            elif node.op == "call_function":
                name = op_name(node)
                if name == "index":
                    known = self.given.get(node, {})
                    indices = [known.get(i, index) for i, index in enumerate(node.args[1])]  # type: ignore[arg-type]
                    self.env[node] = self.load(node.args[0], indices)  # type: ignore[arg-type]
                elif name in EMITTERS:
                    self.env[node] = self._wrapped(node, EMITTERS[name](self, node, [self.argument(node, a) for a in node.args]))
                else:
                    raise Unsupported(name)

    def argument(self, node: Node, arg: Any) -> Any:
        """The value of a call's argument. torch converts an integer to the dtype of the operands: as uint8, −3 is 253."""
        dtype = scalar_dtype(node) if type(arg) is int and op_name(node) not in _UNCONVERTED else None
        return self.value(arg if dtype is None else wrapped_number(arg, dtype))

    def _wrapped(self, node: Node, value: Value) -> Value:
        """An integer of less than 64 bits as torch computes it: modulo 2^bits, where its bound does not exclude an overflow."""
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if dtype not in _WRAPS or value.type not in INTS:
            return value
        if value.literal is not None:
            return constant(wrapped_number(int(value.literal), dtype))
        largest = bound_of(dtype) if op_name(node) in _CHOOSING else torch.iinfo(dtype).max  # −(−128) is −128 in int8
        unsigned = dtype is torch.uint8
        if value.bound <= largest and (value.nonneg or not unsigned):
            return value
        # ptxas compares −(−32768) of 16 bits as 32768: no 16-bit operation where a sum, difference or negation may wrap once.
        text = (_WRAP_ONCE if dtype is torch.int16 and value.bound <= 2**16 else _WRAPS[dtype]).format(value.text)
        return self.let(f"tl.cast({text}, tl.int32)", [value], type="int32", bound=bound_of(dtype), nonneg=unsigned)

    def _size(self, table: Node, dim: int) -> str:
        return f"extent(sizes, {self.first_size[self.captured[table]] + dim})"

    def offset(self, table: Node, indices: Sequence[Value], *, first: int = 0) -> Value:
        """The offset in a contiguous captured tensor of the element at these indices of the dims from `first` on."""
        wide = "int64" if self.options.big_tables else None
        offset: Value | None = None
        for i, index in enumerate(indices):
            size = self._size(table, first + i)
            at = f"tl.minimum({materialized(index).text}, {size} - 1)" if index.nonneg else f"wrap({materialized(index).text}, {size})"
            if wide or index.type == "int64":
                at += f".to(tl.{wide or 'int32'})"
            text = at if offset is None else f"{offset.text} * {size} + {at}"
            offset = self.let(text, [index, *([offset] if offset else [])], type=wide or "int32", bound=INT32_MAX)
        assert offset is not None
        return offset

    def load(self, table: Node, indices: Sequence[Any]) -> Value:
        """The element of a captured tensor at these indices."""
        number, dtype = self.captured[table], table.meta["val"].dtype
        type = type_of(dtype)
        known: dict[str, Any] = {"type": type, "bound": bound_of(dtype), "nonneg": dtype in (torch.uint8, torch.bool)}
        converted = " != 0" if dtype == torch.bool else "" if str(dtype) == f"torch.{type}" else f".to(tl.{type})"
        if number in self.options.hoisted:
            element = f"captured[{self._elements[number, tuple(indices)]}]"
            return self.let(element + converted, [], **known) if self.options.raw and converted else Value(text=element, **known)
        text, at = self.load_text(table, indices)
        return self.let(text + converted, [at] if at else [], **known)

    def load_text(self, table: Node, indices: Sequence[Any]) -> tuple[str, Value | None]:
        """The load of an element in the dtype of its tensor, and the part of its offset that varies over a tile."""
        place, at = f"captured[{self.captured[table]}]", None
        values = [self.value(i) for i in indices]
        # Leading indices that are uniform over a tile are added to the pointer, the others as unsigned offsets: two instructions fewer
        # per element.
        same = next((i for i, v in enumerate(values) if v.dims), len(values))
        if same and not self.options.big_tables:
            rest = "".join(f" * {self._size(table, i)}" for i in range(same, len(values)))
            place = f"({place} + {self.offset(table, values[:same]).text}{rest})"
            values = values[same:]
        if values:
            at = self.offset(table, values, first=len(indices) - len(values))
            place += f" + {at.text}" + ("" if self.options.big_tables else ".to(tl.uint32).to(tl.int64)")
        return f"{'load_direct' if self.options.direct and indices else 'tl.load'}({place})", at

    def as_tile(self, value: Value, like: str) -> str:
        text = self.text(value if value.literal is None else self.hold(materialized(value)), "float32")
        return text if value.dims == {"q", "kv"} else f"{text} + tl.zeros_like({like})"


def function_source(name: str, parameters: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    helpers = ", ".join(n for n in vars(library) if hasattr(getattr(library, n), "fn"))
    return (
        "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
        f"from {library.__name__} import {helpers}\n\n\n"
        f"@triton.jit\ndef {name}({parameters}):\n{body}\n"
    )


def program_source(program: Program, options: Options) -> str:
    """The source of the function of a mask or score program. Raises `Unsupported` with the operation's name."""
    emitter = Emitter(program.graph, options)
    emitter.run()
    result = emitter.value(program.result)
    if program.kind == "mask":
        if result.literal is not None:
            result = materialized(result)
        lines, inputs = [*emitter.lines, f"return {result.to('bool')}"], "b, h, q, kv"
    else:
        tile = emitter.as_tile(result, "score")
        lines, inputs = [*emitter.lines, f"return {tile}"], "score, b, h, q, kv"
    return function_source(f"{program.kind}_{program.key[:12]}", f"{inputs}, captured, sizes", lines)


def joint_source(program: Program, joint: Joint, needs: Sequence[bool], options: Options) -> str:
    """The source of the gradient function, which adds to the gradients of captured tensors that `needs` selects."""
    emitter = Emitter(joint.graph, options)
    emitter.run()
    output = next(n for n in reversed(joint.graph.nodes) if n.op == "output")
    d_score, d_reads, indices = output.args[0]  # type: ignore[misc]
    tables = list(emitter.captured)
    slot = {c: i for i, c in enumerate(c for c, need in enumerate(needs) if need)}
    for c, d_read, index in zip(joint.reads, d_reads, indices, strict=True):  # type: ignore[arg-type]
        grad = emitter.value(d_read)
        if c in slot and grad.literal != 0:
            at = emitter.offset(tables[c], [emitter.value(i) for i in index]) if index else None
            _scatter(emitter, grad, at, f"grads[{slot[c]}]")
    tile = emitter.as_tile(emitter.value(d_score), "grad")
    name = f"joint_{program.key[:12]}_{''.join(str(int(n)) for n in needs)}"
    return function_source(name, "grad, score, b, h, q, kv, valid, captured, sizes, grads", [*emitter.lines, f"return {tile}"])


def _scatter(e: Emitter, grad: Value, at: Value | None, target: str) -> None:
    """Emit an atomic addition of a tile's gradient, reduced first along every dim that the index does not depend on."""
    tile = e.hold(Value(text=f"tl.where(valid, {e.as_tile(grad, 'grad')}, 0.0)", type="float32"))
    dims = at.dims if at else frozenset()
    text, where, mask = tile.text, f"{target} + {at.text}" if at else target, ""
    if not dims:
        text = f"tl.sum(tl.sum({text}, axis=1), axis=0)"
    elif dims == {"q", "kv"}:
        mask = ", mask=valid"
    else:
        # As vectors: Gluon may replicate a tile of one row or column in registers, and atomics would add every replica.
        axis = 1 if "q" in dims else 0
        text, where = f"tl.sum({text}, axis={axis})", f"{target} + tl.sum({at.text}, axis={axis})"  # type: ignore[union-attr]
    e.lines.append(f'tl.atomic_add({where}, {text}{mask}, sem="relaxed")')


@lru_cache(maxsize=1024)
def loaded(source: str) -> Any:
    """The last function of a source. Registered with linecache, where `inspect`, and so Triton, reads the source."""
    name = source.rsplit("def ", 1)[1].split("(", 1)[0]
    filename = f"<longspan {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "longspan._kernels.gpu.generated"}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


class ByKey:
    """Cache key of a program: equal programs have equal keys, whatever object holds them."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByKey) and self.program.key == other.program.key

    def __hash__(self) -> int:
        return hash(self.program.key)


@lru_cache(maxsize=1024)
def _program_function(keyed: ByKey, options: Options) -> Any:
    return loaded(program_source(keyed.program, options))


class JointByKey(ByKey):
    """A program with its gradient. The gradient follows from the program, so the program's key stands for both."""

    def __init__(self, program: Program, joint: Joint | None) -> None:
        super().__init__(program)
        self.joint = joint


@lru_cache(maxsize=1024)
def _joint_function(keyed: JointByKey, needs: tuple[bool, ...], options: Options) -> Any:
    assert keyed.joint is not None
    return loaded(joint_source(keyed.program, keyed.joint, needs, options))


def program_function(program: Program, options: Options) -> Any:
    """The jit function of a mask or score program; the same object for equal programs."""
    return _program_function(ByKey(program), options)


def joint_function(program: Program, joint: Joint, needs: Sequence[bool], options: Options) -> Any:
    """The jit function of a score program's gradient."""
    return _joint_function(JointByKey(program, joint), tuple(needs), options)


def unsupported(program: Program | None, joint: Joint | None, options: Options) -> str | None:
    """The reason why a program cannot be compiled, or None."""
    if program is None:
        return None
    if not program.pointwise or (joint is not None and not joint.pointwise):
        return f"{program.kind}_mod {program.name!r} is not elementwise (it reduces, or makes vectors inside)"
    try:
        program_function(program, options)
        if joint is not None:
            joint_function(program, joint, [c.differentiable for c in program.captured], options)
    except Unsupported as error:
        return f"{program.kind}_mod {program.name!r} uses {error}, which the triton kernel does not compile"
    return None
