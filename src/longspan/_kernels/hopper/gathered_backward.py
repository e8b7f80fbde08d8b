"""Gradients of attention over single chosen keys for Hopper. Items, lists and the load warp group as in `hopper.gathered_forward`.

One warp group computes an item of up to 64 heads. Keys are the rows of its tiles, so that P and dS go from registers to wgmma:

  Sᵀ = K Qᵀ        Pᵀ = exp2(Sᵀ − norm)           dV[keys] += Pᵀ dO    added to global memory
  dPᵀ = V dOᵀ      dSᵀ = Pᵀ ∘ (dPᵀ − delta)       dK[keys] += dSᵀ Q    added to global memory
                   dSᵀ ──► shared memory          dQ += dS K           in registers

dK and dV are added in float32, in arrival order: 8 D bytes of atomic additions for 4 D bytes of loads. L2's rate of additions bounds the
speed.

shared memory    bytes (D = E = 128)         written by            read by
q_s, do_s        2 × 64 × 128 × 2            computing group       computing group
k_s, v_s         STAGES × 2 × N × 128 × 2    load (cp.async)       computing group
ds_s             N × 64 × 2                  computing group       computing group
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
from longspan._kernels.hopper.gathered_forward import DYNAMIC, HEADS, LOAD_WARPS, Items, Lists, gather, load_query, place_item, place_rows
from longspan._kernels.hopper.gluon_names import barrier
from longspan._kernels.hopper.pipeline import Captured, KvBarriers, mbarriers, ring_phase, ring_slot


class GradTensors(NamedTuple):
    """Pointers and strides of the queries, the output's gradient, the terms per row and the gradients."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    dq: Any
    dk: Any
    dv: Any
    q_stride: Any
    do_stride: Any
    dq_stride: Any
    dk_stride: Any
    dv_stride: Any


class GradTiles(NamedTuple):
    """Shared memory of the computing group."""

    q: Any
    do: Any
    ds: Any
    norm: Any
    delta: Any


@gluon.constexpr_function
def _added_layout(dim, lines):
    """The layout of 64 rows in a warp group's accumulators, four columns of a thread side by side.

    lines: eight threads hold 128 bytes of a row, a line of L2, and not four threads 64 bytes. Threads of two rows exchange half of theirs.
    """
    groups = [[0, 16 << i] for i in range((dim // 16).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], groups[0] if lines else [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1], [0, 2], [8, 0], [1, 0] if lines else groups[0], *groups[1:]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, dim])


@gluon.jit
def _in_memory_order(x, DIM: gl.constexpr):
    """Rows x with their columns in the order of memory.

    A thread holds columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of 16. Memory has them side by side, at 4 c, so that they are one addition of
    16 bytes: column 8 h + 2 c + e of 16 is at 4 c + 2 h + e.
    """
    x = gl.permute(gl.reshape(x, [x.shape[0], DIM // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    # In the same threads: the order of registers changes.
    return gl.convert_layout(gl.reshape(x, [x.shape[0], DIM]), _added_layout(DIM, False))


@gluon.jit
def _add(head, stride, kv, x, DIM: gl.constexpr, layout: gl.constexpr):
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    at = gl.expand_dims(head + wide(kv) * stride, 1) + gl.expand_dims(d, 0)
    gl.atomic_add(at, x, mask=gl.expand_dims(kv >= 0, 1), sem="relaxed")


@gluon.jit
def add_rows(head, stride, kv, x, DIM: gl.constexpr):
    """Add rows x to the rows kv of a head; none where kv is −1. Four threads add 64 bytes of a row at a time."""
    layout: gl.constexpr = _added_layout(DIM, False)
    _add(head, stride, gl.convert_layout(kv, gl.SliceLayout(1, layout)), _in_memory_order(x, DIM), DIM, layout)


@gluon.jit
def _add_lines(head, stride, keys, n, count, x, DIM: gl.constexpr):
    """`add_rows` of entries n … of a list of `count` keys, 128 bytes of a row by eight threads at a time: L2 adds them faster."""
    layout: gl.constexpr = _added_layout(DIM, True)
    j = n + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    kv = gl.load(keys + j, mask=j < count, other=-1)
    _add(head, stride, kv, gl.convert_layout(_in_memory_order(x, DIM), layout), DIM, layout)


@gluon.jit
def load_item(
    tensors, tiles, items, b, first_head, first_q, FIRST: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr,
    E: gl.constexpr,
):  # fmt: skip
    """Copy q, dO, norm and delta of rows FIRST … FIRST + 63 of an item to shared memory."""
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    do_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [4, 1], [1, 0])
    head, q_idx, is_row = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(1, q_layout))
    q = load_query(tensors.q, tensors.q_stride, b, q_idx, head, is_row, D, q_layout)
    head, q_idx, is_row = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(1, do_layout))
    do = load_query(tensors.do, tensors.do_stride, b, q_idx, head, is_row, E, do_layout)
    head, q_idx, is_row = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.BlockedLayout([1], [32], [4], [0]))
    state_row = (wide(b) * items.heads + head) * items.q_len + q_idx
    lse = gl.load(tensors.lse + state_row, mask=is_row, other=-float("inf"))
    delta = gl.load(tensors.delta + state_row, mask=is_row, other=0.0)
    barrier()  # all warps have read the last item's
    tiles.q.store(q)
    tiles.do.store(do)
    tiles.norm.store(gl.where(lse == -float("inf"), float("inf"), lse * LOG2_E))
    tiles.delta.store(delta)
    fence_async_shared()
    barrier()


@gluon.jit
def sees(kv, b, head, q_idx, captured, MASK: gl.constexpr):
    """Whether keys kv [N] are seen by rows, [N, 1] or [N, rows]; none where kv is −1."""
    visible = gl.expand_dims(kv >= 0, 1)
    if MASK is not None:
        at = gl.expand_dims(gl.maximum(kv, 0), 1)
        visible = visible & MASK(b, gl.expand_dims(head, 0), gl.expand_dims(q_idx, 0), at, captured.mask, captured.mask_sizes)
    return visible


@gluon.jit
def store_dq(tensors, dq, items, b, first_head, first_q, FIRST: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr):
    """Store dQ of rows FIRST … FIRST + 63 of an item."""
    layout: gl.constexpr = dq.type.layout
    stride = tensors.dq_stride
    head, q_idx, is_row = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    rows = tensors.dq + wide(b) * stride[0] + wide(q_idx) * stride[2] + wide(head) * stride[1]
    gl.store(gl.expand_dims(rows, 1) + gl.expand_dims(d, 0), dq.to(tensors.dq.dtype.element_ty), mask=gl.expand_dims(is_row, 1))


@gluon.jit
def differentiate(
    tensors, lists, items, scale, first_b, first_h, captured, k_s, v_s, tiles, bars, MASK: gl.constexpr,
    H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """The warp group that computes."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    e_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=e_layout, k_width=2)
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
        load_item(tensors, tiles, items, b, first_head, first_q, 0, H, QUERIES, D, E)
        head, q_idx, _ = place_rows(0, first_head, first_q, items, H, QUERIES, gl.SliceLayout(0, layout))
        dq = gl.full([HEADS, D], 0.0, gl.float32, layout=d_layout)
        for n in range(0, count, N):
            stage, phase = ring_slot(t, STAGES), ring_phase(t, STAGES)
            kv = gl.load(keys + n + j, mask=n + j < count, other=-1)
            mbarrier.wait(bars.k_full.index(stage), phase)
            fence_async_shared()
            zero = gl.full([N, HEADS], 0.0, gl.float32, layout=layout)
            s_next = warpgroup_mma(k_s.index(stage), tiles.q.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(bars.v_full.index(stage), phase)
            fence_async_shared()
            dp_next = warpgroup_mma(v_s.index(stage), tiles.do.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            norm = gl.expand_dims(tiles.norm.load(gl.SliceLayout(0, layout)), 0)
            visible = sees(kv, b + first_b, head + first_h, q_idx, captured, MASK)
            p = gl.where(visible, gl.exp2(s * factor - norm), 0.0)
            weights = gl.convert_layout(p.to(dtype), p_layout)
            dp = warpgroup_mma_wait(0, deps=[dp_next])
            mbarrier.arrive(bars.v_empty.index(stage), count=1)
            delta = gl.expand_dims(tiles.delta.load(gl.SliceLayout(0, layout)), 0)
            ds = gl.where(visible, p * (dp - delta), 0.0).to(dtype)
            tiles.ds.store(ds)
            fence_async_shared()
            barrier()
            # Not before dS: the registers of P, dP and dV together would not suffice.
            empty = gl.full([N, E], 0.0, gl.float32, layout=e_layout)
            dv_next = warpgroup_mma(weights, tiles.do, empty, use_acc=False, is_async=True)
            dv = warpgroup_mma_wait(0, deps=[dv_next])
            _add_lines(dv_head, tensors.dv_stride[2], keys, n, count, dv, E)
            empty = gl.full([N, D], 0.0, gl.float32, layout=d_layout)
            dk_next = warpgroup_mma(gl.convert_layout(ds, ds_layout), tiles.q, empty, use_acc=False, is_async=True)
            dq_next = warpgroup_mma(tiles.ds.permute((1, 0)), k_s.index(stage), dq, is_async=True)
            dk = warpgroup_mma_wait(1, deps=[dk_next])
            _add_lines(dk_head, tensors.dk_stride[2], keys, n, count, dk * scale, D)
            dq = warpgroup_mma_wait(0, deps=[dq_next])
            mbarrier.arrive(bars.k_empty.index(stage), count=1)
            t += 1
        store_dq(tensors, dq * scale, items, b, first_head, first_q, 0, H, QUERIES, D)


@gluon.jit(do_not_specialize=DYNAMIC)
def gathered_backward_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, counts_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_stride, k_stride, v_stride, do_stride, dq_stride, dk_stride, dv_stride, mask_captured, mask_sizes, list_sizes,
    heads, shared, q_len, entries, items, scale, first_b, first_h,
    MASK: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of all items; adds to dK and dV [float32], whose columns are in the order of `_in_memory_order`. list_sizes: as in
    `gathered_forward_kernel`.
    """
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    by_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], dtype)
    by_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, E], dtype)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, N, D], by_k)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, N, E], by_v)
    tiles = GradTiles(
        gl.allocate_shared_memory(dtype, [HEADS, D], by_k),
        gl.allocate_shared_memory(dtype, [HEADS, E], by_v),
        gl.allocate_shared_memory(dtype, [N, HEADS], gl.NVMMASharedLayout.get_default_for([N, HEADS], dtype)),
        gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    bars = KvBarriers(mbarriers(STAGES, 32 * LOAD_WARPS), mbarriers(STAGES, 1), mbarriers(STAGES, 32 * LOAD_WARPS), mbarriers(STAGES, 1))
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
            (differentiate, (
                tensors, lists, everything, scale, first_b, first_h, captured, k_s, v_s, tiles, bars, MASK, H, QUERIES, N, STAGES, D, E,
            )),
            (gather, (k_ptr, v_ptr, k_stride, v_stride, lists, everything, k_s, v_s, bars, H, QUERIES, N, D, E, 0, False)),
        ],
        [LOAD_WARPS],
        [LOAD_REGISTERS],
    )  # fmt: skip
