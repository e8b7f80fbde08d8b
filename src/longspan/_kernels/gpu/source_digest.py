"""A digest of a kernel's source with all that it calls, the same for every version of Triton and Python and on every machine.

Triton's own (`JITFunction.cache_key`) depends on line numbers, on its version, and on the order of modules in memory.

Covered: the text of each function, with decorators and comments, and every global name in its bytecode: longspan's functions, classes and
constants, attributes of longspan's modules, captured variables, default values. For names of `hopper.gluon_names`, which are other
functions in each version of Triton, the statements that define them. Not covered: Triton's library, which changes with Triton, not with
this package.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PACKAGE = __name__.removesuffix("._kernels.gpu.source_digest")  # not always `longspan`: the kernel hub loads it under other names
_GLUON_NAMES = "._kernels.hopper.gluon_names"
_ATTRIBUTE = "_longspan_source_digest"  # of a function, which stores it: a cache would have to hash the function, which Triton does slowly
_PLAIN = (bool, int, float, str, type(None), Enum)


class NoDigest(Exception):
    """A kernel refers to an object of a kind that has no text of its own, or to two functions of one name."""


class _Texts(dict[str, str]):
    """Texts by name, and the functions and classes of these names."""

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[str, Any] = {}

    def is_new(self, name: str, value: Any) -> bool:
        """Whether a function or class is to be added. Raises `NoDigest` if another one has its name, such as the same function with other
        captured variables.
        """
        if self._objects.setdefault(name, value) is not value:
            raise NoDigest(f"{name}: expected one function of this name")
        return name not in self


def source_digest(function: Any) -> str:
    """The digest of a `@triton.jit` or `@gluon.jit` function, computed once. Raises `NoDigest`."""
    known: str | None = vars(function).get(_ATTRIBUTE)
    if known is None:
        known = hashlib.sha256(repr(list(source_texts(function).items())).encode()).hexdigest()
        setattr(function, _ATTRIBUTE, known)
    return known


def source_texts(function: Any) -> dict[str, str]:
    """What the digest covers: texts by name, in the order of names."""
    texts = _Texts()
    _add(texts, function)
    own = _name(function)
    return {"": texts.pop(own), **dict(sorted(texts.items()))}


def encoded(value: Any) -> str:
    """A constant as text. Functions: their digest. Raises `NoDigest`."""
    if hasattr(value, "raw_src"):
        return source_digest(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(encoded, value))})"
    if isinstance(value, _PLAIN):
        return repr(value)
    kind = type(value)
    if kind.__module__.split(".")[0] == "triton" and kind.__name__ in ("constexpr", "dtype"):
        return encoded(value.value) if kind.__name__ == "constexpr" else str(value)
    raise NoDigest(f"{value!r}: expected a number, a string, a tuple or a function")


def _add(texts: _Texts, function: Any) -> None:
    """Add a function and all that it refers to."""
    name, plain = _name(function), _plain(function)
    if not texts.is_new(name, plain):
        return
    lines = function.raw_src if hasattr(function, "raw_src") else inspect.getsourcelines(function)[0]
    # Names of generated functions have a hash of their torch graph, which changes with torch where the source does not.
    texts[name] = "".join(lines).replace(plain.__name__, _stem(plain)).strip()
    names = set(_names(plain.__code__))
    captured = dict(zip(plain.__code__.co_freevars, (c.cell_contents for c in plain.__closure__ or ()), strict=True))
    for reference in sorted(names):
        if reference in captured or reference in plain.__globals__:
            value = captured.get(reference, plain.__globals__.get(reference))
            _add_value(texts, f"{name}:{reference}", value, names)
    for i, value in enumerate((*(plain.__defaults__ or ()), *sorted((plain.__kwdefaults__ or {}).items()))):
        _add_value(texts, f"{name}={i}", value, names)


def _add_value(texts: _Texts, name: str, value: Any, names: Iterable[str]) -> None:
    """Add a value that a function refers to by `name`. names: those in its bytecode, some of them attributes of modules."""
    if isinstance(value, ModuleType):
        texts[name] = f"module {value.__name__.removeprefix(_PACKAGE)}"
        for attribute in sorted(set(names) & set(vars(value))) if _is_ours(value.__name__) else ():
            _add_value(texts, f"{value.__name__.removeprefix(_PACKAGE)}.{attribute}", getattr(value, attribute), names)
    elif isinstance(value, type):
        texts[name] = f"class {value.__qualname__}"
        if _is_ours(value.__module__):
            texts[name] = f"class {_class_name(value)}"
            _add_class(texts, value)
    elif hasattr(value, "raw_src") or isinstance(value, FunctionType):
        named = name.rsplit(":", 1)[-1]
        if _gluon_names().get(named) is value:
            texts[name], texts[f"{_GLUON_NAMES}.{named}"] = f"function {_GLUON_NAMES}.{named}", _definitions()[named]
        elif _is_ours(_plain(value).__module__):
            texts[name] = f"function {_name(value)}"
            _add(texts, value)
        else:
            texts[name] = f"function {_plain(value).__qualname__}"
    else:
        texts[name] = encoded(value)


def _gluon_names() -> dict[str, Any]:
    """The names of `hopper.gluon_names`, if a Gluon kernel was imported."""
    module = sys.modules.get(_PACKAGE + _GLUON_NAMES)
    return {} if module is None else vars(module)


@cache
def _definitions() -> dict[str, str]:
    """By name, the statements of `hopper.gluon_names` that bind it, and all of its helper functions."""
    text = inspect.getsource(sys.modules[_PACKAGE + _GLUON_NAMES])
    helpers, bound = "", defaultdict[str, str](str)
    for statement in ast.parse(text).body:
        lines = ast.get_source_segment(text, statement) or ""
        if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
            helpers += lines
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef):
                bound[node.name] += lines
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] += lines
    return {name: helpers + lines for name, lines in bound.items()}


def _add_class(texts: _Texts, cls: type) -> None:
    """Add a class: its annotated fields, its defaults, its functions."""
    name = _class_name(cls)
    if not texts.is_new(name, cls):
        return
    fields = vars(cls).get("__annotations__", {})
    texts[name] = repr([(field, str(getattr(kind, "__forward_arg__", kind))) for field, kind in fields.items()])
    for attribute, value in sorted(vars(cls).items()):
        function = value.fget if isinstance(value, property) else value
        if hasattr(function, "raw_src") or (isinstance(function, FunctionType) and function.__module__ == cls.__module__):
            _add(texts, function)
        elif attribute == "_field_defaults":
            texts[f"{name}={attribute}"] = encoded(tuple(value.items()))


def _names(code: CodeType) -> Iterator[str]:
    """All names of globals, attributes and captured variables in a function's bytecode, nested functions included."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_ours(module: str | None) -> bool:
    return module is not None and f"{module}.".startswith(f"{_PACKAGE}.")


def _class_name(cls: type) -> str:
    return f"{cls.__module__.removeprefix(_PACKAGE)}.{cls.__qualname__}"


def _plain(function: Any) -> Any:
    """The Python function that a jit function or a decorator wraps."""
    return inspect.unwrap(getattr(function, "fn", function))


def _name(function: Any) -> str:
    plain = _plain(function)
    return f"{plain.__module__.removeprefix(_PACKAGE)}.{plain.__qualname__.replace(plain.__name__, _stem(plain))}"


def _stem(plain: Any) -> str:
    """The name of a function; of a generated one, without the hash of its graph."""
    return plain.__name__.split("_")[0] if plain.__module__.endswith(".generated") else plain.__name__
