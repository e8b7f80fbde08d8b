"""Keys of calls over a cache: calls that differ have other keys, and calls that may not be prepared have none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.cache.test_kv_cache import make_cache, tokens
from tests.torch_settings import matmul_precision
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import cached_prepared
from longspan._engine.cached import CachedCall
from longspan._engine.cached_prepared import _call_key, _step_key, repeated_key
from longspan._kernels.registry import has_triton
from longspan.testing import virtual_world

Q, K, V = tokens(2, 1)


class Intercepting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def key(q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Any:
    return _call_key(q, k, v, CachedCall(step=None, layer=0, **options))  # type: ignore[arg-type]


def strided(x: Tensor) -> Tensor:
    return torch.zeros(*x.shape[:3], 2 * x.shape[3])[..., : x.shape[3]]


def off_by_one(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 5.0 * torch.tanh(s / 5.0)


WIDE, WIDE_KV = torch.zeros(2, 4, 1, 24), torch.zeros(2, 2, 1, 24)
DIFFERENT: dict[str, dict[str, Any]] = {
    "shape of q": {"q": WIDE}, "shape of k": {"k": WIDE_KV}, "shape of v": {"v": WIDE_KV},
    "strides of q": {"q": strided(Q)}, "strides of k": {"k": strided(K)}, "strides of v": {"v": strided(V)},
    "dtype of q": {"q": Q.half()}, "dtype of k": {"k": K.half()}, "dtype of v": {"v": V.half()},
    "double": {"q": Q.double()},
    "device of q": {"q": Q.to("meta")}, "device of k": {"k": K.to("meta")}, "device of v": {"v": V.to("meta")},
    "one tensor": {"v": K},
    "mask": {"mask": ls.causal()}, "other mask": {"mask": ls.causal() & ls.sliding_window(9)},
    "score_mod": {"score_mod": softcap}, "other score_mod": {"score_mod": lambda s, b, h, q, kv: s * 2},
    "sink": {"sink": torch.zeros(4)}, "dtype of sink": {"sink": torch.zeros(4).half()}, "shape of sink": {"sink": torch.zeros(8)},
    "device of sink": {"sink": torch.zeros(4, device="meta")},
    "scale": {"scale": 0.5}, "other scale": {"scale": 0.25}, "kernel": {"kernel": "triton"},
}  # fmt: skip


def test_every_component_of_a_call_is_part_of_its_key() -> None:
    keys = {name: key(**options) for name, options in {"plain": {}, **DIFFERENT}.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)
    assert all(key(**options) == keys[name] for name, options in DIFFERENT.items() if "score_mod" not in name)


def test_a_setting_of_torch_is_part_of_the_key_of_float32_only() -> None:
    def keys() -> tuple[Any, Any]:
        return key(), key(Q.half(), K.half(), V.half())

    with matmul_precision("ieee"):
        before = keys()
    with matmul_precision("tf32"):
        after = keys()
    assert before[0] != after[0] and before[1] == after[1]


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


TABLE = torch.ones(64, dtype=torch.bool)
WITHOUT: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    **{f"subclass {n}": ({n: x.as_subclass(Subclass)}, nullcontext) for n, x in (("k", K), ("v", V))},
    **{f"gradient of {n}": ({n: leaf(x)}, nullcontext) for n, x in (("q", Q), ("k", K), ("v", V), ("sink", torch.zeros(4)))},
    **{f"negated {n}": ({n: torch._neg_view(x)}, nullcontext) for n, x in (("q", Q), ("k", K), ("v", V), ("sink", torch.zeros(4)))},
    **{f"misaligned {n}": ({n: off_by_one(x)}, nullcontext) for n, x in (("q", Q), ("k", K), ("v", V), ("sink", torch.zeros(4)))},
    "subclass sink": ({"sink": torch.zeros(4).as_subclass(Subclass)}, nullcontext),
    "strided sink": ({"sink": torch.zeros(8)[::2]}, nullcontext),
    "kernel": ({"kernel": "cpu"}, nullcontext),
    "integer scale": ({"scale": 1}, nullcontext),
    "selection": ({"mask": ls.selected(torch.zeros(1, 1, 1, 1).int())}, nullcontext),
    "mask that reads a tensor": ({"mask": ls.mask_mod(lambda b, h, q, kv: TABLE[kv])}, nullcontext),
    "score_mod that reads a tensor": ({"score_mod": lambda s, b, h, q, kv: s + TABLE[kv]}, nullcontext),
    "score_mod that cannot be traced": ({"score_mod": lambda s, b, h, q, kv: s if int(q) else s * 2}, nullcontext),
    "intercepted": ({}, Intercepting),
    "invariant": ({}, ls.invariant),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_unusual_calls_have_no_key(name: str) -> None:
    options, context = WITHOUT[name]
    with context():
        assert key(**options) is None
        if name.startswith("gradient"):
            with torch.no_grad():
                assert key(**options) == key(**{n: x.detach() for n, x in options.items()})


def test_steps_on_one_gpu_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    call = CachedCall(step=cache.step(cache.allocate(2), 1), layer=0)
    assert repeated_key(Q, K, V, call) is None
    monkeypatch.setattr(cached_prepared, "_on_gpu", lambda q: True)
    assert repeated_key(Q, K, V, call) == key()
    assert repeated_key(Q.as_subclass(Subclass), K, V, call) is None
    assert repeated_key(Q, K, V, call._replace(step=cache)) is None

    def over_mesh(mesh: ls.Mesh) -> bool:
        cache = make_cache(mesh=mesh)
        return repeated_key(Q, K, V, CachedCall(step=cache.step(cache.allocate(2), 1), layer=0)) is None

    assert virtual_world(2).run(over_mesh) == [True, True]


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_a_step_is_known_by_its_counts_sizes_and_page_table() -> None:
    def step(counts: Any, before: int = 0, allocated: int = 0) -> tuple[Any, Tensor]:
        cache = make_cache(pages=400)
        ids = cache.allocate(2)
        cache.allocate(allocated)
        if before:
            ls.attention(*tokens(2, before), cache=cache.step(ids, before), layer=0)
        made = cache.step(ids, counts)
        ragged = isinstance(counts, list)
        return made, torch.zeros(1 if ragged else 2, 4, sum(counts) if ragged else counts, 16)

    steps = [step(1), step(2), step([1, 1]), step([2, 1]), step([1, 2]), step(1, before=1200), step(1, allocated=60)]
    keys = [_step_key(*made, "triton") for made in steps]
    assert len(set(keys)) == len(keys)
    assert _step_key(*step(1), "triton") == keys[0] == _step_key(*step(1, before=4), "triton")
    assert [k[0] for k in keys[:5]] == [(1, 1), (2, 2), (1, 1), (2, 1), (1, 2)]
    assert [k[3] for k in keys[:5]] == [False, False, True, True, True]
