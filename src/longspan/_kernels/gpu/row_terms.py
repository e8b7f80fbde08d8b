"""The two terms of each query row that backward passes read: lse in base 2, and delta = Σ out · grad_out − grad_lse."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.interpreter import computable
from longspan._kernels.gpu.prepared_launch import layout_launch
from longspan._kernels.gpu.tile_access import load_rows, wide
from longspan._kernels.tiling import Tiling
from longspan._torch_private import empty_on_device_of

_tile_rows: DerivedCache[Tiling, Tensor] = DerivedCache(16)  # by device


@triton.jit
def row_state(ptr, row, left, SIZE: tl.constexpr, BOUNDED: tl.constexpr):
    """Load [SIZE] values of consecutive rows. BOUNDED: zeros past `left` rows."""
    i = tl.arange(0, SIZE)
    return tl.load(ptr + row + i, mask=i < left if BOUNDED else None, other=0.0 if BOUNDED else None)


@triton.jit
def base_two(lse):
    """lse in base 2; +inf for rows that see nothing, so that every probability of the row is 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def first_term(head, q_len):
    """Index of the first row of head `head`, counted over all batch rows, in the arrays of `padded_rows`."""
    return wide(head) * ((q_len + 3) // 4 * 4)


def padded_length(length: int) -> int:
    """`length` rounded up to a multiple of 4."""
    return -(-length // 4) * 4


def empty_padded_rows(lse: Tensor) -> Tensor:
    """float32 of the shape [B, H, Q] of lse, uninitialised; a view where each head takes a multiple of 16 bytes, as TMA needs."""
    *heads, length = lse.shape
    padded = empty_on_device_of(lse, (*heads, padded_length(length)), torch.float32)
    return padded if length % 4 == 0 else padded[..., :length]


def is_padded(rows: Tensor) -> bool:
    """Whether a tensor [B, H, Q] has the layout of `empty_padded_rows` and begins at a multiple of 16 bytes."""
    (batch, heads, length), (by_batch, by_head, by_row) = rows.shape, rows.stride()
    padded = padded_length(length)
    in_order = by_row == 1 and (heads == 1 or by_head == padded) and (batch == 1 or by_batch == heads * padded)
    return in_order and rows.dtype == torch.float32 and rows.data_ptr() % 16 == 0


def rows_by_tile(rows: Tensor, tiling: Tiling) -> Tensor:
    """Row terms [B, H, Q] as [B, H, tiles · block]: tile t begins at t · block, as TMA needs where tiles begin at any row.

    Rows past the end of a tile are those of other tiles.
    """
    assert tiling.row is not None
    start = tiling.row

    def index() -> Tensor:
        wanted = (start[:, None] + torch.arange(tiling.block)).flatten().clamp(max=max(0, tiling.length - 1))
        return launch.to_device([wanted], rows.device)[0][: len(wanted)]

    return rows.index_select(2, _tile_rows.get(tiling, rows.device, index))


def padded_rows(rows: Tensor) -> Tensor:
    """Row terms [B, H, Q] in the layout of `empty_padded_rows`: the tensor itself, or a copy."""
    if is_padded(rows):
        return rows
    *heads, length = rows.shape
    padded = torch.zeros((*heads, padded_length(length)), dtype=torch.float32, device=rows.device)[..., :length]
    return padded.copy_(rows)


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
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        tensors = {"out_ptr": out, "do_ptr": grad_out, "grad_lse_ptr": grad_lse, "delta_ptr": delta}
        constants = {
            "out_stride": out.stride(), "do_stride": grad_out.stride(), "heads": H, "q_len": Q, "M": _ROWS, "E": E, "EP": launch.padded(E),
        }  # fmt: skip
        layout_launch(delta_kernel, tensors, constants, B * H * -(-Q // _ROWS))(tensors, {})
    return delta
