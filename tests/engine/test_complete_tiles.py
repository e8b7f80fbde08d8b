"""Query tiles whose last visible KV arrives in a step, marked so that kernels may finish them."""

from __future__ import annotations

import torch

import longspan as ls
from longspan._engine.local_schedule import StepTiles
from longspan._engine.schedule_builder import _mark_complete
from longspan._kernels.tiling import Tiling

BLOCK = 16


def steps_of(*seen: list[list[int]]) -> list[StepTiles]:
    """Steps of two key tiles each; seen: for each step, head and query tile, whether a key of the step is visible."""
    steps = []
    for by_head in seen:
        table = torch.tensor(by_head, dtype=torch.bool)
        heads, tiles = table.shape
        mask = ls.mask_mod(lambda b, h, q, kv, table=table: table[h, q // BLOCK] & (kv != 3))
        made = mask.block_table(tiles * BLOCK, 2 * BLOCK, block=BLOCK, heads=heads)
        tilings = (Tiling(length=n * BLOCK, block=BLOCK) for n in (tiles, 2))
        steps.append(StepTiles(table=made, q_tiles=next(tilings), kv_tiles=next(tilings)))
    return steps


def marks(steps: list[StepTiles]) -> list[list[int] | None]:
    marked = _mark_complete(steps, len(steps) - 1)
    return [None if s.complete_q_tiles is None else s.complete_q_tiles.int().tolist() for s in marked]


def test_a_tile_is_complete_in_the_last_step_that_it_sees_and_the_last_step_has_no_marks() -> None:
    both = lambda row: [row, row]
    assert marks(steps_of(both([1, 1, 1, 0, 1]), both([0, 1, 0, 1, 1]), both([0, 0, 0, 0, 1]))) == [[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], None]
    assert marks(steps_of(both([1, 1, 1]), both([1, 1, 1]), both([0, 1, 0]))) == [None, [1, 0, 1], None]


def test_nothing_is_marked_where_heads_differ_or_a_tile_sees_nothing() -> None:
    assert marks(steps_of([[1, 1, 1], [1, 1, 1]], [[0, 1, 0], [1, 1, 0]], [[0, 0, 1], [0, 0, 1]])) == [None] * 3
    assert marks(steps_of([[1, 0, 1]], [[0, 0, 1]], [[0, 0, 1]])) == [None] * 3
