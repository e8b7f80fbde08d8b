"""The backward kernel by key tiles on Hopper: dK and dV of 128 keys, and dQ as a sum over key tiles by TMA reductions.

A persistent kernel, one CTA per SM. A work item is 128 keys of one KV head, 64 per compute warp group; a step is BM queries of one query
head. CTAs take items from a global counter, heaviest first, or in the order of `hopper.dq_order`. Time runs downwards; step i of an item,
with PREFETCH:

  producer warp             compute warp groups 0, 1                             dQ warps 0, 1          order warp (ordered dQ only)
  ─────────────             ────────────────────────                             ─────────────          ────────────────────────────
  steps_s[i] ───────────────────────────────────────────────────────────────────────────described──►   waits for the additions of
  q, norm i ──q_full──►     Sᵀ = K Qᵀ of step i (started in step i − 1)                                earlier key tiles
  (first step: K, V         ‖ dQ of step i − 2 to dq_s ─────────dq_full──►       TMA reduce-add
    ──k_full, v_full──►)
  dO, delta i ──do_full──►  dPᵀ = V dOᵀ                                          ◄──────due──          semaphore reached
                            Pᵀ = exp2(Sᵀ − norm)
                            dV += Pᵀ dO
                            dSᵀ = Pᵀ (dPᵀ − delta)
                            dSᵀ to ds_s ──ds_full──► the other group
                            dK += dSᵀ Q
                            dQᵀ = Kᵀ dSᵀ of step i − 1, of both groups           ◄──dq_empty──
             ◄──empty──     Sᵀ of step i + 1 started
  END record                dK, dV to global memory                              semaphore += 1

shared memory                 size                    written by      read by           mbarriers (arrivals)
steps_s                       STEP_SLOTS records      producer        all               covered by q_full; described (1), due (1)
item_s, k_s, v_s              1 record, 128 keys      producer (TMA)  compute groups    item_bars: k_full, v_full (1), empty (2)
q, norm; dO, delta            STAGES × BM queries     producer (TMA)  compute groups    bars: q_full, do_full (1), empty (2)
ds_s                          DS × 128 × BM           compute groups  compute groups    PREFETCH: ds_bars: full (2), empty (2)
dq_s                          BM × DP, float32        compute group   its dQ warp       dq_bars: full (1), empty (1)

Scores and their gradients are transposed, keys × queries. A compute warp group needs the dSᵀ of both groups for its part of dQ. With
PREFETCH it takes that of the step before, so that the groups need not wait for each other. Without PREFETCH, dQ of a step is computed in
the same step, and fewer registers are in use at once. Step i then:

  producer warp               compute warp groups 0, 1                                                 dQ warps 0, 1
  ─────────────               ────────────────────────                                                 ─────────────
                              Sᵀ = K Qᵀ of step i started, right after dK of step i − 1
  dO, delta i ──do_full──►    dPᵀ = V dOᵀ started
         ◄──empty i − 1──     Pᵀ = exp2(Sᵀ − norm)
                              dSᵀ = Pᵀ (dPᵀ − delta), to ds_s
                              dV += Pᵀ dO started
                              both groups wait for each other (`sync_groups`)
                              dQᵀ = Kᵀ dSᵀ of both groups, dK += dSᵀ Q started
                              ‖ dQ to dq_s while dK is computed ──dq_full──►                           TMA reduce-add
  q, norm i + 1 ──q_full──►   ‖ wait for the queries of step i + 1 while dK is computed                ◄──dq_empty──

On an H200 at head dim 128, PREFETCH takes 3 to 7 % less time with a score mod, and 3 to 6 % more without one. At head dims up to 64,
without a score mod, a step has 128 queries (`hopper.dkv_halves`, `hopper.dkv_late`). Keys with head dims of 129 to 192 are
in two parts, and P is in shared memory too (`hopper.dkv_parts`).
With isolation, the producer warp may change tiles in shared memory before it signals that they are full (`hopper.isolation`).
Without dQ (`hopper.backward_dq` computes it then), there are only the producer warp and the compute warp groups, with PREFETCH.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.hopper.dkv_halves import compute_halves
from longspan._kernels.hopper.dkv_late import compute_late
from longspan._kernels.hopper.dkv_math import release_step_before, stage_dq, stage_no_dq, step_probabilities, store_kv_grad, sync_groups
from longspan._kernels.hopper.dkv_parts import compute_parts
from longspan._kernels.hopper.dkv_producer import (
    BATCH,
    EARLIER_ADDS,
    END,
    GROUP_KEYS,
    HEAD,
    ITEM_BATCH,
    ITEM_FIELDS,
    ITEM_HEAD,
    ITEM_KEYS_LEFT,
    ITEM_POSITION,
    ITEM_ROW,
    KIND,
    ROW,
    SEMAPHORE,
    STEP_FIELDS,
    STEP_SLOTS,
    STOP,
    TILE,
    DqOrderArgs,
    KeyTileBarriers,
    StepBarriers,
    StepBuffers,
    produce,
    step_record,
)
from longspan._kernels.hopper.gluon_names import tma_add
from longspan._kernels.hopper.head_dim_parts import Parts, ring_of
from longspan._kernels.hopper.isolation import StepIsolation, bound_group_keys, largest_keys
from longspan._kernels.hopper.none_arg import first_given, optional
from longspan._kernels.hopper.pipeline import (
    BufferBarriers,
    Captured,
    KvSource,
    RunPointers,
    load_int,
    mbarriers,
    ring_phase,
    ring_slot,
    shared_ints,
    tile_2d,
)
from longspan._kernels.hopper.tma_reduce import wait_until_added
from longspan._kernels.hopper.warp_votes import ballots

_DYNAMIC = [
    "items", "rows", "tiles", "heads", "kv_heads", "shared", "head_parts", "group", "heavy_rows", "q_len", "kv_len", "local_tokens",
    "semaphores_per_head", "together", "first_b", "first_h",
]  # fmt: skip


class OrderBarriers(NamedTuple):
    """Arrays of mbarriers, one per step record, with ordered dQ. `described`: the record is written. `due`: the step's dQ may be added."""

    described: Any
    due: Any


@gluon.jit
def _start_dq(k, ds, GROUP: gl.constexpr):
    """Start the wgmma of a group's part of a step's dQᵀ: 64 of 128 dims for all queries, or all 64 dims for half of the queries."""
    WIDE: gl.constexpr = k.shape[1] > 64
    PART: gl.constexpr = ds.shape[1] if WIDE else ds.shape[1] // 2  # queries
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16])
    zeros = gl.full([64, PART], 0.0, gl.float32, layout=layout)
    if WIDE:
        k = k.slice(GROUP * 64, 64, dim=1)
    else:
        ds = ds.slice(GROUP * PART, PART, dim=1)
    return warpgroup_mma(k.permute((1, 0)), ds, zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute(
    dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s, ds_s, dq_s, buffers, item_s, item_bars, bars,
    ds_bars, dq_bars,
    GROUP: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, DQ: gl.constexpr,
    SCALE_DQ: gl.constexpr, PREFETCH: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, DS: gl.constexpr, votes,
):  # fmt: skip
    """A compute warp group: 64 of the item's 128 keys. PREFETCH: which of the two orders above a step has."""
    steps = buffers.steps
    dtype: gl.constexpr = k_s.dtype
    st_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    dk_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    dv_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EP, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv_l, k_width=2)
    s_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk_l, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(0, st_l)
    # At small head dims, K and V are read into registers once per item: a 64 × 64 wgmma with both operands from shared memory is bound by
    # its bandwidth.
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=st_l, k_width=2)
    KV_IN_REGISTERS: gl.constexpr = DP <= 64
    zeros = gl.full([GROUP_KEYS, BM], 0.0, gl.float32, layout=st_l)
    it = 0  # step records so far
    t = 0  # items so far
    mbarrier.wait(item_bars.k_full, 0)
    b = load_int(item_s, ITEM_BATCH)
    while b >= 0:
        head, kv_row = load_int(item_s, ITEM_HEAD), load_int(item_s, ITEM_ROW) + GROUP * GROUP_KEYS
        kv_pos, kv_left = load_int(item_s, ITEM_POSITION), load_int(item_s, ITEM_KEYS_LEFT)
        dk = gl.full([GROUP_KEYS, DP], 0.0, gl.float32, layout=dk_l)
        dv = gl.full([GROUP_KEYS, EP], 0.0, gl.float32, layout=dv_l)
        if votes is not None:
            largest = largest_keys(k_s.index(0), k_s.index(0), GROUP)
        mbarrier.wait(bars.q_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        kind = load_int(steps, step_record(it) + KIND)
        if votes is not None:
            mbarrier.wait(item_bars.v_full, t & 1)
            bound_group_keys(k_s.index(0), k_s.index(0), v_s.index(0), largest, votes, it >> 30, GROUP)
        k_w = tile_2d(k_s, 0).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
        if KV_IN_REGISTERS:
            k_w = k_w.load(operand)
        if PREFETCH:
            s_next = warpgroup_mma(k_w, tile_2d(buffers.q.main, ring_slot(it, STAGES)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(item_bars.v_full, t & 1)
        if KV_IN_REGISTERS:
            v_w = tile_2d(v_s, 0).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0).load(operand)
        if PREFETCH:
            s = warpgroup_mma_wait(0, deps=[s_next])
        start = it
        while kind != END:
            stage = ring_slot(it, STAGES)
            # 0, but unknown to the compiler, which would otherwise compute all operand addresses once and spill them.
            zero = it >> 30
            k = tile_2d(k_s, zero)
            if not KV_IN_REGISTERS:
                k_w = k.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
                v_w = tile_2d(v_s, zero).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
            q, do = tile_2d(buffers.q.main, stage), tile_2d(buffers.do.main, stage)
            record = step_record(it)
            of_head = captured
            if UNIFORM is not None:
                score = UNIFORM(b + first_b, load_int(steps, record + HEAD) + first_h, captured.score, captured.score_sizes)
                of_head = Captured(captured.mask, captured.mask_sizes, score, captured.score_sizes)
            if not PREFETCH:
                s_next = warpgroup_mma(k_w, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(bars.do_full.index(stage), ring_phase(it, STAGES))
            dp_next = warpgroup_mma(v_w, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            if not PREFETCH:  # here, while S and dP are computed: between dK and the next S, the tensor cores would idle
                release_step_before(it, start, bars, STAGES)
            norm = gl.expand_dims(buffers.norm.index(stage).load(row_l), 0)
            if not PREFETCH:
                s = warpgroup_mma_wait(1, deps=[s_next])
            p, slope = step_probabilities(
                s, norm, kind, steps, record, b + first_b, first_h, kv_pos, kv_left, scale, of_head,
                0, GROUP, MASK, SCORE, JOINT, BM, dtype, st_l,
            )  # fmt: skip
            if PREFETCH:
                dv_next = warpgroup_mma(gl.convert_layout(p, p_l), do, dv, is_async=True)
            delta = gl.expand_dims(buffers.delta.index(stage).load(row_l), 0)
            dp = warpgroup_mma_wait(1 if PREFETCH else 0, deps=[dp_next])
            ds = (slope * (dp - delta)).to(dtype)
            if DQ:
                if PREFETCH:
                    mbarrier.wait(ds_bars.empty.index(ring_slot(it, DS)), ring_phase(it, DS) ^ 1)
                ds_s.index(ring_slot(it, DS)).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0).store(ds)
            if PREFETCH:
                if DQ:
                    fence_async_shared()
                    mbarrier.arrive(ds_bars.full.index(ring_slot(it, DS)), count=1)
                dk_next = warpgroup_mma(gl.convert_layout(ds, s_l), q, dk, is_async=True)
                dv = warpgroup_mma_wait(1, deps=[dv_next])
                # An item's first step has no step before it: the dQ computed then is not used.
                before = it - 1
                source = gl.maximum(before, start)
                slot = ring_slot(source, DS)
                if DQ:
                    mbarrier.wait(ds_bars.full.index(slot), ring_phase(source, DS))
                    dq_next = _start_dq(k, ds_s.index(slot), GROUP)
                after = it + 1
                mbarrier.wait(bars.q_full.index(ring_slot(after, STAGES)), ring_phase(after, STAGES))
                kind = load_int(steps, step_record(after) + KIND)
                s_next = warpgroup_mma(
                    k_w, tile_2d(buffers.q.main, ring_slot(after, STAGES)).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                if DQ:
                    dk, dq = warpgroup_mma_wait(1, deps=[dk_next, dq_next])
                    mbarrier.arrive(bars.q_empty.index(stage), count=1)
                    if before >= start:
                        mbarrier.arrive(ds_bars.empty.index(slot), count=1)
                        stage_dq(dq * scale if SCALE_DQ else dq, before, dq_s, dq_bars)
                else:
                    dk = warpgroup_mma_wait(1, deps=[dk_next])
                    mbarrier.arrive(bars.q_empty.index(stage), count=1)
                s = warpgroup_mma_wait(0, deps=[s_next])
            else:
                dv_next = warpgroup_mma(gl.convert_layout(p, p_l), do, dv, is_async=True)
                fence_async_shared()
                sync_groups()
                dq_next = _start_dq(k, ds_s.index(ring_slot(it, DS)), GROUP)
                dk_next = warpgroup_mma(gl.convert_layout(ds, s_l), q, dk, is_async=True)
                dv, dq = warpgroup_mma_wait(1, deps=[dv_next, dq_next])
                stage_dq(dq * scale if SCALE_DQ else dq, it, dq_s, dq_bars)
                after = it + 1
                mbarrier.wait(bars.q_full.index(ring_slot(after, STAGES)), ring_phase(after, STAGES))
                kind = load_int(steps, step_record(after) + KIND)
                dk = warpgroup_mma_wait(0, deps=[dk_next])
            it = after
        if not PREFETCH:
            release_step_before(it, start, bars, STAGES)
        # The END record passes through all mbarriers as a step does.
        mbarrier.wait(bars.do_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        mbarrier.arrive(bars.q_empty.index(ring_slot(it, STAGES)), count=1)
        if DQ and PREFETCH:
            before = it - 1
            if before >= start:
                mbarrier.wait(ds_bars.full.index(ring_slot(before, DS)), ring_phase(before, DS))
                dq_next = _start_dq(tile_2d(k_s, 0), ds_s.index(ring_slot(before, DS)), GROUP)
                dq = warpgroup_mma_wait(0, deps=[dq_next])
                mbarrier.arrive(item_bars.empty, count=1)
                mbarrier.arrive(ds_bars.empty.index(ring_slot(before, DS)), count=1)
                stage_dq(dq * scale if SCALE_DQ else dq, before, dq_s, dq_bars)
            else:
                mbarrier.arrive(item_bars.empty, count=1)
        else:
            mbarrier.arrive(item_bars.empty, count=1)
            if DQ:  # both groups have computed the last step's dQ: the next item may overwrite its dS
                sync_groups()
        left = kv_left - GROUP * GROUP_KEYS
        store_kv_grad(dk_ptr, dk_stride, b, head, dk * scale, kv_row, left, it, D, DP)
        store_kv_grad(dv_ptr, dv_stride, b, head, dv, kv_row, left, it, E, EP)
        if DQ:
            if PREFETCH:
                mbarrier.wait(ds_bars.empty.index(ring_slot(it, DS)), ring_phase(it, DS) ^ 1)
                mbarrier.arrive(ds_bars.full.index(ring_slot(it, DS)), count=1)
                mbarrier.arrive(ds_bars.empty.index(ring_slot(it, DS)), count=1)
            stage_no_dq(it, dq_bars)
        it += 1
        t += 1
        mbarrier.wait(item_bars.k_full, t & 1)
        b = load_int(item_s, ITEM_BATCH)
    if DQ:
        stage_no_dq(it, dq_bars)


@gluon.jit
def _compute_group(
    dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s, ds_s, dq_s, buffers, item_s, item_bars, bars,
    ds_bars, dq_bars,
    GROUP: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, SCALE_DQ: gl.constexpr,
    PREFETCH: gl.constexpr, LATE: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr,
    E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr, DS: gl.constexpr, votes,
):  # fmt: skip
    """A compute warp group, with dQ. k_s, v_s: `Parts`."""
    if D_TAIL > 0:
        compute_parts(
            dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s.main, ds_s, dq_s, buffers, item_s, item_bars,
            bars, dq_bars, GROUP, MASK, SCALE_DQ, BM, D, DP, D_TAIL, E, EP, STAGES, DS, votes,
        )  # fmt: skip
    elif BM == 128 and LATE:
        compute_late(
            dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s.main, v_s.main, ds_s, dq_s, buffers, item_s,
            item_bars, bars, dq_bars, GROUP, MASK, SCALE_DQ, D, DP, E, EP, STAGES, DS, votes,
        )  # fmt: skip
    elif BM == 128:
        compute_halves(
            dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s.main, v_s.main, ds_s, dq_s, buffers, item_s,
            item_bars, bars, dq_bars, GROUP, MASK, SCALE_DQ, D, DP, E, EP, STAGES, DS, votes,
        )  # fmt: skip
    else:
        _compute(
            dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s.main, v_s.main, ds_s, dq_s, buffers, item_s,
            item_bars, bars, ds_bars, dq_bars, GROUP, MASK, SCORE, JOINT, UNIFORM, True, SCALE_DQ, PREFETCH, BM, D, DP, E, EP, STAGES, DS,
            votes,
        )  # fmt: skip


@gluon.jit
def _order_dq(semaphores, steps, order_bars):
    """The order warp: signals `due` for a step when all earlier additions to its rows of dQ are done, two per step (one per dQ warp)."""
    if semaphores is not None:
        it = 0
        mbarrier.wait(order_bars.described.index(0), 0)
        kind = load_int(steps, KIND)
        while kind != STOP:
            slot = ring_slot(it, STEP_SLOTS)
            if kind != END:
                earlier_adds = load_int(steps, step_record(it) + EARLIER_ADDS)
                semaphore = semaphores + load_int(steps, step_record(it) + SEMAPHORE)
                while gl.atomic_add(semaphore, 0, sem="acquire") < earlier_adds * 2:
                    pass
            mbarrier.arrive(order_bars.due.index(slot), count=1)
            it += 1
            mbarrier.wait(order_bars.described.index(ring_slot(it, STEP_SLOTS)), ring_phase(it, STEP_SLOTS))
            kind = load_int(steps, step_record(it) + KIND)


@gluon.jit
def _add_dq(
    dq_ptr, semaphores, dq_s, steps, dq_bars, order_bars, GROUP: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr
):  # fmt: skip
    """A dQ warp: adds one compute warp group's dQ tiles to global memory by TMA reductions. A step has one tile, or two (`dkv_parts`).

    With `semaphores`, each tile waits until it is due, and counts up its semaphore when it was added. Reductions happen in L2: an addition
    that completed before this one starts precedes it, without a fence between the wait and the TMA.
    """
    TILES: gl.constexpr = 2 if D_TAIL > 0 and GROUP == 0 else 1  # of a step
    FIRST: gl.constexpr = 0 if DP <= 64 else GROUP * (DP if D_TAIL > 0 else 64)  # column
    it = 0
    mbarrier.wait(dq_bars.full, 0)
    kind = load_int(steps, KIND)
    while kind != STOP:
        record = step_record(it)
        if semaphores is not None:  # END records too: the order warp must not fall behind by a whole ring
            mbarrier.wait(order_bars.due.index(ring_slot(it, STEP_SLOTS)), ring_phase(it, STEP_SLOTS))
        for tile in gl.static_range(TILES):
            if tile > 0:
                mbarrier.wait(dq_bars.full, (it * TILES + tile) & 1)
            if kind != END:
                h, row, b = load_int(steps, record + HEAD), load_int(steps, record + ROW), load_int(steps, record + BATCH)
                if DP <= 64:
                    row += GROUP * dq_s.shape[2]
                tma_add(dq_ptr, [b, h, row, FIRST + tile * 64], dq_s)
                tma.store_wait(0)
            mbarrier.arrive(dq_bars.empty, count=1)
        if semaphores is not None:  # noqa: SIM102 (a compile-time condition)
            if kind != END:
                wait_until_added()
                gl.atomic_add(semaphores + load_int(steps, record + SEMAPHORE), 1, sem="release")
        it += 1
        mbarrier.wait(dq_bars.full, (it * TILES) & 1)
        kind = load_int(steps, step_record(it) + KIND)


@gluon.jit(do_not_specialize=_DYNAMIC)
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, norm_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr, local_k_ptr, local_v_ptr, norm_rows_ptr, delta_rows_ptr,
    unbounded_ptr, q_tail_ptr, k_tail_ptr, v_tail_ptr, do_tail_ptr, local_k_tail_ptr, local_v_tail_ptr, counter, semaphores,
    dk_stride, dv_stride, order, full, partial, dq_order_ptr, dq_order_legs, dq_order_before, q_side, kv_side,
    mask_captured, mask_sizes, score_captured, score_sizes,
    items, rows, tiles, heads, kv_heads, shared, head_parts, group, heavy_rows, q_len, kv_len, local_tokens, semaphores_per_head,
    together, scale, first_b, first_h,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
    SCALE_DQ: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, DS: gl.constexpr, REGISTERS: gl.constexpr, Q_TILE: gl.constexpr, KV_TILE: gl.constexpr,
    BY_TILE: gl.constexpr, MERGED: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """dK and dV of key tiles, each summed over `shared` query heads, and dQ added to dq_ptr (float32) if it is not None.

    SCALE_DQ: whether dQ includes the scale. Without it, `hopper.round_grads` multiplies the sum.
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr: TMA descriptors. local_k_ptr, local_v_ptr, local_tokens: `KvSource`; dK and dV cover both sources.
    norm_ptr, delta_ptr: TMA descriptors of [B · H, Q] in tiles of BM; with BY_TILE, in the order of query tiles (`row_terms.rows_by_tile`).
    norm_rows_ptr, delta_rows_ptr: pointers to the same. unbounded_ptr: the flag of `hopper.isolation`. All three None without isolation.
    D_TAIL, x_tail_ptr: as in `backward_wide.wide_dkv_kernel`.
    dk_ptr, dv_ptr: each KV head `head_parts` times, one for each part of its query heads. kv_heads counts all of these.
    counter: one int32, 0. DS: buffers of dS. heavy_rows: key tiles of `order` whose items come first, of all heads.
    Q_TILE, KV_TILE: queries and keys of a tile of the block table.
    semaphores: int32 zeros, one per step of each head, if dQ is accumulated in a fixed order (`hopper.dq_order`), or None.
    LATE: dQ of steps of 128 queries as in `hopper.dkv_late`. MERGED: as in `dkv_producer.produce`. together: as in `DqOrderArgs`.
    """
    # The dQ warps still read a step's record when the producer is STAGES + 3 steps ahead.
    gl.static_assert(STAGES + 3 < STEP_SLOTS, "a step's record must live until its dQ is added")
    DQ: gl.constexpr = dq_ptr is not None
    dtype: gl.constexpr = k_ptr.dtype
    q, do = Parts(q_ptr, first_given(q_tail_ptr, q_ptr)), Parts(do_ptr, first_given(do_tail_ptr, do_ptr))
    k, v = Parts(k_ptr, first_given(k_tail_ptr, k_ptr)), Parts(v_ptr, first_given(v_tail_ptr, v_ptr))
    k_s, v_s, q_s, do_s = ring_of(k, 1), ring_of(v, 1), ring_of(q, STAGES), ring_of(do, STAGES)
    row_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    norm_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row_layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row_layout)
    steps_s, item_s = shared_ints(STEP_SLOTS * STEP_FIELDS), shared_ints(ITEM_FIELDS)
    buffers = StepBuffers(q_s, do_s, norm_s, delta_s, steps_s)
    item_bars = KeyTileBarriers(mbarriers(1, 1).index(0), mbarriers(1, 1).index(0), mbarriers(1, 2).index(0))
    bars = StepBarriers(mbarriers(STAGES, 1), mbarriers(STAGES, 1), mbarriers(STAGES, 2), optional(None))
    q_side = (optional(q_side[0]), optional(q_side[1]), optional(q_side[2]))
    kv_side = (optional(kv_side[0]), optional(kv_side[1]), optional(kv_side[2]))
    captured = Captured(mask_captured, mask_sizes, score_captured, score_sizes)
    full, partial = RunPointers(full[0], full[1], full[2]), RunPointers(partial[0], partial[1], partial[2])
    keys = KvSource(k, Parts(optional(local_k_ptr), first_given(local_k_tail_ptr, local_k_ptr)), local_tokens)
    values = KvSource(v, Parts(optional(local_v_ptr), first_given(local_v_tail_ptr, local_v_ptr)), local_tokens)
    isolation, votes = optional(None), optional(None)
    if unbounded_ptr is not None:
        isolation, votes = StepIsolation(unbounded_ptr, norm_rows_ptr, delta_rows_ptr, mbarriers(2, 1)), ballots(2)
    semaphores, order_bars = optional(semaphores), OrderBarriers(optional(None), optional(None))
    PREFETCH: gl.constexpr = BM == 64 and D_TAIL == 0 and (DP <= 64 or SCORE is not None)
    dq_order = DqOrderArgs(optional(dq_order_ptr), optional(dq_order_legs), optional(dq_order_before), semaphores_per_head, together)
    if semaphores is not None:
        order_bars = OrderBarriers(mbarriers(STEP_SLOTS, 1), mbarriers(STEP_SLOTS, 1))
    if DQ:
        ds_s = gl.allocate_shared_memory(dtype, [DS, TILE, BM], gl.NVMMASharedLayout.get_default_for([TILE, BM], dtype))
        dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, dq_ptr.block_type.shape[2], dq_ptr.block_type.shape[3]], dq_ptr.layout)
        ds_bars = BufferBarriers(optional(None), optional(None))
        if PREFETCH:
            ds_bars = BufferBarriers(mbarriers(DS, 2), mbarriers(DS, 2))
        dq_full, dq_empty = mbarriers(2, 1), mbarriers(2, 1)
        fence_async_shared()
        gl.warp_specialize([
            (_compute_group, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s, ds_s, tile_2d(dq_s, 0),
                buffers, item_s, item_bars, bars, ds_bars, BufferBarriers(dq_full.index(0), dq_empty.index(0)),
                0, MASK, SCORE, JOINT, UNIFORM, SCALE_DQ, PREFETCH, LATE, BM, D, DP, D_TAIL, E, EP, STAGES, DS, votes,
            )),
            (_compute_group, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s, ds_s, tile_2d(dq_s, 1),
                buffers, item_s, item_bars, bars, ds_bars, BufferBarriers(dq_full.index(1), dq_empty.index(1)),
                1, MASK, SCORE, JOINT, UNIFORM, SCALE_DQ, PREFETCH, LATE, BM, D, DP, D_TAIL, E, EP, STAGES, DS, votes,
            )),
            (produce, (
                counter, items, q, keys, values, do, norm_ptr, delta_ptr, order, full, partial,
                dq_order, order_bars.described, q_side, kv_side, rows, tiles, heads, kv_heads, shared, head_parts, group, heavy_rows, q_len,
                kv_len, k_s, v_s, buffers, item_s, item_bars, bars, isolation, PER_BATCH, PER_HEAD, TILE, BM, STAGES,
                STAGES, Q_TILE, KV_TILE, BY_TILE, MERGED,
            )),
            (_add_dq, (
                dq_ptr, semaphores, dq_s.index(0), steps_s, BufferBarriers(dq_full.index(0), dq_empty.index(0)), order_bars, 0, DP, D_TAIL,
            )),
            (_add_dq, (
                dq_ptr, semaphores, dq_s.index(1), steps_s, BufferBarriers(dq_full.index(1), dq_empty.index(1)), order_bars, 1, DP, D_TAIL,
            )),
            (_order_dq, (semaphores, steps_s, order_bars)),
        ], [4, 1, 1, 1, 1], [REGISTERS, 24, 24, 24, 24])  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize([
            (_compute, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s.main, v_s.main, optional(None), optional(None),
                buffers, item_s, item_bars, bars, optional(None), optional(None),
                0, MASK, SCORE, JOINT, UNIFORM, False, False, True, BM, D, DP, E, EP, STAGES, DS, votes,
            )),
            (_compute, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s.main, v_s.main, optional(None), optional(None),
                buffers, item_s, item_bars, bars, optional(None), optional(None),
                1, MASK, SCORE, JOINT, UNIFORM, False, False, True, BM, D, DP, E, EP, STAGES, DS, votes,
            )),
            (produce, (
                counter, items, q, keys, values, do, norm_ptr, delta_ptr, order, full, partial,
                dq_order, order_bars.described, q_side, kv_side, rows, tiles, heads, kv_heads, shared, head_parts, group, heavy_rows, q_len,
                kv_len, k_s, v_s, buffers, item_s, item_bars, bars, isolation, PER_BATCH, PER_HEAD, TILE, BM, STAGES,
                STAGES, Q_TILE, KV_TILE, BY_TILE, MERGED,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
