"""The state warp of the forward kernel: loads an item's running state (out, lse) during its main loop and stores the new one during the
next item's, both by TMA.

CTAs begin and end items of equal length at the same time. If the consumer warp groups loaded and stored running states themselves, all of
them would wait for global memory at once.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.forward_producer import (
    BATCH,
    COMPLETE,
    GROUP_ROWS,
    GROUPS,
    HEAD,
    ITEM_SLOTS,
    REPEATED,
    ROW,
    ROWS_LEFT,
    SPLIT_PART,
    item_field,
)
from longspan._kernels.hopper.gluon_names import tma_load, tma_store
from longspan._kernels.hopper.pipeline import ring_phase, ring_slot
from longspan._kernels.hopper.repeats import poisoned_groups
from longspan._kernels.hopper.tile_io import view_as


class StateBarriers(NamedTuple):
    """`ready`: the old state has arrived, or there is none and the buffer is free. `filled`: the consumers wrote the new state."""

    ready: Any
    filled: Any


@gluon.jit
def moved_by_tma(left, split_part, ROWS: gl.constexpr):
    """Whether the state warp moves an item's state: the item has all its rows and is not split along KV."""
    return (left >= ROWS) & (split_part < 0)


@gluon.jit
def _store_tiles(desc, b, h, row, state_s, groups):
    """Start the TMA stores of an item's output tiles, one per consumer warp group. groups: a bit per group that stores; None for all."""
    for group in gl.static_range(GROUPS):
        if groups is None:
            tma_store(desc, [b, h, row + group * GROUP_ROWS, 0], view_as(state_s.index(group), desc))
        else:
            if (groups >> group) & 1 != 0:
                tma_store(desc, [b, h, row + group * GROUP_ROWS, 0], view_as(state_s.index(group), desc))


@gluon.jit
def move_states(
    out_desc, complete_out_desc, old_out_desc, old_lse_ptr, heads, q_len, state_s, lse_s, items_s, bars, state_bars, state_due, noted
):  # fmt: skip
    """The state warp. state_s: float32 [GROUPS, 1, 1, GROUP_ROWS, EP]. lse_s: float32 [GROUPS, GROUP_ROWS], if there is an old state.

    `state_due` completes when the item's first KV blocks, which are needed before its state, are in flight.
    noted: of `repeats.repeat_item`.
    """
    t = 0  # items so far
    mbarrier.wait(bars.item_full.index(0), 0)
    h = item_field(items_s, 0, HEAD)
    while h >= 0:
        slot = ring_slot(t, ITEM_SLOTS)
        b = item_field(items_s, slot, BATCH)
        row = item_field(items_s, slot, ROW)
        by_tma = moved_by_tma(item_field(items_s, slot, ROWS_LEFT), item_field(items_s, slot, SPLIT_PART), GROUPS * GROUP_ROWS)
        complete = 0
        if complete_out_desc is not None:
            complete = item_field(items_s, slot, COMPLETE)
        groups = None
        if noted is not None:
            repeated = item_field(items_s, slot, REPEATED)
        mbarrier.arrive(bars.item_empty.index(slot), count=1)
        if old_out_desc is not None:
            mbarrier.wait(state_due.index(ring_slot(t, 2)), ring_phase(t, 2))
            if by_tma:
                lane_layout: gl.constexpr = gl.BlockedLayout([GROUP_ROWS // 32], [32], [1], [0])
                old_lse = old_lse_ptr + (wide(b) * heads + h) * q_len + row + gl.arange(0, GROUP_ROWS, layout=lane_layout)
                for group in gl.static_range(GROUPS):
                    lse_s.index(group).store(gl.load(old_lse + group * GROUP_ROWS))
                mbarrier.expect(state_bars.ready, old_out_desc.block_type.nbytes * GROUPS)
                for group in gl.static_range(GROUPS):
                    coordinates = [b, h, row + group * GROUP_ROWS, 0]
                    tma_load(old_out_desc, coordinates, state_bars.ready, state_s.index(group))
                mbarrier.arrive(state_bars.ready, count=1)
            else:
                mbarrier.arrive(state_bars.ready, count=2)
        else:
            mbarrier.arrive(state_bars.ready, count=2)
        mbarrier.wait(state_bars.filled, t & 1)
        if noted is not None:
            groups = gl.where(repeated == 0, ~poisoned_groups(noted, slot, GROUPS), repeated)
        if by_tma:
            if complete_out_desc is None:
                _store_tiles(out_desc, b, h, row, state_s, groups)
            else:
                if complete == 0:
                    _store_tiles(out_desc, b, h, row, state_s, groups)
                else:
                    _store_tiles(complete_out_desc, b, h, row, state_s, groups)
            tma.store_wait(0)
        t += 1
        mbarrier.wait(bars.item_full.index(ring_slot(t, ITEM_SLOTS)), ring_phase(t, ITEM_SLOTS))
        h = item_field(items_s, ring_slot(t, ITEM_SLOTS), HEAD)
