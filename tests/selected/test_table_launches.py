"""The launches that make the device tables of selections and of listed tiles: sizes, memory and order, computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu import listed_tables, selected_tables
from longspan._kernels.gpu.listed_tables import ListedTables, listed_work
from longspan._kernels.gpu.selected_tables import SelectedTables, pairs_of, query_order, tile_of, tiled_work
from longspan._kernels.protocol import AttentionInputs, Selection, Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, PARTIAL

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernel, number of CTAs, tensors, constants and warps of each launch. Nothing runs."""
    given: list[Any] = []

    def launch(kernel: Any, ctas: int, tensors: Any, constants: Any, *, num_warps: int = 4) -> None:
        given.append(SimpleNamespace(kernel=kernel, ctas=ctas, tensors=tensors, constants=constants, num_warps=num_warps))

    for module in (selected_tables, listed_tables):
        monkeypatch.setattr(module, "launch_kernel", launch)
    return given


def tables_of(k: int, *, choices: int = 2, heads: int = 6, by_head: bool = False, **options: Any) -> SelectedTables:
    """2 batch rows, 33 tiles of 128 queries in rows of 256, 11 tiles of 64 keys."""
    indices = torch.zeros(2, choices, 17, k, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=64, q_granularity=256, heads_per_choice=heads // choices)
    mask = ls.mask_mod(lambda b, h, q, kv: kv <= q + 100 * h) if by_head else ls.causal()
    table = mask.block_table(4146, 700, block=(128, 64), heads=heads if by_head else 1)
    return SelectedTables(selection=selection, table=table, batch=2, heads=heads, dummy=True, **options)


def padded(size: int) -> int:
    """Four elements more than a multiple of four."""
    return -(-size // 4) * 4 + 4


@pytest.mark.parametrize(
    ("k", "room", "width", "compared", "warps"),
    [(3, 4, 4, 4, 1), (32, 12, 32, 32, 1), (33, 12, 64, 64, 4), (70, 12, 128, 64, 4), (0, 2, 1, 1, 1)],
)
@pytest.mark.parametrize(("by_head", "grid", "copies", "copied", "of_head"), [(False, 2, 3, 4, 1), (True, 6, 1, 1, 3)])
def test_lists_by_query_tile(
    k: int, room: int, width: int, compared: int, warps: int, by_head: bool, grid: int, copies: int, copied: int, of_head: int,
    launches: list[Any],
) -> None:  # fmt: skip
    tables = tables_of(k, by_head=by_head)
    made = tables.of_pass(by_query=True, shared=3)
    (one,) = launches
    assert one.kernel is selected_tables.rows_kernel and one.ctas == 2 * grid * 33 and one.num_warps == warps
    assert one.constants == {
        "sizes": (33, 11, grid, copies, 17, 2), "choice_sizes": (2, 2, of_head), "kind_sizes": (1, 6 if by_head else 1), "room": room,
        "K": k, "KP": width, "J": compared, "COPIES": copied, "DUMMY": True, "PAIRS": False,
    }  # fmt: skip
    assert [len(made.full[0]), len(made.partial[0]), len(made.counts)] == [padded(2 * 2 * 6 * 33)] * 3
    assert len(made.full[1]) == len(made.partial[2]) == padded(2 * grid * 33 * room)
    assert one.tensors["kinds"].shape == (1, 6 if by_head else 1, 33, 11) and one.tensors["indices"] is tables.selection.indices
    assert made.order.tolist() == [head * 33 + tile for head in range(12) for tile in reversed(range(33))]
    assert tables.of_pass(by_query=True, shared=1) is made and len(launches) == 1


def test_pairs_of_heads_of_a_choice_come_together(launches: list[Any]) -> None:
    made = tables_of(3, choices=3, head_pairs=True, kv_pairs=True).of_pass(by_query=True, shared=2)
    assert launches[0].constants["PAIRS"] and tables_of(3, head_pairs=True).signature == (True, False, True)
    assert made.order.tolist() == [group * 66 + tile for group in range(6) for tile in reversed(range(33))]
    assert query_order((2, 4, 3), 2, CPU).tolist() == [2, 8, 1, 7, 0, 6, 14, 20, 13, 19, 12, 18]
    assert query_order((2, 3, 2), 1, CPU).tolist() == [1, 3, 5, 0, 2, 4, 7, 9, 11, 6, 8, 10]


@pytest.mark.parametrize(("k", "ctas"), [(3, 1), (70, 10), (0, 0)])
@pytest.mark.parametrize(("by_head", "grid", "copies", "copied", "of_head"), [(False, 2, 3, 4, 1), (True, 6, 1, 1, 3)])
def test_lists_by_key_tile(
    k: int, ctas: int, by_head: bool, grid: int, copies: int, copied: int, of_head: int, launches: list[Any]
) -> None:  # fmt: skip
    made = tables_of(k, by_head=by_head).of_pass(by_query=False, shared=3)
    bits, columns, order = launches
    assert bits.kernel is selected_tables.bits_kernel and bits.ctas == ctas  # 1024 entries each
    assert bits.constants == {
        "entries": 2 * 2 * 33 * k, "rows": 17, "tiles": 33, "per_row": 2, "columns": 11, "words": 2, "K": max(1, k), "E": 1024,
    }  # fmt: skip
    assert bits.tensors["bits"].numel() == 2 * 2 * 11 * 2 and not bits.tensors["bits"].any()
    assert columns.kernel is selected_tables.columns_kernel and columns.ctas == 2 * grid * 11 and columns.num_warps == 1
    assert columns.constants == {
        "sizes": (11, 33, grid, copies), "choice_sizes": (2, 2, of_head), "kind_sizes": (1, 6 if by_head else 1), "WORDS": 2, "W": 2,
        "COPIES": copied, "DUMMY": False,
    }  # fmt: skip
    assert columns.tensors["bits"].data_ptr() == bits.tensors["bits"].data_ptr() == columns.tensors["used"].data_ptr() + 16
    assert columns.tensors["kinds"].shape == (1, 6 if by_head else 1, 11, 33)
    assert [len(made.full[0]), len(made.partial[0]), len(made.counts)] == [padded(2 * 2 * 6 * 11)] * 3
    assert len(made.full[1]) == padded(2 * grid * 33 * min(k, 11))
    assert order.constants["groups"] == 4 and len(made.order) == 4 * 11


@pytest.mark.parametrize(("tiles", "blocks", "compared", "heavy"), [(7, 1, 8, 1), (64, 1, 64, 1), (129, 3, 128, 2)])
@pytest.mark.parametrize(("shared", "summed"), [(1, 1), (3, 1), (2, 2)])
def test_the_order_of_key_tiles_sums_heads_with_lists_of_their_own(
    tiles: int, blocks: int, compared: int, heavy: int, shared: int, summed: int, launches: list[Any]
) -> None:
    """2 batch rows of 6 heads, of which 3 share a list."""
    selection = Selection(indices=torch.zeros(2, 2, 5, 4, dtype=torch.int32), granularity=64, q_granularity=64, heads_per_choice=3)
    table = ls.full().block_table(5 * 64, tiles * 64, block=64)
    tables = SelectedTables(selection=selection, table=table, batch=2, heads=6, dummy=False)
    order = tables._key_order(torch.zeros(2 * 12 * tiles, dtype=torch.int32), shared)
    (one,) = launches
    groups = 12 // shared
    assert one.ctas == groups * blocks and order.shape == (groups * tiles,)
    assert one.constants == {
        "tiles": tiles, "groups": groups, "shared": shared, "summed": summed, "heavy": heavy, "T": 64, "J": compared, "WIDE": False,
    }  # fmt: skip


def test_one_head_has_no_groups(launches: list[Any]) -> None:
    tables = tables_of(3, choices=1, heads=1)
    tables.of_pass(by_query=False, shared=3)
    assert launches[-1].constants["groups"] == 2 and launches[-1].constants["shared"] == 1


def test_kinds_of_tiles_are_bytes_on_the_device() -> None:
    table = ls.causal().block_table(300, 700, block=(128, 64))
    kinds, swapped = selected_tables._device_kinds(table, CPU)
    assert kinds.dtype == swapped.dtype == torch.uint8 and kinds.is_contiguous() and swapped.is_contiguous()
    assert torch.equal(kinds, table.to_dense().to(torch.uint8)) and torch.equal(swapped, kinds.mT)
    assert [x.device for x in selected_tables._device_kinds(table, META)] == [META, META]


@pytest.mark.parametrize(
    ("choices", "table_heads", "head_pairs", "batch", "made_heads"),
    [(1, 1, False, 1, 1), (1, 1, True, 1, 6), (1, 6, False, 1, 6), (3, 1, False, 2, 6), (1, 1, False, 2, 1)],
)
def test_tiles_of_a_selection(choices: int, table_heads: int, head_pairs: bool, batch: int, made_heads: int) -> None:
    indices = torch.zeros(batch, choices, 4, 5, dtype=torch.int32).mT  # 5 rows of queries, 4 entries
    indices += torch.arange(5)[:, None]
    selection = Selection(indices=indices, granularity=64, q_granularity=64, heads_per_choice=6 // choices)
    mask = ls.mask_mod(lambda b, h, q, kv: (kv <= q + 100 * h) & (q >= 9 * b))
    table = mask.block_table(300, 500, block=64, batch=2 if batch == 1 else 1, heads=table_heads)
    work = Work(table=table, q_tiles=Tiling(length=300, block=64), kv_tiles=Tiling(length=500, block=64), scale=1.0)
    q = torch.zeros(2, 6, 300, 16)
    made = tiled_work(AttentionInputs(q=q, k=q, v=q), work, selection, dummy=False, head_pairs=head_pairs)
    tables: Any = made.device_tables
    assert (tables.batch, tables.heads, pairs_of(made)) == (2, made_heads, (False, head_pairs))
    assert tables.selection.indices.is_contiguous() and torch.equal(tables.selection.indices, indices)
    assert (made.table.batch, made.table.heads) == (2, made_heads) and made.table.tiles_per_row.tolist() == [4] * (2 * made_heads * 5)
    assert tiled_work(AttentionInputs(q=q, k=q, v=q), work, selection, dummy=True).device_tables.signature == (True, False, False)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("blocks", "tile"),
    [((64, 64), (64, 64)), ((64, 63), None), ((63, 64), None), ((128, 256), (128, 128)), ((256, 96), (96, 256)), ((64, 129), (128, 64))],
)
def test_tiles_have_64_tokens_or_more_and_at_most_128_queries(blocks: tuple[int, int], tile: tuple[int, int] | None) -> None:
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    assert tile_of(Selection(indices=indices, granularity=blocks[0], q_granularity=blocks[1], heads_per_choice=1)) == tile


@pytest.mark.parametrize("dummy", [False, True])
def test_lists_of_kinds(dummy: bool, launches: list[Any]) -> None:
    """2 batch rows of 4 heads, 3 tiles of 64 queries and 33 of 64 keys, the last ones cut."""
    kinds = torch.full((2, 4, 3, 33), FULL, dtype=torch.int8)
    kinds[1, 2, 0, 5] = 0
    given = kinds.clone()
    table = ls.full().block_table(150, 32 * 64 + 8, block=64)
    work = Work(table=table, q_tiles=Tiling(length=150, block=64), kv_tiles=Tiling(length=32 * 64 + 8, block=64), scale=1.0)
    made: Any = listed_work(work, kinds, dummy=dummy)
    assert torch.equal(kinds, given)
    tables = made.device_tables
    assert isinstance(tables, ListedTables) and tables.signature == (dummy, False, False)
    cut = torch.zeros(3, 33, dtype=torch.bool)
    cut[2], cut[:, 32] = True, True
    assert torch.equal(tables.kinds, torch.where((kinds == FULL) & cut, PARTIAL, kinds))
    assert (
        torch.equal(tables.selection.indices, torch.where(kinds > 0, torch.arange(33), -1))
        and tables.selection.indices.dtype == torch.int32
    )
    assert (tables.selection.granularity, tables.selection.q_granularity, tables.selection.heads_per_choice) == (64, 64, 1)
    assert (made.table.batch, made.table.heads, made.table.block) == (2, 4, (64, 64))
    assert made.table.tiles_per_row.tolist() == [33] * (2 * 4 * 3)
    by_query, by_key = tables.of_pass(by_query=True, shared=2), tables.of_pass(by_query=False, shared=2)
    rows, columns, order = launches
    for one, ctas, sizes, width, room, kind, with_dummy in (
        (rows, 24, (3, 33, 4, 1), 2, 24 * 33 + 24 * dummy, tables.kinds, dummy),
        (columns, 264, (33, 3, 4, 1), 1, 24 * 33, tables.kinds.mT, False),
    ):
        assert one.kernel is selected_tables.columns_kernel and one.ctas == ctas
        assert one.constants == {
            "sizes": sizes, "choice_sizes": (1, 1, 1), "kind_sizes": (2, 4), "WORDS": 0, "W": width, "COPIES": 1, "DUMMY": with_dummy,
        }  # fmt: skip
        assert one.tensors["bits"] is None and not one.tensors["used"].any()
        assert one.tensors["kinds"].is_contiguous() and torch.equal(one.tensors["kinds"], kind)
        assert len(one.tensors["listed"]) == padded(room) and len(one.tensors["counts"]) == padded(2 * ctas)
    assert by_query.order.tolist() == [head * 3 + tile for head in range(8) for tile in (2, 1, 0)]
    assert order.constants["summed"] == 2 and len(by_key.order) == 4 * 33
