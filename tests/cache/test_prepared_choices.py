"""Which decode calls are prepared, and which prepared call a step takes. Launches are recorded, not made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cache.test_kv_cache import make_cache, tokens
from tests.kernels.stub_launches import Launches, record_launches
from torch import Tensor

import longspan as ls
from longspan._engine import cached_prepared
from longspan._engine.cached import CachedCall

decode_call: Any = pytest.importorskip("longspan._kernels.triton.decode_call")
decode_prepared: Any = pytest.importorskip("longspan._kernels.triton.decode_prepared")
CAUSAL = ls.causal()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """CPU tensors pass for tensors on a GPU."""
    recorded = record_launches(monkeypatch)
    monkeypatch.setattr(decode_prepared, "interpreted", lambda: False)
    monkeypatch.setattr(cached_prepared, "_on_gpu", lambda q: True)
    monkeypatch.setattr(cached_prepared, "current_stream_is_captured", lambda: False)
    return recorded


def half(count: int = 1) -> list[Tensor]:
    return [t.half() for t in tokens(2, count)]


def made(step: Any, layer: int, **options: Any) -> Any:
    return ls.attention(*half(step.ranges.counts[0]), cache=step, layer=layer, kernel="triton", mask=CAUSAL, **options)


def step_of(layers: int, count: int = 1) -> Any:
    cache = make_cache(pages=40, layers=layers, dtype=torch.float16)
    return cache.step(cache.allocate(2), count)


def repeated_step() -> Any:
    """A step of five layers, of which the first two were computed: its call is prepared, and is its last one."""
    step = step_of(5)
    made(step, 0)
    made(step, 1)
    assert step.last_call is not None
    return step


def off_by_one(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def taken(step: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any = 2) -> bool:
    """Whether a call is taken for the step's last one."""
    return cached_prepared.attend_same(q, k, v, CachedCall(step=step, layer=layer, mask=CAUSAL, kernel="triton")) is not None


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_misaligned_tensors_are_not_taken_for_those_of_the_last_call(name: str, launches: Launches) -> None:
    step, new = repeated_step(), dict(zip("qkv", half(), strict=True))
    assert not taken(step, **new | {name: off_by_one(new[name])})
    assert taken(step, **new)


def test_keys_that_are_values_are_not_taken_for_two_tensors(launches: Launches) -> None:
    step, (q, k, v) = repeated_step(), half()
    assert not taken(step, q, k, k.view(k.shape)) and not taken(step, q, k, k)
    assert taken(step, q, k, v)


def test_a_capture_needs_a_step_that_can_advance(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    step = repeated_step()
    monkeypatch.setattr(cached_prepared, "current_stream_is_captured", lambda: True)
    assert not taken(step, *half())
    assert step._used == [0, 1]


def test_a_prepared_call_is_used_from_the_first_layer_of_a_step_on(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a model of one layer."""
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    step = step_of(1)
    made(step, 0)
    cache = step.cache
    ((key, prepared),) = cache.prepared.items()
    runs: list[Any] = []
    monkeypatch.setattr(type(prepared), "run", lambda *a: runs.append(a[2]) or (torch.zeros(2), None))
    for _ in range(2):
        made(cache.step(step.ids, 1), 0)
    assert runs == [cache.layer_addresses(0)] * 2 and list(cache.prepared) == [key]


class TestWhatIsPrepared:
    def test_calls_of_other_scales_and_numbers_of_tokens(self, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
        step = step_of(1)
        cache, ids = step.cache, step.ids
        made(step, 0)
        made(cache.step(ids, 2), 0)
        made(cache.step(ids, 1), 0, scale=0.5)
        made(cache.step(ids, 2), 0, scale=0.5)
        assert len(cache.prepared) == 4

    def test_no_call_of_a_graph_capture(self, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cached_prepared, "_is_captured", lambda q: True)
        step = step_of(2)
        made(step, 0)
        assert not step.cache.prepared
        monkeypatch.setattr(cached_prepared, "_is_captured", lambda q: False)
        made(step, 1)
        assert len(step.cache.prepared) == 1

    @pytest.mark.parametrize("addresses", [(8, 0), (0, 8)], ids=["keys", "values"])
    @pytest.mark.parametrize("misaligned", [0, 1])
    def test_no_call_over_misaligned_layers(
        self, addresses: tuple[int, int], misaligned: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = step_of(3)
        monkeypatch.setattr(step.cache, "layer_addresses", lambda layer: addresses if layer == misaligned else (0, 0))
        made(step, 0)
        assert not step.cache.prepared

    def test_no_call_that_a_launch_cannot_compute_or_that_is_not_compiled(
        self, launches: Launches, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = step_of(3)
        monkeypatch.setattr(decode_prepared.PreparedDecode, "supports", staticmethod(lambda *_: False))
        made(step, 0)
        monkeypatch.undo()
        record_launches(monkeypatch)
        monkeypatch.setattr(decode_prepared, "interpreted", lambda: False)
        monkeypatch.setattr(cached_prepared, "_on_gpu", lambda q: True)
        monkeypatch.setattr(decode_prepared.PreparedDecode, "is_compiled", False)
        made(step, 1)
        assert not step.cache.prepared

    def test_a_bounded_number_of_calls(self, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cached_prepared.MAX_PREPARED == 64
        monkeypatch.setattr(cached_prepared, "MAX_PREPARED", 3)
        step = step_of(5)
        counts = []
        for layer in range(5):
            made(step, layer, scale=1.5 + layer)
            counts.append(len(step.cache.prepared))
        assert counts == [1, 2, 3, 1, 2]


def test_hoppers_kernel_computes_latent_keys_on_its_gpus_if_no_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    latent_decode_call: Any = pytest.importorskip("longspan._kernels.hopper.latent_decode_call")
    monkeypatch.setattr(latent_decode_call, "latent_decode", lambda q, pages: (q, pages))

    def chosen(*, shared: bool = True, kernel: str = "auto", cuda: bool = True, first: str = "hopper") -> Any:
        q, pages = SimpleNamespace(is_cuda=cuda, device="device"), SimpleNamespace(shared=shared)
        monkeypatch.setattr(cached_prepared, "first_candidate", {"device": first}.__getitem__)
        split = cached_prepared.split_kernel(q, pages, kernel)  # type: ignore[arg-type]
        assert split in (None, (q, pages))
        return split is not None

    assert chosen()
    assert not any((chosen(shared=False), chosen(kernel="triton"), chosen(cuda=False), chosen(first="triton")))
