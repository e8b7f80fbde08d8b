"""Strategies by name on meshes, and schedules as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longspan._comm.mesh import Mesh
from longspan._plan.digest import content, digest_of
from longspan._plan.schedule import Schedule
from longspan._plan.strategies import Strategy, strategy_for, two_axis_strategy, ulysses_axis, ulysses_error


def mesh(*names: str) -> Mesh:
    return Mesh.abstract(tuple(range(2, 2 + len(names))), axis_names=names)


@pytest.mark.parametrize(("name", "axes", "strategy"), [
    ("ring", "c", ("ring", None, 0, "ring")),
    ("allgather", "c", ("allgather", None, 0, "allgather")),
    ("exchange", "c", ("exchange", None, 0, "exchange")),
    ("auto", "c", ("exchange", None, 0, "exchange")),
    ("ulysses", "c", ("ulysses", 0, None, "none")),
    ("auto", "ab", ("ulysses_exchange", 0, 1, "exchange")),
    ("ulysses_ring", "ab", ("ulysses_ring", 0, 1, "ring")),
    ("ulysses_allgather", "ab", ("ulysses_allgather", 0, 1, "allgather")),
    ("ulysses_exchange", ["ring", "b"], ("ulysses_exchange", 1, 0, "exchange")),
    ("ulysses_ring", ["a", "ring"], ("ulysses_ring", 0, 1, "ring")),
    ("ulysses_ring", ["a", "ulysses"], ("ulysses_ring", 1, 0, "ring")),
    ("ulysses_ring", ["ulysses", "ring"], ("ulysses_ring", 0, 1, "ring")),
])  # fmt: skip
def test_strategies_by_name(name: str, axes: list[str], strategy: tuple[str, int | None, int | None, str]) -> None:
    made = strategy_for(name, mesh(*axes))
    assert (made.name, made.head_axis, made.kv_axis, made.moves) == strategy
    if made.kv_axis is not None and made.head_axis is not None:
        assert ulysses_axis(mesh(*axes)) == made.head_axis and two_axis_strategy(made.moves, made.head_axis) == made


@pytest.mark.parametrize(("name", "axes", "message"), [
    ("rings", "c", "strategy: expected one of 'ring', 'allgather', .* or a Schedule, got 'rings'"),
    ("ulysses_ring", "c", r"strategy 'ulysses_ring' needs a mesh of two axes, such as .*; got one axis: 'c' of size 2"),
    ("ring", "ab", "strategy 'ring' runs over one axis; got two: 'a' of size 2, 'b' of size 3. Pass the one"),
    ("ulysses", "ab", "strategy 'ulysses' runs over one axis; got two: 'a' of size 2, 'b' of size 3. Pass the one"),
])  # fmt: skip
def test_strategies_need_their_number_of_axes(name: str, axes: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_for(name, mesh(*axes))


def test_numbers_of_stages_follow_from_the_ranks_where_they_are_fixed() -> None:
    stages = lambda moves, ranks: Strategy(name="", head_axis=None, kv_axis=0, moves=moves).stages(ranks)
    assert [[stages(moves, ranks) for ranks in (1, 2, 5)] for moves in ("ring", "allgather", "none", "exchange")] == [
        [0, 1, 4], [0, 1, 1], [0, 0, 0], [None, None, None]
    ]  # fmt: skip


@pytest.mark.parametrize(("degree", "heads", "kv_heads", "error"), [
    (1, 7, 7, None), (4, 8, 8, None), (4, 8, 2, None), (8, 8, 2, None), (2, 12, 4, None), (4, 12, 4, None), (12, 12, 4, None),
    (2, 12, 1, None),
    (3, 8, 8, "8 query heads do not divide by a Ulysses degree of 3"),
    (16, 8, 8, "8 query heads do not divide by a Ulysses degree of 16"),
    (6, 12, 4, "2 query heads per rank and 3 query heads per kv head: one must divide the other"),
    (2, 12, 3, "6 query heads per rank and 4 query heads per kv head: one must divide the other"),
])  # fmt: skip
def test_ranks_share_heads_in_whole_groups_or_parts_of_one(degree: int, heads: int, kv_heads: int, error: str | None) -> None:
    assert ulysses_error(degree, heads, kv_heads) == error


def schedule() -> Schedule:
    """Seven moves in four stages, of which the second is empty, between three ranks."""
    columns = {"stage": [0, 0, 2, 2, 2, 3, 3], "row": [0, 1, 0, 0, 1, 0, 0], "receiver": [0, 2, 1, 2, 2, 0, 1],
               "source": [1, 0, 2, 1, 1, 2, 0], "start": [0, 4, 8, 9, 9, 1, 2], "length": [3, 5, 7, 2, 4, 6, 9]}  # fmt: skip
    return Schedule(
        name="mine", stages=4, steps=(range(2), range(2, 4)), **{name: torch.tensor(column) for name, column in columns.items()}
    )


def test_tokens_per_stage_are_counted_by_receiver_and_by_source() -> None:
    made = schedule()
    assert made.received(3).tolist() == [[3, 0, 5], [0, 0, 0], [0, 7, 6], [6, 9, 0]]
    assert made.sent(4).tolist() == [[5, 3, 0, 0], [0, 0, 0, 0], [0, 6, 7, 0], [9, 0, 6, 0]]
    assert made.active_stages.tolist() == [1, 2]
    assert replace(made, steps=(range(1), range(1, 2), range(2, 4))).active_stages.tolist() == [1, 0, 2]
    assert [column.tolist() for column in made.columns] == [
        getattr(made, name).tolist() for name in ("stage", "row", "receiver", "source", "start", "length")
    ]


def test_the_digest_of_a_schedule_depends_on_all_that_moves_and_not_on_its_name() -> None:
    made = schedule()
    assert replace(made, name="other").digest == made.digest == schedule().digest
    changed = [replace(made, **{name: column + 1}) for name in ("stage", "row", "receiver", "source", "start", "length")
               for column in [getattr(made, name)]]  # fmt: skip
    changed += [replace(made, stages=5), replace(made, steps=(range(4),)), replace(made, steps=(range(3), range(3, 4)))]
    changed += [replace(made, joined=True), replace(made, only_read_kv=True)]
    assert len({made.digest, *(other.digest for other in changed)}) == 12


def test_digests_of_texts_and_tensors_depend_on_order_dtype_and_shape() -> None:
    x = torch.arange(6, dtype=torch.int16)
    assert content(x) == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]) and content(x[:0]) == b"" and content(x[:1]) == b"\0\0"
    assert content(x.view(2, 3).T) == content(x.view(2, 3).T.contiguous()) != content(x)
    with pytest.raises(NotImplementedError, match="meta"):
        content(torch.empty(3, device="meta"))
    parts = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], [x], [x.view(2, 3)], [x.view(torch.uint8)], [x, "ab"], ["ab", x], [x + 1], []]
    assert len({digest_of(p) for p in parts}) == len(parts)
