"""A trace is reused only where nothing that the mod reads has changed."""

from __future__ import annotations

import enum
import functools
import operator
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks

import longspan as ls
from longspan._masks.trace_cache import TraceCache
from longspan._masks.tracing import trace

WINDOW = 3


class Config:
    cap = 4.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2))
        self.config = types.SimpleNamespace(window=5)

    def mod(self):  # type: ignore[no-untyped-def]
        return lambda s, b, h, q, kv: self.adjusted(s, h) + self.config.window

    def adjusted(self, score: Tensor, h: Tensor) -> Tensor:
        return score * Config.cap + self.bias[h]


def traced_twice(cache: TraceCache, first, second) -> bool:  # type: ignore[no-untyped-def]
    before = cache.hits
    a = cache.trace(first, "score", score_dtype=torch.float32)
    b = cache.trace(second, "score", score_dtype=torch.float32)
    assert b.program.key == trace(second, "score").program.key, "a hit must be what a fresh trace gives"
    assert all(x is y for x, y in zip(b.sources, trace(second, "score").sources, strict=True))
    del a
    return cache.hits > before


def test_a_closure_made_anew_over_other_tensors_hits_and_is_bound_to_them() -> None:
    make = lambda t: lambda s, b, h, q, kv: s + t[h] * 2
    assert traced_twice(TraceCache(), make(torch.randn(3)), make(torch.randn(3)))


def test_a_tensor_of_another_shape_or_a_changed_number_misses() -> None:
    make = lambda t, n: lambda s, b, h, q, kv: s + t[h] * n + t.shape[0]
    t = torch.randn(3)
    assert not traced_twice(TraceCache(), make(t, 2), make(torch.randn(4), 2))
    assert not traced_twice(TraceCache(), make(t, 2), make(t, 3))
    assert not traced_twice(TraceCache(), make(t, 1), make(t, True))


def test_changes_behind_attributes_globals_classes_and_methods_are_noticed() -> None:
    global WINDOW
    model, cache = Model(), TraceCache()
    assert traced_twice(cache, model.mod(), model.mod())
    model.config.window = 6
    assert not traced_twice(cache, lambda s, b, h, q, kv: s, model.mod())
    Config.cap = 5.0
    assert not traced_twice(cache, lambda s, b, h, q, kv: s, model.mod())
    model.bias = nn.Parameter(torch.randn(2))
    assert traced_twice(cache, model.mod(), model.mod())
    by_global = lambda s, b, h, q, kv: torch.where(q - kv < WINDOW, s, -torch.inf)
    cache.trace(by_global, "score", score_dtype=torch.float32)
    WINDOW = 4
    before = cache.hits
    cache.trace(by_global, "score", score_dtype=torch.float32)
    assert cache.hits == before


def test_what_the_walk_does_not_understand_is_traced_every_time() -> None:
    names = {"n": 2}
    mod = lambda s, b, h, q, kv: s * getattr(types.SimpleNamespace(**names), "n")  # noqa: B009
    assert not traced_twice(TraceCache(), mod, mod)


def test_a_mod_that_calls_a_module_is_traced_every_time() -> None:
    scale = nn.Hardtanh()
    mod = lambda s, b, h, q, kv: scale(s)
    assert not traced_twice(TraceCache(), mod, mod)


def test_masks_are_kept_too() -> None:
    cache = TraceCache()
    for seed in range(3):
        mask = ls.causal() & ls.documents(ids=torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(seed)).sort().values)
        traced = cache.trace(mask, "mask", score_dtype=torch.float32)
        assert traced.sources[0] is mask.b.first
    assert cache.hits == 2
    assert ls.sliding_window(3).traced.program.key != ls.sliding_window(4).traced.program.key


def test_the_cache_is_bounded() -> None:
    cache = TraceCache(size=2)
    for n in range(5):
        cache.trace(lambda s, b, h, q, kv, n=n: s * n, "score", score_dtype=torch.float32)
    assert len(cache._entries) == 2


def test_threads_may_call_the_operator_at_once() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    scales = [1.0, 2.0, 3.0, 4.0]

    def call(scale: float) -> Tensor:
        return ls.attention(q, k, v, mask=ls.sliding_window(int(scale)), score_mod=lambda s, b, h, i, j: s * scale)

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(call, scales * 3))
    for scale, out in zip(scales * 3, got, strict=True):
        torch.testing.assert_close(out, ls.attention(q, k, v, mask=ls.sliding_window(int(scale)), scale=scale * 8**-0.5))


class Indexed:
    """Read through an operator alone."""

    def __init__(self, held: float) -> None:
        self._held = held

    def __getitem__(self, i: int) -> float:
        return self._held


class Scaled(int):
    factor = 2


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Pair(NamedTuple):
    a: float
    b: float


@dataclass(frozen=True)
class Settings:
    window: int
    cap: float = 3.0


class Bounded:
    def __init__(self, held: float) -> None:
        self._held = held

    @property
    def limit(self) -> float:
        return self._held * 2


def with_two_helpers(a: float, b: float) -> Any:
    def f(x: Tensor, by: float = a) -> Tensor:
        return x * by

    def g(x: Tensor, by: float = b) -> Tensor:
        return x * by

    return lambda s, b_, h, q, kv: g(f(s))


def attributed(k: float) -> Any:
    def helper(x: Tensor) -> Tensor:
        return x * helper.k  # type: ignore[attr-defined]

    helper.k = k  # type: ignore[attr-defined]
    return lambda s, b, h, q, kv: helper(s)


def cached(value: float) -> Any:
    held = functools.cache(lambda: value)
    return lambda s, b, h, q, kv: s * held()


def by_string(value: float) -> Any:
    get, held = operator.attrgetter("n"), types.SimpleNamespace(n=value)
    return lambda s, b, h, q, kv: s * get(held)


def containing(held: Any) -> nn.Module:
    module = nn.Module()
    module.parts = nn.ModuleList([nn.Module()])
    module.parts[0].window = held
    return module


def by_number(value: Any) -> Any:
    return lambda s, b, h, q, kv: s * value


# Makers of mods that differ in the value they are given alone, and two values.
READERS: dict[str, tuple[Any, Any, Any]] = {
    "numpy scalar": (by_number, np.float32(2), np.float32(3)),
    "numpy scalar of another dtype": (by_number, np.float32(2), np.float16(2)),
    "numpy integer": (by_number, np.int64(5), np.int64(17)),
    "numpy array": (lambda v: lambda s, b, h, q, kv: s * float(v[0]), np.array([2.0]), np.array([3.0])),
    "array of objects": (lambda v: lambda s, b, h, q, kv: s * v[0], np.array([2.0], dtype=object), np.array([3.0], dtype=object)),
    "set": (lambda v: lambda s, b, h, q, kv: s * 2 if "x" in v else s, {"y"}, {"x"}),
    "frozenset": (lambda v: lambda s, b, h, q, kv: s * 2 if 3 in v else s, frozenset({4}), frozenset({3})),
    "operator of an object": (lambda v: lambda s, b, h, q, kv: s * v[0], Indexed(2.0), Indexed(4.0)),
    "defaults of two helpers": (lambda v: with_two_helpers(2.0, v), 3.0, 5.0),
    "attribute of a function": (attributed, 2.0, 3.0),
    "bound method of a dict": (lambda v: lambda s, b, h, q, kv, get={"n": v}.get: s * get("n"), 2.0, 3.0),
    "slice": (lambda v: lambda s, b, h, q, kv: s * v.stop, slice(2), slice(3)),
    "complex zero": (lambda v: lambda s, b, h, q, kv: s * (-1.0 if str(v)[1] == "-" else 1.0), complex(0.0, 0.0), complex(-0.0, 0.0)),
    "subclass of int": (lambda v: lambda s, b, h, q, kv: s * v.factor, Scaled(1), type("Other", (Scaled,), {"factor": 3})(1)),
    "enum": (lambda v: lambda s, b, h, q, kv: s * v.value, Mode.ONE, Mode.TWO),
    "identity": (lambda v: lambda s, b, h, q, kv: s * 2 if v is Mode.ONE else s, Mode.ONE, Mode.TWO),
    "named tuple": (lambda v: lambda s, b, h, q, kv: s * v.b, Pair(1.0, 2.0), Pair(1.0, 3.0)),
    "dataclass by equality": (lambda v: lambda s, b, h, q, kv: s * 2 if v == Settings(5) else s, Settings(5), Settings(6)),
    "field of a dataclass": (lambda v: lambda s, b, h, q, kv: s * v.window, Settings(5), Settings(6)),
    "property": (lambda v: lambda s, b, h, q, kv: s * v.limit, Bounded(2.0), Bounded(3.0)),
    "text of an object": (lambda v: lambda s, b, h, q, kv: s * len(f"{v}"), Settings(5), Settings(50)),
    "values of a tensor": (lambda v: lambda s, b, h, q, kv: s * v.tolist()[0], torch.tensor([2.0]), torch.tensor([3.0])),
    "attribute of a tensor": (lambda v: lambda s, b, h, q, kv: s + v[h] * v.by, torch.ones(3), torch.ones(3)),
    "cached function": (cached, 2.0, 3.0),
    "attribute by a string": (by_string, 2.0, 3.0),
    "module in a container": (lambda v: lambda s, b, h, q, kv: s * v.parts[0].window, containing(2.0), containing(3.0)),
    "method of a module": (lambda v: lambda s, b, h, q, kv: v.forward(s), nn.Hardtanh(-2.0, 2.0), nn.Hardtanh(-3.0, 3.0)),
}
READERS["attribute of a tensor"][1].by, READERS["attribute of a tensor"][2].by = 2.0, 3.0  # type: ignore[attr-defined]
HITS = (
    *("numpy scalar", "numpy integer", "numpy array", "set", "slice", "enum", "named tuple", "property", "field of a dataclass"),
    *("defaults of two helpers", "operator of an object", "attribute of a tensor", "attribute of a function", "method of a module"),
    "bound method of a dict",
)


@pytest.mark.parametrize("name", READERS)
def test_another_value_behind_the_same_code_is_noticed(name: str) -> None:
    make, first, second = READERS[name]
    assert not traced_twice(TraceCache(), make(first), make(second))


@pytest.mark.parametrize("name", HITS)
def test_the_same_value_behind_the_same_code_hits(name: str) -> None:
    make, first, _ = READERS[name]
    assert traced_twice(TraceCache(), make(first), make(first))


def test_a_library_function_that_closes_over_the_users_is_looked_into() -> None:
    global WINDOW
    cache = TraceCache()
    mod = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < WINDOW)
    keys = []
    for window in (7, 8, 7):
        WINDOW = window
        keys.append(cache.trace(mod, "mask", score_dtype=torch.float32).program.key)
    assert keys[0] == keys[2] != keys[1] and cache.hits == 1


def test_a_mod_that_imports_is_traced_every_time_unless_it_imports_torch() -> None:
    def by_import(s, b, h, q, kv):  # type: ignore[no-untyped-def]
        from tests.nowhere import WIDTH

        return s * WIDTH

    def by_torch(s, b, h, q, kv):  # type: ignore[no-untyped-def]
        import torch as library

        return library.tanh(s)

    nowhere = types.ModuleType("tests.nowhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "tests", types.ModuleType("tests"))
        patch.setitem(__import__("sys").modules, "tests.nowhere", nowhere)
        nowhere.WIDTH = 2.0  # type: ignore[attr-defined]
        cache = TraceCache()
        first = cache.trace(by_import, "score", score_dtype=torch.float32)
        nowhere.WIDTH = 3.0  # type: ignore[attr-defined]
        assert cache.trace(by_import, "score", score_dtype=torch.float32).program.key != first.program.key
    assert traced_twice(TraceCache(), by_torch, by_torch)


def test_a_class_that_the_mod_makes_objects_of_is_looked_into() -> None:
    global WINDOW

    class Made:
        def __init__(self, x: Tensor) -> None:
            self.x = x * WINDOW

    mod, cache = lambda s, b, h, q, kv: Made(s).x, TraceCache()
    keys = []
    for window in (7, 8):
        WINDOW = window
        keys.append(cache.trace(mod, "score", score_dtype=torch.float32).program.key)
    assert keys[0] != keys[1]


def test_the_default_dtype_is_part_of_what_a_mod_reads() -> None:
    mod, cache = lambda s, b, h, q, kv: s + (q / 3), TraceCache()
    plain = cache.trace(mod, "score", score_dtype=torch.float32).program.key
    torch.set_default_dtype(torch.float64)
    try:
        assert cache.trace(mod, "score", score_dtype=torch.float32).program.key != plain
    finally:
        torch.set_default_dtype(torch.float32)
    assert cache.trace(mod, "score", score_dtype=torch.float32).program.key == plain and cache.hits == 1


def test_a_tensor_laid_out_otherwise_is_another_trace() -> None:
    make = lambda t: lambda s, b, h, q, kv: s + t.reshape(-1)[h]
    cache = TraceCache()
    for table in (torch.randn(3, 4), torch.randn(4, 3).T):
        (captured,) = cache.trace(make(table), "score", score_dtype=torch.float32).captured()
        assert torch.equal(captured, table.reshape(-1))


def test_a_look_up_that_raises_is_not_the_callers_error() -> None:
    class Awkward:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    awkward = Awkward()
    assert not traced_twice(TraceCache(), lambda s, b, h, q, kv: s.exp() if awkward else s, lambda s, b, h, q, kv: s.exp())


def test_functions_that_remember_their_results_are_read_as_what_they_wrap() -> None:
    @functools.lru_cache
    def width(n: int) -> int:
        return n + 3

    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < width(4)

    kept = TraceCache()
    first, again = (kept.trace(near, "mask", score_dtype=torch.float32) for _ in range(2))
    assert again.program is first.program
