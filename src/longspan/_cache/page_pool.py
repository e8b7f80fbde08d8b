"""Free pages and reference counts, on the host."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPages(RuntimeError):
    """Raised when a step needs more pages than are free. The cache is as it was before the step."""


class PagePool:
    """`pages` pages of each rank. Page number n is page n // ranks of rank n % ranks.

    A page has one reference per sequence that holds it; it is free at 0 references.
    """

    def __init__(self, pages: int, ranks: int) -> None:
        self.ranks = ranks
        self._free: list[list[int]] = [[] for _ in range(ranks)]  # stacks: pages freed last are taken first
        self._references: list[int] = []
        self.grow(pages)

    def grow(self, pages: int) -> None:
        """Add so many free pages to every rank."""
        first = len(self._references)
        self._references += [0] * (pages * self.ranks)
        for rank, free in enumerate(self._free):
            free[:0] = range(first + pages * self.ranks - self.ranks + rank, first - 1, -self.ranks)

    def free(self, rank: int) -> int:
        """Number of free pages of a rank."""
        return len(self._free[rank])

    @property
    def free_of_all(self) -> int:
        """Number of free pages of all ranks."""
        return sum(map(len, self._free))

    def owner(self, page: int) -> int:
        """The rank that a page belongs to."""
        return page % self.ranks

    def local(self, page: int) -> int:
        """The page's number on its rank."""
        return page // self.ranks

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
                self._free[page % self.ranks].append(page)
