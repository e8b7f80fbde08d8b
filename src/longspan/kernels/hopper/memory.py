"""Tiles of 64 rows between registers and memory. Rows may be strided; columns are contiguous."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longspan.kernels.triton.tiles import wide

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
def store_tile(base, value, row, left, stride, D: gl.constexpr, DP: gl.constexpr):
    """In the tensor's dtype. Narrow types are brought into rows first: whole sectors are written."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [gl.num_warps(), 1], [1, 0])
    layout: gl.constexpr = value.type.layout if base.dtype.element_ty == gl.float32 else lines
    rows = gl.convert_layout(value.to(base.dtype.element_ty), layout)
    at, inside = _places(base, row, left, stride, D, DP, layout)
    gl.store(at, rows, mask=inside)
