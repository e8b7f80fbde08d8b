"""A cover of a table by rectangles counts every allowed (query, key) pair once, and kernels agree with the oracle on block-shaped masks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.kernels.shards import work_of
from tests.kernels.test_rectangles import painted
from torch import Tensor

import longspan as ls
from longspan._kernels import plain_tiles, rectangles
from longspan._kernels.protocol import AttentionInputs, Work
from longspan._kernels.tiling import Tiling
from longspan.testing import oracle

Mod = Callable[..., Tensor]


def random_block_mask(seed: int, tiles: int, block: int) -> Mod:
    """A union of a causal, windowed or empty base with random tiles, prefix blocks and global tokens; by head and batch row at times."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    base, window = rng.choice(["causal", "window", "none"]), rng.randrange(1, 3 * block)
    density = rng.choice([0.05, 0.3, 0.7])
    heads, rows = rng.choice([1, 3]), rng.choice([1, 2])
    extra = torch.rand(rows, heads, tiles, tiles, generator=generator) < density
    prefix, global_tokens = rng.choice([0, block, 2 * block - 3]), rng.choice([0, 1, block])
    below = rng.random() < 0.3

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = extra[b % rows if rows > 1 else 0 * b, h % heads if heads > 1 else 0 * h, q // block, kv // block]
        if base == "causal":
            seen = seen | (q >= kv)
        elif base == "window":
            seen = seen | ((q >= kv) & (q - kv < window))
        seen = seen | (kv < prefix) | (q < global_tokens)
        return seen & (q // block >= kv // block) if below else seen

    return mod


def random_segments(rng: random.Random, length: int, block: int) -> list[tuple[int, int]]:
    """The whole sequence, or some segments of it in any order, of lengths that are no multiples of the block."""
    if rng.random() < 0.3:
        return [(0, length)]
    cuts = sorted(rng.sample(range(1, length), rng.randrange(2, 5)))
    segments = [(a, b - a) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    rng.shuffle(segments)
    return segments[: rng.randrange(1, len(segments) + 1)]


@pytest.mark.parametrize("seed", range(60))
def test_a_cover_counts_every_allowed_pair_once_and_no_other(seed: int) -> None:
    rng = random.Random(seed)
    block, length = 16, rng.choice([96, 101, 113, 127])
    mod = random_block_mask(seed, -(-length // block), block)
    q_segments = random_segments(rng, length, block)
    kv_segments = q_segments if rng.random() < 0.5 else random_segments(rng, length, block)
    work = work_of(mod, q_segments, kv_segments, block=block, batch=2, heads=3)
    q_pos, kv_pos = (t.positions(torch.device("cpu")) for t in (work.q_tiles, work.kv_tiles))
    b, h = torch.arange(work.table.batch).view(-1, 1, 1, 1), torch.arange(work.table.heads).view(1, -1, 1, 1)
    want = mod(b, h, q_pos[:, None], kv_pos[None, :]).expand(work.table.batch, work.table.heads, len(q_pos), len(kv_pos))
    assert torch.equal(painted(work, mod), want)
    # The plain path selects pairs by `seen`: the same pairs as the cover, each in one part of one rectangle.
    q = torch.zeros(2, 3, len(q_pos), 4)
    call, count = (
        plain_tiles.PlainTiles(AttentionInputs(q=q, k=q.new_zeros(2, 3, len(kv_pos), 4), v=q.new_zeros(2, 3, len(kv_pos), 4)), work),
        torch.zeros(want.shape),
    )
    for rect in rectangles.rectangles(work):
        for part in call.parts(rect):
            seen = call.seen(part)
            count[part.b, part.h, part.q0 : part.q1, part.k0 : part.k1] += 1.0 if seen is None else seen[0, 0]
    assert torch.equal(count, want.float())


def bigbird(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    i, j = q // 128, kv // 128
    return ((i - j).abs() <= 1) | (j == 0) | (i == 0) | ((i * 5 + 2) % 7 == j)


def beyond_the_diagonal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) | ((kv // 128 == 5) & (q // 128 == 1))


def by_head_and_row(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) | ((kv // 128 == 3 + b) & (q // 128 == h))


def prefix_blocks(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) | (kv < 256)


def window_of_200(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 200)


MASKS = [bigbird, beyond_the_diagonal, by_head_and_row, prefix_blocks, window_of_200]


def agree(mask: Mod, length: int, dims: tuple[int, int], score_mod: Mod | None, *, sink: bool, tolerance: float = 1e-9) -> None:
    """out, lse and every gradient of the cpu kernel against the oracle, in float64."""
    torch.manual_seed(length)
    q = torch.randn(2, 2, length, dims[0], dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 1, length, d, dtype=torch.float64, requires_grad=True) for d in dims)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True) if sink else None
    leaves = [q, k, v, *([] if sinks is None else [sinks])]
    grad = torch.randn(2, 2, length, dims[1], dtype=torch.float64)
    results = []
    for fn in (lambda **how: ls.attention(**how, kernel="cpu"), oracle):
        out, lse = fn(q=q, k=k, v=v, mask=mask, score_mod=score_mod, sink=sinks, return_lse=True)
        results.append([out, lse, *torch.autograd.grad((out * grad).sum() + lse.sin().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 4 * torch.tanh(score / 4) + 0.01 * (q - kv)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dims", "score_mod", "sink"), [((8, 8), soft_cap, False), ((8, 4), None, True), ((8, 8), None, True)])
def test_the_cpu_kernel_equals_the_oracle_on_block_shaped_masks(
    mask: Mod, dims: tuple[int, int], score_mod: Mod | None, sink: bool
) -> None:
    agree(mask, 896, dims, score_mod, sink=sink)


@pytest.mark.parametrize("mask", [ls.full(), ls.causal(), window_of_200])
@pytest.mark.parametrize(("keys", "elements"), [(48, 1 << 21), (100, 4000), (83, 1 << 21)])  # 83: one key in the last tile
def test_the_plain_path_equals_the_oracle_over_several_tiles(mask: Mod, keys: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tiles, "TILE_KEYS", keys)
    monkeypatch.setattr(plain_tiles, "TILE_ELEMENTS", elements)
    agree(mask, 333, (8, 8), soft_cap, sink=False)


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_parts_of_a_rectangle_are_bounded_and_cover_each_pair_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 batch rows and 3 heads: 6 scores for each pair."""
    monkeypatch.setattr(plain_tiles, "TILE_KEYS", 20)
    monkeypatch.setattr(plain_tiles, "TILE_ELEMENTS", 6 * 200)
    q, k = torch.zeros(2, 3, 90, 8), torch.zeros(2, 1, 120, 8)
    table, tiling = ls.full().block_table(90, 120), Tiling(length=90, block=128)
    work = Work(table=table, q_tiles=tiling, kv_tiles=Tiling(length=120, block=128), scale=1.0)
    tiles = plain_tiles.PlainTiles(AttentionInputs(q=q, k=k, v=k), work)
    rect = rectangles.Rectangle(b=0, h=0, q0=13, q1=13 + 61, k0=31, k1=31 + 61, kind=kind)  # type: ignore[arg-type]
    count = torch.zeros(90, 120, dtype=torch.int64)
    for part in tiles.parts(rect):
        m, n = part.q1 - part.q0, part.k1 - part.k0
        assert n <= 20 and 6 * m * n <= 6 * 200 and part.kind == kind
        count[part.q0 : part.q1, part.k0 : part.k1] += 1
    inside = torch.zeros(90, 120, dtype=torch.int64)
    inside[13:74, 31:92] = 1
    assert count.max() == 1 and torch.equal(count * inside, count)
    assert torch.equal(count.tril(18) if kind == "causal" else count, inside.tril(18) if kind == "causal" else inside)


def test_the_flash_path_equals_the_oracle_under_a_window_of_several_tiles() -> None:
    agree(window_of_200, 1001, (16, 16), None, sink=False)
