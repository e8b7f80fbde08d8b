"""One warp of the forward kernel that carries running results: it has the copy engine bring an item's from memory while its keys are still
weighed, and take the new one away while the next item's are.

Programs begin and end items of the same length together. Written and read by the warps that compute, running results would have all of them
wait for memory at once.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.barriers import place_of, read_number, round_of


@gluon.jit
def is_held(left, piece, ROWS: gl.constexpr):
    """Whether an item's result goes through shared memory: all its rows exist, and it is not a piece of one."""
    return (left >= ROWS) & (piece < 0)


@gluon.jit
def narrow(held, desc):
    """A place for a result as the tensor that it goes to holds it."""
    return held._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def carry(
    out_desc, done_desc, old_desc, old_lse_ptr, heads, q_len, held, lse_s, item_s, item_bars, held_bars, begun,
    GROUPS: gl.constexpr, HALF: gl.constexpr, AHEAD: gl.constexpr, ITEM: gl.constexpr,
):  # fmt: skip
    """`held`: a result of each group, float32; `lse_s`: its logarithms, where there is one before. held_bars: (they are there or may be
    written, they are written). `begun`: the first keys of an item are on their way, which are needed sooner.
    """
    item_full, item_empty = item_bars
    ready, filled = held_bars
    t = 0
    mbarrier.wait(item_full.index(0), 0)
    h = read_number(item_s, 0)
    while h >= 0:
        slot = place_of(t, AHEAD)
        b = read_number(item_s, slot * ITEM + 1)
        row = read_number(item_s, slot * ITEM + 2)
        through = is_held(read_number(item_s, slot * ITEM + 4), read_number(item_s, slot * ITEM + 10), GROUPS * HALF)
        complete = 0
        if done_desc is not None:
            complete = read_number(item_s, slot * ITEM + 11)
        mbarrier.arrive(item_empty.index(slot), count=1)
        if old_desc is not None:
            mbarrier.wait(begun.index(place_of(t, 2)), round_of(t, 2))
            if through:
                line: gl.constexpr = gl.BlockedLayout([HALF // 32], [32], [1], [0])
                at = old_lse_ptr + (wide(b) * heads + h) * q_len + row + gl.arange(0, HALF, layout=line)
                for c in gl.static_range(GROUPS):
                    lse_s.index(c).store(gl.load(at + c * HALF))
                mbarrier.expect(ready, old_desc.block_type.nbytes * GROUPS)
                for c in gl.static_range(GROUPS):
                    tma.async_copy_global_to_shared(old_desc, [b, h, row + c * HALF, 0], ready, held.index(c))
                mbarrier.arrive(ready, count=1)
            else:
                mbarrier.arrive(ready, count=2)
        else:
            mbarrier.arrive(ready, count=2)
        mbarrier.wait(filled, t & 1)
        if through:
            if done_desc is None:
                for c in gl.static_range(GROUPS):
                    tma.async_copy_shared_to_global(out_desc, [b, h, row + c * HALF, 0], narrow(held.index(c), out_desc))
            else:
                if complete == 0:
                    for c in gl.static_range(GROUPS):
                        tma.async_copy_shared_to_global(out_desc, [b, h, row + c * HALF, 0], narrow(held.index(c), out_desc))
                else:
                    for c in gl.static_range(GROUPS):
                        tma.async_copy_shared_to_global(done_desc, [b, h, row + c * HALF, 0], narrow(held.index(c), done_desc))
            tma.store_wait(0)
        t += 1
        mbarrier.wait(item_full.index(place_of(t, AHEAD)), round_of(t, AHEAD))
        h = read_number(item_s, place_of(t, AHEAD) * ITEM)
