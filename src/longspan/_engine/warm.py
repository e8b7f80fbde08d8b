"""`warm`: compile the kernels of a call before a job begins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longspan._engine.attention import attention
from longspan._masks.algebra import MaskLike


def warm(
    mask: MaskLike | None = None,
    seq_len: int | tuple[int, int] = 4096,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    score_mod: Callable[..., Tensor] | None = None,
    sink: bool = False,
    backward: bool = True,
    kernel: str = "auto",
    device: torch.device | str = "cuda",
) -> int:
    """Compile the kernels of an attention call, forward and backward in parallel threads, into Triton's cache on disk.

    Later processes of this machine, and later calls of this one, take them from there. Kernels of common calls are part of the package and
    are not compiled. Kernels depend on dtype, head dims, `mask` and `score_mod` as programs; of head counts and lengths, only on whether
    few KV heads leave SMs idle in the backward pass. Nothing is computed. Calls with a plan are not supported: their kernels compile at
    the first call.

    Args:
        mask, score_mod, kernel: As for `attention`.
        seq_len: Number of tokens, or (q_len, kv_len).
        heads, kv_heads: Query heads and KV heads; by default as many KV heads.
        head_dim, value_dim: Head dims of q and k, and of v; by default the same.
        sink: Whether calls have a sink.
        backward: Whether to compile the backward kernels too.
        device: A CUDA device of the kind that the job will use.

    Returns:
        The number of kernels that were compiled, or taken from disk or from the package. 0: this process had them all, or `kernel`
        is not compiled.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"warm: expected a CUDA device, got {device}; nothing is compiled for others")
    if not torch.cuda.is_available():
        raise RuntimeError("warm: expected a CUDA device, and torch finds none; run on a machine with the GPU of the job")
    from longspan._kernels.gpu.compilation import collecting_jobs, compile_in_threads

    q_len, kv_len = (seq_len, seq_len) if isinstance(seq_len, int) else seq_len
    sizes = (heads, q_len, head_dim), (kv_heads or heads, kv_len, head_dim), (kv_heads or heads, kv_len, value_dim or head_dim)
    q, k, v = (torch.empty(batch, *size, dtype=dtype, device=device, requires_grad=backward) for size in sizes)
    logits = torch.zeros(heads, device=device) if sink else None
    with torch.set_grad_enabled(backward), collecting_jobs() as jobs:
        attention(q, k, v, mask=mask, score_mod=score_mod, sink=logits, kernel=kernel)
    for compiled in compile_in_threads(jobs):
        compiled.result()
    return len(jobs)
