"""The trace cache reuses a trace only if nothing that the mod can read has changed."""

from __future__ import annotations

import enum
import functools
import linecache
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks
from torch.overrides import TorchFunctionMode

import longspan as ls
from longspan._masks.trace_cache import TraceCache
from longspan._masks.tracing import trace

WINDOW = 3
Mod = Callable[..., Tensor]


def hits(first: Mod, second: Mod, kind: Any = "score") -> bool:
    """Whether the second trace comes from the cache; checks that it equals a fresh trace either way."""
    cache = TraceCache()
    cache.trace(first, kind, score_dtype=torch.float32)
    cached, fresh = cache.trace(second, kind, score_dtype=torch.float32), trace(second, kind)
    assert cached.program.key == fresh.program.key
    assert all(x is y for x, y in zip(cached.sources, fresh.sources, strict=True))
    return cache.hits > 0


class Config:
    cap = 4.0


class Model(nn.Module):
    def __init__(self, cap: float = 2.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2))
        self.register_buffer("offset", torch.randn(2))
        self.embedding = nn.Embedding(2, 1)
        self.cap = cap

    def closure(self) -> Mod:
        return lambda s, b, h, q, kv: self.adjusted(s, h) + self.doubled

    def method(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.adjusted(s, h) + self.embedding.weight[h, 0]

    def adjusted(self, score: Tensor, h: Tensor) -> Tensor:
        return score.float() * self.cap + self.bias[h] - self.offset[h] * Config.cap

    @property
    def doubled(self) -> float:
        return self.cap * 2


@dataclass(frozen=True)
class Settings:
    window: int
    cap: float = 3.0


class Bounded:
    def __init__(self, limit: float) -> None:
        self._limit = limit

    @property
    def limit(self) -> float:
        return self._limit * 2


class CallableMod:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * self.scale


def capturing(value: Any) -> Mod:
    return lambda s, b, h, q, kv: s * value


def capturing_tensor(value: float, table: Tensor | None = None) -> Mod:
    table = torch.randn(3) if table is None else table
    return lambda s, b, h, q, kv: s + table[h] * value


def with_helpers(first: float, second: float) -> Mod:
    def f(x: Tensor, by: float = first) -> Tensor:
        return x * by

    def g(x: Tensor, *, by: float = second) -> Tensor:
        return F.softplus(x) * by

    return lambda s, b, h, q, kv: g(f(s)) * math.sqrt(2)


def slope(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, by: float) -> Tensor:
    return s + by * (q - kv)


# Mods that the cache must recognise: a maker, and two arguments that make different programs.
CACHED: dict[str, tuple[Callable[[Any], Mod], Any, Any]] = {
    "float": (capturing, 2.0, 3.0),
    "int": (capturing, 2, 3),
    "sign of zero": (capturing, 0.0, -0.0),
    "bool and int": (lambda v: lambda s, b, h, q, kv: s * (2 if v is True else 3), True, 1),
    "tensor and float": (capturing_tensor, 2.0, 3.0),
    "tuple": (lambda v: lambda s, b, h, q, kv: s * v[1], (1, 2.0), (1, 3.0)),
    "list": (lambda v: lambda s, b, h, q, kv: s * v[-1], [1, 2.0], [1, 3.0]),
    "dict": (lambda v: lambda s, b, h, q, kv: s * v.get("n"), {"n": 2.0}, {"n": 3.0}),
    "dtype": (lambda v: lambda s, b, h, q, kv: s.to(v).float(), torch.float16, torch.bfloat16),
    "finfo": (lambda v: lambda s, b, h, q, kv: s.clamp(min=torch.finfo(v).min), torch.float32, torch.float16),
    "default of a helper": (lambda v: with_helpers(2.0, v), 3.0, 5.0),
    "partial": (lambda v: functools.partial(slope, by=v), 2.0, 3.0),
    "method": (lambda v: Model(v).method, 2.0, 3.0),
    "closure over a module": (lambda v: Model(v).closure(), 2.0, 3.0),
    "callable object": (CallableMod, 2.0, 3.0),
    "property": (lambda v: (lambda o: lambda s, b, h, q, kv: s * o.limit)(Bounded(v)), 2.0, 3.0),
    "field of a dataclass": (lambda v: lambda s, b, h, q, kv: s * v.window, Settings(5), Settings(6)),
    "dataclass by equality": (lambda v: lambda s, b, h, q, kv: s * 2 if v == Settings2 else s, Settings(5), Settings(6)),
    "tensor operator": (lambda v: lambda s, b, h, q, kv: v(s), torch.tanh, torch.sigmoid),
}
Settings2 = Settings(5)


@pytest.mark.parametrize("name", CACHED)
def test_common_mods_hit_when_made_anew_and_miss_when_a_value_changes(name: str) -> None:
    make, first, second = CACHED[name]
    assert hits(make(first), make(first))
    assert not hits(make(first), make(second))


MASKS: dict[str, Callable[[int], Any]] = {
    "causal documents": lambda n: ls.causal() & ls.documents(lengths=[n, 8 - n]),
    "documents per batch row": lambda n: ls.documents(ids=torch.randint(0, 3, (2, 8)).sort().values),
    "window": lambda n: ls.sliding_window(4) | ~ls.prefix([n, 3]),
    "mask_mod": lambda n: ls.mask_mod((lambda t: lambda b, h, q, kv: (q >= kv) & (t[q] < 5))(torch.arange(8))),
    "torch's and_masks": lambda n: and_masks(ls.causal(), lambda b, h, q, kv: q - kv < 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_made_anew_over_other_tensors_hits(name: str) -> None:
    assert hits(MASKS[name](3), MASKS[name](4), "mask")


def test_masks_with_other_numbers_miss() -> None:
    assert not hits(ls.sliding_window(3), ls.sliding_window(4), "mask")
    assert not hits(ls.prefix(3) & ls.causal(), ls.prefix(4) & ls.causal(), "mask")


def test_a_cached_program_is_bound_to_the_tensors_of_the_present_call() -> None:
    first, second, cache = torch.randn(3), torch.randn(3), TraceCache()
    for table in (first, second):
        traced = cache.trace(capturing_tensor(2.0, table), "score", score_dtype=torch.float32)
        assert traced.sources[0] is table
    assert cache.hits == 1


def test_tensors_of_another_shape_dtype_layout_or_aliasing_miss() -> None:
    make = lambda t, u: lambda s, b, h, q, kv: s + t.reshape(-1)[h] * u.reshape(-1)[h]
    t = torch.randn(3, 4)
    for other in (torch.randn(4, 4), torch.randn(3, 4).double(), torch.randn(4, 3).T):
        assert not hits(make(t, t.clone()), make(other, t.clone()))
    assert not hits(make(t, t.clone()), make(t, t))


def test_changes_of_attributes_classes_methods_and_globals_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = Model(), TraceCache()

    def changed() -> bool:
        before = cache.hits
        traced = cache.trace(model.closure(), "score", score_dtype=torch.float32)
        assert traced.program.key == trace(model.closure(), "score").program.key
        return cache.hits == before

    assert changed() and not changed()
    model.cap = 6.0
    assert changed() and not changed()
    monkeypatch.setattr(Config, "cap", 5.0)
    assert changed() and not changed()
    monkeypatch.setattr(Model, "adjusted", lambda self, score, h: score * self.cap)
    assert changed() and not changed()
    model.adjusted = lambda score, h: score + self_cap  # type: ignore[method-assign]
    assert changed() and not changed()
    monkeypatch.setitem(globals(), "self_cap", 9.0)
    assert changed() and not changed()
    model.bias = nn.Parameter(torch.randn(2))
    assert not changed()


self_cap = 8.0


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def more_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(count + 1)
    yield
    torch.set_num_threads(count)


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class HalvesTanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.tanh else out


# A mod that reads state of torch, and a context that changes the state.
GLOBAL_STATE: dict[str, tuple[Mod, Callable[[], Any]]] = {
    "deterministic flag": (lambda s, b, h, q, kv: s * 2 if torch.are_deterministic_algorithms_enabled() else s, deterministic),
    "number of threads": (lambda s, b, h, q, kv: s * torch.get_num_threads(), more_threads),
    "grad mode": (lambda s, b, h, q, kv: s * 2 if torch.is_grad_enabled() else s, torch.no_grad),
    "grad mode in inference mode": (lambda s, b, h, q, kv: s * 2 if torch.is_grad_enabled() else s, torch.inference_mode),
    "default dtype": (lambda s, b, h, q, kv: s * (2 if torch.get_default_dtype() == torch.float64 else 1), double_by_default),
    "default dtype, unnamed": (lambda s, b, h, q, kv: s + (q / 3), double_by_default),
    "function mode": (lambda s, b, h, q, kv: torch.tanh(s), HalvesTanh),
}


@pytest.mark.parametrize("name", GLOBAL_STATE)
def test_a_change_of_torchs_global_state_is_noticed(name: str) -> None:
    mod, changed = GLOBAL_STATE[name]
    cache = TraceCache()
    keys = [cache.trace(mod, "score", score_dtype=torch.float32).program.key]
    with changed():
        keys.append(cache.trace(mod, "score", score_dtype=torch.float32).program.key)
    keys.append(cache.trace(mod, "score", score_dtype=torch.float32).program.key)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("remember", [functools.cache, functools.lru_cache(maxsize=2)])
def test_a_cleared_functools_cache_is_noticed(remember: Any) -> None:
    source = {"width": 3}

    @remember
    def width(n: int) -> int:
        return n + source["width"]

    mod, cache = lambda b, h, q, kv: q - kv < width(4), TraceCache()
    first = cache.trace(mod, "mask", score_dtype=torch.float32).program.key
    source["width"] = 5
    assert cache.trace(mod, "mask", score_dtype=torch.float32).program.key == first, "width still remembers its result"
    width.cache_clear()
    assert cache.trace(mod, "mask", score_dtype=torch.float32).program.key != first


class Indexed:
    def __init__(self, held: float) -> None:
        self._held = held

    def __getitem__(self, i: int) -> float:
        return self._held


class Dynamic:
    def __init__(self, held: float) -> None:
        self._held = held

    def __getattr__(self, name: str) -> float:
        return self._held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: float) -> None:
        self.held = held


class Scaled(int):
    factor = 2


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Pair(NamedTuple):
    a: float
    b: float


def attributed(k: float) -> Mod:
    def helper(x: Tensor) -> Tensor:
        return x * helper.k  # type: ignore[attr-defined]

    helper.k = k  # type: ignore[attr-defined]
    return lambda s, b, h, q, kv: helper(s)


def remembering(value: float) -> Mod:
    held = functools.cache(lambda: value)
    return lambda s, b, h, q, kv: s * held()


def by_string(value: float) -> Mod:
    get, held = operator.attrgetter("n"), types.SimpleNamespace(n=value)
    return lambda s, b, h, q, kv: s * get(held)


def by_getattr(value: float) -> Mod:
    held = types.SimpleNamespace(n=value)
    return lambda s, b, h, q, kv: s * getattr(held, "n")  # noqa: B009


def containing(held: float) -> nn.Module:
    module = nn.Module()
    module.parts = nn.ModuleList([nn.Module()])
    module.parts[0].window = held  # type: ignore[assignment]
    return module


def made_by_a_class(value: float) -> Mod:
    class Made:
        def __init__(self, x: Tensor) -> None:
            self.x = x * value

    return lambda s, b, h, q, kv: Made(s).x


def importing(value: float) -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        from tests_nowhere import WIDTH  # type: ignore[import-not-found]

        return s * WIDTH

    sys.modules["tests_nowhere"] = types.ModuleType("tests_nowhere")
    sys.modules["tests_nowhere"].WIDTH = value  # type: ignore[attr-defined]
    return mod


def with_attribute(value: float) -> Tensor:
    table = torch.ones(3)
    table.by = value  # type: ignore[attr-defined]
    return table


# Mods outside the closed world: traced at every call. A maker, and two arguments that make different programs.
UNCACHED: dict[str, tuple[Callable[[Any], Mod], Any, Any]] = {
    "numpy scalar": (capturing, np.float32(2), np.float32(3)),
    "numpy array": (lambda v: lambda s, b, h, q, kv: s * float(v[0]), np.array([2.0]), np.array([3.0])),
    "set": (lambda v: lambda s, b, h, q, kv: s * 2 if "x" in v else s, {"y"}, {"x"}),
    "operator of an object": (lambda v: lambda s, b, h, q, kv: s * v[0], Indexed(2.0), Indexed(4.0)),
    "__getattr__": (lambda v: lambda s, b, h, q, kv: s * v.anything, Dynamic(2.0), Dynamic(4.0)),
    "slots": (lambda v: lambda s, b, h, q, kv: s * v.held, Slotted(2.0), Slotted(4.0)),
    "attribute of a function": (attributed, 2.0, 3.0),
    "bound method of a dict": (lambda v: lambda s, b, h, q, kv, get={"n": v}.get: s * get("n"), 2.0, 3.0),
    "slice": (lambda v: lambda s, b, h, q, kv: s * v.stop, slice(2), slice(3)),
    "text of a number": (lambda v: lambda s, b, h, q, kv: s * (-1.0 if str(v)[1] == "-" else 1.0), complex(0.0, 0.0), complex(-0.0, 0.0)),
    "subclass of int": (lambda v: lambda s, b, h, q, kv: s * v.factor, Scaled(1), type("Other", (Scaled,), {"factor": 3})(1)),
    "enum": (lambda v: lambda s, b, h, q, kv: s * v.value, Mode.ONE, Mode.TWO),
    "identity": (lambda v: lambda s, b, h, q, kv: s * 2 if v is Mode.ONE else s, Mode.ONE, Mode.TWO),
    "named tuple": (lambda v: lambda s, b, h, q, kv: s * v.b, Pair(1.0, 2.0), Pair(1.0, 3.0)),
    "f-string": (lambda v: lambda s, b, h, q, kv: s * len(f"{v}"), Settings(5), Settings(50)),
    "percent format": (lambda v: lambda s, b, h, q, kv: s * len("%s" % v), torch.tensor([1.0]), torch.tensor([1.5])),  # noqa: UP031
    "format method": (lambda v: lambda s, b, h, q, kv: s * len("{}".format(v)), torch.tensor([1.0]), torch.tensor([1.5])),  # noqa: UP032
    "int() of a tensor": (lambda v: lambda s, b, h, q, kv: s * int(v), torch.tensor(2), torch.tensor(3)),
    "float() of an element": (lambda v: lambda s, b, h, q, kv: s * float(v), torch.tensor([2.0]), torch.tensor([3.0])),
    "branch on a tensor": (lambda v: lambda s, b, h, q, kv: s * 2 if v else s, torch.tensor(True), torch.tensor(False)),
    "tensor as the index of a list": (lambda v: lambda s, b, h, q, kv: s * [2, 3, 4][v], torch.tensor(0), torch.tensor(2)),
    "tensor as a range": (lambda v: lambda s, b, h, q, kv: s * sum(range(v)), torch.tensor(3), torch.tensor(5)),
    "tensor as the end of a slice": (lambda v: lambda s, b, h, q, kv: s * len([2, 3, 4][:v]), torch.tensor(1), torch.tensor(2)),
    "values of a tensor": (lambda v: lambda s, b, h, q, kv: s * v.tolist()[0], torch.tensor([2.0]), torch.tensor([3.0])),
    "requires_grad": (lambda v: lambda s, b, h, q, kv: s * (1 + v.requires_grad), torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "attribute of a tensor": (lambda v: lambda s, b, h, q, kv: s + v[h] * v.by, with_attribute(2.0), with_attribute(3.0)),
    "functools.cache": (remembering, 2.0, 3.0),
    "attrgetter": (by_string, 2.0, 3.0),
    "getattr": (by_getattr, 2.0, 3.0),
    "container of modules": (lambda v: lambda s, b, h, q, kv: s * v.parts[0].window, containing(2.0), containing(3.0)),
    "called module": (lambda v: lambda s, b, h, q, kv: v(s), nn.Hardtanh(-2.0, 2.0), nn.Hardtanh(-3.0, 3.0)),
    "object made inside": (made_by_a_class, 2.0, 3.0),
    "import": (importing, 2.0, 3.0),
}


@pytest.mark.parametrize("name", UNCACHED)
def test_a_mod_outside_the_closed_world_is_traced_at_every_call(name: str) -> None:
    make, first, second = UNCACHED[name]
    assert not hits(make(first), make(first))
    mod = make(first)
    assert not hits(mod, mod)
    assert not hits(make(first), make(second))


def test_an_error_while_an_object_is_looked_at_leads_to_a_trace() -> None:
    class Awkward:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise KeyError

    awkward = Awkward()
    mod = lambda s, b, h, q, kv: s.exp() if awkward else s
    assert not hits(mod, mod)


def test_a_changed_global_behind_torchs_and_masks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TraceCache()
    mod = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < WINDOW)
    keys = []
    for window in (7, 8, 7):
        monkeypatch.setitem(globals(), "WINDOW", window)
        keys.append(cache.trace(mod, "mask", score_dtype=torch.float32).program.key)
    assert keys[0] == keys[2] != keys[1] and cache.hits == 1


def test_a_collected_function_does_not_lend_its_id_to_another_mod() -> None:
    cache = TraceCache()
    for n in range(50):
        made = eval(f"lambda s, b, h, q, kv: s * {n}.0")
        traced = cache.trace(made, "score", score_dtype=torch.float32)
        assert traced.program.key == trace(made, "score").program.key
        del made


def test_the_cache_is_bounded() -> None:
    cache = TraceCache(size=2)
    for n in range(5):
        cache.trace(lambda s, b, h, q, kv, n=n: s * n, "score", score_dtype=torch.float32)
    assert len(cache._entries) == 2
    for mod in [eval(f"lambda s, b, h, q, kv: s * {n}.0") for n in range(3)]:  # with codes of their own
        cache.trace(mod, "score", score_dtype=torch.float32)
        assert len(cache._guarded) == 2


def test_a_trace_is_invisible_to_saved_tensor_hooks() -> None:
    weight, seen = nn.Parameter(torch.randn(8)), []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda saved: saved):
        traced = trace(lambda s, b, h, q, kv: s * weight.exp()[q], "score")
    assert not seen
    assert traced.sources[0] is weight


def test_threads_share_the_cache() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    scales = [1.0, 2.0, 3.0, 4.0]

    def call(scale: float) -> Tensor:
        return ls.attention(q, k, v, mask=ls.sliding_window(int(scale)), score_mod=lambda s, b, h, i, j: s * scale)

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(call, scales * 3))
    for scale, out in zip(scales * 3, got, strict=True):
        torch.testing.assert_close(out, ls.attention(q, k, v, mask=ls.sliding_window(int(scale)), scale=scale * 8**-0.5))


def test_traces_leave_no_source_in_torch() -> None:
    from torch.fx.graph_module import _loader

    def call(step: int) -> None:
        q = torch.randn(1, 2, 20, 4, requires_grad=True)
        # A preamble, a gradient, and a mod that is not pointwise, which runs as a module.
        score = lambda s, b, h, i, j: s + q.exp()[0, h, i, 0] - 0.1 * step * (i - j) + torch.stack([s, s * step]).sum()
        ls.attention(q, q, q, mask=lambda b, h, i, j: (i >= j) | (j % step == 0), score_mod=score).sum().backward()

    def sources() -> int:
        return len(_loader.eval_cache) + sum(name.startswith("<eval_with_key>") for name in linecache.cache)

    before = sources()
    for step in range(2, 5):
        call(step)
    assert sources() == before
