"""KV in pages: where the tokens of sequences lie, and the queries at their ends.

Legend: P pages of `page_size` tokens, G KV heads, H query heads, D key head dim, E value head dim; n sequences, T new tokens in all.
k [P, G, page_size, D], v [P, G, page_size, E]; q [n, H, count, D], or ragged [1, H, T, D].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._kernels.protocol import state_dtype
from longspan._masks.program import Program

FEW_QUERIES = 64  # most new tokens of a sequence that the decode kernels compute
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of FP8


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale in FP8, rounded to nearest. Finite elements are clamped to the range of FP8; inf and NaN become NaN."""
    x = x.to(state_dtype(x.dtype))
    return torch.where(x.isfinite(), (x * (1.0 / scale)).clamp(-_LARGEST, _LARGEST), torch.nan).to(FP8)


def indexable(x: Tensor) -> Tensor:
    """The tensor; an FP8 tensor as bytes, because not every indexing operation supports FP8."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


@dataclass(frozen=True, kw_only=True)
class SpreadPages:
    """Pages of sequences over ranks: page i of a sequence belongs to rank (i + shift) % ranks. `shifts`: one per sequence."""

    ranks: int
    rank: int
    shifts: tuple[int, ...]
    page_size: int

    def local_pages(self, index: int, first: int, stop: int) -> range:
        """The pages first … stop − 1 of a sequence that belong to this rank."""
        return range(first + (self.rank - self.shifts[index] - first) % self.ranks, stop, self.ranks)

    def first_page(self, index: int) -> int:
        """The first page of a sequence that belongs to this rank, whether the sequence has it or not."""
        return (self.rank - self.shifts[index]) % self.ranks

    def local_length(self, index: int, length: int) -> int:
        """How many of the first `length` tokens of a sequence belong to this rank."""
        pages = self.local_pages(index, 0, -(-length // self.page_size))
        missing = -length % self.page_size if pages and pages[-1] == (length - 1) // self.page_size else 0
        return len(pages) * self.page_size - missing


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryRanges:
    """The new tokens of a step: tokens starts[i] … lengths[i] − 1 of sequence i, which are queries and keys.

    Attributes:
        starts, lengths, rows: On the host, one per sequence; `rows`: of the page table.
        device_ranges: int32 [4, n]: row of the page table, start, length, and index of the first token among all T.
        positions: Position of each token in its sequence, int64 [T].
        token_rows: Row of the page table of each token, int64 [T].
        spread: How pages are spread over ranks; None for one rank.
        local_tokens: Indices of the tokens that this rank holds, int64; None for all.
        longest: Launches cover sequences of up to so many tokens, for CUDA graphs; None: of the present lengths.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    device_ranges: Tensor
    positions: Tensor
    token_rows: Tensor
    spread: SpreadPages | None = None
    local_tokens: Tensor | None = None
    longest: int | None = None

    @cached_property
    def counts(self) -> list[int]:
        """New tokens of each sequence."""
        return [length - start for start, length in zip(self.starts, self.lengths, strict=True)]

    @cached_property
    def firsts(self) -> list[int]:
        """Index of each sequence's first token among all tokens."""
        firsts, total = [], 0
        for count in self.counts:
            firsts.append(total)
            total += count
        return firsts


def query_ranges(
    starts: Sequence[int], lengths: Sequence[int], rows: Sequence[int], also: Sequence[Tensor], device: torch.device,
    spread: SpreadPages | None = None,
) -> tuple[QueryRanges, list[Tensor]]:  # fmt: skip
    """The ranges of a step, and the host tensors `also` (any shape, int64), on the device, by one copy that does not synchronise."""
    counts = [length - start for start, length in zip(starts, lengths, strict=True)]
    made = _token_lists if spread is None and sum(counts) <= _FEW_TOKENS else _token_tensors
    host, firsts, positions, token_rows, local = made(starts, counts, rows, spread)
    parts = [host, firsts, positions, token_rows, local, *also]
    joined = torch.cat([p.flatten() for p in parts])
    if device.type == "cuda":
        joined = joined.pin_memory()  # a copy from pageable memory would synchronise
    on_device = joined.to(device, non_blocking=True).split([p.numel() for p in parts])
    table_ranges, first_tokens, positions, token_rows, local, *rest = on_device
    ranges = QueryRanges(
        starts=tuple(starts),
        lengths=tuple(lengths),
        rows=tuple(rows),
        device_ranges=torch.cat([table_ranges, first_tokens]).int().view(4, -1),
        positions=positions,
        token_rows=token_rows,
        spread=spread,
        local_tokens=None if spread is None else local,
    )
    return ranges, [x.view(p.shape) for x, p in zip(rest, also, strict=True)]


_FEW_TOKENS = 256  # new tokens for which Python lists take less time than a dozen torch operations


def _token_lists(starts: Sequence[int], counts: list[int], rows: Sequence[int], spread: SpreadPages | None) -> list[Tensor]:
    """`_token_tensors` of few tokens on one rank, as views of one tensor."""
    n, total = len(counts), sum(counts)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    firsts = [0, *itertools.accumulate(counts)][:n]
    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    token_rows = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    joined = torch.tensor([*rows, *starts, *lengths, *firsts, *positions, *token_rows], dtype=torch.int64)
    return list(joined.split([3 * n, n, total, total, 0]))


def _token_tensors(starts: Sequence[int], counts: list[int], rows: Sequence[int], spread: SpreadPages | None) -> list[Tensor]:
    """int64: rows, starts and lengths of sequences; index of each sequence's first token; position and row of the page table of each token;
    indices of the tokens that this rank holds.
    """
    repeats, total = torch.tensor(counts, dtype=torch.int64), sum(counts)
    firsts = repeats.cumsum(0) - repeats
    host = torch.tensor([list(rows), list(starts)], dtype=torch.int64).view(2, -1)
    positions = host[1].repeat_interleave(repeats) + torch.arange(total) - firsts.repeat_interleave(repeats)
    local = torch.empty(0, dtype=torch.int64)
    if spread is not None:
        shifts = torch.tensor(spread.shifts, dtype=torch.int64).repeat_interleave(repeats)
        local = torch.nonzero((positions // spread.page_size + shifts) % spread.ranks == spread.rank)[:, 0]
    return [torch.cat([host.flatten(), host[1] + repeats]), firsts, positions, host[0].repeat_interleave(repeats), local]


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedKV:
    """Keys and values of one layer. `table` [rows, width], int32: page of each `page_size` tokens of a sequence.

    shared: v is k[..., :E], the same memory.
    scales: of FP8 pages: keys are k · scales[0], values v · scales[1]; None for other dtypes.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    shared: bool = False
    scales: tuple[float, float] | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.k, self.v

    def write(self, k: Tensor, v: Tensor, ranges: QueryRanges) -> None:
        """Write new tokens k [T, G, D] and v [T, G, E] at the positions of `ranges`; of these, the tokens that this rank holds."""
        rows, positions = ranges.token_rows, ranges.positions
        if ranges.local_tokens is not None:
            rows, positions, k, v = (x[ranges.local_tokens] for x in (rows, positions, k, v))
        if self.scales is not None:
            k, v = (indexable(to_fp8(x, scale)) for x, scale in zip((k, v), self.scales, strict=True))
        page = self.table[rows, positions // self.page_size]
        offset = positions % self.page_size
        indexable(self.k)[page, :, offset] = k
        if not self.shared:
            indexable(self.v)[page, :, offset] = v

    def gather(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(k [G, stop − start, D], v [G, stop − start, E]) of the tokens start … stop − 1 of the sequence in a row of the table, as pages
        hold them.
        """
        size = self.page_size
        pages, skip = self.table[row, start // size : -(-stop // size)], start % size
        return self._of_pages(pages, slice(skip, skip + stop - start))

    def gather_local(self, row: int, start: int, stop: int, columns: range) -> tuple[Tensor, Tensor, Tensor]:
        """(k [G, t, D], v [G, t, E], positions [t]) of the tokens start … stop − 1 in some pages of the sequence in a row of the table."""
        size, device = self.page_size, self.table.device
        column = torch.arange(columns.start, max(columns.start, columns.stop), columns.step, device=device)
        positions = (column[:, None] * size + torch.arange(size, device=device)).flatten()
        last = columns[-1] * size + size if columns else 0
        used = slice(max(0, start - columns.start * size), len(columns) * size - max(0, last - stop))
        pages = self.table[row, column]
        return *self._of_pages(pages, used), positions[used]

    def _of_pages(self, pages: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """(k [G, t, D], v [G, t, E]) of some of the tokens in pages [n]."""
        k, v = (indexable(x).transpose(0, 1).index_select(1, pages).flatten(1, 2)[:, tokens].view(x.dtype) for x in (self.k, self.v))
        return k, v


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedWork:
    """How scores over pages are computed. Programs read the sequence's index in the step as batch index, and positions in the sequence.

    Attributes:
        scale: Multiplies q·k before `score`, with scales[0] included.
        mask, score: Programs; None: every query sees its whole sequence, and scores stay as they are.
        mask_captured, score_captured: Tensors that the programs read, on the device of the queries.
        sink: A logit per query head [H], or None.
        window: Every visible pair has q − kv < window; None: no such bound. Tokens before the window are not read.
        scales: Of keys and values in pages (`PagedKV`).
    """

    scale: float
    mask: Program | None = None
    mask_captured: Sequence[Tensor] = ()
    score: Program | None = None
    score_captured: Sequence[Tensor] = ()
    sink: Tensor | None = None
    window: int | None = None
    scales: tuple[float, float] | None = None

    def first_key(self, start: int) -> int:
        """The first token that queries from `start` on can see."""
        return 0 if self.window is None else max(0, start - self.window + 1)
