"""Prepared Hopper steps, with recorded launches: they launch what the kernel launches, at the addresses of the call's tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.shards import work_of
from tests.kernels.stub_launches import Launches, record_launches
from tests.kernels.test_complete_query_tiles import QUERIES, STAGES, causal, staged

from longspan._kernels.hopper import HopperKernel, kernel
from longspan._kernels.hopper.state import HopperState
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, GradTargets, KVAddresses, State, Work
from longspan._kernels.triton import TritonKernel
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

KERNEL = HopperKernel(fallback=TritonKernel())
HEADS, KV_HEADS, DIM = 4, 1, 64


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setenv("LONGSPAN_ISOLATE", "1")
    return record_launches(monkeypatch)


def made(heads: int, tokens: int, *, dtype: torch.dtype = torch.bfloat16, by_token: bool = False) -> Tensor:
    t = torch.zeros(1, heads, tokens, DIM, dtype=dtype)
    return t.transpose(1, 2).contiguous().transpose(1, 2) if by_token else t


def new_inputs(i: int, *, by_token: bool = False, two_buffers: bool = False) -> AttentionInputs:
    """New tensors for the step i of `staged`."""
    tokens = sum(length for _, length in STAGES[i])
    k, v = (made(KV_HEADS, tokens, by_token=by_token) for _ in range(2))
    if not two_buffers:
        return AttentionInputs(q=made(HEADS, 512, by_token=by_token), k=k, v=v)
    return AttentionInputs(q=made(HEADS, 512, by_token=by_token), k=k[:, :, 256:], v=v[:, :, 256:], local_kv=(k[:, :, :256], v[:, :, :256]))


def addresses(inputs: AttentionInputs) -> KVAddresses:
    return KVAddresses(inputs.k.data_ptr(), inputs.v.data_ptr(), *(t.data_ptr() for t in inputs.local_kv or ()))


def targets(into: Grads) -> GradTargets:
    return GradTargets(into.q, into.captured, into.k.data_ptr(), into.v.data_ptr(), lambda: into)


def named(launches: Launches, tensors: dict[str, Tensor | None]) -> list[Any]:
    """(kernel, its values) of each launch since the last `clear`: addresses of known tensors as names, others as "other"."""
    names: dict[Any, str] = {t.data_ptr(): name for name, t in tensors.items() if t is not None}
    shown = []
    for name, values in zip(launches.names, launches.values, strict=True):
        numbers = 0 if name == "unbounded_kernel" else 3  # scale, first batch row, first head
        split = len(values) - numbers
        shown.append((name, tuple(names.get(a, "other") for a in values[:split]), values[split:]))
    launches.clear()
    return shown


def forward_names(inputs: AttentionInputs, state: State | None, result: State, captured: list[Tensor]) -> dict[str, Tensor | None]:
    local = inputs.local_kv or (None, None)
    tensors: dict[str, Tensor | None] = {
        "table": captured[0] if captured else None,
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "local k": local[0],
        "local v": local[1],
    }
    if state is not None:
        tensors |= {"old out": state.out, "old lse": state.lse}
    return tensors | {"out": result.out, "lse": result.lse, "completed": getattr(result, "completed_out", None)}


@pytest.mark.parametrize("how", ["by head", "by token", "all complete last", "two buffers", "sink", "scored"])
def test_forward_steps_launch_what_the_kernel_launches(how: str, launches: Launches) -> None:
    works = staged(QUERIES, STAGES, block=128)
    captured = [torch.zeros(HEADS)] if how == "scored" else []
    if how == "all complete last":
        works = [replace(w, complete_q_tiles=None) for w in works]
    if how == "two buffers":
        works = [replace(works[0], kv_tiles=replace(works[0].kv_tiles))]
    if how == "scored":
        score = trace(lambda s, b, h, q, kv: s + captured[0][h], "score").program
        works = [replace(w, score=score, score_captured=captured) for w in works]
    options = {"by_token": how == "by token", "two_buffers": how == "two buffers"}

    def first_state() -> State | None:
        return State(out=torch.zeros(1, HEADS, 512, DIM), lse=torch.zeros(1, HEADS, 512)) if how == "sink" else None

    by_kernel, by_steps, steps = [], [], []
    for turn in range(3):
        state = first_state()
        for i, work in enumerate(works):
            inputs, final = new_inputs(i, **options), i == len(works) - 1
            if turn < 2:
                result = KERNEL.forward(inputs, work, state=state, final=final, max_scores=False)
            else:
                result = steps[i](inputs.q, addresses(inputs), state, captured)
            shown = named(launches, forward_names(inputs, state, result, captured))
            if turn == 1:
                step = KERNEL.prepare_forward_step(inputs, work, state=state, result=result, final=final)
                assert step is not None and not launches.names
                steps.append(step)
                by_kernel.append((shown, result))
            if turn == 2:
                by_steps.append((shown, result))
            state = result
    for (want_launches, want), (got_launches, got) in zip(by_kernel, by_steps, strict=True):
        assert got_launches == want_launches and len(got_launches) == 1 and ("table" in got_launches[0][1]) == (how == "scored")
        assert type(got) is type(want) and got.out.dtype == want.out.dtype and got.out.stride() == want.out.stride()
        completed = [s.completed_out if isinstance(s, HopperState) else None for s in (got, want)]
        assert (completed[0] is None) == (completed[1] is None)
    outs = [{id(s.out), id(getattr(s, "completed_out", None))} for _, s in by_steps[:-1]]
    assert all(outs[0] == other for other in outs), "one running state for all steps"
    if how in ("by head", "by token", "scored"):
        assert by_steps[-1][1].out is by_steps[0][1].completed_out  # type: ignore[attr-defined]


def test_rows_without_keys_keep_their_state(launches: Launches) -> None:
    work = work_of(causal, ((0, 128), (512, 128)), ((256, 128),), block=128)  # the first 128 rows see nothing
    inputs = AttentionInputs(q=made(HEADS, 256), k=made(KV_HEADS, 128), v=made(KV_HEADS, 128))
    step = None
    for state in (None, State(out=torch.full((1, HEADS, 256, DIM), 3.0), lse=torch.full((1, HEADS, 256), 2.0))):
        for _ in range(2):
            result = KERNEL.forward(inputs, work, state=state, final=True, max_scores=False)
        step = KERNEL.prepare_forward_step(inputs, work, state=state, result=result, final=True)
        assert step is not None
        got = step(inputs.q, addresses(inputs), state, [])
        want_out, want_lse = (0.0, -torch.inf) if state is None else (3.0, 2.0)
        assert bool((got.out[:, :, :128] == want_out).all()) and bool((got.lse[:, :, :128] == want_lse).all())


def backward_tensors(work: Work, needs: tuple[bool, ...], *, by_token: bool) -> tuple[BackwardInputs, Grads]:
    tokens = work.kv_tiles.length
    inputs = AttentionInputs(
        q=made(HEADS, 512, by_token=by_token), k=made(KV_HEADS, tokens, by_token=by_token), v=made(KV_HEADS, tokens, by_token=by_token)
    )
    rows = [torch.zeros(1, HEADS, 512) for _ in range(3)]
    grad_out = made(HEADS, 512, by_token=by_token)
    tensors = BackwardInputs(
        inputs=inputs, out=made(HEADS, 512), lse=rows[0], grad_out=grad_out, needs=needs, delta=rows[1], norm=rows[2]
    )  # fmt: skip
    packed = torch.zeros(tokens, 1, KV_HEADS, 2 * DIM).permute(1, 2, 0, 3)  # k and v side by side
    captured = [torch.zeros(HEADS) if need else None for need in needs]
    return tensors, Grads(q=torch.zeros(1, HEADS, 512, DIM), k=packed[..., :DIM], v=packed[..., DIM:], captured=captured)


@pytest.mark.parametrize("how", ["one pass", "by token", "captured gradient", "concurrent", "deterministic"])
def test_backward_steps_launch_what_the_kernel_launches(how: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ordered_dq_pays", lambda *_, **__: True)
    work, needs, captured = staged(QUERIES, STAGES, block=128)[0], (), [torch.zeros(HEADS)]
    if how == "captured gradient":
        program, needs = trace(lambda s, b, h, q, kv: s + captured[0][h], "score").program, (True,)
        work = replace(work, score=program, score_captured=captured, joint=joint_of(program, None))
    score_captured = captured if needs else []
    work = replace(work, concurrent=how == "concurrent", complete_q_tiles=None)
    shown: list[list[Any]] = []
    step = None
    torch.use_deterministic_algorithms(how == "deterministic")
    try:
        for turn in range(3):
            tensors, into = backward_tensors(work, needs, by_token=how == "by token")
            if turn < 2:
                KERNEL.backward(tensors, work, wide=True, into=into)
            else:
                assert step is not None
                step(tensors, addresses(tensors.inputs), targets(into), score_captured)
            known = {
                "q": tensors.inputs.q, "k": tensors.inputs.k, "v": tensors.inputs.v, "grad_out": tensors.grad_out, "norm": tensors.norm,
                "delta": tensors.delta, "dq": into.q, "dk": into.k, "dv": into.v, "table": captured[0],
                "grad": into.captured[0] if needs else None,
            }  # fmt: skip
            shown.append(named(launches, known))
            if turn == 1:
                step = KERNEL.prepare_backward_step(tensors, work, into=into)
                launches.clear()
    finally:
        torch.use_deterministic_algorithms(False)
    assert shown[2] == shown[1]
    assert [name for name, *_ in shown[2]] == ["unbounded_kernel", *(["dq_kernel"] if needs else []), "dkv_kernel"]
    dkdv = shown[2][-1][1]
    assert dkdv[:6] == ("q", "k", "v", "grad_out", "norm", "delta") and ("dq" in dkdv) == (not needs)
    assert dkdv[6:8] == (("dk", "dv") if how == "concurrent" else ("other", "other"))  # parts of dK and dV, summed afterwards
    if needs:
        assert {"dq", "table", "grad"} <= set(shown[2][1][1]) and "table" in dkdv


def test_steps_without_isolation_have_no_check(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_ISOLATE", "0")
    work = staged(QUERIES, STAGES, block=128)[0]
    tensors, into = backward_tensors(work, (), by_token=False)
    for _ in range(2):
        KERNEL.backward(tensors, work, wide=True, into=into)
    launches.clear()
    step = KERNEL.prepare_backward_step(tensors, work, into=into)
    assert step is not None
    step(tensors, addresses(tensors.inputs), targets(into), [])
    assert launches.names == ["dkv_kernel"]


def test_row_terms_launch_what_the_kernel_launches(launches: Launches) -> None:
    shown, zeroed_shape = [], (1, HEADS, 512, DIM)
    prepared = None
    for turn in range(3):
        tensors, _ = backward_tensors(staged(QUERIES, STAGES, block=128)[0], (), by_token=turn == 0)
        tensors = replace(tensors, delta=None, norm=None)
        if turn < 2:
            zeroed = torch.full(zeroed_shape, 7.0)
            delta, norm = KERNEL.row_terms(tensors, zeroed)
            with_terms = replace(tensors, delta=delta, norm=norm)
        else:
            assert prepared is not None
            zeroed, delta, norm = prepared(tensors.inputs.q, tensors.out, tensors.lse, tensors.grad_out)
            assert zeroed.shape == zeroed_shape and zeroed.dtype == delta.dtype == norm.dtype == torch.float32
        known = {"q": tensors.inputs.q, "out": tensors.out, "do": tensors.grad_out, "lse": tensors.lse}
        known |= {"norm": norm, "delta": delta, "dq": zeroed}
        names = {t.data_ptr(): name for name, t in known.items()}
        shown.append([(name, [names.get(int(a)) for a in values]) for name, values in zip(launches.names, launches.values)])
        launches.clear()
        if turn == 1:
            prepared = KERNEL.prepare_row_terms(with_terms, zeroed)
            assert KERNEL.prepare_row_terms(replace(with_terms, grad_lse=tensors.lse), zeroed) is None
            assert not launches.names
    assert shown[2] == shown[1] == [("row_terms_kernel", ["q", "out", "do", "lse", "norm", "delta", "dq"])]


def test_what_a_step_cannot_repeat_is_not_prepared(launches: Launches) -> None:
    work = staged(QUERIES, STAGES, block=128)[0]
    inputs = new_inputs(0)
    result = KERNEL.forward(inputs, work, state=None, final=True, max_scores=False)
    prepare = KERNEL.prepare_forward_step
    assert prepare(inputs, work, state=None, result=result, final=True) is not None
    unaligned = torch.zeros(HEADS * 512 * DIM + 1, dtype=torch.bfloat16)[1:].view(1, HEADS, 512, DIM)
    assert prepare(replace(inputs, q=unaligned), work, state=None, result=result, final=True) is None
    assert prepare(inputs, replace(work, invariant=True), state=None, result=result, final=True) is None
    assert prepare(inputs, replace(work, scale=-0.3), state=None, result=result, final=True) is None, "another kernel, not compiled yet"
    tensors, into = backward_tensors(work, (), by_token=False)
    assert KERNEL.prepare_backward_step(replace(tensors, norm=None), work, into=into) is None
    assert KERNEL.prepare_backward_step(replace(tensors, grad_out=unaligned), work, into=into) is None
