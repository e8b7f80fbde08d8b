"""Demands, evaluations and the layout search: against brute force, and never worse than a named layout."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan._balance.demand import _TileSampler
from longspan._balance.lead_fill import lead_and_fill, structure_of
from longspan._balance.search import Demand, Evaluation, auto, candidates, choose, evaluate, pairs_per_row, preferred
from longspan._balance.swaps import Swapper
from longspan._masks.block_table import FULL, PARTIAL, BlockTable
from longspan._plan.named_layouts import contiguous, stack, unit_for, units_per_rank


def table_of(kinds, length, block):
    """A block table from kinds of tiles [batch, heads, T, T]."""
    batch, heads, tiles, _ = kinds.shape
    ptr, first, last, kind = [0], [], [], []
    for row in kinds.view(-1, tiles).tolist():
        for j, k in enumerate(row):
            if k and j and row[j - 1] == k:
                last[-1] = j
            elif k:
                first.append(j), last.append(j), kind.append(k)
        ptr.append(len(first))
    runs = [torch.tensor(x, dtype=torch.int32) for x in (ptr, first, last)]
    return BlockTable(
        q_len=length,
        kv_len=length,
        block=(block, block),
        batch=batch,
        heads=heads,
        ptr=runs[0],
        first=runs[1],
        last=runs[2],
        kind=torch.tensor(kind, dtype=torch.int8),
    )


def random_kinds(seed, batch, heads, tiles):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randint(0, 3, (batch, heads, tiles, tiles), generator=generator)
    return dense * (torch.rand(dense.shape, generator=generator) < 0.6)


def demand_of(mask, length, unit=128):
    table = mask.block_table(length, block=unit)
    return Demand.of(table, pairs_per_row(table, mask.traced.program, mask.traced.captured()))


def visible(mask, length, b=0, h=0):
    q, kv = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return mask(torch.full((1, 1), b), torch.full((1, 1), h), q, kv).expand(length, length)


def packed(length, seed, scale):
    """Document lengths of a long-tailed distribution with the sum `length`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < length:
        drawn = int(scale * torch.exp(1.4 * torch.randn((), generator=generator)))
        lengths.append(min(max(16, drawn), length - sum(lengths)))
    return lengths


# ---------------------------------------------------------------------------------------------------------------------- demand


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 2), heads=st.integers(1, 3), tiles=st.integers(1, 9))
def test_demand_unites_reads_and_sums_work_over_heads_and_rows(seed, batch, heads, tiles):
    kinds = random_kinds(seed, batch, heads, tiles)
    table = table_of(kinds, tiles * 5 - 2, 5)
    for row in (None, *range(batch)):
        demand = Demand.of(table, row=row)
        part = kinds if row is None else kinds[row : row + 1]
        read = torch.zeros(tiles, tiles, dtype=torch.bool)
        for t in range(tiles):
            here = slice(int(demand.ptr[t]), int(demand.ptr[t + 1]))
            runs = list(zip(demand.first[here].tolist(), demand.last[here].tolist()))
            assert all(b[0] > a[1] + 1 for a, b in pairwise(runs))
            for first, last in runs:
                read[t, first : last + 1] = True
        assert torch.equal(read, (part > 0).any(0).any(0))
        assert torch.equal(demand.work, (part > 0).sum((0, 1, 3)).double() * 25)


def test_the_work_of_a_demand_is_its_pairs():
    kinds = random_kinds(3, 2, 3, 4)
    pairs = torch.arange(24.0)
    assert torch.equal(Demand.of(table_of(kinds, 20, 5), pairs).work, pairs.double().view(6, 4).sum(0))
    assert torch.equal(Demand.of(table_of(kinds, 20, 5), pairs, row=1).work, pairs.double().view(2, 3, 4)[1].sum(0))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (ls.causal().block_table(30, 40, 10), "30 × 40 tokens"),
        (ls.causal().block_table(30, 30, (10, 5)), "blocks of 10 × 5"),
        (ls.causal().block_table(40, block=10).select(torch.tensor([1]), torch.tensor([2])), "one sequence in square blocks"),
    ],
)
def test_tables_of_two_sequences_raise(table, why):
    with pytest.raises(ValueError, match=why):
        Demand.of(table)


def test_wrong_rows_and_pairs_raise():
    table = table_of(random_kinds(0, 2, 1, 3), 15, 5)
    with pytest.raises(ValueError, match="2 batch rows, got row 2"):
        Demand.of(table, row=2)
    with pytest.raises(ValueError, match="6 in all"):
        Demand.of(table, torch.ones(5))


# ----------------------------------------------------------------------------------------------------------------------- pairs

TABLE = torch.randint(0, 4, (3, 2, 97), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "mask",
    [
        ls.causal(),
        ls.full(),
        ls.sliding_window(9, 4),
        ls.causal() & ls.documents([31, 5, 40, 21]),
        ls.prefix(23) | ls.causal(),
        ls.mask_mod(lambda b, h, q, kv: TABLE[b, h, q] == TABLE[b, h, kv]),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [1, 7, 16])
def test_pairs_are_exact_in_small_blocks(mask, block):
    table = mask.block_table(97, block=block, batch=3, heads=2)
    pairs = pairs_per_row(table, mask.traced.program, mask.traced.captured()).view(table.batch, table.heads, -1)
    for b in range(table.batch):
        for h in range(table.heads):
            per_query = torch.nn.functional.pad(visible(mask, 97, b, h).sum(1), (0, -97 % block))
            assert torch.equal(pairs[b, h], per_query.view(-1, block).sum(1).double())


@pytest.mark.parametrize("block", [(8, 64), (64, 8)], ids=str)
def test_pairs_are_exact_in_small_blocks_that_are_not_square(block):
    table = ls.causal().block_table(97, block=block)
    per_query = torch.nn.functional.pad(visible(ls.causal(), 97, 0, 0).sum(1), (0, -97 % block[0]))
    assert torch.equal(pairs_per_row(table, ls.causal().traced.program), per_query.view(-1, block[0]).sum(1).double())


@pytest.mark.parametrize("length", [2 * 1024, 3001])
@pytest.mark.parametrize("block", [128, 100])
def test_pairs_are_estimated_well_in_large_blocks(length, block):
    for mask in (ls.causal(), ls.sliding_window(300, 77), ls.causal() & ls.documents([length // 3, 400, length - length // 3 - 400])):
        table = mask.block_table(length, block=block)
        pairs = pairs_per_row(table, mask.traced.program, mask.traced.captured())
        per_query = torch.nn.functional.pad(visible(mask, length).sum(1), (0, -length % block))
        right = per_query.view(-1, block).sum(1)
        assert float((pairs - right).abs().max()) <= 0.12 * block * block
        assert abs(float(pairs.sum() / right.sum()) - 1) < 0.005


def test_no_mask_is_every_pair():
    table = ls.full().block_table(70, block=32)
    assert pairs_per_row(table, None).tolist() == [70 * 32, 70 * 32, 70 * 6]


def test_tables_with_many_partial_tiles_are_sampled_at_fewer_points():
    mask = ls.mask_mod(lambda b, h, q, kv: (q + kv) % 3 == 0)
    table = mask.block_table(512 * 20, block=20)
    pairs = pairs_per_row(table, mask.traced.program, mask.traced.captured())
    assert abs(float(pairs.sum()) / (512 * 20) ** 2 * 3 - 1) < 0.01


def test_pairs_of_selected_tiles_raise():
    with pytest.raises(ValueError, match="selected tiles"):
        pairs_per_row(ls.causal().block_table(40, block=10).select(torch.tensor([1]), torch.tensor([2])), None)


# ------------------------------------------------------------------------------------------------------------------ evaluation


@given(seed=st.integers(0, 10**6), tiles=st.integers(1, 14), ranks=st.integers(1, 6), missing=st.integers(0, 4))
def test_evaluation_equals_brute_force(seed, tiles, ranks, missing):
    kinds = random_kinds(seed, 1, 1, tiles)
    length = tiles * 5 - missing
    demand = Demand.of(table_of(kinds, length, 5))
    owner = torch.randint(0, ranks, (tiles,), generator=torch.Generator().manual_seed(seed + 1))
    got = evaluate(demand, owner, ranks)
    for rank in range(ranks):
        mine = owner == rank
        reads = (kinds[0, 0][mine] > 0).any(0)
        assert int(got.received[rank]) == int((reads & ~mine).sum())
        assert float(got.work[rank]) == float(demand.work[mine].sum())
        tokens = torch.repeat_interleave(mine, 5)[:length]
        assert int(got.tokens[rank]) == int(tokens.sum())


def test_owners_out_of_range_raise():
    demand = demand_of(ls.causal(), 40, 10)
    with pytest.raises(ValueError, match=r"4 owners in 0 … 1"):
        evaluate(demand, torch.tensor([0, 1, 2, 0]), 2)


# ------------------------------------------------------------------------------------------------------------------------ auto

MASKS = {
    "causal": lambda n, seed: ls.causal(),
    "full": lambda n, seed: ls.full(),
    "window": lambda n, seed: ls.sliding_window(1 + n // 9),
    "prefix": lambda n, seed: ls.causal() | ls.prefix(n // 5),
    "documents": lambda n, seed: ls.causal() & ls.documents(packed(n, seed, n / 9)),
    "short documents": lambda n, seed: ls.causal() & ls.documents(packed(n, seed, 30)),
    "both ways": lambda n, seed: ls.documents(packed(n, seed, n / 9)),
    "looking ahead": lambda n, seed: ls.documents(packed(n, seed, n / 9)) & ls.mask_mod(lambda b, h, q, kv: kv >= q),
    "windows in documents": lambda n, seed: ls.sliding_window(64) & ls.documents(packed(n, seed, n / 9)),
    "nothing": lambda n, seed: ~ls.full(),
}


def judged(evaluation: Evaluation) -> tuple[float, float]:
    return evaluation.imbalance, evaluation.traffic


@given(
    kind=st.sampled_from(sorted(MASKS)),
    length=st.integers(1, 5000),
    ranks=st.integers(1, 17),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_auto_is_a_partition_with_fixed_counts_and_no_worse_than_any_candidate(kind, length, ranks, seed):
    unit = unit_for(length, ranks)
    demand = demand_of(MASKS[kind](length, seed), length, unit)
    options = candidates(demand, ranks)
    chosen = preferred(options)
    assert [c.name for c in options[:3]] == ["contiguous", "head_tail", "round_robin"]
    for c in options:
        assert judged(c.evaluation) == judged(evaluate(demand, c.owner, ranks))
        assert [c.layout.local_len(rank) for rank in range(ranks)] == c.evaluation.tokens.tolist()
        # What a rank owns does not depend on the demand, so that rows can be stacked.
        assert c.evaluation.tokens.tolist() == [contiguous(length, ranks).local_len(rank) for rank in range(ranks)]
    balanced = [c for c in options if c.evaluation.imbalance <= 1.03]
    least = min(c.evaluation.imbalance for c in options)
    assert chosen.evaluation.imbalance <= (1.03 if balanced else 1.03 * least)
    for c in balanced:
        assert chosen.evaluation.traffic <= 1.05 * c.evaluation.traffic
    assert auto(demand, ranks) == chosen.layout


def test_rows_with_different_documents_stack_on_ragged_lengths():
    length, ranks = 4999, 6
    unit = unit_for(length, ranks)
    rows = [auto(demand_of(ls.causal() & ls.documents(packed(length, seed, 700)), length, unit), ranks) for seed in range(4)]
    rows.append(auto(demand_of(ls.causal(), length, unit), ranks))
    rows.append(auto(demand_of(ls.full(), length, unit), ranks))
    assert len(stack(rows).rows) == 6


def test_causal_alone_is_head_tail():
    demand = demand_of(ls.causal(), 64 * 1024)
    chosen = choose(demand, 16)
    assert chosen.name == "head_tail" and chosen.evaluation.imbalance < 1.01


def test_windows_are_contiguous():
    assert choose(demand_of(ls.sliding_window(700), 64 * 1024), 16).name == "contiguous"


@pytest.mark.parametrize("seed", range(3))
def test_packed_documents_are_balanced_with_a_fraction_of_the_traffic_of_round_robin(seed):
    length, ranks = 256 * 1024 + 77, 13
    lengths = packed(length, seed, 3000)
    options = candidates(demand_of(ls.causal() & ls.documents(lengths), length), ranks)
    chosen, dealt = preferred(options), options[2]
    assert chosen.name == "constructed"
    assert chosen.evaluation.traffic < 0.7 * dealt.evaluation.traffic
    # The estimate of the work is good enough for the limit to hold exactly.
    position = torch.cat([torch.arange(1, n + 1) for n in lengths]).double()
    work = torch.stack([position[chosen.layout.positions(rank)].sum() for rank in range(ranks)])
    assert float(work.max() / work.mean()) <= 1.03


def test_anticausal_documents_cost_as_much_as_their_mirror_image():
    length, ranks = 128 * 1024, 8
    lengths = packed(length, 5, 3000)
    ahead = ls.documents(lengths[::-1]) & ls.mask_mod(lambda b, h, q, kv: kv >= q)
    back = ls.documents(lengths) & ls.causal()
    one, other = (choose(demand_of(mask, length), ranks).evaluation for mask in (ahead, back))
    assert one.imbalance <= 1.03 and other.imbalance <= 1.03
    assert one.traffic <= 1.1 * other.traffic


def test_several_masks_share_one_layout_and_are_evaluated_together():
    length, ranks = 48 * 1024, 6
    wide = demand_of(ls.causal() & ls.documents(packed(length, 2, 5000)), length)
    narrow = demand_of(ls.sliding_window(600) & ls.causal(), length)
    chosen = choose([wide, narrow], ranks)
    separate = [evaluate(d, chosen.owner, ranks) for d in (wide, narrow)]
    assert torch.equal(chosen.evaluation.work, separate[0].work + separate[1].work)
    assert torch.equal(chosen.evaluation.received, separate[0].received + separate[1].received)
    assert chosen.evaluation.imbalance <= 1.03


def test_demands_on_different_sequences_raise():
    one, other = demand_of(ls.causal(), 64, 4), demand_of(ls.causal(), 60, 4)
    with pytest.raises(ValueError, match=r"\(64, 4\), \(60, 4\)"):
        auto([one, other], 2)
    with pytest.raises(ValueError, match="ranks 0"):
        auto(one, 0)


def test_work_without_reads_is_only_balanced():
    none = torch.zeros(0, dtype=torch.int64)
    work = torch.arange(200.0).double()
    demand = Demand(length=200 * 8 - 3, unit=8, work=work, ptr=torch.zeros(201, dtype=torch.int64), first=none, last=none)
    assert choose(demand, 7).evaluation.imbalance < 1.03


def test_masks_without_structure_get_named_layouts():
    blocks = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    demand = demand_of(ls.causal() & ls.mask_mod(lambda b, h, q, kv: blocks[q // 32, kv // 32]), 64 * 32, 32)
    assert structure_of([demand]) is None
    assert len(candidates(demand, 4)) == 3


def test_a_structure_has_the_longest_run_of_each_units_reads():
    """Unit i of 12 reads itself and the two before it; the last unit reads units 1 and 2 too, a shorter run."""
    first = [max(0, i - 2) for i in range(11)] + [1, 9]
    last = [*range(11), 2, 11]
    ptr = torch.tensor([*range(12), 13])
    demand = Demand(length=12 * 8, unit=8, work=torch.ones(12).double(), ptr=ptr, first=torch.tensor(first), last=torch.tensor(last))
    structure = structure_of([demand, demand])
    low, high = [max(0, i - 2) for i in range(12)], [*range(1, 13)]
    if structure.mirrored:
        low, high = [12 - i for i in high[::-1]], [12 - i for i in low[::-1]]
    assert (structure.low.tolist(), structure.high.tolist(), structure.work) == (low, high, [2.0] * 12)


# ------------------------------------------------------------------------------------------------------- construction and swaps


@given(seed=st.integers(0, 999), ranks=st.integers(2, 9), variant=st.integers(0, 3), slack=st.floats(0.0, 0.1))
@settings(max_examples=40)
def test_construction_gives_every_rank_its_count(seed, ranks, variant, slack):
    structure = structure_of([demand_of(ls.causal() & ls.documents(packed(3000, seed, 300)), 3000, 16)])
    counts = units_per_rank(structure.units, ranks)
    owner, _ = lead_and_fill(structure, counts, slack, variant)
    assert torch.bincount(owner, minlength=ranks).tolist() == counts


@given(
    seed=st.integers(0, 999), ranks=st.integers(2, 9), kind=st.sampled_from(["documents", "both ways", "window", "windows in documents"])
)
@settings(max_examples=60)
def test_swaps_keep_counts_never_add_excess_and_count_reads_exactly(seed, ranks, kind):
    length, unit = 2990, 16
    demand = demand_of(MASKS[kind](length, seed), length, unit)
    structure = structure_of([demand])
    assert not structure.mirrored
    blocks = torch.randperm(structure.units // 8, generator=torch.Generator().manual_seed(seed)) % ranks
    start = torch.cat([blocks.repeat_interleave(8), torch.full((structure.units % 8,), ranks - 1)])
    max_work = 1.05 * float(demand.work.sum()) / ranks
    swapper = Swapper(structure, start, ranks, max_work=max_work, pinned=structure.units - 1)
    before, reads = evaluate(demand, start, ranks), sum(map(swapper._reads, swapper.runs_of))
    owner = swapper.improve(12)
    after = evaluate(demand, owner, ranks)
    assert torch.equal(torch.bincount(owner, minlength=ranks), torch.bincount(start, minlength=ranks))
    assert owner[-1] == start[-1]
    assert torch.equal(swapper.load, after.work)
    excess = [float((e.work - max_work).clamp(min=0).sum()) for e in (before, after)]
    assert excess[1] <= excess[0] + 1e-6
    assert sum(map(swapper._reads, swapper.runs_of)) - reads == int(after.received.sum() - before.received.sum())


@pytest.mark.parametrize("kind", ["documents", "window", "windows in documents"])
def test_a_chunk_removes_the_reads_that_no_other_unit_of_its_owner_has(kind):
    demand = demand_of(MASKS[kind](2990, 5), 2990, 16)
    structure = structure_of([demand])
    blocks = torch.randperm(structure.units // 9, generator=torch.Generator().manual_seed(3)) % 4
    owner = torch.cat([blocks.repeat_interleave(9), torch.full((structure.units % 9,), 3)])
    swapper = Swapper(structure, owner, 4, max_work=1e18)
    reads = lambda units: len({read for u in units for read in range(swapper.lows[u], swapper.highs[u])})
    mine = [set((owner == rank).nonzero()[:, 0].tolist()) for rank in range(4)]
    chunks = swapper.chunks
    assert len(chunks.rank) > structure.units // 9
    for rank, begin, end, removed in zip(*(t.tolist() for t in (chunks.rank, chunks.begin, chunks.end, chunks.removed))):
        assert set(range(begin, end)) <= mine[rank]
        assert removed == reads(mine[rank] - set(range(begin, end))) - reads(mine[rank])


@pytest.mark.parametrize("kind", ["documents", "window"])
def test_the_change_of_reads_by_a_swap_is_that_of_the_owners_after_it(kind):
    demand = demand_of(MASKS[kind](1500, 5), 1500, 16)
    structure = structure_of([demand])
    owner = (torch.arange(structure.units) // 5) % 3
    before = Swapper(structure, owner, 3, max_work=1e18)
    chunks, reads = before.chunks, sum(map(before._reads, before.runs_of))
    pairs = [
        (x, y) for x in range(len(chunks.rank)) for y in range(x) if chunks.rank[x] != chunks.rank[y] and chunks.size[x] == chunks.size[y]
    ]
    assert len(pairs) > 50
    for x, y in pairs[:: len(pairs) // 25]:
        moved = owner.clone()
        moved[int(chunks.begin[x]) : int(chunks.end[x])] = chunks.rank[y]
        moved[int(chunks.begin[y]) : int(chunks.end[y])] = chunks.rank[x]
        after = Swapper(structure, moved, 3, max_work=1e18)
        assert before._reads_change(x, y) == sum(map(after._reads, after.runs_of)) - reads


@pytest.mark.parametrize(("options", "chosen"), [
    # (imbalance, mean traffic, most traffic) of each candidate
    ([(1.03, 100, 9), (1.0, 106, 9)], 0),  # at the limit counts as balanced, and 106 is not within 5 %
    ([(1.03, 100, 9), (1.0, 105, 9)], 1),  # 105 is
    ([(1.04, 10, 9), (1.0, 200, 9)], 1),  # beyond the limit
    ([(1.02, 100, 9), (1.02, 100, 8)], 1),
    ([(1.02, 100, 9), (1.02, 100, 9)], 0),
    ([(1.05, 100, 9), (1.06, 50, 9)], 0),  # at most 1.05 if the least is
    ([(1.06, 100, 9), (1.06 * 1.03, 50, 9)], 1),  # else within the limit times the least
    ([(1.06, 100, 9), (1.06 * 1.03 + 0.01, 50, 9)], 0),
])  # fmt: skip
def test_of_balanced_candidates_the_least_traffic_is_preferred(options, chosen):
    made = [
        SimpleNamespace(evaluation=SimpleNamespace(imbalance=imbalance, traffic=float(mean), received=torch.tensor([0, most])))
        for imbalance, mean, most in options
    ]
    assert preferred(made) is made[chosen]


def test_partial_and_full_tiles_both_count_as_reads():
    kinds = torch.tensor([[PARTIAL, 0, 0], [FULL, PARTIAL, 0], [0, FULL, PARTIAL]])[None, None]
    got = evaluate(Demand.of(table_of(kinds, 12, 4)), torch.tensor([0, 1, 2]), 3)
    assert got.received.tolist() == [0, 1, 1]


def test_sampled_positions_are_one_per_cell_and_vary_between_tiles() -> None:
    """Tiles of 8 tokens in 4 cells of 2, the last tile of 5 tokens: position i of a tile is in cell i, or at the tile's end."""
    edges = torch.tensor([0, 8, 16, 21])
    sampler = _TileSampler(
        table=SimpleNamespace(block=(8, 8)), program=None, captured=[], edges=(edges, edges), first_batch=0, points=4  # type: ignore[arg-type]
    )  # fmt: skip
    at, tokens = sampler._grid(0, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), 3)
    assert at.mT.tolist() == [[0, 3, 4, 7], [9, 10, 13, 14], [16, 19, 20, 20]]
    assert tokens.mT.tolist() == [[2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 1, 0]]
