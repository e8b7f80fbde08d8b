"""The last launch of a backward pass: float32 gradients become gradients in the dtype of the inputs.

dQ was accumulated in float32; without a score mod, it does not include the scale yet (`HopperCall.rounds_with_scale`). Where several CTAs
divided the query heads of a KV head (`hopper.gqa_split`), dK and dV are sums of parts.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from longspan._kernels.gpu.tile_access import wide

BLOCK = 4096  # elements of a CTA


@triton.jit
def _round_sum(parts_ptr, grad_ptr, block, size, head_size, factor, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Elements of one block of a gradient: the sum of PARTS float32 parts, stored head by head, times `factor`."""
    i = wide(block) * SIZE + tl.arange(0, SIZE)
    inside = i < size
    first = i if PARTS == 1 else i // head_size * (head_size * PARTS) + i % head_size
    total = tl.load(parts_ptr + first, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + first + part * wide(head_size), mask=inside, other=0.0)
    tl.store(grad_ptr + i, (total * factor).to(grad_ptr.dtype.element_ty), mask=inside)


# Sizes are specialized: accesses are vectors only if the compiler knows that sizes are multiples of 16.
@triton.jit
def round_kernel(
    total_ptr, dq_ptr, dk_parts_ptr, dk_ptr, dv_parts_ptr, dv_ptr, dq_size, dk_size, dv_size, dk_head, dv_head, scale,
    PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """dq from total_ptr times `scale`, dk and dv from PARTS parts of each KV head. All contiguous; None for gradients that are complete.

    dk_head, dv_head: elements of one KV head.
    """
    block = tl.program_id(0)
    if total_ptr is not None:
        dq_blocks = tl.cdiv(dq_size, SIZE)
        if block < dq_blocks:
            _round_sum(total_ptr, dq_ptr, block, dq_size, dq_size, scale, 1, SIZE)
        block -= dq_blocks
    if dk_parts_ptr is not None:
        dk_blocks = tl.cdiv(dk_size, SIZE)
        if (block >= 0) & (block < dk_blocks):
            _round_sum(dk_parts_ptr, dk_ptr, block, dk_size, dk_head, 1.0, PARTS, SIZE)
        if block >= dk_blocks:
            _round_sum(dv_parts_ptr, dv_ptr, block - dk_blocks, dv_size, dv_head, 1.0, PARTS, SIZE)
