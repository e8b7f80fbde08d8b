"""Facts of a call that results do not show: what kernels may keep, which gradients are missing, which checks are made once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._comm.agreement import Agreement
from longspan._engine import attention as engine
from longspan._engine import distributed, invariant, one_device, ops, selected, selected_mesh
from longspan._engine.call_agreement import described_fields
from longspan._engine.document_tiles import tiles_of_sequence
from longspan._engine.ops import specs
from longspan._engine.prepared_call import PreparedCall
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule
from longspan._engine.selected_ops import attend_selected
from longspan._engine.sharded_call import ShardedCall
from longspan._engine.table_cache import MaskTables
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.protocol import State
from longspan._masks.tracing import trace
from longspan.testing import virtual_world

CAUSAL = ls.causal().traced.program
SCORE = trace(lambda s, b, h, q, kv: s * 0.5, "score").program
OPTIONS = CallOptions(spec=specs.of(CAUSAL, SCORE, "cpu"), scale=0.25)


def tensors(tokens: int = 70, **options: Any) -> list[Tensor]:
    return [torch.randn(2, heads, tokens, dim, **options) for heads, dim in ((4, 8), (2, 8), (2, 5))]


def inputs() -> CallTensors:
    q, k, v = tensors()
    return CallTensors(q=q, k=k, v=v)


def test_kernels_may_keep_what_follows_from_a_mask_that_never_changes() -> None:
    """Over a mesh, the plan has copies of the mask's tensors. On one device they are the caller's."""
    plan = ls.plan(ls.causal(), 70, ls.Mesh.abstract(1)).data
    alone, meshed = invariant._Call.on_one_device(inputs(), OPTIONS), invariant._Call.over_mesh(plan, inputs(), OPTIONS)
    (part,) = tiles_of_sequence(CAUSAL, [], (70, 70), batch=2, heads=4)
    for call, fixed in ((alone, False), (meshed, True)):
        for backward in (False, True):
            work = call.work(part, backward=backward)
            assert (work.mask_is_fixed, work.invariant, work.first_batch, work.scale) == (fixed, True, 0, 0.25)
            assert (work.mask.key, work.score.key) == (CAUSAL.key, SCORE.key) and (work.joint is not None) == backward

    tables = MaskTables(CAUSAL, 70, 70, batch=1, heads=1)
    for backward in (False, True):
        work = one_device.make_work(inputs(), OPTIONS, tables, backward=backward)
        assert (work.mask_is_fixed, work.invariant, work.selects, work.concurrent) == (False, False, False, False)
        assert (work.joint is not None) == backward

    sharded = ShardedCall(
        plan=plan, spec=OPTIONS.spec, scale=0.25, score_captured=[], heads=4, kv_heads=2, device=torch.device("cpu"),
        agreement=Agreement.none(),
    )  # fmt: skip
    tiles = local_schedule(plan, ScheduleOptions(block=(128, 128))).steps[0].tiles[0]
    for backward in (False, True):
        work = sharded.work(tiles, 0, backward=backward)
        assert (work.mask_is_fixed, work.invariant, work.concurrent, work.first_batch, work.first_head) == (True, False, False, 0, 0)
        assert (work.joint is not None) == backward and sharded.work(tiles, 0, backward=backward, concurrent=True).concurrent


@pytest.mark.parametrize("kind", ["one device", "invariant", "ring", "selected keys", "compiled", "compiled selection"])
def test_a_loss_without_lse_has_no_gradient_of_lse(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in its place would be exchanged and read by kernels, and keep a backward pass from being prepared."""
    missing: list[bool] = []

    def noted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            missing.extend(one.grad_lse is None for one in args if isinstance(one, BackwardTensors))
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    noted(ops, "run_backward")
    noted(selected_mesh, "backward")
    q, k, v = tensors(71, requires_grad=True)
    if kind in ("one device", "invariant"):
        with ls.invariant():
            out, _ = ls.attention(q, k, v, kernel="cpu", return_lse=True)
        if kind == "one device":
            out, _ = ls.attention(q, k, v, kernel="cpu", return_lse=True)
        out.sum().backward()
    elif kind == "compiled":
        ops.attend(q, k, v, None, [], [], None, OPTIONS.spec.handle, 0.25, False)[0].sum().backward()
    elif kind == "compiled selection":
        indices = torch.zeros(1, 1, 5, 2, dtype=torch.int32)
        attend_selected(q, k, v, None, indices, [], [], OPTIONS.spec.handle, 0.25, 16, 16, 4)[0].sum().backward()
    else:

        def run(mesh: ls.Mesh) -> None:
            plan = ls.plan(ls.causal(), 64, mesh, layout="contiguous")
            shards = [plan.shard(t, 2).requires_grad_() for t in tensors(64)]
            mask = ls.selected(torch.zeros(1, 1, 2, 1, dtype=torch.int32), 16, 16) if kind == "selected keys" else None
            ls.attention(*shards, plan=plan, mask=mask, return_lse=True)[0].sum().backward()

        virtual_world(2).run(run)
    assert missing and all(missing)


@pytest.mark.parametrize("kind", ["operator", "eager"])
def test_a_backward_pass_of_the_operator_does_not_know_its_forward_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager ranks send the number of the forward call, which the operator does not have: 0 is left out of the comparison."""
    numbers: set[int] = set()
    begin = ops.begin_call

    def noted(*args: Any, **options: Any) -> Any:
        if "needs" in options:
            numbers.add(options["forward_number"])
        return begin(*args, **options)

    monkeypatch.setattr(ops, "begin_call", noted)

    def run(mesh: ls.Mesh) -> None:
        plan = ls.plan(ls.causal(), 64, mesh, layout="contiguous")
        q, k, v = (plan.shard(t, 2).requires_grad_() for t in tensors(64))
        if kind == "operator":
            spec = specs.of(None, None, "cpu", lse=True)
            ops.attend(q, k, v, None, [], [], plan.token, spec.handle, 0.25, False)[0].sum().backward()
        else:
            ls.attention(q, k, v, plan=plan).sum().backward()

    virtual_world(2).run(run)
    assert len(numbers) == 1 and (numbers == {0}) == (kind == "operator")


def test_a_call_with_a_plan_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    check = engine._checked_scale
    monkeypatch.setattr(engine, "_checked_scale", lambda *args: (checked.append(args[3].score_mod), check(*args))[1])
    plan = ls.plan(ls.causal(), 62, ls.Mesh.abstract(1))
    softcap = lambda s, b, h, q, kv: 9.0 * torch.tanh(s / 9.0)
    q, k, v = tensors(62)
    for score_mod in (None, softcap):
        for sink in (None, torch.zeros(4)):
            results = [ls.attention(q, k, v, plan=plan, score_mod=score_mod, sink=sink) for _ in range(3)]
            assert torch.equal(results[0], results[2])
    assert len(checked) == 2  # with a sink and without: the layouts of another score_mod are the same
    for _ in range(2):
        with pytest.raises(TypeError, match="score_mod: expected a callable"):
            ls.attention(q, k, v, plan=plan, score_mod=3.0)  # type: ignore[call-overload]


@pytest.mark.parametrize("kernel", ["dense", "cpu"])
def test_repeated_calls_with_a_plan_stay_with_their_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    forward = distributed.forward
    monkeypatch.setattr(distributed, "forward", lambda *args, **options: (passes.append(1), forward(*args, **options))[1])
    plan, (q, k, v) = ls.plan(ls.causal(), 61, ls.Mesh.abstract(1)), tensors(61)
    results = [ls.attention(q, k, v, plan=plan, kernel=kernel) for _ in range(3)]
    assert all(torch.equal(results[0], x) for x in results) and len(passes) == (3 if kernel == "cpu" else 0)


def test_a_selection_fixes_its_work_unless_the_rest_of_the_mask_reads_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    works: list[bool] = []
    monkeypatch.setattr(selected, "_attend", lambda inputs, call: (works.append(call.work.mask_is_fixed), (inputs.q, inputs.q))[1])
    q, k, v = tensors(64)
    chosen, limit = ls.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int32), 16, 16), torch.tensor([50])
    for mask in (chosen, chosen & ls.causal(), chosen & ls.mask_mod(lambda b, h, i, j: j < limit[0])):
        ls.attention(q, k, v, mask=mask, kernel="triton")
    assert works == [True, True, False]


def test_a_repeated_call_whose_lse_is_not_used_may_take_a_prepared_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Size, tuple[bool, ...]]] = []
    monkeypatch.setattr(PreparedCall, "backward_again", lambda self, saved, grad, needs: asked.append((grad.shape, needs)))
    bias = torch.randn(4, requires_grad=True)
    q, k, v = tensors(53, requires_grad=True)
    for used in (0, 1):
        for _ in range(4):
            results = ls.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h], kernel="cpu", return_lse=True)
        results[used].sum().backward()
    assert asked == [(torch.Size((2, 4, 53, 5)), (True,))]  # not where only lse is used


def test_ranks_compare_every_argument_of_a_call() -> None:
    data = ls.plan(ls.causal(), (300, 260), ls.Mesh.abstract(3), layout="contiguous", strategy="ring").data
    sink, captured = torch.zeros(6).half(), [torch.zeros(2, 3).double(), torch.zeros(4).half()]
    q, k, v = (torch.zeros(2, heads, 9, dim).bfloat16() for heads, dim in ((6, 8), (3, 8), (3, 5)))
    fields = described_fields(data, OPTIONS, CallTensors(q=q, k=k, v=v, sink=sink, score_captured=captured))
    assert fields == {
        "plan": data.digest[:16], "mask": "causal()", "tokens": "300 × 260",
        "layout": f"{data.layouts[0].digest[:12]} {data.layouts[1].digest[:12]}", "schedule": f"ring, {data.schedule.stages} stages",
        "batch": "2", "heads": "6/3", "head dims": "8/5", "dtype": "torch.bfloat16", "device": "cpu", "scale": "0.25",
        "score_mod": f"{SCORE.name} {SCORE.key[:12]}", "captured": "torch.float64[2, 3], torch.float16[4]", "sink": "torch.float16[6]",
        "kernel": "cpu", "invariant": "False", "returned": "",
    }  # fmt: skip
    joined = replace(data, schedule=replace(data.schedule, joined=True))
    plain = described_fields(joined, CallOptions(spec=specs.of(None, None, "auto", invariant=True), scale=1.0), CallTensors(q=q, k=k, v=v))
    assert plain["schedule"] == f"ring, {data.schedule.stages} stages at once"
    assert [plain[name] for name in ("score_mod", "captured", "sink", "kernel", "invariant")] == ["none", "none", "none", "auto", "True"]
    shared = ls.plan(ls.causal(), 300, ls.Mesh.abstract(3), strategy="ulysses", heads=6, kv_heads=3).data
    returned = [
        described_fields(shared, CallOptions(spec=specs.of(None, None, "cpu", lse=lse), scale=1.0, max_scores=top), inputs())["returned"]
        for lse, top in ((True, False), (False, False), (True, True))
    ]
    assert returned == ["out lse", "out", "out lse max_scores"]


def test_a_forward_pass_over_a_selection_makes_no_gradient_of_the_score_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []
    make_work = one_device.make_work

    def made(*args: Any, backward: bool, **options: Any) -> Any:
        passes.append(backward)
        return make_work(*args, backward=backward, **options)

    monkeypatch.setattr(one_device, "make_work", made)
    monkeypatch.setattr(selected, "_attend", lambda inputs, call: (inputs.q, inputs.q))
    pytest.importorskip("triton")
    q, k, v = tensors(64)
    ls.attention(q, k, v, mask=ls.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int32), 16, 16), kernel="triton")
    assert passes and not any(passes)


def test_whole_tensors_of_the_invariant_mode_are_contiguous() -> None:
    """Results of matrix products may depend on strides."""
    pair = [torch.randn(2, 3, 12, dim) for dim in (4, 6)]

    def run(mesh: ls.Mesh) -> None:
        plan = ls.plan(ls.causal(), 12, mesh)
        whole = invariant._gathered(plan.data, 0, *(plan.shard(t, 2) for t in pair))
        assert [t.is_contiguous() for t in whole] == [True, True] and all(map(torch.equal, whole, pair))

    virtual_world(2).run(run)


def test_a_state_s_layout_says_whether_it_is_aligned() -> None:
    def state(offset: int) -> State:
        out, lse = torch.zeros(70)[offset : offset + 64].view(2, 4, 8), torch.zeros(2, 4)
        return State(out=out, lse=lse)

    assert state(0).layout == state(0).layout != state(1).layout
    assert state(0).layout != State(out=state(0).out, lse=torch.zeros(4, 2).mT).layout


@pytest.mark.parametrize("supported", [True, False])
def test_a_compiled_call_over_a_selection_that_has_no_path_of_its_own_takes_the_plain_one(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    own, plain = ((torch.full((1,), x),) * 3 for x in (1.0, 2.0))
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    monkeypatch.setattr(engine, "_attend_selected", lambda *args: None)
    monkeypatch.setattr(engine, "_attend_selected_compiled", lambda *args: own if supported else None)
    monkeypatch.setattr("longspan._engine.compiled.attend_compiled", lambda *args, **options: plain)
    q, k, v = tensors(64)
    mask = ls.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int32), 16, 16)
    got = engine.attend(q, k, v, engine.AttendOptions(mask=mask))
    assert float(got[0]) == (1.0 if supported else 2.0)
