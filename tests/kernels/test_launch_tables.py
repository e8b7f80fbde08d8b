"""Arrays and sizes of launches, computed by hand or tile by tile: facts of tilings, orders of runs, starts, groups of heads, options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.shards import shard, work_of

import longspan as ls
from longspan._kernels.gpu import codegen, launch
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, PARTIAL, BlockTable, Runs
from longspan._masks.static_table import StaticTable

CPU, META = torch.device("cpu"), torch.device("meta")


def facts_of(tiling: Tiling) -> list[Any]:
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in launch.facts(tiling)]


@pytest.mark.parametrize(
    ("tiling", "wanted"),
    [
        # short, row_breaks, breaks, covers, reach, aligned
        (Tiling(length=40, block=16), [[2], [], [], True, 48, True]),
        (Tiling(length=48, block=16), [[], [], [], True, 48, True]),
        (Tiling(length=6, block=6), [[], [], [], True, 6, False]),
        (shard([(0, 40)], 16), [[2], [], [], True, 48, True]),
        (shard([(0, 32), (64, 32)], 16), [[], [], [2], True, 96, True]),
        (shard([(3, 20), (50, 9)], 16), [[1, 2], [2], [2], True, 66, True]),
        (shard([(3, 18), (50, 9)], 16), [[1, 2], [2], [2], True, 66, False]),
        (shard([], 16), [[], [], [], True, 0, True]),
        (Tiling(length=50, block=16, **dict(zip(("row", "pos", "count"), torch.tensor([[0, 17, 33], [5, 22, 38], [16, 16, 17]])))),
         [[], [1], [1], False, 54, False]),
        (Tiling(length=50, block=16, **dict(zip(("row", "pos", "count"), torch.tensor([[0, 16, 32], [5, 21, 38], [16, 16, 18]])))),
         [[], [], [2], True, 54, True]),
    ],
)  # fmt: skip
def test_facts_of_tilings(tiling: Tiling, wanted: list[Any]) -> None:
    assert facts_of(tiling) == wanted


def test_arrays_are_aligned_to_four_elements() -> None:
    parts = [torch.tensor([5, 6, 7]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 2, 3, 4]), torch.tensor([True, False])]
    made = launch.to_device(parts, CPU)
    # One element more than a multiple of four at least: no array is empty.
    assert [x.tolist() for x in made] == [[5, 6, 7, 0], [0, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0], [1, 0, 0, 0]]
    assert all(x.dtype == torch.int32 and x.data_ptr() % 16 == made[0].data_ptr() % 16 for x in made)
    assert [x.tolist() for x in launch._padded(parts[:2], [6, 3])] == [[5, 6, 7, 0, 0, 0, 0, 0], [0, 0, 0, 0]]
    assert launch.flags(torch.tensor([True, False, True]), CPU).tolist() == [1, 0, 1, 0]
    assert [(x.device, len(x)) for x in launch.to_device(parts[:2], META)] == [(META, 4), (META, 4)]


def test_arrays_of_a_static_table_have_room_for_its_runs_and_follow_its_contents() -> None:
    first, second = (ls.sliding_window(width).block_table(80, 112, block=16) for width in (20, 40))
    table = StaticTable.of(first, runs_per_row=2)
    columns = Tiling(length=112, block=16)
    made = launch.device_table(table, columns, CPU, shared=1, positions=False)
    room = 2 * 7 + 2  # runs of the 7 rows of the transposed table, padded to a multiple of four
    assert [len(x) for x in (made.order, *made.full, *made.partial, made.counts)] == [8, 12, room, room, 12, room, room, 12]
    before = device_lists(made)
    table.replace_contents(second)
    fresh = device_lists(launch.device_table(second, columns, CPU, shared=1, positions=False))
    after = device_lists(made)
    assert after != before and [x[: len(y)] for x, y in zip(after, fresh, strict=True)] == fresh
    assert launch.static_arrays(table, lambda: [torch.arange(3)] * 8, META)[1].device == META


def test_sides_of_tilings() -> None:
    assert launch.side(Tiling(length=40, block=16), CPU) == (None, None, None)
    made = launch.side(shard([(3, 20), (50, 9)], 16), CPU)
    assert [x.tolist() for x in made if x is not None] == [[0, 16, 20, 0], [3, 19, 50, 0], [16, 4, 9, 0]]


def runs_of(rows: list[list[tuple[int, int]]]) -> Runs:
    """From (first, last) by row."""
    ptr = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    first, last = (torch.tensor([run[i] for row in rows for run in row], dtype=torch.int32) for i in (0, 1))
    return Runs(ptr, first, last)


def lists(runs: Runs) -> list[list[tuple[int, int]]]:
    every = list(zip(runs.first.tolist(), runs.last.tolist(), strict=True))
    return [every[a:b] for a, b in zip(runs.ptr[:-1].tolist(), runs.ptr[1:].tolist(), strict=True)]


FULL_RUNS = [[(0, 1), (4, 6)], [], [(2, 2)], [(3, 5), (8, 8)], [], [(1, 1), (3, 3), (5, 6)]]
PARTIAL_RUNS = [[(2, 2), (7, 7)], [(1, 3)], [(0, 1)], [(0, 0), (2, 2), (6, 7)], [], [(2, 2), (4, 4)]]


def test_ascending_runs_have_full_runs_between_partial_ones() -> None:
    full, partial, lead = launch.ascending_runs(runs_of(FULL_RUNS), runs_of(PARTIAL_RUNS), 6)
    assert lists(full) == [[(0, 1)], [], [(2, 2)], [(3, 5)], [], [(1, 1)]]
    assert lists(partial) == [
        [(2, 2), (4, 6), (7, 7)], [(1, 3)], [(0, 1)], [(0, 0), (2, 2), (6, 7), (8, 8)], [], [(2, 2), (3, 3), (4, 4), (5, 6)]
    ]  # fmt: skip
    assert lead.tolist() == [0, 1, 1, 2, 0, 0] and lead.dtype == torch.int32
    full, partial, lead = launch.ascending_runs(runs_of([[(0, 1)], [(0, 0)]]), runs_of([[(5, 5)], [(2, 2)]]), 2)
    assert (lists(full), lists(partial)) == ([[(0, 1)], [(0, 0)]], [[(5, 5)], [(2, 2)]]) and lead.tolist() == [0, 0]
    empty = launch.ascending_runs(runs_of([[], []]), runs_of([[], []]), 2)
    assert lists(empty[0]) == lists(empty[1]) == [[], []] and empty[2].tolist() == [0, 0]
    assert all(x.dtype == torch.int32 for runs in (full, partial) for x in runs)


def test_descending_tiles_have_partial_tiles_before_full_ones() -> None:
    full, partial = launch.descending_tiles(runs_of(FULL_RUNS), runs_of(PARTIAL_RUNS), 6)
    single = lambda tiles: [[(t, t) for t in row] for row in tiles]
    assert lists(full) == single([[1, 0], [], [], [], [], [1]])
    assert lists(partial) == single([[7, 6, 5, 4, 2], [3, 2, 1], [2, 1, 0], [8, 7, 6, 5, 4, 3, 2, 0], [], [6, 5, 4, 3, 2]])
    empty = launch.descending_tiles(runs_of([[], []]), runs_of([[], []]), 2)
    assert lists(empty[0]) == lists(empty[1]) == [[], []]


def test_runs_are_cut_before_tiles() -> None:
    row, first, last = torch.tensor([0, 0, 2]), torch.tensor([0, 6, 3]), torch.tensor([4, 6, 9])
    made = launch.cut_runs(row, first, last, torch.tensor([0, 3, 5, 6, 7, 11]))
    assert [x.tolist() for x in made] == [[0, 0, 0, 2, 2, 2, 2], [0, 3, 6, 3, 5, 6, 7], [2, 4, 6, 4, 5, 6, 9]]
    none = launch.cut_runs(row[:0], first[:0], last[:0], torch.tensor([1]))
    assert [x.tolist() for x in none] == [[], [], []]


def test_rows_with_most_tiles_start_first() -> None:
    def some(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kv // 16 < (q // 16 + 1) * (h + 1) - 3 * (h == 2)

    table = ls.mask_mod(some).block_table(48, 160, block=16, heads=4)
    work = table.tiles_per_row.view(4, 3)
    assert work.tolist() == [[1, 2, 3], [2, 4, 6], [0, 3, 6], [4, 8, 10]]
    assert launch.start_order(table, 1).tolist() == [11, 10, 5, 8, 4, 9, 2, 7, 1, 3, 0, 6]
    # Of two heads: rows of (head group, tile) with 3 6 9 and 4 11 16 tiles.
    assert launch.start_order(table, 2).tolist() == [5, 4, 2, 1, 3, 0]
    assert launch.start_order(table, 1).dtype == launch.start_order(table, 2).dtype == torch.int32
    assert launch.busy_rows(table) == 11
    alone = ls.causal().block_table(48, 48, block=16)
    assert launch.start_order(alone, 2).tolist() == [2, 1, 0]


def device_lists(made: launch.DeviceTable) -> list[Any]:
    return [x.tolist() for x in (made.order, *made.full, *made.partial, made.counts)]


def test_tables_on_the_device() -> None:
    dense = [[2, 1, 0, 1], [0, 0, 0, 0], [1, 2, 2, 1]]  # FULL is 2
    assert (FULL, PARTIAL) == (2, 1)
    runs = [[(0, 0, 2), (1, 1, 1), (3, 3, 1)], [], [(0, 0, 1), (1, 2, 2), (3, 3, 1)]]
    assert [len(r) for r in dense] == [4, 4, 4]
    ptr, first, last, kind = [0, 3, 3, 6], *([run[i] for row in runs for run in row] for i in range(3))
    table = BlockTable(
        q_len=48, kv_len=64, block=(16, 16), batch=1, heads=1, tiles=(3, 4),
        ptr=torch.tensor(ptr, dtype=torch.int32), first=torch.tensor(first, dtype=torch.int32), last=torch.tensor(last, dtype=torch.int32),
        kind=torch.tensor(kind, dtype=torch.int8),
    )  # fmt: skip
    columns = Tiling(length=64, block=16)
    made = launch.device_table(table, columns, CPU, shared=1, positions=False)
    assert device_lists(made) == [
        [2, 0, 1, 0],
        [0, 1, 1, 1, 1, 2, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0],
        [0, 2, 2, 2, 2, 4, 0, 0], [1, 3, 0, 3, 0, 0, 0, 0], [1, 3, 0, 3, 0, 0, 0, 0],
        [2, 1, 0, 0, 2, 2, 0, 0],
    ]  # fmt: skip
    ascending = launch.device_table(table, columns, CPU, shared=1, positions=False, run_order="ascending")
    assert len(ascending.partial) == 4 and ascending.partial[3].tolist() == [0, 0, 1, 0]
    descending = launch.device_table(table, columns, CPU, shared=1, positions=False, run_order="descending")
    assert descending.full[1].tolist() == [0, 0, 0, 0] and descending.partial[1].tolist() == [3, 1, 3, 2, 1, 0, 0, 0]
    assert launch.device_table(table, columns, CPU, shared=1, positions=False) is made
    for other in ({"shared": 2}, {"positions": True}, {"run_order": "ascending"}):
        assert launch.device_table(table, columns, CPU, **{"shared": 1, "positions": False, **other}) is not made  # type: ignore[arg-type]
    assert launch.device_table(table, Tiling(length=63, block=16), CPU, shared=1, positions=False) is not made


def test_short_tiles_and_breaks_split_runs() -> None:
    """KV in segments of 2 and 2½ tiles: 0–31 and 100–139, then 140 on."""
    tiling = shard([(0, 32), (100, 40), (140, 16)], 16)
    work = work_of(lambda b, h, q, kv: q >= kv, [(200, 16), (130, 16)], [(0, 32), (100, 40), (140, 16)], block=16)
    table = work.table
    full, partial = launch.split_runs(table, launch.facts(tiling), positions=False)
    # Tile 4 has 8 tokens. The rows of tile 5 do not continue those of tile 4, nor the positions of tile 2 those of tile 1.
    assert lists(full) == [[(0, 3), (5, 5)], [(0, 2)]] and lists(partial) == [[(4, 4)], [(3, 4), (5, 5)]]
    full, partial = launch.split_runs(table, launch.facts(tiling), positions=True)
    assert lists(full) == [[(0, 1), (2, 3), (5, 5)], [(0, 1), (2, 2)]]
    assert all(x.dtype == torch.int32 for runs in (full, partial) for x in runs)


@pytest.mark.parametrize(
    ("block", "wanted", "size"), [(128, 64, 64), (128, 128, 128), (96, 64, 32), (96, 16, 16), (48, 256, 16), (7, 8, 1), (64, 256, 64)]
)
def test_the_largest_sub_tile(block: int, wanted: int, size: int) -> None:
    assert launch.sub_tile(block, wanted) == size


def test_padded_dims() -> None:
    assert [launch.padded(n) for n in (0, 1, 16, 17, 32, 33, 64, 65, 128, 129, 576)] == [16, 16, 16, 32, 32, 64, 64, 128, 128, 256, 1024]


@pytest.mark.parametrize(
    ("heads", "shared", "head_bytes", "l2", "programs", "in_flight", "group"),
    [
        (12, 1, 100, 350, 10, 5, 3),  # three heads fit; 5 is no divisor of 12
        (12, 1, 100, 500, 10, 5, 4),
        (12, 1, 100, 99, 10, 5, 1),
        (12, 2, 100, 250, 10, 5, 4),
        (12, 1, 100, 5000, 10, 5, 12),
        (12, 1, 100, 200, 10, 21, 3),  # three heads fill the device
        (12, 1, 100, 200, 10, 20, 2),
        (12, 1, 100, 200, 10, 41, 6),  # five heads would; 5 is no divisor of 12
        (12, 1, 100, 500, 10, 41, 6),  # five heads fit and fill the device
        (12, 1, 100, 300, 1, 99, 12),
        (12, 1, 0, 7, 0, 3, 6),
        (7, 1, 100, 300, 10, 5, 1),
        (7, 1, 100, 100, 10, 15, 7),
    ],
)
def test_heads_that_run_together(heads: int, shared: int, head_bytes: int, l2: int, programs: int, in_flight: int, group: int) -> None:
    assert launch.head_group(heads, shared, head_bytes, l2, programs=programs, in_flight=in_flight) == group


def test_sizes_are_odd_and_above_one() -> None:
    assert launch.pack_sizes([]) == (3,) and launch.pack_sizes([torch.zeros(())]) == (3,)
    assert launch.pack_sizes([torch.zeros(3, 0), torch.zeros(1)]) == (9, 3, 5)


def test_captured_tensors_are_contiguous_and_bools_are_bytes() -> None:
    spare, flags = torch.zeros(2), torch.tensor([True, False])
    assert launch.pack_captured([], spare) == (spare,)
    leaf = torch.zeros(3, 4, requires_grad=True)
    packed = launch.pack_captured([flags, leaf.mT], spare)
    assert packed[0].dtype == torch.uint8 and packed[0].data_ptr() == flags.data_ptr()
    assert packed[1].is_contiguous() and packed[1].shape == (4, 3) and not packed[1].requires_grad


def test_options_follow_the_largest_position_and_the_largest_table() -> None:
    def options(q_len: int, kv_len: int, dtype: torch.dtype = torch.float16, mask: int = 1, score: int = 1) -> codegen.Options:
        sizes = [SimpleNamespace(numel=lambda n=n: n) for n in (mask, score)]
        work: Any = SimpleNamespace(
            q_tiles=Tiling(length=q_len, block=128), kv_tiles=Tiling(length=kv_len, block=128),
            mask_captured=sizes[:1], score_captured=sizes[1:],
        )  # fmt: skip
        made: Work = work
        return launch.options(made, dtype)

    short, large = codegen.SHORT, 2**31
    assert options(5, short).max_position == options(short, 5).max_position == short
    assert options(5, short + 1).max_position == options(short + 1, 5).max_position == codegen.LONG == 2**31 - 1
    assert options(5, 5).fast and options(5, 5, torch.bfloat16).fast and not options(5, 5, torch.float32).fast
    assert [options(5, 5, mask=m, score=s).big_tables for m, s in ((large - 1, 1), (1, large - 1), (large, 1), (1, large))] == [
        False, False, True, True
    ]  # fmt: skip


def test_descriptors_have_strides_that_the_driver_accepts() -> None:
    one_head = torch.zeros(2, 5, 1, 48).transpose(1, 2)
    assert launch.extents(one_head) == ([2, 1, 5, 48], [240, 16, 48, 1])
    assert launch.extents(torch.zeros(1, 3, 1, 1)) == ([1, 3, 1, 1], [16, 1, 16, 1])
    made = launch.described(one_head, 32)
    assert (list(made.shape), list(made.strides), list(made.block_shape)) == ([2, 1, 5, 48], [240, 16, 48, 1], [1, 1, 32, 64])


def test_more_than_eight_idle_spans_are_joined() -> None:
    def spans(pieces: int) -> tuple[tuple[int, int], ...]:
        table = ls.mask_mod(lambda b, h, q, kv: q // 16 % 2 == 0).block_table(32 * pieces, 48, block=16)
        return launch.idle_spans(table, Tiling(length=32 * pieces, block=16))

    assert spans(8) == tuple((32 * i + 16, 32 * i + 32) for i in range(8))
    assert spans(9) == ((16, 288),)
