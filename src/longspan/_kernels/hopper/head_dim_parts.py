"""Tiles whose head dim is in two parts: tile shapes are powers of two, head dims up to 192 are 128 + 64 columns."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs
# ruff: noqa: RET505 (Triton compiles what follows a branch that returned)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.gluon_names import tma_load
from longspan._kernels.hopper.pipeline import tile_2d
from longspan._kernels.hopper.tile_io import load_tile, store_tile


class Parts(NamedTuple):
    """Both parts of a tile, of a ring of tiles or of a TMA descriptor: the first columns and the last.

    A head dim in one part has `tail` = `main` again, which nothing reads: device functions cannot return None.
    """

    main: Any
    tail: Any


@gluon.constexpr_function
def part_bytes(main, tail):
    """Bytes of a tile, from those of its parts."""
    return main if main == tail else main + tail


@gluon.jit
def ring_of(desc, COUNT: gl.constexpr):
    """Shared memory (`Parts`) for COUNT tiles of a TMA descriptor (`Parts`)."""
    main, tail = desc.main, desc.tail
    rows: gl.constexpr = main.block_type.shape[2]
    tiles = gl.allocate_shared_memory(main.dtype, [COUNT, 1, 1, rows, main.block_type.shape[3]], main.layout)
    if tail.block_type.shape[3] == main.block_type.shape[3]:
        return Parts(tiles, tiles)
    else:
        return Parts(tiles, gl.allocate_shared_memory(main.dtype, [COUNT, 1, 1, rows, tail.block_type.shape[3]], tail.layout))


@gluon.jit
def part_2d(tiles, i):
    """Tile i of a ring (`Parts`), as [rows, dim]."""
    main = tile_2d(tiles.main, i)
    if tiles.tail.shape[4] == tiles.main.shape[4]:
        return Parts(main, main)
    else:
        return Parts(main, tile_2d(tiles.tail, i))


@gluon.jit
def part_slot(tiles, i):
    """Slot i of a ring (`Parts`)."""
    return Parts(tiles.main.index(i), tiles.tail.index(i))


@gluon.jit
def load_part_tile(desc, b, h, row, full, tile):
    """Start the TMA loads of a tile (`Parts`), from row `row` of head h on. The caller announces its bytes to `full` (`part_bytes`)."""
    tma_load(desc.main, [b, h, row, 0], full, tile.main)
    if desc.tail.block_type.shape[3] != desc.main.block_type.shape[3]:
        tma_load(desc.tail, [b, h, row, desc.main.block_type.shape[3]], full, tile.tail)


@gluon.jit
def load_kv_parts(source, b, h, row, full, tile):
    """`load_kv_tile` for a head dim in parts. source: a `KvSource` of `Parts`."""
    mbarrier.expect(full, part_bytes(source.rest.main.block_type.nbytes, source.rest.tail.block_type.nbytes))
    if source.local.main is None:
        load_part_tile(source.rest, b, h, row, full, tile)
    else:
        if row < source.local_tokens:
            load_part_tile(source.local, b, h, row, full, tile)
        else:
            load_part_tile(source.rest, b, h, row - source.local_tokens, full, tile)


@gluon.jit
def held_operand(tile, layout: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """A tile (`Parts`) as the left operand of wgmma: in registers, or as it is in shared memory."""
    if not IN_REGISTERS:
        return tile
    else:
        main = tile.main.load(layout)
        if tile.tail.shape[1] == tile.main.shape[1]:
            return Parts(main, main)
        else:
            return Parts(main, tile.tail.load(layout))


@gluon.jit
def start_scores(left, right, zeros):
    """Start the wgmma left · rightᵀ over the head dim (`Parts`): one commit group per part."""
    result = warpgroup_mma(left.main, right.main.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if right.tail.shape[1] != right.main.shape[1]:
        result = warpgroup_mma(left.tail, right.tail.permute((1, 0)), result, is_async=True)
    return result


@gluon.jit
def zero_sum(ROWS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Accumulators of ROWS rows (`Parts`), 0. Without a second part, `tail` is a number."""
    main_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MAIN, 16])
    main = gl.full([ROWS, MAIN], 0.0, gl.float32, layout=main_l)
    if TAIL == 0:
        return Parts(main, 0)
    else:
        tail_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TAIL, 16])
        return Parts(main, gl.full([ROWS, TAIL], 0.0, gl.float32, layout=tail_l))


@gluon.jit
def start_sum(weights, right, acc, TAIL: gl.constexpr):
    """Start the wgmma acc += weights · right (`Parts` of the head dim): one commit group per part."""
    main_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.main.type.layout, k_width=2)
    main = warpgroup_mma(gl.convert_layout(weights, main_l), right.main, acc.main, is_async=True)
    if TAIL == 0:
        return Parts(main, 0)
    else:
        tail_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.tail.type.layout, k_width=2)
        return Parts(main, warpgroup_mma(gl.convert_layout(weights, tail_l), right.tail, acc.tail, is_async=True))


@gluon.jit
def wait_sum(acc, PENDING: gl.constexpr, TAIL: gl.constexpr):
    """The accumulators that `start_sum` started, when at most PENDING commit groups are in flight."""
    if TAIL == 0:
        return Parts(warpgroup_mma_wait(PENDING, deps=[acc.main]), 0)
    else:
        main, tail = warpgroup_mma_wait(PENDING, deps=[acc.main, acc.tail])
        return Parts(main, tail)


@gluon.jit
def start_block_sum(weights, right, DIM: gl.constexpr):
    """Start the wgmma weights · right of a block, from 0: `Parts` of 64 columns, a commit group each, that of the second part first."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    left = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
    zeros = gl.full([weights.shape[0], 64], 0.0, gl.float32, layout=layout)
    if DIM > 64:
        tail = warpgroup_mma(left, right.slice(64, 64, dim=1), zeros, use_acc=False, is_async=True)
        return Parts(warpgroup_mma(left, right.slice(0, 64, dim=1), zeros, use_acc=False, is_async=True), tail)
    else:
        return Parts(warpgroup_mma(left, right, zeros, use_acc=False, is_async=True), 0)


@gluon.jit
def store_sum(
    ptr, strides, b, head, acc, factor, row, left, zero,
    DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr, ADD: gl.constexpr, ROW_WISE: gl.constexpr,
):  # fmt: skip
    """Store acc · factor (`Parts`) of DIM columns, or add it with ADD. zero: 0, a multiple of 16 that is unknown to the compiler.

    ROW_WISE: as in `store_tile`; it takes shared memory, which stages of wide tiles fill.
    """
    base, stride = ptr + wide(b) * strides[0] + wide(head) * strides[1], strides[2] + zero
    _store_part(base, acc.main * factor, row, left, stride, DIM if DIM < MAIN else MAIN, MAIN, ADD, ROW_WISE)
    if TAIL > 0:
        _store_part(base + MAIN, acc.tail * factor, row, left, stride, DIM - MAIN, TAIL, ADD, ROW_WISE)


@gluon.jit
def _store_part(base, value, row, left, stride, D: gl.constexpr, DP: gl.constexpr, ADD: gl.constexpr, ROW_WISE: gl.constexpr):
    if ADD:
        layout: gl.constexpr = value.type.layout
        value += load_tile(base, row, left, stride, D, DP, layout)
    store_tile(base, value, row, left, stride, D, DP, ROW_WISE)
