"""The compute warp groups of the dK/dV kernel at head dims up to 64, without a score mod. Long items: `hopper.dkv_late`.

A step has 128 queries in two halves, a and b. The tensor cores compute one half while the warp group computes exponentials of the other.
Time runs downwards; step i of an item:

  producer warp               compute warp groups g = 0, 1                                             dQ warps 0, 1
  ─────────────               ────────────────────────────                                             ─────────────
                              group 1 waits until group 0 gives the turn (`hopper.turns`)
                              Sᵀ = K Qᵀ of a started, right after dK of step i − 1
  dO, delta i ──do_full──►    dPᵀ = V dOᵀ of a, Sᵀ of b started; group 0 gives the turn
         ◄──empty i − 1──     Pᵀ, dSᵀ of a, dSᵀ to ds_s
                              ‖ dPᵀ of b, dV += Pᵀ dO of a, dK += dSᵀ Q of a started
                              Pᵀ, dSᵀ of b, dSᵀ to ds_s
                              ‖ dV += Pᵀ dO of b started
                              both groups wait for each other (`sync_groups`)
                              dQᵀ = Kᵀ dSᵀ of half g, from the dSᵀ of both groups, dK of b started
                              ‖ dQ to dq_s while dK is computed ──dq_full──►                           TMA reduce-add
  q, norm i + 1 ──q_full──►   ‖ wait for the queries of step i + 1 while dK is computed                ◄──dq_empty──

Buffers and mbarriers are those of `hopper.backward_dkv` without PREFETCH, with BM = 128.

K is in registers: a 64 × 64 wgmma with both operands from shared memory is bound by its bandwidth. V in registers too makes no difference
at causal 2k. On an H200, this takes 5 to 6 % less time than steps of 64 queries (`backward_dkv`, PREFETCH). With a causal mask, 2 % of it
are due to the turns.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.hopper.dkv_math import release_step_before, stage_dq, stage_no_dq, step_probabilities, store_kv_grad, sync_groups
from longspan._kernels.hopper.dkv_producer import (
    END,
    GROUP_KEYS,
    ITEM_BATCH,
    ITEM_HEAD,
    ITEM_KEYS_LEFT,
    ITEM_POSITION,
    ITEM_ROW,
    KIND,
    step_record,
)
from longspan._kernels.hopper.isolation import bound_group_keys, largest_keys
from longspan._kernels.hopper.pipeline import load_int, ring_phase, ring_slot, tile_2d
from longspan._kernels.hopper.turns import await_turn, give_turn

HALF = gl.constexpr(64)  # queries


@gluon.jit
def half_step(
    s, dp_next, norm_s, delta_s, record, steps, kind, b, first_h, kv_pos, kv_left, scale, captured,
    INDEX: gl.constexpr, PENDING: gl.constexpr, GROUP: gl.constexpr, MASK: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(Pᵀ, dSᵀ) of half INDEX of a step, from its scores s. dp_next: dPᵀ, complete when at most PENDING wgmma are in flight."""
    row_l: gl.constexpr = gl.SliceLayout(0, layout)
    norm = gl.expand_dims(norm_s.slice(INDEX * HALF, HALF).load(row_l), 0)
    p, slope = step_probabilities(
        s, norm, kind, steps, record, b, first_h, kv_pos, kv_left, scale, captured,
        INDEX * HALF, GROUP, MASK, None, None, HALF, dtype, layout,
    )  # fmt: skip
    delta = gl.expand_dims(delta_s.slice(INDEX * HALF, HALF).load(row_l), 0)
    dp = warpgroup_mma_wait(PENDING, deps=[dp_next])
    return p, (slope * (dp - delta)).to(dtype)


@gluon.jit
def compute_halves(
    dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s, ds_s, dq_s, buffers, item_s, item_bars, bars,
    dq_bars,
    GROUP: gl.constexpr, MASK: gl.constexpr, SCALE_DQ: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr, DS: gl.constexpr,
    votes,
):  # fmt: skip
    """A compute warp group: 64 of the item's 128 keys, in the order of the picture above."""
    gl.static_assert(DP == 64 and EP == 64, "all head dims of a half in one wgmma")
    steps = buffers.steps
    dtype: gl.constexpr = k_s.dtype
    st_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=st_l, k_width=2)
    zeros = gl.full([GROUP_KEYS, HALF], 0.0, gl.float32, layout=st_l)
    it = 0  # step records so far
    t = 0  # items so far
    mbarrier.wait(item_bars.k_full, 0)
    b = load_int(item_s, ITEM_BATCH)
    while b >= 0:
        head, kv_row = load_int(item_s, ITEM_HEAD), load_int(item_s, ITEM_ROW) + GROUP * GROUP_KEYS
        kv_pos, kv_left = load_int(item_s, ITEM_POSITION), load_int(item_s, ITEM_KEYS_LEFT)
        dk, dv = zeros, zeros
        if votes is not None:
            largest = largest_keys(k_s.index(0), k_s.index(0), GROUP)
        mbarrier.wait(bars.q_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        kind = load_int(steps, step_record(it) + KIND)
        if votes is not None:
            mbarrier.wait(item_bars.v_full, t & 1)
            bound_group_keys(k_s.index(0), k_s.index(0), v_s.index(0), largest, votes, it >> 30, GROUP)
        k_w = tile_2d(k_s, 0).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0).load(weights)
        mbarrier.wait(item_bars.v_full, t & 1)
        start = it
        while kind != END:
            stage, record = ring_slot(it, STAGES), step_record(it)
            # 0, but unknown to the compiler, which would otherwise compute all operand addresses once and spill them.
            zero = it >> 30
            v_w = tile_2d(v_s, zero).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
            q, do, ds_both = tile_2d(buffers.q.main, stage), tile_2d(buffers.do.main, stage), ds_s.index(ring_slot(it, DS))
            q_a, do_a, q_b, do_b = q.slice(0, HALF), do.slice(0, HALF), q.slice(HALF, HALF), do.slice(HALF, HALF)
            ds_own = ds_both.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
            norm_s, delta_s = buffers.norm.index(stage), buffers.delta.index(stage)
            if GROUP == 1:
                await_turn(GROUP)
            s_a_next = warpgroup_mma(k_w, q_a.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(bars.do_full.index(stage), ring_phase(it, STAGES))
            dp_a_next = warpgroup_mma(v_w, do_a.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s_b_next = warpgroup_mma(k_w, q_b.permute((1, 0)), zeros, use_acc=False, is_async=True)
            if GROUP == 0:
                give_turn(GROUP)
            release_step_before(it, start, bars, STAGES)
            s_a = warpgroup_mma_wait(2, deps=[s_a_next])
            p_a, ds_a = half_step(
                s_a, dp_a_next, norm_s, delta_s, record, steps, kind, b + first_b, first_h, kv_pos, kv_left, scale, captured,
                0, 1, GROUP, MASK, dtype, st_l,
            )  # fmt: skip
            dp_b_next = warpgroup_mma(v_w, do_b.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dv_next = warpgroup_mma(gl.convert_layout(p_a, weights), do_a, dv, is_async=True)
            dk_next = warpgroup_mma(gl.convert_layout(ds_a, weights), q_a, dk, is_async=True)
            ds_own.slice(0, HALF, dim=1).store(ds_a)
            s_b = warpgroup_mma_wait(3, deps=[s_b_next])
            p_b, ds_b = half_step(
                s_b, dp_b_next, norm_s, delta_s, record, steps, kind, b + first_b, first_h, kv_pos, kv_left, scale, captured,
                1, 2, GROUP, MASK, dtype, st_l,
            )  # fmt: skip
            ds_own.slice(HALF, HALF, dim=1).store(ds_b)
            dv_next = warpgroup_mma(gl.convert_layout(p_b, weights), do_b, dv_next, is_async=True)
            fence_async_shared()
            sync_groups()
            k_all = tile_2d(k_s, zero).permute((1, 0))
            dq_next = warpgroup_mma(k_all, ds_both.slice(GROUP * HALF, HALF, dim=1), zeros, use_acc=False, is_async=True)
            dk_next = warpgroup_mma(gl.convert_layout(ds_b, weights), q_b, dk_next, is_async=True)
            dv, dq = warpgroup_mma_wait(1, deps=[dv_next, dq_next])
            stage_dq(dq * scale if SCALE_DQ else dq, it, dq_s, dq_bars)
            it += 1
            mbarrier.wait(bars.q_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
            kind = load_int(steps, step_record(it) + KIND)
            dk = warpgroup_mma_wait(0, deps=[dk_next])
        release_step_before(it, start, bars, STAGES)
        # The END record passes through all mbarriers as a step does.
        mbarrier.wait(bars.do_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        mbarrier.arrive(bars.q_empty.index(ring_slot(it, STAGES)), count=1)
        mbarrier.arrive(item_bars.empty, count=1)
        sync_groups()  # both groups have computed the last step's dQ: the next item may overwrite its dS
        left = kv_left - GROUP * GROUP_KEYS
        store_kv_grad(dk_ptr, dk_stride, b, head, dk * scale, kv_row, left, it, D, DP)
        store_kv_grad(dv_ptr, dv_stride, b, head, dv, kv_row, left, it, E, EP)
        stage_no_dq(it, dq_bars)
        it += 1
        t += 1
        mbarrier.wait(item_bars.k_full, t & 1)
        b = load_int(item_s, ITEM_BATCH)
    stage_no_dq(it, dq_bars)
