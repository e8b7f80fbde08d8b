"""Groups of processes without processes: what they pass to torch, and errors of failed exchanges; exchanges are in test_processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan import _torch_private
from longspan._comm import mesh as meshes
from longspan._comm import process_group
from longspan._comm.group import Done
from longspan._comm.mesh import Axis, Mesh, context_mesh, coordinate_of, mesh_axes, named_by_role
from longspan._comm.process_group import C10dGroup, _gloo_companion, mark_broken
from longspan._comm.watchdog import ExchangeLimit, watchdog


class FakeGroup:
    """Rank 1 of global ranks 4, 6 and 9, over these backends."""

    def __init__(self, config: Any = "cpu:gloo,cuda:nccl", size: int = 3) -> None:
        self.config, self._size, self.group_name = config, size, "7"

    def rank(self) -> int:
        return min(1, self._size - 1)

    def size(self) -> int:
        return self._size


class FakeWork:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waiting = error, "nothing"

    def wait(self) -> None:
        self.waiting = watchdog.waiting  # type: ignore[assignment]
        if self.error:
            raise self.error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch.distributed, of which the next call returns `work`, and a watchdog that starts no thread."""
    made = SimpleNamespace(work=FakeWork(), calls=[], diagnosis=None, gloo=True, new_groups=[], limited=[])

    def all_to_all_single(*arguments: Any, **options: Any) -> Any:
        made.calls.append((arguments, options))
        if isinstance(made.work, Exception):
            raise made.work
        return made.work

    def config(group: Any) -> str:
        if isinstance(group.config, Exception):
            raise group.config
        return group.config

    def new_group(*arguments: Any, **options: Any) -> Any:
        made.new_groups.append((arguments, options))
        return FakeGroup("cpu:gloo")

    dist = SimpleNamespace(
        get_backend_config=config, all_to_all_single=all_to_all_single, get_process_group_ranks=lambda group: [4, 6, 9],
        new_group=new_group, is_gloo_available=lambda: made.gloo, ProcessGroup=FakeGroup,
    )  # fmt: skip
    monkeypatch.setattr(process_group, "dist", dist)
    backend = SimpleNamespace(_set_default_timeout=made.limited.append)
    limit = ExchangeLimit(timeout=timedelta(seconds=2.5), backend=backend, before=timedelta(9))
    monkeypatch.setattr(process_group, "exchange_limit", lambda group, device: limit)
    monkeypatch.setattr(watchdog, "_start", lambda: None)
    monkeypatch.setattr(watchdog, "diagnosis", lambda group, exchange: made.diagnosis)
    for name, value in (("started", {}), ("failed", False), ("left", ""), ("waiting", None), ("call", "a call")):
        monkeypatch.setattr(watchdog, name, value)
    yield made
    process_group._broken.clear()
    process_group._companions.clear()


def test_an_exchange_passes_rows_and_splits_to_torch_and_waits_with_a_timeout(fake: Any) -> None:
    group = C10dGroup(name="cp", group=FakeGroup())  # type: ignore[arg-type]
    assert (group.rank, group.size, group.any_stream) == (1, 3, True)
    out, sent = torch.empty(6, 2), torch.arange(10.0).view(5, 2)
    pending: Any = group.all_to_all(out, sent, (1, 2, 3), (2, 2, 1), what="stage")
    ((arguments, options),) = fake.calls
    assert arguments[0] is out and arguments[1] is sent and arguments[2:] == ([1, 2, 3], [2, 2, 1])
    assert options == {"group": group.group, "async_op": True} and fake.limited == [timedelta(seconds=2.5), timedelta(9)]
    assert pending.work is fake.work and pending.exchange == ("7", 1, "stage", "a call")
    pending.wait()
    waiting: Any = fake.work.waiting
    assert (waiting.exchange, waiting.group, waiting.timeout) == (pending.exchange, group.group, timedelta(seconds=2.5))
    assert watchdog.waiting is None and pending.work is pending.out is pending.sent is None
    pending.wait()
    pieces = [
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.full((1, 2), 2.0, dtype=torch.bfloat16),
        torch.zeros(0, 2, dtype=torch.bfloat16),
    ]
    group.all_to_all_pieces(torch.empty(3, 2, dtype=torch.bfloat16), pieces, [0, 1, 2], what="pieces")
    arguments, _ = fake.calls[1]
    assert [(x.dtype, x.shape) for x in arguments[:2]] == [(torch.uint8, (3, 2, 2))] * 2 and arguments[2:] == ([0, 1, 2], [2, 1, 0])
    assert torch.equal(arguments[1].view(torch.bfloat16)[..., 0], torch.cat(pieces))
    empty = group.all_to_all(torch.empty(6, 0), torch.empty(5, 0), (1, 2, 3), (2, 2, 1), what="stage")
    assert isinstance(empty, Done) and len(fake.calls) == 2 and watchdog.started["7"][0].number == 2


def test_a_group_of_one_copies(fake: Any) -> None:
    group = C10dGroup(name="cp", group=FakeGroup(size=1))  # type: ignore[arg-type]
    for exchange in (
        lambda out, x: group.all_to_all(out, x, [2], [2], what="a"), lambda out, x: group.all_to_all_pieces(out, [x], [2], what="a")
    ):  # fmt: skip
        out = torch.zeros(2, 3)
        exchange(out, torch.ones(2, 3)).wait()
        assert out.sum() == 6 and not fake.calls


def test_failed_exchanges_name_the_ranks(fake: Any) -> None:
    group = C10dGroup(name="cp", group=FakeGroup())  # type: ignore[arg-type]

    def begin(splits: tuple[int, ...] = (1, 2, 3)) -> Any:
        sent = (2, splits[1], 1)
        return group.all_to_all(torch.empty(6, 2), torch.ones(sum(sent), 2), splits, sent, what="s")

    start = r"s: the exchange failed on rank 1 of 3 on axis 'cp' \(global rank 6\): lost\. Cause: "
    end = r"\. See the logs .* within the timeout of 2\.5 s \(LONGSPAN_TIMEOUT, or the process group's timeout\)$"
    fake.work = RuntimeError(" lost\n")
    for splits, cause in (((1, 2, 3), "it expected rows from global ranks 4, 9"), ((0, 2, 4), "it expected rows from global ranks 9"),
                          ((0, 6, 0), "it expected rows from no other rank")):  # fmt: skip
        with pytest.raises(RuntimeError, match=start + cause + end):
            begin(splits)
    assert fake.limited[-1] == timedelta(9)
    fake.work, fake.diagnosis = FakeWork(RuntimeError("lost")), "global rank 9 is late"
    pending = begin()
    with pytest.raises(RuntimeError, match=start + "global rank 9 is late" + end):
        pending.wait()
    assert watchdog.waiting is None
    fake.work = None
    with pytest.raises(RuntimeError, match="s: this process is not in the process group of axis 'cp'; make the mesh again"):
        begin()


def test_exchanges_of_a_broken_group_raise_with_the_first_reason(fake: Any) -> None:
    broken, other = FakeGroup(), FakeGroup()
    mark_broken(broken, "attention", ValueError("x"))  # type: ignore[arg-type]
    mark_broken(broken, "unshard", ValueError("y"))  # type: ignore[arg-type]
    assert watchdog.left == "attention ended there with ValueError: x"
    group = C10dGroup(name="cp", group=broken)  # type: ignore[arg-type]
    message = "the ranks of axis 'cp' are out of step: attention ended on this rank with ValueError: x. Nothing was sent"
    with pytest.raises(RuntimeError, match=message):
        group.all_to_all(torch.empty(6, 2), torch.ones(5, 2), (1, 2, 3), (2, 2, 1), what="s")
    with pytest.raises(RuntimeError, match=message):
        group.control()
    assert C10dGroup(name="cp", group=other).control().device.type == "cpu" and not fake.calls  # type: ignore[arg-type]
    watchdog.failed, watchdog.left = True, ""
    mark_broken(other, "attention", ValueError("x"))  # type: ignore[arg-type]
    assert watchdog.left == "" and other in process_group._broken  # an exchange had failed before: it is no call that was left


def test_control_messages_go_over_a_backend_of_the_cpu(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(process_group, "backend_timeout", lambda group, device: ("nccl", (group, device)))
    for config in ("cpu:gloo", "cuda:nccl,cpu:gloo", ValueError(), TypeError()):
        group = C10dGroup(name="cp", group=FakeGroup(config))  # type: ignore[arg-type]
        assert group.control() == (group, torch.device("cpu")) and not fake.new_groups
    group = C10dGroup(name="cp", group=FakeGroup("cuda:nccl"))  # type: ignore[arg-type]
    control = group.control()
    assert isinstance(control.group, C10dGroup) and control.device == torch.device("cpu") and control.group.name == "cp"
    ((arguments, options),) = fake.new_groups
    assert arguments == ([4, 6, 9], (group.group, "cuda"), "gloo") and options["use_local_synchronization"] is True
    assert group.control().group.group is control.group.group and len(fake.new_groups) == 1  # type: ignore[attr-defined]
    fake.gloo = False
    alone = C10dGroup(name="cp", group=FakeGroup("cuda:nccl"))  # type: ignore[arg-type]
    assert alone.control() == (alone, torch.device("cuda", 3)) and _gloo_companion(alone.group) is None and len(fake.new_groups) == 1


def test_only_nccl_takes_pieces(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda: Any = SimpleNamespace(is_cuda=True)
    is_nccl = lambda config, x: C10dGroup(name="cp", group=FakeGroup(config))._is_nccl(x)  # type: ignore[arg-type]
    assert is_nccl("cpu:gloo,cuda:nccl", on_cuda) and is_nccl("cuda:nccl", on_cuda)
    assert not is_nccl("cpu:gloo,cuda:gloo", on_cuda) and not is_nccl(TypeError(), on_cuda) and not is_nccl("cuda:nccl", torch.zeros(1))
    started: list[Any] = []
    monkeypatch.setattr(C10dGroup, "_is_nccl", lambda self, out: True)
    monkeypatch.setattr(process_group, "start_all_to_all", lambda *arguments: started.append(arguments) or FakeWork())
    group = C10dGroup(name="cp", group=FakeGroup())  # type: ignore[arg-type]
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int16,
        torch.bool,
    ):
        out, sent = torch.zeros(6, 2, dtype=dtype), torch.ones(5, 2, dtype=dtype)
        pending: Any = group.all_to_all(out, sent, (1, 0, 5), (2, 0, 3), what="s")
        assert pending.limit is None and watchdog.waiting is None
        of, received, pieces = started[-1]
        as_bytes = dtype in (torch.int16, torch.bool)
        assert of is group.group and [len(x) for x in received] == [1, 0, 5] and [len(x) for x in pieces] == [2, 0, 3]
        assert {x.dtype for x in (*received, *pieces)} == {torch.uint8 if as_bytes else dtype}
        assert received[2].data_ptr() == out[1:].data_ptr() and pieces[2].data_ptr() == sent[2:].data_ptr()
        group.all_to_all_pieces(out, list(sent.split([2, 0, 3])), (1, 0, 5), what="s")
        assert [len(x) for x in started[-1][2]] == [2, 0, 3] and not fake.calls


# --------------------------------------------------------------------------------------------------------------------------- meshes


def test_a_mesh_looks_up_the_process_group_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"7": FakeGroup(), "8": FakeGroup(size=1)}
    monkeypatch.setattr(meshes, "process_group_by_name", groups.get)
    of = lambda rank, size, name: Mesh(axes=(Axis("cp", size),), coordinate=(rank,), groups=(name,)).group(0)
    assert (of(1, 3, "7").name, of(1, 3, "7").group) == ("cp", groups["7"]) and of(0, 1, "8").size == 1
    for rank, size in ((0, 3), (1, 4), (1, 2)):
        with pytest.raises(
            RuntimeError, match=rf"made for rank {rank} of {size}, but in the process group '7' this process is rank 1 of 3"
        ):
            of(rank, size, "7")
    marked: list[Any] = []
    monkeypatch.setattr(process_group, "mark_broken", lambda *arguments: marked.append(arguments))
    error = ValueError("x")
    Mesh(axes=(Axis("a", 3), Axis("b", 2)), coordinate=(1, 1), groups=("7", "9")).mark_broken("call", error)
    Mesh(axes=(Axis("a", 3),), coordinate=(1,), groups=("virtual:7",)).mark_broken("call", error)
    assert marked == [(groups["7"], "call", error)]


def test_axes_of_roles_need_cp() -> None:
    mesh = Mesh.abstract((2, 3), 4, ("dp", "cp"))
    assert context_mesh(mesh) == mesh.along("cp") == mesh.along(1) and (mesh.along(0).size, mesh.along("cp").rank) == (2, 1)
    assert context_mesh(Mesh.abstract((2, 3), 4, ("ulysses", "ring"))).size == 6 and context_mesh(Mesh.abstract(3, 1, ("dp",))).rank == 1
    for names, roles in ((("cp", "tp"), True), (("dp_replicate", "dp_shard", "cp", "tp"), True), (("a", "b"), False), ((), False)):
        assert named_by_role(names) is roles
    for names in (("cp", "a"), ("dp", "tp"), ("dp",), ("a", "tp")):
        with pytest.raises(ValueError, match="mesh: expected an axis 'cp' beside any of 'dp', 'dp_replicate', 'dp_shard', 'tp', got axes"):
            named_by_role(names)


def test_coordinates_are_row_major() -> None:
    axes = mesh_axes((2, 3, 4), None)
    assert [axis.name for axis in axes] == ["axis0", "axis1", "axis2"] and mesh_axes(5, ["x"]) == (Axis("x", 5),)
    assert [coordinate_of(axes, rank) for rank in (0, 3, 4, 11, 12, 23)] == [
        (0, 0, 0),
        (0, 0, 3),
        (0, 1, 0),
        (0, 2, 3),
        (1, 0, 0),
        (1, 2, 3),
    ]
    for rank in (-1, 24):
        with pytest.raises(ValueError, match=rf"mesh: expected a rank of 0 to 23 in a mesh of \[2, 3, 4\], got {rank}"):
            coordinate_of(axes, rank)
    with pytest.raises(ValueError, match=r"mesh: expected a coordinate in axes of sizes \[2, 3\], got \(1, 3\)"):
        Mesh(axes=mesh_axes((2, 3), None), coordinate=(1, 3))
    with pytest.raises(ValueError, match=r"mesh: expected an axis of \['axis0', 'axis1'\] or its index, got 2"):
        Mesh.abstract((2, 3)).axis_index(2)
    assert [Mesh.abstract((2, 3)).axis_index(axis) for axis in (0, 1, "axis0", "axis1")] == [0, 1, 0, 1]


def test_device_meshes_of_other_dims_name_the_submesh_to_pass() -> None:
    ranks = torch.arange(8).view(2, 2, 2)
    of = lambda names: SimpleNamespace(mesh=ranks, ndim=3, mesh_dim_names=names, get_coordinate=lambda: [0, 0, 0])
    for names, example in ((("a", "b", "c"), r"mesh\[one or two of 'a', 'b', 'c'\]"), (("dp", "cp", "tp"), r"mesh\['cp'\]"),
                           (None, "a DeviceMesh with mesh_dim_names, indexed by one or two of them")):  # fmt: skip
        with pytest.raises(
            ValueError, match="expected a DeviceMesh of one or two dims, got 3 [^;]*; pass the submesh that shares a sequence: " + example
        ):
            meshes._from_device_mesh(of(names))
    group = SimpleNamespace(group_name="g")
    one = SimpleNamespace(
        mesh=ranks[0], ndim=2, mesh_dim_names=None, get_coordinate=lambda: [1, 0], shape=(2, 2), get_group=lambda i: group
    )
    assert meshes._from_device_mesh(one) == Mesh(axes=mesh_axes((2, 2), None), coordinate=(1, 0), groups=("g", "g"))


def test_timeouts_are_read_where_a_backend_tells_and_takes_them() -> None:
    def of(backend: Any) -> Any:
        return SimpleNamespace(_get_backend=lambda device: backend if device == torch.device("cpu") else None)

    options = SimpleNamespace(_timeout=timedelta(seconds=3))
    full = SimpleNamespace(options=options, _set_default_timeout=print)
    assert _torch_private.backend_timeout(of(full), "cpu") == (full, timedelta(seconds=3))
    for backend in (SimpleNamespace(options=options), SimpleNamespace(options=SimpleNamespace(_timeout=3), _set_default_timeout=print)):
        assert _torch_private.backend_timeout(of(backend), "cpu") == (backend, None)
    assert _torch_private.backend_timeout(of(SimpleNamespace()), "cpu") == (None, None) == _torch_private.backend_timeout(of(full), "cuda")


def test_a_group_that_torch_does_not_know_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setattr(_torch_private, "dist", state)
    assert _torch_private.process_group_by_name("no such group") is None
    monkeypatch.setattr(torch._C._distributed_c10d, "_resolve_process_group", lambda name: name + "!")
    assert _torch_private.process_group_by_name("g") == "g!"
    for available, initialized in ((False, True), (True, False), (False, False)):
        state.is_available, state.is_initialized = (lambda a=available: a), (lambda i=initialized: i)
        assert _torch_private.process_group_by_name("g") is None


def test_the_flight_recorder_is_that_of_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = torch._C._distributed_c10d

    def fails() -> bytes:
        raise RuntimeError

    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        monkeypatch.setattr(c10d, name, None, raising=False)
    assert _torch_private.flight_recorder_dump() is None
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: bytearray(b"nccl"))
    assert _torch_private.flight_recorder_dump() == b"nccl"
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda: b"any")
    assert _torch_private.flight_recorder_dump() == b"any"
    monkeypatch.setattr(c10d, "_dump_fr_trace", fails)
    assert _torch_private.flight_recorder_dump() is None
