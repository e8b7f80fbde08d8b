"""Copies of a sequence's paged KV to contiguous tensors, for the kernels of training. Legend as in `longspan._kernels.paged`."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.interpreter import interpreted
from longspan._kernels.gpu.prepared_launch import layout_launch
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.paged import PagedKV

_TOKENS = 32  # that a CTA copies


@triton.jit
def copy_rows(pages_ptr, out_ptr, page, slot, g, t, tokens, stride, DIM: tl.constexpr, DIMP: tl.constexpr):
    """Copy DIM elements of the tokens at `slot` of `page` to tokens t of out [G, tokens, DIM]."""
    d = tl.arange(0, DIMP)
    inside = (t < tokens)[:, None] & (d < DIM)[None, :]
    rows = pages_ptr + page * stride[0] + wide(g) * stride[1] + wide(slot) * stride[2]
    x = tl.load(rows[:, None] + d[None, :], mask=inside)
    tl.store(out_ptr + ((wide(g) * tokens + t) * DIM)[:, None] + d[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["kv_heads", "entry", "skipped", "tokens"])
def gather_kernel(
    k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, k_stride, v_stride, kv_heads, entry, skipped, tokens,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Copy TOKENS tokens of one KV head. `entry`: of the page table, flattened, the page of the first token, of which `skipped` tokens come
    before it. v_out_ptr: None if values are the first elements of keys.
    """
    pid = tl.program_id(0)
    g, t = pid % kv_heads, pid // kv_heads * TOKENS + tl.arange(0, TOKENS)
    at = skipped + t
    page = wide(tl.load(table_ptr + entry + at // PAGE, mask=t < tokens, other=0))
    copy_rows(k_ptr, k_out_ptr, page, at % PAGE, g, t, tokens, k_stride, D, DP)
    if v_out_ptr is not None:
        copy_rows(v_ptr, v_out_ptr, page, at % PAGE, g, t, tokens, v_stride, E, EP)


def gather_pages(pages: PagedKV, row: int, start: int, stop: int, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """`pages.gather(row, start, stop)` in one launch and one copy, converted to `dtype`."""
    (_, kv_heads, size, d), e, tokens = pages.k.shape, pages.v.shape[-1], stop - start
    if pages.scales is not None and interpreted():  # whose FP8 has no NaN
        gathered_k, gathered_v = pages.gather(row, start, stop)
        return gathered_k.to(dtype or gathered_k.dtype), gathered_v.to(dtype or gathered_v.dtype)
    k = torch.empty((kv_heads, tokens, d), dtype=dtype or pages.k.dtype, device=pages.k.device)
    v = None if pages.shared else torch.empty((kv_heads, tokens, e), dtype=dtype or pages.v.dtype, device=pages.v.device)
    tensors = {"k_ptr": pages.k, "v_ptr": pages.v, "table_ptr": pages.table, "k_out_ptr": k, "v_out_ptr": v}
    constants = {
        "k_stride": pages.k.stride(), "v_stride": pages.v.stride(), "kv_heads": kv_heads,
        "entry": row * pages.table.shape[1] + start // size, "skipped": start % size, "tokens": tokens,
        "PAGE": size, "TOKENS": _TOKENS, "D": d, "DP": launch.padded(d), "E": e, "EP": launch.padded(e),
    }  # fmt: skip
    layout_launch(gather_kernel, tensors, constants, -(-tokens // _TOKENS) * kv_heads)(tensors, {})
    return k, k[..., :e] if v is None else v
