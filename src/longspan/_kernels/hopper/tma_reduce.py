"""The copy engine's reduction from shared to global memory.

triton 3.6 can build it but does not export it: `async_atomic_add` here reaches into private parts of triton until a later one exports it.
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
        """Add a block in shared memory to global memory; what lies outside the tensor is dropped. `tma.store_wait` waits for it."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)

    async_atomic_add = _async_atomic_add


@gluon.jit
def reduced():
    """Wait until what this warp handed to the copy engine has been added. (`tma.store_wait` waits until it has been read.)"""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
