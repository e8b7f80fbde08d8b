"""Prepared Hopper calls, with recorded launches: which kernels they launch, with which addresses, and when they are not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.stub_launches import Launches, record_launches

import longspan as ls
from longspan._engine import attention, call_cache, prepared_call
from longspan._engine.call_cache import CallCache
from longspan._kernels.gpu import workspace
from longspan._kernels.hopper import kernel, passes
from longspan._kernels.hopper.prepared import HopperBackward, HopperForward
from longspan.testing import virtual_world

BIAS = torch.nn.Parameter(torch.zeros(8))


def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + BIAS[h]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(attention, "calls", CallCache())
    return record_launches(monkeypatch)


def qkv(heads: tuple[int, int] = (8, 1), tokens: int = 512) -> list[Tensor]:
    return [torch.randn(1, h, tokens, 64, dtype=torch.bfloat16, requires_grad=True) for h in (heads[0], heads[1], heads[1])]


def repeat(tensors: list[Tensor], captured: list[Tensor], times: int = 3, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(out, gradients) of the last of some equal calls."""
    for _ in range(times):
        out = ls.attention(*tensors, kernel="hopper", **options)
        grads = torch.autograd.grad(out, [*tensors, *captured], torch.ones_like(out))
    return out, grads


def test_a_repeated_call_launches_four_kernels_with_the_addresses_of_its_tensors(launches: Launches) -> None:
    first = qkv()
    repeat(first, [], mask=ls.causal())
    launches.clear()
    tensors = qkv()
    out, grads = repeat(tensors, [], times=1, mask=ls.causal())
    assert launches.names == ["forward_kernel", "row_terms_kernel", "dkv_kernel", "round_kernel"]
    q, k, v = (t.data_ptr() for t in tensors)
    forward, rows, dkdv, rounding = launches.values
    assert forward[:4] == (q, k, v, out.data_ptr()) and forward[5] == q
    assert rows[:2] == (q, out.data_ptr()) and rows[3] == forward[4]
    norm, delta, total, counters, flag = rows[4:]
    assert dkdv[:6] == (q, k, v, rows[2], norm, delta) and dkdv[8:13] == (total, norm, delta, flag, counters + 16)
    assert rounding == (total, grads[0].data_ptr(), dkdv[6], grads[1].data_ptr(), dkdv[7], grads[2].data_ptr(), 64**-0.5)
    assert forward[-3:] == dkdv[-3:] == (64**-0.5, 0, 0)


def test_heads_that_are_not_shared_are_rounded_by_the_kernel_itself(launches: Launches) -> None:
    tensors = qkv((2, 2))
    repeat(tensors, [], mask=ls.causal())
    launches.clear()
    _, grads = repeat(tensors, [], times=1, mask=ls.causal())
    dkdv, rounding = launches.values[2:]
    assert dkdv[6:8] == (grads[1].data_ptr(), grads[2].data_ptr()) and rounding[1:] == (grads[0].data_ptr(), 64**-0.5)


@pytest.mark.parametrize(
    ("pays", "names"),
    [(True, ["row_terms_kernel", "dkv_kernel", "round_kernel"]), (False, ["row_terms_kernel", "dq_kernel", "dkv_kernel"])],
)
def test_invariant_backward_passes_do_not_divide_the_heads_of_a_group(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, pays: bool, names: list[str]
) -> None:
    """However few items there are. dQ with dK and dV, or by a kernel of its own; so over ranks, where each side is computed apart."""
    monkeypatch.setattr(kernel, "ordered_dq_pays", lambda *_, **__: pays)
    tensors = qkv()
    with ls.invariant():
        out = ls.attention(*tensors, mask=ls.causal(), kernel="hopper")
    launches.clear()
    torch.autograd.grad(out.sum(), tensors)
    assert launches.names[-3:] == names

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 512, mesh)
        shards = [plan.shard(t.detach(), 2).requires_grad_() for t in tensors]
        with ls.invariant():
            out = ls.attention(*shards, plan=plan, kernel="hopper")
        launches.clear()
        torch.autograd.grad(out.sum(), shards)

    virtual_world(1).run(rank)
    assert [name for name in launches.names if "row" not in name] == ["dq_kernel", "dkv_kernel"]


def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(s / 30)


@pytest.mark.parametrize("score_mod", [None, capped])
@pytest.mark.parametrize("repeats", [1, 4])
def test_dq_is_scaled_once(launches: Launches, monkeypatch: pytest.MonkeyPatch, score_mod: Any, repeats: int) -> None:
    """By the dK/dV kernel or by the rounding kernel, in first and in prepared calls."""
    scales_in_loop: list[bool] = []
    make = passes.HopperCall.dkdv_pass

    def recorded(*args: Any, **more: Any) -> Any:
        made = make(*args, **more)
        scales_in_loop.append(bool(made.settings["SCALE_DQ"]))
        return made

    monkeypatch.setattr(passes.HopperCall, "dkdv_pass", recorded)
    factors = []
    values = passes.HopperCall.rounding_scale.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(passes.HopperCall, "rounding_scale", property(lambda self: (factors.append(values(self)), factors[-1])[1]))
    repeat(qkv(), [], times=repeats, mask=ls.causal(), score_mod=score_mod, scale=0.3)
    assert scales_in_loop and set(scales_in_loop) == {score_mod is not None}
    assert set(factors) == {0.3 if score_mod is None else 1.0}
    if repeats > 1:
        assert launches.names[-1] == "round_kernel" and launches.values[-1][-1] == factors[0]


def test_a_captured_parameter_gets_its_gradient_by_the_query_kernel(launches: Launches) -> None:
    tensors = qkv()
    repeat(tensors, [BIAS], mask=ls.causal(), score_mod=biased)
    launches.clear()
    _, grads = repeat(tensors, [BIAS], times=1, mask=ls.causal(), score_mod=biased)
    assert launches.names == ["forward_kernel", "row_terms_kernel", "dq_kernel", "dkv_kernel", "round_kernel"]
    dq = launches.values[2]
    assert dq[6] == grads[0].data_ptr() and BIAS.data_ptr() in dq and grads[3].data_ptr() in dq
    assert BIAS.data_ptr() in launches.values[0] and BIAS.data_ptr() in launches.values[3]


def test_isolated_calls_have_one_flag_for_all_kernels(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, seen = qkv(), used(monkeypatch)
    repeat(tensors, [BIAS], mask=ls.causal(), score_mod=biased)
    launches.clear()
    seen.clear()
    monkeypatch.setattr(workspace, "take_zeros", lambda count, device, stream: (4096, torch.empty(0)))
    repeat(tensors, [BIAS], times=1, mask=ls.causal(), score_mod=biased)
    assert seen == ["HopperForward", "HopperBackward"]
    assert launches.names == ["forward_kernel", "row_terms_kernel", "dq_kernel", "dkv_kernel", "round_kernel"]
    _, rows, dq, dkdv, _ = launches.values
    q, k, v = (t.data_ptr() for t in tensors)
    assert rows[0] == q and rows[-3:] == (k, v, 4096) and 4096 in dq and 4096 in dkdv
    assert dkdv[4:6] == dkdv[8:10] == dq[4:6] == rows[4:6]


def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prepared passes that run from now on."""
    seen: list[str] = []
    for cls in (HopperForward, HopperBackward):
        run = cls.__call__
        monkeypatch.setattr(cls, "__call__", lambda self, *a, run=run, name=cls.__name__: (seen.append(name), run(self, *a))[1])
    return seen


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_capture_takes_the_way_that_holds_its_tables(
    capturing: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    tensors = qkv()
    repeat(tensors, [], mask=ls.causal())
    monkeypatch.setattr(prepared_call, "is_captured", lambda q: capturing)
    seen = used(monkeypatch)
    repeat(tensors, [], times=1, mask=ls.causal())
    assert seen == ([] if capturing else ["HopperForward", "HopperBackward"])


def test_nothing_is_prepared_in_a_graph_capture(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    for module in (prepared_call, call_cache):
        monkeypatch.setattr(module, "is_captured", lambda q: True)
    seen = used(monkeypatch)
    repeat(tensors, [], times=5, mask=ls.causal())
    assert not seen and not attention.calls._entries.count(attention.calls._shared)


@pytest.mark.parametrize("how", ["expanded gradient", "sink", "gradient of lse"])
def test_passes_that_are_not_prepared_still_launch(how: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    options = {"sink": torch.zeros(8)} if how == "sink" else {}
    seen = used(monkeypatch)
    for _ in range(4):
        launches.clear()
        out, lse = ls.attention(*tensors, mask=ls.causal(), kernel="hopper", return_lse=True, **options)
        loss = out.sum() if how == "expanded gradient" else (out * out).sum() + (lse.sum() if how == "gradient of lse" else 0)
        torch.autograd.grad(loss, tensors)
    assert "HopperBackward" not in seen and ("HopperForward" in seen) == (how != "sink")
    assert launches.names.count("dkv_kernel") == 1 and launches.names.count("forward_kernel") == 1


def other_strides(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t


def test_saved_tensors_of_another_layout_are_not_launched_as_prepared(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    repeat(tensors, [], mask=ls.causal())
    seen = used(monkeypatch)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, other_strides):
        repeat(tensors, [], times=1, mask=ls.causal())
    assert seen == ["HopperForward"]


def test_a_recent_backward_pass_is_used_for_equal_gradients_only(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    shape = tensors[0].shape
    repeat(tensors, [], mask=ls.causal())
    out = ls.attention(*tensors, mask=ls.causal(), kernel="hopper")
    gradients = {
        "equal": torch.zeros(shape, dtype=torch.bfloat16),
        "misaligned": torch.zeros(out.numel() + 1, dtype=torch.bfloat16)[1:].view(shape),
        "strided": other_strides(torch.zeros(shape, dtype=torch.bfloat16)),
        "equal again": torch.zeros(shape, dtype=torch.bfloat16),
    }
    used_for = {}
    for name, gradient in gradients.items():
        seen = used(monkeypatch)
        torch.autograd.grad(out, tensors, gradient, retain_graph=True)
        used_for[name] = bool(seen)
    assert used_for == {"equal": True, "misaligned": False, "strided": False, "equal again": True}
    torch.use_deterministic_algorithms(True)
    try:
        seen = used(monkeypatch)
        torch.autograd.grad(out, tensors, gradients["equal"], retain_graph=True)
        assert not seen
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_profilers_hook_sees_every_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._kernels.gpu import prepared_launch

    tensors = qkv()
    repeat(tensors, [], mask=ls.causal())
    by_triton: list[Any] = []
    monkeypatch.setattr(prepared_launch, "hooks_are_set", lambda: True)
    monkeypatch.setattr(prepared_launch.PreparedLaunch, "_launch_by_triton", lambda self, values: by_triton.append(values))
    launches.clear()
    repeat(tensors, [], times=1, mask=ls.causal())
    assert len(by_triton) == 4 and not launches.names


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook", [None, print, "added"])
def test_hooks_of_any_kind_are_seen(hook: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from longspan._kernels.gpu.driver_launch import hooks_are_set

    assert not hooks_are_set()
    if hook == "added":
        chain = getattr(triton.knobs.runtime, name)
        chain.add(print)
        assert hooks_are_set()
        chain.remove(print)
        assert not hooks_are_set()
        return
    monkeypatch.setattr(triton.knobs.runtime, name, hook)
    assert hooks_are_set() == (hook is not None)
