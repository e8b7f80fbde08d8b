"""All-gather and reduce-scatter of rows equal plain concatenation and sum."""

from __future__ import annotations

import pytest
import torch
from tests.comm.exchanges import counts_of

from longspan._comm.all_reduce import all_reduce_rows
from longspan._comm.gather import all_gather_rows, reduce_scatter_rows
from longspan._comm.mesh import Mesh
from longspan.testing import virtual_world

SHAPES = [1, 2, 5, (1, 3), (2, 3), (3, 2)]


def rows(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_rows_are_in_rank_order(shape: int | tuple[int, int]) -> None:
    world = virtual_world(shape)
    counts = counts_of(world.size)
    expected = torch.cat([rows(r, n) for r, n in enumerate(counts)])
    for got in world.run(lambda mesh: all_gather_rows(mesh, rows(mesh.rank, counts[mesh.rank]), counts)):
        assert torch.equal(got, expected)


def test_strided_rows_are_gathered_by_value() -> None:
    for got in virtual_world(2).run(lambda mesh: all_gather_rows(mesh, rows(mesh.rank, 3).permute(1, 2, 0), [3, 3])):
        assert torch.equal(got, torch.cat([rows(r, 3).permute(1, 2, 0) for r in range(2)]))


@pytest.mark.parametrize("shape", [2, (2, 1)], ids=str)
def test_strided_rows_are_summed_by_value(shape: int | tuple[int, int]) -> None:
    inputs = [rows(r, 3).permute(1, 2, 0) for r in range(2)]
    got = virtual_world(shape).run(lambda mesh: reduce_scatter_rows(mesh, inputs[mesh.rank], [1, 2]))
    assert torch.equal(torch.cat(got), inputs[0] + inputs[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_reduce_scatter_sums_over_all_ranks(shape: int | tuple[int, int], dtype: torch.dtype) -> None:
    world = virtual_world(shape)
    counts = counts_of(world.size)
    inputs = [rows(r, sum(counts), dtype) for r in range(world.size)]
    for got, expected in zip(
        world.run(lambda mesh: reduce_scatter_rows(mesh, inputs[mesh.rank], counts)), sum(x.double() for x in inputs).split(counts)
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected.to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_reduced_rows_know_their_indices(shape: int | tuple[int, int]) -> None:
    world = virtual_world(shape)
    inputs = [rows(r, 7) for r in range(world.size)]
    expected = sum(x.double() for x in inputs).float() * torch.arange(7)[:, None, None]

    def on_rank(mesh: Mesh) -> torch.Tensor:
        def finish(reduced: torch.Tensor, indices: range) -> torch.Tensor:
            return reduced * torch.tensor(list(indices))[:, None, None]

        return all_reduce_rows(mesh, inputs[mesh.rank], lambda parts: parts.sum(0), finish, what="test", fields={})

    results = world.run(on_rank)
    assert all(torch.equal(results[0], other) for other in results)
    torch.testing.assert_close(results[0], expected)


def test_half_dtypes_are_summed_in_float32_in_rank_order() -> None:
    inputs = [torch.tensor([[256.0]]), *[torch.tensor([[1.0]])] * 7]  # in bfloat16, 256 + 1 is 256
    (got, *_) = virtual_world(8).run(lambda mesh: reduce_scatter_rows(mesh, inputs[mesh.rank].bfloat16(), [1, *[0] * 7]))
    assert got.item() == 264.0  # the nearest to 263
    (got, *_) = virtual_world((2, 4)).run(lambda mesh: reduce_scatter_rows(mesh, inputs[mesh.rank].bfloat16(), [1, *[0] * 7]))
    assert got.item() == 264.0


@pytest.mark.parametrize("shape", [4, (2, 2)], ids=str)
def test_repeated_calls_give_the_same_bits(shape: int | tuple[int, int]) -> None:
    world = virtual_world(shape)
    counts = counts_of(4)
    runs = [world.run(lambda mesh: reduce_scatter_rows(mesh, rows(mesh.rank, sum(counts)), counts)) for _ in range(4)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


def test_reduce_scatter_is_the_adjoint_of_all_gather() -> None:
    world, counts = virtual_world((2, 3)), counts_of(6)
    xs = [rows(r, n, torch.float64) for r, n in enumerate(counts)]
    ys = [rows(10 + r, sum(counts), torch.float64) for r in range(6)]
    gathered = world.run(lambda mesh: all_gather_rows(mesh, xs[mesh.rank], counts))
    scattered = world.run(lambda mesh: reduce_scatter_rows(mesh, ys[mesh.rank], counts))
    left, right = sum((g * y).sum() for g, y in zip(gathered, ys)), sum((x * s).sum() for x, s in zip(xs, scattered))
    torch.testing.assert_close(left, right)


def test_wrong_counts_raise_on_every_rank() -> None:
    for call in (all_gather_rows, reduce_scatter_rows):
        for counts in ([1, 2], [1, 2, 9], [5, 5, 5]):
            with pytest.raises(ValueError, match="rank 0 expected 3 counts"):
                virtual_world(3).run(lambda mesh, call=call, counts=counts: call(mesh, torch.zeros(4), counts))


def test_a_tensor_that_requires_grad_raises() -> None:
    x = torch.zeros(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="not differentiable"):
        all_gather_rows(Mesh.abstract(1), x, [1])
    with torch.no_grad():
        assert torch.equal(all_gather_rows(Mesh.abstract(1), x, [1]), x)


@pytest.mark.parametrize(("x", "counts"), [
    (torch.zeros(()), [2, 2]), (torch.zeros(2, 3), [2]), (torch.zeros(2, 3), [2, 2, 2]), (torch.zeros(3, 3), [2, 2]),
    (torch.zeros(0), [1, 0]),
])  # fmt: skip
def test_rows_and_counts_that_do_not_fit_raise(x: torch.Tensor, counts: list[int]) -> None:
    def fn(mesh: Mesh) -> None:
        with pytest.raises(
            (ValueError, RuntimeError), match=r"all-gather of rows: rank \d expected 2 counts and a tensor of .* rows, got counts"
        ):
            all_gather_rows(mesh, x, counts)
        with pytest.raises((ValueError, RuntimeError), match=r"reduce-scatter of rows: rank \d expected 2 counts"):
            reduce_scatter_rows(mesh, torch.zeros(5), counts)

    virtual_world(2).run(fn)


@pytest.mark.parametrize("shape", [2, (1, 2)], ids=str)
def test_strided_rows_are_reduced_by_value(shape: int | tuple[int, int]) -> None:
    inputs = [rows(r, 3).permute(1, 2, 0) for r in range(2)]
    finish = lambda reduced, indices: reduced
    got = virtual_world(shape).run(
        lambda mesh: all_reduce_rows(mesh, inputs[mesh.rank], lambda parts: parts.sum(0), finish, what="test", fields={})
    )
    assert all(torch.equal(x, inputs[0] + inputs[1]) for x in got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reduced_rows_hold_no_memory_of_the_received_ones(dtype: torch.dtype) -> None:
    got = virtual_world(3).run(lambda mesh: reduce_scatter_rows(mesh, torch.ones(6, 5, dtype=dtype), [1, 2, 3]))
    assert [(x.dtype, x.untyped_storage().nbytes()) for x in got] == [(dtype, n * 5 * dtype.itemsize) for n in (1, 2, 3)]
    assert all(bool((x == 3).all()) for x in got)
