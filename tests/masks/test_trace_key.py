"""Names in code, operators and classes that keys of traces know, and values that guards compare."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._masks.trace_guard import MISSING, REMEMBERED_MASK, Reads, _holds, _pattern, _same, _same_defaults, has_attributes, metadata
from longspan._masks.trace_key import Unsure, _has_plain_operators, _is_library_function, _is_operator, _names_in, trace_key

TABLE = torch.zeros(3)


class Plain:
    size = 3

    def half(self) -> int:
        return self.size // 2


class Indexed:
    def __getitem__(self, i: int) -> int:
        return i


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __repr__(self) -> str:
        return "called"


class CallsAnother:
    __call__ = Called()


class Made:
    @classmethod
    def __class_getitem__(cls, item: Any) -> Any:
        return cls


@dataclass
class Fields:
    a: int = 1


@dataclass(order=True)
class Ordered:
    a: int = 1

    def __add__(self, other: Any) -> Any:
        return other


class Named:
    __slots_of_mine__ = 3


def test_classes_without_operators_of_their_own_are_plain() -> None:
    plain = [cls for cls in (object, torch.nn.Module, Plain, Called, Fields, Named) if _has_plain_operators(cls)]
    assert plain == [object, torch.nn.Module, Plain, Called, Fields, Named]
    assert not any(_has_plain_operators(cls) for cls in (Indexed, CallsAnother, Made, Ordered))


def test_operators_return_tensors_and_mutate_nothing() -> None:
    names = "add where exp full_like sum cumsum add_ _to_copy item empty empty_like data grad from_file size no_such_name is_floating_point"
    assert [name for name in names.split() if _is_operator(name)] == ["add", "where", "exp", "full_like", "sum", "cumsum"]


def test_functions_of_torch_and_math_are_known() -> None:
    known: list[Any] = [torch.where, torch.exp, math.sqrt, math.floor, torch.nn.functional.softplus, torch.nn.functional.relu]
    assert all(map(_is_library_function, known))
    other: list[Any] = [
        torch.empty,
        torch.is_grad_enabled,
        print,
        sorted,
        math.pi,
        test_operators_return_tensors_and_mutate_nothing,
        len,
        Plain,
    ]
    assert not any(map(_is_library_function, other))
    assert not _is_library_function(torch.nn.functional.scaled_dot_product_attention.__call__) and not _is_library_function([].append)


def _outer(x: Any) -> Any:
    def inner(y: Any) -> Any:
        return TABLE[y].float() + max(x.real, 3)

    return inner(x).exp()


def _imports(x: Any) -> Any:
    import math as other

    return other.pi * x


def _writes(x: Any) -> Any:
    x.value = 3
    return x


def _formats(x: Any) -> Any:
    return f"{x}"


def _formats_old(x: Any) -> Any:
    return "%s" % x  # noqa: UP031


def _formats_inside(x: Any) -> Any:
    return (lambda y: f"{y}")(x)


def _matches(x: Any) -> Any:
    match x:
        case int():
            return 1
    return 2


def _deletes(x: Any) -> Any:
    del x.value
    return x


def test_names_of_code_and_of_functions_in_it_are_collected() -> None:
    assert _names_in(_outer.__code__) == (("TABLE", "max"), ("exp", "float", "real"))
    functions: tuple[Callable[..., Any], ...] = (_imports, _writes, _formats, _formats_old, _formats_inside, _matches, _deletes)
    assert [_names_in(fn.__code__) for fn in functions] == [None] * len(functions)


def _key(fn: Any) -> Any:
    return trace_key(fn).key


def _with(value: Any) -> Callable[..., Any]:
    return lambda b, h, q, kv: q * value > kv


def test_keys_tell_numbers_of_other_types_and_signs_apart() -> None:
    values = [
        0,
        0.0,
        -0.0,
        False,
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        (1,),
        [1],
        (1.0,),
        {1: 1},
        {1: 1.0},
        range(3),
        torch.float32,
        (1, 1),
        ((1,), 1),
    ]
    keys = [_key(_with(value)) for value in values]
    assert len(set(keys)) == len(values)
    assert [_key(_with(value)) for value in values] == keys


def test_keys_tell_layouts_and_aliases_of_tensors_apart() -> None:
    table, other = torch.zeros(4, 6), torch.ones(4, 6)
    tensors: list[Any] = [
        table, table.T, table[:, :3], table[:3], table.double(), table[None], (table, table), (table, other), (other, table.clone(), table),
        (table, table.clone(), table), torch.nn.Parameter(table),
    ]  # fmt: skip
    keys = [_key(_with(tensor)) for tensor in tensors]
    assert keys[0] == keys[-1] and len(set(keys[:-1])) == len(keys) - 1
    assert _key(_with((table, other))) == _key(_with((other, table)))
    found = trace_key(_with((other, table, other)))
    assert [id(t) for t in found.tensors] == [id(other), id(table)]


@pytest.mark.parametrize(
    "value",
    [torch.zeros(3).to_sparse(), Indexed(), print, open, {1, 2}, functools.lru_cache(_outer), iter([1]), 1j],
    ids=lambda value: type(value).__name__,
)
def test_other_values_have_no_key(value: Any) -> None:
    with pytest.raises((Unsure, TypeError)):
        _key(_with(value))


def test_equal_values_are_one_object_or_numbers_and_strings_but_zero() -> None:
    wide = 10**20
    assert _same(wide, 10**20) and _same("ab", "".join(["a", "b"])) and _same(2.5, 5 / 2) and _same(None, None) and _same(TABLE, TABLE)
    assert not any(_same(a, b) for a, b in ((1, 1.0), (1, True), (0.0, -0.0), ((1,), (2,)), (1, 2), ([3], [3]), (None, 0)))
    assert _same_defaults(None, ()) and _same_defaults((1, "a"), (1, "a")) and _same_defaults((), None)
    assert not any(_same_defaults(a, b) for a, b in (((1,), None), (None, (1,)), ((1, 2), (1,)), ((1, 2), (1, 3)), ((2, 1), (3, 1))))


def test_tensors_are_numbered_by_their_first_occurrence() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    assert _pattern([a, b, a, c, b, c]) == (0, 1, 0, 2, 1, 2) and _pattern([]) == ()


def test_a_held_tensor_has_the_same_dtype_shape_strides_and_device() -> None:
    table = torch.zeros(4, 6)
    expected = ("tensor", metadata(table))
    assert metadata(table) == (torch.float32, (4, 6), (6, 1), torch.device("cpu"))
    read: list[Tensor] = []
    other = torch.ones(4, 6)
    assert _holds(other, expected, read) and len(read) == 1 and read[0] is other
    for wrong in (table.double(), table[:3], torch.zeros(6, 4).T, table.to_sparse(), 3, None):
        assert not _holds(wrong, expected, read)
    assert len(read) == 1
    plain = Plain()
    assert _holds(plain, ("ref", weakref.ref(plain)), read) and not _holds(Plain(), ("ref", weakref.ref(plain)), read)
    assert _holds(MISSING, ("same", MISSING), read) and not _holds(1, ("same", 2), read)


def test_the_remembered_mask_is_no_attribute_of_the_user() -> None:
    def fn() -> None: ...

    states = []
    for names in ((), (REMEMBERED_MASK,), (REMEMBERED_MASK, "other"), ("other",)):
        fn.__dict__.clear()
        fn.__dict__.update(dict.fromkeys(names, 1))
        states.append(has_attributes(fn))
    assert states == [False, False, True, True]


def test_reads_of_containers_defaults_and_bound_values_are_not_guarded() -> None:
    def guardable(read: Callable[[Reads], None]) -> bool:
        reads = Reads(_outer)
        read(reads)
        return reads.guardable

    def with_defaults(a: Any = 1, b: Any = None) -> None: ...
    def with_tensor(a: Any = TABLE) -> None: ...
    def with_keyword(*, a: int = 1) -> None: ...

    kind = type("Kind", (), {"number": 3, "dtype": torch.int8, "cls": Plain, "fn": _outer, "nothing": None, "names": [1], "table": TABLE})
    fixed = ("number", "dtype", "cls", "fn", "nothing", "absent")
    assert [guardable(lambda r, n=n: r.class_attribute(kind, n)) for n in fixed] == [True] * 6
    assert not guardable(lambda r: r.class_attribute(kind, "names"))
    assert guardable(lambda r: r.function(with_defaults, ()))
    assert not guardable(lambda r: r.function(with_tensor, ())) and not guardable(lambda r: r.function(with_keyword, ()))
    assert guardable(lambda r: r.function(_outer, ("TABLE", "max", "no_such_name")))
    assert not guardable(lambda r: r.visit(functools.partial(_outer)))
    assert not guardable(lambda r: r.visit(Plain().half)) and guardable(lambda r: r.visit([1]))
    assert not Reads(Plain()).guardable and Reads(_outer).guardable
    holder = Plain()
    holder.__dict__.update(number=3, names=[1], inner={"a": TABLE})
    assert guardable(lambda r: r.attribute(holder, None, "number")) and guardable(lambda r: r.attribute(holder, None, "absent"))
    assert guardable(lambda r: r.attribute(holder, "inner", "a")) and not guardable(lambda r: r.attribute(holder, None, "names"))
    assert not guardable(lambda r: r.attribute(holder, "no_such_dict", "a")) and not guardable(lambda r: r.attribute((1, 2), None, "a"))
