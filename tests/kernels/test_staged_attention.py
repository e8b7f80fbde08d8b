"""One attention computed in stages, as a rank of a sharded call computes it: shards of a larger attention, KV buffers by token, a running
state between stages, gradients added to earlier ones. Every kernel of the protocol against plain algebra in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.calls import backward, forward
from tests.kernels.shards import Segments, work_of
from torch import Tensor

from longspan._kernels.protocol import Grads, Kernel, State, Work, state_dtype
from longspan._kernels.registry import kernel_named
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, GROUPS = 2, 6, 3
FIRST = (1, 4)  # first batch row and head in the larger attention
LOCAL: Segments = ((0, 36), (73, 21))
REMOTE: Segments = ((36, 20), (56, 17))
Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def by_batch_and_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv < 15 * h) & (q + 3 * b >= kv) & (q // 5 % 4 != 1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    q: Tensor
    buffers: list[Tensor]  # of each stage [T, B, G, D + E]
    grad_out: Tensor
    grad_lse: Tensor
    bias: Tensor  # [heads of the larger attention]
    stages: list[Work]
    mod: Mod
    dims: tuple[int, int]
    max_scores: bool

    def keys(self, stage: int) -> tuple[Tensor, Tensor]:
        whole = self.buffers[stage].permute(1, 2, 0, 3)
        return whole[..., : self.dims[0]], whole[..., self.dims[0] :]


def problem(
    mod: Mod,
    dtype: torch.dtype,
    *,
    scored: bool,
    block: int = 16,
    dims: tuple[int, int] = (24, 40),
    shards: tuple[Segments, Segments] = (LOCAL, REMOTE),
    max_scores: bool = True,
    through_lse: bool = True,
) -> Problem:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    lengths = [sum(n for _, n in segments) for segments in shards]
    bias = draw(HEADS + FIRST[1]).to(state_dtype(dtype))
    stages = [work_of(mod, shards[0], segments, block=block, batch=BATCH, heads=HEADS, first=FIRST) for segments in shards]
    if scored:
        traced = trace(lambda s, b, h, q, kv: s * 0.9 + bias[h] + (kv - q) * 0.01 * b, "score", score_dtype=state_dtype(dtype))
        more = {"score": traced.program, "score_captured": [t.to(DEVICE) for t in traced.captured()], "joint": joint_of(traced.program)}
        stages = [replace(work, **more) for work in stages]
    return Problem(
        q=draw(BATCH, lengths[0], HEADS, dims[0]).transpose(1, 2),
        buffers=[draw(n, BATCH, GROUPS, sum(dims)) for n in lengths],
        grad_out=draw(BATCH, HEADS, lengths[0], dims[1]),
        grad_lse=draw(BATCH, HEADS, lengths[0]) * through_lse,
        bias=bias,
        stages=stages,
        mod=mod,
        dims=dims,
        max_scores=max_scores,
    )


def expected(given: Problem, *, scored: bool) -> dict[str, Tensor]:
    """Outputs and gradients by plain algebra in float64."""
    q, bias = (t.to(torch.float64, copy=True).requires_grad_() for t in (given.q, given.bias))
    buffers = [b.to(torch.float64, copy=True).requires_grad_() for b in given.buffers]
    whole = torch.cat(buffers).permute(1, 2, 0, 3).repeat_interleave(HEADS // GROUPS, 1)
    device = torch.device(DEVICE)
    q_pos = given.stages[0].q_tiles.positions(device).view(1, 1, -1, 1)
    kv_pos = torch.cat([work.kv_tiles.positions(device) for work in given.stages]).view(1, 1, 1, -1)
    b = torch.arange(BATCH, device=device).view(-1, 1, 1, 1) + FIRST[0]
    h = torch.arange(HEADS, device=device).view(1, -1, 1, 1) + FIRST[1]
    dim = given.dims[0]
    scores = q @ whole[..., :dim].mT * given.stages[0].scale
    if scored:
        scores = scores * 0.9 + bias[h] + (kv_pos - q_pos) * 0.01 * b
    seen = given.mod(b, h, q_pos, kv_pos).expand(scores.shape)
    scores = torch.where(seen, scores, -torch.inf)
    some = seen.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(some, scores, 0.0), -1) * some
    out, lse = weights @ whole[..., dim:], torch.logsumexp(torch.where(some, scores, 0.0), -1)
    loss = (out * given.grad_out.double()).sum() + (torch.where(some[..., 0], lse, 0.0) * given.grad_lse.double()).sum()
    dq, dbias, *dkv = torch.autograd.grad(loss, [q, bias, *buffers], allow_unused=True)
    results = {"out": out, "lse": torch.where(some[..., 0], lse, -torch.inf), "q": dq}
    if given.max_scores:
        results["max_scores"] = scores.amax(-1)
    results |= {f"stage {i}": g for i, g in enumerate(dkv)}
    return {name: t.detach() for name, t in (results | ({"bias": dbias} if scored else {})).items()}


def in_stages(kernel: Kernel, given: Problem, *, scored: bool) -> dict[str, Tensor]:
    state: State | None = None
    for i, work in enumerate(given.stages):
        final = i == len(given.stages) - 1
        state = forward(kernel, given.q, *given.keys(i), replace(work, joint=None), state=state, final=final, max_scores=given.max_scores)
    assert state is not None and (state.max_scores is not None) == given.max_scores
    grad_lse = torch.where(state.lse == -torch.inf, 0.0, given.grad_lse.to(state.lse.dtype))
    delta = kernel.delta(state.out, given.grad_out, grad_lse)
    wide = state.lse.dtype
    dq = torch.full(given.q.shape, 0.5, dtype=wide, device=DEVICE)
    captured = [torch.full(given.bias.shape, 0.25, dtype=wide, device=DEVICE)] if scored else []
    results = {"out": state.out, "lse": state.lse} | ({} if state.max_scores is None else {"max_scores": state.max_scores})
    for i, work in enumerate(given.stages):
        buffer = torch.full(given.buffers[i].shape, torch.nan, dtype=wide, device=DEVICE)
        views = buffer.permute(1, 2, 0, 3)
        into = Grads(q=dq, k=views[..., : given.dims[0]], v=views[..., given.dims[0] :], captured=list(captured))
        tensors = (given.q, *given.keys(i), state.out, state.lse, given.grad_out, None)
        got = backward(kernel, *tensors, work, needs=[True] * scored, wide=True, delta=delta, into=into)
        assert got is into
        results[f"stage {i}"] = buffer
    results["q"] = dq - 0.5
    return results | ({"bias": captured[0] - 0.25} if scored else {})


def check(name: str, given: Problem, *, scored: bool) -> None:
    want = expected(given, scored=scored)
    got = in_stages(kernel_named(name), given, scored=scored)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        size = float(tensor[torch.isfinite(tensor)].abs().max())
        tolerance = (64 if given.q.dtype.itemsize > 2 else 4) * torch.finfo(given.q.dtype).eps * size
        torch.testing.assert_close(got[key].double(), tensor, rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
@pytest.mark.parametrize("mod", [causal, by_batch_and_head])
def test_stages_add_up_to_the_whole(mod: Mod, scored: bool, dtype: torch.dtype) -> None:
    check("cpu", problem(mod, dtype, scored=scored), scored=scored)


@pytest.mark.parametrize("mod", [causal, by_batch_and_head])
def test_stages_in_the_flash_operator_add_up_to_the_whole(mod: Mod) -> None:
    check("cpu", problem(mod, torch.float32, scored=False, dims=(24, 24), max_scores=False, through_lse=False), scored=False)


@pytest.mark.parametrize(("mod", "scored"), [(causal, False), (by_batch_and_head, True)])
def test_stages_in_triton_add_up_to_the_whole(mod: Mod, scored: bool) -> None:
    pytest.importorskip("triton")
    check("triton", problem(mod, torch.float32, scored=scored, block=32), scored=scored)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize(("mod", "scored"), [(causal, False), (by_batch_and_head, True)])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "ragged"])
def test_stages_add_up_to_the_whole_on_the_gpu(kernel: str, mod: Mod, scored: bool, dims: tuple[int, int], aligned: bool) -> None:
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    shards: tuple[Segments, Segments] = (((0, 384), (768, 256)), ((384, 256), (640, 128)))
    if not aligned:
        shards = (((0, 300), (780, 221)), ((300, 250), (550, 230)))
    given = problem(mod, torch.bfloat16, scored=scored, block=128, dims=dims, shards=shards)
    for _ in range(2):  # the second time by prepared launches
        check(kernel, given, scored=scored)


@pytest.mark.gpu
def test_prepared_launches_hold_no_tensor_of_a_call() -> None:
    given = problem(causal, torch.bfloat16, scored=False, block=128, dims=(128, 128), shards=(((0, 384),), ((384, 256),)))
    kernel = kernel_named("triton")

    def held() -> int:
        tensors = (given.q.clone(), *(t.clone() for t in given.keys(0)))
        forward(kernel, *tensors, given.stages[0], state=None, final=True, max_scores=False)
        del tensors
        return torch.cuda.memory_allocated()

    assert len({held() for _ in range(4)}) == 1
