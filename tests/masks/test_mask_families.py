"""Block tables of the mask families that users write equal brute force; all sizes differ and span several tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import longspan as ls
from longspan._masks.block_table import BLOCK_SIZE, EMPTY, FULL, PARTIAL
from longspan._masks.intervals import bounds
from longspan._masks.tracing import trace

BATCH, HEADS, Q_LEN, KV_LEN = 2, 3, 600, 900
GENERATOR = torch.Generator().manual_seed(7)
# Entries are used as indices again: negative ones count from the end, as in torch.
LINKS = torch.randint(-KV_LEN, KV_LEN, (KV_LEN,), generator=GENERATOR)
OFFSETS = torch.where(torch.arange(KV_LEN) < 300, -1 - torch.arange(KV_LEN), torch.arange(KV_LEN) // 3)
VALUES = torch.arange(KV_LEN) // 7
ROW_IDS = torch.sort(torch.randint(0, 6, (BATCH, KV_LEN), generator=GENERATOR)).values
ROW_LENGTHS = torch.tensor([130, 777])
HEAD_WINDOWS = torch.tensor([5, 130, 400])

FAMILIES: dict[str, Any] = {
    "square": lambda b, h, q, kv: (q - kv).square() < 100,
    "square from below": lambda b, h, q, kv: (q - kv).square() >= 100,
    "power of two": lambda b, h, q, kv: (q - kv) ** 2 < 40_000,
    "square of a float": lambda b, h, q, kv: ((q - kv) * 0.5).square() < 2500.0,
    "two squares": lambda b, h, q, kv: (q % 30 - kv % 30).square() + (q // 30 - kv // 30).square() <= 16,
    "abs": lambda b, h, q, kv: (q - kv).abs() < 200,
    "abs from below": lambda b, h, q, kv: (q - kv).abs() > 300,
    "window of 200": lambda b, h, q, kv: (q - kv < 200) & (q >= kv),
    "window without causal": lambda b, h, q, kv: q - kv < 200,
    "remainder": lambda b, h, q, kv: (q - kv) % 256 < 64,
    "floor division": lambda b, h, q, kv: (q - kv) // 128 == -2,
    "truncated division": lambda b, h, q, kv: torch.div(q - kv, 128, rounding_mode="trunc") == 0,
    "quotients, the first by 0": lambda b, h, q, kv: (q / kv >= 0) & (kv / (q - 300) < 4.0),
    "blocks of a grid": lambda b, h, q, kv: (q >= kv) | ((kv // BLOCK_SIZE == 5) & (q // BLOCK_SIZE == 1)),
    "BigBird": lambda b, h, q, kv: ((q // 128 - kv // 128).abs() <= 1) | (kv < 128) | (q < 128) | ((q // 128 * 3 + kv // 128) % 5 == 0),
    "strided blocks": lambda b, h, q, kv: (kv // 64 % 4 == 3) | (q // 64 == kv // 64),
    "prefix of blocks": lambda b, h, q, kv: (kv // 128 < 2) & (q // 128 > 2) | (q == kv),
    "lookup by a negative entry": lambda b, h, q, kv: VALUES[OFFSETS[q]] > 60,
    "lookup by scattered entries": lambda b, h, q, kv: VALUES[LINKS[kv]] < VALUES[q],
    "lookup by a negative difference": lambda b, h, q, kv: VALUES[q - kv] < 20,
    "lookup of a square": lambda b, h, q, kv: (VALUES[q] - VALUES[kv]).square() <= 9,
    "documents per row": lambda b, h, q, kv: (ROW_IDS[b, q] == ROW_IDS[b, kv]) & (q >= kv),
    "lengths per row": lambda b, h, q, kv: (kv < ROW_LENGTHS[b]) & (q < ROW_LENGTHS[b]),
    "windows per head": lambda b, h, q, kv: (q - kv).abs() < HEAD_WINDOWS[h],
    "shift per head and row": lambda b, h, q, kv: (q - kv - 100 * h + 50 * b).square() < 900,
}


def brute_force(mask: Any, block: tuple[int, int], q_len: int = Q_LEN, kv_len: int = KV_LEN) -> Tensor:
    """Kinds [BATCH, HEADS, q_tiles, kv_tiles], int8: every pair is evaluated."""
    b, h, q, kv = (torch.arange(n) for n in (BATCH, HEADS, q_len, kv_len))
    visible = mask(b[:, None, None, None], h[:, None, None], q[:, None], kv).expand(BATCH, HEADS, q_len, kv_len)
    padded = torch.nn.functional.pad(visible, (0, -kv_len % block[1], 0, -q_len % block[0]))
    tiles = padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).transpose(3, 4).flatten(4)
    return torch.where(tiles.all(-1), FULL, torch.where(tiles.any(-1), PARTIAL, EMPTY)).to(torch.int8)


@pytest.mark.parametrize("block", [(BLOCK_SIZE, BLOCK_SIZE), (16, 24)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_a_mask_family_equals_brute_force(name: str, block: tuple[int, int]) -> None:
    table = ls.mask_mod(FAMILIES[name]).block_table(Q_LEN, KV_LEN, block, batch=BATCH, heads=HEADS)
    want = brute_force(FAMILIES[name], block)
    assert torch.equal(table.to_dense().expand_as(want), want)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(FAMILIES)), min_size=2, max_size=3),
    operators=st.lists(st.sampled_from(["and", "or", "and not"]), min_size=2, max_size=2),
    lengths=st.tuples(st.integers(1, Q_LEN), st.integers(1, KV_LEN)),
    block=st.sampled_from([(128, 128), (32, 48), (64, 16)]),
)
def test_the_table_of_a_random_composition_equals_brute_force(names: Any, operators: Any, lengths: Any, block: Any) -> None:
    mask = ls.mask_mod(FAMILIES[names[0]])
    for name, operator in zip(names[1:], operators, strict=False):
        other = ls.mask_mod(FAMILIES[name])
        mask = mask & other if operator == "and" else mask | other if operator == "or" else mask & ~other
    table = mask.block_table(*lengths, block, batch=BATCH, heads=HEADS)
    want = brute_force(mask, block, *lengths)
    assert torch.equal(table.to_dense().expand_as(want), want)


@pytest.mark.parametrize("name", ["square", "square from below", "window of 200", "blocks of a grid", "BigBird", "shift per head and row"])
def test_attention_over_a_mask_family_equals_dense(name: str) -> None:
    q, k, v = (torch.randn(BATCH, HEADS, n, 8, generator=GENERATOR) for n in (Q_LEN, KV_LEN, KV_LEN))
    got, want = (ls.attention(q, k, v, mask=FAMILIES[name], kernel=kernel) for kernel in ("cpu", "dense"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [ls.sliding_window(200), ls.causal() & ls.sliding_window(200), ls.sliding_window(200, 150)], ids=str)
def test_attention_over_a_window_of_several_tiles_equals_dense(mask: ls.Mask) -> None:
    q, k, v = (torch.randn(1, 2, KV_LEN, 8, generator=GENERATOR, requires_grad=True) for _ in range(3))
    grads = []
    for kernel in ("cpu", "dense"):
        out = ls.attention(q, k, v, mask=mask, kernel=kernel)
        grads.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_lookup_by_a_negative_entry_is_not_reported_inside_its_table() -> None:
    """Kernels do not check the index of a lookup that is inside: a wrong answer here reads foreign memory."""
    one = torch.tensor([-1])
    cases = [
        (lambda b, h, q, kv: VALUES[OFFSETS[q]] > 60, [True, False]),
        (lambda b, h, q, kv: VALUES[OFFSETS[q].abs() - 1] > 60, [True, False]),
        (lambda b, h, q, kv: VALUES[OFFSETS[q].clamp(min=0)] > 60, [True, True]),
        (lambda b, h, q, kv: VALUES[OFFSETS[q].square() % KV_LEN] > 60, [True, True]),
        (lambda b, h, q, kv: VALUES[q * 0 + one[b]] > 60, [True, False]),
        (lambda b, h, q, kv: VALUES[LINKS[kv] + KV_LEN] > 60, [True, False]),
        (lambda b, h, q, kv: (VALUES[OFFSETS[b]] > 60) & (q >= kv), [True, False]),
    ]
    for i, (mask, inside) in enumerate(cases):
        traced = trace(mask, "mask")
        computed = bounds(traced.program, traced.captured(), Q_LEN, KV_LEN)
        assert list(computed.lookups.values()) == inside, i
