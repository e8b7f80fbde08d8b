"""One sequence of the cache, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan._cache.step import CacheStep


@dataclass(kw_only=True, eq=False)
class CachedSequence:
    """Pages and length of a sequence.

    Attributes:
        row: Its row of the page table.
        shift: Page i of the sequence belongs to rank (i + shift) % ranks.
        pages: Page of each `page_size` tokens, in order, as the pool numbers them.
        length: Number of tokens, those of unfinished steps included.
        unfinished: Steps that some layer has not written yet, oldest first.
    """

    row: int
    shift: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    unfinished: list[CacheStep] = field(default_factory=list)
