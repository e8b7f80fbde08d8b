"""Isolation in the triton kernel: NaN and inf in tokens that a row may not see do not change a bit of its results.

Rows that do see them get what a float64 computation over their visible keys alone gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.calls import backward, forward
from tests.kernels.test_triton import (
    DEVICE,
    SMALL,
    Case,
    Mod,
    causal,
    document_mask,
    late,
    late_part,
    per_head_mask,
    relative_bias,
    runs_of,
)

from longspan._kernels.protocol import State
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import Config, TritonKernel

KERNEL = TritonKernel(config=SMALL)
POISONED = {3: float("nan"), 30: float("inf"), 66: float("-inf")}  # token: value
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, grad_out


@dataclass(frozen=True, kw_only=True)
class Results:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: list[Tensor | None]


def computed(case: Case, inputs: Inputs, *, kernel: TritonKernel = KERNEL, fused: bool = True) -> Results:
    """Both passes. `fused`: dq_kernel computes delta."""
    *qkv, do = inputs
    work = case.work()
    state = forward(kernel, *qkv, work, state=None, final=True, max_scores=False)
    delta = None if fused else kernel.delta(state.out, do, None)
    needs = [c.is_floating_point() for c in work.score_captured]
    grads = backward(kernel, *qkv, state.out, state.lse, do, None, work, needs=needs, wide=False, delta=delta)
    return Results(out=state.out, lse=state.lse, dq=grads.q, dk=grads.k, dv=grads.v, captured=grads.captured)


def by_rows(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Each row in float64 over its visible keys alone, gradients by autograd: a row's copy of K and V has zeros where it may not see."""
    q, k, v, do = (t.detach().double().requires_grad_() for t in inputs)
    H, G = case.shape[1:3]
    allowed = case.allowed()
    k_seen, v_seen = (torch.where(allowed[..., None], t.repeat_interleave(H // G, 1)[:, :, None], 0.0) for t in (k, v))
    scores = torch.where(allowed, (q[:, :, :, None] * k_seen).sum(-1) * case.scale, -torch.inf)
    empty = ~allowed.any(-1, keepdim=True)
    # torch's softmax is NaN where a row has +inf; so is the attention of that row.
    weights = torch.where(allowed, torch.softmax(torch.where(empty, 0.0, scores), -1), 0.0)
    out = (weights[..., None] * v_seen).sum(-2)
    top = scores.detach().amax(-1, keepdim=True)
    lse = torch.where(empty, -torch.inf, top + torch.log(torch.exp(scores.detach() - top).sum(-1, keepdim=True)))[..., 0]
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do.detach())
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def poisoned(inputs: Inputs, which: int, tokens: dict[int, float] = POISONED) -> Inputs:
    """A copy in which one element of each of some tokens of one tensor is not finite, in every head."""
    changed = [t.clone() for t in inputs]
    for dim, (token, value) in enumerate(tokens.items()):
        changed[which][:, :, token, dim] = value
    return changed[0], changed[1], changed[2], changed[3]


def untouched(case: Case, which: int, tokens: dict[int, float] = POISONED) -> tuple[Tensor, Tensor, Tensor]:
    """Masks [B, H, Q], [B, H, Q], [B, G, K]: rows whose out and lse, rows whose dq, and keys whose dk and dv must keep their bits."""
    allowed, at = case.allowed(), torch.tensor(list(tokens), device=DEVICE)
    B, H, G, Q, K = case.shape
    if which in (1, 2):
        touched = allowed[..., at].any(-1)
        forward = touched
    else:
        touched = torch.zeros(B, H, Q, dtype=torch.bool, device=DEVICE)
        touched[..., at] = True
        forward = touched if which == 0 else torch.zeros_like(touched)
    keys = (allowed & touched[..., None]).any(2).view(B, G, H // G, K).any(2)
    return ~forward, ~touched, ~keys


def assert_same_bits(got: Tensor, clean: Tensor, where: Tensor, what: str) -> None:
    assert torch.equal(got[where], clean[where]), f"{what}: other bits in tokens that may not see the poison"


def assert_like_float64(got: Tensor, want: Tensor, dtype: torch.dtype, what: str, *, gradient: bool) -> None:
    """Non-finite elements in the same places, and numbers close. NaN, +inf and −inf agree too, but for gradients: where an output gradient
    is infinite, Σ p · dp may be NaN where out · dO is infinite.
    """
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{what}: not finite in other places than in float64"
    if not gradient:
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got == torch.inf, want == torch.inf), (
            f"{what}: other kinds of non-finite"
        )
    budget = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double()[finite], want[finite], rtol=budget, atol=budget, msg=what)


MASKS: dict[str, Mod] = {"causal": causal, "documents": document_mask(80), "empty rows": late, "per head": per_head_mask}


# Each mask in one dtype.
POISONED_CASES = [
    pytest.param(mask, dtype, marks=() if (i + j) % 2 == 0 else pytest.mark.repetition)
    for i, mask in enumerate(MASKS)
    for j, dtype in enumerate((torch.float32, torch.float16))
]


@pytest.mark.parametrize(("mask", "dtype"), POISONED_CASES)
def test_poison_reaches_only_rows_that_see_it(mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = Case(mask=MASKS[mask], dtype=dtype, shape=(1, 2, 1, 80, 80), dims=(16, 16))
    inputs = (*case.inputs(), torch.randn(1, 2, 80, 16, device=DEVICE).to(dtype))
    clean = computed(case, inputs)
    for which, name in enumerate(("q", "k", "v", "grad_out")):
        dirty = poisoned(inputs, which)
        got, want = computed(case, dirty), by_rows(case, dirty)
        forward, queries, keys = untouched(case, which)
        where = {"out": forward, "lse": forward, "dq": queries, "dk": keys, "dv": keys}
        for result, place in where.items():
            value: Tensor = getattr(got, result)
            assert_same_bits(value, getattr(clean, result), place, f"{name} poisoned, {result}")
            assert_like_float64(value, want[result], dtype, f"{name} poisoned, {result}", gradient=result.startswith("d"))
        empty = ~case.allowed().any(-1)
        assert not got.out[empty].any() and not got.dq[empty].any() and bool((got.lse[empty] == -torch.inf).all())


@pytest.mark.parametrize("tma", [False, True])
def test_poison_past_the_end_of_a_short_tile_is_not_seen(tma: bool) -> None:
    """Tiles of 40 tokens in blocks of 64, the next tile's tokens right behind them."""
    config = Config(**{name: replace(getattr(SMALL, name), tma=tma) for name in ("forward", "dkdv", "dq")})
    torch.manual_seed(0)
    case = Case(shape=(1, 1, 1, 80, 80), dims=(16, 16), mask=lambda b, h, q, kv: q // 40 == kv // 40)
    # Positions of two documents; each tile holds one.
    start, count = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40, 40], dtype=torch.int32)
    tiling = Tiling(length=80, block=64, row=start, pos=start, count=count)
    kinds = torch.eye(2, dtype=torch.int32)[None, None]  # two partial tiles
    table = runs_of(kinds, (64, 64), 80, 80)
    table.__dict__["transposed"] = runs_of(kinds, (64, 64), 80, 80)
    work = replace(case.work(), table=table, q_tiles=tiling, kv_tiles=tiling)
    kernel = TritonKernel(config=config)
    inputs = (*case.inputs(), torch.randn(1, 1, 80, 16, device=DEVICE))

    def both(given: Inputs) -> list[Tensor]:
        *qkv, do = given
        state = forward(kernel, *qkv, work, state=None, final=True, max_scores=False)
        grads = backward(kernel, *qkv, state.out, state.lse, do, None, work, needs=[], wide=False)
        return [state.out, state.lse, grads.q, grads.k, grads.v]

    clean = both(inputs)
    for which in range(4):
        got = both(poisoned(inputs, which, {40: float("nan"), 41: float("inf")}))
        for a, b in zip(got, clean, strict=True):
            assert torch.equal(a[:, :, :40], b[:, :, :40])


def test_gradients_of_captured_tensors_count_every_visible_pair_once() -> None:
    """A tile that is computed again must not add its gradients twice."""
    torch.manual_seed(0)
    score, bias = relative_bias(80)
    case = Case(mask=document_mask(80), score=score, learned=(bias,), shape=(1, 2, 1, 80, 80), dims=(16, 16))
    inputs = (*case.inputs(), torch.randn(1, 2, 80, 16, device=DEVICE))
    clean = computed(case, inputs)
    padding = {77: float("nan"), 78: float("inf"), 79: float("-inf")}
    for which in range(4):
        got = computed(case, poisoned(inputs, which, padding))
        assert got.captured[0] is not None and clean.captured[0] is not None
        assert torch.equal(got.captured[0], clean.captured[0])
        assert torch.equal(got.out[:, :, :75], clean.out[:, :, :75]) and torch.equal(got.dk[:, :, :75], clean.dk[:, :, :75])


def test_poison_does_not_cross_stages_or_a_separate_delta() -> None:
    torch.manual_seed(0)
    case = Case(shape=(1, 2, 1, 100, 160), mask=late, dtype=torch.float16, dims=(16, 16))
    q, k, v = case.inputs()

    def staged(k: Tensor, v: Tensor) -> State:
        state: State | None = None
        for start, stop in ((64, 160), (0, 64)):
            part = late_part(case, start, stop)
            state = forward(KERNEL, q, k[:, :, start:stop], v[:, :, start:stop], part, state=state, final=start == 0, max_scores=False)
        assert state is not None
        return state

    clean = staged(k, v)
    for which in (0, 1):
        _, *dirty, _ = poisoned((q, k, v, q), 1 + which, {10: float("nan"), 20: float("inf"), 150: float("nan")})
        got = staged(*dirty)
        hidden = ~case.allowed()[..., [10, 20, 150]].any(-1)
        assert_same_bits(got.out, clean.out, hidden, "out")
        assert_same_bits(got.lse, clean.lse, hidden, "lse")
    square = Case(shape=(1, 2, 1, 80, 80), dims=(16, 16))
    inputs = (*square.inputs(), torch.randn(1, 2, 80, 16, device=DEVICE))
    plain, dirty = computed(square, inputs, fused=False), computed(square, poisoned(inputs, 2), fused=False)
    assert_same_bits(dirty.dq, plain.dq, untouched(square, 2)[1], "dq")
