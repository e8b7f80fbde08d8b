"""What the Hopper kernels share: rows of barriers, numbers that one warp tells the others, and tiles on their way."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which opens after ARRIVALS arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def place_of(i, COUNT: gl.constexpr):
    """Which of COUNT places the i-th thing takes, i ≥ 0. For powers of two no sign is asked for: loops have few registers left."""
    return i & (COUNT - 1) if COUNT & (COUNT - 1) == 0 else i % COUNT


@gluon.jit
def round_of(i, COUNT: gl.constexpr):
    """How many times that place was taken before, modulo 2: what a barrier's phase is."""
    return (i & COUNT) // COUNT if COUNT & (COUNT - 1) == 0 else (i // COUNT) & 1


@gluon.jit
def numbers(COUNT: gl.constexpr):
    """Room for COUNT 32-bit numbers."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_number(numbers, i, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers.index(i).store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def read_number(numbers, i):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(numbers.index(i).load(layout), 0)


@gluon.jit
def bring(source, b, h, row, full, tile):
    """Have the copy engine bring a tile of a head, from row `row` on, and open `full` when it is there.

    `source`: (descriptor, descriptor or None, count). Given the second one, it describes a tensor that holds the first `count` rows, and
    the first one the rows after them. No tile lies in both.
    """
    rest, first, count = source
    mbarrier.expect(full, rest.block_type.nbytes)
    if first is None:
        tma.async_copy_global_to_shared(rest, [b, h, row, 0], full, tile)
    else:
        if row < count:
            tma.async_copy_global_to_shared(first, [b, h, row, 0], full, tile)
        else:
            tma.async_copy_global_to_shared(rest, [b, h, row - count, 0], full, tile)


@gluon.jit
def rows_of(tiles, i):
    """Tile i [rows, dim] of those that the copy engine filled as [1, 1, rows, dim] each."""
    return tiles.index(i).reshape([tiles.shape[3], tiles.shape[4]])
