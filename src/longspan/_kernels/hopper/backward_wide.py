"""The backward kernel by key tiles for wide head dims: dK and dV of 64 keys. `hopper.backward_dq` computes dQ.

dK and dV of 128 keys at a head dim of 256 would take all registers of an SM. So an item is 64 keys, and the two compute warp groups have
different roles: one computes P and dV, the other dS and dK. Each holds one accumulator, and no product is computed twice.
A persistent kernel, one CTA per SM; a step is BM queries of one query head. Time runs downwards; step i of an item:

  producer warp              dV warp group                                    dK warp group
  ─────────────              ─────────────                                    ─────────────
  q, norm i ───q_full──►     Sᵀ = K Qᵀ (started in step i − 1)
  (first step: K, V
    ──k_full, v_full──►)     Pᵀ = exp2(Sᵀ − norm) to p_s ────p_full──►
  dO, delta i ──do_full──►   dV += Pᵀ dO                                      dPᵀ = V dOᵀ (started in step i − 1)
                             Sᵀ of step i + 1 started     ◄──p_empty──        dSᵀ = Pᵀ (dPᵀ − delta)
                                                          ──do_empty──►       dK += dSᵀ Q
                 ◄──do_empty──                                                dPᵀ of step i + 1 started
                 ◄──q_empty──
  END record                 dV to global memory                              dK to global memory

shared memory          size                      written by       read by           mbarriers (arrivals)
steps_s                STEP_SLOTS records        producer         both groups       covered by q_full
item_s, k_s, v_s       1 record, 64 keys         producer (TMA)   both groups       item_bars: k_full, v_full (1), empty (2)
q, norm                Q_STAGES × BM queries     producer (TMA)   both groups       bars: q_full (1), q_empty (2)
dO, delta              DO_STAGES × BM queries    producer (TMA)   both groups       bars: do_full (1), do_empty (2)
p_s                    P_SLOTS × 64 × BM         dV group         dK group          p_bars: full (1), empty (1)

With a score mod, p_s holds Pᵀ · ∂t/∂s. Head dims that are no power of two are in two parts (`head_dim_parts.Parts`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from longspan._kernels.hopper.dkv_math import step_probabilities
from longspan._kernels.hopper.dkv_producer import (
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
    STEP_FIELDS,
    STEP_SLOTS,
    DqOrderArgs,
    KeyTileBarriers,
    StepBarriers,
    StepBuffers,
    produce,
    step_record,
)
from longspan._kernels.hopper.half_blocks import paired_ring
from longspan._kernels.hopper.head_dim_parts import (
    Parts,
    held_operand,
    part_2d,
    ring_of,
    start_scores,
    start_sum,
    store_sum,
    wait_sum,
    zero_sum,
)
from longspan._kernels.hopper.isolation import StepIsolation
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
)

_DYNAMIC = [
    "items", "rows", "tiles", "heads", "kv_heads", "shared", "head_parts", "group", "heavy_rows", "q_len", "kv_len", "local_tokens",
    "together", "first_b", "first_h",
]  # fmt: skip

P_SLOTS = gl.constexpr(2)
KEYS = GROUP_KEYS  # keys of an item


@gluon.jit
def _compute_dv(
    dv_ptr, dv_stride, captured, scale, first_b, first_h, k_s, p_s, buffers, item_s, item_bars, bars, p_bars,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, BM: gl.constexpr, D_PARTS: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    E: gl.constexpr, EP: gl.constexpr, E_TAIL: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """The warp group that computes P and dV. D_PARTS: number of parts of the keys' head dim."""
    steps = buffers.steps
    queries, grads = buffers.q, buffers.do
    dtype: gl.constexpr = k_s.main.dtype
    st_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=st_l, k_width=2)
    zeros = gl.full([KEYS, BM], 0.0, gl.float32, layout=st_l)
    it = 0  # step records so far
    t = 0  # items so far
    mbarrier.wait(item_bars.k_full, 0)
    b = load_int(item_s, ITEM_BATCH)
    while b >= 0:
        head, kv_row = load_int(item_s, ITEM_HEAD), load_int(item_s, ITEM_ROW)
        kv_pos, kv_left = load_int(item_s, ITEM_POSITION), load_int(item_s, ITEM_KEYS_LEFT)
        dv = zero_sum(KEYS, EP, E_TAIL)
        mbarrier.wait(bars.q_full.index(ring_slot(it, Q_STAGES)), ring_phase(it, Q_STAGES))
        kind = load_int(steps, step_record(it) + KIND)
        k = held_operand(part_2d(k_s, 0), operand, IN_REGISTERS)
        s_next = start_scores(k, part_2d(queries, ring_slot(it, Q_STAGES)), zeros)
        s = warpgroup_mma_wait(0, deps=[s_next])
        while kind != END:
            if not IN_REGISTERS:
                # 0, but unknown to the compiler, which would otherwise compute all operand addresses once and spill them.
                k = part_2d(k_s, it >> 30)
            record = step_record(it)
            of_head = captured
            if UNIFORM is not None:
                score = UNIFORM(b + first_b, load_int(steps, record + HEAD) + first_h, captured.score, captured.score_sizes)
                of_head = Captured(captured.mask, captured.mask_sizes, score, captured.score_sizes)
            norm = gl.expand_dims(buffers.norm.index(ring_slot(it, Q_STAGES)).load(gl.SliceLayout(0, st_l)), 0)
            p, slope = step_probabilities(
                s, norm, kind, steps, record, b + first_b, first_h, kv_pos, kv_left, scale, of_head,
                0, 0, MASK, SCORE, JOINT, BM, dtype, st_l, QUERIES,
            )  # fmt: skip
            step = it - t  # END records do not use p_s
            mbarrier.wait(p_bars.empty.index(ring_slot(step, P_SLOTS)), ring_phase(step, P_SLOTS) ^ 1)
            p_s.index(ring_slot(step, P_SLOTS)).store(p if SCORE is None else slope.to(dtype))
            mbarrier.arrive(p_bars.full.index(ring_slot(step, P_SLOTS)), count=1)
            mbarrier.arrive(bars.q_empty.index(ring_slot(it, Q_STAGES)), count=1)
            do_stage = ring_slot(it, DO_STAGES)
            mbarrier.wait(bars.do_full.index(do_stage), ring_phase(it, DO_STAGES))
            dv_next = start_sum(p, part_2d(grads, do_stage), dv, E_TAIL)
            it += 1
            mbarrier.wait(bars.q_full.index(ring_slot(it, Q_STAGES)), ring_phase(it, Q_STAGES))
            kind = load_int(steps, step_record(it) + KIND)
            s_next = start_scores(k, part_2d(queries, ring_slot(it, Q_STAGES)), zeros)
            dv = wait_sum(dv_next, D_PARTS, E_TAIL)
            mbarrier.arrive(bars.do_empty.index(do_stage), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
        # The END record passes through the mbarriers of q and dO as a step does.
        mbarrier.arrive(item_bars.empty, count=1)
        mbarrier.arrive(bars.q_empty.index(ring_slot(it, Q_STAGES)), count=1)
        mbarrier.wait(bars.do_full.index(ring_slot(it, DO_STAGES)), ring_phase(it, DO_STAGES))
        mbarrier.arrive(bars.do_empty.index(ring_slot(it, DO_STAGES)), count=1)
        store_sum(dv_ptr, dv_stride, b, head, dv, 1.0, kv_row, kv_left, (it >> 30) * 16, E, EP, E_TAIL, False, False)
        it += 1
        t += 1
        mbarrier.wait(item_bars.k_full, t & 1)
        b = load_int(item_s, ITEM_BATCH)


@gluon.jit
def _compute_dk(
    dk_ptr, dk_stride, scale, v_s, p_s, buffers, item_s, item_bars, bars, p_bars,
    BM: gl.constexpr, E_PARTS: gl.constexpr, IN_REGISTERS: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
):  # fmt: skip
    """The warp group that computes dS and dK. E_PARTS: number of parts of the values' head dim."""
    steps = buffers.steps
    queries, grads = buffers.q, buffers.do
    dtype: gl.constexpr = v_s.main.dtype
    st_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=st_l, k_width=2)
    zeros = gl.full([KEYS, BM], 0.0, gl.float32, layout=st_l)
    it = 0  # step records so far
    t = 0  # items so far
    mbarrier.wait(item_bars.k_full, 0)
    b = load_int(item_s, ITEM_BATCH)
    while b >= 0:
        head, kv_row, kv_left = load_int(item_s, ITEM_HEAD), load_int(item_s, ITEM_ROW), load_int(item_s, ITEM_KEYS_LEFT)
        dk = zero_sum(KEYS, DP, D_TAIL)
        mbarrier.wait(item_bars.v_full, t & 1)
        v = held_operand(part_2d(v_s, 0), operand, IN_REGISTERS)
        mbarrier.wait(bars.q_full.index(ring_slot(it, Q_STAGES)), ring_phase(it, Q_STAGES))
        kind = load_int(steps, step_record(it) + KIND)
        mbarrier.wait(bars.do_full.index(ring_slot(it, DO_STAGES)), ring_phase(it, DO_STAGES))
        dp_next = start_scores(v, part_2d(grads, ring_slot(it, DO_STAGES)), zeros)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        while kind != END:
            if not IN_REGISTERS:
                v = part_2d(v_s, it >> 30)  # 0, as in `_compute_dv`
            delta = gl.expand_dims(buffers.delta.index(ring_slot(it, DO_STAGES)).load(gl.SliceLayout(0, st_l)), 0)
            step = it - t
            mbarrier.wait(p_bars.full.index(ring_slot(step, P_SLOTS)), ring_phase(step, P_SLOTS))
            slope = p_s.index(ring_slot(step, P_SLOTS)).load(st_l).to(gl.float32)
            ds = (slope * (dp - delta)).to(dtype)
            mbarrier.arrive(p_bars.empty.index(ring_slot(step, P_SLOTS)), count=1)
            mbarrier.arrive(bars.do_empty.index(ring_slot(it, DO_STAGES)), count=1)
            stage = ring_slot(it, Q_STAGES)
            dk_next = start_sum(ds, part_2d(queries, stage), dk, D_TAIL)
            it += 1
            mbarrier.wait(bars.q_full.index(ring_slot(it, Q_STAGES)), ring_phase(it, Q_STAGES))
            kind = load_int(steps, step_record(it) + KIND)
            mbarrier.wait(bars.do_full.index(ring_slot(it, DO_STAGES)), ring_phase(it, DO_STAGES))
            dp_next = start_scores(v, part_2d(grads, ring_slot(it, DO_STAGES)), zeros)
            dk = wait_sum(dk_next, E_PARTS, D_TAIL)
            mbarrier.arrive(bars.q_empty.index(stage), count=1)
            dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(item_bars.empty, count=1)
        mbarrier.arrive(bars.q_empty.index(ring_slot(it, Q_STAGES)), count=1)
        mbarrier.arrive(bars.do_empty.index(ring_slot(it, DO_STAGES)), count=1)
        store_sum(dk_ptr, dk_stride, b, head, dk, scale, kv_row, kv_left, (it >> 30) * 16, D, DP, D_TAIL, False, False)
        it += 1
        t += 1
        mbarrier.wait(item_bars.k_full, t & 1)
        b = load_int(item_s, ITEM_BATCH)


@gluon.jit(do_not_specialize=_DYNAMIC)
def wide_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, norm_ptr, delta_ptr, dk_ptr, dv_ptr, local_k_ptr, local_v_ptr, norm_rows_ptr, delta_rows_ptr,
    unbounded_ptr, q_tail_ptr, k_tail_ptr, v_tail_ptr, do_tail_ptr, local_k_tail_ptr, local_v_tail_ptr, counter,
    dk_stride, dv_stride, order, full, partial, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes,
    items, rows, tiles, heads, kv_heads, shared, head_parts, group, heavy_rows, q_len, kv_len, local_tokens, together, scale,
    first_b, first_h,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, E_TAIL: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, DO_STAGES: gl.constexpr, REGISTERS: gl.constexpr, Q_TILE: gl.constexpr, KV_TILE: gl.constexpr,
    BY_TILE: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """dK and dV of key tiles, each summed over `shared` query heads. Arguments as in `backward_dkv.dkv_kernel`.

    DP, EP, D_TAIL, E_TAIL: columns of both parts of the padded head dims; 0 for no second part. x_tail_ptr: TMA descriptors of the second
    parts, or None.
    """
    gl.static_assert(STAGES + 3 < STEP_SLOTS, "a step's record must live until it is computed")
    row_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    norm_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row_layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BM], row_layout)
    steps_s, item_s = shared_ints(STEP_SLOTS * STEP_FIELDS), shared_ints(ITEM_FIELDS)
    q, do = Parts(q_ptr, first_given(q_tail_ptr, q_ptr)), Parts(do_ptr, first_given(do_tail_ptr, do_ptr))
    k, v = Parts(k_ptr, first_given(k_tail_ptr, k_ptr)), Parts(v_ptr, first_given(v_tail_ptr, v_ptr))
    k_s, v_s = ring_of(k, 1), ring_of(v, 1)
    QUERIES: gl.constexpr = Q_TILE if Q_TILE < BM else 0
    if QUERIES > 0:  # a step has the same queries of two heads
        q_s, do_s = paired_ring(q_ptr, STAGES, DP), paired_ring(do_ptr, DO_STAGES, EP)
    else:
        q_s, do_s = ring_of(q, STAGES), ring_of(do, DO_STAGES)
    buffers = StepBuffers(q_s, do_s, norm_s, delta_s, steps_s)
    p_s = gl.allocate_shared_memory(k_ptr.dtype, [P_SLOTS, KEYS, BM], gl.NVMMASharedLayout.get_default_for([KEYS, BM], k_ptr.dtype))
    item_bars = KeyTileBarriers(mbarriers(1, 1).index(0), mbarriers(1, 1).index(0), mbarriers(1, 2).index(0))
    bars = StepBarriers(mbarriers(STAGES, 1), mbarriers(DO_STAGES, 1), mbarriers(STAGES, 2), mbarriers(DO_STAGES, 2))
    p_bars = BufferBarriers(mbarriers(P_SLOTS, 1), mbarriers(P_SLOTS, 1))
    isolation = None if unbounded_ptr is None else StepIsolation(unbounded_ptr, norm_rows_ptr, delta_rows_ptr, mbarriers(4, 1))
    fence_async_shared()
    q_side = (optional(q_side[0]), optional(q_side[1]), optional(q_side[2]))
    kv_side = (optional(kv_side[0]), optional(kv_side[1]), optional(kv_side[2]))
    captured = Captured(mask_captured, mask_sizes, score_captured, score_sizes)
    full, partial = RunPointers(full[0], full[1], full[2]), RunPointers(partial[0], partial[1], partial[2])
    keys = KvSource(k, Parts(optional(local_k_ptr), first_given(local_k_tail_ptr, local_k_ptr)), local_tokens)
    values = KvSource(v, Parts(optional(local_v_ptr), first_given(local_v_tail_ptr, local_v_ptr)), local_tokens)
    # Registers of a group: its accumulator, a tile of scores twice, and K or V, if there is room. Both in shared memory are bound by its
    # bandwidth.
    IN_REGISTERS: gl.constexpr = 2 * (EP + E_TAIL) + DP + D_TAIL <= 512 and 2 * (DP + D_TAIL) + EP + E_TAIL <= 512
    gl.warp_specialize([
        (_compute_dv, (
            dv_ptr, dv_stride, captured, scale, first_b, first_h, k_s, p_s, buffers, item_s, item_bars, bars, p_bars,
            MASK, SCORE, JOINT, UNIFORM, BM, 2 if D_TAIL else 1, IN_REGISTERS, E, EP, E_TAIL, STAGES, DO_STAGES, QUERIES,
        )),
        (_compute_dk, (
            dk_ptr, dk_stride, scale, v_s, p_s, buffers, item_s, item_bars, bars, p_bars,
            BM, 2 if E_TAIL else 1, IN_REGISTERS, D, DP, D_TAIL, STAGES, DO_STAGES,
        )),
        (produce, (
            counter, items, q, keys, values, do, norm_ptr, delta_ptr, order, full, partial,
            DqOrderArgs(optional(None), optional(None), optional(None), 0, together), optional(None), q_side, kv_side, rows, tiles, heads,
            kv_heads, shared, head_parts, group, heavy_rows, q_len, kv_len, k_s, v_s, buffers, item_s, item_bars, bars, optional(isolation),
            PER_BATCH, PER_HEAD, KEYS, BM, STAGES, DO_STAGES, Q_TILE, KV_TILE, BY_TILE, MERGED,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
