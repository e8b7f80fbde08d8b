"""The pages that a step takes from the pool for its sequences, on the host."""

from __future__ import annotations

from typing import NamedTuple

from longspan._cache.page_pool import OutOfPages, PagePool
from longspan._cache.sequence import CachedSequence


class WantedPages(NamedTuple):
    """Pages that a sequence needs for new tokens: `more` pages, and one to copy its last page to, which others share, if `copies_last`."""

    sequence: CachedSequence
    more: int
    copies_last: bool


class TakenPages(NamedTuple):
    """Pages that a step takes for one sequence: from column `first` on, and the copy of the last page before, if it is shared."""

    first: int
    shared: int | None
    copy: int | None


class PageAccounts:
    """Counts, takes and gives back pages of sequences."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size

    def pages_of(self, tokens: int) -> int:
        """Number of pages of so many tokens."""
        return -(-tokens // self._page_size)

    def wanted(self, sequences: list[CachedSequence], counts: list[int]) -> list[WantedPages]:
        """The pages that each sequence needs for `counts` new tokens."""
        copied = self._rows_to_copy(sequences, counts)
        return [
            WantedPages(s, self.pages_of(s.length + count) - len(s.pages), s.row in copied)
            for s, count in zip(sequences, counts, strict=True)
        ]  # fmt: skip

    def needed(self, wanted: list[WantedPages]) -> list[int]:
        """Number of new pages and copies of each rank."""
        needed = [0] * self._pool.ranks
        for sequence, more, copies_last in wanted:
            for column in range(len(sequence.pages) - copies_last, len(sequence.pages) + more):
                needed[self._owner(sequence, column)] += 1
        return needed

    def check_room(self, wanted: list[WantedPages], tokens: int) -> None:
        """Raise OutOfPages unless every rank has a free page for each of its new pages and copies."""
        for rank, count in enumerate(self.needed(wanted)):
            if count > self._pool.free(rank):
                where = f" on rank {rank}" if self._pool.ranks > 1 else ""
                raise OutOfPages(
                    f"step: expected {count} free pages{where} for {tokens} new tokens, got {self._pool.free(rank)}; "
                    "free or truncate sequences, or add pages with cache.grow"
                )

    def take(self, wanted: WantedPages) -> TakenPages:
        """Take the pages that a sequence wants."""
        sequence, shared, copy = wanted.sequence, None, None
        if wanted.copies_last:
            shared, copy = sequence.pages[-1], self._pool.take(self._owner(sequence, len(sequence.pages) - 1))
            self._pool.release([shared])
            sequence.pages[-1] = copy
        first = len(sequence.pages)
        for column in range(first, first + wanted.more):
            sequence.pages.append(self._pool.take(self._owner(sequence, column)))
        return TakenPages(first, shared, copy)

    def give_back(self, sequence: CachedSequence, taken: TakenPages) -> None:
        """Undo `take`."""
        self._pool.release(sequence.pages[taken.first :])
        del sequence.pages[taken.first :]
        if taken.shared is not None and taken.copy is not None:
            sequence.pages[-1] = taken.shared
            self._pool.share([taken.shared])
            self._pool.release([taken.copy])

    def _owner(self, sequence: CachedSequence, column: int) -> int:
        """The rank that holds a page of a sequence: pages go round the ranks, from another rank on for each new sequence."""
        return (column + sequence.shift) % self._pool.ranks

    def _rows_to_copy(self, sequences: list[CachedSequence], counts: list[int]) -> set[int]:
        """Rows of the sequences whose last page is shared and will be written to. The last holder of a page writes to it in place."""
        rows: set[int] = set()
        leaving: dict[int, int] = {}
        for sequence, count in zip(sequences, counts, strict=True):
            if count and sequence.length % self._page_size:
                page = sequence.pages[-1]
                if self._pool.references(page) - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    rows.add(sequence.row)
        return rows
