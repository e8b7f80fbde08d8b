"""The workload of a plan against tiles and moves counted one by one."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import fields
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost import plan_workload
from longspan._cost.plan_workload import _PlanCounter, of_plan, shape_of
from longspan._cost.workload import Workload
from longspan._plan.local_split import late_tiles
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule

TWO_AXES = ls.Mesh.abstract((3, 2), axis_names=("ring", "ulysses"))
HEADS_FIRST = ls.Mesh.abstract((2, 3), axis_names=("ulysses", "ring"))


def growing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 200 * (h + 1))


def batched(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 150 * (b + 1))


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "heads": (ls.mask_mod(growing), 1500, 3, {"strategy": "exchange", "layout": "head_tail", "heads": 6, "kv_heads": 2, "batch": 5}),
    "batch rows": (ls.mask_mod(batched), 1100, 4, {"strategy": "ring", "heads": 3, "batch": 4}),
    "two axes": (ls.mask_mod(growing), 2300, TWO_AXES, {"strategy": "ulysses_exchange", "heads": 8, "kv_heads": 4, "batch": 2}),
    "layouts by row": (
        ls.causal() & ls.documents(lengths=[[700, 324], [1000, 24], [512, 512]]),
        1024, 3, {"strategy": "exchange", "batch": 3, "heads": 2, "layout": "auto"},
    ),
    "window": (ls.sliding_window(300), 2000, 5, {"strategy": "allgather", "layout": "contiguous", "heads": 2}),
    "round robin": (ls.causal(), 1900, 3, {"strategy": "ring", "layout": "round_robin", "heads": 4, "kv_heads": 2, "batch": 2}),
    "stages": (ls.causal() & ls.documents(lengths=[1700, 340]), 2040, 4, {"strategy": "exchange", "layout": "per_document", "stages": 3}),
    "batch rows, one layout": (ls.mask_mod(batched), 900, 2, {"strategy": "ring", "heads": 3, "batch": 4, "layout": "contiguous"}),
    "heads first": (ls.causal(), 1400, HEADS_FIRST, {"strategy": "ulysses_ring", "heads": 4, "kv_heads": 2}),
    "some gathered": (ls.sliding_window(400), 2500, 4, {"strategy": "exchange", "layout": "round_robin", "heads": 2, "batch": 3}),
    "cross": (ls.mask_mod(lambda b, h, q, kv: (q + kv) % 700 < 300), (1300, 700), 3, {"strategy": "ring", "heads": 2}),
    "one rank": (ls.causal(), 600, 1, {"heads": 2}),
}  # fmt: skip


@functools.cache
def planned(name: str) -> PlanData:
    mask, lengths, mesh, options = CASES[name]
    return ls.plan(mask, lengths, ls.Mesh.abstract(mesh) if isinstance(mesh, int) else mesh, **options).data


def owned_rows(data: PlanData, rank: int, row: int) -> list[int]:
    """Positions of a rank's KV of a batch row in local order."""
    return [p for start, length in data.inner[1].segments(rank, row) for p in range(start, start + length)]


def repeats(data: PlanData, table: Any) -> float:
    """Heads and batch rows of a rank for which a row of the table is computed."""
    batch = 1 if data.batch_layouts > 1 else (data.batch or 1) / table.batch
    return (data.heads or 1) / table.heads * batch / data.degree


def step_of(data: PlanData, stage: int) -> int:
    return 1 + next(i for i, stages in enumerate(data.schedule.steps) if stage in stages)


def moves_of(s: Schedule) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in s.columns), strict=True))


def counted_tiles(data: PlanData, ranks: int, steps: int) -> tuple[torch.Tensor, ...]:
    """Query tiles [R], full, partial and active tiles [R, steps]."""
    query = torch.zeros(ranks, dtype=torch.float64)
    full, partial, active = torch.zeros(3, ranks, steps, dtype=torch.float64)
    moves = moves_of(data.schedule)
    for row, tiles in enumerate(data.tiles):
        kinds, times = tiles.table.to_dense(), repeats(data, tiles.table)
        arrives = {}
        for stage, batch_row, receiver, _, start, length in moves:
            if data.batch_layouts == 1 or batch_row == row:
                for t, begin in enumerate(tiles.kv.edges[:-1].tolist()):
                    if start <= begin < start + length:
                        arrives[receiver, t] = step_of(data, stage)
        owner, kv_owner = tiles.queries.owner.tolist(), tiles.kv.owner.tolist()
        rows = (data.heads or 1) * (1 if data.batch_layouts > 1 else data.batch or 1) / data.degree
        for i, rank in enumerate(owner):
            query[rank] += rows
            for line in kinds[:, :, i].flatten(0, 1).tolist():
                seen = set()
                for t, kind in enumerate(line):
                    if kind:
                        step = 0 if kv_owner[t] == rank else arrives[rank, t]
                        (full if kind == 2 else partial)[rank, step] += times
                        seen.add(step)
                for step in seen:
                    active[rank, step] += times
    return query, full, partial, active


def counted_moves(data: PlanData, s: Schedule, ranks: int, per_node: int) -> tuple[Any, ...]:
    """Received, sent [2, R, steps], gathered [R, steps] and peers of a schedule."""
    steps = len(s.steps) + 1
    stride = 2 if data.head_axis == 1 else 1  # devices between neighbours of the ring
    received, sent = torch.zeros(2, 2, ranks, steps, dtype=torch.float64)
    gathered = torch.zeros(ranks, steps, dtype=torch.float64)
    local = {(r, b): {p: i for i, p in enumerate(owned_rows(data, r, b))} for r in range(ranks) for b in range(data.batch_layouts)}
    peers: list[set[tuple[int, int]]] = [set() for _ in range(steps)]
    rows_to: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for stage, row, receiver, source, start, length in moves_of(s):
        step = step_of(data, stage)
        crosses = int(receiver * stride // per_node != source * stride // per_node)
        received[crosses, receiver, step] += length
        sent[crosses, source, step] += length
        peers[step].add((receiver, source))
        base = row * len(local[source, 0])
        rows_to[stage, source][receiver] += [base + local[source, row][p] for p in range(start, start + length)]
    for (stage, source), by_receiver in rows_to.items():
        if any(rows != list(range(rows[0], rows[0] + len(rows))) for rows in by_receiver.values()):
            gathered[source, step_of(data, stage)] += sum(map(len, by_receiver.values()))
    return received, sent, gathered, [sorted(p) for p in peers]


def counted_halves(data: PlanData, work: Workload, received: torch.Tensor) -> torch.Tensor:
    """Tiles of the two parts of local KV in backward [3, R, 2]. `received` [2, R, steps] of backward."""
    (tiles,), ranks = data.tiles, data.inner[0].ranks
    kinds, times = tiles.table.to_dense(), repeats(data, tiles.table)
    halves = torch.zeros(3, ranks, 2, dtype=torch.float64)
    several = sum(bool(received[:, :, i].any()) for i in range(received.shape[2])) > 1
    share = work.with_backward_moves().late_fraction.tolist()
    for rank in range(ranks):
        mine = [i for i, owner in enumerate(tiles.queries.owner.tolist()) if owner == rank]
        local = tiles.kv.of_rank(rank).tolist()
        lines = kinds[:, :, mine].flatten(0, 2)
        limit = int(received[:, rank].sum(0).max()) // 128 if several else None
        late = late_tiles((lines[:, local] > 0).sum(0), share[rank], limit)
        for part, chosen in enumerate((local[late:], local[:late])):
            halves[0, rank, part] = float((lines[:, chosen] == 2).sum()) * times
            halves[1, rank, part] = float((lines[:, chosen] == 1).sum()) * times
            halves[2, rank, part] = float((lines[:, chosen] > 0).any(1).sum()) * times
    return halves


@pytest.mark.parametrize(
    ("name", "per_node", "chunk"), [(name, per_node, chunk) for name in CASES for per_node, chunk in ((1, 1 << 24), (2, 30), (3, 1 << 24))]
)
def test_workloads_equal_tiles_and_moves_counted_one_by_one(name: str, per_node: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_workload, "CHUNK", chunk)
    check(planned(name), per_node)


def check(data: PlanData, per_node: int) -> None:
    ranks, s = data.inner[0].ranks, data.schedule
    work = _PlanCounter(data, per_node).workload()
    empty = int(work.halves is not None)  # the second part of local KV has a column of its own
    steps = len(s.steps) + 1
    assert (work.ranks, work.degree, work.steps, empty) == (ranks, data.degree, steps + empty, int(steps > 1))
    counted = [getattr(work, f.name) for f in fields(work) if f.name != "rank"] + list(work.backward or ())
    assert {t.dtype for t in counted if isinstance(t, torch.Tensor)} == {torch.float64} and work.rank.dtype == torch.int64
    query, full, partial, active = counted_tiles(data, ranks, steps)
    assert torch.equal(work.query_tiles, query)
    assert work.active_tiles is not None and work.gathered is not None
    received, sent, gathered, peers = counted_moves(data, s, ranks, per_node)
    columns = ((work.full, full), (work.partial, partial), (work.active_tiles, active), (work.received, received), (work.sent, sent))
    for got, want in (*columns, (work.gathered, gathered)):
        assert torch.equal(got[..., :steps], want) and not got[..., steps:].any()
    assert [sorted(zip(a.tolist(), b.tolist())) for a, b in work.peers] == peers + [peers[0]] * empty
    assert work.exchanges.tolist() == [0, *map(len, s.steps)] + [0] * empty
    groups = [data.groups[i].tolist() for i in range(ranks)]
    assert work.local.tolist() == [max(data.layouts[0].local_len(r) for r in group) for group in groups]
    assert work.local_kv is not None and work.local_kv.tolist() == [max(data.layouts[1].local_len(r) for r in group) for group in groups]
    assert work.scale == (1 if data.batch_layouts > 1 else data.batch or 1) and work.rank.tolist() == list(range(ranks))
    moves = data.backward_schedule
    moved = counted_moves(data, moves, ranks, per_node)
    active_stages = [sum(bool((moves.stage == stage).any()) for stage in stages) for stages in moves.steps]
    if moves is s and sum(active_stages) == s.stages:
        assert work.backward is None
    else:
        assert work.backward is not None and work.backward.gathered is not None
        for got, want in zip((work.backward.received, work.backward.sent, work.backward.gathered), moved):
            assert torch.equal(got[..., :steps], want)
        assert work.backward.exchanges.tolist() == [0, *active_stages, 0]
        assert [sorted(zip(a.tolist(), b.tolist())) for a, b in work.backward.peers[:-1]] == moved[3]
    if work.halves is not None and data.batch_layouts == 1:
        assert torch.equal(work.halves, counted_halves(data, work, moved[0]))
    elif work.halves is not None:
        assert torch.equal(work.halves[:, :, 0], torch.stack([full[:, 0], partial[:, 0], active[:, 0]])) and not work.halves[:, :, 1].any()


def test_the_cases_move_in_every_way() -> None:
    works = {name: _PlanCounter(planned(name), 2).workload() for name in CASES}
    assert sum(work.backward is not None for work in works.values()) >= 3 and works["one rank"].halves is None
    gathered = {name: float(work.gathered.sum()) for name, work in works.items() if work.gathered is not None}
    assert all(gathered[name] > 0 for name in ("layouts by row", "stages", "some gathered")) and gathered["heads"] == 0
    assert sum(bool(work.halves[..., 1].any()) for work in works.values() if work.halves is not None) >= 5
    assert works["two axes"].degree == 2 and works["layouts by row"].scale == 1 and works["stages"].steps > 3
    assert planned("batch rows, one layout").tiles[0].table.batch == 4 and planned("batch rows").batch_layouts == 4


def test_workloads_are_cached_by_node_size_and_joined_where_the_schedule_is() -> None:
    data = planned("heads")
    apart, joined = data.with_joined(False), data.with_joined(True)
    assert of_plan(apart, 2) is of_plan(apart, 2) is not of_plan(apart, 1)
    assert float(of_plan(apart, 2).received[1].sum()) < float(of_plan(apart, 1).received[1].sum())
    work = of_plan(joined, 2)
    assert work.joined and not work.full[:, 0].any() and float(work.full.sum()) == float(of_plan(apart, 2).full.sum())


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (1, 1, 1, 128, 4)),
        ({"heads": 6}, (1, 6, 6, 128, 4)),
        ({"heads": 6, "kv_heads": 2, "batch": 3, "head_dim": 64, "grad_reduce_dtype": torch.bfloat16}, (3, 6, 2, 64, 2)),
    ],
)
def test_unknown_sizes_count_as_1_and_the_head_dim_as_128(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    made = shape_of(ls.plan(ls.causal(), 600, ls.Mesh.abstract(2), strategy="ring", **options).data)
    assert (made.batch, made.heads, made.kv_heads, made.head_dim, made.grad_element) == shape


def test_chunks_have_at_most_as_many_entries_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_workload.CHUNK == 1 << 24
    for limit, tiles, want in ((12, 4, [3, 3, 1]), (11, 4, [2, 2, 2, 1]), (3, 4, [1] * 7), (12, 0, [7]), (3, 0, [3, 3, 1]), (28, 4, [7])):
        monkeypatch.setattr(plan_workload, "CHUNK", limit)
        chunks = list(plan_workload._chunks(7, tiles))
        assert [len(chunk) for chunk in chunks] == want and [rank for chunk in chunks for rank in chunk] == list(range(7))


def test_workloads_of_four_sizes_of_nodes_are_kept() -> None:
    data = planned("window").with_joined(False)
    works = {per_node: of_plan(data, per_node) for per_node in (1, 2, 3, 4, 5)}
    kept = plan_workload._workloads.values_of(data)
    assert dict(kept) == {n: work for n, work in works.items() if n > 1}
