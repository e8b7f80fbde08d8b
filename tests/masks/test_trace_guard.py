"""Guards of traces: they pass where the walk over a mod would find the same, and hold no tensor alive."""

from __future__ import annotations

import builtins
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from longspan._masks import trace_cache, trace_guard
from longspan._masks.trace_cache import TraceCache
from longspan._masks.trace_key import trace_key
from longspan._masks.tracing import trace

SLOPES = torch.linspace(0.1, 0.4, 4)
FACTOR = 2.0


class Scaled(nn.Module):
    power = 2

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.bias, self.factor = nn.Parameter(torch.ones(4)), factor
        self.register_buffer("table", torch.ones(4))

    def mod(self) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv: s * self.factor**self.power + self.bias[h] * self.table[h]


def capturing(table: Tensor, factor: float) -> Callable[..., Tensor]:
    return lambda s, b, h, q, kv: torch.tanh(s) * factor + table[h]


def read_global(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s * FACTOR + SLOPES[h]


def with_helper(by: float) -> Callable[..., Tensor]:
    return lambda s, b, h, q, kv: helper(s) * by


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mods that were walked over."""
    seen: list[Any] = []
    monkeypatch.setattr(trace_cache, "trace_key", lambda fn: (seen.append(fn), trace_key(fn))[1])
    return seen


def check(cache: TraceCache, mod: Callable[..., Tensor]) -> None:
    """The cached trace must be that of a fresh one, with the same tensors."""
    got, want = cache.trace(mod, "score", score_dtype=torch.float32), trace(mod, "score")
    assert got.program.key == want.program.key
    assert [id(t) for t in got.sources] == [id(t) for t in want.sources]


MODS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "closure": lambda: capturing(torch.ones(4), 3.0),
    "global": lambda: read_global,
    "module": lambda: MODEL.mod(),
    "helper": lambda: with_helper(3.0),
}
MODEL = Scaled()


@pytest.mark.parametrize("name", MODS)
def test_a_repeated_mod_is_not_walked_again(name: str, walks: list[Any]) -> None:
    cache = TraceCache()
    for _ in range(4):
        check(cache, MODS[name]())
    assert len(walks) == 1 and cache.hits == 3


def change_global(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 5.0)


def change_global_tensor(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    monkeypatch.setitem(globals(), "SLOPES", torch.ones(4, dtype=torch.float64))


def change_helper(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    monkeypatch.setitem(globals(), "helper", lambda x: x + 1)


def change_code_of_helper(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    monkeypatch.setattr(helper, "__code__", (lambda x: x - FACTOR).__code__)


def change_attribute(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    model.factor = 7.0


def change_class(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    monkeypatch.setattr(Scaled, "power", 3)


def shadow_class(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    model.power = 4


def change_parameter(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    model.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))


def same_layout(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    model.bias = nn.Parameter(torch.zeros(4))


def share_tensor(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    model.table = model.bias.data
    model.bias.data = torch.ones(4)


def resize(monkeypatch: pytest.MonkeyPatch, model: Scaled) -> None:
    model.bias.data = torch.ones(8)


CHANGES = [
    change_global, change_global_tensor, change_helper, change_code_of_helper, change_attribute, change_class, shadow_class,
    change_parameter, same_layout, share_tensor, resize,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_value_is_noticed(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model = TraceCache(), Scaled()
    mods = [read_global, with_helper(3.0), model.mod()]
    for mod in mods * 2:
        check(cache, mod)
    change(monkeypatch, model)
    for mod in mods * 2:
        check(cache, mod)


def test_tensors_that_were_one_and_become_two_are_noticed() -> None:
    cache, a, b = TraceCache(), torch.ones(4), torch.zeros(4)

    def adding(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv: s + x[h] * y[q]

    for x, y in ((a, a), (a, a), (a, b), (b, a), (a, b), (b, b)):
        check(cache, adding(x, y))


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (1, True), (2, 2.0), (1.0, 1)])
def test_equal_numbers_of_other_kinds_are_noticed(first: Any, second: Any) -> None:
    cache, table = TraceCache(), torch.ones(4)
    for factor in (first, first, second, first):
        check(cache, capturing(table, factor))


def test_changed_builtins_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TraceCache()
    mods = [lambda s, b, h, q, kv: s * FACTOR_OF_BUILTINS, lambda s, b, h, q, kv: abs(s)]  # type: ignore[name-defined] # noqa: F821
    monkeypatch.setattr(builtins, "FACTOR_OF_BUILTINS", 2.0, raising=False)
    for mod in mods * 3:
        check(cache, mod)
    monkeypatch.setattr(builtins, "FACTOR_OF_BUILTINS", 3.0)
    monkeypatch.setattr(builtins, "abs", lambda x: x + 1)
    for mod in mods * 2:
        check(cache, mod)


def test_a_list_that_is_modified_in_place_is_noticed() -> None:
    cache, values = TraceCache(), [2.0]
    mod = lambda s, b, h, q, kv: s * values[0]
    for factor in (2.0, 2.0, 3.0):
        values[0] = factor
        check(cache, mod)


def test_a_list_of_a_class_that_is_modified_in_place_is_noticed() -> None:
    class Holder:
        values: ClassVar = [2.0]

    cache, holder = TraceCache(), Holder()
    mod = lambda s, b, h, q, kv: s * holder.values[0]
    for factor in (2.0, 2.0, 3.0):
        Holder.values[0] = factor
        check(cache, mod)


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (1, True), (1, 1.0)])
def test_equal_defaults_of_other_kinds_are_noticed(first: Any, second: Any) -> None:
    def make(number: Any) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv, n=number: s * (2 if isinstance(n, float) else 3) if str(n) != "-0.0" and n is not True else s

    cache = TraceCache()
    for number in (first, first, second, first):
        check(cache, make(number))


def test_torchs_settings_are_part_of_a_guards_key() -> None:
    cache = TraceCache()
    mod = lambda s, b, h, q, kv: s + (q / 3)
    keys = [cache.trace(mod, "score", score_dtype=torch.float32).program.key for _ in range(2)]
    torch.set_default_dtype(torch.float64)
    try:
        changed = cache.trace(mod, "score", score_dtype=torch.float32).program.key
    finally:
        torch.set_default_dtype(torch.float32)
    wide = cache.trace(mod, "score", score_dtype=torch.float64).program.key
    assert keys[0] == keys[1] and len({keys[0], changed, wide}) == 3


def test_guards_and_cached_traces_hold_no_tensor_alive() -> None:
    cache, model, table = TraceCache(), Scaled(), torch.ones(4)
    for _ in range(3):
        cache.trace(model.mod(), "score", score_dtype=torch.float32)
        cache.trace(capturing(table, 3.0), "score", score_dtype=torch.float32)
    refs = [weakref.ref(t) for t in (table, model.bias, model.table)]
    del model, table
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_the_number_of_guards_is_bounded() -> None:
    cache, table = TraceCache(size=3), torch.ones(4)
    for n in range(12):
        cache.trace(capturing(table, float(n)), "score", score_dtype=torch.float32)
        made = eval(f"lambda s, b, h, q, kv: s * {n}.5")
        cache.trace(made, "score", score_dtype=torch.float32)
    assert len(cache._guarded) <= 3 and all(len(guards) <= 4 for guards in cache._guarded.values())


def test_the_guards_of_the_code_that_was_traced_last_are_kept() -> None:
    cache = TraceCache(size=2)
    mods = [eval(f"lambda s, b, h, q, kv: s * {n}.5") for n in range(3)]
    for mod in (mods[0], mods[1], mods[0], mods[2]):
        cache.trace(mod, "score", score_dtype=torch.float32)
        cache.trace(mod, "score", score_dtype=torch.float32)
    kept = [cache.guarded(mod, "score", score_dtype=torch.float32) is not None for mod in mods]
    assert kept[2] and sum(kept) <= 2


def anew(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize(("one", "other", "same"), [
    (10**30, 10**30, True), (1.5, 1.5, True), ("ab c", "ab c", True), (None, None, True), (True, True, True),
    (0.0, 0.0, False), (0.0, -0.0, False), (1, 1.0, False), (1, True, False), (2.5, 2.75, False), ((10**30,), (10**30,), False),
])  # fmt: skip
def test_equal_numbers_and_strings_need_no_walk(one: Any, other: Any, same: bool) -> None:
    """But for zeros, which may differ in their sign."""
    one, other = anew(one), anew(other)
    assert trace_guard._same(one, other) is trace_guard._same(other, one) is same


def test_defaults_are_the_same_one_by_one() -> None:
    same, pair = trace_guard._same_defaults, (1.5, 10**30)
    assert same(anew(pair), anew(pair)) and same(None, ()) and same((), None)
    for other in (None, (), pair[:1], (*pair, 4), (1.5, 5), (5, 10**30), pair[::-1]):
        assert not same(anew(pair), anew(other)) and not same(anew(other), anew(pair))
