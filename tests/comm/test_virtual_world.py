"""Virtual worlds: threads exchange rows as ranks do, count bytes, and do not wait for ranks that have returned or raised."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest
import torch
from tests.comm.exchanges import gradient_through_an_exchange, rows_between, uneven_exchange

from longspan._comm.group import Group
from longspan._comm.mesh import Mesh
from longspan.testing import virtual_world
from longspan.testing.rendezvous import Turns

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn)


def send_one_row_to_each(group: Group, *, what: str = "one row to each", width: int = 3) -> None:
    n = group.size
    group.all_to_all(torch.empty(n, width), torch.zeros(n, width), [1] * n, [1] * n, what=what).wait()


@pytest.mark.parametrize("n", range(1, 10))
def test_uneven_rows_arrive_at_every_number_of_ranks(n: int) -> None:
    assert all(virtual_world(n).run(lambda mesh: uneven_exchange(mesh.group(0))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_arrive(dtype: torch.dtype) -> None:
    assert all(virtual_world(3).run(lambda mesh: uneven_exchange(mesh.group(0), dtype=dtype)))


def test_each_axis_of_a_grid_exchanges_among_its_ranks() -> None:
    world = virtual_world((2, 3), axis_names=("ulysses", "ring"))
    assert all(world.run(lambda mesh: uneven_exchange(mesh.group("ring")) and uneven_exchange(mesh.group(0))))
    members = {(e.axis, e.ranks) for e in world.exchanges}
    assert members == {("ring", (0, 1, 2)), ("ring", (3, 4, 5)), ("ulysses", (0, 3)), ("ulysses", (1, 4)), ("ulysses", (2, 5))}


def test_rows_without_elements_and_exchanges_without_rows_work() -> None:
    def fn(mesh: Mesh) -> None:
        group = mesh.group(0)
        for shape, splits in (((0, 5), [0, 0, 0]), ((6, 0), [1, 2, 3]), ((0,), [0, 0, 0])):
            out_splits = [splits[group.rank]] * 3
            out = torch.empty(sum(out_splits), *shape[1:])
            group.all_to_all(out, torch.empty(shape), out_splits, splits, what="nothing").wait()

    virtual_world(3).run(fn)


def test_results_come_in_the_order_of_ranks() -> None:
    assert virtual_world((2, 3)).run(lambda mesh: (mesh.rank, mesh.coordinate)) == [(r, divmod(r, 3)) for r in range(6)]


def test_an_exchange_returns_before_the_others_arrive() -> None:
    posted = threading.Event()

    def fn(mesh: Mesh) -> None:
        group = mesh.group(0)
        if mesh.rank == 1:
            assert posted.wait(10)
        pending = [group.all_to_all(torch.empty(2), torch.zeros(2), [1, 1], [1, 1], what=f"stage {i}") for i in range(2)]
        posted.set()
        for p in reversed(pending):
            p.wait()
            p.wait()

    virtual_world(2).run(fn)


def test_a_sender_may_overwrite_its_rows_after_wait() -> None:
    def fn(mesh: Mesh) -> float:
        group = mesh.group(0)
        sent, out = torch.full((2,), float(mesh.rank + 1)), torch.empty(2)
        pending = group.all_to_all(out, sent, [1, 1], [1, 1], what="rows")
        if mesh.rank == 1:
            time.sleep(0.05)
        pending.wait()
        sent.fill_(-1)
        send_one_row_to_each(group)
        return float(out.sum())

    assert virtual_world(2).run(fn) == [3.0, 3.0]


@pytest.mark.parametrize("shape", [3, (2, 3)])
def test_gradients_flow_through_exchanges_in_threads(shape: int | tuple[int, int]) -> None:
    for got, expected in virtual_world(shape).run(lambda mesh: gradient_through_an_exchange(mesh, len(mesh.axes) - 1)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_gradients_flow_through_exchanges_on_one_gpu() -> None:
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            world = virtual_world(5, device="cuda")
            assert all(world.run(lambda mesh: uneven_exchange(mesh.group(0), device="cuda")))
            for got, expected in world.run(lambda mesh: gradient_through_an_exchange(mesh, device="cuda")):
                torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_an_exchange_from_another_cuda_stream_raises() -> None:
    def fn(mesh: Mesh) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            uneven_exchange(mesh.group(0), device="cuda")

    with pytest.raises(RuntimeError, match="share the CUDA stream"):
        virtual_world(2, device="cuda").run(fn)


def test_ranks_inherit_grad_mode_and_context_variables() -> None:
    setting = contextvars.ContextVar("setting", default=0)
    setting.set(7)
    world = virtual_world(2)
    assert world.run(lambda mesh: (torch.is_grad_enabled(), setting.get())) == [(True, 7)] * 2
    with torch.no_grad():
        assert world.run(lambda mesh: torch.is_grad_enabled()) == [False] * 2
    with torch.inference_mode():
        assert world.run(lambda mesh: torch.is_inference_mode_enabled()) == [True] * 2
        assert all(world.run(lambda mesh: uneven_exchange(mesh.group(0))))


def test_bytes_that_a_rank_sends_to_itself_are_not_counted() -> None:
    n, width = 4, 5
    world = virtual_world(n)
    world.run(lambda mesh: uneven_exchange(mesh.group(0), width=width, dtype=torch.float16))
    matrix = torch.tensor([[rows_between(i, j) * width * 2 * (i != j) for j in range(n)] for i in range(n)])
    (record,) = world.exchanges
    assert torch.equal(record.bytes, matrix)
    assert (record.what, record.axis, record.ranks) == ("uneven exchange of torch.float16", "axis0", (0, 1, 2, 3))
    assert world.sent == matrix.sum(1).tolist()
    assert world.received == matrix.sum(0).tolist()
    assert world.bytes_sent == int(matrix.sum())
    world.reset_counts()
    assert (world.bytes_sent, world.exchanges, world.sent) == (0, [], [0] * n)


def test_a_world_runs_again_and_within_itself() -> None:
    world = virtual_world(2)
    meshes = world.run(lambda mesh: mesh)
    assert all(world.run(lambda mesh: uneven_exchange(meshes[mesh.rank].group(0))))

    def outer(mesh: Mesh) -> bool:
        inner = world.run(lambda m: uneven_exchange(m.group(0)))
        other = virtual_world(3).run(lambda m: uneven_exchange(m.group(0)))
        return all(inner) and all(other) and uneven_exchange(mesh.group(0))

    assert world.run(outer) == [True, True]


def test_threads_that_a_rank_starts_belong_to_the_run() -> None:
    def fn(mesh: Mesh) -> list[bool]:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(uneven_exchange(mesh.group(0))))
        thread.start()
        thread.join()
        return seen

    assert virtual_world(2).run(fn) == [[True], [True]]


def test_communication_outside_of_a_run_raises() -> None:
    world = virtual_world(2)
    with pytest.raises(RuntimeError, match=r"communicate only inside world\.run"):
        world.meshes[0].group(0)


def test_different_counts_of_sender_and_receiver_raise_on_both() -> None:
    errors: dict[int, str] = {}

    def fn(mesh: Mesh) -> None:
        out_splits, sent_splits = [[1, 2, 0], [1, 1, 0], [0, 0, 0]][mesh.rank], [[1, 1, 0], [3, 1, 0], [0, 0, 0]][mesh.rank]
        try:
            mesh.group(0).all_to_all(
                torch.empty(sum(out_splits), 3), torch.empty(sum(sent_splits), 3), out_splits, sent_splits, what="stage 2 of 7"
            ).wait()
        except RuntimeError as error:
            errors[mesh.rank] = str(error)
            raise

    with pytest.raises(RuntimeError, match=r"stage 2 of 7.*rank 1 sends 3 rows to rank 0, which expects 2"):
        virtual_world(3).run(fn)
    assert len(errors) == 3 and all("rank 1 sends 3 rows to rank 0" in text for text in errors.values())


@pytest.mark.parametrize(
    "dtype, width, what, message",
    [
        (torch.float64, 3, "stage 1", r"rank 2 has rows of \[3\] float64 on cpu, rank 0 of \[3\] float32"),
        (torch.float32, 4, "stage 1", r"rank 2 has rows of \[4\] float32"),
        (torch.float32, 3, "stage 2", r"rank 2 is at 'stage 2', rank 0 at 'stage 1'"),
    ],
)
def test_rows_and_calls_that_differ_between_ranks_raise(dtype: torch.dtype, width: int, what: str, message: str) -> None:
    def fn(mesh: Mesh) -> None:
        x = torch.zeros(3, 3) if mesh.rank < 2 else torch.zeros(3, width, dtype=dtype)
        mesh.group(0).all_to_all(torch.empty_like(x), x, [1] * 3, [1] * 3, what="stage 1" if mesh.rank < 2 else what).wait()

    with pytest.raises(RuntimeError, match=message):
        virtual_world(3).run(fn)


@pytest.mark.parametrize(
    "out, sent, out_splits, sent_splits, message",
    [
        (torch.empty(2, 3), torch.empty(2, 3), [1, 1], [1, 2], "add up to the 2 rows of `sent`"),
        (torch.empty(2, 3), torch.empty(2, 3), [2], [1, 1], "2 splits"),
        (torch.empty(2, 3), torch.empty(2, 3), [3, -1], [1, 1], "0 or more"),
        (torch.empty(3, 2).T, torch.empty(2, 3), [1, 1], [1, 1], "`out` to be contiguous"),
        (torch.empty(()), torch.empty(2, 3), [1, 1], [1, 1], "`out` to be contiguous rows"),
        (torch.empty(2, 3), torch.empty(2, 3, dtype=torch.float64), [1, 1], [1, 1], "one shape, dtype and device"),
        (torch.empty(2, 3), torch.empty(2, 4), [1, 1], [1, 1], "one shape, dtype and device"),
        (torch.empty(2, 3), torch.empty(3, 3), [1, 1], [2, 1], "got 2 rows sent and 1 received"),
    ],
)
def test_inconsistent_arguments_of_one_rank_raise_before_anything_moves(
    out: torch.Tensor, sent: torch.Tensor, out_splits: list[int], sent_splits: list[int], message: str
) -> None:
    def fn(mesh: Mesh) -> None:
        if mesh.rank == 0:
            mesh.group(0).all_to_all(out, sent, out_splits, sent_splits, what="stage 1")
        send_one_row_to_each(mesh.group(0))

    with pytest.raises(ValueError, match=f"stage 1: rank 0 of 2 on axis 'axis0'.*{message}"):
        virtual_world(2).run(fn)


def test_the_error_of_a_rank_reaches_the_caller_and_waiting_ranks() -> None:
    seen: dict[int, str] = {}

    def fn(mesh: Mesh) -> None:
        if mesh.rank == 2:
            raise KeyError("mine")
        try:
            send_one_row_to_each(mesh.group(0), what="stage 4")
        except RuntimeError as error:
            seen[mesh.rank] = str(error)
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        virtual_world(4).run(fn)
    assert time.monotonic() - started < 10  # the timeout is 60
    assert caught.value.__notes__ == ["raised by rank 2 of a virtual world of 4"]
    # Ranks 0 and 1 may hear of rank 3 too, which raised because of rank 2.
    assert set(seen) == {0, 1, 3}
    assert all("stage 4" in text and "raised KeyError: 'mine'" in text for text in seen.values())


def test_a_rank_that_returns_early_fails_waiting_ranks_even_over_another_axis() -> None:
    seen: dict[int, str] = {}

    def fn(mesh: Mesh) -> None:
        if mesh.rank in (1, 3):
            return
        try:
            if mesh.rank == 2:
                send_one_row_to_each(mesh.group(1), what="stage 5")
            send_one_row_to_each(mesh.group(0), what="transpose")
        except RuntimeError as error:
            seen[mesh.rank] = str(error)
            raise

    with pytest.raises(RuntimeError, match=r"stage 5: rank 2 .*waited for rank 3, which returned") as caught:
        virtual_world((2, 2)).run(fn)
    assert caught.value.__notes__ == ["raised by rank 2 of a virtual world of 4"]
    assert "transpose: rank 0" in seen[0] and "waited for rank 2, which raised RankLost: stage 5" in seen[0]


def test_of_ranks_with_the_same_failure_the_lowest_is_raised() -> None:
    def fn(mesh: Mesh) -> None:
        if mesh.rank:
            send_one_row_to_each(mesh.group(0)) if mesh.rank == 3 else None
            raise ValueError(f"rank {mesh.rank}")
        send_one_row_to_each(mesh.group(0))

    with pytest.raises(ValueError, match="rank 1") as caught:
        virtual_world(4).run(fn)
    assert caught.value.__notes__ == ["raised by rank 1 of a virtual world of 4; ranks that also failed by themselves: 2"]


def test_a_rank_that_exceeds_the_timeout_is_named() -> None:
    late = threading.Event()

    def fn(mesh: Mesh) -> None:
        try:
            send_one_row_to_each(mesh.group(0), what="stage 6 of 7, forward") if mesh.rank != 1 else late.wait(10)
        finally:
            late.set()

    with pytest.raises(RuntimeError, match=r"stage 6 of 7, forward: rank [02] .*waited 0.2 s for ranks 1, which have not come"):
        virtual_world(3, timeout=0.2).run(fn)


def test_sixty_four_ranks_pass_rows_around_a_ring() -> None:
    n = 64

    def fn(mesh: Mesh) -> float:
        group = mesh.group(0)
        x = torch.full((2, 3), float(group.rank))
        for stage in range(5):
            out_splits, sent_splits = [0] * n, [0] * n
            out_splits[(group.rank - 1) % n] = sent_splits[(group.rank + 1) % n] = 2
            out = torch.empty_like(x)
            group.all_to_all(out, x, out_splits, sent_splits, what=f"stage {stage}").wait()
            x = out
        return float(x[0, 0])

    world = virtual_world(n)
    assert world.run(fn) == [float((r - 5) % n) for r in range(n)]
    assert world.bytes_sent == n * 5 * 2 * 3 * 4


def test_bad_settings_raise() -> None:
    for shape, names in ((0, None), ((2, 2, 2), None), ((2, 3), ("a", "a")), ((2, 3), ("a",))):
        with pytest.raises(ValueError, match="mesh: expected"):
            virtual_world(shape, axis_names=names)
    with pytest.raises(ValueError, match="timeout"):
        virtual_world(2, timeout=0)


def test_a_rank_waits_for_its_turn_until_the_other_gives_it() -> None:
    turns, order = Turns(timeout=60), []

    def other() -> None:
        turns.take(1)
        order.append(1)
        turns.give(1)

    turns.take(0)
    thread = threading.Thread(target=other)
    thread.start()
    turns.give(1)  # not rank 1's turn: nothing happens
    order.append(0)
    turns.give(0)
    thread.join()
    assert order == [0, 1]


def test_a_rank_that_blocks_outside_of_an_exchange_does_not_hold_up_the_others() -> None:
    blocked, passed = threading.Event(), threading.Event()

    def fn(mesh: Mesh) -> None:
        send_one_row_to_each(mesh.group(0), what="a step")
        if mesh.rank == 0:
            blocked.set()
            assert passed.wait(60)
        else:
            assert blocked.wait(60)
            passed.set()

    virtual_world(4, timeout=60).run(fn)
