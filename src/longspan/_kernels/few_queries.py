"""The condition under which the decode kernel computes a call on one device: few queries over many keys."""

from __future__ import annotations

from longspan._kernels.protocol import AttentionInputs, Work

MAX_ROWS = 64  # queries times heads of a group: one tile
_MIN_KEYS = 512
_MIN_SHARE = 0.5  # of tiles that are not empty: the decode kernel reads all of them


def is_decoding(inputs: AttentionInputs, work: Work) -> bool:
    """Whether the queries of a KV head fit into one tile, over many keys, most of which are visible."""
    q, k = inputs.q, inputs.k
    rows, keys = q.shape[2] * (q.shape[1] // k.shape[1]), k.shape[2]
    if not 0 < rows <= MAX_ROWS or keys < _MIN_KEYS or work.invariant or inputs.local_kv is not None:
        return False
    if (
        work.device_tables is not None
        or work.q_tiles.row is not None
        or work.kv_tiles.row is not None
        or work.first_batch
        or work.first_head
    ):
        return False
    if work.mask is None:
        return True
    counts = work.table.counts()
    return counts.partial + counts.full >= _MIN_SHARE * sum(counts)
