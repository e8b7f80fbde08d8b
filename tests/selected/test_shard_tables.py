"""Blocks, bits and tile kinds of one rank's selection, and the program over them, against loops over rows and tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.masks.test_block_table import random_kinds, same, table_of
from torch import Tensor

from longspan._masks import selected_shard
from longspan._masks.block_table import BlockTable
from longspan._masks.selected_shard import (
    PairForm,
    TileSpans,
    captured_in_order,
    chosen_bits,
    chosen_blocks,
    covered,
    pair_program,
    selected_table,
    tile_kinds,
)
from longspan._masks.tracing import trace

BATCH, CHOICES, ROWS, BLOCKS = 2, 3, 5, 67


def _indices(batch: int = BATCH, choices: int = CHOICES, rows: int = ROWS, blocks: int = BLOCKS) -> Tensor:
    return torch.randint(-1, blocks, (batch, choices, rows, 9), generator=torch.Generator().manual_seed(0))


def _chosen(indices: Tensor, blocks: int) -> Tensor:
    chosen = torch.zeros(*indices.shape[:3], blocks, dtype=torch.bool)
    for place in itertools.product(*(range(n) for n in indices.shape)):
        if 0 <= indices[place] < blocks:
            chosen[(*place[:3], int(indices[place]))] = True
    return chosen


def test_entries_outside_of_the_blocks_choose_nothing() -> None:
    indices = _indices()
    for blocks in (1, 40, BLOCKS):
        assert torch.equal(chosen_blocks(indices, blocks), _chosen(indices, blocks))
    assert chosen_blocks(indices.int(), 5).shape == (BATCH, CHOICES, ROWS, 5)


@pytest.mark.parametrize("at_once", [1 << 22, 2 * BATCH * CHOICES * BLOCKS, 1])
def test_bit_i_of_word_j_is_block_32_j_plus_i(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    blocks_of = selected_shard.chosen_blocks
    monkeypatch.setattr(
        selected_shard, "chosen_blocks", lambda indices, blocks: (steps.append(indices.shape[2]), blocks_of(indices, blocks))[1]
    )
    monkeypatch.setattr(selected_shard, "_CHOSEN_AT_ONCE", at_once)
    for blocks in (BLOCKS, 64, 31):
        bits, chosen = chosen_bits(_indices(), blocks), _chosen(_indices(), blocks)
        assert bits.shape == (BATCH, CHOICES, ROWS, -(-blocks // 32)) and bits.dtype == torch.int32
        for block in range(blocks):
            assert torch.equal((bits[..., block // 32] >> (block % 32)) & 1 == 1, chosen[..., block])
    assert steps[: len(steps) - 2 * (ROWS if at_once == 1 else 1)][:3] == {1 << 22: [5], 1: [1, 1, 1]}.get(at_once, [2, 2, 1])
    assert chosen_bits(torch.tensor([[[[31]]]]), 32).tolist() == [[[[-(2**31)]]]]


def test_entries_of_ranges_are_counted() -> None:
    values = torch.tensor([[True, False, True, True], [False, False, True, False]])
    got = covered(values, torch.tensor([0, 1, 2]), torch.tensor([3, 1, 3]))
    assert got.tolist() == [[3, 0, 2], [1, 0, 1]] and got.dtype == torch.int32


@pytest.mark.parametrize("at_once", [1 << 22, 2 * BATCH * CHOICES * BLOCKS, 3 * BATCH * CHOICES * BLOCKS, 1])
def test_tiles_are_full_if_all_their_rows_chose_all_their_blocks(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    kinds_of_rows = selected_shard._kinds_of_rows
    monkeypatch.setattr(selected_shard, "_CHOSEN_AT_ONCE", at_once)
    monkeypatch.setattr(
        selected_shard,
        "_kinds_of_rows",
        lambda chosen, rows, blocks: (sizes.append(chosen.shape[2]), kinds_of_rows(chosen, rows, blocks))[1],
    )
    indices = torch.cat([_indices(), torch.arange(BLOCKS).expand(BATCH, CHOICES, ROWS, BLOCKS)[..., :40].clone()], -1)
    indices[:, 1, 2:4, 9:] = -1
    rows = TileSpans(first=torch.tensor([2, 0, 1, 4, 0, 3]), last=torch.tensor([3, 1, 3, 4, 1, 4]))
    spans = TileSpans(first=torch.tensor([0, 30, 39, 41, 66]), last=torch.tensor([4, 39, 40, 60, 66]))
    got, chosen = tile_kinds(indices, BLOCKS, rows, spans), _chosen(indices, BLOCKS)
    assert got.shape == (BATCH, CHOICES, 6, 5) and got.dtype == torch.int8
    for b, c, q, t in itertools.product(range(BATCH), range(CHOICES), range(6), range(5)):
        tile = chosen[b, c, int(rows.first[q]) : int(rows.last[q]) + 1, int(spans.first[t]) : int(spans.last[t]) + 1]
        assert got[b, c, q, t] == (2 if tile.all() else 1 if tile.any() else 0)
    per_row = BATCH * CHOICES * BLOCKS
    assert sizes == {1 << 22: [5], 3 * per_row: [2, 3, 2], 2 * per_row: [2, 3, 2, 2], 1: [2, 2, 3, 2, 2, 1]}[at_once]
    assert len(got.unique()) == 3


def test_tables_of_a_selection_and_another_mask_take_the_lesser_kind() -> None:
    for choices, heads, rest_heads in ((1, 6, 1), (2, 6, 1), (1, 6, 6), (3, 6, 6)):
        kinds, rest_kinds = random_kinds(2, choices, 4, 7, seed=3, empty=0.3), random_kinds(2, rest_heads, 4, 7, seed=4, empty=0.3)
        rest: BlockTable = table_of(rest_kinds)
        table = selected_table(kinds, rest, heads)
        expected = torch.minimum(kinds.repeat_interleave(heads // choices if choices > 1 or rest_heads > 1 else 1, 1), rest_kinds)
        assert same(table, table_of(expected)) and torch.equal(table.to_dense(), expected)
        assert (table.q_len, table.kv_len, table.block, table.tiles) == (15, 14, (4, 2), (4, 7))
        assert (table.batch, table.heads) == (2, expected.shape[1]) and table.mask_mod is None
        by_key = table.transposed
        assert same(by_key, table_of(expected.mT, (2, 4))) and torch.equal(by_key.to_dense(), expected.mT)
        assert (by_key.q_len, by_key.kv_len, by_key.block, by_key.tiles, by_key.heads) == (14, 15, (2, 4), (7, 4), expected.shape[1])


@pytest.mark.parametrize("sizes", [(2, 2, 0, 3), (1, 3, 4, 0), (2, 3, 2, 2)])
def test_heads_of_a_table_without_tiles_are_repeated(sizes: tuple[int, int, int, int]) -> None:
    rest = replace(table_of(torch.zeros(sizes[0], 1, *sizes[2:], dtype=torch.int8)), tiles=sizes[2:])
    table = selected_table(torch.full(sizes, 2, dtype=torch.int8), rest, 4 * sizes[1])
    assert (table.heads, table.rows, len(table.first)) == (4 * sizes[1], 4 * sizes[0] * sizes[1] * sizes[2], 0)
    assert table.ptr.tolist() == [0] * (table.rows + 1) and table.ptr.dtype == torch.int32


SCALE = torch.tensor([3, 1, 4, 1, 5, 9])


@pytest.mark.parametrize(("batch", "choices", "heads"), [(1, 1, 6), (2, 1, 6), (1, 3, 6), (2, 3, 6), (2, 3, 3)])
@pytest.mark.parametrize("with_rest", [False, True])
def test_the_program_of_a_selection_reads_the_bits_of_its_rows(batch: int, choices: int, heads: int, with_rest: bool) -> None:
    form = PairForm(granularity=2, q_granularity=3, heads_per_choice=heads // choices, per_batch=batch > 1, per_choice=choices > 1)

    def rest(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q * SCALE[h]

    traced = trace(rest, "mask", name="below") if with_rest else None
    program, origins = pair_program(None if traced is None else traced.program, form)
    assert program.name == ("below & selected" if with_rest else "selected")
    assert pair_program(None if traced is None else traced.program, form)[0] is program
    indices, local_row = _indices(batch, choices), torch.tensor([2, 0, 0, 4, 1, 3])
    tensors = captured_in_order(origins, [] if traced is None else traced.captured(), chosen_bits(indices, BLOCKS), local_row, form)
    assert len(tensors) == 2 + with_rest
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, 18, 2 * BLOCKS)), indexing="ij")
    expected = _chosen(indices, BLOCKS)[b, h // (heads // choices), local_row[q // 3], kv // 2]
    if with_rest:
        expected = expected & rest(b, h, q, kv)
    assert torch.equal(program(b, h, q, kv, *tensors), expected)
    assert (program.uses_batch, program.uses_head) == (batch > 1, choices > 1 or with_rest)


def test_programs_of_other_masks_and_forms_differ() -> None:
    form = PairForm(granularity=2, q_granularity=3, heads_per_choice=1, per_batch=False, per_choice=False)
    masks = [trace(mask, "mask").program for mask in (lambda b, h, q, kv: q > kv, lambda b, h, q, kv: q >= kv)]
    programs = [pair_program(rest, form)[0] for rest in (None, *masks)]
    assert len({program.key for program in programs}) == 3
    again = trace(lambda b, h, q, kv: q > kv, "mask").program
    assert pair_program(again, form)[0] is programs[1]


def test_programs_are_looked_up_by_the_rest_of_the_mask() -> None:
    """Also where hashes are equal: keys of different programs differ, and equal programs are one key."""
    one, same, other = (trace(lambda b, h, q, kv, n=n: q + n >= kv, "mask").program for n in (2, 2, 3))
    keys = [selected_shard._ProgramKey(program) for program in (one, same, other, None)]
    assert keys[0] == keys[1] and hash(keys[0]) == hash(keys[1])
    assert keys[0] != keys[2] and keys[0] != keys[3] and keys[3] == selected_shard._ProgramKey(None) and keys[3] != one
