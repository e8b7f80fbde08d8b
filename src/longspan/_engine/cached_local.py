"""A rank's part of decoding over a mesh, by the decode kernel: its pages of each sequence are a sequence of their own.

    page of a sequence     0 1 2 3 4 5 6 7 …      of rank 1 of 3: 1 4 7 …, columns 0 1 2 … of a page table of its own
    its queries            at the end of the sequence; the rank's programs convert positions (`_masks.local_positions`)

More than FEW_QUERIES queries of a sequence are several such sequences, which share pages. Legend as in `longspan._kernels.paged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._cache.step import tokens_first
from longspan._engine.cached_prepared import split_kernel
from longspan._engine.cached_tokens import StepQueries
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges, SpreadPages
from longspan._masks.local_positions import LocalSequences, local_program, local_trace

_MIN_WIDTH = 16  # of a local page table
_ALIGNED = 4  # int32 elements: kernels are compiled again for addresses that are not divisible by 16


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStep:
    """Local sequences of a step.

    Attributes:
        ranges: Their queries, in local tokens: starts (negative where there are fewer local keys than queries) and lengths; rows of
            `table`. positions and token_rows are empty: the kernel does not read them.
        first_tokens: Index of the first query of each among all T new tokens. `ranges.firsts` counts those of local sequences alone.
        sequences: What programs need to know about them.
        table: Their pages, one row each.
        later: Largest number of tokens from the first query of a local sequence to the end of its whole sequence, that query included.
    """

    ranges: QueryRanges
    first_tokens: tuple[int, ...]
    sequences: LocalSequences
    table: Tensor
    later: int


def attend_local(queries: StepQueries, pages: PagedKV, work: PagedWork, indices: Sequence[int], kernel: str) -> tuple[Tensor, Tensor]:
    """(out [1, H, T, E], lse [1, H, T]) in float32 of the new tokens of some sequences over the pages of this rank, without sinks.

    Rows of other sequences are not initialised.
    """
    from longspan._kernels.triton.decode_call import Queries, attend_pages

    step = queries.step
    local = step.derived(("local", tuple(indices)), partial(local_step, step.ranges, tuple(indices), pages.table))
    q = tokens_first(queries.q).transpose(0, 1)[None]
    local_pages = replace(pages, table=local.table)
    by = split_kernel(q, local_pages, kernel)
    work = local_work(work, local.sequences, step.ranges.spread, local.later)
    out, lse = attend_pages(Queries(q, local.ranges, True, None, by), local_pages, work, dtype=torch.float32)
    for first, count, length in zip(local.first_tokens, local.ranges.counts, local.ranges.lengths, strict=True):
        if not length:  # the kernel leaves these rows as they are
            out[:, :, first : first + count] = 0
            lse[:, :, first : first + count] = -torch.inf
    return out, lse


def local_programs(work: PagedWork, spread: SpreadPages) -> PagedWork:
    """`work` with the programs that `attend_local` compiles, to check that they compile; the captured tensors are those of the others."""
    mask, score = (
        None if program is None else local_trace(program, spread.ranks, spread.page_size).program for program in (work.mask, work.score)
    )  # fmt: skip
    return replace(work, mask=mask, score=score)


def local_work(work: PagedWork, sequences: LocalSequences, spread: SpreadPages | None, later: int) -> PagedWork:
    """`work` without the sink, in positions of local sequences."""
    assert spread is not None
    convert = partial(local_program, sequences=sequences, ranks=spread.ranks, page_size=spread.page_size)
    mask, mask_captured = (None, []) if work.mask is None else convert(work.mask, work.mask_captured)
    score, score_captured = (None, []) if work.score is None else convert(work.score, work.score_captured)
    window = None if work.window is None else local_window(work.window, spread, later)
    return PagedWork(
        scale=work.scale, mask=mask, mask_captured=mask_captured, score=score, score_captured=score_captured, sink=None, window=window,
        scales=work.scales,
    )  # fmt: skip


def local_window(window: int, spread: SpreadPages, later: int) -> int:
    """A window of local tokens that has every local key in a window of tokens. later: as in `LocalStep`.

    A query sees at most max(window, 1) − 1 tokens before itself, and `later` tokens come from itself on.
    """
    seen = max(window, 1) - 1 + later
    if later > FEW_QUERIES:  # of a chunk: rounded up, so that kernels are compiled for few different windows
        seen = 1 << (seen - 1).bit_length()
    most_pages = (seen + spread.page_size - 2) // spread.page_size + 1
    return -(-most_pages // spread.ranks) * spread.page_size


class _LocalSequence(NamedTuple):
    """row, batch: of the whole sequence. start, length: in local tokens. token: of the first query among all T."""

    row: int
    batch: int
    start: int
    length: int
    token: int
    query_offset: int
    key_offset: int


def local_step(ranges: QueryRanges, indices: tuple[int, ...], table: Tensor) -> LocalStep:
    """The local sequences of some sequences of a step. `table`: the page table."""
    spread = ranges.spread
    assert spread is not None
    made: list[_LocalSequence] = []
    later = 0
    for i in indices:
        length, key_offset = spread.local_length(i, ranges.lengths[i]), spread.first_page(i) * spread.page_size
        for start in range(ranges.starts[i], ranges.lengths[i], FEW_QUERIES):
            local_start = length - min(FEW_QUERIES, ranges.lengths[i] - start)
            token = ranges.firsts[i] + start - ranges.starts[i]
            made.append(_LocalSequence(ranges.rows[i], i, local_start, length, token, start - local_start, key_offset))
            later = max(later, ranges.lengths[i] - start)
    n = len(made)
    host = torch.zeros((len(_LocalSequence._fields), -(-n // _ALIGNED) * _ALIGNED), dtype=torch.int32, device="cpu")
    host[:, :n] = torch.tensor(made, dtype=torch.int32, device="cpu").view(n, -1 if n else len(host)).T
    if table.is_cuda:
        host = host.pin_memory()
    rows, batch, starts, lengths, tokens, query_offsets, key_offsets = host.to(table.device, non_blocking=True)[:, :n]
    most_pages = max((-(-one.length // spread.page_size) for one in made), default=1)
    width = max(_MIN_WIDTH, 1 << max(0, most_pages - 1).bit_length())  # launches know it: few different ones while sequences grow
    columns = torch.arange(width, device=table.device) * spread.ranks
    columns = columns + key_offsets[:, None] // spread.page_size
    columns.clamp_(max=table.shape[1] - 1)  # of shorter sequences: past their last page
    empty = torch.empty(0, dtype=torch.int64, device=table.device)
    local = QueryRanges(
        starts=tuple(one.start for one in made),
        lengths=tuple(one.length for one in made),
        rows=tuple(range(n)),
        device_ranges=torch.stack([torch.arange(n, dtype=torch.int32, device=table.device), starts, lengths, tokens]),
        positions=empty,
        token_rows=empty,
    )
    return LocalStep(
        ranges=local, first_tokens=tuple(one.token for one in made), sequences=LocalSequences(batch, query_offsets, key_offsets),
        table=table[rows[:, None], columns], later=later,
    )  # fmt: skip
