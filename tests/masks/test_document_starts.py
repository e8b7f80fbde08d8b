"""Document starts read from mask programs, and blocks counted from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._masks.algebra import as_mask
from longspan._masks.document_starts import _runs, _starts_of_first, block_edges, document_starts

IDS = torch.tensor([0, 0, 0, 4, 4, 1, 1, 1])


def starts(mask: Any, length: int = 8, batch: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    traced = as_mask(mask).traced
    got = document_starts(traced.program, traced.captured(), length, length, batch)
    return [t.tolist() for t in got.q], [t.tolist() for t in got.kv]


@pytest.mark.parametrize(
    "mask",
    [
        ls.documents([3, 2, 3]),
        ls.causal() & ls.documents([3, 2, 3]),
        ls.documents([3, 2, 3]) & ls.sliding_window(2),
        (ls.causal() | ls.prefix(2)) & ls.documents([3, 2, 3]),
        lambda b, h, q, kv: IDS[q] == IDS[kv],
        lambda b, h, q, kv: (IDS[kv] == IDS[q]) & (q >= kv),
    ],
)
def test_contiguous_documents_start_where_their_ids_change(mask: Any) -> None:
    assert starts(mask) == ([[0, 3, 5]], [[0, 3, 5]])


@pytest.mark.parametrize(
    "mask",
    [
        ls.causal(),
        ls.causal() | ls.documents([3, 2, 3]),
        ~ls.documents([3, 2, 3]),
        ls.documents(ids=[0, 1, 0, 1, 0, 1, 0, 1]),
        lambda b, h, q, kv: kv >= (q - 2).clamp(min=0),
        lambda b, h, q, kv: kv >= torch.tensor([0, 0, 0, 1, 2, 3, 4, 5])[q],
    ],
)
def test_other_masks_start_at_token_0_only(mask: Any) -> None:
    assert starts(mask) == ([[0]], [[0]])


def test_batch_rows_have_documents_of_their_own_and_padding_is_cut_off() -> None:
    assert starts(ls.causal() & ls.documents([[3, 5], [2, 4]]), batch=2)[1] == [[0, 3], [0, 2]]
    assert starts(ls.documents(ids=[-1, -1, 0, 0, 0, 1, 1, -1]))[1] == [[0, 2, 5]]


@pytest.mark.parametrize(("q_ids", "kv_ids"), [([0, 1, 0, 1], [0, 0, 1, 1]), ([0, 0, 1, 1], [0, 1, 0, 1])])
def test_documents_that_are_scattered_on_one_side_have_no_starts(q_ids: list[int], kv_ids: list[int]) -> None:
    queries, keys = torch.tensor(q_ids), torch.tensor(kv_ids)
    assert starts(lambda b, h, q, kv: queries[q] == keys[kv], length=4) == ([[0]], [[0]])


def test_blocks_are_counted_from_each_start() -> None:
    assert block_edges(torch.tensor([0, 3, 9]), 16, 4).tolist() == [0, 3, 7, 9, 13, 16]
    assert block_edges(torch.tensor([0]), 8, 4).tolist() == [0, 4, 8]
    assert block_edges(torch.tensor([0]), 0, 4).tolist() == [0]


@pytest.mark.parametrize("first", [[1, 1, 2, 3], [0, 1, 1, 0], [0, 0, 1, 3]], ids=["later", "returns", "of another document"])
def test_first_tokens_that_are_not_those_of_documents_in_order_have_no_starts(first: list[int]) -> None:
    assert _starts_of_first(torch.tensor(first)) is None


def test_first_tokens_outside_of_the_sequence_are_padding() -> None:
    q, kv = _starts_of_first(torch.tensor([-1, 1, 1, 3, 9, 9])) or ((), ())
    assert (q.tolist(), kv.tolist()) == ([0, 1, 3, 4], [1, 3])
    q, kv = _starts_of_first(torch.tensor([0, 0, 2, 2, 5])) or ((), ())
    assert (q.tolist(), kv.tolist()) == ([0, 2, 4], [0, 2])


@pytest.mark.parametrize("length", [1, 2, 9, 16, 17])
@pytest.mark.parametrize("block", [1, 3, 4, 16, 20])
def test_blocks_are_those_of_each_document_in_order(length: int, block: int) -> None:
    for starts_of_documents in ([0], [0, 1], [0, 3, 9, 16]):
        inside = [s for s in starts_of_documents if s < length]
        edges = [edge for s, end in zip(inside, [*inside[1:], length], strict=True) for edge in range(s, end, block)]
        assert block_edges(torch.tensor(starts_of_documents), length, block).tolist() == [*edges, length]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []), ([5], [0]), ([-1], [0]), ([0, 0, 3, 3, 1], [0, 2, 4]), ([0, 1, 0], None), ([-1, 0, -1, 1, -2], [0, 1, 2, 3, 4]),
        ([1, -1, 1], None), ([-1, -1, 4], [0, 2]), ([2, 2], [0]), ([0, -1, -1, 0], None),
    ],
)  # fmt: skip
def test_documents_of_one_range_each_start_where_ids_change(ids: list[int], expected: list[int] | None) -> None:
    got = _runs(torch.tensor(ids, dtype=torch.int64))
    assert (None if got is None else got.tolist()) == expected


LONG = torch.tensor([0, 0, 0, 4, 4, 1, 1, 1, 7, 7])
FIRST = torch.tensor([0, 0, 0, 3, 3, 5, 5, 5])
BY_ROW = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2, 2]])
HEADS = torch.zeros(1, 8, dtype=torch.int64)
ALL = ([[0]], [[0]])


@pytest.mark.parametrize(
    ("mask", "batch", "expected"),
    [
        # A longer table counts as far as the sequence reaches; a table of other ids for the queries.
        (lambda b, h, q, kv: LONG[q] == LONG[kv], 1, ([[0, 3, 5]], [[0, 3, 5]])),
        (lambda b, h, q, kv: BY_ROW[0][q] == IDS[kv], 1, ([[0, 2]], [[0, 3, 5]])),
        (lambda b, h, q, kv: IDS[kv] == BY_ROW[0][q], 1, ([[0, 2]], [[0, 3, 5]])),
        (lambda b, h, q, kv: IDS.int()[q].long() == IDS[kv].clone(), 1, ([[0, 3, 5]], [[0, 3, 5]])),
        # The first token of the document, on either side.
        (lambda b, h, q, kv: kv >= FIRST[q], 1, ([[0, 3, 5]], [[0, 3, 5]])),
        (lambda b, h, q, kv: FIRST[q] <= kv, 1, ([[0, 3, 5]], [[0, 3, 5]])),
        (lambda b, h, q, kv: torch.logical_and(FIRST[q] <= kv, q >= kv), 1, ([[0, 3, 5]], [[0, 3, 5]])),
        # Batch rows of their own, together with documents of all rows.
        (lambda b, h, q, kv: BY_ROW[b, q] == BY_ROW[b, kv], 2, ([[0, 2], [0, 5]], [[0, 2], [0, 5]])),
        (lambda b, h, q, kv: (BY_ROW[b, q] == BY_ROW[b, kv]) & (kv >= FIRST[q]), 2, ([[0, 2, 3, 5], [0, 3, 5]],) * 2),
        (lambda b, h, q, kv: BY_ROW[b, q] == IDS[kv], 2, ([[0, 2], [0, 5]], [[0, 3, 5], [0, 3, 5]])),
        (lambda b, h, q, kv: BY_ROW[b, q] == BY_ROW[b, kv], 1, ([[0, 2]], [[0, 2]])),
        # Anything else has no documents.
        (lambda b, h, q, kv: BY_ROW[b, q] == BY_ROW[b, kv], 3, ALL),
        (lambda b, h, q, kv: HEADS[h, q] == IDS[kv], 1, ALL),
        (lambda b, h, q, kv: IDS.float()[q] == IDS.float()[kv], 1, ALL),
        (lambda b, h, q, kv: (IDS > 2)[q] == (IDS > 2)[kv], 1, ALL),
        (lambda b, h, q, kv: IDS[q] == IDS[q], 1, ALL),
        (lambda b, h, q, kv: IDS[kv] == IDS[kv], 1, ALL),
        (lambda b, h, q, kv: IDS[q] == 0, 1, ALL),
        (lambda b, h, q, kv: IDS[q] != IDS[kv], 1, ALL),
        (lambda b, h, q, kv: kv > FIRST[q], 1, ALL),
        (lambda b, h, q, kv: kv <= FIRST[q], 1, ALL),
        (lambda b, h, q, kv: q >= FIRST[kv], 1, ALL),
        (lambda b, h, q, kv: IDS[(q - 1).clamp(min=0)] == IDS[kv], 1, ALL),
        (lambda b, h, q, kv: q == kv, 1, ALL),
    ],
)  # fmt: skip
def test_documents_are_read_from_the_conjuncts_of_a_mask(mask: Any, batch: int, expected: tuple[list[list[int]], list[list[int]]]) -> None:
    assert starts(mask, batch=batch) == expected


def test_tables_cover_queries_and_keys_of_their_own_lengths() -> None:
    def starts_of(mask: Any, q_len: int, kv_len: int) -> tuple[list[int], list[int]]:
        traced = as_mask(mask).traced
        got = document_starts(traced.program, traced.captured(), q_len, kv_len, 1)
        return got.q[0].tolist(), got.kv[0].tolist()

    def same_id(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return LONG[q] == IDS[kv]

    assert starts_of(same_id, 10, 8) == ([0, 3, 5, 8], [0, 3, 5])
    assert starts_of(same_id, 4, 6) == ([0, 3], [0, 3, 5])
    assert starts_of(same_id, 11, 8) == starts_of(same_id, 8, 9) == ([0], [0])
    assert starts_of(lambda b, h, q, kv: kv >= FIRST[q], 8, 7) == starts_of(lambda b, h, q, kv: kv >= FIRST[q], 7, 8) == ([0], [0])
    nothing = document_starts(None, (), 8, 8, 1)
    assert [t.tolist() for t in (*nothing.q, *nothing.kv)] == [[0], [0]]
