"""Checks of selections against the sizes of a call and of a shard, tables of chosen blocks, and conjunctions with a selection."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._masks.extent import AttentionSizes, Extent
from longspan._masks.selected import Selected, SelectedTable, split_selection


def _selected(batch: int = 2, choices: int = 3, rows: int = 5, blocks: int = 7, **options: Any) -> Selected:
    indices = torch.randint(-1, blocks, (batch, choices, rows, 4), generator=torch.Generator().manual_seed(0))
    mask = ls.selected(indices, **({"granularity": 4, "q_granularity": 2} | options))
    assert isinstance(mask, Selected)
    return mask


def _sizes(**sizes: Any) -> AttentionSizes:
    return AttentionSizes(**({"q_len": 10, "kv_len": 26, "batch": 2, "heads": 6, "kv_heads": 3} | sizes))


def _visible(mask: Selected, heads: int) -> Tensor:
    """The visible pairs [B, heads, 10, 26], entry by entry."""
    batch, choices, _, entries = mask.indices.shape
    visible = torch.zeros(batch, heads, 10, 26, dtype=torch.bool)
    for b, h, q, i in itertools.product(range(batch), range(heads), range(10), range(entries)):
        block = int(mask.indices[b, h // (heads // choices), q // 2, i])
        if block >= 0:
            visible[b, h, q, 4 * block : 4 * block + 4] = True
    return visible


@pytest.mark.parametrize(("batch", "choices"), [(1, 1), (2, 1), (1, 3), (2, 3), (2, 6)])
def test_a_table_of_chosen_blocks_shows_the_pairs_of_the_indices(batch: int, choices: int) -> None:
    mask = _selected(batch, choices)
    index = torch.meshgrid(*(torch.arange(n) for n in (batch, 6, 10, 26)), indexing="ij")
    table, listed = mask.for_sizes(_sizes(batch=batch)), mask.for_sizes(_sizes(batch=batch), as_table=False)
    assert isinstance(table, SelectedTable) and isinstance(listed, Selected)
    assert (table.table.shape, table.granularity, table.q_granularity) == ((batch, choices, 5, 7), 4, 2)
    assert listed.heads_per_choice == table.heads_per_choice == 6 // choices
    expected = _visible(mask, 6)
    assert torch.equal(table(*index), expected) and torch.equal(listed(*index), expected)
    per_batch = batch if batch > 1 else None
    assert mask.extent == Extent(batch=per_batch) and table.extent == Extent(batch=per_batch, heads=6 if choices > 1 else None)
    assert table.reads_copies and str(table) == "selected(4 keys, 2 queries)"
    assert str(mask) == f"selected({batch}, {choices}, 5, 4; 4 keys, 2 queries)"
    program = table.traced.program
    assert (program.uses_batch, program.uses_head) == (batch > 1, choices > 1)


def test_choices_are_one_or_the_kv_heads_or_the_query_heads() -> None:
    for choices, heads, kv_heads, fits in (
        (1, 6, 3, True), (3, 6, 3, True), (6, 6, 3, True), (2, 6, 3, False), (12, 6, 3, False),
        (1, 6, None, True), (2, 6, None, True), (6, 6, None, True), (4, 6, None, False), (12, 6, None, False),
    ):  # fmt: skip
        mask, sizes = _selected(choices=choices), _sizes(heads=heads, kv_heads=kv_heads)
        if fits:
            assert mask.checked(sizes).heads_per_choice == heads // choices
            assert mask.checked_shard(sizes, rows=5, rank=0).heads_per_choice == heads // choices
            continue
        legal = r"\[1, 3, 6\]" if kv_heads else r"\[1, 6\]"
        for check in (lambda m=mask, s=sizes: m.checked(s), lambda m=mask, s=sizes: m.checked_shard(s, rows=5, rank=0)):
            with pytest.raises(ValueError, match=rf"expected 1, KV heads or query heads as its second dim \({legal}\), got {choices}"):
                check()


@pytest.mark.parametrize(("q_len", "fits"), [(8, False), (9, True), (10, True), (11, False)])
def test_there_is_a_row_for_every_two_queries(q_len: int, fits: bool) -> None:
    if fits:
        assert _selected().checked(_sizes(q_len=q_len)).heads_per_choice == 2
        return
    expected = rf"expected {-(-q_len // 2)} rows for {q_len} queries, 2 per row, got 5; choose blocks for every row"
    with pytest.raises(ValueError, match=expected):
        _selected().checked(_sizes(q_len=q_len))


def test_a_shard_has_the_rows_and_batch_rows_of_its_rank() -> None:
    mask = _selected()
    with pytest.raises(ValueError, match=r"expected 4 rows, one for each of plan.query_blocks\(2\) of rank 3, got 5"):
        mask.checked_shard(_sizes(), rows=4, rank=3)
    with pytest.raises(ValueError, match="made for batch=2, got batch=3"):
        mask.checked_shard(_sizes(batch=3), rows=5, rank=3)
    assert _selected(batch=1).checked_shard(_sizes(batch=3), rows=5, rank=3).heads_per_choice == 2


@pytest.mark.parametrize(("kv_len", "blocks"), [(5, 2), (8, 2), (9, 3)])
def test_indices_are_blocks_of_the_keys(kv_len: int, blocks: int) -> None:
    sizes = _sizes(q_len=2, kv_len=kv_len)
    for low, high, got in ((-1, blocks - 1, None), (0, blocks, blocks), (-2, blocks - 1, -2), (-3, blocks + 5, -3)):
        mask = ls.selected(torch.tensor([[[[low, high]]]], dtype=torch.int32), 4, 2)
        assert isinstance(mask, Selected)
        for check in (lambda m=mask: m.checked(sizes), lambda m=mask: m.checked_shard(sizes, rows=1, rank=0)):
            if got is None:
                assert check().heads_per_choice == 6
            else:
                with pytest.raises(ValueError, match=rf"expected indices from -1 to {blocks - 1}, blocks of 4 keys, got {got}"):
                    check()
    nothing = ls.selected(torch.zeros(1, 1, 1, 0, dtype=torch.int32), 4, 2)
    assert (
        isinstance(nothing, Selected)
        and nothing.checked(sizes).heads_per_choice == nothing.checked_shard(sizes, rows=1, rank=0).heads_per_choice
    )


def test_arguments_of_selections() -> None:
    indices = torch.zeros(2, 3, 5, 4, dtype=torch.int64)
    mask = ls.selected(indices)
    assert isinstance(mask, Selected) and (mask.granularity, mask.q_granularity) == (128, 128) and mask.indices.dtype == torch.int32
    for granularity in (128, 64, 16, 4, 1):
        mask = ls.selected(indices.int(), granularity, 1)
        assert isinstance(mask, Selected) and (mask.granularity, mask.q_granularity) == (granularity, 1)
    wide = ls.selected(torch.tensor([[[[2**40, -(2**40), 2**31 - 1, -2]]]]))
    assert isinstance(wide, Selected) and wide.indices.tolist() == [[[[2**31 - 1, -2, 2**31 - 1, -2]]]]
    counted = ls.selected(torch.tensor([[[[5, 6], [7, 8], [9, 3]]]]), counts=torch.tensor([[[0, 1, 2]]]))
    assert isinstance(counted, Selected) and counted.indices.tolist() == [[[[-1, -1], [7, -1], [9, 3]]]]
    for options, message in (
        ({"q_granularity": 0}, "must be a power of two, got 0"),
        ({"q_granularity": 6}, "must be a power of two, got 6"),
        ({"counts": torch.zeros(2, 3, 4, dtype=torch.int32)}, r"expected counts of shape \(2, 3, 5\) on cpu, got \(2, 3, 4\) on cpu"),
        ({"counts": torch.zeros(2, 3, dtype=torch.int32)}, r"expected counts \[batch, choices, rows\], got shape \(2, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ls.selected(indices, **options)  # type: ignore[arg-type]
    for shape in ((0, 3, 5, 4), (2, 0, 5, 4)):
        with pytest.raises(ValueError, match="expected batch and choices >= 1"):
            ls.selected(torch.zeros(shape, dtype=torch.int32))
    assert ls.selected(torch.zeros(2, 3, 0, 0, dtype=torch.int32)).has_selection


def test_a_conjunction_is_split_into_its_selection_and_the_rest() -> None:
    mask, causal, window = _selected(), ls.causal(), ls.sliding_window(3)

    def split(whole: Any) -> tuple[bool, str] | None:
        parts = split_selection(whole)
        return None if parts is None else (parts.selection is mask, str(parts.rest))

    assert split(mask) == (True, "None")
    assert split(mask & causal) == split(causal & mask) == (True, str(causal))
    assert split(causal & (mask & window)) == (True, str(window & causal))
    assert split((mask & window) & causal) == (True, str(window & causal))
    for other in (causal, causal & window, mask | causal, ~mask, mask & mask, (mask | causal) & window):
        assert split(other) is None
