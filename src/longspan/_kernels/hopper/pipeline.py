"""mbarriers, rings of buffers, int32 records in shared memory and TMA loads, shared by the Hopper kernels.

A ring of COUNT slots has two arrays of mbarriers, `full` and `empty`. The i-th use of the ring waits on its slot with phase
`ring_phase(i, COUNT)` (readers, on `full`) or with the opposite phase (writers, on `empty`, so that the first COUNT writes do not wait).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longspan._kernels.hopper.gluon_names import tma_load


class Captured(NamedTuple):
    """Pointers to the tensors that the mask and the score mod capture, and their sizes. In `score`, a loaded element may replace its
    pointer (`gpu.hoisted_lookups`); in `mask`, bounds may replace all pointers (`gpu.row_bounds`).
    """

    mask: Any
    mask_sizes: Any
    score: Any
    score_sizes: Any


class RunPointers(NamedTuple):
    """A block table's runs of full, or of partial, tiles: table row r has the runs ptr[2 r] to ptr[2 r + 1] − 1, each of the tiles first to
    last. In lists of pairs of half tiles (`hopper.half_blocks`), run r is the tiles first[2 r] and first[2 r + 1].
    """

    ptr: Any
    first: Any
    last: Any


class KvSource(NamedTuple):
    """TMA descriptors of keys, or of values.

    If `local` is not None, it holds the first `local_tokens` tokens and `rest` the tokens after them. No tile spans both.
    """

    rest: Any
    local: Any
    local_tokens: Any


class KvBarriers(NamedTuple):
    """Arrays of mbarriers, one per stage, of a ring of K and V tiles."""

    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class BufferBarriers(NamedTuple):
    """mbarriers of one buffer, or arrays of them for a ring: `full` after a write, `empty` after the reads."""

    full: Any
    empty: Any


@gluon.jit
def mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """An array of COUNT mbarriers, each of which completes a phase after ARRIVALS arrivals."""
    array = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(array.index(i), count=ARRIVALS)
    return array


@gluon.jit
def ring_slot(i, COUNT: gl.constexpr):
    """i modulo COUNT, i ≥ 0. Powers of two use a mask: a signed modulo takes registers that the main loops lack."""
    return i & (COUNT - 1) if COUNT & (COUNT - 1) == 0 else i % COUNT


@gluon.jit
def ring_phase(i, COUNT: gl.constexpr):
    """The parity of the number of earlier uses of slot `ring_slot(i, COUNT)`: the phase of its `full` mbarrier."""
    return (i & COUNT) // COUNT if COUNT & (COUNT - 1) == 0 else (i // COUNT) & 1


@gluon.jit
def next_use(slot, phase, COUNT: gl.constexpr):
    """(slot, phase) of a ring's next use. Counted, not divided: a division by 3 takes ten instructions."""
    last = slot == COUNT - 1
    return gl.where(last, 0, slot + 1), phase ^ last.to(gl.int32)


@gluon.jit
def shared_ints(COUNT: gl.constexpr):
    """COUNT int32 in shared memory."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_int(ints, i, value):
    """ints[i] = value, by all threads of the warp or warp group."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ints.index(i).store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def load_int(ints, i):
    """ints[i], as a scalar."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(ints.index(i).load(layout), 0)


@gluon.jit
def lane_number(i):
    """The number of a thread in its warp, as a scalar that differs between threads: for `load_int` and `store_int` alone. i: any int."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_item(counter):
    """The number of the next item, from the global counter.

    Relaxed: no data is handed over through the counter. acq_rel would fence before the atomic and invalidate L1 after it, at every item.
    """
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def load_kv_tile(source, b, h, row, full, tile):
    """Start the TMA load of a tile of a `KvSource`, from row `row` of head h on. `full` completes when the tile has arrived."""
    mbarrier.expect(full, source.rest.block_type.nbytes)
    if source.local is None:
        tma_load(source.rest, [b, h, row, 0], full, tile)
    else:
        if row < source.local_tokens:
            tma_load(source.local, [b, h, row, 0], full, tile)
        else:
            tma_load(source.rest, [b, h, row - source.local_tokens, 0], full, tile)


@gluon.jit
def tile_2d(tiles, i):
    """Tile i of a TMA ring [slots, 1, 1, rows, dim], as [rows, dim]."""
    return tiles.index(i).reshape([tiles.shape[3], tiles.shape[4]])
