"""Layouts: partitions of a sequence with equally many tokens per rank in every batch row."""

import pickle

import pytest
import torch

from longspan._plan.layout import Layout

TWO_RANKS = Layout(length=11, rows=((((0, 3), (7, 4)), ((3, 4),)),))


def test_segments_positions_and_lengths_agree():
    assert TWO_RANKS.ranks == 2
    assert TWO_RANKS.segments(0) == ((0, 3), (7, 4))
    assert [TWO_RANKS.local_len(rank) for rank in range(2)] == [7, 4]
    assert TWO_RANKS.positions(0).tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert TWO_RANKS.positions(1).tolist() == [3, 4, 5, 6]


def test_positions_follow_the_local_order_not_the_global_one():
    layout = Layout(length=9, rows=((((6, 3), (0, 2)), ((2, 4),)),))
    assert layout.positions(0).tolist() == [6, 7, 8, 0, 1]


def test_a_rank_may_own_nothing():
    layout = Layout(length=5, rows=((((0, 5),), ()),))
    assert layout.local_len(1) == 0
    assert layout.positions(1).dtype == torch.int64 and layout.positions(1).shape == (0,)


def test_batch_rows_may_differ():
    layout = Layout(length=7, rows=((((0, 4),), ((4, 3),)), (((3, 4),), ((0, 3),))))
    assert layout.positions(0).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert layout.segments(1, row=1) == ((0, 3),)


def test_one_row_serves_every_batch_row():
    assert TWO_RANKS.segments(1, row=5) == ((3, 4),)


def test_a_merged_rank_owns_its_members_segments():
    layout = Layout(length=10, rows=((((0, 2),), ((2, 3),), ((5, 1),), ((6, 4),)),))
    assert layout.merged([[0, 3], [2, 1]]).rows == ((((0, 2), (6, 4)), ((5, 1), (2, 3))),)


def test_equal_layouts_have_equal_digests_and_survive_pickling():
    again = pickle.loads(pickle.dumps(TWO_RANKS))
    assert again == TWO_RANKS and again.digest == TWO_RANKS.digest
    other = Layout(length=11, rows=((((0, 3), (7, 4)), ((3, 3), (6, 1))),))
    assert other.digest != TWO_RANKS.digest


@pytest.mark.parametrize(
    ("length", "rows", "why"),
    [
        (0, ((((0, 1),),),), "length and a number of ranks of 1 or more"),
        (6, (), "length and a number of ranks of 1 or more"),
        (6, ((),), "length and a number of ranks of 1 or more"),
        (6, ((((0, 2),), ((3, 3),)),), "belong to nobody"),
        (6, ((((0, 4),), ((3, 3),)),), "belong to two segments"),
        (6, ((((0, 6), (6, 0)),),), "belong to two segments"),
        (6, ((((0, 5),),),), "expected segments up to token 6, got them up to 5"),
        (6, ((((0, 4),), ((4, 2),)), (((0, 6),),)), "expected 2 ranks in every batch row, got 1 in row 1"),
        (6, ((((0, 4),), ((4, 2),)), (((0, 3),), ((3, 3),))), "equally many tokens of each row"),
    ],
)
def test_segments_that_are_no_partition_raise(length, rows, why):
    with pytest.raises(ValueError, match=why):
        Layout(length=length, rows=rows)


def test_blocks_of_a_rank_are_listed_by_first_appearance():
    layout = Layout(length=30, rows=((((17, 6), (2, 7), (25, 5)), ((0, 2), (9, 8), (23, 2)), ()),))
    assert [layout.blocks(rank, 4).tolist() for rank in range(3)] == [[4, 5, 0, 1, 2, 6, 7], [0, 2, 3, 4, 5, 6], []]
    assert layout.blocks(0, 10).tolist() == [1, 2, 0]


@pytest.mark.parametrize(("length", "rows", "why"), [
    (0, ((((0, 1),),),), "got length 0, rows 1"),
    (5, ((((0, 3),), ((4, 1),)),), r"batch row 0: tokens from 3 on belong to nobody; segment \(4, 1\)"),
    (5, ((((1, 4),),),), r"batch row 0: tokens from 0 on belong to nobody; segment \(1, 4\)"),
    (5, ((((0, 5),),), (((0, 3), (2, 3)),)), r"batch row 1: tokens from 2 on belong to two segments; segment \(2, 3\)"),
    (5, ((((0, 5),),), (((0, 5), (5, 1)),)), "batch row 1: expected segments up to token 5, got them up to 6"),
    (6, ((((0, 4),), ((4, 2),)), (((0, 3),), ((3, 3),))), "rank 0 owns 3 tokens of batch row 1 and 4 of row 0"),
    (6, ((((0, 3),), ((3, 2),), ((5, 1),)), (((0, 3),), ((3, 1),), ((4, 2),))), "rank 1 owns 1 tokens of batch row 1 and 2 of row 0"),
])  # fmt: skip
def test_errors_name_the_tokens_and_ranks(length, rows, why):
    with pytest.raises(ValueError, match=why):
        Layout(length=length, rows=rows)
