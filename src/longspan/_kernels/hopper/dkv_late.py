"""The compute warp groups of `hopper.dkv_halves` for long items: dQ of a step is computed in the step after it.

A group then needs the other group's dSᵀ half a step after that was stored, and the groups need not wait for each other. Time runs
downwards; step i of an item, whose Sᵀ of half a was started in step i − 1:

  producer warp               compute warp groups g = 0, 1                                             dQ warps 0, 1
  ─────────────               ────────────────────────────                                             ─────────────
  dO, delta i ──do_full──►    dPᵀ = V dOᵀ of a started
                              Pᵀ, dSᵀ of a
                              wait for the other group's signal of step i − 1
                              Sᵀ = K Qᵀ of b, dQᵀ = Kᵀ dSᵀ of step i − 1, half g,
                              dV += Pᵀ dO of a, dK += dSᵀ Q of a started; dSᵀ of a to ds_s
                              ‖ dQ to dq_s while dV and dK are computed ──dq_full──►                   TMA reduce-add
                              dPᵀ of b started
                              Pᵀ, dSᵀ of b, dSᵀ to ds_s; signal of step i                              ◄──dq_empty──
                              dV, dK of b started
  q, norm i + 1 ──q_full──►   Sᵀ of a of step i + 1 started
            ◄──empty i──      wait for dV, dK, then for Sᵀ

Two buffers of dSᵀ are enough: a group stores that of step i after the other group's signal of step i − 1, which follows its dQ of step
i − 2. The first step of an item follows `k_full`, for which both groups have computed all dQ of the item before.

K and V are in registers: a 64 × 64 wgmma with both operands from shared memory is bound by its bandwidth.
`hopper.config.takes_late_dq` chooses between this order and that of `hopper.dkv_halves`, and has measurements.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.hopper.dkv_halves import HALF, half_step
from longspan._kernels.hopper.dkv_math import stage_dq, stage_no_dq, store_kv_grad
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
from longspan._kernels.hopper.turns import await_step, signal_step


@gluon.jit
def _start_scores(k_w, buffers, zeros, it, STAGES: gl.constexpr):
    """Start Sᵀ of half a of step `it`, whose queries are there."""
    q = tile_2d(buffers.q.main, ring_slot(it, STAGES)).slice(0, HALF)
    return warpgroup_mma(k_w, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def compute_late(
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
        start = it
        s_a_next = _start_scores(k_w, buffers, zeros, it, STAGES)
        mbarrier.wait(item_bars.v_full, t & 1)
        v_w = tile_2d(v_s, 0).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0).load(weights)
        s_a = warpgroup_mma_wait(0, deps=[s_a_next])
        while kind != END:
            stage, record = ring_slot(it, STAGES), step_record(it)
            # 0, but unknown to the compiler, which would otherwise compute all operand addresses once and spill them.
            zero = it >> 30
            q, do, ds_both = tile_2d(buffers.q.main, stage), tile_2d(buffers.do.main, stage), ds_s.index(ring_slot(it, DS))
            q_a, do_a, q_b, do_b = q.slice(0, HALF), do.slice(0, HALF), q.slice(HALF, HALF), do.slice(HALF, HALF)
            ds_own = ds_both.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
            norm_s, delta_s = buffers.norm.index(stage), buffers.delta.index(stage)
            mbarrier.wait(bars.do_full.index(stage), ring_phase(it, STAGES))
            dp_a_next = warpgroup_mma(v_w, do_a.permute((1, 0)), zeros, use_acc=False, is_async=True)
            p_a, ds_a = half_step(
                s_a, dp_a_next, norm_s, delta_s, record, steps, kind, b + first_b, first_h, kv_pos, kv_left, scale, captured,
                0, 0, GROUP, MASK, dtype, st_l,
            )  # fmt: skip
            # An item's first step has no step before it: the dQ computed then is not used.
            before = it - 1
            slot = ring_slot(before, DS)
            if before >= start:
                await_step(before, GROUP)
            s_b_next = warpgroup_mma(k_w, q_b.permute((1, 0)), zeros, use_acc=False, is_async=True)
            k_all = tile_2d(k_s, zero).permute((1, 0))
            dq_next = warpgroup_mma(k_all, ds_s.index(slot).slice(GROUP * HALF, HALF, dim=1), zeros, use_acc=False, is_async=True)
            dv_next = warpgroup_mma(gl.convert_layout(p_a, weights), do_a, dv, is_async=True)
            dk_next = warpgroup_mma(gl.convert_layout(ds_a, weights), q_a, dk, is_async=True)
            ds_own.slice(0, HALF, dim=1).store(ds_a)
            s_b, dq = warpgroup_mma_wait(2, deps=[s_b_next, dq_next])
            if before >= start:
                stage_dq(dq * scale if SCALE_DQ else dq, before, dq_s, dq_bars)
            dp_b_next = warpgroup_mma(v_w, do_b.permute((1, 0)), zeros, use_acc=False, is_async=True)
            p_b, ds_b = half_step(
                s_b, dp_b_next, norm_s, delta_s, record, steps, kind, b + first_b, first_h, kv_pos, kv_left, scale, captured,
                1, 0, GROUP, MASK, dtype, st_l,
            )  # fmt: skip
            ds_own.slice(HALF, HALF, dim=1).store(ds_b)
            fence_async_shared()
            signal_step(it, GROUP)
            dv_next = warpgroup_mma(gl.convert_layout(p_b, weights), do_b, dv_next, is_async=True)
            dk_next = warpgroup_mma(gl.convert_layout(ds_b, weights), q_b, dk_next, is_async=True)
            it += 1
            mbarrier.wait(bars.q_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
            kind = load_int(steps, step_record(it) + KIND)
            s_a_next = _start_scores(k_w, buffers, zeros, it, STAGES)
            dv, dk = warpgroup_mma_wait(1, deps=[dv_next, dk_next])
            mbarrier.arrive(bars.q_empty.index(stage), count=1)
            s_a = warpgroup_mma_wait(0, deps=[s_a_next])
        before = it - 1
        if before >= start:
            await_step(before, GROUP)
            last_ds = ds_s.index(ring_slot(before, DS)).slice(GROUP * HALF, HALF, dim=1)
            dq_next = warpgroup_mma(tile_2d(k_s, 0).permute((1, 0)), last_ds, zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq_next])
            mbarrier.arrive(item_bars.empty, count=1)
            stage_dq(dq * scale if SCALE_DQ else dq, before, dq_s, dq_bars)
        else:
            mbarrier.arrive(item_bars.empty, count=1)
        # The END record passes through all mbarriers as a step does.
        mbarrier.wait(bars.do_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        mbarrier.arrive(bars.q_empty.index(ring_slot(it, STAGES)), count=1)
        left = kv_left - GROUP * GROUP_KEYS
        store_kv_grad(dk_ptr, dk_stride, b, head, dk * scale, kv_row, left, it, D, DP)
        store_kv_grad(dv_ptr, dv_stride, b, head, dv, kv_row, left, it, E, EP)
        stage_no_dq(it, dq_bars)
        it += 1
        t += 1
        mbarrier.wait(item_bars.k_full, t & 1)
        b = load_int(item_s, ITEM_BATCH)
    stage_no_dq(it, dq_bars)
