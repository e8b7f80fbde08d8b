"""Completion of TMA reductions from shared to global memory."""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_until_added():
    """Wait until this warp's TMA reductions have been added to global memory; `tma.store_wait` waits until shared memory was read.

    `tma.store_wait(0, read_only=False)` does the same, but only Triton 3.8 and later have it.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
