"""dQ with one warp group: items of 64 queries of one head over tiles that were chosen on the device, as in `hopper.forward_one`.

Two CTAs share an SM. dO, P and dS are in registers; the queries stay in shared memory, for lack of registers. Block n is 64 keys.
Time runs downwards:

  load warp                 warp group
  ─────────                 ──────────
  K n ────k_full────►
  V n ────v_full────►       dS of block n − 1 = P (dP − delta)
                            dQ += dS K of block n − 1, S = Q Kᵀ and dP = dO Vᵀ of block n  started
                            wait for dQ                                ──k_empty──►
                            wait for S and dP                          ──v_empty──►
                            P = exp2(S − norm)

dK and dV: `hopper.backward_wide`, in steps of 64 queries.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.row_terms import first_term
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.forward_one import DYNAMIC, Items, item_slots, load, load_operand, place_item, receive_item, start_product
from longspan._kernels.hopper.forward_producer import GROUP_ROWS
from longspan._kernels.hopper.gluon_names import barrier
from longspan._kernels.hopper.pipeline import KvBarriers, load_int, mbarriers, next_use, shared_ints, tile_2d
from longspan._kernels.hopper.tile_io import store_tile


@gluon.jit
def _score_grads(
    s, dp, norm, delta, q_pos, kv_first, kv_len, masked, b, h, scale, mask_captured, mask_sizes,
    MASK: gl.constexpr, MASKED: gl.constexpr, N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """dS of a block of scores."""
    p = gl.exp2(s * (scale * LOG2_E) - norm)
    if MASKED:  # noqa: SIM102 (a compile-time condition)
        if masked:
            kv = kv_first + gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, layout)), 0)
            p = gl.where(kv < kv_len, p, 0.0)
            if MASK is not None:
                p = gl.where(MASK(b, h, q_pos, kv, mask_captured, mask_sizes), p, 0.0)
    return p * (dp - delta)


@gluon.jit
def _accumulate(
    q_ptr, do_ptr, norm_ptr, delta_ptr, dq_ptr, q_stride, do_stride, dq_stride, items, q_len, kv_len, scale, first_b, first_h,
    mask_captured, mask_sizes, slots, q_s, k_s, v_s, places_s, bars,
    MASK: gl.constexpr, MASKED: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr,
    EP: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """The warp group that computes."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [gl.num_warps(), 1], [1, 0])
    ds_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    zero = gl.full([GROUP_ROWS, N], 0.0, gl.float32, layout=layout)
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    t = 0  # items so far
    item = receive_item(t, slots)
    while item < items.number:
        b, h, tile, _, partials, tiles = place_item(item, items, PER_BATCH, PER_HEAD)
        partials, blocks, q_first = partials * N_SUBS, tiles * N_SUBS, tile * GROUP_ROWS
        q = load_operand(q_ptr, q_stride, b, h, q_first, q_len, D, DP, by_row)
        barrier()  # all warps have computed the item before
        q_s.store(q)
        fence_async_shared()
        do = load_operand(do_ptr, do_stride, b, h, q_first, q_len, E, EP, operand)
        at, inside = first_term(b * items.heads + h, q_len) + q_first, rows < q_len - q_first
        norm = gl.expand_dims(gl.load(norm_ptr + at + rows, mask=inside, other=float("inf")), 1)
        delta = gl.expand_dims(gl.load(delta_ptr + at + rows, mask=inside, other=0.0), 1)
        q_pos, global_b, global_h = gl.expand_dims(q_first + rows, 1), b + first_b, h + first_h
        dq = gl.full([GROUP_ROWS, DP], 0.0, gl.float32, layout=dq_layout)
        if blocks > 0:
            mbarrier.wait(bars.k_full.index(k_slot), k_phase)
            kv = load_int(places_s, k_slot)
            s_next = start_product(q_s, k_s, k_slot, zero)
            mbarrier.wait(bars.v_full.index(v_slot), v_phase)
            dp_next = start_product(do, v_s, v_slot, zero)
            s, dp = warpgroup_mma_wait(0, deps=[s_next, dp_next])
            mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
            v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
            for n in range(1, blocks):  # scores and dP of block n − 1 are known
                ds = _score_grads(
                    s, dp, norm, delta, q_pos, kv, kv_len, n - 1 < partials, global_b, global_h, scale, mask_captured, mask_sizes, MASK,
                    MASKED, N, layout,
                )  # fmt: skip
                weights = gl.convert_layout(ds.to(dtype), ds_operand)
                dq_next = warpgroup_mma(weights, tile_2d(k_s, k_slot), dq, is_async=True)
                last = k_slot
                k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
                mbarrier.wait(bars.k_full.index(k_slot), k_phase)
                kv = load_int(places_s, k_slot)
                s_next = start_product(q_s, k_s, k_slot, zero)
                mbarrier.wait(bars.v_full.index(v_slot), v_phase)
                dp_next = start_product(do, v_s, v_slot, zero)
                dq, weights = warpgroup_mma_wait(2, deps=[dq_next, weights])
                mbarrier.arrive(bars.k_empty.index(last), count=1)
                s, dp = warpgroup_mma_wait(0, deps=[s_next, dp_next])
                mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
                v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
            ds = _score_grads(
                s, dp, norm, delta, q_pos, kv, kv_len, blocks - 1 < partials, global_b, global_h, scale, mask_captured, mask_sizes, MASK,
                MASKED, N, layout,
            )  # fmt: skip
            weights = gl.convert_layout(ds.to(dtype), ds_operand)
            dq_next = warpgroup_mma(weights, tile_2d(k_s, k_slot), dq, is_async=True)
            dq, weights = warpgroup_mma_wait(0, deps=[dq_next, weights])
            mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
            k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
        t += 1
        item = receive_item(t, slots)
        head = dq_ptr + wide(b) * dq_stride[0] + wide(h) * dq_stride[1]
        store_tile(head, dq * scale, q_first, q_len - q_first, dq_stride[2], D, DP, False)


@gluon.jit(do_not_specialize=DYNAMIC)
def dq_one_kernel(
    q_ptr, k_desc, v_desc, do_ptr, norm_ptr, delta_ptr, dq_ptr, counter, q_stride, do_stride, dq_stride, order, partial, counts,
    mask_captured, mask_sizes, items, rows, tiles, heads, shared, group, q_len, kv_len, scale, first_b, first_h,
    MASK: gl.constexpr, MASKED: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """dQ of all query tiles. Arguments as in `forward_one.forward_one_kernel`. norm_ptr, delta_ptr: `row_terms.padded_rows`."""
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [GROUP_ROWS, DP], gl.NVMMASharedLayout.get_default_for([GROUP_ROWS, DP], dtype))
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, DP], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, N, EP], v_desc.layout)
    places_s, slots = shared_ints(STAGES), item_slots()
    bars = KvBarriers(mbarriers(STAGES, 1), mbarriers(STAGES, 1), mbarriers(V_STAGES, 1), mbarriers(V_STAGES, 1))
    numbered = Items(items, order, rows, tiles, heads, group, counts, partial[0])
    fence_async_shared()
    gl.warp_specialize(
        [
            (_accumulate, (
                q_ptr, do_ptr, norm_ptr, delta_ptr, dq_ptr, q_stride, do_stride, dq_stride, numbered, q_len, kv_len, scale, first_b,
                first_h, mask_captured, mask_sizes, slots, q_s, k_s, v_s, places_s, bars, MASK, MASKED, N, N_SUBS, D, DP, E, EP,
                PER_BATCH, PER_HEAD,
            )),
            (load, (
                counter, k_desc, v_desc, partial[1], numbered, shared, slots, k_s, v_s, places_s, bars, 0, N, N_SUBS, PER_BATCH, PER_HEAD,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
