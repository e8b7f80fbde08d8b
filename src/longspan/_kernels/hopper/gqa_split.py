"""GQA in the backward kernel by key tiles: how many CTAs share the query heads of one KV head.

With few KV heads there are fewer items than CTAs. Then the query heads of each KV head are divided into parts, one item each. Each part
fills its own dK and dV, which are summed afterwards.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu.selected_tables import SelectedTables, pairs_of
from longspan._kernels.hopper.makespan import MANY_ITEMS, REFERENCE_CTAS, makespan, mean_tiles
from longspan._kernels.protocol import Work
from longspan._masks.block_table import BlockTable

# Measured with the backward kernel on an H200 at head dim 128.
_TILE_SECONDS = 4.5e-6  # 128 queries by 128 keys of one head
_SUM_SECONDS = 1.5e-5  # sum of the parts, plus its bytes at
_BYTES_PER_SECOND = 3.5e12
_PART_BYTES = 128 * 2**20  # of the query heads of a KV head, above which they are divided
_MAX_RELATIVE_TIME = 0.95  # a split must take less than this share of the time without it

_head_parts: DerivedCache[BlockTable, int] = DerivedCache(16)  # by head counts and head dims


def head_parts_of(q: Tensor, v: Tensor, work: Work) -> int:
    """`head_parts` of a call's dK/dV launch; 1 if other launches fill the device at the same time, and for sums in a fixed order."""
    if work.concurrent or work.invariant:
        return 1
    kv_pairs, head_pairs = pairs_of(work)
    shared, dims = q.shape[1] // v.shape[1], q.shape[-1] + v.shape[-1]
    if kv_pairs and head_pairs:  # a step has two heads
        shared //= 2
    parts = head_parts(work.table.nominal.transposed, v.shape[0] * v.shape[1], shared, dims)
    if parts > 1 or type(work.device_tables) is not SelectedTables or work.kv_tiles.block < 128:  # without dQ, more parts do not pay
        return parts
    return parts_in_l2(q.shape[2], shared, dims)


def order_sizes(q: Tensor, v: Tensor, work: Work) -> tuple[int, int]:
    """(items of each key tile that a launch with ordered dQ takes together, query heads of an item)."""
    kv_heads = v.shape[1] * head_parts_of(q, v, work)
    return work.table.batch * kv_heads, q.shape[1] // kv_heads


def head_parts(table: BlockTable, kv_heads: int, shared: int, dims: int) -> int:
    """The number of parts into which the query heads of a KV head are divided; 1 unless CTAs would idle. Cached per table.

    table: rows are key tiles. kv_heads: KV heads of all batch rows. shared: query heads per KV head. dims: head dims of K and V, summed.
    """
    return _head_parts.get(table, (kv_heads, shared, dims), partial(_fastest_parts, table, kv_heads, shared, dims))


def parts_in_l2(q_len: int, shared: int, dims: int) -> int:
    """The number of parts for chosen tiles: items of one part run one after another, so that q, dO and dQ of its query heads stay in L2.

    dims: head dims of K and V, summed. H200, D128, 64 heads over 8, 4,096 keys per query in blocks of 128, TFLOP/s of the backward pass
    with 1, 2, 4, 8 parts: 32k 461, 482, 464, 435; 131k 423, 425, 442, 421. More parts take longer to sum.
    """
    read = shared * q_len * 4 * dims  # q and dO in 16 bits, dQ in float32
    wanted = 1 if read <= _PART_BYTES else 2 if read <= 4 * _PART_BYTES else 4
    return max(n for n in (1, 2, 4) if n <= wanted and shared % n == 0)


def _fastest_parts(table: BlockTable, kv_heads: int, shared: int, dims: int) -> int:
    tiles = mean_tiles(table)
    if kv_heads * len(tiles) > MANY_ITEMS * REFERENCE_CTAS:
        return 1
    tiles.sort(reverse=True)
    tile_seconds = _TILE_SECONDS * dims / 256
    best, least = 1, makespan(tiles, kv_heads) * shared * tile_seconds * _MAX_RELATIVE_TIME
    balanced = sum(tiles) * kv_heads * shared / REFERENCE_CTAS * tile_seconds
    for parts in (n for n in range(2, shared + 1) if shared % n == 0):
        sum_seconds = _SUM_SECONDS + 2 * 4 * parts * kv_heads * table.q_len * dims / _BYTES_PER_SECOND
        if balanced + sum_seconds >= least:  # more parts take longer to sum
            break
        seconds = makespan(tiles, kv_heads * parts) * (shared // parts) * tile_seconds + sum_seconds
        if seconds < least:
            best, least = parts, seconds
    return best
