"""FP8 pages with scales: conversion, attention, and rejected settings."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tests.cache.cases import Case
from tests.cache.test_kv_cache import saved
from torch import Tensor

import longspan as ls
from longspan._kernels.paged import to_fp8
from longspan.testing import oracle, run_processes, virtual_world

FP8 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.3, 0.02
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 16, 24


def make_cache(**options: Any) -> ls.KVCache:
    given = {"pages": 60, "page_size": 8, "layers": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM}
    return ls.KVCache(**{**given, "dtype": FP8, "k_scale": K_SCALE, "v_scale": V_SCALE, **options})


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)
    return [torch.randn(1, heads, count, dim, generator=generator).to(dtype) for heads, dim in shapes]


def held(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What pages hold of k and v."""
    return to_fp8(k, K_SCALE).double() * K_SCALE, to_fp8(v, V_SCALE).double() * V_SCALE


def all_numbers() -> Tensor:
    """The finite FP8 numbers, in order."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    return numbers[numbers.isfinite()].unique()


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_element_becomes_the_nearest_fp8_number(dtype: torch.dtype, scale: float) -> None:
    numbers = all_numbers()
    x = torch.cat([torch.randn(4000).exp() * torch.randn(4000).sign(), torch.linspace(-500, 500, 999)]).to(dtype)
    got = to_fp8(x, scale).double()
    distance = (x.double() / scale - numbers[:, None]).abs()
    assert torch.isin(got, numbers).all()
    torch.testing.assert_close((x.double() / scale - got).abs(), distance.amin(0), rtol=1e-5, atol=1e-7)


def test_elements_beyond_the_range_become_its_ends_and_others_nan() -> None:
    x = torch.tensor([448.0, 449.0, 1e30, -1e30, math.inf, -math.inf, math.nan])
    got = to_fp8(x, 1.0).double()
    assert got[:4].tolist() == [448, 448, 448, -448] and got[4:].isnan().all()
    assert to_fp8(torch.tensor([1e38]), 1e-3).item() == 448
    assert to_fp8(torch.tensor([-1e300], dtype=torch.float64), 1.0).item() == -448


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_attention_is_that_over_the_numbers_of_pages(dtype: torch.dtype) -> None:
    cache = make_cache()
    ids = cache.allocate(1)
    q, k, v = tokens(90, dtype)
    seen_k, seen_v = held(k, v)
    expected, expected_lse = oracle(q, seen_k, seen_v, mask=ls.causal(), scale=0.4, return_lse=True)
    start = 0
    for count in (70, 1, 19):  # by a kernel of training, then as few queries
        part = slice(start, start + count)
        out, lse = ls.attention(
            q[:, :, part], k[:, :, part], v[:, :, part], cache=cache.step(ids, count), layer=0, mask=ls.causal(), scale=0.4, return_lse=True
        )
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected[:, :, part], rtol=0, atol=4 * torch.finfo(dtype).eps + 1e-6)
        torch.testing.assert_close(lse.double(), expected_lse[:, :, part], rtol=0, atol=1e-5)
        start += count


def test_a_chunk_and_few_queries_round_once() -> None:
    """In bfloat16 with scales that are no powers of two."""
    q, k, v = tokens(80, torch.bfloat16)
    expected = oracle(q, *held(k, v), mask=ls.causal())
    for counts in ((80,), (60, 20)):
        cache, outs, start = make_cache(), [], 0
        ids = cache.allocate(1)
        for count in counts:
            part = [x[:, :, start : start + count] for x in (q, k, v)]
            outs.append(ls.attention(*part, cache=cache.step(ids, count), layer=0, mask=ls.causal()))
            start += count
        error = ((torch.cat(outs, 2).double() - expected) / expected).abs()
        assert error.median() < 2**-9 and error.max() < 2**-8


def test_scales_of_a_layer_are_factors_of_the_call() -> None:
    a, b = 0.5, 4.0
    q, k, v = tokens(20)
    inside, outside = make_cache(k_scale=a * K_SCALE, v_scale=b * V_SCALE), make_cache()
    expected = ls.attention(q, k, v, cache=inside.step(inside.allocate(1), 20), layer=0, scale=0.3)
    got = b * ls.attention(q, k / a, v / b, cache=outside.step(outside.allocate(1), 20), layer=0, scale=a * 0.3)
    torch.testing.assert_close(got, expected)


def test_a_token_takes_a_byte_per_element() -> None:
    cache = make_cache()
    assert cache._k.element_size() == cache._v.element_size() == 1


@pytest.mark.parametrize("count", [12, 70])
@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_a_nan_reaches_the_rows_that_see_it(kernel: str, count: int) -> None:
    if kernel == "triton" and not pytest.importorskip("longspan._kernels.gpu.interpreter").interpreted():
        pytest.skip("needs Triton's interpreter")
    cache = make_cache()
    q, k, v = tokens(count)
    v[0, 1, 5, 3] = math.inf
    out = ls.attention(q, k, v, cache=cache.step(cache.allocate(1), count), layer=0, mask=ls.causal(), kernel=kernel)
    expected = torch.zeros(1, HEADS, count, VALUE_DIM, dtype=torch.bool)
    expected[:, HEADS // 2 :, 5:, 3] = True
    assert torch.equal(out.isnan(), expected)


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "saved": saved}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_and_a_larger_cache_hold_the_same_numbers(how: str) -> None:
    cache = make_cache(pages=3)
    ids = cache.allocate(1)
    first, second = tokens(20), tokens(3, seed=1)
    ls.attention(*first, cache=cache.step(ids, 20), layer=0)
    other = COPIES[how](cache)
    other.grow(5)
    outs = [ls.attention(*second, cache=c.step(ids, 3), layer=0) for c in (cache, other)]
    assert torch.equal(*outs) and other.scales == (K_SCALE, V_SCALE)


def by_rank(mesh: Any) -> list[Tensor]:
    """Outputs of a prefill and of decoding over a mesh, after a check of what each step exchanges."""
    cache = make_cache(pages=100, mesh=mesh)
    ids, start, outs = cache.allocate(1), 0, []
    q, k, v = tokens(340)
    for count, passed in ((300, "KV"), (39, "partial results"), (1, "partial results")):
        part, step = slice(start, start + count), cache.step(ids, count)
        outs.append(ls.attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=step, layer=0, mask=ls.causal()))
        assert mesh is None or step.passed[0] == passed
        start += count
    return outs


def test_ranks_give_the_results_of_one_device() -> None:
    expected = by_rank(None)
    for outs in virtual_world(3).run(by_rank):
        torch.testing.assert_close(outs, expected)


def test_ranks_pass_bytes() -> None:
    def run(mesh: Any) -> None:
        cache = make_cache(pages=100, mesh=mesh)
        ls.attention(*tokens(300), cache=cache.step(cache.allocate(1), 300), layer=0, mask=ls.causal())

    world = virtual_world(3)
    world.run(run)
    kv, results = 300 * KV_HEADS * (DIM + VALUE_DIM), 300 * HEADS * VALUE_DIM * 4
    assert 2 * (kv + results) <= world.bytes_sent <= 2.02 * (kv + results)


def on_processes() -> None:
    import torch.distributed as dist

    torch.testing.assert_close(by_rank(dist.group.WORLD), by_rank(None))
    cache = make_cache(mesh=dist.group.WORLD, k_scale=0.5 + dist.get_rank())
    with pytest.raises(ValueError, match=r"k_scale and v_scale of the cache: rank 1 has \(1\.5, 0\.02\), rank 0 has \(0\.5, 0\.02\)"):
        ls.attention(*tokens(1), cache=cache.step(cache.allocate(1), 1), layer=0)


def test_ranks_with_pages_of_different_dtypes_all_raise() -> None:
    def run(mesh: Any) -> str:
        options = {"dtype": torch.float32, "k_scale": 1.0, "v_scale": 1.0} if mesh.rank else {}
        cache = make_cache(mesh=mesh, **options)
        with pytest.raises(ValueError, match=r"cache of torch.float32.*, rank 0 has attention over a cache of torch.float8_e4m3fn, KV"):
            ls.attention(*tokens(85), cache=cache.step(cache.allocate(1), 85), layer=0, mask=ls.causal())
        return "raised"

    assert virtual_world(2).run(run) == ["raised"] * 2


@pytest.mark.processes
def test_processes_give_the_results_of_one_and_compare_scales() -> None:
    run_processes(on_processes, 2)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale of another dtype": ({"dtype": torch.bfloat16, "v_scale": 1.0}, ValueError, "k_scale: expected 1 for torch.bfloat16, got 0.3"),
    "zero": ({"k_scale": 0.0}, ValueError, "k_scale: expected a number from"),
    "negative": ({"v_scale": -1.0}, ValueError, "v_scale: expected a number from"),
    "nan": ({"v_scale": math.nan}, ValueError, "v_scale: expected a number from"),
    "infinite": ({"v_scale": math.inf}, ValueError, "v_scale: expected a number from"),
    "tensor": ({"k_scale": torch.ones(1)}, TypeError, "k_scale: expected a float, got Tensor"),
    "huge": ({"k_scale": 1e200}, ValueError, "k_scale: expected a number from"),
    "bool": ({"k_scale": True}, TypeError, "k_scale: expected a float, got bool"),
    "latent": ({"shared_kv": True, "value_dim": 8}, ValueError, "shared_kv: expected a dtype of 16 bits or more"),
    "e5m2": ({"dtype": torch.float8_e5m2}, ValueError, "dtype: expected one of .*float8_e4m3fn, got torch.float8_e5m2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_have_no_meaning_are_refused(name: str) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make_cache(**options)


def test_fp8_tokens_are_rejected() -> None:
    cache = make_cache()
    q, k, v = (x.to(FP8) for x in tokens(2))
    with pytest.raises(TypeError, match=r"q: expected one of .* got torch.float8_e4m3fn"):
        ls.attention(q, k, v, cache=cache.step(cache.allocate(1), 2), layer=0)


def fp8_seeds(first: int, count: int) -> list[int]:
    """Seeds of random cases with FP8 pages."""
    return [seed for seed in range(first, first + 40 * count) if Case(seed).scales][:count]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_random_caches_on_a_gpu(dtype: torch.dtype) -> None:
    for seed in fp8_seeds(0, 4):
        Case(seed, device="cuda", dtype=dtype, longest=700).run()


@pytest.mark.gpu
def test_the_decode_kernel_writes_the_numbers_of_torch() -> None:
    """All 16-bit numbers, ties between FP8 numbers included."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).cuda().view(2, 1, 32, 1024)
        for dim in (64, 128, 256):
            k = x.reshape(-1, 1, 64, dim)[: 2**16 // (64 * dim)]
            cache = ls.KVCache(
                pages=len(k) + 8,
                page_size=64,
                layers=1,
                kv_heads=1,
                head_dim=dim,
                dtype=FP8,
                k_scale=0.3,
                v_scale=2.0,
                device="cuda",
            )
            ids = cache.allocate(len(k))
            ls.attention(k, k, k, cache=cache.step(ids, 64), layer=0, kernel="triton")
            pages = cache.layer_pages(0)
            for row, one in enumerate(k):
                for got, scale in zip(pages.gather(cache.sequence(ids[row]).row, 0, 64), (0.3, 2.0), strict=True):
                    wanted = to_fp8(one, scale).view(torch.uint8)
                    same = (got.view(torch.uint8) == wanted) | (got.float().isnan() & to_fp8(one, scale).float().isnan())
                    assert same.all()
