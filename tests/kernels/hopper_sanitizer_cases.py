"""One small case of every variant of the Hopper kernels, for `compute-sanitizer` on a GPU: `make sanitize-gpu`.

memcheck reports nothing (API errors aside: the launcher asks the driver for one kernel parameter too many to learn their number). racecheck
reports accesses that are ordered by mbarriers, which it does not model if one thread arrives for others:

- the arguments that Triton's `warp_specialize` passes to its partitions: every kernel that uses it is reported, at the line of the call;
- int32 records that one warp writes and others read (`hopper/pipeline.py`): the readers meet at a barrier, then one of them arrives on the
  `empty` mbarrier. `racecheck_control.cu` has that pattern alone and is reported too; with an arrival of every reader it is not;
- votes (`hopper/warp_votes.py`) and the lse of earlier states (`hopper/state_mover.py`): the same with writers, which meet at a barrier
  before one of them arrives on the mbarrier that the readers wait for. Some reads of votes have the line of the kernel's name: the compiler
  has merged them from several branches.

That a barrier of the warp or warp group precedes every arrival is checked in the PTX of every kernel (`hopper_compile.check_arrivals`).
`racecheck_filter.py` counts these kinds and fails at any other. Kernels of the package have no lines of the source, so they are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from tests.kernels.calls import backward, forward
from tests.kernels.shards import work_of
from torch import Tensor

import longspan as ls
from longspan._kernels.hopper import HopperKernel
from longspan._kernels.protocol import Grads
from longspan._kernels.triton import TritonKernel

HOPPER = HopperKernel(fallback=TritonKernel())

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
BIAS = torch.linspace(-1, 1, 4)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


def attention_case(
    name: str,
    dims: tuple[int, int],
    *,
    mask: ls.Mask | None = None,
    score: Callable[..., Tensor] | None = None,
    tokens: int = 300,
    keys: int | None = None,
    sink: bool = False,
    deterministic: bool = False,
) -> None:
    shapes = ((4, tokens, dims[0]), (2, keys or tokens, dims[0]), (2, keys or tokens, dims[1]))
    q, k, v = (torch.randn(1, h, n, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for h, n, d in shapes)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    ls.attention(
        q, k, v, mask=ls.causal() if mask is None else mask, score_mod=score, kernel="hopper", sink=torch.zeros(4).cuda() if sink else None
    ).sum().backward()
    torch.cuda.synchronize()
    print(name, dims, flush=True)


def in_two_stages(dims: tuple[int, int], *, device: str = "cuda") -> None:
    """Queries 0 to 199 and 300 to 399 over keys 0 to 199, then 200 to 399. Queries 0 to 199 are complete after the first stage."""
    q, k, v = (
        torch.randn(1, h, n, d, device=device, dtype=torch.bfloat16)
        for h, n, d in ((4, 300, dims[0]), (2, 400, dims[0]), (2, 400, dims[1]))
    )
    complete, state = torch.tensor([True, True, False]), None
    for i, (k_part, v_part) in enumerate(zip(k.split(200, 2), v.split(200, 2), strict=True)):
        work = work_of(lambda b, h, q, kv: q >= kv, ((0, 200), (300, 100)), ((i * 200, 200),), block=128)
        work = replace(work, complete_q_tiles=None if i else complete)
        state = forward(HOPPER, q, k_part.contiguous(), v_part.contiguous(), work, state=state, final=i == 1, max_scores=False)
    if device == "cuda":
        torch.cuda.synchronize()
    print("query tiles complete before the last stage", dims, flush=True)


def two_kv_buffers(dims: tuple[int, int], *, device: str = "cuda") -> None:
    """Both passes with KV in two buffers, the first of 200 tokens."""
    q, k, v = (
        torch.randn(1, h, n, d, device=device, dtype=torch.bfloat16)
        for h, n, d in ((4, 300, dims[0]), (2, 400, dims[0]), (2, 400, dims[1]))
    )
    work = work_of(lambda b, h, q, kv: q >= kv, ((100, 300),), ((100, 200), (0, 100), (300, 100)), block=128)
    local_kv = (k[:, :, :200].contiguous(), v[:, :, :200].contiguous())
    received = [t[:, :, 200:].contiguous() for t in (k, v)]
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        result = forward(HOPPER, q, *received, work, local_kv=local_kv)
        into = Grads(
            q=torch.zeros(q.shape, device=device), k=torch.zeros(k.shape, device=device), v=torch.zeros(v.shape, device=device), captured=[]
        )
        grad = torch.randn_like(result.out)
        backward(HOPPER, q, *received, result.out, result.lse, grad, None, work, local_kv=local_kv, wide=True, into=into)
    if device == "cuda":
        torch.cuda.synchronize()
    print("KV in two buffers", dims, flush=True)


def main() -> None:
    bias = BIAS.cuda().requires_grad_()
    for dims in DIMS:
        attention_case("causal", dims)
    for dims in DIMS[:3]:
        attention_case("deterministic", dims, deterministic=True)
        attention_case("deterministic, few tiles", dims, mask=ls.sliding_window(60), tokens=1500, deterministic=True)
        attention_case("gradients of captured tensors", dims, score=lambda s, b, h, q, kv: s + bias[h])
    attention_case(
        "deterministic, few visible keys", (128, 128), mask=ls.mask_mod(lambda b, h, q, kv: kv < 128), tokens=700, deterministic=True
    )
    attention_case("softcap", (128, 128), score=softcap)
    attention_case("documents", (128, 128), mask=ls.causal() & ls.documents([100, 50, 150]))
    attention_case("full", (128, 128), mask=ls.full(), tokens=520)
    attention_case("merged with a state", (128, 128), sink=True)
    attention_case("few tokens", (128, 128), tokens=7)
    attention_case("split-KV", (128, 128), mask=ls.full(), tokens=140, keys=2100)
    attention_case(
        "split-KV, mask and score mod", (96, 96), mask=ls.mask_mod(lambda b, h, q, kv: q + 2000 >= kv), score=softcap, tokens=100, keys=2100
    )
    attention_case("split-KV, merged with a state", (64, 64), mask=ls.full(), tokens=140, keys=2100, sink=True)
    for dims in DIMS:
        in_two_stages(dims)
    for dims in DIMS[:3]:
        two_kv_buffers(dims)


if __name__ == "__main__":
    main()
