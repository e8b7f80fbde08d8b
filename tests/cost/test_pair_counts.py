"""Tiles and pairs of each rank of a mesh against the mask, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._balance import demand
from longspan._cost.pair_counts import _count, balance_of, counts


def growing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 100 * (h + 1) * (b + 1))


def shifted(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q + kv + 50 * h) % 500 < 300


TWO_AXES = {"strategy": "ulysses_ring", "layout": "contiguous", "heads": 4, "batch": 2}
ROWS = [[700, 324], [1000, 24], [512, 512]]


@pytest.mark.parametrize(
    ("mask", "lengths", "mesh", "options"),
    [
        (ls.mask_mod(growing), 1000, (3, None), {"strategy": "ring", "layout": "contiguous", "heads": 4, "batch": 2}),
        (ls.mask_mod(shifted), (1300, 700), (4, None), {"strategy": "ulysses", "heads": 8, "kv_heads": 4, "batch": 3}),
        (ls.mask_mod(growing), 1400, ((2, 3), ("ulysses", "ring")), TWO_AXES),
        (ls.mask_mod(growing), 1400, ((3, 2), ("ring", "ulysses")), TWO_AXES),
        (ls.causal(), 900, (2, None), {"strategy": "exchange", "heads": 3, "batch": 5}),
        (ls.causal() & ls.documents(lengths=ROWS), 1024, (2, None), {"strategy": "exchange", "layout": "auto", "heads": 2, "batch": 3}),
        (ls.full(), 300, (2, None), {"strategy": "ring"}),
    ],
)  # fmt: skip
def test_tiles_and_pairs_of_each_rank(
    mask: ls.Mask, lengths: Any, mesh: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "EXACT", 1 << 30)
    data = ls.plan(mask, lengths, ls.Mesh.abstract(mesh[0], axis_names=mesh[1]), **options).data
    q_len, kv_len = (lengths, lengths) if isinstance(lengths, int) else lengths
    batch, heads = data.batch or 1, data.heads or 1
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    visible = mask(b, h, torch.arange(q_len)[:, None], torch.arange(kv_len)).expand(batch, heads, q_len, kv_len)
    made = counts(data)
    assert counts(data) is made and made.tiles.dtype == made.pairs.dtype == torch.float64
    for rank in range(data.mesh.size):
        coordinate = int(data.kv_coordinates[rank])
        place, local = data.groups[coordinate].tolist().index(rank), heads // data.degree
        pairs = tiles = 0
        for row in range(batch):
            positions = data.inner[0].positions(coordinate)
            positions = positions[row] if positions.ndim == 2 else positions
            grid = data.tiles[row if data.batch_layouts > 1 else 0]
            kinds = grid.table.to_dense()[row if grid.table.batch > 1 else 0]
            for head in range(place * local, (place + 1) * local):
                pairs += int(visible[row, head, positions].sum())
                tiles += int((kinds[head if len(kinds) > 1 else 0][grid.queries.owner == coordinate] > 0).sum())
        assert (float(made.pairs[rank]), float(made.tiles[rank])) == (pairs, tiles)


def test_pairs_that_have_been_counted_are_not_counted_again() -> None:
    data = ls.plan(ls.causal(), 900, ls.Mesh.abstract(2), strategy="ring", layout="contiguous", heads=3).data
    table = data.tiles[0].table
    given = torch.arange(1, table.rows + 1, dtype=torch.float64)
    made = _count(data, given)
    owner = data.tiles[0].queries.owner
    assert made.pairs.tolist() == [3 * float(given[owner == rank].sum()) for rank in range(2)]
    assert torch.equal(made.tiles, counts(data).tiles) and not torch.equal(made.pairs, counts(data).pairs)


@pytest.mark.parametrize(("pairs", "balance"), [([0.0, 0.0], 1.0), ([1.0, 0.0], 2.0), ([0.25, 0.5, 0.0], 2.0), ([5.0], 1.0)])
def test_the_balance_of_few_pairs_is_that_of_many(pairs: list[float], balance: float) -> None:
    assert balance_of(torch.tensor(pairs)) == balance
