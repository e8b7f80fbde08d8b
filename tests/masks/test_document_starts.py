"""Document starts read from mask programs, and blocks counted from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._masks.algebra import as_mask
from longspan._masks.document_starts import _starts_of_first, block_edges, document_starts

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
