"""FlexAttention over the ranks of torchrun: causal packed documents with a score_mod, forward and backward, compared with one process.

    torchrun --nproc-per-node 2 examples/flex_attention_cp.py

Uses NCCL if every rank has a GPU, else Gloo on the CPU. Ranks hold the whole tensors only to check the result.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls

LENGTHS = [301, 64, 190, 77]  # lengths of the documents packed into one sequence; any lengths work
HEADS, DIM = 4, 16


def check(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((got.detach().double() - expected.detach().double()).abs().max())
    if not error <= tolerance:
        raise SystemExit(f"rank {dist.get_rank()}: {name}: largest error {error:.1e}, expected at most {tolerance:.1e}")
    if dist.get_rank() == 0:
        print(f"  {name:<22} matches one process, largest error {error:.1e}")


def main() -> None:
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if gpu else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))

    # As in any FlexAttention model: a mask_mod for packed documents, a score_mod with learned slopes, a block mask.
    length = sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
    slopes = torch.rand(HEADS, generator=generator).to(device).requires_grad_()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (ids[q] == ids[kv])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + slopes[h] * (kv - q)

    block_mask = create_block_mask(mask_mod, None, None, length, length, device=device)
    q, k, v, grad = (torch.randn(1, HEADS, length, DIM, generator=generator).to(device) for _ in range(4))

    # One process.
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = ls.flex_attention(*whole, score_mod=score_mod, block_mask=block_mask)
    expected_grads = torch.autograd.grad((expected * grad).sum(), [*whole, slopes])

    # The same call over the mesh.
    if mesh.get_rank() == 0:
        print(f"{length} tokens in {len(LENGTHS)} documents over {mesh.size()} ranks of {device}")
    with ls.context_parallel(mesh, seq_len=length) as cp:
        local = [cp.shard(t, 2).requires_grad_() for t in (q, k, v)]
        out = flex_attention(*local, score_mod=score_mod, block_mask=block_mask)
        *grads, dslopes = torch.autograd.grad((out * cp.shard(grad, 2)).sum(), [*local, slopes])
        dist.all_reduce(dslopes)  # each rank has the gradient of its queries
        check("out", cp.unshard(out, 2), expected, 1e-5)
        for name, got, want in zip(("dq", "dk", "dv"), grads, expected_grads[:3], strict=True):
            check(name, cp.unshard(got, 2), want, 1e-4)
        check("gradient of slopes", dslopes, expected_grads[3], 1e-2 * float(expected_grads[3].abs().max()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
