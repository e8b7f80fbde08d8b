"""KV blocks of 128 keys that are two chosen tiles of 64 keys (`gpu.selected_tables`), and items that are 64 queries of two heads.

A wgmma over 64 keys, or an item of 64 queries, would use half of what a CTA can compute at once. KV_PAIRS: each half of a block has a place
and a position of its own. HEAD_PAIRS: the warp groups of an item have the same 64 queries of two neighbouring heads, which read the same
keys: they have the same choice and the same KV head.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longspan._kernels.hopper.gluon_names import reinterpret, tma_load
from longspan._kernels.hopper.head_dim_parts import Parts

HALF = gl.constexpr(64)  # keys of a half block; also columns of a panel, which are 128 bytes


@gluon.jit
def paired_ring(desc, COUNT: gl.constexpr, DIM: gl.constexpr):
    """Shared memory (`Parts`) for COUNT blocks of two halves. desc: a TMA descriptor of tiles of HALF rows and columns."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 2 * HALF, DIM], desc.dtype)
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, 2 * HALF, DIM], layout)
    return Parts(tiles, tiles)


@gluon.jit
def load_halves(desc, b, h, first, second, full, ring, slot):
    """Start the TMA loads of a block in `slot` of a `paired_ring`: rows of head h from `first` on, and from `second` on."""
    mbarrier.expect(full, 2 * (ring.shape[4] // HALF) * desc.block_type.nbytes)
    start_halves(desc, b, h, first, h, second, full, ring, slot)


@gluon.jit
def start_halves(desc, b, h, first, second_h, second, full, ring, slot):
    """`load_halves` with halves of two heads. The caller announces the bytes to `full`.

    A block is in panels of 64 columns, one after the other: half a panel is a tile of `desc`.
    """
    PANELS: gl.constexpr = ring.shape[4] // HALF
    tiles = reinterpret(ring, desc.dtype, [ring.shape[0] * PANELS * 2, 1, 1, HALF, HALF], desc.layout)
    for panel in gl.static_range(PANELS):
        at = (slot * PANELS + panel) * 2
        tma_load(desc, [b, h, first, panel * HALF], full, tiles.index(at))
        tma_load(desc, [b, second_h, second, panel * HALF], full, tiles.index(at + 1))


@gluon.jit
def group_place(h, row, group, ROWS: gl.constexpr, HEAD_PAIRS: gl.constexpr):
    """(head, offset of rows) of a warp group of an item of head h."""
    if HEAD_PAIRS:
        return h + group, row
    else:  # noqa: RET505 (Triton compiles what follows a branch that returned)
        return h, row + group * ROWS


@gluon.jit
def of_halves(columns, first, second, KV_PAIRS: gl.constexpr):
    """`first` in columns of the first half of a block, `second` in the others; `first` without KV_PAIRS."""
    if KV_PAIRS:
        return gl.where(columns < HALF, first, second)
    else:  # noqa: RET505 (Triton compiles what follows a branch that returned)
        return first
