"""Tiles of 64 rows between registers and memory, and rows on their way into the cache. Rows may be strided; columns are contiguous."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longspan._kernels.gpu.tile_access import wide

ROWS = gl.constexpr(64)


@gluon.jit
def _places(base, row, left, stride, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """(pointers, which exist): rows within `left`, columns within D of DP. Rows are added to the pointer first: what is left to add is
    known to the compiler, which else would hold a 64-bit place for every element.
    """
    i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    d = gl.expand_dims(gl.arange(0, DP, layout=gl.SliceLayout(0, layout)), 0)
    inside = i < left
    if D != DP:
        inside = inside & (d < D)
    return (base + wide(row) * stride + i * stride) + d, inside


@gluon.jit
def load_tile(base, row, left, stride, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """[64, DP] from row `row` on, in float32; zeros where nothing is."""
    at, inside = _places(base, row, left, stride, D, DP, layout)
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def store_tile(base, value, row, left, stride, D: gl.constexpr, DP: gl.constexpr, LINES: gl.constexpr = True):
    """In the tensor's dtype. Narrow types are brought into rows first (`LINES`), through shared memory: whole sectors are written."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [gl.num_warps(), 1], [1, 0])
    layout: gl.constexpr = lines if LINES and base.dtype.element_ty != gl.float32 else value.type.layout
    rows = gl.convert_layout(value.to(base.dtype.element_ty), layout)
    at, inside = _places(base, row, left, stride, D, DP, layout)
    gl.store(at, rows, mask=inside)


@gluon.jit
def fetch_rows(base, row, left, stride, D: gl.constexpr, ROWS: gl.constexpr):
    """Have the L2 cache fetch D columns of up to ROWS rows from row `row` on, for who reads them next. Of these `left` exist; where that is
    0 or less, the last one before them.
    """
    BYTES: gl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    LINES: gl.constexpr = (D * BYTES + 127) // 128  # of a row
    AT_ONCE: gl.constexpr = 32 * gl.num_warps()
    lane = gl.arange(0, AT_ONCE, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    # Which is ROWS · LINES, but the compiler does not know it: all places at once would be more than a serving warp has registers for.
    end = ROWS * LINES + (left >> 30)
    for first in range(0, end, AT_ONCE):
        i = first + lane
        at = base + wide(row + gl.minimum(i // LINES, left - 1)) * stride + gl.minimum(i % LINES * (128 // BYTES), D - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1
        )
