"""The split of local KV in backward: one part overlaps with the first all-to-all, the other with the last return of gradients.

Used by the engine, which computes the parts, and by the cost model, which predicts their time.
"""

from __future__ import annotations

from torch import Tensor


def late_tiles(work: Tensor, share: float, limit: float | None = None) -> int:
    """The number of local KV tiles that backward computes last: the first ones, with `share` of the work as nearly as tiles allow.

    The first tiles are chosen because more queries read them under causal masks. The other part then touches fewer rows a second time.

    Args:
        work: Query tiles that compute each local KV tile, in local order [tiles].
        share: The share of the work to compute last.
        limit: Largest number of tiles, where their gradients must fit into a buffer of received KV; None for no limit.

    Returns:
        0 where fewer than two tiles have work.
    """
    done = work.cumsum(0)
    cuts = ((done > 0) & (done < done[-1:])).nonzero()[:, 0]
    cuts = cuts if limit is None else cuts[cuts < limit]
    if share <= 0 or not len(cuts):
        return 0
    return 1 + int(cuts[(done[cuts] - share * done[-1]).abs().argmin()])


def late_share(first: float, last: float) -> float:
    """The share of local work to compute while `last` bytes of gradients return; the rest overlaps with `first` bytes of KV.

    In proportion to the bytes: enough local work then hides both transfers; with less, all of it still overlaps with some transfer. 0 where
    either transfer is empty.
    """
    return last / (first + last) if first > 0 and last > 0 else 0.0
