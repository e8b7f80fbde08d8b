"""Items of three half tiles: every half tile sees exactly the KV tiles of its row of the block table, with their kinds."""

from __future__ import annotations

import pytest
import torch

import longspan as ls
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, BlockTable

half_tiles = pytest.importorskip("longspan._kernels.hopper.half_tiles")
HALF = half_tiles.HALF
LENGTHS = (1, 190, 200, 384, 1677)


def ids(tokens: int) -> torch.Tensor:
    """Documents of 300, 400, 900 and more tokens. The second is padding, which sees nothing."""
    return torch.tensor([0] * 300 + [-1] * 400 + [1] * 900 + [2] * 500)[:tokens]


MASKS = {
    "full": lambda n: ls.full(),
    "causal": lambda n: ls.causal(),
    "window": lambda n: ls.sliding_window(300),
    "documents": lambda n: ls.causal() & ls.documents(ids=ids(n)),
    "prefix": lambda n: ls.prefix(min(n, 200)) | ls.causal(),
    "gaps": lambda n: ls.mask_mod(lambda b, h, q, kv: (q // 200) % 3 == (kv // 150) % 3),
    "nothing": lambda n: ls.mask_mod(lambda b, h, q, kv: q + kv < 0),
}


def kinds_of(table: BlockTable) -> list[dict[int, bool]]:
    """For each row of the table, whether its visible KV tiles are full. A short one is not."""
    rows: list[dict[int, bool]] = []
    for r in range(table.rows):
        runs = range(int(table.ptr[r]), int(table.ptr[r + 1]))
        tiles = [(t, i) for i in runs for t in range(int(table.first[i]), int(table.last[i]) + 1)]
        rows.append({t: bool(table.kind[i] == FULL) and 128 * (t + 1) <= table.kv_len for t, i in tiles})
    return rows


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_half_tiles_see_the_tiles_of_their_table_row(name: str, q_len: int) -> None:
    table = MASKS[name](q_len).block_table(q_len, q_len, block=128)
    items, expected = half_tiles.half_tile_items(table, Tiling(length=q_len, block=128)), kinds_of(table)
    seen: dict[int, dict[int, bool]] = {}
    for first, upper_halves, upper_end, lower_end, before, walked, after, run in items.items.tolist():
        blocks: list[tuple[int, int]] = []
        while len(blocks) < walked:
            blocks += [(t, int(items.full[run])) for t in range(int(items.first[run]), int(items.last[run]) + 1)]
            run += 1
        assert len(blocks) == walked
        for group in range(3):
            start, is_lower = first + group * HALF, group >= upper_halves
            mine = blocks[before:] if is_lower else blocks[: walked - after]
            assert mine, "a warp group without KV tiles would wait for none and compute nothing"
            if start < (lower_end if is_lower else upper_end):
                assert start not in seen and start % HALF == 0
                seen[start] = {t: bool(full >> is_lower & 1) for t, full in mine}
                assert len(seen[start]) == len(mine)
    assert seen == {s: expected[s // 128] for s in range(0, q_len, HALF) if expected[s // 128]}
    assert items.kv_tiles.tolist() == sorted(items.kv_tiles.tolist(), reverse=True)
