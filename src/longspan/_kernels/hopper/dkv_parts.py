"""The compute warp groups of the dK/dV kernel for keys with head dims of 129 to 192 in two parts, without a score mod.

dK and dV of 64 keys take 160 registers of a thread. S and dP are not held at once, and P waits for dP in shared memory, in the place of dS.
Time runs downwards; step i of an item:

  producer warp               compute warp groups 0, 1                                                 dQ warps 0, 1
  ─────────────               ────────────────────────                                                 ─────────────
                              Sᵀ = K Qᵀ started, right after dQ of step i − 1
         ◄──empty i − 1──     Pᵀ = exp2(Sᵀ − norm), to ds_s
  dO, delta i ──do_full──►    dPᵀ − delta = V dOᵀ − delta, dV += Pᵀ dO started
                              dSᵀ = Pᵀ (dPᵀ − delta), after dV to ds_s
                              dK += dSᵀ Q started
                              both groups wait for each other (`sync_groups`)
                              dQᵀ = Kᵀ dSᵀ of both groups: dims 0 to 63 (group 0) or 128 to 191 (group 1)
                              dQ to dq_s ──dq_full──►                                                  TMA reduce-add
                              group 0: dQᵀ of dims 64 to 127, to dq_s ──dq_full──►                     TMA reduce-add
  q, norm i + 1 ──q_full──►   ‖ wait for the queries of step i + 1                                     ◄──dq_empty──

Group 1 starts step i + 1 while group 0 computes its second tile of dQ: wgmmas of one group overlap with exponentials of the other.
Buffers and mbarriers are those of `hopper.backward_dkv` without PREFETCH.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.hopper.dkv_math import probabilities, release_step_before, stage_dq, stage_no_dq, sync_groups
from longspan._kernels.hopper.dkv_producer import (
    END,
    FULL,
    GROUP_KEYS,
    HEAD,
    ITEM_BATCH,
    ITEM_HEAD,
    ITEM_KEYS_LEFT,
    ITEM_POSITION,
    ITEM_ROW,
    KIND,
    POSITION,
    ROWS_LEFT,
    step_record,
)
from longspan._kernels.hopper.head_dim_parts import Parts, part_2d, start_scores, start_sum, store_sum, wait_sum, zero_sum
from longspan._kernels.hopper.isolation import bound_group_keys, largest_keys
from longspan._kernels.hopper.pipeline import load_int, ring_phase, ring_slot, tile_2d


@gluon.jit
def _group_keys(tile, GROUP: gl.constexpr):
    """The rows of a warp group's keys of a tile (`Parts`)."""
    return Parts(tile.main.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0), tile.tail.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0))


@gluon.jit
def compute_parts(
    dk_ptr, dv_ptr, dk_stride, dv_stride, captured, scale, first_b, first_h, k_s, v_s, ds_s, dq_s, buffers, item_s, item_bars, bars,
    dq_bars,
    GROUP: gl.constexpr, MASK: gl.constexpr, SCALE_DQ: gl.constexpr, BM: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr, DS: gl.constexpr,
    votes,
):  # fmt: skip
    """A compute warp group: 64 of the item's 128 keys, in the order of the picture above. k_s: `Parts`."""
    gl.static_assert(DP == 128 and D_TAIL == 64, "group 0 has the first two of three parts of dQ")
    DQ_TILES: gl.constexpr = 2 - GROUP
    steps = buffers.steps
    dtype: gl.constexpr = v_s.dtype
    st_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    row_l: gl.constexpr = gl.SliceLayout(0, st_l)
    zeros = gl.full([GROUP_KEYS, BM], 0.0, gl.float32, layout=st_l)
    it = 0  # step records so far
    t = 0  # items so far
    mbarrier.wait(item_bars.k_full, 0)
    # Fields of the item's record are read where they are used: there are too few registers to hold them.
    while load_int(item_s, ITEM_BATCH) >= 0:
        dk, dv = zero_sum(GROUP_KEYS, DP, D_TAIL), zero_sum(GROUP_KEYS, EP, 0).main
        if votes is not None:
            largest = largest_keys(k_s.main.index(0), k_s.tail.index(0), GROUP)
        mbarrier.wait(bars.q_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        kind = load_int(steps, step_record(it) + KIND)
        mbarrier.wait(item_bars.v_full, t & 1)
        if votes is not None:
            bound_group_keys(k_s.main.index(0), k_s.tail.index(0), v_s.index(0), largest, votes, it >> 30, GROUP)
        start = it
        while kind != END:
            stage, record = ring_slot(it, STAGES), step_record(it)
            # 0, but unknown to the compiler, which would otherwise compute all operand addresses once and spill them.
            zero = it >> 30
            k = part_2d(k_s, zero)
            v_w = tile_2d(v_s, zero).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
            q, do = part_2d(buffers.q, stage), tile_2d(buffers.do.main, stage)
            ds_both = ds_s.index(ring_slot(it, DS))
            ds_own = ds_both.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
            s_next = start_scores(_group_keys(k, GROUP), q, zeros)
            # Here, while S is computed: between dK and S, the tensor cores would idle.
            release_step_before(it, start, bars, STAGES)
            norm = gl.expand_dims(buffers.norm.index(stage).load(row_l), 0)
            s = warpgroup_mma_wait(0, deps=[s_next])
            if kind == FULL:
                _, p = probabilities(
                    s, norm, kind, 0, 0, 0, BM, 0, 0, scale, captured, GROUP, MASK, None, None, False, BM, dtype, st_l
                )  # fmt: skip
            else:
                b, h = load_int(item_s, ITEM_BATCH) + first_b, load_int(steps, record + HEAD) + first_h
                _, p = probabilities(
                    s, norm, kind, b, h, load_int(steps, record + POSITION), load_int(steps, record + ROWS_LEFT),
                    load_int(item_s, ITEM_POSITION), load_int(item_s, ITEM_KEYS_LEFT), scale, captured,
                    GROUP, MASK, None, None, True, BM, dtype, st_l,
                )  # fmt: skip
            ds_own.store(p.to(dtype))
            fence_async_shared()
            mbarrier.wait(bars.do_full.index(stage), ring_phase(it, STAGES))
            delta = gl.expand_dims(buffers.delta.index(stage).load(row_l), 0)
            dp_next = warpgroup_mma(v_w, do.permute((1, 0)), zeros - delta, is_async=True)
            dv_next = warpgroup_mma(ds_own, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp_next])
            ds = (ds_own.load(st_l).to(gl.float32) * dp).to(dtype)
            dv = warpgroup_mma_wait(0, deps=[dv_next])
            ds_own.store(ds)
            # Before the groups wait for each other: 2 % less time than after dQ (H200, causal 16k, D192/128).
            dk_next = start_sum(ds, q, dk, D_TAIL)
            fence_async_shared()
            sync_groups()
            dq_k = k.tail if GROUP == 1 else k.main.slice(0, 64, dim=1)
            dq_next = warpgroup_mma(dq_k.permute((1, 0)), ds_both, zeros, use_acc=False, is_async=True)
            dk = wait_sum(dk_next, 1, D_TAIL)
            dq = warpgroup_mma_wait(0, deps=[dq_next])
            stage_dq(dq * scale if SCALE_DQ else dq, it * DQ_TILES, dq_s, dq_bars)
            if GROUP == 0:
                dq_next = warpgroup_mma(k.main.slice(64, 64, dim=1).permute((1, 0)), ds_both, zeros, use_acc=False, is_async=True)
            it += 1
            mbarrier.wait(bars.q_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
            kind = load_int(steps, step_record(it) + KIND)
            if GROUP == 0:
                dq = warpgroup_mma_wait(0, deps=[dq_next])
                stage_dq(dq * scale if SCALE_DQ else dq, it * DQ_TILES - 1, dq_s, dq_bars)
        release_step_before(it, start, bars, STAGES)
        # The END record passes through all mbarriers as a step does.
        mbarrier.wait(bars.do_full.index(ring_slot(it, STAGES)), ring_phase(it, STAGES))
        mbarrier.arrive(bars.q_empty.index(ring_slot(it, STAGES)), count=1)
        b, head = load_int(item_s, ITEM_BATCH), load_int(item_s, ITEM_HEAD)
        kv_row, left = load_int(item_s, ITEM_ROW) + GROUP * GROUP_KEYS, load_int(item_s, ITEM_KEYS_LEFT) - GROUP * GROUP_KEYS
        mbarrier.arrive(item_bars.empty, count=1)
        sync_groups()  # both groups have computed the last step's dQ: the next item may overwrite its dS
        zero = (it >> 30) * 16  # as above; a multiple of 16, so that the alignment of rows stays known
        store_sum(dk_ptr, dk_stride, b, head, dk, scale, kv_row, left, zero, D, DP, D_TAIL, False, False)
        store_sum(dv_ptr, dv_stride, b, head, Parts(dv, 0), 1.0, kv_row, left, zero, E, EP, 0, False, False)
        for tile in gl.static_range(DQ_TILES):
            stage_no_dq(it * DQ_TILES + tile, dq_bars)
        it += 1
        t += 1
        mbarrier.wait(item_bars.k_full, t & 1)
    stage_no_dq(it * DQ_TILES, dq_bars)
