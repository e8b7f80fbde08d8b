"""Gradients of attention over single chosen keys in items of 128 rows, by two warp groups (`hopper.gathered_backward`: 64 rows, one).

Each warp group computes P and dS of 64 rows. One of them sums dV over all 128 rows, the other one dK: both are added to global memory once
per item instead of once per 64 rows. Time runs downwards, for one block of keys:

  warp group 0, rows 0 … 63              warp group 1, rows 64 … 127
  ─────────────────────────              ───────────────────────────
  S₀, dP₀, P₀, dS₀                       S₁, dP₁, P₁, dS₁
  dS₀ ──► ds_s[0]                        P₁ ──► p_s,  dS₁ ──► ds_s[1]      ──shared (2 arrivals)──►
  dV = P₀ᵀ dO₀ + P₁ᵀ dO₁                 dK = dS₁ᵀ Q₁ + dS₀ᵀ Q₀
  dQ₀ += dS₀ K                           dQ₁ += dS₁ K                      ──read (2 arrivals)──►
  dV[keys] += dV                         dK[keys] += dK
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.gathered_backward import GradTensors, GradTiles, add_rows, load_item, sees, store_dq
from longspan._kernels.hopper.gathered_forward import DYNAMIC, HEADS, LOAD_WARPS, Items, Lists, gather, place_item, place_rows
from longspan._kernels.hopper.pipeline import BufferBarriers, Captured, KvBarriers, mbarriers, ring_phase, ring_slot


class PairTiles(NamedTuple):
    """Shared memory of both warp groups, two buffers each but `p`."""

    q: Any
    do: Any
    ds: Any
    p: Any
    norm: Any
    delta: Any


@gluon.jit
def differentiate_half(
    tensors, lists, items, scale, first_b, first_h, captured, k_s, v_s, tiles, bars, shared, GROUP: gl.constexpr, MASK: gl.constexpr,
    H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """Warp group GROUP. shared: mbarriers of p_s and ds_s; `full` is also arrived at when an item's q and dO are in shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    e_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=e_layout, k_width=2)
    FIRST: gl.constexpr = GROUP * HEADS
    own = GradTiles(
        tiles.q.index(GROUP), tiles.do.index(GROUP), tiles.ds.index(GROUP), tiles.norm.index(GROUP), tiles.delta.index(GROUP)
    )  # fmt: skip
    factor = scale * LOG2_E
    dtype: gl.constexpr = k_s.dtype
    j = gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    t = 0
    for item in range(gl.program_id(0), items.items, gl.num_programs(0)):
        b, g, first_head, first_q, row = place_item(item, items, H, QUERIES)
        count = gl.load(lists.counts + row)
        keys = lists.keys + wide(row) * items.entries
        dk_head = tensors.dk + wide(b) * tensors.dk_stride[0] + wide(g) * tensors.dk_stride[1]
        dv_head = tensors.dv + wide(b) * tensors.dv_stride[0] + wide(g) * tensors.dv_stride[1]
        # The other warp group has read this one's q and dO of the last item.
        mbarrier.wait(shared.empty.index(0), (t & 1) ^ 1)
        load_item(tensors, own, items, b, first_head, first_q, FIRST, H, QUERIES, D, E)
        head, q_idx, _ = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(0, layout))
        dq = gl.full([HEADS, D], 0.0, gl.float32, layout=d_layout)
        for n in range(0, count, N):
            stage, phase = ring_slot(t, STAGES), ring_phase(t, STAGES)
            kv = gl.load(keys + n + j, mask=n + j < count, other=-1)
            mbarrier.wait(bars.k_full.index(stage), phase)
            fence_async_shared()
            zero = gl.full([N, HEADS], 0.0, gl.float32, layout=layout)
            s_next = warpgroup_mma(k_s.index(stage), own.q.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(bars.v_full.index(stage), phase)
            fence_async_shared()
            dp_next = warpgroup_mma(v_s.index(stage), own.do.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            norm = gl.expand_dims(own.norm.load(gl.SliceLayout(0, layout)), 0)
            visible = sees(kv, b + first_b, head + first_h, q_idx, captured, MASK)
            p = gl.where(visible, gl.exp2(s * factor - norm), 0.0)
            dp = warpgroup_mma_wait(0, deps=[dp_next])
            mbarrier.arrive(bars.v_empty.index(stage), count=1)
            delta = gl.expand_dims(own.delta.load(gl.SliceLayout(0, layout)), 0)
            ds = gl.where(visible, p * (dp - delta), 0.0).to(dtype)
            mbarrier.wait(shared.empty.index(0), (t & 1) ^ 1)
            own.ds.store(ds)
            if GROUP == 1:
                tiles.p.store(p.to(dtype))
            fence_async_shared()
            mbarrier.arrive(shared.full.index(0), count=1)
            if GROUP == 0:
                empty = gl.full([N, E], 0.0, gl.float32, layout=e_layout)
                weights = gl.convert_layout(p.to(dtype), p_layout)
                sums = warpgroup_mma(weights, own.do, empty, use_acc=False, is_async=True)
                mbarrier.wait(shared.full.index(0), t & 1)
                fence_async_shared()
                sums = warpgroup_mma(tiles.p, tiles.do.index(1), sums, is_async=True)
                dq_next = warpgroup_mma(own.ds.permute((1, 0)), k_s.index(stage), dq, is_async=True)
                dv = warpgroup_mma_wait(1, deps=[sums])
                dq = warpgroup_mma_wait(0, deps=[dq_next])
                mbarrier.arrive(shared.empty.index(0), count=1)
                mbarrier.arrive(bars.k_empty.index(stage), count=1)
                add_rows(dv_head, tensors.dv_stride[2], kv, dv, E)
            else:
                empty = gl.full([N, D], 0.0, gl.float32, layout=d_layout)
                sums = warpgroup_mma(gl.convert_layout(ds, ds_layout), own.q, empty, use_acc=False, is_async=True)
                mbarrier.wait(shared.full.index(0), t & 1)
                fence_async_shared()
                sums = warpgroup_mma(tiles.ds.index(0), tiles.q.index(0), sums, is_async=True)
                dq_next = warpgroup_mma(own.ds.permute((1, 0)), k_s.index(stage), dq, is_async=True)
                dk = warpgroup_mma_wait(1, deps=[sums])
                dq = warpgroup_mma_wait(0, deps=[dq_next])
                mbarrier.arrive(shared.empty.index(0), count=1)
                mbarrier.arrive(bars.k_empty.index(stage), count=1)
                add_rows(dk_head, tensors.dk_stride[2], kv, dk * scale, D)
            t += 1
        store_dq(tensors, dq * scale, items, b, first_head, first_q, FIRST, H, QUERIES, D)


@gluon.jit(do_not_specialize=DYNAMIC)
def gathered_backward_pair_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, counts_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_stride, k_stride, v_stride, do_stride, dq_stride, dk_stride, dv_stride, mask_captured, mask_sizes, list_sizes,
    heads, shared, q_len, entries, items, scale, first_b, first_h,
    MASK: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `gathered_backward_kernel`, in items of 128 rows."""
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    by_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], dtype)
    by_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, E], dtype)
    by_row: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, HEADS], dtype)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, N, D], by_k)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, N, E], by_v)
    tiles = PairTiles(
        gl.allocate_shared_memory(dtype, [2, HEADS, D], by_k),
        gl.allocate_shared_memory(dtype, [2, HEADS, E], by_v),
        gl.allocate_shared_memory(dtype, [2, N, HEADS], by_row),
        gl.allocate_shared_memory(dtype, [N, HEADS], by_row),
        gl.allocate_shared_memory(gl.float32, [2, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [2, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    bars = KvBarriers(mbarriers(STAGES, 32 * LOAD_WARPS), mbarriers(STAGES, 2), mbarriers(STAGES, 32 * LOAD_WARPS), mbarriers(STAGES, 2))
    both = BufferBarriers(mbarriers(1, 2), mbarriers(1, 2))
    batch_rows, choices, list_rows, per_row, per_choice = list_sizes
    everything = Items(items, heads, shared, q_len, entries, batch_rows, choices, list_rows, per_row, per_choice)
    captured = Captured(mask_captured, mask_sizes, (), ())
    lists = Lists(keys_ptr, counts_ptr)
    tensors = GradTensors(
        q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, q_stride, do_stride, dq_stride, dk_stride, dv_stride
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (differentiate_half, (
                tensors, lists, everything, scale, first_b, first_h, captured, k_s, v_s, tiles, bars, both, 0, MASK, H, QUERIES, N, STAGES,
                D, E,
            )),
            (differentiate_half, (
                tensors, lists, everything, scale, first_b, first_h, captured, k_s, v_s, tiles, bars, both, 1, MASK, H, QUERIES, N, STAGES,
                D, E,
            )),
            (gather, (k_ptr, v_ptr, k_stride, v_stride, lists, everything, k_s, v_s, bars, H, QUERIES, N, D, E, 0, False)),
        ],
        [4, LOAD_WARPS],
        [REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
