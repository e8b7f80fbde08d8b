"""Which local keys backward computes last, while the last gradients go home: for the engine, which does so, and for the model of it."""

from __future__ import annotations

from torch import Tensor


def late_tiles(work: Tensor, share: float, most: int | None = None) -> int:
    """How many of a rank's local key tiles backward computes last: its first ones, with `share` of the work as nearly as tiles allow.

    `work` [tiles]: query tiles that compute each, in local order. `most`: no more than that many, where their gradients need a buffer: with
    several steps, one no larger than those of keys that arrive. 0 where there are not two tiles to compute. The first ones, since where
    masks are causal more rows read those: the other part, the smaller one in half precision, then touches fewer rows a second time.
    """
    done = work.cumsum(0)
    inside = ((done > 0) & (done < done[-1:])).nonzero()[:, 0]
    inside = inside if most is None else inside[inside < most]
    if share <= 0 or not len(inside):
        return 0
    return 1 + int(inside[(done[inside] - share * done[-1]).abs().argmin()])


def late_share(first: float, last: float) -> float:
    """Of the local keys' work, what is computed while `last` bytes go home; the rest is while `first` bytes arrive. 0: all of it is.

    In proportion: if the local work is enough for both, both are hidden; if it is not, none of it hides nothing.
    """
    return last / (first + last) if first > 0 and last > 0 else 0.0
