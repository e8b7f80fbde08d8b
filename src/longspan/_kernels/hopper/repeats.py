"""Forward items that are computed a second time because a value that is not finite reached their output.

An unseen value that is NaN or ±inf makes all rows of an item NaN in its column: wgmma adds 0 · x. So one row per thread tells whether there
was one (`note_poison`). Consumers note it in shared memory before they release the item's record. The scheduler warp then publishes the
record again, and the load warp isolates the item's partial blocks (`isolation.isolate_values`). Only the second results stay:

  out, lse without an old state      stored both times by the same threads
  running states, split-KV parts     stored once: the first time if the output is finite, otherwise the second time
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longspan._kernels.hopper.pipeline import load_int, ring_phase, ring_slot, store_int
from longspan._kernels.hopper.running_max import by_lane
from longspan._kernels.hopper.warp_votes import any_vote, vote


@gluon.jit
def note_poison(acc, noted, i):
    """Note whether acc [64, columns] has a NaN or ±inf, as the i-th warp group of `noted` (`warp_votes.ballots`).

    Of the two rows of a thread, the first is read. A sum that overflows counts too: the item is computed again, to the same result.
    """
    sums = gl.reshape(gl.sum(by_lane(acc), 1), [4, 2, 8, 4, 2])
    first, _ = gl.split(gl.permute(sums, (0, 2, 3, 4, 1)))
    total = gl.reshape(gl.sum(first, 3), [128])
    vote(noted, i, gl.where(gl.abs(total) < float("inf"), 0, 1))


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
    groups = 0
    if t >= SLOTS:  # noqa: SIM102 (no short circuit on the device)
        if load_int(items_s, slot * FIELDS + REPEATED) == 0:
            groups = poisoned_groups(noted, slot, GROUPS)
    return groups


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
