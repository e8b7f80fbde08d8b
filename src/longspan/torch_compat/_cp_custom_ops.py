"""`flex_cp_allgather`: the KV of all ranks, as a custom operator.

No `from __future__ import annotations` here: torch reads the operators' schemas from evaluated annotations.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan._comm.gather import all_gather_rows, reduce_scatter_rows
from longspan._comm.mesh import Mesh, as_mesh
from longspan._torch_private import process_group_by_name


def _mesh(name: str) -> Mesh:
    group = process_group_by_name(name)
    if group is None:
        raise RuntimeError(f"pg_name: expected the name of a process group of this process, got {name!r}")
    return as_mesh(group)


def _size(name: str) -> int:
    group = process_group_by_name(name)
    return 1 if group is None else dist.get_world_size(group)


def _gathered(mesh: Mesh, x: Tensor, dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    return all_gather_rows(mesh, rows, [len(rows)] * mesh.size, what="all-gather of KV").movedim(0, dim).contiguous()


def _scattered(mesh: Mesh, x: Tensor, dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    counts = [len(rows) // mesh.size] * mesh.size
    return reduce_scatter_rows(mesh, rows, counts, what="reduce-scatter of KV gradients").movedim(0, dim).contiguous()


@torch.library.custom_op("longspan::flex_cp_allgather", mutates_args=())
def flex_cp_allgather(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """k and v of all ranks of a process group, concatenated along `seq_dim` in the order of ranks, which hold equally many tokens."""
    mesh = _mesh(pg_name)
    local_lengths = torch.tensor([[k.shape[seq_dim], v.shape[seq_dim]]], device=k.device if k.is_cuda else "cpu")
    counts = all_gather_rows(mesh, local_lengths, [1] * mesh.size, what="agreement of all ranks, tokens held").tolist()
    if any(c != [k.shape[seq_dim]] * 2 for c in counts):
        raise ValueError(
            f"flex_cp_allgather: expected equally many tokens of k and v on every rank, got {counts}; a block_mask that "
            "_context_parallel_shard returned needs no all-gather and takes any length"
        )
    return _gathered(mesh, k, seq_dim), _gathered(mesh, v, seq_dim)


@flex_cp_allgather.register_fake
def _(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    return _resized(k, seq_dim, _size(pg_name), 1), _resized(v, seq_dim, _size(pg_name), 1)


@torch.library.custom_op("longspan::flex_cp_allgather_backward", mutates_args=())
def flex_cp_allgather_backward(grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """This rank's shards of the KV gradients, summed over ranks in float32 in a fixed order."""
    mesh = _mesh(pg_name)
    return _scattered(mesh, grad_full_k, seq_dim), _scattered(mesh, grad_full_v, seq_dim)


@flex_cp_allgather_backward.register_fake
def _(grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    return _resized(grad_full_k, seq_dim, 1, _size(pg_name)), _resized(grad_full_v, seq_dim, 1, _size(pg_name))


def _resized(x: Tensor, dim: int, times: int, over: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * times // over
    return x.new_empty(shape)


def _flex_cp_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Record the operator's arguments for its backward."""
    _, _, ctx.seq_dim, ctx.pg_name = inputs


def _flex_cp_allgather_backward(ctx: Any, grad_full_k: Tensor, grad_full_v: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """Gradients of the operator's arguments (k, v, seq_dim, pg_name)."""
    dk, dv = flex_cp_allgather_backward(grad_full_k, grad_full_v, ctx.seq_dim, ctx.pg_name)
    return dk, dv, None, None


flex_cp_allgather.register_autograd(_flex_cp_allgather_backward, setup_context=_flex_cp_setup_context)
