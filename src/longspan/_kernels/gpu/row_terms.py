"""The two terms of each query row that backward passes read: lse in base 2, and delta = Σ out · grad_out − grad_lse."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.interpreter import computable
from longspan._kernels.gpu.prepared_launch import layout_launch
from longspan._kernels.gpu.tile_access import load_rows, wide


@triton.jit
def row_state(ptr, row, left, SIZE: tl.constexpr, BOUNDED: tl.constexpr):
    """Load [SIZE] values of consecutive rows. BOUNDED: zeros past `left` rows."""
    i = tl.arange(0, SIZE)
    return tl.load(ptr + row + i, mask=i < left if BOUNDED else None, other=0.0 if BOUNDED else None)


@triton.jit
def base_two(lse):
    """lse in base 2; +inf for rows that see nothing, so that every probability of the row is 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit(do_not_specialize=["heads", "q_len"])
def delta_kernel(
    out_ptr, do_ptr, grad_lse_ptr, delta_ptr, out_stride, do_stride, heads, q_len, M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr
):
    """delta = Σ out · grad_out − grad_lse, for one tile of M rows of one head per CTA."""
    tiles = tl.cdiv(q_len, M)
    pid = tl.program_id(0)
    row, head = (pid % tiles) * M, pid // tiles
    b64, h64 = wide(head // heads), wide(head % heads)
    left = q_len - row
    out = load_rows(out_ptr + b64 * out_stride[0] + h64 * out_stride[1], row, left, out_stride[2], out_stride[3], M, E, EP, True)
    do = load_rows(do_ptr + b64 * do_stride[0] + h64 * do_stride[1], row, left, do_stride[2], do_stride[3], M, E, EP, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    i = tl.arange(0, M)
    at = wide(head) * q_len + row + i
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + at, mask=i < left, other=0.0)
    tl.store(delta_ptr + at, delta, mask=i < left)


_ROWS = 64  # rows of a CTA


def delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Σ out · grad_out − grad_lse [B, H, Q], float32."""
    (B, H, Q, E), out, grad_out = out.shape, computable(out), computable(grad_out)
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    if delta.numel():
        grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
        tensors = {"out_ptr": out, "do_ptr": grad_out, "grad_lse_ptr": grad_lse, "delta_ptr": delta}
        constants = {
            "out_stride": out.stride(), "do_stride": grad_out.stride(), "heads": H, "q_len": Q, "M": _ROWS, "E": E, "EP": launch.padded(E),
        }  # fmt: skip
        layout_launch(delta_kernel, tensors, constants, B * H * -(-Q // _ROWS))(tensors, {})
    return delta
