"""Properties of a local schedule that steps and gradients depend on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan._engine.buffer_rows import RowSelection
from longspan._engine.local_schedule import ComputeStep, LocalSchedule, StageExchange


def selection(*rows: int) -> RowSelection:
    return RowSelection.of(torch.tensor(rows, dtype=torch.int64))


def exchange(*sent_to: tuple[int, ...], received: int = 0) -> StageExchange:
    return StageExchange(
        what="stage 1", start=0, stop=received, recv_counts=(received,), send_counts=tuple(map(len, sent_to)),
        sent=selection(*(row for rows in sent_to for row in rows)), sent_to=tuple(selection(*rows) for rows in sent_to),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sent_to", "views", "gathers"),
    [
        (((0, 1), (2, 3)), False, False),  # all rows are one range
        (((0, 1), (0, 1), ()), True, False),
        (((2, 3), (0, 1)), True, False),
        (((0, 2), (3,)), False, True),
        (((0, 2), (1, 3)), False, True),
        (((), ()), False, False),
    ],
    ids=str,
)
def test_rows_are_sent_as_views_gathered_or_as_they_are(sent_to: tuple[tuple[int, ...], ...], views: bool, gathers: bool) -> None:
    made = exchange(*sent_to)
    assert (made.sends_views, made.gathers_rows) == (views, gathers)
    step = ComputeStep(buffer_rows=0, local=range(0), exchanges=(exchange((0,)), made), tiles=())
    assert step.gathers_rows is gathers


def test_equal_ranges_are_made_once() -> None:
    assert exchange((2, 3), (0, 1), (2, 3), (), ()).sent_ranges == (((2, 4), (0, 2), (0, 0)), (0, 1, 0, 2, 2))


def test_rows_of_a_step_are_local_ones_and_received_ones() -> None:
    step = ComputeStep(buffer_rows=9, local=range(2), exchanges=(exchange((0, 1), (1,)), exchange((), (0,))), tiles=())
    assert (step.received_rows, step.sent_rows, step.transfer_rows) == (7, 4, 7)
    assert [part.tolist() for part in step.returned.parts] == [[0, 1], [1], [0]]
    sends = ComputeStep(buffer_rows=3, local=range(0), exchanges=(exchange((0, 1, 2, 3)),), tiles=())
    assert (sends.received_rows, sends.sent_rows, sends.transfer_rows) == (3, 4, 4)
    for empty in ([], [True], [True, True], [True, False]):
        tiles: Any = tuple(SimpleNamespace(empty=e) for e in empty)
        assert ComputeStep(buffer_rows=0, local=range(0), exchanges=(), tiles=tiles).empty == all(empty)


def step(index: int, received: int, sent: int, exchanges: bool = True) -> Any:
    returned = SimpleNamespace(parts=(f"a{index}", f"b{index}"))
    return SimpleNamespace(index=index, received_rows=received, sent_rows=sent, exchanges=(1,) if exchanges else (), returned=returned)


@pytest.mark.parametrize(
    ("steps", "final"),
    [
        ([step(0, 0, 0, exchanges=False)], []),
        ([step(0, 0, 0, exchanges=False), step(1, 4, 4)], [1]),
        ([step(0, 9, 9), step(1, 5, 99), step(2, 7, 8)], [1, 2]),  # 8 rows fit into 5 + 7 // 2
        ([step(0, 9, 9), step(1, 5, 99), step(2, 7, 9)], [2]),
        ([step(0, 5, 1), step(1, 6, 8), step(2, 0, 0, exchanges=False)], [0, 1]),
        ([step(0, 5, 1), step(1, 6, 9), step(2, 0, 0, exchanges=False)], [1]),
    ],
)
def test_returns_of_the_last_two_steps_are_added_at_once_where_they_fit(steps: list[Any], final: list[int]) -> None:
    schedule = LocalSchedule(steps=tuple(steps), last_step=(0,))
    assert [s.index for s in schedule.final_returns] == final
    assert schedule.exchanges == any(s.exchanges for s in steps)
    assert schedule.final_returned_rows.parts == tuple(f"{x}{i}" for i in final for x in "ab")
