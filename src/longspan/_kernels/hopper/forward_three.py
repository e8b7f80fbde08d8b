"""The forward kernel for head dims up to 64 without a score mod or a running state: as `hopper.forward`, with three consumer warp groups.

At these head dims a block's softmax takes longer than its wgmmas: two warp groups leave the tensor cores idle more often than three. An
item is 192 queries, 64 per warp group, of two neighbouring rows of the block table (`hopper.half_tiles`). All three read the same K and V;
a warp group skips KV blocks that only the other row sees. Queries are read from shared memory, since a thread has 160 registers.
KV is not split. Time runs downwards; one item:

  scheduler warp     load warp              consumer warp groups 0, 1, 2
  ──────────────     ─────────              ────────────────────────────
  atomic_add
  item columns
  items_s ──item_full──►
  prefetch Q to L2   K 0 ──────k_full────►
                     Q ────────q_full────►  release blocks of the upper row alone (groups of the lower row)
                     V 0 ──────v_full────►  S = Q K₀ᵀ                          ──k_empty──►
                     K 1, V 1 …             P₀ = softmax(S)
                                            S = Q K₁ᵀ ‖ acc += P₀ V₀           ──v_empty──►
  ◄──near_end──      4 blocks to go         …
  next item …        last block …           acc += last P V                    ──q_empty──►
                                            item_empty; lse and output to global memory
                                            release blocks of the lower row alone (groups of the upper row)

Shared memory and mbarriers are those of `hopper.forward` without the state warp, for three consumers; runs_s holds one more record per
pipeline stage.

Without a mask, and over long items, the warp groups start their wgmmas in turns (`hopper.turns`). In shorter items they would often wait
for a warp group that is in a masked block or in its epilogue. P V of the block before ends before the exponentials, whose results take its
registers.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LN_2
from longspan._kernels.gpu.tile_access import place_in_order, wide
from longspan._kernels.hopper import half_tiles
from longspan._kernels.hopper.epilogue import by_row
from longspan._kernels.hopper.forward import attend_blocks
from longspan._kernels.hopper.forward_producer import (
    BLOCK_FIELDS,
    BLOCK_KEYS_LEFT,
    BLOCK_POSITION,
    GROUP_ROWS,
    ITEM_SLOTS,
    NEAR_END,
    ItemBarriers,
    block_field,
)
from longspan._kernels.hopper.head_dim_parts import Parts, load_kv_parts, load_part_tile, part_2d, part_slot, ring_of, start_scores
from longspan._kernels.hopper.isolation import block_isolation, isolate_block
from longspan._kernels.hopper.none_arg import optional
from longspan._kernels.hopper.online_softmax import end_rows, softmax_block, start_rows
from longspan._kernels.hopper.pipeline import (
    Captured,
    KvBarriers,
    KvSource,
    load_int,
    load_kv_tile,
    mbarriers,
    ring_phase,
    ring_slot,
    shared_ints,
    store_int,
    take_item,
    tile_2d,
)
from longspan._kernels.hopper.repeats import note_poison, repeat_item, repeat_last_items
from longspan._kernels.hopper.tile_io import prefetch_rows, store_tile
from longspan._kernels.hopper.turns import GROUPS, await_turn, give_turn
from longspan._kernels.hopper.warp_votes import ballots

# An item's record: the columns of `HalfTileItems.items` as int32 fields, and two more.
FIRST_QUERY = gl.constexpr(half_tiles.FIRST_QUERY)
UPPER_HALVES = gl.constexpr(half_tiles.UPPER_HALVES)
UPPER_END = gl.constexpr(half_tiles.UPPER_END)
LOWER_END = gl.constexpr(half_tiles.LOWER_END)
UPPER_ALONE = gl.constexpr(half_tiles.UPPER_ALONE)
BLOCKS = gl.constexpr(half_tiles.KV_TILES)
LOWER_ALONE = gl.constexpr(half_tiles.LOWER_ALONE)
RUN = gl.constexpr(half_tiles.FIRST_RUN)
COLUMNS = gl.constexpr(half_tiles.COLUMNS)
HEAD = gl.constexpr(half_tiles.COLUMNS)  # −1: no more items
BATCH = gl.constexpr(half_tiles.COLUMNS + 1)
PLAIN_FIELDS = gl.constexpr(half_tiles.COLUMNS + 2)
REPEATED = PLAIN_FIELDS  # with isolation, one more field, as in `hopper.forward_producer`

# A KV block's second record, one per pipeline stage: int32 fields.
RUN_FULL = gl.constexpr(0)  # 1 if full for the upper row, plus 2 if full for the lower row
FULL_FOR_BOTH = gl.constexpr(3)
RUN_LEFT = gl.constexpr(1)  # blocks from here to the end of the run
RUN_FIELDS = gl.constexpr(2)

_DYNAMIC = [
    "items", "rows", "heads", "shared", "group", "heavy_rows", "light_group", "heavy_items", "q_len", "kv_len", "first_b", "first_h",
]  # fmt: skip


@gluon.jit
def _schedule(q_ptr, q_stride, counter, items, order, item_table, rows, heads, groups, items_s, near_end, bars, noted, D: gl.constexpr):
    """The scheduler warp, as `forward_producer.schedule`."""
    FIELDS: gl.constexpr = PLAIN_FIELDS if noted is None else PLAIN_FIELDS + 1
    t = 0  # items so far
    item = take_item(counter)
    while item < items:
        place, _, b, h = place_in_order(item, order, rows, rows, heads, groups, 1, False, False)
        columns = item_table + place * COLUMNS
        slot = ring_slot(t, ITEM_SLOTS)
        mbarrier.wait(bars.item_empty.index(slot), ring_phase(t, ITEM_SLOTS) ^ 1)
        record = slot * FIELDS
        for column in gl.static_range(COLUMNS):
            store_int(items_s, record + column, gl.load(columns + column))
        store_int(items_s, record + HEAD, h)
        store_int(items_s, record + BATCH, b)
        if noted is not None:
            store_int(items_s, record + REPEATED, 0)
        mbarrier.arrive(bars.item_full.index(slot), count=1)
        first, end = gl.load(columns + FIRST_QUERY), gl.maximum(gl.load(columns + UPPER_END), gl.load(columns + LOWER_END))
        head = q_ptr + wide(b) * q_stride[0] + wide(h) * q_stride[1]
        prefetch_rows(head, first, end - first, q_stride[2], D, GROUPS * GROUP_ROWS)
        ending = gl.where(gl.load(columns + BLOCKS) > NEAR_END, t, t - 1)
        if ending >= 0:
            mbarrier.wait(near_end.index(ring_slot(ending, 2)), ring_phase(ending, 2))
        t += 1
        item = take_item(counter)
        t = repeat_item(t, items_s, noted, bars, REPEATED, FIELDS, ITEM_SLOTS, GROUPS)
    t = repeat_last_items(t, items_s, noted, bars, REPEATED, FIELDS, ITEM_SLOTS, GROUPS)
    slot = ring_slot(t, ITEM_SLOTS)
    mbarrier.wait(bars.item_empty.index(slot), ring_phase(t, ITEM_SLOTS) ^ 1)
    store_int(items_s, slot * FIELDS + HEAD, -1)
    mbarrier.arrive(bars.item_full.index(slot), count=1)


@gluon.jit
def _load_queries(q, b, h, row, q_full, q_s):
    """Start the TMA loads of an item's query tiles, one per consumer warp group."""
    mbarrier.expect(q_full, q.main.block_type.nbytes * GROUPS)
    for group in gl.static_range(GROUPS):
        load_part_tile(q, b, h, row + group * GROUP_ROWS, q_full, part_slot(q_s, group))


@gluon.jit
def _load(
    q, keys, values, runs, shared, kv_len, q_s, k_s, v_s, items_s, blocks_s, runs_s, near_end, bars, kv_bars,
    isolation, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The load warp, as `forward_producer.load`. runs: pointers to `full`, `first` and `last` of `HalfTileItems`."""
    FIELDS: gl.constexpr = PLAIN_FIELDS if isolation is None else PLAIN_FIELDS + 1
    isolated = 0  # isolated KV blocks so far
    i = 0  # KV blocks so far
    t = 0  # items so far
    mbarrier.wait(bars.item_full.index(0), 0)
    h = load_int(items_s, HEAD)
    while h >= 0:
        slot = ring_slot(t, ITEM_SLOTS)
        record = slot * FIELDS
        b, row = load_int(items_s, record + BATCH), load_int(items_s, record + FIRST_QUERY)
        blocks, run = load_int(items_s, record + BLOCKS), load_int(items_s, record + RUN)
        repeated = 0
        if isolation is not None:
            repeated = load_int(items_s, record + REPEATED)
        mbarrier.arrive(bars.item_empty.index(slot), count=1)
        near_end_at = gl.maximum(blocks - NEAR_END, 0)
        kv_head = h // shared
        if t == 0:
            _load_queries(q, b, h, row, bars.q_full, q_s)
        block = 0
        while block < blocks:
            full, first, last = gl.load(runs[0] + run), gl.load(runs[1] + run), gl.load(runs[2] + run)
            run += 1
            for n in range(first, last + 1):
                stage = ring_slot(i, STAGES)
                empty_phase = ring_phase(i, STAGES) ^ 1
                mbarrier.wait(kv_bars.k_empty.index(stage), empty_phase)
                store_int(blocks_s, BLOCK_FIELDS * stage + BLOCK_POSITION, n * N)
                store_int(blocks_s, BLOCK_FIELDS * stage + BLOCK_KEYS_LEFT, kv_len - n * N)
                store_int(runs_s, RUN_FIELDS * stage + RUN_FULL, full)
                store_int(runs_s, RUN_FIELDS * stage + RUN_LEFT, last + 1 - n)
                k_full, v_full, isolates = kv_bars.k_full.index(stage), kv_bars.v_full.index(stage), False
                if isolation is not None:
                    isolates = (repeated != 0) & (full != FULL_FOR_BOTH)
                    if isolates:  # the consumers wait for the isolated tiles
                        k_full, v_full = isolation.loaded.index(0), isolation.loaded.index(1)
                load_kv_parts(keys, b, kv_head, n * N, k_full, part_slot(k_s, stage))
                if (block == 0) & (t > 0):
                    mbarrier.wait(bars.q_empty, (t & 1) ^ 1)
                    _load_queries(q, b, h, row, bars.q_full, q_s)
                mbarrier.wait(kv_bars.v_empty.index(stage), empty_phase)
                load_kv_tile(values, b, kv_head, n * N, v_full, v_s.index(stage))
                if isolation is not None:  # noqa: SIM102 (a compile-time condition)
                    if isolates:
                        isolated = isolate_block(k_s.main, v_s, stage, isolation, isolated, kv_bars)
                if block == near_end_at:
                    mbarrier.arrive(near_end.index(ring_slot(t, 2)), count=1)
                i += 1
                block += 1
        t += 1
        mbarrier.wait(bars.item_full.index(ring_slot(t, ITEM_SLOTS)), ring_phase(t, ITEM_SLOTS))
        h = load_int(items_s, ring_slot(t, ITEM_SLOTS) * FIELDS + HEAD)


@gluon.jit
def _skip_blocks(i, count, bars, TURN: gl.constexpr, STAGES: gl.constexpr):
    """Release `count` KV blocks that this warp group does not see. A release counts only after the block has arrived."""
    for _ in range(count):
        stage = ring_slot(i, STAGES)
        mbarrier.wait(bars.k_full.index(stage), ring_phase(i, STAGES))
        mbarrier.arrive(bars.k_empty.index(stage), count=1)
        mbarrier.wait(bars.v_full.index(stage), ring_phase(i, STAGES))
        mbarrier.arrive(bars.v_empty.index(stage), count=1)
        if TURN >= 0:
            await_turn(TURN)
            give_turn(TURN)
        i += 1
    return i


@gluon.jit
def _consume(
    out_ptr, lse_ptr, out_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, runs_s, bars, kv_bars, noted,
    captured, GROUP: gl.constexpr, MASK: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: 64 of the item's 192 queries."""
    FIELDS: gl.constexpr = PLAIN_FIELDS if noted is None else PLAIN_FIELDS + 1
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EP, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    zeros = gl.full([GROUP_ROWS, N], 0.0, gl.float32, layout=layout)
    q = part_2d(q_s, GROUP)
    TURN: gl.constexpr = GROUP if TURNS else -1
    if TURN == GROUPS - 1:
        give_turn(TURN)
    i = 0  # KV blocks so far
    t = 0  # items so far
    mbarrier.wait(bars.item_full.index(0), 0)
    h = load_int(items_s, HEAD)
    while h >= 0:
        slot = ring_slot(t, ITEM_SLOTS)
        record = slot * FIELDS
        lower = gl.where(load_int(items_s, record + UPPER_HALVES) <= GROUP, 1, 0)  # 1: of the item's lower row
        q_first = load_int(items_s, record + FIRST_QUERY) + GROUP * GROUP_ROWS
        before = lower * load_int(items_s, record + UPPER_ALONE)
        after = (1 - lower) * load_int(items_s, record + LOWER_ALONE)
        left = load_int(items_s, record + BLOCKS) - before - after  # blocks to go
        global_b, global_h = load_int(items_s, record + BATCH) + first_b, h + first_h

        m, total, max_scores = start_rows(True, N, layout)
        acc = gl.full([GROUP_ROWS, EP], 0.0, gl.float32, layout=out_layout)
        mbarrier.wait(bars.q_full, t & 1)
        i = _skip_blocks(i, before, kv_bars, TURN, STAGES)
        stage = ring_slot(i, STAGES)
        mbarrier.wait(kv_bars.k_full.index(stage), ring_phase(i, STAGES))
        kv, keys_left = block_field(blocks_s, stage, BLOCK_POSITION), block_field(blocks_s, stage, BLOCK_KEYS_LEFT)
        full = (load_int(runs_s, RUN_FIELDS * stage + RUN_FULL) >> lower) & 1
        if TURN >= 0:
            await_turn(TURN)
        s_next = start_scores(q, part_2d(k_s, stage), zeros)
        if TURN >= 0:
            give_turn(TURN)
        s = warpgroup_mma_wait(0, deps=[s_next])
        mbarrier.arrive(kv_bars.k_empty.index(stage), count=1)
        p, m, total, max_scores, _ = softmax_block(
            s, m, total, max_scores, q_first, kv, keys_left, full == 0, global_b, global_h, scale, captured,
            MASK, None, None, None, None, True, SCALE_IN_EXP, False, True, True, N, v_s.dtype, layout,
        )  # fmt: skip
        weights = gl.convert_layout(p, operand)
        i += 1
        left -= 1
        while left > 0:
            stage = ring_slot(i, STAGES)
            mbarrier.wait(kv_bars.k_full.index(stage), ring_phase(i, STAGES))
            full = (load_int(runs_s, RUN_FIELDS * stage + RUN_FULL) >> lower) & 1
            count = gl.minimum(load_int(runs_s, RUN_FIELDS * stage + RUN_LEFT), left)
            left -= count
            acc, total, m, max_scores, weights, i = attend_blocks(
                acc, total, m, max_scores, weights, i, gl.where(full == 0, count, 0), q, q_first, global_b, global_h, scale, k_s, v_s,
                blocks_s, kv_bars, captured, MASK, None, None, None, None, True, SCALE_IN_EXP, False, N, STAGES, TURN, True, True, layout,
                out_layout,
            )  # fmt: skip
            acc, total, m, max_scores, weights, i = attend_blocks(
                acc, total, m, max_scores, weights, i, gl.where(full == 0, 0, count), q, q_first, global_b, global_h, scale, k_s, v_s,
                blocks_s, kv_bars, captured, MASK, None, None, None, None, False, SCALE_IN_EXP, False, N, STAGES, TURN, True, True, layout,
                out_layout,
            )  # fmt: skip
        mbarrier.arrive(bars.q_empty, count=1)
        last = ring_slot(i - 1, STAGES)
        mbarrier.wait(kv_bars.v_full.index(last), ring_phase(i - 1, STAGES))
        acc_next = warpgroup_mma(weights, tile_2d(v_s, last), acc, is_async=True)
        m, total, _ = end_rows(m, total, max_scores, layout)
        zero = (i >> 30) * 16  # 0, but unknown to the compiler, as in `hopper.forward`
        b = load_int(items_s, record + BATCH)
        end = lower * load_int(items_s, record + LOWER_END) + (1 - lower) * load_int(items_s, record + UPPER_END)
        if noted is None:
            mbarrier.arrive(bars.item_empty.index(slot), count=1)
        rows_left = end - q_first
        seen = total != 0.0  # also where total is NaN: a row that sees a NaN has lse NaN
        divisor = gl.where(seen, total, 1.0)
        lse = gl.where(seen, m * LN_2 + gl.log(divisor), -float("inf"))
        gl.store(lse_ptr + (wide(b) * heads + h) * q_len + q_first + rows, lse, mask=rows < rows_left)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        if noted is not None:  # here, so that the two arrivals wait for all warps once
            note_poison(acc, noted, slot * GROUPS + GROUP)
        mbarrier.arrive(kv_bars.v_empty.index(last), count=1)
        if noted is not None:
            mbarrier.arrive(bars.item_empty.index(slot), count=1)
        acc = acc * by_row(1.0 / divisor, out_layout)
        store_tile(out_ptr + wide(b) * out_stride[0] + wide(h) * out_stride[1], acc, q_first, rows_left, out_stride[2] + zero, E, EP, True)
        i = _skip_blocks(i, after, kv_bars, TURN, STAGES)
        t += 1
        mbarrier.wait(bars.item_full.index(ring_slot(t, ITEM_SLOTS)), ring_phase(t, ITEM_SLOTS))
        h = load_int(items_s, ring_slot(t, ITEM_SLOTS) * FIELDS + HEAD)


@gluon.jit(do_not_specialize=_DYNAMIC)
def forward_three_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, q_ptr, counter,
    out_stride, q_stride, order, item_table, runs, mask_captured, mask_sizes, score_captured,
    items, rows, heads, shared, group, heavy_rows, light_group, heavy_items, q_len, kv_len, scale, first_b, first_h,
    MASK: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr, D: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, TURNS: gl.constexpr, ISOLATE: gl.constexpr,
):  # fmt: skip
    """Attention of queries in `items` of `HalfTileItems` per head and batch row.

    q_ptr, q_stride: the tensor of q_desc. counter: an int32 zero. order: int32 0, 1, … of `rows` items of a head.
    item_table: `HalfTileItems.items`. runs: its `full`, `first` and `last`. group, heavy_rows, light_group, heavy_items: the order of items
    (`place_in_order`). score_captured: not read. TURNS: whether warp groups start their wgmmas in turns (`hopper.turns`).
    ISOLATE: as of `hopper.forward`.
    """
    dtype: gl.constexpr = q_desc.dtype
    q, k = Parts(q_desc, q_desc), Parts(k_desc, k_desc)
    q_s, k_s = ring_of(q, GROUPS), ring_of(k, STAGES)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, EP], v_desc.layout)
    FIELDS: gl.constexpr = PLAIN_FIELDS + (1 if ISOLATE else 0)
    items_s, blocks_s, runs_s = shared_ints(ITEM_SLOTS * FIELDS), shared_ints(BLOCK_FIELDS * STAGES), shared_ints(RUN_FIELDS * STAGES)
    near_end = mbarriers(2, 1)
    bars = ItemBarriers(
        mbarriers(ITEM_SLOTS, 1), mbarriers(ITEM_SLOTS, GROUPS + 1), mbarriers(1, 1).index(0), mbarriers(1, GROUPS).index(0)
    )  # fmt: skip
    kv_bars = KvBarriers(mbarriers(STAGES, 1), mbarriers(STAGES, GROUPS), mbarriers(STAGES, 1), mbarriers(STAGES, GROUPS))
    captured = Captured(mask_captured, mask_sizes, mask_captured, mask_sizes)
    keys, values = KvSource(k, Parts(optional(None), optional(None)), 0), KvSource(v_desc, optional(None), 0)
    groups = (group, heavy_rows, light_group, heavy_items)
    isolation, noted = optional(None), optional(None)
    if ISOLATE:
        isolation, noted = block_isolation(), ballots(ITEM_SLOTS * GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, lse_ptr, out_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, runs_s, bars,
                kv_bars, noted, captured, 0, MASK, SCALE_IN_EXP, N, E, EP, STAGES, TURNS,
            )),
            (_consume, (
                out_ptr, lse_ptr, out_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, runs_s, bars,
                kv_bars, noted, captured, 1, MASK, SCALE_IN_EXP, N, E, EP, STAGES, TURNS,
            )),
            (_consume, (
                out_ptr, lse_ptr, out_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, items_s, blocks_s, runs_s, bars,
                kv_bars, noted, captured, 2, MASK, SCALE_IN_EXP, N, E, EP, STAGES, TURNS,
            )),
            (_schedule, (q_ptr, q_stride, counter, items, order, item_table, rows, heads, groups, items_s, near_end, bars, noted, D)),
            (_load, (
                q, keys, values, runs, shared, kv_len, q_s, k_s, v_s, items_s, blocks_s, runs_s, near_end, bars, kv_bars, isolation, N,
                STAGES,
            )),
        ],
        [4, 4, 1, 1],
        [REGISTERS, REGISTERS, 24, 24],
    )  # fmt: skip
