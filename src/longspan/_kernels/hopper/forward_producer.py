"""The scheduler warp and the load warp of the forward kernel. `hopper.forward` begins with a picture of the whole."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longspan._kernels.gpu.tile_access import place_in_order, run_place, span, table_row, wide
from longspan._kernels.hopper.gluon_names import reinterpret
from longspan._kernels.hopper.half_blocks import HALF, group_place, load_halves
from longspan._kernels.hopper.head_dim_parts import load_kv_parts, load_part_tile, part_bytes, part_slot
from longspan._kernels.hopper.isolation import isolate_block
from longspan._kernels.hopper.pipeline import load_int, load_kv_tile, ring_phase, ring_slot, store_int, take_item
from longspan._kernels.hopper.repeats import repeat_item, repeat_last_items
from longspan._kernels.hopper.tile_io import prefetch_rows

GROUPS = gl.constexpr(2)  # consumer warp groups
GROUP_ROWS = gl.constexpr(64)  # query rows of each
ITEM_SLOTS = gl.constexpr(4)  # item records in flight
NEAR_END = gl.constexpr(4)  # KV blocks still to be loaded when the next item is scheduled
STATE_AFTER = gl.constexpr(2)  # KV blocks of an item that are loaded before its running state

# An item's record: int32 fields.
HEAD = gl.constexpr(0)  # −1: no more items
BATCH = gl.constexpr(1)
ROW = gl.constexpr(2)  # first query row in the tensor
POSITION = gl.constexpr(3)  # global position of that row
ROWS_LEFT = gl.constexpr(4)  # rows from there to the end of the tile
PARTIAL_BLOCKS = gl.constexpr(5)  # partial KV blocks of the table row; they precede its full blocks
END_BLOCK = gl.constexpr(6)  # end of the item's range of the table row's KV blocks
PARTIAL_RUN = gl.constexpr(7)  # first partial run of the table row
FULL_RUN = gl.constexpr(8)  # first full run of the table row
FIRST_BLOCK = gl.constexpr(9)  # begin of the item's range of blocks: 0 unless the item is a part of a split one
SPLIT_PART = gl.constexpr(10)  # index among all split-KV parts; negative for items that are not split
COMPLETE = gl.constexpr(11)  # 1: the output goes to the tensor of complete query tiles
FIRST_TILE = gl.constexpr(12)  # first and last KV tile of the table row's first run; in records of `hopper.first_items` only
LAST_TILE = gl.constexpr(13)
LEADING_TILE = gl.constexpr(14)  # last partial KV tile of the table row
REPEATED = gl.constexpr(15)  # 0, or the item is computed again for these warp groups (`hopper.repeats`)
ITEM_FIELDS = gl.constexpr(16)

# A KV block's record, one per pipeline stage: int32 fields.
BLOCK_POSITION = gl.constexpr(0)  # global position of its first key
BLOCK_KEYS_LEFT = gl.constexpr(1)  # keys from there to the end of the run
SECOND_POSITION = gl.constexpr(2)  # of the second half of a block (`hopper.half_blocks`)
SECOND_KEYS_LEFT = gl.constexpr(3)
BLOCK_FIELDS = gl.constexpr(4)


class ItemBarriers(NamedTuple):
    """Arrays of mbarriers of the ring of item records (`ITEM_SLOTS` each) and of the query tiles (one per consumer warp group each;
    in `hopper.forward_three`, one mbarrier for all).
    """

    item_full: Any
    item_empty: Any
    q_full: Any
    q_empty: Any


class ItemNumbers(NamedTuple):
    """Numbers of a launch's items: all are below `total`, the last ones not below `early`. Those below `first`, one per CTA, do not come
    from the global counter.
    """

    total: Any
    early: Any
    first: Any


class SplitKv(NamedTuple):
    """`hopper.split_kv.KvSplit` as kernel arguments."""

    unsplit: Any
    split_items: Any
    parts: Any
    wide_part: Any


@gluon.jit
def item_field(items_s, slot, FIELD: gl.constexpr):
    """A field of the item record in `slot`."""
    return load_int(items_s, slot * ITEM_FIELDS + FIELD)


@gluon.jit
def block_field(blocks_s, stage, FIELD: gl.constexpr):
    """A field of the record of the KV block in a pipeline stage."""
    return load_int(blocks_s, BLOCK_FIELDS * stage + FIELD)


@gluon.jit
def schedule(
    q_ptr, q_stride, counter, items, split, order, full, partial, counts, complete_flags, q_side, lead, rows, tiles, heads, groups,
    q_len, items_s, near_end, bars, noted, FIRST_RECORDS: gl.constexpr,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, M_SUBS: gl.constexpr, N_SUBS: gl.constexpr, D: gl.constexpr, HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """The scheduler warp: takes item numbers from the global counter and writes item records, until all `ItemNumbers` are taken.

    A CTA takes its next item when the load warp is near the end of the current one (`near_end`): an item taken earlier would wait for this
    CTA while another CTA may be idle. After an item of few blocks, the next one is taken one item earlier: the record would not be ready
    when the short item ends. The last items are not: with two items in advance, some CTAs would finish when others have long been idle.
    FIRST_RECORDS: the first item of this CTA has been scheduled (`publish_first_item`). lead: of `load`. noted: of `repeat_item`.
    The item's queries are prefetched into L2, so that the load warp does not wait for global memory between two items.
    """
    ROWS: gl.constexpr = GROUP_ROWS if HEAD_PAIRS else GROUPS * GROUP_ROWS
    t = 0  # items so far
    if FIRST_RECORDS:
        blocks = item_field(items_s, 0, END_BLOCK) - item_field(items_s, 0, FIRST_BLOCK)
        if (blocks > NEAR_END) | (items.first > items.early):
            mbarrier.wait(near_end.index(0), 0)
        t += 1
    item = items.first + take_item(counter)
    while item < items.total:
        whole_item, part = item, 0
        if item >= split.unsplit:
            whole_item = split.unsplit + (item - split.unsplit) % split.split_items
            part = (item - split.unsplit) // split.split_items
        # t >> 30: 0, but unknown to the compiler, which would otherwise compute a divisor at the begin of the kernel, in a register that
        # all warps lack: the assembler then reads the thread number anew in the consumers' main loops.
        tile, sub, b, h = place_in_order(whole_item, order, rows + (t >> 30), tiles, heads, groups, M_SUBS, PER_BATCH, PER_HEAD)
        table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
        row, pos, left = span(tile * M_SUBS + sub, q_len, q_side, M_SUBS, ROWS)
        partial_blocks = gl.load(counts + 2 * table) * N_SUBS
        first_block, end_block = 0, partial_blocks + gl.load(counts + 2 * table + 1) * N_SUBS
        if item >= split.unsplit:
            shares = split.wide_part + split.parts - 1
            first_share, end_share = gl.where(part > 0, split.wide_part + part - 1, 0), split.wide_part + part
            first_block, end_block = end_block * first_share // shares, end_block * end_share // shares
        partial_run, full_run = gl.load(partial.ptr + 2 * table), gl.load(full.ptr + 2 * table)
        leading_tile = 0
        if lead is not None:  # noqa: SIM102 (a compile-time condition)
            if (lead != 0) & (partial_blocks > 0):
                leading_tile = gl.load(partial.last + gl.load(partial.ptr + 2 * table + 1) - 1)
        slot = ring_slot(t, ITEM_SLOTS)
        mbarrier.wait(bars.item_empty.index(slot), ring_phase(t, ITEM_SLOTS) ^ 1)
        record = slot * ITEM_FIELDS
        store_int(items_s, record + HEAD, h)
        store_int(items_s, record + BATCH, b)
        store_int(items_s, record + ROW, row)
        store_int(items_s, record + POSITION, pos)
        store_int(items_s, record + ROWS_LEFT, left)
        store_int(items_s, record + PARTIAL_BLOCKS, partial_blocks)
        store_int(items_s, record + END_BLOCK, end_block)
        store_int(items_s, record + PARTIAL_RUN, partial_run)
        store_int(items_s, record + FULL_RUN, full_run)
        store_int(items_s, record + FIRST_BLOCK, first_block)
        store_int(items_s, record + SPLIT_PART, item - split.unsplit)
        if lead is not None:
            store_int(items_s, record + LEADING_TILE, leading_tile)
        if complete_flags is not None:
            store_int(items_s, record + COMPLETE, gl.load(complete_flags + tile))
        if noted is not None:
            store_int(items_s, record + REPEATED, 0)
        mbarrier.arrive(bars.item_full.index(slot), count=1)
        prefetch_rows(q_ptr + wide(b) * q_stride[0] + wide(h) * q_stride[1], row, left, q_stride[2], D, ROWS)
        if HEAD_PAIRS:
            prefetch_rows(q_ptr + wide(b) * q_stride[0] + wide(h + 1) * q_stride[1], row, left, q_stride[2], D, ROWS)
        ending = gl.where((end_block - first_block > NEAR_END) | (item >= items.early), t, t - 1)
        if ending >= 0:
            mbarrier.wait(near_end.index(ring_slot(ending, 2)), ring_phase(ending, 2))
        t += 1
        item = items.first + take_item(counter)
        # While the number is on its way: the check takes no time between two items.
        t = repeat_item(t, items_s, noted, bars, REPEATED, ITEM_FIELDS, ITEM_SLOTS, GROUPS)
    t = repeat_last_items(t, items_s, noted, bars, REPEATED, ITEM_FIELDS, ITEM_SLOTS, GROUPS)
    slot = ring_slot(t, ITEM_SLOTS)
    if noted is None:
        mbarrier.wait(bars.item_empty.index(slot), ring_phase(t, ITEM_SLOTS) ^ 1)
    store_int(items_s, slot * ITEM_FIELDS + HEAD, -1)
    mbarrier.arrive(bars.item_full.index(slot), count=1)


@gluon.jit
def load_first_record(records):
    """The record of this CTA's first item, one field per thread. records: int32 [CTAs, ITEM_FIELDS]."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.load(records + gl.program_id(0) * ITEM_FIELDS + gl.arange(0, ITEM_FIELDS, layout=layout))


@gluon.jit
def publish_first_item(items_s, record, item_full):
    """Write the record of this CTA's first item to slot 0 and hand it over."""
    slots = reinterpret(items_s, gl.int32, [ITEM_SLOTS, ITEM_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slots.index(0).store(record)
    mbarrier.arrive(item_full.index(0), count=1)


@gluon.jit
def _load_queries(q_desc, b, h, row, t, bars, q_s, HEAD_PAIRS: gl.constexpr):
    """Start the TMA loads of item t's query tiles (`Parts`), one per consumer warp group, each as soon as the warp group has read the tile
    before: the warp group that ends an item first begins the next one first.
    """
    BYTES: gl.constexpr = part_bytes(q_desc.main.block_type.nbytes, q_desc.tail.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        if t > 0:
            mbarrier.wait(bars.q_empty.index(group), (t & 1) ^ 1)
        mbarrier.expect(bars.q_full.index(group), BYTES)
        head, first = group_place(h, row, group, GROUP_ROWS, HEAD_PAIRS)
        load_part_tile(q_desc, b, head, first, bars.q_full.index(group), part_slot(q_s, group))


@gluon.jit
def _load_block(
    i, t, block, n, first, last, place, item, isolated, repeated, q_desc, keys, values, kv_len, q_s, k_s, v_s, blocks_s, near_end,
    state_due, bars, kv_bars, isolation, N: gl.constexpr, STAGES: gl.constexpr, KV_PAIRS: gl.constexpr, HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """`load` for KV block i, which is block `block` of item t: block n of the tiles from `first` to `last`. Returns `isolated`.

    A function of its own, because the compiler's frontend visits the body of each loop twice: in three loops eight times.
    """
    b, h, kv_head, row, first_block, partial_blocks, state_at, near_end_at = item
    row_from, pos_from, left_from = place
    stage = ring_slot(i, STAGES)
    empty_phase = ring_phase(i, STAGES) ^ 1
    mbarrier.wait(kv_bars.k_empty.index(stage), empty_phase)
    if KV_PAIRS:
        store_int(blocks_s, BLOCK_FIELDS * stage + BLOCK_POSITION, first * HALF)
        store_int(blocks_s, BLOCK_FIELDS * stage + BLOCK_KEYS_LEFT, kv_len - first * HALF)
        store_int(blocks_s, BLOCK_FIELDS * stage + SECOND_POSITION, last * HALF)
        store_int(blocks_s, BLOCK_FIELDS * stage + SECOND_KEYS_LEFT, kv_len - last * HALF)
    else:
        store_int(blocks_s, BLOCK_FIELDS * stage + BLOCK_POSITION, pos_from + n * N)
        store_int(blocks_s, BLOCK_FIELDS * stage + BLOCK_KEYS_LEFT, left_from - n * N)
    k_full, v_full = kv_bars.k_full.index(stage), kv_bars.v_full.index(stage)
    isolates = False
    if isolation is not None:
        isolates = (repeated != 0) & (block < partial_blocks)
        if isolates:  # the consumers wait for the isolated tiles
            k_full, v_full = isolation.loaded.index(0), isolation.loaded.index(1)
    if KV_PAIRS:
        load_halves(keys.rest.main, b, kv_head, first * HALF, last * HALF, k_full, k_s.main, stage)
    else:
        load_kv_parts(keys, b, kv_head, row_from + n * N, k_full, part_slot(k_s, stage))
    if (block == first_block) & (t > 0):
        # After the item's first K tile: its stage is empty before the query tiles of the item before are.
        _load_queries(q_desc, b, h, row, t, bars, q_s, HEAD_PAIRS)
    mbarrier.wait(kv_bars.v_empty.index(stage), empty_phase)
    if KV_PAIRS:
        load_halves(values.rest, b, kv_head, first * HALF, last * HALF, v_full, v_s, stage)
    else:
        load_kv_tile(values, b, kv_head, row_from + n * N, v_full, v_s.index(stage))
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if isolates:
            isolated = isolate_block(k_s.main, v_s, stage, isolation, isolated, kv_bars)
    if state_due is not None:  # noqa: SIM102 (a compile-time condition)
        if block == state_at:
            mbarrier.arrive(state_due.index(ring_slot(t, 2)), count=1)
    if block == near_end_at:
        mbarrier.arrive(near_end.index(ring_slot(t, 2)), count=1)
    return isolated


@gluon.jit
def load(
    q_desc, keys, values, full, partial, kv_side, lead, shared, kv_len, q_s, k_s, v_s, items_s, blocks_s, near_end, state_due, bars,
    kv_bars, isolation, FIRST_RECORDS: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr, STAGES: gl.constexpr, KV_PAIRS: gl.constexpr,
    HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """The load warp: starts the TMA loads of each item's queries and KV blocks, partial blocks first, and writes the blocks' records.

    q_desc, q_s, k_s: `Parts`. keys: a `KvSource` of `Parts`.
    `state_due`: mbarriers that tell the state warp to load the item's running state; None without a state warp.
    isolation: `BlockIsolation`, or None. FIRST_RECORDS: the record of the first item has its first run. KV_PAIRS, HEAD_PAIRS: see
    `hopper.half_blocks`; tilings are then plain sequences.
    lead: if neither None nor 0, the last partial tile comes before the others. Under a causal mask it is the diagonal, where every row sees
    a key: rows have a running max before the tiles in which they see nothing, and keep it (`running_max.checked`).
    """
    isolated = 0  # isolated KV blocks so far
    i = 0  # KV blocks so far
    t = 0  # items so far
    mbarrier.wait(bars.item_full.index(0), 0)
    h = item_field(items_s, 0, HEAD)
    while h >= 0:
        slot = ring_slot(t, ITEM_SLOTS)
        b = item_field(items_s, slot, BATCH)
        row = item_field(items_s, slot, ROW)
        partial_blocks = item_field(items_s, slot, PARTIAL_BLOCKS)
        end_block = item_field(items_s, slot, END_BLOCK)
        partial_run = item_field(items_s, slot, PARTIAL_RUN)
        full_run = item_field(items_s, slot, FULL_RUN)
        first_block = item_field(items_s, slot, FIRST_BLOCK)
        leading_tile, repeated = 0, 0
        if lead is not None:
            leading_tile = item_field(items_s, slot, LEADING_TILE)
        if isolation is not None:
            repeated = item_field(items_s, slot, REPEATED)
        mbarrier.arrive(bars.item_empty.index(slot), count=1)
        near_end_at, state_at = gl.maximum(end_block - NEAR_END, first_block), gl.minimum(first_block + STATE_AFTER, end_block - 1)
        kv_head = h // shared
        if t == 0:
            _load_queries(q_desc, b, h, row, t, bars, q_s, HEAD_PAIRS)
        run_block = 0  # first block of the run
        while run_block < end_block:
            is_known, leads = False, False
            if lead is not None:
                leads = (lead != 0) & (run_block == 0) & (partial_blocks > 0)
            if FIRST_RECORDS:
                is_known = (t == 0) & (run_block == 0)
            if leads:
                first, last = leading_tile, leading_tile
            elif is_known:
                first, last = item_field(items_s, 0, FIRST_TILE), item_field(items_s, 0, LAST_TILE)
            elif KV_PAIRS:  # both kinds are in one list
                listed = partial.first + 2 * gl.where(run_block < partial_blocks, partial_run, full_run)
                first, last = gl.load(listed), gl.load(listed + 1)
            elif run_block < partial_blocks:
                first, last = gl.load(partial.first + partial_run), gl.load(partial.last + partial_run)
            else:
                first, last = gl.load(full.first + full_run), gl.load(full.last + full_run)
            if run_block < partial_blocks:
                partial_run += 1 if lead is None else gl.where(leads, 0, 1)
            else:
                full_run += 1
            row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, N_SUBS, N)
            run_blocks = 1 if KV_PAIRS else (last + 1 - first) * N_SUBS
            if lead is not None:  # noqa: SIM102 (a compile-time condition)
                if run_block < partial_blocks:  # without the leading tile, which ends the last partial run
                    run_blocks = gl.minimum(run_blocks, partial_blocks - run_block)
            for block in range(gl.maximum(run_block, first_block), gl.minimum(run_block + run_blocks, end_block)):
                isolated = _load_block(
                    i, t, block, first * N_SUBS + block - run_block, first, last, (row_from, pos_from, left_from),
                    (b, h, kv_head, row, first_block, partial_blocks, state_at, near_end_at), isolated, repeated, q_desc, keys, values,
                    kv_len, q_s, k_s, v_s, blocks_s, near_end, state_due, bars, kv_bars, isolation, N, STAGES, KV_PAIRS, HEAD_PAIRS,
                )  # fmt: skip
                i += 1
            run_block += run_blocks
        t += 1
        mbarrier.wait(bars.item_full.index(ring_slot(t, ITEM_SLOTS)), ring_phase(t, ITEM_SLOTS))
        h = item_field(items_s, ring_slot(t, ITEM_SLOTS), HEAD)
