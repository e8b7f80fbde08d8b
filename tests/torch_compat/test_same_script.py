"""One script with torch's context parallelism and with longspan's: two processes on one GPU over Gloo, and virtual ranks.

pytest -m gpu tests/torch_compat/test_same_script.py -s
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan._dropin.context import context_parallel
from longspan.testing import run_processes, virtual_world

RANKS, BATCH, HEADS, LENGTH, DIM = 2, 2, 4, 1024, 64
NAMES = ("out", "dq", "dk", "dv")


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator).to("cuda", torch.bfloat16) for _ in range(4)]


def script(library: Any, mesh: Any, rotation: str) -> list[Tensor]:
    """A user's script; `library` is torch's module or longspan's."""
    library.set_rotate_method(rotation)
    q, k, v, grad = inputs()
    with library.context_parallel(mesh, buffers=[q, k, v, grad], buffer_seq_dims=[2, 2, 2, 2]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for t in (q, k, v):
            t.requires_grad = True
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(grad)
        outputs = library.context_parallel_unshard(mesh, [out.detach(), q.grad, k.grad, v.grad], [2, 2, 2, 2])
        for t in (q, k, v):
            t.requires_grad = False
    return [t.float().cpu() for t in outputs]


def _device_aware_all_gather() -> Any:
    """A replacement of the functional all-gather, for torch's run only. It lasts as long as the returned library.

    Gloo's own reads GPU memory from the host and crashes. The plain collective copies to the host first.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")

    def gather(x: Tensor, size: int, name: str) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=dist.distributed_c10d._resolve_process_group(name))
        return torch.cat(parts)

    library.impl("all_gather_into_tensor", gather, "CUDA")
    return library


def _process(which: str) -> dict[str, list[Tensor]]:
    torch.cuda.set_device(0)
    if which == "torch":
        import torch.distributed.tensor.experimental._attention as library

        replaced = _device_aware_all_gather()  # noqa: F841 (keeps the replacement alive)
    else:
        import longspan.torch_compat._attention as library  # type: ignore[no-redef]
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("cp",))
    return {rotation: script(library, mesh, rotation) for rotation in ("allgather", "alltoall")}


def _virtual() -> list[Tensor]:
    def rank(mesh: Any) -> list[Tensor]:
        q, k, v, grad = inputs()
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2).requires_grad_() for t in (q, k, v)]
            out = F.scaled_dot_product_attention(*parts, is_causal=True)
            grads = torch.autograd.grad((out * cp.shard(grad, 2)).sum(), parts)
            return [cp.unshard(t.detach(), 2).float().cpu() for t in (out, *grads)]

    return virtual_world(RANKS, device="cuda").run(rank)[0]


def _right() -> list[Tensor]:
    q, k, v, grad = (t.double() for t in inputs())
    whole = [t.requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*whole, is_causal=True)
    return [t.detach().cpu() for t in (out, *torch.autograd.grad((out * grad).sum(), whole))]


@pytest.mark.gpu
def test_one_script_gives_equal_results_with_torchs_and_longspans_context_parallelism() -> None:
    right = _right()
    results = {f"torch, {r}": outputs for r, outputs in run_processes(_process, RANKS, "torch")[0].items()}
    results |= {f"longspan, {r}": outputs for r, outputs in run_processes(_process, RANKS, "longspan")[0].items()}
    results["longspan, virtual ranks"] = _virtual()
    errors = {name: [float((g - w).abs().max()) for g, w in zip(outputs, right, strict=True)] for name, outputs in results.items()}
    for name, error in errors.items():
        print(f"{name:<24}", *(f"{n} {e:.1e}" for n, e in zip(NAMES, error, strict=True)))
    allowed = [2 * e + 2**-8 * float(w.abs().max()) for e, w in zip(errors["torch, allgather"], right, strict=True)]
    for name, error in errors.items():
        assert all(e <= a for e, a in zip(error, allowed, strict=True)), (name, error, allowed)
