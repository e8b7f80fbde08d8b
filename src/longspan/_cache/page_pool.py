"""Free pages and reference counts, on the host."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPages(RuntimeError):
    """Raised when a step needs more pages than are free. The cache is as it was before the step."""


class PagePool:
    """Pages 0 … pages − 1. A page has one reference per sequence that holds it; it is free at 0 references."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, -1, -1))  # a stack: pages freed last are taken first
        self._references = [0] * pages

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._references[page]

    def take(self) -> int:
        """A free page, now with one reference."""
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
