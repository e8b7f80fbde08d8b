"""Named layouts: deterministic partitions with even token counts for any length and any number of ranks."""

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan._balance.search import Demand
from longspan._plan.named_layouts import (
    contiguous,
    documents_of,
    from_owner,
    head_tail,
    per_document,
    round_robin,
    round_robin_owner,
    split,
    stack,
    unit_for,
)

sizes = st.tuples(st.integers(1, 5000), st.integers(1, 17))
KINDS = ("contiguous", "head_tail", "round_robin", "per_document")


def cut(length, seed):
    """Document lengths with the sum `length`, some of them zero."""
    at = torch.randint(0, length + 1, (seed % 9,), generator=torch.Generator().manual_seed(seed)).sort()[0]
    return torch.diff(at, prepend=torch.tensor([0]), append=torch.tensor([length])).tolist()


def heavy_somewhere(length, unit, seed):
    """A demand with random work in which every unit reads itself."""
    units = -(-length // unit)
    work = torch.randint(0, 1000, (units,), generator=torch.Generator().manual_seed(seed)).double()
    every_unit = torch.arange(units)
    return Demand(length=length, unit=unit, work=work, ptr=torch.arange(units + 1), first=every_unit, last=every_unit)


def units_of(layout, rank, unit):
    return tuple((layout.positions(rank)[::unit] // unit).tolist())


def make(kind, length, ranks, seed=0):
    if kind == "round_robin":
        return round_robin(heavy_somewhere(length, unit_for(length, ranks), seed), ranks)
    if kind == "per_document":
        return per_document(cut(length, seed), ranks)
    return {"contiguous": contiguous, "head_tail": head_tail}[kind](length, ranks)


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, seed=st.integers(0, 99))
@settings(max_examples=60)
def test_every_layout_is_a_partition_with_even_counts(kind, size, seed):
    length, ranks = size
    layout = make(kind, length, ranks, seed)
    assert layout.ranks == ranks
    everything = torch.cat([layout.positions(rank) for rank in range(ranks)])
    assert torch.equal(everything.sort()[0], torch.arange(length))
    counts = [layout.local_len(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= (1 if kind == "per_document" else unit_for(length, ranks))
    for rank in range(ranks):
        assert bool((layout.positions(rank).diff() > 0).all())
    assert make(kind, length, ranks, seed) == layout


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, seeds=st.lists(st.integers(0, 99), min_size=2, max_size=4))
@settings(max_examples=40)
def test_layouts_of_one_name_can_be_stacked(kind, size, seeds):
    length, ranks = size
    rows = [make(kind, length, ranks, seed) for seed in seeds]
    joined = stack(rows)
    assert joined.rows == tuple(row.rows[0] for row in rows)


@given(size=sizes)
def test_a_unit_is_the_largest_power_of_two_with_four_units_and_a_fair_share_per_rank(size):
    length, ranks = size

    def fits(unit):
        largest = ceil(ceil(length / unit) / ranks) * unit
        return length >= 4 * ranks * unit and largest * ranks <= 1.05 * length

    unit = unit_for(length, ranks)
    assert unit in (1, 2, 4, 8, 16, 32, 64, 128)
    assert unit == 1 or fits(unit)
    assert unit == 128 or not fits(2 * unit)


def test_long_sequences_have_units_of_128():
    assert unit_for(1_000_003, 48) == 128


def test_contiguous_is_one_range_per_rank():
    layout = contiguous(3000, 5)
    assert all(len(layout.segments(rank)) == 1 for rank in range(5))
    assert [layout.segments(rank)[0][0] for rank in range(5)] == sorted(layout.segments(rank)[0][0] for rank in range(5))


def test_head_tail_gives_rank_i_chunk_i_and_the_opposite_chunk():
    layout = head_tail(8 * 256, 4)
    assert [layout.segments(rank) for rank in range(4)] == [
        ((0, 256), (1792, 256)),
        ((256, 256), (1536, 256)),
        ((512, 256), (1280, 256)),
        ((768, 512),),
    ]


def test_cuts_are_at_multiples_of_the_unit():
    assert [contiguous(100, 3, unit=10).local_len(rank) for rank in range(3)] == [30, 30, 40]
    assert all(start % 20 == 0 for rank in range(3) for start, _ in head_tail(500, 3, unit=20).segments(rank))


def test_round_robin_deals_heavy_units_in_a_snake_order():
    work = torch.tensor([1.0, 9.0, 3.0, 8.0, 2.0, 7.0])
    every_unit = torch.arange(6)
    layout = round_robin(Demand(length=6 * 4, unit=4, work=work, ptr=torch.arange(7), first=every_unit, last=every_unit), 3)
    assert {units_of(layout, rank, 4) for rank in range(3)} == {(0, 1), (3, 4), (2, 5)}


def test_round_robin_keeps_the_order_of_units_with_equal_work():
    every_unit = torch.arange(7)
    layout = round_robin(Demand(length=7 * 2, unit=2, work=torch.ones(7), ptr=torch.arange(8), first=every_unit, last=every_unit), 2)
    assert [units_of(layout, rank, 2) for rank in range(2)] == [(0, 3, 4), (1, 2, 5, 6)]


def test_long_documents_are_cut_head_tail_each():
    layout = per_document([8 * 128, 16 * 128], 2)
    assert layout.segments(0) == ((0, 256), (768, 512 + 256), (2560, 512))
    assert layout.segments(1) == ((256, 512), (1536, 1024))


def test_cuts_inside_long_documents_are_at_multiples_of_the_unit():
    lengths, ranks = [5003, 7001, 911], 3
    layout = per_document(lengths, ranks)
    edges = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    inside = {start for rank in range(ranks) for start, _ in layout.segments(rank)} - edges
    unaligned = [start for start in inside if start % 128 and start < 12004]
    assert len(unaligned) <= ranks  # where a rank has its share, a piece is cut


def test_every_rank_has_a_share_of_every_long_document():
    lengths, ranks = [3001, 2003, 4099], 5
    layout = per_document(lengths, ranks)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    for rank in range(ranks):
        tokens = torch.bincount(document[layout.positions(rank)], minlength=3)
        assert all(abs(int(tokens[i]) - lengths[i] / ranks) <= 128 for i in range(3))


def test_negative_document_lengths_raise():
    with pytest.raises(ValueError, match="0 or more, got -3"):
        per_document([5, -3], 2)


@pytest.mark.parametrize(("length", "ranks"), [(0, 3), (7, 0), (-1, 2)])
def test_sizes_below_one_raise(length, ranks):
    for layout in (contiguous, head_tail):
        with pytest.raises(ValueError, match="1 or more"):
            layout(length, ranks)


def test_an_owner_per_unit_is_a_layout():
    layout = from_owner(torch.tensor([1, 1, 0, 1, 2]), length=43, unit=10, ranks=4)
    assert layout.rows == ((((20, 10),), ((0, 20), (30, 10)), ((40, 3),), ()),)


@pytest.mark.parametrize("owner", [[0, 1, 2], [0, 1], [0, 1, -1]])
def test_owners_of_the_wrong_shape_raise(owner):
    with pytest.raises(ValueError, match=r"expected 3 owners in 0 … 1"):
        from_owner(torch.tensor(owner), length=25, unit=10, ranks=2)


def test_documents_of_masks_and_conjunctions_are_detected():
    lengths = [5, 1, 7]
    assert documents_of(ls.documents(lengths)) == [lengths]
    assert documents_of(ls.causal() & ls.documents(lengths) & ls.sliding_window(3)) == [lengths]


def test_documents_per_batch_row_and_padding_are_separate():
    ids = [[4, 4, 4, 1, 1, -1, -1], [2, 2, 9, 9, 9, 9, 9]]
    assert documents_of(ls.causal() & ls.documents(ids=ids)) == [[3, 2, 2], [2, 5]]
    assert documents_of(ls.documents([[3, 2], [6, 1]])) == [[3, 2, 2], [6, 1]]


def test_two_kinds_of_documents_cut_each_other():
    assert documents_of(ls.documents([4, 5]) & ls.documents([2, 6, 1])) == [[2, 2, 4, 1]]


@pytest.mark.parametrize(
    "mask", [ls.causal(), ls.causal() | ls.documents([3, 4]), ~ls.documents([3, 4]), ls.mask_mod(lambda b, h, q, k: q > k)]
)
def test_other_masks_have_no_documents(mask):
    assert documents_of(mask) is None


def test_stacking_layouts_of_different_sizes_raises():
    with pytest.raises(ValueError, match="got none"):
        stack([])
    with pytest.raises(ValueError, match="number 1 with 1 rows, 13 tokens, 2 ranks"):
        stack([contiguous(12, 2), contiguous(13, 2)])
    with pytest.raises(ValueError, match="equally many tokens of each row"):
        stack([contiguous(301, 2), head_tail(301, 2)])


def test_documents_by_row_and_documents_of_all_rows_combine():
    """The edges of both masks, in either order, with ids [S] and [B, S]."""
    shared, by_row = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.tensor([[5, 5, 6, 6, 6, 6, 6], [5, 5, 5, 5, 5, 6, 6], [5] * 7])
    for a, b in ((shared, by_row), (by_row, shared)):
        assert documents_of(ls.documents(ids=a) & ls.causal() & ls.documents(ids=b)) == [[2, 1, 4], [3, 2, 2], [3, 4]]


@pytest.mark.parametrize(("length", "ranks", "unit"), [
    (1, 1, 1), (7, 2, 1), (511, 1, 64), (512, 1, 128), (1023, 2, 64), (1024, 2, 128), (3072, 3, 128), (5, 9, 1), (100000, 7, 128),
    (1537, 3, 16),  # four units of 128 per rank, but one rank would own a quarter more than its share
    (1664, 3, 64), (2560, 3, 128),  # 1.05 times the share of a rank
])  # fmt: skip
def test_units_of_some_sizes(length, ranks, unit):
    assert unit_for(length, ranks) == unit


def test_short_documents_and_remainders_go_in_pieces_to_the_ranks_with_fewest_tokens():
    assert per_document([300, 50, 0, 700, 33, 9], 2).rows == (
        (((0, 64), (192, 108), (350, 162), (752, 16), (896, 196)), ((64, 128), (300, 50), (512, 240), (768, 128))),
    )
    assert per_document([2100, 1300], 3).rows == (
        (
            ((0, 256), (768, 128), (1152, 128), (1792, 256), (2176, 128), (2816, 110), (3200, 128)),
            ((256, 256), (896, 128), (1536, 256), (2048, 52), (2304, 128), (2560, 128), (2926, 18), (3072, 128), (3328, 39)),
            ((512, 256), (1024, 128), (1280, 256), (2100, 76), (2432, 128), (2688, 128), (2944, 128), (3367, 33)),
        ),
    )
    # Blocks of 128 are just short enough for the document of 512 tokens, which begins inside one.
    assert per_document([64, 512], 2).rows == ((((0, 16), (48, 80), (256, 128), (512, 64)), ((16, 32), (128, 128), (384, 128))),)
    # The document of 20 tokens holds the multiple 16 of the finest cell and no whole cell: one piece.
    assert per_document([6, 20, 2000], 2).rows == (
        (((0, 6), (26, 486), (1024, 128), (1536, 384), (2017, 9)), ((6, 20), (512, 512), (1152, 384), (1920, 97))),
    )
    # All are short. Of ranks that miss equally many tokens, the one with the least causal work is next.
    assert per_document([6] * 9, 4).rows == (
        (
            tuple((start, 2) for start in range(0, 54, 8)),
            tuple((start, 2) for start in range(2, 54, 8)),
            ((4, 2), (14, 2), (22, 2), (30, 2), (38, 2), (46, 2), (53, 1)),
            ((6, 2), (12, 2), (20, 2), (28, 2), (36, 2), (44, 2), (52, 1)),
        ),
    )


def test_the_last_rank_gets_a_short_last_unit_for_a_unit_of_similar_work():
    owners = lambda *work: [round_robin_owner(torch.tensor(work), 3, short_last=short).tolist() for short in (False, True)]
    assert owners(9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.5) == [[2, 1, 0, 0, 1, 2, 2]] * 2
    assert owners(9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 6.5) == [[2, 1, 0, 1, 2, 2, 0], [2, 1, 0, 1, 0, 2, 2]]  # for 5 of 9, 5 and 4
    assert owners(9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 8.5) == [[2, 0, 0, 1, 2, 2, 1], [1, 0, 0, 1, 2, 2, 2]]  # for 9


def test_a_rank_is_split_into_ranges_of_whole_units_for_its_members():
    assert split(contiguous(2000, 2), [[0, 3, 1], [2, 4]]).rows == (
        (((0, 352),), ((704, 320),), ((1024, 512),), ((352, 352),), ((1536, 464),)),
    )
    assert split(head_tail(50, 2), [[1], [0, 2]]).rows == ((((12, 12),), ((0, 12), (36, 14)), ((24, 12),)),)


def test_errors_name_length_and_ranks_in_this_order():
    expected = "expected a length and a number of ranks of 1 or more, got length -7, ranks 3"
    demand = Demand(length=-7, unit=4, work=torch.ones(1), ptr=torch.arange(2), first=torch.zeros(1), last=torch.zeros(1))
    for make_layout in (
        lambda: unit_for(-7, 3), lambda: contiguous(-7, 3, unit=4), lambda: head_tail(-7, 3, unit=4), lambda: round_robin(demand, 3),
        lambda: contiguous(-7, 3), lambda: head_tail(-7, 3),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            make_layout()
    with pytest.raises(ValueError, match="got length 0, ranks 3"):
        per_document([0, 0], 3)
    with pytest.raises(ValueError, match="got length 3, ranks -1"):
        per_document([3], -1)
    with pytest.raises(ValueError, match="of 12 tokens over 2 ranks, got number 1 with 1 rows, 12 tokens, 3 ranks"):
        stack([contiguous(12, 2), contiguous(12, 3)])
    two_rows = stack([contiguous(12, 2)] * 2)
    with pytest.raises(ValueError, match="of 12 tokens over 2 ranks, got number 2 with 2 rows, 12 tokens, 2 ranks"):
        stack([contiguous(12, 2), contiguous(12, 2), two_rows])
