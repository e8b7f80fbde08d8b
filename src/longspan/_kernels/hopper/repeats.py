"""Forward items that are computed a second time because a value that is not finite reached their output.

An unseen value that is NaN or ±inf makes all rows of an item NaN or ±inf in its column: wgmma adds 0 · x. So the first rows of a warp tell
whether there was one. 16-bit outputs are read as they are stored, when a warp has whole rows (`note_rows`); other results are read before,
as sums of the accumulator (`note_poison`). Consumers note it in shared memory before they release the item's record. The scheduler warp
then publishes the record again, and the load warp isolates the item's partial blocks (`isolation.isolate_values`). Only the second results
stay:

  out, lse without an old state      stored both times by the same threads
  running states, split-KV parts     stored once: the first time if the output is finite, otherwise the second time
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs
# ruff: noqa: RET505 (Triton compiles what follows a branch that returned)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longspan._kernels.hopper.pipeline import load_int, ring_phase, ring_slot, store_int
from longspan._kernels.hopper.running_max import by_lane
from longspan._kernels.hopper.warp_votes import any_vote, in_warp, vote_alike


class ItemNote(NamedTuple):
    """Where a warp group notes that an item has to be repeated, and the mbarrier that releases the item's record.

    noted, i, items_s, repeated_at: of `note_item`.
    """

    noted: Any
    i: Any
    items_s: Any
    repeated_at: Any
    item_empty: Any


@gluon.jit
def note_poison(acc, noted, i):
    """Note whether acc [64, columns] has a NaN or ±inf, as the i-th warp group of `noted` (`warp_votes.ballots`).

    Of the two rows of a thread, the first is read. A sum that overflows counts too: the item is computed again, to the same result.
    """
    sums = gl.reshape(gl.sum(by_lane(acc), 1), [4, 2, 8, 4, 2])
    first, _ = gl.split(gl.permute(sums, (0, 2, 3, 4, 1)))
    total = gl.reshape(gl.sum(first, 3), [128])
    vote_alike(noted, i, in_warp(gl.where(gl.abs(total) < float("inf"), 0, 1)))


@gluon.constexpr_function
def _row_instructions(dtype):
    """PTX: whether one of eight elements in four registers is NaN or ±inf in any thread of the warp."""
    larger = f"max.NaN.xorsign.abs.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2"
    below = (0x0080 if dtype == gl.bfloat16 else 0x0400) * 0x10001  # + x reaches the highest bit of a half from inf on
    return (
        "{ .reg .pred any; .reg .b32 x, y; "
        f"{larger} x, $2, $3; {larger} y, $4, $5; {larger} x, x, y; and.b32 x, x, 0x7fff7fff; add.u32 x, x, {below}; "
        "and.b32 x, x, 0x80008000; setp.ne.u32 any, x, 0; vote.sync.any.pred any, any, -1; selp.s32 $0, 1, 0, any; mov.u32 $1, 0; }"
    )


@gluon.jit
def _first(x):
    """x[0] of a tensor [2ⁿ, rows, columns] whose first dim is within threads."""
    if x.shape[0] == 1:
        return gl.reshape(x, [x.shape[1], x.shape[2]])
    else:
        halves = gl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]])
        return _first(gl.split(gl.permute(halves, (1, 2, 3, 0)))[0])


@gluon.jit
def note_rows(tile, noted, i):
    """`note_poison` for a tile of 16-bit floats in the layout of `tile_io.row_wise`: every warp has all columns in its first rows."""
    COLUMNS: gl.constexpr = tile.shape[1]
    rows = _first(gl.reshape(tile, [COLUMNS // 16, 64 // (COLUMNS // 16), COLUMNS]))
    voted = gl.inline_asm_elementwise(_row_instructions(tile.dtype), "=r,=r,r,r,r,r", [rows], dtype=gl.int8, is_pure=False, pack=8)
    of_threads = gl.permute(gl.reshape(voted, [128, 8, 1]), (1, 0, 2))
    vote_alike(noted, i, _first(of_threads))


@gluon.jit
def is_stored(noted, i, repeated, group):
    """Whether a warp group stores what must be stored once, after `note_poison`. repeated: of the item's record."""
    return gl.where(repeated == 0, 1 - any_vote(noted, i), (repeated >> group) & 1) != 0


@gluon.jit
def note_item(acc, noted, i, items_s, repeated_at, group, split_part, MERGED: gl.constexpr, SPLITS: gl.constexpr):
    """`note_poison`, and whether the warp group stores what must be stored once, if it has such results.

    repeated_at: the field `REPEATED` of the item's record in items_s. MERGED: items are merged with an old state. SPLITS: items may be
    split along KV.
    """
    note_poison(acc, noted, i)
    stored = split_part < 0
    if MERGED:
        stored = is_stored(noted, i, load_int(items_s, repeated_at), group)
    elif SPLITS:  # noqa: SIM102 (a compile-time condition)
        if split_part >= 0:
            stored = is_stored(noted, i, load_int(items_s, repeated_at), group)
    return stored


@gluon.jit
def poisoned_groups(noted, slot, GROUPS: gl.constexpr):
    """A bit for each warp group that noted a NaN or ±inf in the item of `slot`."""
    bits = 0
    for group in gl.static_range(GROUPS):
        bits |= any_vote(noted, slot * GROUPS + group) << group
    return bits


@gluon.jit
def _groups_to_repeat(
    t, slot, items_s, noted, bars, REPEATED: gl.constexpr, FIELDS: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Wait until the item before item t in `slot` is done. Returns the bits of `poisoned_groups`, or 0 if it is not to be repeated."""
    mbarrier.wait(bars.item_empty.index(slot), ring_phase(t, SLOTS) ^ 1)
    done_once = (t >= SLOTS) & (load_int(items_s, slot * FIELDS + REPEATED) == 0)
    return gl.where(done_once, poisoned_groups(noted, slot, GROUPS), 0)


@gluon.jit
def repeat_item(t, items_s, noted, bars, REPEATED: gl.constexpr, FIELDS: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr):
    """Wait until the next slot is empty, and publish its item once more if it is to be repeated; and so on. One warp.

    Returns the number of the next item. noted: `warp_votes.ballots`, or None to repeat none. REPEATED: the field of the item's record that
    has the bits of `poisoned_groups`; 0 the first time.
    """
    if noted is not None:
        groups = _groups_to_repeat(t, ring_slot(t, SLOTS), items_s, noted, bars, REPEATED, FIELDS, SLOTS, GROUPS)
        while groups != 0:
            store_int(items_s, ring_slot(t, SLOTS) * FIELDS + REPEATED, groups)
            mbarrier.arrive(bars.item_full.index(ring_slot(t, SLOTS)), count=1)
            t += 1
            groups = _groups_to_repeat(t, ring_slot(t, SLOTS), items_s, noted, bars, REPEATED, FIELDS, SLOTS, GROUPS)
    return t


@gluon.jit
def repeat_last_items(t, items_s, noted, bars, REPEATED: gl.constexpr, FIELDS: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr):
    """Wait until the items in all slots are done, and publish those to repeat once more. Arguments and result as of `repeat_item`."""
    if noted is not None:
        done = 0
        while done < SLOTS:
            old = ring_slot(t + done, SLOTS)
            groups = _groups_to_repeat(t + done, old, items_s, noted, bars, REPEATED, FIELDS, SLOTS, GROUPS)
            done += 1
            if groups != 0:
                store_int(items_s, old * FIELDS + REPEATED, groups)
                slot = ring_slot(t, SLOTS)
                for field in range(FIELDS):
                    store_int(items_s, slot * FIELDS + field, load_int(items_s, old * FIELDS + field))
                mbarrier.arrive(bars.item_full.index(slot), count=1)
                t += 1
                done = 0
    return t
