"""Items of the last round cut along their keys: the plan on the host, and on a GPU what comes out."""

from __future__ import annotations

import heapq

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.test_hopper import on_hopper

import longspan as ls
from longspan.kernels.hopper.pieces import Pieces, pieces
from longspan.testing import oracle

COST = 4  # blocks, of every item


def stretches(found: Pieces, length: int) -> list[tuple[int, int]]:
    """First and last block of each piece of an item, as the kernel computes them."""
    shares = found.wide + found.parts - 1
    ends = [length * (found.wide + i) // shares for i in range(found.parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def rounds(lengths: list[int], programs: int) -> int:
    """When the last program ends, if each takes the next item as soon as it is free."""
    free = [0] * programs
    for length in lengths:
        heapq.heapreplace(free, free[0] + length + COST)
    return max(free)


@given(st.integers(1, 3000), st.integers(1, 40000), st.integers(1, 9), st.sampled_from([132, 114, 8, 1]))
def test_every_item_is_computed_once_and_the_last_program_ends_no_later(queries: int, keys: int, heads: int, programs: int) -> None:
    table = ls.full().block_table(queries, keys, block=128)
    length, items = -(-keys // 128), -(-queries // 128) * heads
    found = pieces(table, items, blocks=1, programs=programs)
    assert found.uncut + found.cut == items and found.items == found.uncut + found.cut * found.parts
    parts = stretches(found, length) if found.cut else []
    assert all(a < b for a, b in parts) and [a for a, _ in parts[1:]] == [b for _, b in parts[:-1]]
    if found.cut:
        assert parts[0][0] == 0 and parts[-1][1] == length and found.cut < programs
        after = [length] * found.uncut + [b - a for a, b in parts for _ in range(found.cut)]
        assert rounds(after, programs) < rounds([length] * items, programs)


def test_few_queries_over_many_keys_keep_all_programs_busy() -> None:
    found = pieces(ls.full().block_table(256, 65536, block=128), 64, blocks=1, programs=132)
    assert (found.uncut, found.cut, found.parts) == (0, 64, 2)
    assert pieces(ls.full().block_table(100, 65536, block=128), 4, blocks=1, programs=132).parts == 22  # ⌊√512⌋: more would cost more


def test_items_that_differ_are_not_cut_but_those_of_a_late_chunk_are() -> None:
    assert pieces(ls.causal().block_table(4096, 4096, block=128), 32 * 9, blocks=1, programs=132) == Pieces(32 * 9)
    late = ls.mask_mod(lambda b, h, q, kv: q + 60000 >= kv).block_table(640, 60640, block=128)
    assert pieces(late, 5 * 9, blocks=1, programs=132).parts == 2


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "dim"),
    [
        (2, 3, 1, 300, 3001, 128),
        (1, 1, 1, 100, 9000, 64),
        (1, 10, 5, 1900, 2300, 96),
        (1, 18, 2, 999, 2177, 128),
        (1, 5, 5, 260, 2500, 256),
    ],
)
def test_cut_items_give_the_same_result_and_bits(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, sink: bool
) -> None:  # fmt: skip
    on_hopper()
    torch.manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(batch, h, n, dim, device="cuda", dtype=torch.bfloat16) for h, n in shapes)
    sinks = torch.randn(heads, device="cuda") if sink else None

    def run() -> tuple[Tensor, Tensor]:
        return ls.attention(q, k, v, mask=ls.full(), sink=sinks, return_lse=True, kernel="hopper")

    assert pieces(ls.full().block_table(queries, keys, block=128), -(-queries // 128) * heads * batch, blocks=1, programs=132).cut
    out, lse = run()
    want, dense = (oracle(q, k, v, mask=ls.full(), sink=sinks, dtype=d) for d in (torch.float64, torch.bfloat16))
    assert float((out.double() - want).norm()) <= 1.1 * float((dense.double() - want).norm())
    assert torch.allclose(lse, oracle(q, k, v, mask=ls.full(), sink=sinks, return_lse=True)[1].float(), atol=1e-3)
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(run(), (out, lse), strict=True))
