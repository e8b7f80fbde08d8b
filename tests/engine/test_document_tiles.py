"""Tiles counted from the first token of each document, over a sequence and over ranks."""

from __future__ import annotations

import pytest
import torch

import longspan as ls
from longspan._engine.document_tiles import DocumentTiles, _tiling, laid_out_tiles, tiles_of_rank, tiles_of_sequence
from longspan._kernels.tiling import Tiling

IDS = torch.tensor([[0] * 200 + [1] * 300, [0] * 450 + [1] * 50])


def tile_positions(tiling: Tiling) -> list[range]:
    if tiling.pos is None:
        return [range(p, min(p + tiling.block, tiling.length)) for p in range(0, tiling.length, tiling.block)]
    assert tiling.row is not None and tiling.count is not None
    assert tiling.row.dtype == tiling.pos.dtype == tiling.count.dtype == torch.int32
    assert tiling.row.tolist() == [0, *tiling.count.cumsum(0).tolist()][:-1] and tiling.length == int(tiling.count.sum())
    return [range(p, p + n) for p, n in zip(tiling.pos.tolist(), tiling.count.tolist(), strict=True)]


def blocks_of(*documents: int) -> list[range]:
    """Blocks of at most 128 tokens of documents of these lengths."""
    starts = [sum(documents[:i]) for i in range(len(documents))]
    return [range(p, min(p + 128, start + n)) for start, n in zip(starts, documents, strict=True) for p in range(start, start + n, 128)]


def check_table(tiles: DocumentTiles, dense: torch.Tensor) -> None:
    """The block table tells which tiles have visible pairs, and which have no other."""
    kinds = tiles.table.to_dense()[0, 0]
    for i, q in enumerate(tile_positions(tiles.q_tiles)):
        for j, k in enumerate(tile_positions(tiles.kv_tiles)):
            seen = dense[q.start : q.stop, k.start : k.stop]
            assert (int(kinds[i, j]) > 0) == bool(seen.any()) and (int(kinds[i, j]) < 2 or bool(seen.all()))


def test_tiles_of_a_sequence_begin_with_its_documents() -> None:
    traced = (ls.causal() & ls.documents(ids=IDS)).traced
    made = tiles_of_sequence(traced.program, traced.captured(), (500, 500), batch=2, heads=3)
    assert [tiles.row for tiles in made] == [0, 1] and [tiles.batch for tiles in made] == [slice(0, 1), slice(1, 2)]
    for row, (tiles, documents) in enumerate(zip(made, ((200, 300), (450, 50)), strict=True)):
        assert tile_positions(tiles.q_tiles) == tile_positions(tiles.kv_tiles) == blocks_of(*documents)
        check_table(tiles, torch.ones(500, 500).tril().bool() & (IDS[row][:, None] == IDS[row]))
    (alike,) = tiles_of_sequence(ls.causal().traced.program, [], (300, 200), batch=2, heads=3)
    assert alike.row is None and alike.batch == slice(None)
    assert (alike.q_tiles.length, alike.q_tiles.row, alike.kv_tiles.length, alike.kv_tiles.row) == (300, None, 200, None)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("documents", [None, (200, 300)])
def test_tiles_of_a_rank_are_its_tokens_by_the_blocks_of_the_other_side(layout: str, documents: tuple[int, int] | None) -> None:
    dense, mask = torch.ones(500, 500).tril().bool(), ls.causal()
    if documents is not None:
        mask, dense = mask & ls.documents(documents), dense & (IDS[0][:, None] == IDS[0])
    for rank in range(3):
        plan = ls.plan(mask, 500, ls.Mesh.abstract(3, rank=rank), layout=layout, strategy="exchange").data
        made = tiles_of_rank(laid_out_tiles(plan, batch=2, heads=3), rank)
        ((by_query,), (by_kv,)) = made.by_query, made.by_kv
        assert by_query.row is None and by_kv.row is None
        for whole, local in ((by_query.kv_tiles, by_query.q_tiles), (by_kv.q_tiles, by_kv.kv_tiles)):
            assert tile_positions(whole) == blocks_of(*(documents or (500,)))
            assert [p for tile in tile_positions(local) for p in tile] == plan.layouts[0].positions(rank).tolist()
            assert local.block == 128 and max(map(len, tile_positions(local))) <= 128
        check_table(by_query, dense)
        check_table(by_kv, dense)


def test_batch_rows_of_a_rank_have_tiles_of_their_own() -> None:
    for rank in range(2):
        plan = ls.plan(ls.causal() & ls.documents(ids=IDS), 500, ls.Mesh.abstract(2, rank=rank), layout="contiguous", batch=2).data
        made = tiles_of_rank(laid_out_tiles(plan, batch=2, heads=1), rank)
        for tiles in (made.by_query, made.by_kv):
            assert [t.row for t in tiles] == [0, 1]
            for row in range(2):
                check_table(tiles[row], torch.ones(500, 500).tril().bool() & (IDS[row][:, None] == IDS[row]))
        assert [tile_positions(t.kv_tiles) for t in made.by_query] == [blocks_of(200, 300), blocks_of(450, 50)]


def test_whole_blocks_need_no_lists() -> None:
    plain = _tiling(torch.tensor([0, 128, 256, 300]))
    assert (plain.length, plain.block, plain.row) == (300, 128, None)
    listed = _tiling(torch.tensor([0, 100, 228, 300]))
    assert tile_positions(listed) == [range(100), range(100, 228), range(228, 300)]
