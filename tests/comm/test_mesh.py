"""Meshes are picklable values, and need no process groups until something is sent."""

from __future__ import annotations

import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comm.exchanges import uneven_exchange

from longspan._comm.mesh import Axis, Mesh, _from_device_mesh, as_mesh
from longspan.testing import virtual_world


def test_rank_is_the_row_major_index_of_the_coordinate() -> None:
    mesh = Mesh.abstract((2, 5), 7, ("ulysses", "ring"))
    assert (mesh.size, mesh.rank, mesh.coordinate, mesh.axes) == (10, 7, (1, 2), (Axis("ulysses", 2), Axis("ring", 5)))
    assert [Mesh.abstract((2, 5), r).rank for r in range(10)] == list(range(10))
    assert Mesh.abstract(3).axes == (Axis("axis0", 3),)


def test_an_unpickled_mesh_is_equal_and_finds_its_world() -> None:
    world = virtual_world((2, 2), axis_names=("a", "b"))
    for mesh in (*world.meshes, Mesh.abstract(4, 3)):
        assert pickle.loads(pickle.dumps(mesh)) == mesh
        assert hash(pickle.loads(pickle.dumps(mesh))) == hash(mesh)
    assert all(world.run(lambda mesh: uneven_exchange(pickle.loads(pickle.dumps(mesh)).group("b"))))


def test_an_abstract_mesh_does_not_communicate() -> None:
    mesh = Mesh.abstract(4, 2)
    assert as_mesh(mesh) is mesh
    with pytest.raises(
        RuntimeError, match=r"abstract: rank 2 can plan with it, but not .* the 4 ranks of axis 'axis0'.*DeviceMesh or ProcessGroup"
    ):
        mesh.group(0)


def test_an_axis_of_one_rank_needs_no_group() -> None:
    group = Mesh.abstract(1).group(0)
    assert (group.rank, group.size) == (0, 1)
    assert uneven_exchange(group)


def test_a_missing_process_group_raises_at_lookup_only() -> None:
    mesh = Mesh(axes=(Axis("cp", 3),), coordinate=(1,), groups=("17",))
    assert as_mesh(mesh).rank == 1
    with pytest.raises(RuntimeError, match=r"axis 'cp' .*process group '17'.*init_process_group"):
        mesh.group("cp")


def test_a_deleted_virtual_world_raises() -> None:
    mesh = virtual_world(2).meshes[0]
    gc.collect()
    with pytest.raises(RuntimeError, match=r"virtual world of axis 'axis0' .*was deleted"):
        mesh.group(0)


@pytest.mark.parametrize("value", [None, 4, "cp", torch.zeros(2)])
def test_values_that_are_no_mesh_raise(value: object) -> None:
    with pytest.raises(TypeError, match=r"mesh: expected a DeviceMesh of one or two dims, a ProcessGroup.*Mesh.abstract"):
        as_mesh(value)


@pytest.mark.parametrize("axis", [1, -1, "ring", None])
def test_an_unknown_axis_raises(axis: int | str) -> None:
    with pytest.raises(ValueError, match=r"expected an axis of \['axis0'\]"):
        Mesh.abstract(2).group(axis)


def test_bad_shapes_ranks_and_names_raise() -> None:
    for make in (
        lambda: Mesh.abstract(0),
        lambda: Mesh.abstract(()),
        lambda: Mesh.abstract((2, 2, 2)),
        lambda: Mesh.abstract(4, 4),
        lambda: Mesh.abstract(4, -1),
        lambda: Mesh.abstract((2, 2), 0, ("a", "a")),
        lambda: Mesh.abstract((2, 2), 0, ("a",)),
        lambda: Mesh(axes=(Axis("a", 2),), coordinate=(2,)),
        lambda: Mesh(axes=(Axis("a", 2),), coordinate=(0, 0)),
        lambda: Mesh(axes=(Axis("a", 2),), coordinate=(0,), groups=("1", "2")),
    ):
        with pytest.raises(ValueError, match="mesh: expected"):
            make()


@pytest.mark.parametrize("ranks", [[[0, 1], [3, 2]], [[0, 3], [1, 2]], [0, 2, 1], [0, 1, 1]], ids=str)
def test_a_mesh_in_which_some_ranks_do_not_ascend_raises(ranks: Any) -> None:
    mesh = torch.tensor(ranks)
    stub = SimpleNamespace(mesh=mesh, ndim=mesh.ndim, mesh_dim_names=("a", "b")[: mesh.ndim], get_coordinate=lambda: [0] * mesh.ndim)
    with pytest.raises(ValueError, match="expected a DeviceMesh whose ranks ascend along every dim"):
        _from_device_mesh(stub)
