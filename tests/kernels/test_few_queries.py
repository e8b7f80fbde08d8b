"""Which calls the decode kernel computes: few queries of whole sequences over many keys, most of them visible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._kernels.few_queries import is_decoding
from longspan._kernels.protocol import AttentionInputs, Work
from longspan._kernels.tiling import Tiling
from longspan._masks.tracing import trace


def call(queries: int, keys: int, heads: int = 6, *, mask: Any = None) -> tuple[AttentionInputs, Work]:
    """Two KV heads."""
    q, k = torch.empty(3, heads, queries, 8), torch.empty(3, 2, keys, 8)
    tiles = Tiling(length=queries, block=128), Tiling(length=keys, block=128)
    table = (ls.full() if mask is None else mask).block_table(queries, keys, block=128)
    program = None if mask is None else trace(mask, "mask").program
    return AttentionInputs(q=q, k=k, v=k), Work(table=table, q_tiles=tiles[0], kv_tiles=tiles[1], scale=1.0, mask=program)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "expected"),
    [(21, 700, 6, True), (22, 700, 6, False), (0, 700, 6, False), (64, 512, 2, True), (65, 512, 2, False), (21, 511, 6, False)],
)
def test_all_queries_of_a_kv_head_fit_into_a_tile_over_512_keys_and_more(queries: int, keys: int, heads: int, expected: bool) -> None:
    assert is_decoding(*call(queries, keys, heads)) == expected


def test_half_of_the_key_tiles_must_be_visible() -> None:
    for visible, expected in ((640, True), (384, True), (256, False)):  # of 6 tiles
        assert is_decoding(*call(5, 700, mask=ls.mask_mod(lambda b, h, q, kv, n=visible: kv < n))) == expected


def test_parts_of_sequences_and_invariant_calls_are_left_to_other_kernels() -> None:
    inputs, work = call(5, 700)
    arrays = [
        Tiling(length=n, block=128, row=row, pos=row, count=(n - row).clamp(max=128)) for n in (5, 700) for row in [torch.arange(0, n, 128)]
    ]
    others = (
        replace(work, invariant=True), replace(work, q_tiles=arrays[0]), replace(work, kv_tiles=arrays[1]), replace(work, first_batch=1),
        replace(work, first_head=2), replace(work, device_tables=object()),
    )  # fmt: skip
    assert is_decoding(inputs, work) and not any(is_decoding(inputs, other) for other in others)
    assert not is_decoding(replace(inputs, local_kv=(inputs.k, inputs.v)), work)
