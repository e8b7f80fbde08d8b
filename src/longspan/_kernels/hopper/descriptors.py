"""TMA descriptors of the tensors of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.row_terms import padded_length
from longspan._kernels.hopper.config import head_dim_parts

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def tile_descriptor(tensor: Tensor, *, rows: int, columns: int | None = None) -> TensorDescriptor:
    """A TMA descriptor of a `launch.describable` tensor [B, H, S, D], with tiles in the shared-memory layout that wgmma reads."""
    block = [1, 1, rows, columns or width(tensor.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, *launch.extents(tensor), block, layout)


def part_descriptors(
    names: Sequence[str], tensors: Mapping[str, Tensor | None], *, rows: int, suffix: str = "ptr"
) -> dict[str, Callable[[Tensor], TensorDescriptor]]:  # fmt: skip
    """By kernel argument, the function that makes the TMA descriptor of a tensor's first columns, or of its last (`head_dim_parts`)."""
    made: dict[str, Callable[[Tensor], TensorDescriptor]] = {}
    for name in names:
        tensor = tensors[f"{name}_{suffix}"]
        if tensor is not None:
            main, tail = head_dim_parts(tensor.shape[3])
            made[f"{name}_{suffix}"] = partial(tile_descriptor, rows=rows, columns=main)
            if tensors.get(f"{name}_tail_{suffix}") is not None:
                made[f"{name}_tail_{suffix}"] = partial(tile_descriptor, rows=rows, columns=tail)
    return made


def row_descriptor(tensor: Tensor, *, size: int) -> TensorDescriptor:
    """A TMA descriptor of `padded_rows` [B, H, Q] in tiles of `size` rows of a head. Rows past the end of a head are 0."""
    batch, heads, length = tensor.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(tensor, [batch * heads, length], [padded_length(length), 1], [1, size], layout)


def width(dim: int) -> int:
    """A head dim as padded in shared memory and registers."""
    return max(64, launch.padded(dim))
