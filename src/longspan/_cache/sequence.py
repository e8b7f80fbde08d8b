"""One sequence of the cache, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan._cache.step import CacheStep

RELEASED = -1


@dataclass(kw_only=True, eq=False)
class CachedSequence:
    """Pages and length of a sequence.

    Attributes:
        row: Its row of the page table.
        shift: Page i of the sequence belongs to rank (i + shift) % ranks.
        pages: Page of each `page_size` tokens, in order, as the pool numbers them; RELEASED for the first `released` pages.
        released: Number of pages given back because their tokens are before the cache's window.
        length: Number of tokens, those of unfinished steps included.
        unfinished: Steps that some layer has not written yet, oldest first.
    """

    row: int
    shift: int
    pages: list[int] = field(default_factory=list)
    released: int = 0
    length: int = 0
    unfinished: list[CacheStep] = field(default_factory=list)

    @property
    def held_pages(self) -> list[int]:
        """The pages that the sequence holds."""
        return self.pages[self.released :]

    def release_first(self, count: int) -> list[int]:
        """Mark the first `count` pages as released, and return the pages that were held until now."""
        pages = self.pages[self.released : count]
        self.pages[self.released : count] = [RELEASED] * len(pages)
        self.released += len(pages)
        return pages
