"""The backward kernel by query tiles on Hopper: dQ of 128 queries, accumulated by one CTA in a fixed order, and the gradients of captured
tensors.

Used for dQ where results must be deterministic and `hopper.dq_order` does not pay, over ranks in `longspan.invariant()`, and where captured
tensors need gradients.
A persistent kernel, one CTA per SM. A work item is 128 queries of one head, 64 per compute warp group; a block is N keys. CTAs take items
from a global counter, heaviest first. Time runs downwards; block i of an item:

  producer warp                            compute warp groups 0, 1
  ─────────────                            ────────────────────────
  blocks_s[i], K i ──k_full──►             S = Q Kᵀ of block i (started in block i − 1)
  (first block: item_s, Q, dO ──q_full──►) norm, delta from global memory
  V i ──v_full──►                          dP = dO Vᵀ ‖ P = exp2(S − norm)
                         ◄──v_empty──      dS = P (dP − delta)
                                           dQ += dS K
  K i + 1 ──k_full──►                      S of block i + 1 started
                         ◄──k_empty──      dQ of block i done
  END record                ◄──q_empty──   dQ to global memory

shared memory        size                       written by        read by           mbarriers (arrivals)
item_s, q_s, do_s    1 record, 128 queries      producer (TMA)    compute groups    q_bars: full (1), empty (2)
blocks_s             BLOCK_SLOTS records        producer          compute groups    covered by k_full
k_s                  STAGES × N keys            producer (TMA)    compute groups    bars: k_full (1), k_empty (2)
v_s                  V_STAGES × N keys          producer (TMA)    compute groups    bars: v_full (1), v_empty (2)

With blocks of 64 keys, a wgmma with both operands in shared memory is bound by its bandwidth: the queries are held in registers for all
blocks of an item. At head dims up to 64 there are registers for dO too, whatever the block.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs
# ruff: noqa: RET505 (Triton compiles what follows a branch that returned)

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.row_terms import base_two, first_term
from longspan._kernels.gpu.tile_access import load_rows, wide
from longspan._kernels.hopper.dq_producer import (
    BLOCK_FIELDS,
    BLOCK_SLOTS,
    END,
    FULL,
    GROUP_ROWS,
    ITEM_BATCH,
    ITEM_FIELDS,
    ITEM_HEAD,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_ROWS_LEFT,
    KIND,
    block_field,
    key_positions,
    keys_left,
    produce,
)
from longspan._kernels.hopper.half_blocks import group_place, paired_ring
from longspan._kernels.hopper.head_dim_parts import (
    Parts,
    held_operand,
    part_2d,
    ring_of,
    start_block_sum,
    start_scores,
    start_sum,
    store_sum,
    wait_sum,
    zero_sum,
)
from longspan._kernels.hopper.isolation import GRAD_LIMIT, StepIsolation, flag_unbounded, has_non_finite, is_bad, isolated_terms
from longspan._kernels.hopper.none_arg import first_given, optional
from longspan._kernels.hopper.pipeline import (
    BufferBarriers,
    Captured,
    KvBarriers,
    KvSource,
    RunPointers,
    load_int,
    mbarriers,
    ring_phase,
    ring_slot,
    shared_ints,
)

_DYNAMIC = ["items", "rows", "tiles", "heads", "shared", "group", "q_len", "kv_len", "local_tokens", "first_b", "first_h"]


@triton.jit(do_not_specialize=["heads", "q_len", "row_ctas", "kv_heads", "kv_len"])
def row_terms_kernel(
    q_ptr, out_ptr, do_ptr, lse_ptr, grad_lse_ptr, norm_ptr, delta_ptr, dq_ptr, counters_ptr, k_ptr, v_ptr, flag_ptr,
    q_stride, out_stride, do_stride, k_stride, v_stride, heads, q_len, row_ctas, kv_heads, kv_len,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Per row, norm = lse in base 2 (`base_two`) and delta = Σ out · grad_out − grad_lse. If out_ptr is None, norm only.

    norm and delta: as of `row_terms.empty_padded_rows`.
    With q_ptr, norm is NaN for bad rows that lse and delta do not show (`hopper.isolation`): with large gradients, or with a query that is
    not finite but sees nothing. q_ptr is None without isolation. flag_ptr: an int32 that is set to 1 if a row is bad, or None. With k_ptr
    and v_ptr, the CTAs from row_ctas on set it if K or V is unbounded.
    dq_ptr: contiguous float32 rows of D elements, which are set to 0, or None. counters_ptr: 8 int32, which are set to 0, or None.
    """
    pid = tl.program_id(0)
    if k_ptr is not None:  # noqa: SIM102 (a compile-time condition)
        if pid >= row_ctas:
            flag_unbounded(k_ptr, v_ptr, flag_ptr, k_stride, v_stride, kv_heads, kv_len, pid - row_ctas, M, D, DP, E, EP)
            return
    blocks = tl.cdiv(q_len, M)
    row, head = (pid % blocks) * M, pid // blocks
    left = q_len - row
    i = tl.arange(0, M)
    at = wide(head) * q_len + row + i
    to = first_term(head, q_len) + row + i
    padded = i < (left + 3) // 4 * 4
    lse = tl.load(lse_ptr + at, mask=i < left, other=0.0)
    if q_ptr is None:
        tl.store(norm_ptr + to, base_two(lse), mask=padded)
    if counters_ptr is not None:
        n = tl.arange(0, 8)
        tl.store(counters_ptr + n, n * 0, mask=n < 8 - pid * 8)  # the first CTA
    if dq_ptr is not None:
        d = tl.arange(0, DP)
        inside = (i < left)[:, None] & (d < D)[None, :]
        tl.store(dq_ptr + at[:, None] * D + d[None, :], tl.zeros((M, DP), tl.float32), mask=inside)
    if out_ptr is not None:
        b64, h64 = wide(head // heads), wide(head % heads)
        out = load_rows(out_ptr + b64 * out_stride[0] + h64 * out_stride[1], row, left, out_stride[2], out_stride[3], M, E, EP, True)
        do = load_rows(do_ptr + b64 * do_stride[0] + h64 * do_stride[1], row, left, do_stride[2], do_stride[3], M, E, EP, True)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        if grad_lse_ptr is not None:
            delta -= tl.load(grad_lse_ptr + at, mask=i < left, other=0.0)
        tl.store(delta_ptr + to, delta, mask=padded)
        largest = tl.max(tl.abs(do.to(tl.float32)), 1)
    if q_ptr is not None:
        b64, h64 = wide(head // heads), wide(head % heads)
        if out_ptr is None:
            do = load_rows(do_ptr + b64 * do_stride[0] + h64 * do_stride[1], row, left, do_stride[2], do_stride[3], M, E, EP, True)
            delta, largest = tl.load(delta_ptr + to, mask=i < left, other=0.0), tl.max(tl.abs(do.to(tl.float32)), 1)
        # A query that sees a key has a non-finite lse if it is not finite itself. With a sink, lse is finite: but then out is 0.
        unseen = ((lse == float("-inf")) | (delta == 0.0)) & (i < left)
        bad = has_non_finite(q_ptr + b64 * q_stride[0] + h64 * q_stride[1], row, unseen, q_stride, M, D)
        bad = bad | (largest > GRAD_LIMIT) | (lse == float("inf"))
        norm = tl.where(bad, float("nan"), base_two(lse))
        tl.store(norm_ptr + to, norm, mask=padded)
        if flag_ptr is not None:  # noqa: SIM102 (a compile-time condition)
            if tl.max((is_bad(norm, delta) & (i < left)).to(tl.int32), 0) > 0:
                tl.store(flag_ptr, 1)


@gluon.jit
def _probabilities(
    s, norm, global_b, global_h, q_pos, q_left, kv, left, scale, captured,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, SCATTER: gl.constexpr, MASKED: gl.constexpr,
    N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(p · ∂t/∂s, p) of one block's scores s; t: the score mod's result. kv, left: numbers, or of each column [1, N].

    JOINT is linear in its gradient: applied to p, it gives the product. With SCATTER, JOINT also adds to the gradients of
    captured tensors and needs dP first: the result is (s, p).
    """
    cols = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, layout)), 0)
    if SCORE is None:
        p = gl.exp2(s * (scale * LOG2_E) - norm)
    else:
        s = s * scale
        p = gl.exp2(SCORE(s, global_b, global_h, q_pos, kv + cols, captured.score, captured.score_sizes) * LOG2_E - norm)
    if MASKED:
        rows = gl.expand_dims(gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout)), 1)
        valid = (cols < left) & (rows < q_left)
        if MASK is not None:
            valid = valid & MASK(global_b, global_h, q_pos, kv + cols, captured.mask, captured.mask_sizes)
        p = gl.where(valid, p, 0.0)
    if SCATTER:
        return s, p
    else:
        slope = p
        if SCORE is not None:
            slope = JOINT(p, s, global_b, global_h, q_pos, kv + cols, cols < N, captured.score, captured.score_sizes, ())
            if MASKED:
                slope = gl.where(p == 0.0, 0.0, slope)
        return slope, p


@gluon.jit
def _compute(
    norm_ptr, delta_ptr, dq_ptr, dq_stride, captured, grads,
    heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, do_s, blocks_s, item_s, q_bars, bars,
    GROUP: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, SCATTER: gl.constexpr,
    ADD: gl.constexpr, BY_BLOCK: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, ISOLATE: gl.constexpr, KV_PAIRS: gl.constexpr, HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """A compute warp group: 64 of the item's 128 queries. q_s, k_s, v_s, do_s: `Parts`."""
    gl.static_assert(not BY_BLOCK or (N == 128 and DP <= 128 and D_TAIL == 0), "a block is a key tile of `hopper.backward_dkv`")
    # Columns of both parts of the sum.
    MAIN: gl.constexpr = 64 if BY_BLOCK else DP
    TAIL: gl.constexpr = DP - 64 if BY_BLOCK else D_TAIL
    dtype: gl.constexpr = k_s.main.dtype
    D_PARTS: gl.constexpr = 2 if D_TAIL else 1
    ROW_WISE: gl.constexpr = DP + D_TAIL <= 128 and v_s.main.shape[4] <= 128 and v_s.tail.shape[4] == v_s.main.shape[4]
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    DO_IN_REGISTERS: gl.constexpr = DP <= 64
    Q_IN_REGISTERS: gl.constexpr = DO_IN_REGISTERS or (N == 64 and DP + D_TAIL <= 128)
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_l))
    cols = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, s_l)), 0)
    zeros = gl.full([GROUP_ROWS, N], 0.0, gl.float32, layout=s_l)
    i = 0  # block records so far
    t = 0  # items so far
    mbarrier.wait(q_bars.full, 0)
    b = load_int(item_s, ITEM_BATCH)
    while b >= 0:
        h, row = group_place(load_int(item_s, ITEM_HEAD), load_int(item_s, ITEM_ROW), GROUP, GROUP_ROWS, HEAD_PAIRS)
        pos = load_int(item_s, ITEM_POSITION) + (0 if HEAD_PAIRS else GROUP * GROUP_ROWS)
        left = load_int(item_s, ITEM_ROWS_LEFT) - (0 if HEAD_PAIRS else GROUP * GROUP_ROWS)
        terms_at = first_term(b * heads + h, q_len) + row + rows
        norm = gl.expand_dims(gl.load(norm_ptr + terms_at, mask=rows < left, other=0.0), 1)
        delta = gl.expand_dims(gl.load(delta_ptr + terms_at, mask=rows < left, other=0.0), 1)
        if ISOLATE:
            norm, delta = isolated_terms(norm, delta)
        q_pos = pos + gl.expand_dims(rows, 1)
        of_head = captured
        if UNIFORM is not None:
            score = UNIFORM(b + first_b, h + first_h, captured.score, captured.score_sizes)
            of_head = Captured(captured.mask, captured.mask_sizes, score, captured.score_sizes)
        dq = zero_sum(GROUP_ROWS, MAIN, TAIL)
        q = held_operand(part_2d(q_s, GROUP), operand, Q_IN_REGISTERS)
        do = held_operand(part_2d(do_s, GROUP), operand, DO_IN_REGISTERS)
        mbarrier.wait(bars.k_full.index(ring_slot(i, STAGES)), ring_phase(i, STAGES))
        kind = block_field(blocks_s, ring_slot(i, BLOCK_SLOTS), KIND)
        s_next = start_scores(q, part_2d(k_s, ring_slot(i, STAGES)), zeros)
        s = warpgroup_mma_wait(0, deps=[s_next])
        while kind != END:
            stage = ring_slot(i, STAGES)
            # GROUP, but unknown to the compiler, which would otherwise compute all operand addresses once and spill them.
            group = (i >> 30) + GROUP
            if not Q_IN_REGISTERS:
                q = part_2d(q_s, group)
            if not DO_IN_REGISTERS:
                do = part_2d(do_s, group)
            slot = ring_slot(i, BLOCK_SLOTS)
            v_stage = ring_slot(i, V_STAGES)
            mbarrier.wait(bars.v_full.index(v_stage), ring_phase(i, V_STAGES))
            dp_next = start_scores(do, part_2d(v_s, v_stage), zeros)
            if kind == FULL:
                slope, p = _probabilities(
                    s, norm, b + first_b, h + first_h, q_pos, left, key_positions(blocks_s, slot, cols, KV_PAIRS), N, scale, of_head,
                    MASK, SCORE, JOINT, SCATTER, False, N, s_l,
                )  # fmt: skip
            else:
                slope, p = _probabilities(
                    s, norm, b + first_b, h + first_h, q_pos, left, key_positions(blocks_s, slot, cols, KV_PAIRS),
                    keys_left(blocks_s, slot, cols, KV_PAIRS), scale, of_head, MASK, SCORE, JOINT, SCATTER, True, N, s_l,
                )  # fmt: skip
            dp = warpgroup_mma_wait(0, deps=[dp_next])
            mbarrier.arrive(bars.v_empty.index(v_stage), count=1)
            ds = slope * (dp - delta)
            if SCATTER:
                valid = (p != 0.0) & (gl.expand_dims(rows, 1) < left)
                kv = key_positions(blocks_s, slot, cols, KV_PAIRS) + cols
                ds = JOINT(
                    p * (dp - delta), slope, b + first_b, h + first_h, q_pos, kv, valid, of_head.score, of_head.score_sizes, grads
                )  # fmt: skip
                ds = gl.where(valid, ds, 0.0)
            if BY_BLOCK:
                dq_next = start_block_sum(ds.to(dtype), part_2d(k_s, stage).main, DP)
                if TAIL > 0:  # here: there are too few registers for both parts beside the next scores
                    dq = Parts(dq.main, dq.tail + warpgroup_mma_wait(1, deps=[dq_next.tail]))
            else:
                dq_next = start_sum(ds.to(dtype), part_2d(k_s, stage), dq, D_TAIL)
            after = i + 1
            mbarrier.wait(bars.k_full.index(ring_slot(after, STAGES)), ring_phase(after, STAGES))
            kind = block_field(blocks_s, ring_slot(after, BLOCK_SLOTS), KIND)
            s_next = start_scores(q, part_2d(k_s, ring_slot(after, STAGES)), zeros)
            if BY_BLOCK:
                dq = Parts(dq.main + warpgroup_mma_wait(1, deps=[dq_next.main]), dq.tail)
            else:
                dq = wait_sum(dq_next, D_PARTS, D_TAIL)
            mbarrier.arrive(bars.k_empty.index(stage), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
            i = after
        # The END record passes through all mbarriers as a block does.
        mbarrier.arrive(q_bars.empty, count=1)
        mbarrier.wait(bars.v_full.index(ring_slot(i, V_STAGES)), ring_phase(i, V_STAGES))
        mbarrier.arrive(bars.k_empty.index(ring_slot(i, STAGES)), count=1)
        mbarrier.arrive(bars.v_empty.index(ring_slot(i, V_STAGES)), count=1)
        i += 1
        t += 1
        # + 0, as above; a multiple of 16, so that the alignment of rows stays known
        store_sum(dq_ptr, dq_stride, b, h, dq, scale, row, left, (i >> 30) * 16, D, MAIN, TAIL, ADD, ROW_WISE)
        mbarrier.wait(q_bars.full, t & 1)
        b = load_int(item_s, ITEM_BATCH)


@gluon.jit(do_not_specialize=_DYNAMIC)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, norm_ptr, delta_ptr, dq_ptr, local_k_ptr, local_v_ptr, unbounded_ptr,
    q_tail_ptr, k_tail_ptr, v_tail_ptr, do_tail_ptr, local_k_tail_ptr, local_v_tail_ptr, counter, dq_stride,
    order, full, partial, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes, grads,
    items, rows, tiles, heads, shared, group, q_len, kv_len, local_tokens, scale, first_b, first_h,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, UNIFORM: gl.constexpr, SCATTER: gl.constexpr, ADD: gl.constexpr,
    BY_BLOCK: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, E_TAIL: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    KV_PAIRS: gl.constexpr, HEAD_PAIRS: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """dQ of query tiles, stored to dq_ptr or, with ADD, added to it. With SCATTER, gradients of captured tensors are added to `grads`.

    q_ptr, k_ptr, v_ptr, do_ptr: TMA descriptors. local_k_ptr, local_v_ptr, local_tokens: `KvSource`. counter: one int32, 0.
    DP, D_TAIL, EP, E_TAIL, x_tail_ptr: as in `backward_wide.wide_dkv_kernel`. unbounded_ptr: as in `backward_dkv.dkv_kernel`.
    BY_BLOCK: dQ of each block is computed from 0 and added in float32, with the bits of the sums of `backward_dkv` in ascending order.
    KV_PAIRS, HEAD_PAIRS: see `hopper.half_blocks`. The TMA descriptors of K and V are then those of `load_halves`.
    """
    gl.static_assert(STAGES <= BLOCK_SLOTS, "a block's record must live until the block is computed")
    q, do = Parts(q_ptr, first_given(q_tail_ptr, q_ptr)), Parts(do_ptr, first_given(do_tail_ptr, do_ptr))
    k, v = Parts(k_ptr, first_given(k_tail_ptr, k_ptr)), Parts(v_ptr, first_given(v_tail_ptr, v_ptr))
    q_s, do_s = ring_of(q, 2), ring_of(do, 2)
    if KV_PAIRS:
        k_s, v_s = paired_ring(k_ptr, STAGES, DP), paired_ring(v_ptr, V_STAGES, EP)
    else:
        k_s, v_s = ring_of(k, STAGES), ring_of(v, V_STAGES)
    blocks_s, item_s = shared_ints(BLOCK_SLOTS * BLOCK_FIELDS), shared_ints(ITEM_FIELDS)
    q_bars = BufferBarriers(mbarriers(1, 1).index(0), mbarriers(1, 2).index(0))
    bars = KvBarriers(mbarriers(STAGES, 1), mbarriers(STAGES, 2), mbarriers(V_STAGES, 1), mbarriers(V_STAGES, 2))
    ISOLATE: gl.constexpr = unbounded_ptr is not None
    isolation = StepIsolation(unbounded_ptr, norm_ptr, delta_ptr, mbarriers(4, 1)) if ISOLATE else None
    fence_async_shared()
    q_side = (optional(q_side[0]), optional(q_side[1]), optional(q_side[2]))
    kv_side = (optional(kv_side[0]), optional(kv_side[1]), optional(kv_side[2]))
    captured = Captured(mask_captured, mask_sizes, score_captured, score_sizes)
    lead = None
    if LEAD:
        lead = partial[3]
    full, partial = RunPointers(full[0], full[1], full[2]), RunPointers(partial[0], partial[1], partial[2])
    keys = KvSource(k, Parts(optional(local_k_ptr), first_given(local_k_tail_ptr, local_k_ptr)), local_tokens)
    values = KvSource(v, Parts(optional(local_v_ptr), first_given(local_v_tail_ptr, local_v_ptr)), local_tokens)
    gl.warp_specialize([
        (_compute, (
            norm_ptr, delta_ptr, dq_ptr, dq_stride, captured, grads,
            heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, do_s, blocks_s, item_s, q_bars, bars,
            0, MASK, SCORE, JOINT, UNIFORM, SCATTER, ADD, BY_BLOCK, N, D, DP, D_TAIL, STAGES, V_STAGES, ISOLATE,
            KV_PAIRS, HEAD_PAIRS,
        )),
        (_compute, (
            norm_ptr, delta_ptr, dq_ptr, dq_stride, captured, grads,
            heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, do_s, blocks_s, item_s, q_bars, bars,
            1, MASK, SCORE, JOINT, UNIFORM, SCATTER, ADD, BY_BLOCK, N, D, DP, D_TAIL, STAGES, V_STAGES, ISOLATE,
            KV_PAIRS, HEAD_PAIRS,
        )),
        (produce, (
            counter, items, q, keys, values, do, order, full, partial, optional(lead), q_side, kv_side,
            rows, tiles, heads, shared, group, q_len, kv_len, q_s, k_s, v_s, do_s, blocks_s, item_s, q_bars, bars,
            optional(isolation), PER_BATCH, PER_HEAD, N, STAGES, V_STAGES, KV_PAIRS, HEAD_PAIRS,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
