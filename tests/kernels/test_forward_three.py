"""The forward kernel with three consumer warp groups, on a GPU: outputs and lse equal the oracle's for every kind of block table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._masks.algebra import Mask
from longspan.testing import oracle

pytestmark = pytest.mark.gpu


def documents(tokens: int) -> Mask:
    """Causal documents of 150 tokens, every third of them padding, which sees nothing."""
    document = torch.arange(tokens, device="cuda") // 150
    return ls.causal() & ls.documents(ids=torch.where(document % 3 == 1, -1, document))


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda tokens: ls.full(),
    "causal": lambda tokens: ls.causal(),
    "window": lambda tokens: ls.sliding_window(150, 40),
    "prefix": lambda tokens: ls.prefix(min(tokens, 200)) | ls.causal(),
    "gaps": lambda tokens: ls.mask_mod(lambda b, h, q, kv: (q // 200) % 3 == (kv // 150) % 3),
    "documents": documents,
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Small calls take the kernel, too. The names of the kernels of all forward passes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    passes = pytest.importorskip("longspan._kernels.hopper.passes")
    names: list[str] = []
    forward_pass = passes.HopperCall.forward_pass

    def recorded(*args: Any, **options: Any) -> Any:
        one = forward_pass(*args, **options)
        names.append(one.kernel.fn.__name__)
        return one

    monkeypatch.setattr(passes, "takes_three_groups", lambda **sizes: True)
    monkeypatch.setattr(passes.HopperCall, "forward_pass", recorded)
    return names


def draw(heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k and v of two batch rows."""
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(2, h, n, dim, device="cuda", dtype=dtype) for h, n in sizes]


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Two calls, the second with other values, in memory that holds NaN."""
    for _ in range(2):
        torch.full_like(q, torch.nan)
        out, lse = ls.attention(q, k, v, mask=mask, kernel="hopper", return_lse=True)
        expected, expected_lse = oracle(q, k, v, mask=mask, return_lse=True)
        dense = oracle(q, k, v, mask=mask, dtype=q.dtype)
        assert float((out.double() - expected).norm()) <= 1.5 * float((dense.double() - expected).norm()) + 1e-6
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=0)
        for t in (q, k, v):
            t.normal_(std=2)


@pytest.mark.parametrize("name", MASKS)
def test_whole_sequences_match_the_oracle(name: str, kernels: list[str]) -> None:
    lengths = (1, 64, 65, 190, 384, 500, 1677)
    for tokens in lengths:
        check(*draw(6, 3, tokens, tokens), MASKS[name](tokens))
    assert set(kernels) == {"forward_three_kernel"}


@pytest.mark.parametrize("name", ["full", "causal", "window", "gaps"])
def test_queries_and_keys_of_different_lengths_match_the_oracle(name: str, kernels: list[str]) -> None:
    for q_len, kv_len in ((128, 700), (700, 300), (1, 900), (333, 128)):
        check(*draw(3, 1, q_len, kv_len), MASKS[name](q_len))
    assert set(kernels) == {"forward_three_kernel"}


@pytest.mark.parametrize(("dim", "dtype"), [(40, torch.bfloat16), (64, torch.float16)])
def test_small_head_dims_and_float16_match_the_oracle(dim: int, dtype: torch.dtype, kernels: list[str]) -> None:
    for tokens in (190, 1677):
        check(*draw(6, 3, tokens, tokens, dim, dtype), ls.causal())
    assert set(kernels) == {"forward_three_kernel"}


def test_strided_tensors_match_the_oracle(kernels: list[str]) -> None:
    joined = torch.randn(1, 4, 1600, 192, device="cuda", dtype=torch.bfloat16)
    check(joined[:, :, 64:1000, :64], joined[:, :, 64:1000, 64:128], joined[:, :, 64:1000, 128:], ls.causal())
    check(*(torch.randn(1, 1500, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)), ls.causal())
    assert set(kernels) == {"forward_three_kernel"}


def test_rows_do_not_see_tiles_of_the_other_row_of_their_item(kernels: list[str]) -> None:
    q, k, v = draw(5, 5, 1677, 1677)
    clean, clean_lse = ls.attention(q, k, v, mask=ls.causal(), kernel="hopper", return_lse=True)
    for value in (torch.nan, torch.inf):
        for start in range(128, 1677, 128):
            bad_k, bad_v = k.clone(), v.clone()
            bad_k[:, :, start : start + 128] = bad_v[:, :, start : start + 128] = value
            out, lse = ls.attention(q, bad_k, bad_v, mask=ls.causal(), kernel="hopper", return_lse=True)
            assert torch.equal(out[:, :, :start], clean[:, :, :start]) and torch.equal(lse[:, :, :start], clean_lse[:, :, :start])
    assert set(kernels) == {"forward_three_kernel"}


def test_every_run_gives_the_same_bits(kernels: list[str]) -> None:
    given = draw(8, 8, 3000, 3000)
    out = ls.attention(*given, mask=ls.causal(), kernel="hopper")
    assert all(torch.equal(ls.attention(*given, mask=ls.causal(), kernel="hopper"), out) for _ in range(20))


def test_calls_that_the_kernel_does_not_support_take_the_other_one(kernels: list[str]) -> None:
    q, k, v = draw(7, 7, 500, 500)
    by_head = ls.mask_mod(lambda b, h, q, kv: q >= kv + h)
    ls.attention(q, k, v, mask=by_head, kernel="hopper")
    ls.attention(q, k, v, mask=ls.causal(), score_mod=lambda s, b, h, q, kv: s + h, kernel="hopper")
    with ls.invariant():
        ls.attention(q, k, v, mask=ls.causal(), kernel="hopper")
    assert set(kernels) == {"forward_kernel"}
