"""Forward items that are computed a second time because a value that is not finite reached their output.

An unseen value that is NaN or ±inf makes all rows of an item NaN in its column: wgmma adds 0 · x. So one row per thread tells whether there
was one (`poisoned_rows`). Consumers note it in shared memory before they release the item's record. The scheduler warp then publishes the
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

_NOTED_ROWS = gl.constexpr(32)  # of the 64 rows of a warp group


@gluon.jit
def notes(COUNT: gl.constexpr):
    """Shared memory for the notes of COUNT pairs of item slot and warp group, int8 [COUNT, 32]."""
    return gl.allocate_shared_memory(gl.int8, [COUNT, _NOTED_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def poisoned_rows(acc):
    """int8 [32]: 1 for rows of acc [64, columns] with a NaN or ±inf. Of the two rows of a thread, the first is read.

    A sum that overflows counts too: the item is computed again, to the same result.
    """
    sums = gl.reshape(gl.sum(by_lane(acc), 1), [4, 2, 8, 8])
    first, _ = gl.split(gl.permute(sums, (0, 2, 3, 1)))
    total = gl.reshape(gl.sum(first, 2), [_NOTED_ROWS])
    return gl.where(gl.abs(total) < float("inf"), 0, 1).to(gl.int8)


@gluon.jit
def is_stored(poisoned, repeated, group):
    """Whether a warp group stores a result that must be stored once. poisoned: of `poisoned_rows`. repeated: of the item's record."""
    return gl.where(repeated == 0, 1 - gl.max(poisoned.to(gl.int32), 0), (repeated >> group) & 1) != 0


@gluon.jit
def poisoned_groups(noted, slot, GROUPS: gl.constexpr):
    """A bit for each warp group that noted a row in the item of `slot`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    bits = 0
    for group in gl.static_range(GROUPS):
        bits |= gl.max(noted.index(slot * GROUPS + group).load(layout).to(gl.int32), 0) << group
    return bits


@gluon.jit
def repeat_items(
    t, slots, items_s, noted, bars, REPEATED: gl.constexpr, FIELDS: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Wait until the items in the next `slots` of SLOTS slots from item t on are done, and publish those to repeat once more. One warp.

    Returns the number of the next item. noted: `notes`, or None to repeat none. REPEATED: the field of the item's record that has the bits
    of `poisoned_groups`; 0 the first time.
    """
    if noted is not None:
        done = 0
        while done < slots:
            old = ring_slot(t + done, SLOTS)
            mbarrier.wait(bars.item_empty.index(old), ring_phase(t + done, SLOTS) ^ 1)
            groups = 0
            if t + done >= SLOTS:  # noqa: SIM102 (no short circuit on the device)
                if load_int(items_s, old * FIELDS + REPEATED) == 0:
                    groups = poisoned_groups(noted, old, GROUPS)
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
