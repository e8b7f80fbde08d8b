"""Tiles of 64 rows between registers and global memory, L2 prefetches of rows, and views of shared memory.

Rows may be strided; columns are contiguous.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.gluon_names import reinterpret

ROWS = gl.constexpr(64)


@gluon.jit
def _addresses(base, row, left, stride, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """(pointers [64, DP], mask): rows within `left`, columns within D of DP.

    The row is added to the pointer first, so that the offsets of elements are known to the compiler. Otherwise it would hold a 64-bit
    address for each element.
    """
    i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    d = gl.expand_dims(gl.arange(0, DP, layout=gl.SliceLayout(0, layout)), 0)
    inside = i < left
    if D != DP:
        inside = inside & (d < D)
    return (base + wide(row) * stride + i * stride) + d, inside


@gluon.jit
def load_tile(base, row, left, stride, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """float32 [64, DP] from row `row` on; 0 outside of `left` rows and D columns."""
    pointers, inside = _addresses(base, row, left, stride, D, DP, layout)
    return gl.load(pointers, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def row_wise(value, dtype: gl.constexpr):
    """A tile [64, columns] of 16-bit floats in a layout in which threads have eight neighbouring columns, and a warp whole rows."""
    D: gl.constexpr = value.shape[1]
    return gl.convert_layout(value.to(dtype), gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0]))


@gluon.jit
def store_tile(base, value, row, left, stride, D: gl.constexpr, DP: gl.constexpr, ROW_WISE: gl.constexpr = True):
    """Store a tile in the tensor's dtype. With ROW_WISE, a 16-bit tile is made `row_wise` first, through shared memory, so that whole
    sectors are written.
    """
    dtype: gl.constexpr = base.dtype.element_ty
    tile = row_wise(value, dtype) if ROW_WISE and dtype != gl.float32 else value.to(dtype)
    layout: gl.constexpr = tile.type.layout
    pointers, inside = _addresses(base, row, left, stride, D, DP, layout)
    gl.store(pointers, tile, mask=inside)


@gluon.jit
def prefetch_rows(base, row, left, stride, D: gl.constexpr, ROWS: gl.constexpr):
    """Prefetch D columns of up to ROWS rows from row `row` on into L2. `left` of the rows exist; if left ≤ 0, the row before is fetched."""
    BYTES: gl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    LINES: gl.constexpr = (D * BYTES + 127) // 128  # cache lines of a row
    THREADS: gl.constexpr = 32 * gl.num_warps()
    lane = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    # ROWS · LINES, but unknown to the compiler: the unrolled loop would need more registers than a producer warp has.
    end = ROWS * LINES + (left >> 30)
    for first in range(0, end, THREADS):
        i = first + lane
        pointers = base + wide(row + gl.minimum(i // LINES, left - 1)) * stride + gl.minimum(i % LINES * (128 // BYTES), D - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def view_as(buffer, desc):
    """A shared-memory buffer as a tile in the dtype, shape and layout of a TMA descriptor."""
    return reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)
