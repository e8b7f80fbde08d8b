"""A small case of every variant of the Hopper kernels, for `compute-sanitizer` on a GPU: `make sanitize-gpu`.

memcheck finds nothing. racecheck's reports, all of them read (it prints 100 unless told otherwise), are of two kinds of accesses, both
ordered by barriers that it does not follow. One is what Triton's own `warp_specialize` hands to its partitions: any kernel that uses
it is reported, at the line of that call. The other is numbers that one warp tells others (`hopper/shared.py`): the readers meet at a
barrier, then one of them gives the place back. `racecheck_control.cu` has that pattern alone and is reported too; the same with every
reader giving the place back itself is not. `racecheck_filter.py` counts both kinds and fails at any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from shards import work_of
from tests.kernels.calls import backward, forward
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


def one(
    name: str,
    dims: tuple[int, int],
    *,
    mask: ls.Mask | None = None,
    score: Callable[..., Tensor] | None = None,
    tokens: int = 300,
    keys: int | None = None,
    sink: bool = False,
    fixed: bool = False,
) -> None:
    shapes = ((4, tokens, dims[0]), (2, keys or tokens, dims[0]), (2, keys or tokens, dims[1]))
    q, k, v = (torch.randn(1, h, n, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for h, n, d in shapes)
    torch.use_deterministic_algorithms(fixed, warn_only=True)
    ls.attention(
        q, k, v, mask=ls.causal() if mask is None else mask, score_mod=score, kernel="hopper", sink=torch.zeros(4).cuda() if sink else None
    ).sum().backward()
    torch.cuda.synchronize()
    print(name, dims, flush=True)


def in_two_stages(dims: tuple[int, int], *, device: str = "cuda") -> None:
    """Queries 0 to 199 and 300 to 399 over keys 0 to 199, then over 200 to 399: the first are complete with the first stage."""
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
    print("rows complete before the last stage", dims, flush=True)


def two_kv_buffers(dims: tuple[int, int], *, device: str = "cuda") -> None:
    """Both passes with KV in two buffers, the first of 200 tokens."""
    q, k, v = (
        torch.randn(1, h, n, d, device=device, dtype=torch.bfloat16)
        for h, n, d in ((4, 300, dims[0]), (2, 400, dims[0]), (2, 400, dims[1]))
    )
    work = work_of(lambda b, h, q, kv: q >= kv, ((100, 300),), ((100, 200), (0, 100), (300, 100)), block=128)
    local_kv = (k[:, :, :200].contiguous(), v[:, :, :200].contiguous())
    received = [t[:, :, 200:].contiguous() for t in (k, v)]
    of = HOPPER
    for fixed in (False, True):
        torch.use_deterministic_algorithms(fixed, warn_only=True)
        found = forward(of, q, *received, work, local_kv=local_kv)
        into = Grads(
            q=torch.zeros(q.shape, device=device), k=torch.zeros(k.shape, device=device), v=torch.zeros(v.shape, device=device), captured=[]
        )
        grad = torch.randn_like(found.out)
        backward(of, q, *received, found.out, found.lse, grad, None, work, local_kv=local_kv, wide=True, into=into)
    if device == "cuda":
        torch.cuda.synchronize()
    print("KV in two buffers", dims, flush=True)


def main() -> None:
    bias = BIAS.cuda().requires_grad_()
    for dims in DIMS:
        one("causal", dims)
    for dims in DIMS[:3]:
        one("fixed order", dims, fixed=True)
        one("fixed order, few tiles", dims, mask=ls.sliding_window(60), tokens=1500, fixed=True)
        one("captured gradients", dims, score=lambda s, b, h, q, kv: s + bias[h])
    one("fixed order, most keys unseen", (128, 128), mask=ls.mask_mod(lambda b, h, q, kv: kv < 128), tokens=700, fixed=True)
    one("softcap", (128, 128), score=softcap)
    one("documents", (128, 128), mask=ls.causal() & ls.documents([100, 50, 150]))
    one("full", (128, 128), mask=ls.full(), tokens=520)
    one("folded into a state", (128, 128), sink=True)
    one("few tokens", (128, 128), tokens=7)
    one("items cut in two and more", (128, 128), mask=ls.full(), tokens=140, keys=2100)
    one(
        "cut, with a mask and a score", (96, 96), mask=ls.mask_mod(lambda b, h, q, kv: q + 2000 >= kv), score=softcap, tokens=100, keys=2100
    )
    one("cut, and folded into a state", (64, 64), mask=ls.full(), tokens=140, keys=2100, sink=True)
    for dims in DIMS:
        in_two_stages(dims)
    for dims in DIMS[:3]:
        two_kv_buffers(dims)


if __name__ == "__main__":
    main()
