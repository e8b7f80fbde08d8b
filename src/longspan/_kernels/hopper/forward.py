"""The forward kernel for Hopper: a persistent kernel, one CTA per SM, of two consumer warp groups and two or three producer warps.

A work item is 128 queries of one head, 64 per consumer warp group, over all their visible KV or, split-KV, over a part of it
(`hopper.split_kv`). CTAs take items from a global counter in the order of `hopper.item_order`; in a small launch, the first item of each
CTA has a record from the host (`hopper.first_items`). Time runs downwards; one item:

  scheduler warp     load warp              consumer warp groups 0, 1                        state warp (float32 states only)
  ──────────────     ─────────              ─────────────────────────                        ────────────────────────────────
  atomic_add
  block table row
  items_s ──item_full──►
  prefetch Q to L2   K 0 ──────k_full────►
                     Q ────────q_full────►  S = Q K₀ᵀ                          ──k_empty──►
                     V 0 ──────v_full────►  P₀ = softmax(S)
                     K 1 ──────k_full────►  S = Q K₁ᵀ ‖ acc += P₀ V₀           ──v_empty──►
                     V 1 …                  P₁ = softmax(S); rescale acc if the max was raised
                     after V 2 ──────────────────────────────────────────────state_due───►  load old out, lse
                     …                      …
  ◄──near_end──      4 blocks to go
  next item …        last block …           acc += last P V                    ──q_empty──►
                                            ◄──────────────────────────────state_ready──    state_s, lse_s hold the old state
                                            merge old state, divide by the sum
                                            item_empty; output to state_s    ──state_filled──►  store state_s to out
                                            (without a state warp: output to global memory)

shared memory          size                     written by     read by              mbarriers (arrivals)
items_s                ITEM_SLOTS item records  scheduler      load, consumers,     item_full (1), item_empty (one per reader)
                                                               state warp
q_s                    2 × 64 × D               load (TMA)     consumers            q_full (1), q_empty (1), each per warp group
k_s, v_s, blocks_s     STAGES × N keys          load (TMA)     consumers            k_full, v_full (1), k_empty, v_empty (2)
state_s, lse_s         2 × 64 × E, 2 × 64       state warp,    consumers,           state_bars.ready (2), .filled (2)
                                                consumers      state warp
–                                               load           scheduler            near_end (1)
–                                               load           state warp           state_due (1)

Partial blocks, which are masked, precede full blocks; of these, the diagonal may come first (`lead`). There is one main loop for each kind,
so that no block tests its kind. Items of few blocks have one loop for both (ONE_LOOP): each warp group has a copy of the code, and two
copies of two loops do not stay in the instruction cache until the next item. Masks of comparisons have bounds by row (`gpu.row_bounds`).
With isolation, an item whose output has a NaN is scheduled once more (`hopper.repeats`), with isolated partial blocks
(`hopper.isolation`). The state warp exists if results are float32 running states (`hopper.state_mover`).
P V of a block overlaps with the exponentials of the next one: the branch of `running_max.checked` precedes the wait for P V, which the
Triton 3.6 assembler would otherwise move before the exponentials. With FOLLOWED it does; P V of one warp group then overlaps with the
softmax of the other. While the consumers are in an item's epilogue, the next item's queries and first KV blocks arrive.
`hopper.forward_three` computes many long items of head dims up to 64.

Scores are in base-2 logarithms, as in `longspan._kernels.triton.forward`. m: running max, or less (`hopper.running_max`); total: running
sum of exp2(s − m); acc: running sum of probabilities times values.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LN_2, LOG2_E
from longspan._kernels.gpu.tile_access import wide, wide_unsigned
from longspan._kernels.hopper.epilogue import MAX_SPLIT_DIM, Outputs, OutputStrides, by_row, merge, stage_output, store_lse, store_output
from longspan._kernels.hopper.forward_producer import (
    BATCH,
    BLOCK_FIELDS,
    BLOCK_KEYS_LEFT,
    BLOCK_POSITION,
    COMPLETE,
    END_BLOCK,
    FIRST_BLOCK,
    GROUP_ROWS,
    GROUPS,
    HEAD,
    ITEM_FIELDS,
    ITEM_SLOTS,
    PARTIAL_BLOCKS,
    POSITION,
    REPEATED,
    ROW,
    ROWS_LEFT,
    SECOND_KEYS_LEFT,
    SECOND_POSITION,
    SPLIT_PART,
    ItemBarriers,
    ItemNumbers,
    SplitKv,
    block_field,
    item_field,
    load,
    load_first_record,
    publish_first_item,
    schedule,
)
from longspan._kernels.hopper.half_blocks import group_place, paired_ring
from longspan._kernels.hopper.head_dim_parts import Parts, held_operand, part_2d, ring_of, start_scores
from longspan._kernels.hopper.isolation import block_isolation
from longspan._kernels.hopper.none_arg import first_given, optional
from longspan._kernels.hopper.online_softmax import end_rows, softmax_block, start_rows
from longspan._kernels.hopper.pipeline import (
    Captured,
    KvBarriers,
    KvSource,
    RunPointers,
    mbarriers,
    ring_phase,
    ring_slot,
    shared_ints,
    tile_2d,
)
from longspan._kernels.hopper.repeats import ItemNote, note_item
from longspan._kernels.hopper.running_max import rescaled
from longspan._kernels.hopper.state_mover import StateBarriers, move_states, moved_by_tma
from longspan._kernels.hopper.tile_io import load_tile
from longspan._kernels.hopper.turns import await_turn, give_turn
from longspan._kernels.hopper.warp_votes import ballots

_DYNAMIC = [
    "items", "early_items", "first_items", "unsplit", "split_items", "parts", "wide_part", "lead", "rows", "tiles", "heads", "shared",
    "group", "heavy_rows", "light_group", "heavy_items", "q_len", "kv_len", "local_tokens", "first_b", "first_h",
]  # fmt: skip


@gluon.jit
def attend_blocks(
    acc, total, m, max_scores, weights, i, count, q, q_first, global_b, global_h, scale, k_s, v_s, blocks_s, bars, captured,
    MASK: gl.constexpr, VISIBLE: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr, PARTIAL: gl.constexpr,
    SCALE_IN_EXP: gl.constexpr, MAX_SCORES: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, TURN: gl.constexpr,
    CHECKED: gl.constexpr, PV_FIRST: gl.constexpr, layout: gl.constexpr, out_layout: gl.constexpr, partial_end=None,
    KV_PAIRS: gl.constexpr = False,
):  # fmt: skip
    """The main loop over `count` blocks. On entry and on exit, P V of block i − 1 has not been started: `weights` holds its P.

    PARTIAL: whether the blocks are masked; if `partial_end` is not None, only blocks with a number below it are.
    TURN: number of the warp group, if warp groups start their wgmmas in turns (`hopper.turns`); otherwise −1.
    CHECKED: of `softmax_block`. PV_FIRST: wait for P V of block i − 1 before the exponentials of block i, which take its registers.
    """
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.full([GROUP_ROWS, N], 0.0, gl.float32, layout=layout)
    for _ in range(count):
        stage, last = ring_slot(i, STAGES), ring_slot(i - 1, STAGES)
        mbarrier.wait(bars.k_full.index(stage), ring_phase(i, STAGES))
        kv, left, kv_second, left_second = 0, 0, 0, 0
        if PARTIAL or SCORE is not None:
            kv, left = block_field(blocks_s, stage, BLOCK_POSITION), block_field(blocks_s, stage, BLOCK_KEYS_LEFT)
            if KV_PAIRS:
                kv_second, left_second = block_field(blocks_s, stage, SECOND_POSITION), block_field(blocks_s, stage, SECOND_KEYS_LEFT)
        if TURN >= 0:
            mbarrier.wait(bars.v_full.index(last), ring_phase(i - 1, STAGES))
            await_turn(TURN)
        s_next = start_scores(q, part_2d(k_s, stage), zeros)
        if TURN < 0:
            mbarrier.wait(bars.v_full.index(last), ring_phase(i - 1, STAGES))
        acc_next = warpgroup_mma(weights, tile_2d(v_s, last), acc, is_async=True)
        if TURN >= 0:
            give_turn(TURN)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(bars.k_empty.index(stage), count=1)
        if PV_FIRST:
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            mbarrier.arrive(bars.v_empty.index(last), count=1)
        masked = True
        if partial_end is not None:
            masked = i < partial_end
        p, m, total, max_scores, rescale = softmax_block(
            s, m, total, max_scores, q_first, kv, left, masked, global_b, global_h, scale, captured,
            MASK, VISIBLE, SCORE, FLAT, CORNERS, PARTIAL, SCALE_IN_EXP, MAX_SCORES, False, CHECKED, N, v_s.dtype, layout,
            kv_second, left_second, KV_PAIRS,
        )  # fmt: skip
        weights = gl.convert_layout(p, operand)
        if not PV_FIRST:
            acc, weights = warpgroup_mma_wait(0, deps=[acc_next, weights])
            mbarrier.arrive(bars.v_empty.index(last), count=1)
        acc = rescaled(acc, rescale, out_layout)
        i += 1
    return acc, total, m, max_scores, weights, i


@gluon.jit
def _attend_item(
    h, i, t, group, q, rows, zeros,
    to, counter, split, strides, heads, q_len, scale, first_b, first_h,
    k_s, v_s, items_s, blocks_s, bars, kv_bars, out_desc, complete_out_desc, state_s, lse_s, state_bars, noted, captured,
    MASK: gl.constexpr, BOUNDS: gl.constexpr, VISIBLE: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr,
    CORNERS: gl.constexpr, UNIFORM: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, ONE_LOOP: gl.constexpr, FOLLOWED: gl.constexpr, KV_PAIRS: gl.constexpr, HEAD_PAIRS: gl.constexpr,
    layout: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    """Item t of consumer warp group `group`, from KV block i on. q: the tile of its queries. Returns the KV block after the item.

    A function of its own, with a group that is known at run time only before it is inlined: the compiler's frontend visits it once, and
    not twice in the loop of each of two warp groups.
    """
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    MAX_SCORES: gl.constexpr = to.max_scores is not None
    WIDE: gl.constexpr = EP > MAX_SPLIT_DIM
    STATE_WARP: gl.constexpr = state_s is not None
    Q_IN_REGISTERS: gl.constexpr = q.main.shape[1] <= 64 and EP <= 64  # read Q once per item, not once per block
    PLAIN: gl.constexpr = not STATE_WARP and to.old_lse is None and to.complete_out is None and to.out.dtype.element_ty != gl.float32
    LATE: gl.constexpr = noted is not None and PLAIN  # `store_output` notes whether the item has to be repeated
    slot = ring_slot(t, ITEM_SLOTS)
    b = item_field(items_s, slot, BATCH)
    h, row = group_place(h, item_field(items_s, slot, ROW), group, GROUP_ROWS, HEAD_PAIRS)
    q_first = item_field(items_s, slot, POSITION) + (0 if HEAD_PAIRS else group * GROUP_ROWS)
    rows_left = item_field(items_s, slot, ROWS_LEFT) - (0 if HEAD_PAIRS else group * GROUP_ROWS)
    first_block = item_field(items_s, slot, FIRST_BLOCK)
    blocks = item_field(items_s, slot, END_BLOCK) - first_block
    partial = gl.minimum(gl.maximum(item_field(items_s, slot, PARTIAL_BLOCKS) - first_block, 0), blocks)
    full = blocks - partial
    lse_at = wide_unsigned(b * heads + h) * wide_unsigned(q_len) + row
    inside = rows < rows_left
    global_b, global_h = b + first_b, h + first_h
    of_head = captured
    if UNIFORM is not None:
        score = UNIFORM(global_b, global_h, captured.score, captured.score_sizes)
        of_head = Captured(captured.mask, captured.mask_sizes, score, captured.score_sizes)
    if BOUNDS is not None:
        bounds = BOUNDS(global_b, global_h, gl.expand_dims(q_first + rows, 1), captured.mask, captured.mask_sizes)
        of_head = Captured(bounds, of_head.mask_sizes, of_head.score, of_head.score_sizes)

    m, total, max_scores = start_rows(not FOLLOWED, N, layout)
    acc = gl.full([GROUP_ROWS, EP], 0.0, gl.float32, layout=out_layout)
    mbarrier.wait(bars.q_full.index(group), t & 1)
    if Q_IN_REGISTERS:
        q = held_operand(q, gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2), True)
    stage = ring_slot(i, STAGES)
    mbarrier.wait(kv_bars.k_full.index(stage), ring_phase(i, STAGES))
    kv, left = block_field(blocks_s, stage, BLOCK_POSITION), block_field(blocks_s, stage, BLOCK_KEYS_LEFT)
    kv_second, left_second = 0, 0
    if KV_PAIRS:
        kv_second, left_second = block_field(blocks_s, stage, SECOND_POSITION), block_field(blocks_s, stage, SECOND_KEYS_LEFT)
    s_next = start_scores(q, part_2d(k_s, stage), zeros)
    s = warpgroup_mma_wait(0, deps=[s_next])
    mbarrier.arrive(kv_bars.k_empty.index(stage), count=1)
    p, m, total, max_scores, _ = softmax_block(
        s, m, total, max_scores, q_first, kv, left, partial > 0, global_b, global_h, scale, of_head,
        MASK, VISIBLE, SCORE, FLAT, CORNERS, True, SCALE_IN_EXP, MAX_SCORES, True, not FOLLOWED, N, v_s.dtype, layout,
        kv_second, left_second, KV_PAIRS,
    )  # fmt: skip
    weights = gl.convert_layout(p, operand)
    i += 1
    if ONE_LOOP:
        acc, total, m, max_scores, weights, i = attend_blocks(
            acc, total, m, max_scores, weights, i, blocks - 1, q, q_first, global_b, global_h, scale, k_s, v_s, blocks_s, kv_bars,
            of_head, MASK, VISIBLE, SCORE, FLAT, CORNERS, True, SCALE_IN_EXP, MAX_SCORES, N, STAGES, -1, not FOLLOWED, False, layout,
            out_layout, i - 1 + partial, KV_PAIRS,
        )  # fmt: skip
    else:
        acc, total, m, max_scores, weights, i = attend_blocks(
            acc, total, m, max_scores, weights, i, gl.maximum(partial - 1, 0), q, q_first, global_b, global_h, scale, k_s, v_s,
            blocks_s, kv_bars, of_head, MASK, VISIBLE, SCORE, FLAT, CORNERS, True, SCALE_IN_EXP, MAX_SCORES, N, STAGES,
            -1, True, False, layout, out_layout, None, KV_PAIRS,
        )  # fmt: skip
        acc, total, m, max_scores, weights, i = attend_blocks(
            acc, total, m, max_scores, weights, i, gl.where(partial > 0, full, full - 1), q, q_first, global_b, global_h, scale, k_s,
            v_s, blocks_s, kv_bars, of_head, MASK, VISIBLE, SCORE, FLAT, CORNERS, False, SCALE_IN_EXP, MAX_SCORES, N,
            STAGES, -1, True, False, layout, out_layout, None, KV_PAIRS,
        )  # fmt: skip
    mbarrier.arrive(bars.q_empty.index(group), count=1)
    last = ring_slot(i - 1, STAGES)
    mbarrier.wait(kv_bars.v_full.index(last), ring_phase(i - 1, STAGES))
    acc_next = warpgroup_mma(weights, tile_2d(v_s, last), acc, is_async=True)
    m, total, max_scores = end_rows(m, total, max_scores, layout)
    # 0, but unknown to the compiler, which would otherwise compute the addresses of a tile once for all items, in registers that the
    # main loops need. A multiple of 16, so that the alignment of rows stays known.
    zero = (i >> 30) * 16
    split_part = item_field(items_s, slot, SPLIT_PART)
    complete = 0
    if to.complete_out is not None:
        complete = item_field(items_s, slot, COMPLETE)
    if noted is None:  # otherwise below
        mbarrier.arrive(bars.item_empty.index(slot), count=1)
    part = split_part * GROUPS + group
    # The old state is merged last, when the registers of scores and weights are free. Of a split item, the first part merges it.
    factor, old_factor = total, total
    by_tma = moved_by_tma(rows_left + group * GROUP_ROWS, split_part, GROUPS * GROUP_ROWS)
    if STATE_WARP:
        mbarrier.wait(state_bars.ready, t & 1)
    if to.old_lse is not None:
        old_left = gl.where(split_part < split.split_items, rows_left, 0)
        old_head = to.old_out + wide(b) * strides.old_out[0] + wide(h) * strides.old_out[1]
        if STATE_WARP:
            if by_tma:
                old_m = lse_s.index(group).load(gl.SliceLayout(1, layout)) * LOG2_E
                old = tile_2d(state_s, group).load(out_layout)
            else:
                old_m = gl.load(to.old_lse + lse_at + rows, mask=rows < old_left, other=-float("inf")) * LOG2_E
                old = load_tile(old_head, row, old_left, strides.old_out[2] + zero, E, EP, out_layout)
        else:
            old_m = gl.load(to.old_lse + lse_at + rows, mask=rows < old_left, other=-float("inf")) * LOG2_E
            if not WIDE:
                old = load_tile(old_head, row, old_left, strides.old_out[2] + zero, E, EP, out_layout)
        m, total, factor, old_factor = merge(m, total, old_m)
    if to.old_max_scores is not None:
        old_max_scores = gl.load(to.old_max_scores + lse_at + rows, mask=inside, other=-float("inf"))
        max_scores = gl.maximum(max_scores, old_max_scores * LOG2_E)
    seen = total != 0.0  # also where total is NaN: a row that sees a NaN has lse NaN
    divisor = gl.where(seen, total, 1.0)
    if noted is None or to.old_lse is None:
        store_lse(to, m, divisor, seen, split_part, part, lse_at, rows, inside)
    if MAX_SCORES:
        gl.store(to.max_scores + lse_at + rows, max_scores * LN_2, mask=inside)
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    stored, late = True, optional(None)
    if LATE:
        late = ItemNote(noted, slot * GROUPS + group, items_s, slot * ITEM_FIELDS + REPEATED, bars.item_empty.index(slot))
    elif noted is not None:
        repeated_at, merged = slot * ITEM_FIELDS + REPEATED, to.old_lse is not None
        stored = note_item(acc, noted, slot * GROUPS + group, items_s, repeated_at, group, split_part, merged, not WIDE)
    mbarrier.arrive(kv_bars.v_empty.index(last), count=1)
    if noted is not None and not LATE:  # here, so that the two arrivals wait for all warps once
        mbarrier.arrive(bars.item_empty.index(slot), count=1)
    if to.old_lse is None:
        acc = acc * by_row(1.0 / divisor, out_layout)
    else:
        if WIDE:  # there are no registers for two tiles of this width: the old one is loaded here, and used as it arrives
            old = load_tile(old_head, row, old_left, strides.old_out[2] + zero, E, EP, out_layout)
        acc = acc * by_row(factor / divisor, out_layout) + old * by_row(old_factor / divisor, out_layout)
        if noted is not None:
            rows_left = gl.where(stored, rows_left, 0)
            store_lse(to, m, divisor, seen, split_part, part, lse_at, rows, rows < rows_left)
    if STATE_WARP:
        if by_tma:
            stage_output(state_s, out_desc, complete_out_desc, complete, acc, group)
        else:
            store_output(
                to, counter, split, strides, complete, acc, b, h, row, rows, rows_left, lse_at, split_part, stored, zero,
                group, E, EP, not STATE_WARP, out_layout, noted is not None,
            )  # fmt: skip
        mbarrier.arrive(state_bars.filled, count=1)
    else:
        store_output(
            to, counter, split, strides, complete, acc, b, h, row, rows, rows_left, lse_at, split_part, stored, zero,
            group, E, EP, not STATE_WARP, out_layout, noted is not None, late,
        )  # fmt: skip
    return i


@gluon.jit
def _consume(
    to, counter, split, strides, heads, q_len, scale, first_b, first_h,
    q_s, k_s, v_s, items_s, blocks_s, bars, kv_bars, out_desc, complete_out_desc, state_s, lse_s, state_bars, noted, captured,
    GROUP: gl.constexpr, MASK: gl.constexpr, BOUNDS: gl.constexpr, VISIBLE: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr,
    CORNERS: gl.constexpr, UNIFORM: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, ONE_LOOP: gl.constexpr, FOLLOWED: gl.constexpr, KV_PAIRS: gl.constexpr, HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: 64 of the item's 128 queries."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EP, 16])
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    zeros = gl.full([GROUP_ROWS, N], 0.0, gl.float32, layout=layout)
    q = part_2d(q_s, GROUP)
    i = 0  # KV blocks so far
    t = 0  # items so far
    mbarrier.wait(bars.item_full.index(0), 0)
    h = item_field(items_s, 0, HEAD)
    while h >= 0:
        i = _attend_item(
            h, i, t, gl.to_tensor(GROUP), q, rows, zeros, to, counter, split, strides, heads, q_len, scale, first_b, first_h, k_s, v_s,
            items_s, blocks_s, bars, kv_bars, out_desc, complete_out_desc, state_s, lse_s, state_bars, noted, captured, MASK, BOUNDS,
            VISIBLE, SCORE, FLAT, CORNERS, UNIFORM, SCALE_IN_EXP, N, E, EP, STAGES, ONE_LOOP, FOLLOWED, KV_PAIRS, HEAD_PAIRS, layout,
            out_layout,
        )  # fmt: skip
        t += 1
        mbarrier.wait(bars.item_full.index(ring_slot(t, ITEM_SLOTS)), ring_phase(t, ITEM_SLOTS))
        h = item_field(items_s, ring_slot(t, ITEM_SLOTS), HEAD)


@gluon.jit(do_not_specialize=_DYNAMIC)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, max_scores_ptr, old_out_ptr, old_lse_ptr, old_max_scores_ptr, complete_out_ptr, q_ptr,
    out_desc, complete_out_desc, old_out_desc, local_k_desc, local_v_desc, q_tail_desc, k_tail_desc, local_k_tail_desc,
    counter, part_out, part_lse, out_stride, old_out_stride, complete_out_stride, q_stride, first_records, order, full, partial, counts,
    complete_flags, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes,
    items, early_items, first_items, unsplit, split_items, parts, wide_part, lead, rows, tiles, heads, shared, group, heavy_rows,
    light_group, heavy_items, q_len, kv_len, local_tokens, scale, first_b, first_h,
    MASK: gl.constexpr, BOUNDS: gl.constexpr, VISIBLE: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr,
    UNIFORM: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, SCALE_IN_EXP: gl.constexpr,
    M_SUBS: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr, D: gl.constexpr, E: gl.constexpr, DP: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, ONE_LOOP: gl.constexpr, FOLLOWED: gl.constexpr, KV_PAIRS: gl.constexpr,
    HEAD_PAIRS: gl.constexpr, ISOLATE: gl.constexpr,
):  # fmt: skip
    """Attention of the first `rows` rows of the block table in `order`, merged with the old state if there is one.

    q_ptr, q_stride: the tensor of q_desc. local_k_desc, local_v_desc, local_tokens: `KvSource`.
    q_tail_desc, k_tail_desc, local_k_tail_desc: TMA descriptors of the last columns of a head dim in two parts (`Parts`), or None.
    complete_out_ptr, complete_flags: outputs of query tiles whose flag is 1 go to complete_out_ptr instead of out_ptr.
    out_desc, complete_out_desc, old_out_desc: TMA descriptors of the tensors of the same names, for the state warp. None: no state warp.
    counter: int32 zeros, one for the item counter and two for each split item. part_out, part_lse: partial results of split items.
    full, partial: `RunPointers`. counts: int32 [table rows, 2], tiles in a row's partial and full runs; never both 0 in these rows.
    first_records: `hopper.first_items`, or None. items, early_items, first_items: `ItemNumbers`.
    unsplit, split_items, parts, wide_part: `SplitKv`. lead: of `load`. group, heavy_rows, light_group, heavy_items: of `place_in_order`.
    M_SUBS, N_SUBS: items and KV blocks per tile of the block table. SCALE_IN_EXP: multiply by the scale in the exponent.
    UNIFORM: of a score mod with lookups by batch row and head (`longspan._kernels.gpu.hoisted_lookups`), or None.
    BOUNDS, VISIBLE: of a mask of comparisons of kv with values of the row (`longspan._kernels.gpu.row_bounds`), or None.
    FLAT, CORNERS: of a score mod whose lookup is uniform over many tiles (`longspan._kernels.gpu.uniform_lookup`), or None.
    ONE_LOOP: one main loop for partial and full blocks, not two. FOLLOWED: with ONE_LOOP, follow the running max (`hopper.running_max`).
    KV_PAIRS, HEAD_PAIRS: see `hopper.half_blocks`. The TMA descriptors of K and V are then those of `load_halves`.
    ISOLATE: compute items once more, isolated, where a value that is not finite reached the output (`hopper.repeats`).
    """
    dtype: gl.constexpr = q_desc.dtype
    first_records, lead = optional(first_records), optional(lead)
    FIRST_RECORDS: gl.constexpr = first_records is not None
    if FIRST_RECORDS:
        first_record = load_first_record(first_records)  # arrives while mbarriers are initialised
    out_desc, complete_out_desc, old_out_desc = optional(out_desc), optional(complete_out_desc), optional(old_out_desc)
    STATE_WARP: gl.constexpr = 0 if out_desc is None else 1
    q, k = Parts(q_desc, first_given(q_tail_desc, q_desc)), Parts(k_desc, first_given(k_tail_desc, k_desc))
    q_s = ring_of(q, GROUPS)
    if KV_PAIRS:
        k_s, v_s = paired_ring(k_desc, STAGES, DP), paired_ring(v_desc, STAGES, EP).main
    else:
        k_s = ring_of(k, STAGES)
        v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, EP], v_desc.layout)
    items_s, blocks_s, near_end = shared_ints(ITEM_SLOTS * ITEM_FIELDS), shared_ints(BLOCK_FIELDS * STAGES), mbarriers(2, 1)
    bars = ItemBarriers(
        mbarriers(ITEM_SLOTS, 1), mbarriers(ITEM_SLOTS, GROUPS + 1 + STATE_WARP), mbarriers(GROUPS, 1), mbarriers(GROUPS, 1)
    )
    kv_bars = KvBarriers(mbarriers(STAGES, 1), mbarriers(STAGES, GROUPS), mbarriers(STAGES, 1), mbarriers(STAGES, GROUPS))
    isolation, noted = optional(None), optional(None)
    if ISOLATE:
        isolation, noted = block_isolation(), ballots(ITEM_SLOTS * GROUPS)
    if FIRST_RECORDS:
        publish_first_item(items_s, first_record, bars.item_full)
    numbers = ItemNumbers(items, early_items, first_items)
    split, groups = SplitKv(unsplit, split_items, parts, wide_part), (group, heavy_rows, light_group, heavy_items)
    old_lse_ptr, complete_flags = optional(old_lse_ptr), optional(complete_flags)
    to = Outputs(
        out_ptr, lse_ptr, optional(max_scores_ptr), optional(old_out_ptr), old_lse_ptr, optional(old_max_scores_ptr),
        optional(complete_out_ptr), part_out, part_lse,
    )  # fmt: skip
    strides = OutputStrides(out_stride, old_out_stride, complete_out_stride)
    captured = Captured(mask_captured, mask_sizes, score_captured, score_sizes)
    full, partial = RunPointers(full[0], full[1], full[2]), RunPointers(partial[0], partial[1], partial[2])
    keys = KvSource(k, Parts(optional(local_k_desc), first_given(local_k_tail_desc, local_k_desc)), local_tokens)
    values = KvSource(v_desc, optional(local_v_desc), local_tokens)
    q_side = (optional(q_side[0]), optional(q_side[1]), optional(q_side[2]))
    kv_side = (optional(kv_side[0]), optional(kv_side[1]), optional(kv_side[2]))
    if STATE_WARP:
        state_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, GROUP_ROWS, EP], gl.float32)
        state_s = gl.allocate_shared_memory(gl.float32, [GROUPS, 1, 1, GROUP_ROWS, EP], state_layout)
        lse_s = gl.allocate_shared_memory(gl.float32, [GROUPS, GROUP_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        state_bars, state_due = StateBarriers(mbarriers(1, 2).index(0), mbarriers(1, GROUPS).index(0)), mbarriers(2, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (
                    to, counter, split, strides, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, bars, kv_bars,
                    out_desc, complete_out_desc, state_s, lse_s, state_bars, noted, captured, 0, MASK, BOUNDS, VISIBLE, SCORE, FLAT,
                    CORNERS, UNIFORM, SCALE_IN_EXP, N, E, EP, STAGES, ONE_LOOP, FOLLOWED, KV_PAIRS, HEAD_PAIRS,
                )),
                (_consume, (
                    to, counter, split, strides, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, bars, kv_bars,
                    out_desc, complete_out_desc, state_s, lse_s, state_bars, noted, captured, 1, MASK, BOUNDS, VISIBLE, SCORE, FLAT,
                    CORNERS, UNIFORM, SCALE_IN_EXP, N, E, EP, STAGES, ONE_LOOP, FOLLOWED, KV_PAIRS, HEAD_PAIRS,
                )),
                (schedule, (
                    q_ptr, q_stride, counter, numbers, split, order, full, partial, counts, complete_flags, q_side, lead, rows, tiles,
                    heads, groups, q_len, items_s, near_end, bars, noted, FIRST_RECORDS, PER_BATCH, PER_HEAD, M_SUBS, N_SUBS, D,
                    HEAD_PAIRS,
                )),
                (load, (
                    q, keys, values, full, partial, kv_side, lead, shared, kv_len, q_s, k_s, v_s, items_s, blocks_s, near_end, state_due,
                    bars, kv_bars, isolation, FIRST_RECORDS, N, N_SUBS, STAGES, KV_PAIRS, HEAD_PAIRS,
                )),
                (move_states, (
                    out_desc, complete_out_desc, old_out_desc, old_lse_ptr, heads, q_len, state_s, lse_s, items_s, bars, state_bars,
                    state_due, noted,
                )),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (
                    to, counter, split, strides, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, bars, kv_bars,
                    optional(None), optional(None), optional(None), optional(None), optional(None), noted, captured, 0, MASK, BOUNDS,
                    VISIBLE, SCORE, FLAT, CORNERS, UNIFORM, SCALE_IN_EXP, N, E, EP, STAGES, ONE_LOOP, FOLLOWED, KV_PAIRS, HEAD_PAIRS,
                )),
                (_consume, (
                    to, counter, split, strides, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, bars, kv_bars,
                    optional(None), optional(None), optional(None), optional(None), optional(None), noted, captured, 1, MASK, BOUNDS,
                    VISIBLE, SCORE, FLAT, CORNERS, UNIFORM, SCALE_IN_EXP, N, E, EP, STAGES, ONE_LOOP, FOLLOWED, KV_PAIRS, HEAD_PAIRS,
                )),
                (schedule, (
                    q_ptr, q_stride, counter, numbers, split, order, full, partial, counts, complete_flags, q_side, lead, rows, tiles,
                    heads, groups, q_len, items_s, near_end, bars, noted, FIRST_RECORDS, PER_BATCH, PER_HEAD, M_SUBS, N_SUBS, D,
                    HEAD_PAIRS,
                )),
                (load, (
                    q, keys, values, full, partial, kv_side, lead, shared, kv_len, q_s, k_s, v_s, items_s, blocks_s, near_end,
                    optional(None), bars, kv_bars, isolation, FIRST_RECORDS, N, N_SUBS, STAGES, KV_PAIRS, HEAD_PAIRS,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )  # fmt: skip
