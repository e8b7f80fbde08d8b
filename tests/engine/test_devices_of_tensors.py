"""Tensors that follow a call to the device of its queries: numbers that mods capture, masks of plans, indices of rows.

The device is torch's `meta`, or a CUDA device without a GPU of `FakeTensorMode`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan._comm.agreement import Agreement, CallDescription
from longspan._comm.group import ControlGroup, Done
from longspan._comm.mesh import Axis
from longspan._comm.row_moves import RowMoves
from longspan._engine import invariant, one_device, selected
from longspan._engine.buffer_rows import ReturnedRows, RowSelection
from longspan._engine.cached import CachedCall, _checked
from longspan._engine.plan_cache import plan_cache
from longspan._engine.selected_exchange import KVMoves, return_grads, send_kv
from longspan._engine.selected_mesh import ShardChoice
from longspan._engine.sharded_call import ShardedCall
from longspan._engine.spec import Spec
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.protocol import Grads

META = torch.device("meta")
OPTIONS = CallOptions(spec=Spec(mask=None, score=None, kernel="auto"), scale=0.5)


def inputs() -> CallTensors:
    """A call on the device whose mods capture tensors on the host."""
    q, k, v = (torch.empty(2, 4, n, 8, device=META) for n in (40, 50, 50))
    return CallTensors(q=q, k=k, v=v, mask_captured=[torch.arange(3)], score_captured=[torch.tensor(2.0), torch.tensor(3.0)])


def plan() -> ls.PlanHandle:
    ids = torch.arange(40) // 7
    return ls.plan(ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv]), 40, ls.Mesh.abstract(2))


def of_one_device() -> list[Tensor]:
    table: Any = SimpleNamespace(block=(128, 128))
    work = one_device.work_of_table(inputs(), OPTIONS, table)
    return [*work.mask_captured, *work.score_captured]


def of_an_invariant_call() -> list[Tensor]:
    call = invariant._Call.on_one_device(inputs(), OPTIONS)
    return [*call.mask_captured, *call.score_captured]


def of_a_call_with_a_plan() -> list[Tensor]:
    call = ShardedCall(
        plan=plan().data, spec=OPTIONS.spec, scale=0.5, score_captured=inputs().score_captured, heads=4, kv_heads=4, device=META,
        agreement=Agreement.none(),
    )  # fmt: skip
    return [*call.captured_here, *plan_cache.captured(plan().data, META)]


def of_selected_keys() -> list[Tensor]:
    choice = ShardChoice.of(plan().data, ls.selected(torch.zeros(1, 2, 2, 3, dtype=torch.int32, device=META), 16, 16), 4)
    call = inputs()
    return [choice.indices, *choice._program[1], *selected._on_device_of(call.q, call.score_captured)]


def of_rows() -> list[Tensor]:
    lists = ReturnedRows(parts=(torch.tensor([3, 1]), torch.tensor([2]))).lists(5, META)
    moves = RowMoves.between(ls.Mesh.abstract(2), [torch.tensor([2, 0]), torch.tensor([1])], [torch.arange(2), torch.tensor([2])], META)
    return [RowSelection.of(torch.tensor([0, 2]))._index_on(META), *lists, moves.order, *(hop.order for hop in moves.hops)]


def of_a_call_over_a_cache() -> list[Tensor]:
    cache = ls.KVCache(pages=8, layers=1, kv_heads=4, head_dim=8, dtype=torch.float32, device=META)
    limit, factor = torch.tensor(9), torch.tensor(0.5)
    call = CachedCall(
        cache.step(cache.allocate(2), 3), 0, mask=ls.mask_mod(lambda b, h, q, kv: kv < limit),
        score_mod=lambda s, b, h, q, kv: s * factor * (1 + 0 * limit),
    )  # fmt: skip
    q, k, v = (torch.empty(2, 4, 3, 8, device=META) for _ in range(3))
    _, work = _checked(q, k, v, call)
    return [*work.mask_captured, *work.score_captured]


@pytest.mark.parametrize(
    "made", [of_one_device, of_an_invariant_call, of_a_call_with_a_plan, of_a_call_over_a_cache, of_selected_keys, of_rows]
)
def test_tensors_are_moved_to_the_device_of_the_queries(made: Any) -> None:
    tensors = made()
    assert len(tensors) >= 3 and all(t.device == META for t in tensors)


def test_gradients_return_to_the_device_and_dtype_of_captured_tensors() -> None:
    q, captured = torch.zeros(1, 2, 3, 8), [torch.zeros((), device=META), torch.zeros((), dtype=torch.float16)]
    tensors = BackwardTensors(
        inputs=CallTensors(q=q, k=q, v=q, score_captured=captured), out=q, lse=q[..., 0], grad_out=q, grad_lse=None, needs=(True, True)
    )
    *_, first, second = tensors.flat_grads(Grads(q=q, k=q, v=q, captured=[torch.zeros(()), torch.ones(())]), None)
    assert first.device == META and second.device.type == "cpu" and (first.dtype, second.dtype) == (torch.float32, torch.float16)


def test_chosen_units_are_gathered_on_the_device_of_the_keys() -> None:
    sent: list[tuple[torch.device, list[int], torch.dtype]] = []

    def all_to_all(out: Tensor, rows: Tensor, *splits: Any, what: str) -> Done:
        sent.append((rows.device, list(rows.shape), rows.dtype))
        return Done()

    moves = KVMoves(
        unit=4, sent=torch.tensor([1, 0, 2]), placed=torch.tensor([5, 3]), send_counts=(0, 3), recv_counts=(2, 0),
        tiles=torch.tensor([0, 1]), tokens=16,
    )  # fmt: skip
    group: Any = SimpleNamespace(all_to_all=all_to_all)
    with FakeTensorMode(allow_non_fake_inputs=True):
        k, v, wide_k, wide_v = (torch.empty(1, 2, n, d, device="cuda") for n, d in ((8, 6), (8, 5), (16, 6), (16, 5)))
        received = send_kv(group, moves, k, v, what="test")
        rows, _ = return_grads(group, moves, (wide_k, wide_v), torch.bfloat16)
    assert [(device.type, shape, dtype) for device, shape, dtype in sent] == [
        ("cuda", [3, 44], torch.float32), ("cuda", [2, 44], torch.bfloat16)
    ]  # fmt: skip
    assert (received.rows.device.type, received.rows.shape, rows.shape) == ("cuda", (2, 44), (3, 44))


def test_control_messages_lie_on_the_device_of_their_group() -> None:
    seen: list[torch.device] = []

    def all_to_all(out: Tensor, sent: Tensor, *splits: Any, what: str) -> Done:
        seen.extend((out.device, sent.device))
        return Done()

    control: Any = SimpleNamespace(size=2, all_to_all=all_to_all)
    group = SimpleNamespace(control=lambda: ControlGroup(control, META))
    mesh: Any = SimpleNamespace(size=2, axes=(Axis("cp", 2),), group=lambda axis: group)
    Agreement(mesh, CallDescription("test", {}))
    assert seen == [META, META]
