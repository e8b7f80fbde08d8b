"""Real processes over Gloo. Starting processes is slow: each start serves several checks."""

from __future__ import annotations

import os
import pickle
import re
import time
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from tests.comm.exchanges import counts_of, exchange_of_pieces, gradient_through_an_exchange, uneven_exchange
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan._comm.agreement import CallDescription, agree, raise_on_all_ranks
from longspan._comm.gather import all_gather_rows, reduce_scatter_rows
from longspan._comm.mesh import Axis, Mesh, as_mesh, context_mesh
from longspan._comm.row_moves import RowMoves, move_rows
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn)


def exchanges_arrive(mesh: Mesh, device: str = "cpu") -> None:
    for i in range(len(mesh.axes)):
        for dtype in DTYPES:
            assert uneven_exchange(mesh.group(i), dtype=dtype, device=device), (dtype, i)
            assert exchange_of_pieces(mesh.group(i), dtype=dtype, device=device, gathered=mesh.rank == 1), (dtype, i)
        got, expected = gradient_through_an_exchange(mesh, i, device)
        assert torch.equal(got, expected)
        size, each = mesh.axes[i].size, torch.full((3,), mesh.coordinate[i], device=device)
        empty = mesh.group(i).all_to_all(torch.empty(0, 5), torch.empty(0, 5), [0] * size, [0] * size, what="no rows")
        bare = mesh.group(i).all_to_all(torch.empty(size, 0), torch.empty(size, 0), [1] * size, [1] * size, what="rows of nothing")
        outs = [torch.empty(3 * size, dtype=torch.int64, device=device) for _ in range(4)]
        pending = [
            mesh.group(i).all_to_all(out, (each + 10 * k).repeat(size), [3] * size, [3] * size, what=f"{k}") for k, out in enumerate(outs)
        ]
        none = mesh.group(i).all_to_all_pieces(torch.empty(0, 5), [torch.empty(0, 5)] * size, [0] * size, what="pieces of no rows")
        for waits in (*reversed(pending), empty, bare, none):
            waits.wait()
            waits.wait()
        assert [out[::3].tolist() for out in outs] == [[10 * k + r for r in range(size)] for k in range(4)]


def collectives_match(mesh: Mesh, device: str = "cpu") -> None:
    counts = counts_of(mesh.size)
    inputs = [torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(r)).to(device) for r in range(mesh.size)]
    mine = inputs[0].split(counts)[mesh.rank]
    assert torch.equal(all_gather_rows(mesh, mine, counts), inputs[0])
    torch.testing.assert_close(reduce_scatter_rows(mesh, inputs[mesh.rank], counts), sum(inputs).split(counts)[mesh.rank])
    rows = torch.arange(sum(counts), device=device)
    ids = [part.cpu() for part in rows.split(counts)]
    back = [part.flip(0) for part in reversed(ids)]  # of unequal lengths, the last rank's first
    moves = RowMoves.between(mesh, ids, back, torch.device(device))
    moved = move_rows(mesh, rows.split(counts)[mesh.rank], moves, what="moves", fields={})
    assert torch.equal(moved.cpu(), back[mesh.rank])
    agree(mesh, CallDescription("a call", {"dtype": "float32"}))
    with pytest.raises(ValueError, match=r"dtype: rank 1 has bfloat16, .*rank.* 0.* float32"):
        agree(mesh, CallDescription("a call", {"dtype": "bfloat16" if mesh.rank == 1 else "float32"}))
    if mesh.rank == 0:
        with pytest.raises(TypeError, match="no such thing"):
            raise_on_all_ranks(mesh, TypeError("no such thing"))
    else:
        with pytest.raises(RuntimeError, match="rank 0 raised in this call: TypeError: no such"):
            agree(mesh, CallDescription("a call", {}))


def on_a_grid_of_four() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    rank = dist.get_rank()
    mesh = as_mesh(grid)
    assert (mesh.axes, mesh.coordinate, mesh.rank) == ((Axis("ulysses", 2), Axis("ring", 2)), divmod(rank, 2), rank)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    exchanges_arrive(pickle.loads(pickle.dumps(mesh)))
    collectives_match(mesh)
    ring = as_mesh(grid["ring"])
    assert (ring.axes, ring.rank) == ((Axis("ring", 2),), rank % 2)
    exchanges_arrive(ring)
    flat = as_mesh(dist.group.WORLD)
    assert (flat.axes, flat.rank) == ((Axis("axis0", 4),), rank)
    collectives_match(flat)


def test_a_grid_of_four_processes_exchanges_gathers_and_agrees() -> None:
    run_processes(on_a_grid_of_four, 4)


def of_three() -> tuple[str, float, str]:
    rank = dist.get_rank()
    nameless = as_mesh(DeviceMesh("cpu", [0, 1, 2]))
    assert (nameless.axes, nameless.rank) == ((Axis("axis0", 3),), rank)
    exchanges_arrive(nameless)
    collectives_match(nameless)
    cube = init_device_mesh("cpu", (1, 3, 1), mesh_dim_names=("dp", "cp", "tp"))
    with pytest.raises(ValueError, match=r"one or two dims, got 3 .*submesh.*mesh\['cp'\]"):
        as_mesh(cube)
    assert as_mesh(cube["cp"]).rank == as_mesh(cube["dp", "cp"]).rank == rank
    assert context_mesh(cube) == context_mesh(cube["cp", "tp"]) == as_mesh(cube["cp"])
    with pytest.raises(ValueError, match="ascend along every dim"):
        as_mesh(DeviceMesh("cpu", [2, 0, 1]))

    pair = dist.new_group([0, 2])
    part = DeviceMesh("cpu", [0, 2])
    if rank == 1:
        for outside in (pair, part):
            with pytest.raises(ValueError, match=r"this process \(global rank 1\) is not a rank of"):
                as_mesh(outside)
    else:
        for inside in (pair, part):
            assert as_mesh(inside).rank == rank // 2
            exchanges_arrive(as_mesh(inside))
        stranger = Mesh(axes=(Axis("cp", 2),), coordinate=(1 - rank // 2,), groups=as_mesh(pair).groups)
        with pytest.raises(RuntimeError, match=f"made for rank {1 - rank // 2} of 2, but .* is rank {rank // 2} of 2"):
            stranger.group(0)

    impatient = dist.new_group(timeout=timedelta(seconds=3))
    group = as_mesh(impatient).group(0)
    dist.barrier()
    assert uneven_exchange(group)
    dist.barrier()
    if rank == 1:
        time.sleep(5)
        return "", 0.0, ""
    started = time.monotonic()
    out, sent = torch.empty(3, 2), torch.zeros(3, 2)
    with redirect_stderr(StringIO()) as warnings, pytest.raises(RuntimeError) as caught:
        if rank == 0:
            group.all_to_all(out, sent, [1, 1, 1], [1, 1, 1], what="stage 3 of 7, forward").wait()
        group.all_to_all_pieces(out, sent.split(1), [1, 1, 1], what="stage 3 of 7, forward").wait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    return str(caught.value), time.monotonic() - started, warnings.getvalue()


def test_three_processes_exchange_and_a_rank_that_never_arrives_is_named_within_the_timeout() -> None:
    (text, took, warned), _, (other, _, silent) = run_processes(of_three, 3)
    assert 2 < took < 30
    assert re.search(
        r"^stage 3 of 7, forward: the exchange failed on rank 0 of 3 on axis 'axis0' \(global rank 0\): .*[Tt]ime.*Cause: global rank 1 is "
        r"late, it has not started 'stage 3 of 7, forward'.*: its last exchange is .*; not to blame: global ranks 0, 2.*timeout of 3 s",
        text,
        re.DOTALL,
    )
    assert "failed on rank 2 of 3" in other and "Cause: global rank 1 is late" in other and "not to blame: global ranks 0, 2" in other
    # On a busy machine the timeout may come before the watchdog's warning at half of it.
    assert not warned or re.search(r"longspan: stage 3 of 7, forward: rank 0 has waited \d+ s. global rank 1 is late", warned)
    assert not silent


def one_raises_and_one_dies() -> None:
    group = as_mesh(dist.group.WORLD).group(0)
    assert uneven_exchange(group)
    if group.rank == 1:
        raise LookupError("the reason")
    if group.rank == 2:
        os._exit(3)
    with pytest.raises(RuntimeError, match=r"stage 1: the exchange failed on rank 0 of 3 .*Cause: .*global rank 2 does not respond"):
        group.all_to_all(torch.empty(2), torch.empty(2), [1, 0, 1], [1, 0, 1], what="stage 1").wait()


def test_processes_that_raise_or_die_are_reported_with_their_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1 of 3: (.|\n)*LookupError: the reason\n*rank 2 of 3: gave no result \(exit code 3\)"):
        run_processes(one_raises_and_one_dies, 3)


def sleep_for_long() -> None:
    time.sleep(600)


def test_processes_that_hang_are_killed() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 of 1: gave no result \(exit code -9\)"):
        run_processes(sleep_for_long, 1, timeout=2.0)


def exchange_on_one_gpu() -> None:
    mesh = as_mesh(dist.group.WORLD)
    exchanges_arrive(mesh, "cuda")
    collectives_match(mesh, "cuda")


@pytest.mark.gpu
def test_two_processes_share_one_gpu_over_gloo() -> None:
    run_processes(exchange_on_one_gpu, 2)


def one_leaves_a_call() -> list[str]:
    """Rank 1 raises between two exchanges of one call, catches the error and makes the next call; the messages of both calls."""
    axes = as_mesh(init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))["cp"])  # torch gives this group 30 minutes
    ids = [torch.arange(3) + 3 * r for r in range(3)]
    moves = RowMoves.between(axes, ids, ids[::-1], torch.device("cpu"))
    messages = []
    for rows in (torch.ones(3, 2), torch.ones(3, 500)):
        try:
            with agree(axes, CallDescription("a call of two exchanges", {})):
                if dist.get_rank() == 1:
                    raise MemoryError("no memory for the second exchange")
                move_rows(axes, rows, moves, what="moves", fields={})
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_a_rank_that_leaves_a_call_sends_nothing_afterwards_and_is_named_by_the_others() -> None:
    started = time.monotonic()
    ranks = run_processes(one_leaves_a_call, 3, group_timeout=3.0)
    assert time.monotonic() - started < 30
    assert ranks[1][0] == "MemoryError: no memory for the second exchange"
    for rank in (0, 2):
        assert "Cause: global rank 1 has left its call: a call of two exchanges ended there with MemoryError" in ranks[rank][0], ranks[rank]
        assert "not to blame: global ranks 0, 2" in ranks[rank][0]
    assert all("the ranks of axis 'cp' are out of step: " in second and "Nothing was sent" in second for _, second in ranks)
