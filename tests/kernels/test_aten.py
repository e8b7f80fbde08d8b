"""torch's SDPA operators behind the kernel protocol: whole and in stages, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.cases import Case, check_against_oracle
from tests.kernels.calls import backward, forward, unsupported_reason
from tests.kernels.shards import Segments, work_of
from torch import Tensor

import longspan as ls
from longspan._kernels import aten, aten_ops
from longspan._kernels.protocol import Grads, Kernel, State, Work, like_query, state_dtype
from longspan._kernels.registry import kernel_named
from longspan.testing import oracle

BACKENDS = ["flash", "efficient", "cudnn"]
BATCH, HEADS, GROUPS = 2, 6, 3
FIRST = (1, 4)  # these batch rows and heads are part of more
HEAD_TAIL: tuple[Segments, Segments] = (((0, 32), (80, 16)), ((32, 16), (48, 32)))
Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def full(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + kv >= 0


def by_batch_and_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Full rectangles of 16 × 16 tiles that differ by batch row and head; early rows of some see nothing."""
    return (kv < 16 * (h - 2)) & (q >= 16 * b)


@dataclass(frozen=True, kw_only=True)
class Problem:
    q: Tensor
    buffers: list[Tensor]  # of each stage [T, B, G, D + E]
    grad_out: Tensor
    grad_lse: Tensor | None
    stages: list[Work]
    mod: Mod
    dims: tuple[int, int]

    def keys(self, stage: int, buffers: list[Tensor]) -> tuple[Tensor, Tensor]:
        whole = buffers[stage].permute(1, 2, 0, 3)
        return whole[..., : self.dims[0]], whole[..., self.dims[0] :]


def problem(
    mod: Mod = causal,
    dtype: torch.dtype = torch.float32,
    *,
    shards: tuple[Segments, ...] = HEAD_TAIL,
    dims: tuple[int, int] = (24, 24),
    block: int = 16,
    through_lse: bool = False,
    device: str = "cpu",
) -> Problem:
    """Queries of the first shard against the keys of each, one stage per shard."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    lengths = [sum(n for _, n in segments) for segments in shards]
    return Problem(
        q=draw(BATCH, lengths[0], HEADS, dims[0]).transpose(1, 2),
        buffers=[draw(n, BATCH, GROUPS, sum(dims)) for n in lengths],
        grad_out=draw(BATCH, HEADS, lengths[0], dims[1]),
        grad_lse=draw(BATCH, HEADS, lengths[0]).to(state_dtype(dtype)) if through_lse else None,
        stages=[work_of(mod, shards[0], segments, block=block, batch=BATCH, heads=HEADS, first=FIRST) for segments in shards],
        mod=mod,
        dims=dims,
    )


def in_stages(forward_kernel: Kernel, backward_kernel: Kernel, given: Problem) -> dict[str, Tensor]:
    state: State | None = None
    for i, work in enumerate(given.stages):
        final = i == len(given.stages) - 1
        state = forward(forward_kernel, given.q, *given.keys(i, given.buffers), work, state=state, final=final, max_scores=False)
    assert state is not None and state.out.dtype == given.q.dtype and state.lse.dtype == state_dtype(given.q.dtype)
    assert state.out.stride() == like_query(given.q, given.dims[1], given.q.dtype).stride()
    grad_lse = None if given.grad_lse is None else torch.where(state.lse == -torch.inf, 0.0, given.grad_lse)
    delta = backward_kernel.delta(state.out, given.grad_out, grad_lse)
    wide = state.lse.dtype
    dq = torch.full(given.q.shape, 0.5, dtype=wide, device=given.q.device)
    buffers = [torch.full(b.shape, torch.nan, dtype=wide, device=b.device) for b in given.buffers]
    for i, work in enumerate(given.stages):
        dk, dv = given.keys(i, buffers)
        into = Grads(q=dq, k=dk, v=dv, captured=[])
        tensors = (given.q, *given.keys(i, given.buffers), state.out, state.lse, given.grad_out, grad_lse)
        assert backward(backward_kernel, *tensors, work, needs=[], wide=True, delta=delta, into=into) is into
    return {"out": state.out, "lse": state.lse, "dq": dq - 0.5, **{f"dkv of stage {i}": b for i, b in enumerate(buffers)}}


def right(given: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """All stages at once by the oracle, in a dtype."""
    device = given.q.device
    q_pos = given.stages[0].q_tiles.positions(device)
    kv_pos = torch.cat([work.kv_tiles.positions(device) for work in given.stages])
    mask = ls.mask_mod(lambda b, h, q, kv: given.mod(b + FIRST[0], h + FIRST[1], q_pos[q], kv_pos[kv]))
    q, *buffers = (t.detach().requires_grad_() for t in (given.q, *given.buffers))
    whole = torch.cat(buffers).permute(1, 2, 0, 3)
    k, v = whole[..., : given.dims[0]], whole[..., given.dims[0] :]
    out, lse = oracle(q, k, v, mask=mask, scale=given.stages[0].scale, return_lse=True, dtype=dtype)
    loss = (out * given.grad_out.to(dtype)).sum()
    if given.grad_lse is not None:
        loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * given.grad_lse.to(lse.dtype)).sum()
    dq, *dkv = torch.autograd.grad(loss, [q, *buffers])
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, **{f"dkv of stage {i}": b for i, b in enumerate(dkv)}}


def compare(got: dict[str, Tensor], given: Problem) -> None:
    """Within twice the error of the dense computation in the same dtype, and the rounding of terms and of the result."""
    # Gradients of float64 leaves: autograd would round them to the leaves' dtype, and with that hide what is right.
    wide_given = replace(given, q=given.q.double(), buffers=[b.double() for b in given.buffers])
    want, dense, dtype = right(wide_given, torch.float64), right(given, given.q.dtype), given.q.dtype
    assert got.keys() == want.keys()
    values = torch.cat([given.keys(i, given.buffers)[1] for i in range(len(given.buffers))], 2).double()
    terms = float((given.grad_out.double() @ values.repeat_interleave(HEADS // GROUPS, 1).mT).abs().max())
    for name, tensor in want.items():
        finite = torch.isfinite(tensor)
        assert torch.equal(torch.isfinite(got[name]), finite), f"{name}: NaN or infinity in the wrong places"
        size = float(tensor[finite].abs().max())
        budget = 2 * float((dense[name].double() - tensor)[finite].abs().max()) + torch.finfo(dtype).eps * size
        budget += 2 * torch.finfo(state_dtype(dtype)).eps * max(terms, size)
        error = float((got[name].double() - tensor)[finite].abs().max())
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


def check(name: str, given: Problem) -> None:
    kernel = kernel_named(name)
    for work in given.stages:
        assert unsupported_reason(kernel, given.q, *given.keys(0, given.buffers), work) is None
    compare(in_stages(kernel, kernel, given), given)


@pytest.mark.parametrize("through_lse", [False, True], ids=["", "through lse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["flash", "aten"])
def test_stages_of_causal_shards_add_up_to_the_whole(name: str, dtype: torch.dtype, through_lse: bool) -> None:
    check(name, problem(dtype=dtype, through_lse=through_lse))


@pytest.mark.parametrize("through_lse", [False, True], ids=["", "through lse"])
def test_rectangles_may_differ_by_batch_row_and_head_and_leave_rows_out(through_lse: bool) -> None:
    given = problem(by_batch_and_head, through_lse=through_lse)
    assert (right(given, torch.float64)["lse"] == -torch.inf).any()
    check("flash", given)


def test_ragged_shards_and_shards_without_any_pair_add_up() -> None:
    shards: tuple[Segments, ...] = (((10, 21), (40, 9)), ((0, 10),), ((31, 9),), ((60, 7),))
    check("flash", problem(shards=shards))


def test_the_backward_of_one_kernel_takes_the_result_of_another() -> None:
    given = problem(dtype=torch.bfloat16)
    compare(in_stages(kernel_named("cpu"), kernel_named("flash"), given), given)
    compare(in_stages(kernel_named("flash"), kernel_named("cpu"), given), given)


@pytest.mark.parametrize("through_lse", [False, True], ids=["", "through lse"])
@pytest.mark.parametrize("heads", ["gqa", "mqa"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["flash", "aten"])
def test_a_whole_attention_is_right(name: str, mask: str, heads: str, through_lse: bool) -> None:
    for length, dtype in ((1, torch.float32), (300, torch.float32), (129, torch.float16)):
        case = Case(mask=mask, score="none", heads=heads, dims="64", length=length)
        check_against_oracle(case, name, dtype, through_lse=through_lse)


def test_packed_documents_that_begin_with_a_tile_are_causal_squares() -> None:
    q, k, v = (torch.randn(2, h, 384, 16, requires_grad=True) for h in (4, 2, 2))
    mask = ls.causal() & ls.documents(lengths=[128, 256])
    got, want = (ls.attention(q, k, v, mask=mask, kernel=name) for name in ("flash", "dense"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    grads, right_grads = (torch.autograd.grad(out.sin().sum(), [q, k, v]) for out in (got, want))
    torch.testing.assert_close(grads, right_grads, rtol=1e-4, atol=1e-4)


def test_a_sink_is_folded_in() -> None:
    q, k, v, sink = (torch.randn(s, requires_grad=True) for s in ((2, 4, 37, 16), (2, 2, 37, 16), (2, 2, 37, 16), (4,)))
    got, want = (ls.attention(q, k, v, mask=ls.causal(), sink=sink, kernel=name) for name in ("aten", "dense"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    grads, right_grads = (torch.autograd.grad(out.sin().sum(), [q, k, v, sink]) for out in (got, want))
    torch.testing.assert_close(grads, right_grads, rtol=1e-4, atol=1e-4)


def test_one_rectangle_that_is_everything_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "merge_", lambda *args: pytest.fail("merged"))
    given = problem(full, shards=(((0, 50),),))
    state = forward(
        kernel_named("flash"), given.q, *given.keys(0, given.buffers), given.stages[0], state=None, final=True, max_scores=False
    )
    torch.testing.assert_close(state.out.double(), right(given, torch.float64)["out"], rtol=1e-4, atol=1e-5)


def test_no_keys_at_all_are_no_error() -> None:
    q, k = torch.randn(2, 6, 48, 24, requires_grad=True), torch.randn(2, 3, 0, 24, requires_grad=True)
    out, lse = ls.attention(q, k, k, kernel="flash", return_lse=True)
    assert out.shape == q.shape and not out.any() and bool((lse == -torch.inf).all())
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), [q, k]))


@pytest.mark.parametrize(("into_state", "scores_at_once"), [(False, 5000), (True, 5000), (False, 1)])
def test_the_largest_scores_are_given_where_asked_for(into_state: bool, scores_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_MAX_SCORES_IN_FLIGHT", scores_at_once)  # several rows at a time, not all, or one
    given = problem(causal)
    before, state = torch.full(given.q.shape[:3], -torch.inf), None
    if into_state:
        before = torch.randn(given.q.shape[:3])
        state = State(out=torch.zeros(*given.q.shape[:3], 24), lse=torch.zeros(given.q.shape[:3]), max_scores=before.clone())
    keys, _ = given.keys(0, given.buffers)
    result = forward(kernel_named("flash"), given.q, keys, keys, given.stages[0], state=state, final=True, max_scores=True)
    pos = given.stages[0].q_tiles.positions(torch.device("cpu"))
    scores = given.q @ keys.repeat_interleave(HEADS // GROUPS, 1).mT * given.stages[0].scale
    want = torch.where(pos[:, None] >= pos, scores, -torch.inf).amax(-1).maximum(before)
    assert result.max_scores is not None
    torch.testing.assert_close(result.max_scores, want)


def test_the_largest_scores_are_computed_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    product = aten.grouped_matmul
    monkeypatch.setattr(aten, "grouped_matmul", lambda a, b: sizes.append(a.shape[:-1].numel() * b.shape[-1]) or product(a, b))
    monkeypatch.setattr(aten, "_MAX_SCORES_IN_FLIGHT", 2 * 3 * 40 * 7 + 5)  # of 7 rows, and less than a row more
    aten._max_scores(torch.randn(2, 3, 23, 8), torch.randn(2, 3, 40, 8), False, 0.5)
    assert sizes == [2 * 3 * 40 * 7] * 3 + [2 * 3 * 40 * 2]
    monkeypatch.setattr(aten, "_MAX_SCORES_IN_FLIGHT", 7)  # a row at least
    sizes.clear()
    aten._max_scores(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 40, 8), False, 0.5)
    assert sizes == [2 * 3 * 40] * 4
    monkeypatch.undo()
    monkeypatch.setattr(aten, "grouped_matmul", lambda a, b: sizes.append(a.shape[:-1].numel() * b.shape[-1]) or product(a, b))
    sizes.clear()
    aten._max_scores(torch.empty(1, 2, 5, 8, device="meta"), torch.empty(1, 1, 1 << 20, 8, device="meta"), False, 0.5)
    assert sizes == [1 << 22] * 2 + [1 << 21]


def test_a_gradient_of_lse_survives_a_narrow_dtype() -> None:
    grad = torch.tensor([0.0, 1.0, -3.14159274, 1e-9, -2.3e-5, 4.4e6, 65535.0])[None, None]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right_ = aten_ops._columns(grad, dtype, 8)
        assert left.dtype == right_.dtype == dtype
        got = (left.double() * right_.double()).sum(-1)
        torch.testing.assert_close(got, -grad.double(), rtol=2e-7, atol=2e-12)


@pytest.mark.parametrize("through_lse", [False, True], ids=["", "through lse"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operators_are_called_as_their_schemas_say(backend: str, through_lse: bool) -> None:
    """By tensors without memory: what arguments there are, and what shapes come back."""
    given = problem(dtype=torch.bfloat16, device="meta")
    kernel, (work, _), wide = kernel_named(backend), given.stages, torch.float32
    q, k, v = given.q, *given.keys(0, given.buffers)
    state = forward(kernel, q, k, v, work, state=None, final=True, max_scores=False)
    assert (state.out.shape, state.out.dtype, state.lse.shape, state.lse.dtype) == (q.shape, q.dtype, q.shape[:3], wide)
    grad_lse = torch.empty_like(state.lse) if through_lse else None
    for mod in (causal, full):  # in rectangles, and as one
        whole = work_of(mod, HEAD_TAIL[0], HEAD_TAIL[0], block=16)
        grads = backward(kernel, q, k, v, state.out, state.lse, given.grad_out, grad_lse, whole, needs=[], wide=False)
        assert [(g.shape, g.dtype) for g in (grads.q, grads.k, grads.v)] == [(t.shape, t.dtype) for t in (q, k, v)]


# On a GPU.

LONG: tuple[Segments, Segments] = (((0, 384), (768, 256)), ((384, 256), (640, 128)))
RAGGED: tuple[Segments, Segments] = (((0, 300), (780, 221)), ((300, 250), (550, 230)))


def on_gpu(name: str, **settings: Any) -> Problem:
    """A problem for a backend; skipped with the backend's own reason where this machine has none for it."""
    given = problem(block=128, device="cuda", **{"dtype": torch.bfloat16, "dims": (64, 64), "shards": LONG} | settings)
    tensors = (given.q, *given.keys(0, given.buffers))
    reason = next(filter(None, (unsupported_reason(kernel_named(name), *tensors, work) for work in given.stages)), None)
    if reason is not None:
        pytest.skip(reason)
    return given


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [LONG, RAGGED], ids=["aligned", "ragged"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("name", [*BACKENDS, "aten"])
def test_stages_add_up_to_the_whole_on_the_gpu(name: str, dims: tuple[int, int], shards: tuple[Segments, Segments]) -> None:
    check(name, on_gpu(name, dims=dims, shards=shards))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_gradient_of_lse_passes_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    check(name, on_gpu(name, dims=(128, 128), dtype=dtype, through_lse=True))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_whole_attention_is_right_on_the_gpu(name: str, mask: str) -> None:
    for length, heads, dims, dtype in ((1000, "gqa", "128", torch.bfloat16), (384, "mqa", "64", torch.float16)):
        case = Case(mask=mask, score="none", heads=heads, dims=dims, length=length)
        check_against_oracle(case, name, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_rectangles_may_differ_by_head_on_the_gpu(name: str) -> None:
    given = on_gpu(name, mod=lambda b, h, q, kv: (kv < 128 * (h // 3)) & (q >= 128 * b))
    check(name, given)


@pytest.mark.gpu
def test_efficient_computes_in_float32_on_the_gpu() -> None:
    given = on_gpu("efficient", dtype=torch.float32, through_lse=True)
    kernel, want = (
        kernel_named("efficient"),
        right(replace(given, q=given.q.double(), buffers=[b.double() for b in given.buffers]), torch.float64),
    )
    for name, tensor in in_stages(kernel, kernel, given).items():
        size = float(want[name][torch.isfinite(want[name])].abs().max())
        torch.testing.assert_close(tensor.double(), want[name], rtol=0, atol=256 * torch.finfo(torch.float32).eps * size)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_memory_layout_does_not_change_the_result_on_the_gpu(name: str) -> None:
    """The same numbers in other places: rows that begin at odd addresses, out and its gradient head by head or token by token.

    cuDNN keeps plans under the strides of q, k and v alone, so that the order of calls is part of the test.
    """
    given = on_gpu(name, mod=full, shards=(((0, 256),),))
    kernel, work = kernel_named(name), given.stages[0]
    tensors = [given.q.contiguous(), *(t.contiguous() for t in given.keys(0, given.buffers))]
    state = forward(kernel, *tensors, work, state=None, final=True, max_scores=False)
    rows = [state.out.contiguous(), state.lse, given.grad_out]

    def grads(qkv: list[Tensor], out: Tensor, lse: Tensor, grad_out: Tensor) -> list[Tensor]:
        grads = backward(kernel, *qkv, out, lse, grad_out, None, work, needs=[], wide=True)
        return [grads.q, grads.k, grads.v]

    def by_token(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def odd(t: Tensor) -> Tensor:
        wide = t.new_zeros(*t.shape[:-1], t.shape[-1] + 1)
        wide[..., 1:] = t
        return wide[..., 1:]

    padded = torch.empty(BATCH, HEADS, 256, 2, dtype=torch.float32, device="cuda")
    padded[..., 1] = state.lse
    want = grads(tensors, *rows)
    others = [
        (tensors, by_token(rows[0]), rows[1], rows[2]),
        (tensors, rows[0], rows[1], by_token(rows[2])),
        (tensors, odd(rows[0]), padded[..., 1], odd(rows[2])),
        (tensors, rows[0], rows[1], rows[2].float()),
        ([by_token(t) for t in tensors], *rows),
        ([odd(t) for t in tensors], *rows),
    ]
    for i, other in enumerate(others):
        for got, right_ in zip(grads(*other), want, strict=True):
            # The order in which a gradient of q is summed may differ between calls.
            torch.testing.assert_close(got, right_, rtol=2**-6, atol=2**-7, msg=lambda m, i=i: f"layout {i}: {m}")
    for qkv in ([by_token(t) for t in tensors], [odd(t) for t in tensors]):
        again = forward(kernel, *qkv, work, state=None, final=True, max_scores=False)
        torch.testing.assert_close(again.out, state.out, rtol=2**-7, atol=2**-9)
        assert again.out.stride() == like_query(qkv[0], 64, torch.bfloat16).stride()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_deterministic_algorithms_are_honoured_on_the_gpu(name: str) -> None:
    given = on_gpu(name)
    kernel = kernel_named(name)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (in_stages(kernel, kernel, given) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_gradients_of_a_groups_query_heads_are_summed_in_float32() -> None:
    grad = torch.tensor([256.0, 1.0], dtype=torch.bfloat16).view(1, 2, 1, 1)  # 257 is no bfloat16
    assert float(aten_ops._summed(grad, 1)) == 257.0
