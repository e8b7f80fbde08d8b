"""TMA reductions from shared to global memory.

Triton 3.6 can build them but does not export them. Until a later version does, `async_atomic_add` uses private parts of Triton.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

async_atomic_add: Any = getattr(tma, "async_atomic_add", None)

if async_atomic_add is None:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def _async_atomic_add(tensor_desc, coord, src, _semantic=None):
        """Start adding a tile in shared memory to global memory. Elements outside the tensor are dropped."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)

    async_atomic_add = _async_atomic_add


@gluon.jit
def wait_until_added():
    """Wait until this warp's TMA reductions have been added to global memory; `tma.store_wait` waits until shared memory was read."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
