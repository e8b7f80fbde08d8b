"""A rank's part of decoding over a mesh, by the decode kernel: its pages of each sequence are a sequence of their own.

    page of a sequence     0 1 2 3 4 5 6 7 …      of rank 1 of 3: 1 4 7 …, columns 0 1 2 … of a page table of its own
    its queries            at the end of the sequence; the rank's programs convert positions (`_masks.local_positions`)

More than FEW_QUERIES queries of a sequence are several such sequences, which share pages. Legend as in `longspan._kernels.paged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from longspan._engine.cached_prepared import split_kernel
from longspan._engine.cached_tokens import StepQueries
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges, SpreadPages
from longspan._masks.local_positions import LocalSequences, local_program, local_trace

_ALIGNED = 4  # int32 elements: kernels are compiled again for addresses that are not divisible by 16


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStep:
    """Local sequences of a step.

    Attributes:
        ranges: Their queries; positions and rows count local tokens.
        sequences: What programs need to know about them.
        table: Their pages, one row each.
        tokens: Index of the first query of each among all T new tokens.
        later: Most tokens of a sequence after the first query of one of its local sequences, with that query.
    """

    ranges: QueryRanges
    tokens: tuple[int, ...]
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
    q = queries.q if queries.q.shape[0] == 1 else queries.q.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
    local_pages = replace(pages, table=local.table)
    by = split_kernel(q, local_pages, kernel)
    work = local_work(work, local.sequences, step.ranges.spread, local.later)
    out, lse = attend_pages(Queries(q, local.ranges, True, None, by), local_pages, work, dtype=torch.float32)
    for first, count, length in zip(local.tokens, local.ranges.counts, local.ranges.lengths, strict=True):
        if not length:
            out[:, :, first : first + count] = 0
            lse[:, :, first : first + count] = -torch.inf
    return out, lse


def local_programs(work: PagedWork, spread: SpreadPages) -> PagedWork:
    """`work` with the programs that `attend_local` compiles."""
    mask, score = (
        None if program is None else local_trace(program, spread.ranks, spread.page_size).program for program in (work.mask, work.score)
    )  # fmt: skip
    return replace(work, mask=mask, score=score)


def local_work(work: PagedWork, sequences: LocalSequences, spread: SpreadPages | None, later: int) -> PagedWork:
    """`work` without the sink, in positions of local sequences."""
    assert spread is not None
    move = partial(local_program, sequences=sequences, ranks=spread.ranks, page_size=spread.page_size)
    mask, mask_captured = (None, []) if work.mask is None else move(work.mask, work.mask_captured)
    score, score_captured = (None, []) if work.score is None else move(work.score, work.score_captured)
    window = None if work.window is None else local_window(work.window, spread, later)
    return PagedWork(
        scale=work.scale, mask=mask, mask_captured=mask_captured, score=score, score_captured=score_captured, sink=None, window=window
    )  # fmt: skip


def local_window(window: int, spread: SpreadPages, later: int) -> int:
    """A window of local tokens that has every local key in a window of tokens. later: as in `LocalStep`.

    A query sees at most max(window, 1) − 1 tokens before itself, and `later` tokens come from itself on.
    """
    seen = max(window, 1) - 1 + later
    if later > FEW_QUERIES:  # of a chunk: few different windows, for each of which a kernel is compiled
        seen = 1 << (seen - 1).bit_length()
    most_pages = (seen + spread.page_size - 2) // spread.page_size + 1
    return -(-most_pages // spread.ranks) * spread.page_size


def local_step(ranges: QueryRanges, indices: tuple[int, ...], table: Tensor) -> LocalStep:
    """The local sequences of some sequences of a step. `table`: the page table."""
    spread = ranges.spread
    assert spread is not None
    numbers: list[tuple[int, ...]] = []  # of each: row of the page table, batch index, first page, local start and length, token, offset
    later = 0
    for i in indices:
        length, first_page = spread.local_tokens(i, ranges.lengths[i]), spread.local_pages(i, 0, spread.ranks)[0]
        for start in range(ranges.starts[i], ranges.lengths[i], FEW_QUERIES):
            local_start = length - min(FEW_QUERIES, ranges.lengths[i] - start)  # negative if there are fewer local keys than queries
            token = ranges.firsts[i] + start - ranges.starts[i]
            numbers.append((ranges.rows[i], i, first_page, local_start, length, token, start - local_start))
            later = max(later, ranges.lengths[i] - start)
    n = len(numbers)
    host = torch.zeros((7, -(-n // _ALIGNED) * _ALIGNED), dtype=torch.int32, device="cpu")
    host[:, :n] = torch.tensor(numbers, dtype=torch.int32, device="cpu").view(n, 7).T
    if table.is_cuda:
        host = host.pin_memory()
    rows, batch, first_page, starts, lengths, tokens, offsets = host.to(table.device, non_blocking=True)[:, :n]
    most = max((one[4] for one in numbers), default=0)
    columns = torch.arange(max(1, -(-most // spread.page_size)), device=table.device) * spread.ranks
    columns = (columns + first_page[:, None]).clamp_(max=table.shape[1] - 1)  # of shorter sequences: past their last page
    empty = torch.empty(0, dtype=torch.int64, device=table.device)
    local = QueryRanges(
        starts=tuple(one[3] for one in numbers),
        lengths=tuple(one[4] for one in numbers),
        rows=tuple(range(n)),
        device_ranges=torch.stack([torch.arange(n, dtype=torch.int32, device=table.device), starts, lengths, tokens]),
        positions=empty,
        token_rows=empty,
    )
    return LocalStep(
        ranges=local, tokens=tuple(one[5] for one in numbers), sequences=LocalSequences(batch, offsets, first_page),
        table=table[rows[:, None], columns], later=later,
    )  # fmt: skip
