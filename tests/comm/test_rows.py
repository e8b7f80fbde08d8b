"""Rows of an exchange: how they are cut, sent as bytes, counted and described."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan._comm.agreement import _differing_values, _rank_list
from longspan._comm.all_reduce import _even_counts
from longspan._comm.group import Alone, check_whole, describe
from longspan._comm.mesh import Axis, Mesh, as_mesh, coordinate_of
from longspan._comm.process_group import _as_supported, _cut
from longspan._comm.row_moves import RowMoves


@pytest.mark.parametrize("splits", [[2, 3, 1], [0, 6, 0], [4, 0, 2], [0, 0, 0], [6]], ids=str)
def test_rows_are_cut_in_rank_order_without_a_copy(splits: list[int]) -> None:
    rows = torch.arange(12).view(6, 2)[: sum(splits)]
    cut = _cut(rows, splits)
    assert [len(piece) for piece in cut] == splits and all(piece.shape[1:] == (2,) for piece in cut)
    assert torch.equal(torch.cat(list(cut)), rows)
    rows.zero_()
    assert not torch.cat(list(cut)).any()


@pytest.mark.parametrize(
    ("dtype", "as_bytes"),
    [(torch.float32, False), (torch.int64, False), (torch.uint8, False), (torch.bfloat16, True), (torch.int16, True), (torch.bool, True)],
    ids=str,
)
def test_dtypes_that_some_backend_lacks_are_sent_as_bytes(dtype: torch.dtype, as_bytes: bool) -> None:
    rows = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    sent = _as_supported(rows)
    assert sent.data_ptr() == rows.data_ptr() and (sent is not rows) == as_bytes
    if as_bytes:
        assert sent.dtype == torch.uint8 and sent.shape == (2, 3, dtype.itemsize)


def test_rows_are_shared_evenly_the_first_ranks_have_more() -> None:
    assert _even_counts(11, 4) == [3, 3, 3, 2] and _even_counts(2, 3) == [1, 1, 0] and _even_counts(6, 3) == [2, 2, 2]


def test_eight_ranks_are_listed_and_a_ninth_is_counted() -> None:
    assert _rank_list([5]) == "rank 5"
    assert _rank_list(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert _rank_list(range(1, 12)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"


def test_values_of_most_ranks_come_last() -> None:
    assert _differing_values("size", ["3", "3", "3"]) is None
    assert _differing_values("size", ["3", "4", "4", None]) == "size: rank 0 has 3, rank 3 has no such field, ranks 1, 2 have 4"
    assert _differing_values("size", ["3", "4"]) == "size: rank 1 has 4, rank 0 has 3"


def test_a_rank_alone_copies_its_rows_and_checks_them() -> None:
    group, sent = Alone(name="cp"), torch.randn(3, 2, requires_grad=True)
    for pieces in (False, True):
        out = torch.empty(3, 2)
        given = ([sent], [3]) if pieces else (sent, [3], [3])
        (group.all_to_all_pieces if pieces else group.all_to_all)(out, *given, what="rows").wait()  # type: ignore[operator]
        assert torch.equal(out, sent) and not out.requires_grad
    at = r"rows: rank 0 of 1 on axis 'cp': expected "
    with pytest.raises(ValueError, match=at + "one piece per rank, 1 .* got 2"):
        group.all_to_all_pieces(torch.empty(3, 2), [sent, sent[:0]], [3], what="rows")
    with pytest.raises(ValueError, match=at + r"1 splits of 0 or more that add up to the 3 rows of `sent`, got \[2\]"):
        group.all_to_all(torch.empty(2, 2), sent, [2], [2], what="rows")
    with pytest.raises(ValueError, match=at + r"1 splits .* the 2 rows of `out`, got \[3\]"):
        group.all_to_all(torch.empty(2, 2), sent, [3], [3], what="rows")
    with pytest.raises(ValueError, match=at + "equal splits for the rank itself, got 3 rows sent and 2 received"):
        group.all_to_all(torch.empty(2, 2), sent, [2], [3], what="rows")
    for other in (sent.double(), torch.empty(3, 5), torch.empty(3, 2, device="meta")):
        with pytest.raises(ValueError, match=at + "rows of one shape, dtype and device"):
            group.all_to_all(torch.empty(3, 2), other, [3], [3], what="rows")
    with pytest.raises(ValueError, match=at + r"`sent` to be contiguous rows, got \[3, 2\], strides \(1, 3\)"):
        group.all_to_all(torch.empty(3, 2), torch.empty(2, 3).mT, [3], [3], what="rows")
    assert describe(torch.empty(7, 2, 5, dtype=torch.int16)) == "[2, 5] int16 on cpu"


def test_ranks_of_a_mesh_are_bounded_and_have_one_axis_each_way() -> None:
    axes = (Axis("a", 2), Axis("b", 3))
    assert [coordinate_of(axes, r) for r in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"a rank of 0 to 5 in a mesh of .*, got {rank}"):
            coordinate_of(axes, rank)
    mesh = Mesh(axes=axes, coordinate=(1, 2), groups=("x", "y"))
    for axis, part in (
        ("a", Mesh(axes=axes[:1], coordinate=(1,), groups=("x",))),
        (1, Mesh(axes=axes[1:], coordinate=(2,), groups=("y",))),
    ):
        assert mesh.along(axis) == part  # type: ignore[arg-type]
    for coordinate in ((2, 0), (0, 3), (0,)):
        with pytest.raises(ValueError, match="a coordinate in axes of sizes"):
            Mesh(axes=axes, coordinate=coordinate)
    with pytest.raises(ValueError, match="a group for each of 2 axes, or none"):
        Mesh(axes=axes, coordinate=(0, 0), groups=("x",))


@pytest.mark.parametrize(
    ("out", "sent", "message"),
    [
        ([5, -2], [5, 0], r"2 splits of 0 or more that add up to the 3 rows of `out`, got \[5, -2\]"),
        ([5, 0], [5, -2], r"2 splits of 0 or more that add up to the 3 rows of `sent`, got \[5, -2\]"),
        ([2, 0], [3, 0], "equal splits for the rank itself, got 3 rows sent and 2 received"),
        ([2, 1, 1], [2, 1], r"2 splits .* the 4 rows of `out`, got \[2, 1, 1\]"),
        ([2, 1], [2, 1, 1], r"2 splits .* the 4 rows of `sent`, got \[2, 1, 1\]"),
    ],
    ids=str,
)
def test_splits_are_not_negative_one_per_rank_and_equal_for_the_rank_itself(out: list[int], sent: list[int], message: str) -> None:
    group: Any = SimpleNamespace(name="cp", rank=0, size=2)
    check_whole(group, torch.empty(3, 2), torch.empty(4, 2), [3, 0], [3, 1], what="rows")
    with pytest.raises(ValueError, match="rows: rank 0 of 2 on axis 'cp': expected " + message):
        check_whole(group, torch.empty(sum(out), 2), torch.empty(sum(sent), 2), out, sent, what="rows")


def test_a_rank_alone_sends_control_messages_to_itself_on_the_cpu() -> None:
    group = Alone(name="cp")
    assert group.control() == (group, torch.device("cpu"))


def test_a_process_group_is_a_mesh_of_its_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = as_mesh(dist.group.WORLD)
        assert mesh == Mesh(axes=(Axis("axis0", 1),), coordinate=(0,), groups=(dist.group.WORLD.group_name,))
        assert (mesh.group(0).rank, mesh.group(0).size, mesh.group(0).name) == (0, 1, "axis0")
        with pytest.raises(ValueError, match=r"this process \(global rank 0\) is not a rank of the group that new_group was called for"):
            as_mesh(dist.GroupMember.NON_GROUP_MEMBER)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [1, 4, (2, 3), (3, 2), (1, 3), (3, 1)], ids=str)
def test_hops_of_all_ranks_bring_rows_to_their_new_owners(shape: int | tuple[int, int]) -> None:
    """Axis by axis, the last one first: each rank sends to the ranks of its line, in rank order."""
    meshes = [Mesh.abstract(shape, rank) for rank in range(Mesh.abstract(shape).size)]
    generator = torch.Generator().manual_seed(len(meshes))
    rows = 29

    def dealt() -> list[torch.Tensor]:
        owner = torch.randint(0, max(1, len(meshes) - 1), (rows,), generator=generator)  # of several ranks, the last one holds nothing
        order = torch.randperm(rows, generator=generator)
        return [order[owner[order] == rank] for rank in range(len(meshes))]

    before, after = dealt(), dealt()
    moves = [RowMoves.between(mesh, before, after, torch.device("cpu")) for mesh in meshes]
    held = before
    axes = meshes[0].axes
    for number, axis in enumerate(reversed(range(len(axes)))):
        sent = []
        for rank, made in enumerate(moves):
            hop = made.hops[number]
            assert hop.axis == axis and len(hop.sent) == len(hop.received) == axes[axis].size and sum(hop.sent) == len(held[rank])
            sent.append(held[rank][hop.order].split(list(hop.sent)))
        received = []
        for rank, mesh in enumerate(meshes):
            line = [
                r
                for r, other in enumerate(meshes)
                if all(a == b for i, (a, b) in enumerate(zip(mesh.coordinate, other.coordinate)) if i != axis)
            ]
            pieces = [sent[r][mesh.coordinate[axis]] for r in line]
            assert tuple(map(len, pieces)) == moves[rank].hops[number].received
            received.append(torch.cat(pieces))
        held = received
    assert all(torch.equal(rows_of[made.order], wanted) for rows_of, made, wanted in zip(held, moves, after))


@pytest.mark.parametrize(("out", "sent"), [((3, 4), (3, 2, 4)), ((3, 2, 4), (3, 4)), ((3,), (3, 1)), ((3, 2, 4), (3, 4, 2))], ids=str)
def test_rows_of_other_shapes_or_numbers_of_dims_raise(out: tuple[int, ...], sent: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected rows of one shape, dtype and device"):
        check_whole(Alone(name="cp"), torch.empty(out), torch.empty(sent), [3], [3], what="rows")
