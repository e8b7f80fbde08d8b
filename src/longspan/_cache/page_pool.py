"""Free pages and reference counts, on the host."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPages(RuntimeError):
    """Raised when a step needs more pages than are free. The cache is as it was before the step."""


class PagePool:
    """`pages` pages of each rank. Page number n is page n % pages of rank n // pages.

    A page has one reference per sequence that holds it; it is free at 0 references.
    """

    def __init__(self, pages: int, ranks: int = 1) -> None:
        self._pages = pages
        # Stacks: pages freed last are taken first.
        self._free = [list(range((rank + 1) * pages - 1, rank * pages - 1, -1)) for rank in range(ranks)]
        self._references = [0] * (pages * ranks)

    def free(self, rank: int) -> int:
        """Number of free pages of a rank."""
        return len(self._free[rank])

    @property
    def free_of_all(self) -> int:
        """Number of free pages of all ranks."""
        return sum(map(len, self._free))

    def owner(self, page: int) -> int:
        """The rank that a page belongs to."""
        return page // self._pages

    def local(self, page: int) -> int:
        """The page's number on its rank."""
        return page % self._pages

    def references(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._references[page]

    def take(self, rank: int) -> int:
        """A free page of a rank, now with one reference."""
        page = self._free[rank].pop()
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
                self._free[page // self._pages].append(page)
