"""Merges of partial results of latent KV: at once, several at a time, many at a time, by the number of a row's groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longspan._kernels.paged import PagedKV, PagedWork, query_ranges
from longspan.testing import oracle

decode_call: Any = pytest.importorskip("longspan._kernels.triton.decode_call")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def launches_of_a_test() -> Iterator[None]:
    """Cached launches are keyed by sizes of a call, not by the constants that tests replace."""
    decode_call._launches.cache_clear()
    yield
    decode_call._launches.cache_clear()


@pytest.mark.parametrize(
    ("few", "medium", "medium_groups"),
    [(4, 16, 32), (1, 1, 3), (1, 2, 3), (1, 16, 32), (1, 2, 2)],
    ids=["at once", "in turn", "two at a time", "as medium", "as many"],
)
def test_splits_are_merged_by_the_number_of_groups(few: int, medium: int, medium_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three splits of 64 keys, and one of a shorter sequence."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 64)
    monkeypatch.setattr(decode_call, "_FEW_LATENT", few)
    monkeypatch.setattr(decode_call, "_MEDIUM_LATENT", medium)
    monkeypatch.setattr(decode_call, "_MEDIUM_GROUPS", medium_groups)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, h, n, 96, generator=generator).to(DEVICE) for h, n in ((5, 1), (1, 144)))
    table = torch.arange(18, dtype=torch.int32, device=DEVICE).view(2, 9)
    pages = PagedKV(k=k.view(18, 1, 16, 96), v=k.view(18, 1, 16, 96)[..., :64], table=table, shared=True)
    queries = decode_call.Queries(q, query_ranges([143, 39], [144, 40], [0, 1], [], q.device)[0], False)
    out, lse = decode_call.attend_pages(queries, pages, PagedWork(scale=0.2))
    for i, length in enumerate((144, 40)):
        alone = decode_call.Queries(q[i : i + 1], query_ranges([length - 1], [length], [i], [], q.device)[0], False)
        assert torch.equal(decode_call.attend_pages(alone, pages, PagedWork(scale=0.2))[0], out[i : i + 1])
        kept = k[i : i + 1, :, :length]
        expected = oracle(q[i : i + 1], kept, kept[..., :64], scale=0.2, return_lse=True)
        for got, right in zip((out, lse), expected, strict=True):
            torch.testing.assert_close(got[i : i + 1].double(), right, rtol=0, atol=1e-5)
