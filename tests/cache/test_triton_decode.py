"""The Triton decode kernels over pages: in the interpreter, with short splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cache.cases import Case
from torch import Tensor

import longspan as ls
from longspan._cache.step import tokens_first
from longspan.testing import oracle

decode_call: Any = pytest.importorskip("longspan._kernels.triton.decode_call")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 tokens or more, so that short sequences have several."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 32)


@pytest.mark.parametrize("seed", [5, 8, 9])
def test_random_caches_match_the_oracle(seed: int) -> None:
    Case(seed, kernel="triton", device=DEVICE, dtype=torch.float32, longest=60).run()


def decoded(tokens: list[Tensor], rows: list[int], *, page_size: int, prefix: int, **options: Any) -> Tensor:
    """out of the last tokens of sequences, after a prefix that is written without attention."""
    q, k, v = (x[rows].to(DEVICE) for x in tokens)
    cache = ls.KVCache(pages=200, page_size=page_size, layers=1, kv_heads=k.shape[1], head_dim=k.shape[3], dtype=k.dtype, device=DEVICE)
    ids, count = cache.allocate(len(rows)), q.shape[2] - prefix
    cache.step(ids, prefix)
    pages = cache.layer_pages(0)
    step = cache.step(ids, count)
    pages.write(*(tokens_first(x[:, :, :prefix]) for x in (k, v)), cache.sequence(ids[0]).unfinished[0].ranges)
    for sequence_id in ids:
        del cache.sequence(sequence_id).unfinished[0]
    rest = (x[:, :, prefix:] for x in (q, k, v))
    return ls.attention(*rest, cache=step, layer=0, kernel="triton", **options)


def random_tokens(batch: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, count, 16, generator=generator) for heads in (4, 2, 2)]


def test_bits_are_equal_alone_batched_and_on_other_pages() -> None:
    tokens = random_tokens(3, 150)
    options: dict[str, Any] = {"prefix": 148, "mask": ls.causal()}
    expected = decoded(tokens, [0, 1, 2], page_size=64, **options)
    assert torch.equal(decoded(tokens, [1], page_size=64, **options), expected[1:2])
    assert torch.equal(decoded(tokens, [2, 0], page_size=16, **options), expected[[2, 0]])
    assert torch.equal(decoded(tokens, [0, 1, 2], page_size=7, **options), expected)


def test_a_shorter_sequence_with_more_splits_decodes_as_alone() -> None:
    """The size of a split doubles with the length: here 159 tokens have more splits than 160."""
    assert decode_call.split_count(159, 2) > decode_call.split_count(160, 2)
    tokens = [x.to(DEVICE) for x in random_tokens(2, 160)]
    cache = ls.KVCache(pages=20, layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    ids, prefix = cache.allocate(2), [158, 159]
    step = cache.step(ids, prefix)
    joined = [torch.cat([x[i : i + 1, :, :n] for i, n in enumerate(prefix)], 2) for x in tokens]
    ls.attention(*joined, cache=step, layer=0, kernel="cpu" if DEVICE == "cpu" else "auto")
    last = [torch.stack([x[i, :, n : n + 1] for i, n in enumerate(prefix)]) for x in tokens]
    out = ls.attention(*last, cache=cache.step(ids, 1), layer=0, kernel="triton")
    for i, n in enumerate(prefix):
        expected = oracle(last[0][i : i + 1], *(x[i : i + 1, :, : n + 1] for x in tokens[1:]))
        torch.testing.assert_close(out[i : i + 1].double(), expected[0] if isinstance(expected, tuple) else expected, rtol=1e-4, atol=1e-5)


def test_lookups_beyond_a_table_raise() -> None:
    bias = torch.randn(40, device=DEVICE)
    cache = ls.KVCache(pages=2, layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, device=DEVICE)
    ids, x = cache.allocate(1), torch.randn(1, 1, 50, 16, device=DEVICE)
    with pytest.raises(ValueError, match="may look outside of a tensor that it captures"):
        ls.attention(x, x, x, cache=cache.step(ids, 50), layer=0, score_mod=lambda s, b, h, q, kv: s + bias[kv], kernel="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_do_not_depend_on_the_page_size(dtype: torch.dtype, dim: int) -> None:
    assert len({decode_call.choose_tile(dim=dim, dtype=dtype, page_size=size).n for size in (0, 7, 16, 64, 128, 192)}) == 1


@pytest.mark.parametrize("hidden", [float("nan"), float("inf")])
def test_hidden_values_change_no_bit(hidden: float) -> None:
    tokens = random_tokens(1, 70)
    options: dict[str, Any] = {"page_size": 16, "prefix": 69, "mask": ls.mask_mod(lambda b, h, q, kv: kv != 40)}
    expected = decoded(tokens, [0], **options)
    for x in tokens[1:]:
        x[:, :, 40] = hidden
    assert torch.equal(decoded(tokens, [0], **options), expected)


def test_visible_infinite_values_reach_the_output() -> None:
    tokens = random_tokens(1, 70)
    tokens[2][:, 0, 40, 3] = float("inf")
    out = decoded(tokens, [0], page_size=16, prefix=69)
    assert out[0, :2, 0, 3].tolist() == [float("inf")] * 2 and int(out.isfinite().logical_not().sum()) == 2


def test_named_kernel_rejects_wide_heads() -> None:
    cache = ls.KVCache(pages=2, layers=1, kv_heads=1, head_dim=300, dtype=torch.float32, device=DEVICE)
    x = torch.zeros(1, 1, 1, 300, device=DEVICE)
    with pytest.raises(ValueError, match="kernel 'triton' does not support this call: head dims 300 and 300"):
        ls.attention(x, x, x, cache=cache.step(cache.allocate(1), 1), layer=0, kernel="triton")


@pytest.mark.parametrize("queries", [1, 9])
def test_contiguous_keys_match_the_oracle(queries: int) -> None:
    q, k, v = (x.to(DEVICE) for x in random_tokens(2, 600))
    q, mask = q[:, :, :queries], ls.mask_mod(lambda b, h, q, kv: (kv + b) % (h + 2) != 0)
    out, lse = ls.attention(q, k, v, mask=mask, score_mod=lambda s, b, h, i, j: s + 0.001 * (j - i), return_lse=True, kernel="triton")
    right = oracle(q, k, v, mask=mask, score_mod=lambda s, b, h, i, j: s + 0.001 * (j - i), return_lse=True)
    for got, expected in zip((out, lse), right):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="needs 4 GiB")
def test_heads_of_a_long_prefill_are_further_apart_than_32_bits() -> None:
    """Keys [1, 3, 1, 16] of which head 2 begins at element 2³¹, in 4 GiB of memory that is not touched otherwise."""
    try:
        k = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((1, 3, 1, 16), (2**31 + 16, 2**30, 16, 1))
    except RuntimeError:
        pytest.skip("4 GiB of memory are not available")
    k.copy_(torch.arange(1.0, 4.0)[None, :, None, None])
    cache = ls.KVCache(pages=1, page_size=4, layers=1, kv_heads=3, head_dim=16, dtype=torch.float16)
    step = cache.step(cache.allocate(1), 1)
    pages = cache.layer_pages(0)
    decode_call.write_tokens(pages, k, k, step.ranges)
    assert pages.k[0, :, 0, 0].tolist() == pages.v[0, :, 0, 15].tolist() == [1.0, 2.0, 3.0]
