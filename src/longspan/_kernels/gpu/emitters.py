"""Triton source of each aten operation: `EMITTERS[name](emitter, node, args)` returns its value. args: `Value`s or plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from longspan._kernels.gpu.typed_values import FLOATS, INT32_MAX, INTS, Unsupported, Value, constant, materialized, type_of

if TYPE_CHECKING:
    from longspan._kernels.gpu.codegen import Emitter

Emit = Callable[["Emitter", Node, list[Any]], Value]
EMITTERS: dict[str, Emit] = {}

_UNARY_FLOAT = {
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log10": "tl.log2({0}) * 0.30102999566398120",
    "log1p": "log1p({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tan": "tl.sin({0}) / tl.cos({0})",
    "sinh": "sinh({0})",
    "cosh": "cosh({0})",
    "asinh": "asinh({0})",
    "acosh": "acosh({0})",
    "atanh": "0.5 * (log1p({0}) - log1p(-{0}))",
    "sigmoid": "sigmoid({0})",
    "tanh": "tanh({0})",
    "silu": "{0} * sigmoid({0})",
    "erf": "tl.erf({0})",
    "erfc": "erfc({0})",
    "hypot": "hypot({0}, {1})",
    "logaddexp": "logaddexp({0}, {1})",
    "logaddexp2": "logaddexp2({0}, {1})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "sigmoid_backward": "{0} * {1} * (1.0 - {1})",
    "silu_backward": "silu_grad({0}, {1})",
    "lerp": "lerp({0}, {1}, {2})",
    "copysign": "tl.where({1} < 0, -tl.abs({0}), tl.abs({0}))",
}
# Forms for `exact_values.decisive` nodes: Triton's default quotients and roots differ in the last bit, its 2 ** x is 0 below 2⁻¹²⁶.
_ROUNDED = {
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "rsqrt_subnormal({0})",
    "exp2": "exp2_subnormal({0})",
}
# Forms for such nodes on GPUs: the functions of CUDA's libdevice, which torch's kernels call too. erf, erfc, asinh, acosh, hypot,
# logaddexp, logaddexp2, lerp, gelu and powers have no such form: they differ from torch's in the last bits.
_FROM_LIBRARY = {
    **{name: f"libdevice.{name}({{0}})" for name in ("exp", "log10", "cosh")},
    **{name: f"keep_subnormals({{0}}, libdevice.{name}({{0}}))" for name in "expm1 log1p sin tan sinh tanh atanh".split()},
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
    "silu": "tl.div_rn({0}, 1.0 + libdevice.exp(-{0}))",
}
_ROUNDING = {"floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "truncate({0})", "round": "round_even({0})"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "__and__": "&", "__or__": "|", "__xor__": "^"}
_EXTREME = {"minimum": "tl.minimum", "maximum": "tl.maximum", "fmin": "tl.minimum", "fmax": "tl.maximum"}


def emits(*names: str) -> Callable[[Emit], Emit]:
    def register(fn: Emit) -> Emit:
        EMITTERS.update(dict.fromkeys(names, fn))
        return fn

    return register


def result_type(node: Node) -> str:
    return type_of(node.meta["val"].dtype)


def common(values: list[Value]) -> str:
    """The type in which operands of these types are compared or added: the widest float, else the widest integer."""
    types = {v.type for v in values}
    return next((type for type in ("float64", "float32", "int64") if type in types), "int32")


def _apply(e: Emitter, template: str, values: list[Value], type: str, **known: Any) -> Value:
    """The value of a line of source over operands converted to one type. `known`: properties of the result."""
    if all(v.literal is not None for v in values):
        values = [e.hold(materialized(values[0])), *values[1:]]
    return e.let(template.format(*(e.text(v, type) for v in values)), values, type=known.pop("out", type), **known)


def _no(node: Node, what: str) -> Unsupported:
    return Unsupported(f"{node.target} {what}")


def _float_op(name: str) -> Emit:
    def emit(e: Emitter, node: Node, args: list[Any]) -> Value:
        type = result_type(node)
        if type not in FLOATS:
            raise _no(node, "on integers")
        return _apply(e, _form(e, name, exact=_decides(e, node, type)), [a for a in args if isinstance(a, Value)], type)

    return emit


def _form(e: Emitter, name: str, *, exact: bool) -> str:
    """The source of a function of floating-point numbers. exact: with the bits of torch's."""
    if exact and not e.options.interpreted and name in _FROM_LIBRARY:
        return _FROM_LIBRARY[name]
    return (_ROUNDED if exact and name in _ROUNDED else _UNARY_FLOAT)[name]


def _decides(e: Emitter, node: Node, type: str) -> bool:
    """Whether a float32 value must equal torch's to the last bit. In float64, quotients and roots are rounded as torch does."""
    return type == "float32" and node in e.decisive


EMITTERS.update({name: _float_op(name) for name in _UNARY_FLOAT})


def _integer(e: Emitter, template: str, values: list[Value], bound: int, *, nonneg: bool = False, floated: bool = False) -> Value:
    """Integer arithmetic, in 32 bits if `bound` fits, else in 64, where it may wrap."""
    nonneg = nonneg and bound < 2**63
    type = "int64" if bound > INT32_MAX or common(values) == "int64" else "int32"
    return _apply(e, template, values, type, bound=bound, nonneg=nonneg, floated=(template, tuple(values)) if floated else None)


def _scaled(e: Emitter, node: Node, value: Value, alpha: Any) -> Value:
    return value if alpha == 1 else _multiply(e, node, [value, constant(alpha)])


@emits("add", "sub", "rsub")
def _add(e: Emitter, node: Node, args: list[Any]) -> Value:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    a, b, *more = args
    if name == "rsub":
        a, b = b, a
    alpha = more[0].literal if more else node.kwargs.get("alpha", 1)
    b = _scaled(e, node, b, alpha)
    sign = "+" if name == "add" else "-"
    type = result_type(node)
    if type in FLOATS:
        return _apply(e, f"{{0}} {sign} {{1}}", [a, b], type)
    if type == "bool":
        return _apply(e, "{0} | {1}", [a, b], "bool")
    bound, nonneg = a.bound + b.bound, name == "add" and a.nonneg and b.nonneg
    return _integer(e, f"{{0}} {sign} {{1}}", [a, b], bound, nonneg=nonneg, floated=True)


def _multiply(e: Emitter, node: Node, values: list[Value]) -> Value:
    type = result_type(node)
    if type in FLOATS:
        # A fused multiply-add rounds once where torch rounds twice.
        unfused = _decides(e, node, type) and not e.options.interpreted
        return _apply(e, "mul_rn({0}, {1})" if unfused else "{0} * {1}", values, type)
    if type == "bool":
        return _apply(e, "{0} & {1}", values, "bool")
    a, b = values
    return _integer(e, "{0} * {1}", values, a.bound * b.bound, nonneg=a.nonneg and b.nonneg)


@emits("mul")
def _mul(e: Emitter, node: Node, args: list[Any]) -> Value:
    return _multiply(e, node, args)


def _quotient(type: str, *, rounded: bool) -> str:
    return "tl.div_rn({0}, {1})" if rounded and type == "float32" else "{0} / {1}"


def _divide(e: Emitter, node: Node, a: Value, b: Value, type: str) -> Value:
    rounded = _decides(e, node, type)
    if b.literal is not None and b.literal != 0 and math.isfinite(b.literal):
        exact = math.frexp(float(b.literal))[0] in (0.5, -0.5)
        if exact or (e.options.fast and not rounded):
            return _apply(e, "{0} * {1}", [a, constant(1.0 / float(b.literal))], type)
    return _apply(e, _quotient(type, rounded=rounded), [a, b], type)


@emits("div", "floor_divide")
def _div(e: Emitter, node: Node, args: list[Any]) -> Value:
    a, b = args
    floor = node.target.overloadpacket.__name__ == "floor_divide"  # type: ignore[union-attr]
    mode = "floor" if floor else node.kwargs.get("rounding_mode")
    type = result_type(node)
    if type in FLOATS:
        if mode is None:
            return _divide(e, node, a, b, type)
        if mode == "floor":
            return _apply(e, "floor_quotient({0}, {1})", [a, b], type)
        return _apply(e, _ROUNDING[str(mode)], [_apply(e, _quotient(type, rounded=True), [a, b], type)], type)
    if mode == "trunc" and not (a.nonneg and b.nonneg):
        return _integer(e, "trunc_div({0}, {1})", [a, b], a.bound)
    return _floor_div(e, a, b)


def _power_of_two(value: Value) -> int | None:
    literal = value.literal
    return literal.bit_length() - 1 if type(literal) is int and literal > 0 and literal & (literal - 1) == 0 else None


def _floor_div(e: Emitter, a: Value, b: Value) -> Value:
    nonneg = a.nonneg and b.nonneg
    if (shift := _power_of_two(b)) is not None:
        return _integer(e, f"{{0}} >> {shift}", [a], a.bound, nonneg=a.nonneg)
    return _integer(e, "{0} // {1}" if nonneg else "floor_div({0}, {1})", [a, b], a.bound, nonneg=nonneg)


@emits("remainder", "fmod")
def _remainder(e: Emitter, node: Node, args: list[Any]) -> Value:
    a, b = args
    floor = node.target.overloadpacket.__name__ == "remainder"  # type: ignore[union-attr]
    type = result_type(node)
    if type in FLOATS:
        return _apply(e, "remainder({0}, {1})" if floor else "fmod({0}, {1})", [a, b], type)
    if floor and _power_of_two(b) is not None:
        return _integer(e, f"{{0}} & {b.literal - 1}", [a], b.bound, nonneg=True)
    if a.nonneg and b.nonneg:
        return _integer(e, "{0} % {1}", [a, b], b.bound, nonneg=True)
    return _integer(e, f"{{0}} - {'floor' if floor else 'trunc'}_div({{0}}, {{1}}) * {{1}}", [a, b], b.bound, nonneg=floor and b.nonneg)


@emits("neg", "abs", "square")
def _same_sign_ops(e: Emitter, node: Node, args: list[Any]) -> Value:
    name, a, type = node.target.overloadpacket.__name__, args[0], result_type(node)  # type: ignore[union-attr]
    template = {"neg": "-{0}", "abs": "tl.abs({0})", "square": "{0} * {0}"}[name]
    if type in FLOATS:
        return _apply(e, template, [a], type)
    bound = a.bound**2 if name == "square" else a.bound
    return _integer(e, template, [a], bound, nonneg=name != "neg", floated=name != "square")


@emits("pow")
def _pow(e: Emitter, node: Node, args: list[Any]) -> Value:
    base, exponent = args
    type = result_type(node)
    n = exponent.literal
    if n is not None and float(n).is_integer() and 0 < n <= 8:
        template = " * ".join(["{0}"] * int(n))
        return (
            _apply(e, template, [base], type) if type in FLOATS else _integer(e, template, [base], base.bound ** int(n), nonneg=base.nonneg)
        )
    if type not in FLOATS:
        raise _no(node, "of integers with this exponent")
    exact = _decides(e, node, type)
    functions = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if n is not None and float(n) in functions:
        return _apply(e, _form(e, functions[float(n)], exact=exact), [base], type)
    products = {-2.0: "1.0 / ({0} * {0})", 0.0: "{0} * 0.0 + 1.0"}
    if n is not None and float(n) in products:
        return _apply(e, products[float(n)], [base], type)
    if base.literal is not None and base.literal > 0:
        return _apply(e, _form(e, "exp2", exact=exact).format(f"{{0}} * {math.log2(base.literal)!r}"), [exponent], type)
    return _apply(e, "power({0}, {1})", [base, exponent], type)


@emits("tanh")
def _tanh(e: Emitter, node: Node, args: list[Any]) -> Value:
    type = result_type(node)
    fast = e.options.fast and not e.options.interpreted and type == "float32" and node not in e.decisive
    return _apply(e, "tanh_fast({0})" if fast else _form(e, "tanh", exact=_decides(e, node, type)), args, type)


@emits("floor", "ceil", "trunc", "round", "frac")
def _round(e: Emitter, node: Node, args: list[Any]) -> Value:
    name, type = node.target.overloadpacket.__name__, result_type(node)  # type: ignore[union-attr]
    if type in INTS:
        return args[0]
    if node.kwargs.get("decimals"):
        raise _no(node, "with decimals")
    return _apply(e, "{0} - truncate({0})" if name == "frac" else _ROUNDING[name], args, type)


@emits("sgn", "sign")
def _sign(e: Emitter, node: Node, args: list[Any]) -> Value:
    return _apply(e, "sign({0})", args, result_type(node), bound=1)


@emits(*_EXTREME)
def _extreme(e: Emitter, node: Node, args: list[Any]) -> Value:
    name, type = node.target.overloadpacket.__name__, result_type(node)  # type: ignore[union-attr]
    return _pick(e, name, args[0], args[1], type)


def _pick(e: Emitter, name: str, a: Value, b: Value, type: str) -> Value:
    if type in FLOATS:
        nan = ", propagate_nan=tl.PropagateNan.ALL" if name in ("minimum", "maximum") else ""
        return _apply(e, f"{_EXTREME[name]}({{0}}, {{1}}{nan})", [a, b], type)
    nonneg = (a.nonneg or b.nonneg) if "max" in name else (a.nonneg and b.nonneg)
    return _integer(e, f"{_EXTREME[name]}({{0}}, {{1}})", [a, b], max(a.bound, b.bound), nonneg=nonneg)


def _completed(args: list[Any], *defaults: float) -> list[Any]:
    """An operand and its settings, of which torch leaves out the last ones if they have their defaults."""
    return [*args, *map(constant, defaults[len(args) - 1 :])]


@emits("clamp", "clamp_min", "clamp_max", "hardtanh", "relu")
def _clamp(e: Emitter, node: Node, args: list[Any]) -> Value:
    name, type = node.target.overloadpacket.__name__, result_type(node)  # type: ignore[union-attr]
    if name == "relu":
        low, high = constant(0), None
    elif name == "clamp_max":
        low, high = None, args[1]
    elif name == "hardtanh":
        _, low, high = _completed(args, -1.0, 1.0)
    else:
        low, high = args[1], args[2] if len(args) > 2 else None
    out = args[0]
    if low is not None:
        out = _pick(e, "maximum", out, low, type)
    return out if high is None else _pick(e, "minimum", out, high, type)


@emits(*_COMPARE)
def _compare(e: Emitter, node: Node, args: list[Any]) -> Value:
    sign = _COMPARE[node.target.overloadpacket.__name__]  # type: ignore[union-attr]
    return _apply(e, f"{{0}} {sign} {{1}}", args, common(args), out="bool")


@emits(*_LOGIC)
def _logic(e: Emitter, node: Node, args: list[Any]) -> Value:
    return _apply(e, f"{{0}} {_LOGIC[node.target.overloadpacket.__name__]} {{1}}", args, "bool")  # type: ignore[union-attr]


@emits("logical_not", "bitwise_not")
def _not(e: Emitter, node: Node, args: list[Any]) -> Value:
    if result_type(node) == "bool":
        return _apply(e, "{0} == 0", args, common(args), out="bool")
    return _integer(e, "-1 - {0}", args, args[0].bound + 1)


@emits(*_BITS)
def _bits(e: Emitter, node: Node, args: list[Any]) -> Value:
    name, type = node.target.overloadpacket.__name__, result_type(node)  # type: ignore[union-attr]
    template = f"{{0}} {_BITS[name]} {{1}}"
    if type == "bool":
        return _apply(e, template, args, "bool")
    a, b = args
    bound = (1 << max(a.bound.bit_length(), b.bound.bit_length())) - 1
    return _integer(e, template, [a, b], bound, nonneg=a.nonneg and b.nonneg)


@emits("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
def _shift(e: Emitter, node: Node, args: list[Any]) -> Value:
    """A shift. By less than 0 or more than the width, torch shifts everything out; on a GPU the result is undefined."""
    a, b = args
    known = type(b.literal) is int
    if "left" in str(node.target) or "lshift" in str(node.target):
        if not known:
            return _integer(e, "tl.where(({1} < 0) | ({1} > 63), 0, {0} << ({1} & 63))", [a, b], 2**63)
        outside = not 0 <= b.literal < 64
        return _integer(
            e, "{0} * 0" if outside else f"{{0}} << {b.literal}", [a], 0 if outside else max(1, a.bound) << b.literal, nonneg=a.nonneg
        )
    most = 63 if a.bound > INT32_MAX or common([a, b]) == "int64" else 31
    if not known:
        return _integer(e, f"{{0}} >> tl.where(({{1}} < 0) | ({{1}} > {most}), {most}, {{1}})", [a, b], a.bound, nonneg=a.nonneg)
    return _integer(e, f"{{0}} >> {b.literal if 0 <= b.literal < most else most}", [a], a.bound, nonneg=a.nonneg)


@emits("isnan", "isinf", "isfinite", "signbit")
def _classify(e: Emitter, node: Node, args: list[Any]) -> Value:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    templates = {
        "isnan": "{0} != {0}",
        "isinf": 'tl.abs({0}) == float("inf")',
        "isfinite": 'tl.abs({0}) < float("inf")',
        "signbit": "{0} < 0",
    }
    type = args[0].type if args[0].type in FLOATS else "float32"
    return _apply(e, templates[name], args, type, out="bool")


def _choose(e: Emitter, condition: Value, a: Value, b: Value, type: str) -> Value:
    condition = e.hold(materialized(condition)) if condition.literal is not None else condition
    if type in INTS:
        type = common([a, b])
    text = f"tl.where({e.text(condition, 'bool')}, {e.text(a, type)}, {e.text(b, type)})"
    return e.let(text, [condition, a, b], type=type, bound=max(a.bound, b.bound), nonneg=a.nonneg and b.nonneg)


@emits("where")
def _where(e: Emitter, node: Node, args: list[Any]) -> Value:
    return _choose(e, args[0], args[1], args[2], result_type(node))


@emits("masked_fill")
def _masked_fill(e: Emitter, node: Node, args: list[Any]) -> Value:
    return _choose(e, args[1], args[2], args[0], result_type(node))


@emits("addcmul", "addcdiv")
def _addc(e: Emitter, node: Node, args: list[Any]) -> Value:
    type, scale = result_type(node), float(node.kwargs.get("value", 1))  # type: ignore[arg-type]
    part = "{1} * {2}" if "mul" in str(node.target) else "tl.div_rn({1}, {2})" if _decides(e, node, type) else "{1} / {2}"
    return _apply(e, f"{{0}} + {scale!r} * ({part})", args, type)


@emits("_to_copy", "clone", "detach", "alias", "lift_fresh_copy")
def _copy(e: Emitter, node: Node, args: list[Any]) -> Value:
    """A conversion. Widening ones keep the value; one to 16 bits rounds."""
    dtype = node.meta["val"].dtype
    type, a = type_of(dtype), args[0]
    if type in INTS and a.type in (*INTS, "bool"):
        return a if a.type in INTS else _integer(e, "{0}", [a], 1, nonneg=True)
    name = str(dtype).removeprefix("torch.")
    if name in ("bfloat16", "float16") and a.literal is None:
        return e.let(f"{e.text(a, 'float32')}.to(tl.{name}).to(tl.float32)", [a], type="float32")
    if type in INTS and a.literal is None:
        return e.let(f"{a.text}.to(tl.{type})", [a], type=type, bound=INT32_MAX if type == "int32" else 2**63)
    return _apply(e, "{0}", [a], type, bound=a.bound)


@emits("zeros_like", "ones_like", "full_like", "empty_like", "fill")
def _filled(e: Emitter, node: Node, args: list[Any]) -> Value:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    number = {"zeros_like": 0, "ones_like": 1, "empty_like": 0}.get(name)
    return e.value(args[1].literal if number is None else float(number) if result_type(node) in FLOATS else number)


@emits("leaky_relu")
def _leaky(e: Emitter, node: Node, args: list[Any]) -> Value:
    return _apply(e, "tl.where({0} > 0, {0}, {0} * {1})", _completed(args, 0.01), result_type(node))


@emits("softplus", "gelu", "threshold_backward", "leaky_relu_backward", "hardtanh_backward", "gelu_backward", "softplus_backward")
def _activation(e: Emitter, node: Node, args: list[Any]) -> Value:
    name, type = node.target.overloadpacket.__name__, result_type(node)  # type: ignore[union-attr]
    if "gelu" in name:
        stem = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
        return _apply(e, f"{stem}({{0}})" if name == "gelu" else f"{stem}_grad({{0}}, {{1}})", args, type)
    if name == "softplus":
        return _apply(e, "softplus({0}, {1}, {2})", _completed(args, 1.0, 20.0), type)
    template = {
        "threshold_backward": "tl.where({1} > {2}, {0}, 0.0)",
        "leaky_relu_backward": "tl.where({1} > 0, {0}, {0} * {2})",
        "hardtanh_backward": "tl.where(({1} > {2}) & ({1} < {3}), {0}, 0.0)",
        "softplus_backward": "tl.where({1} * {2} > {3}, {0}, {0} * sigmoid({1} * {2}))",
    }[name]
    return _apply(e, template, args, type)
