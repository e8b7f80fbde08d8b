"""Gluon functions under one name each, for every supported Triton. Gluon is experimental and renames between versions.

here            Triton 3.6                             later
barrier         gl.thread_barrier                      gl.barrier, since 3.7
copy_async      async_copy.async_copy_global_to_shared async_copy.async_load, in 3.9
tma_load        tma.async_copy_global_to_shared        tma.async_load, since 3.8
tma_store       tma.async_copy_shared_to_global        tma.async_store, since 3.8
tma_add         not exported                           tma.async_atomic_add, since 3.8
reinterpret     buffer._reinterpret                    buffer.reinterpret, since 3.9
"""

# Runs in Triton's compiler, on values that Python types do not describe.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first(module: Any, *names: str) -> Any:
    """The first attribute that exists. Older names may exist beside newer ones, only to raise."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


barrier = _first(gl, "barrier", "thread_barrier")
copy_async = _first(async_copy, "async_load", "async_copy_global_to_shared")
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
tma_add = _first(tma, "async_atomic_add")

if tma_add is None:  # Triton 3.6 and 3.7 can build a TMA reduction but do not export it
    from triton._C.libtriton import ir

    @builtin
    def _tma_add(tensor_desc, coord, src, _semantic=None):
        """Start adding a tile in shared memory to global memory. Elements outside the tensor are dropped."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)

    tma_add = _tma_add


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """A shared-memory buffer with another dtype, shape and layout."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def sums_are_trees(_semantic=None):
    """Whether `gl.sum` adds the elements of a thread in the order of a tree, as since Triton 3.8, or one after the other."""
    return gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8))
