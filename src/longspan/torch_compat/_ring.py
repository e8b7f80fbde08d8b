"""torch's ring over any attention operator: rotation of KV, merging of partial results, forward and backward.

The operator computes one block: local queries and the KV of one rank. The ring forms of torch's own kernels (`_ring_kernels`) do not need
it: the engine runs them. This module serves code that gives an operator of its own.

Legend: B batch, H heads, S tokens of this rank, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from longspan._comm.gather import all_gather_rows
from longspan._comm.group import Pending
from longspan._comm.mesh import as_mesh
from longspan.torch_compat._options import _CausalBehavior, _cp_options, _is_causal_behavior, _RotateMethod

CHUNKS = 2  # of a rank's tokens under head-tail balancing


class _AttentionOp(Protocol):
    """Attention of one block: (out [B, H, S, D], lse [B, H, S], …)."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: object) -> tuple[Tensor, ...]: ...


def _maybe_wait(tensor: Tensor) -> Tensor:
    """A tensor of which a functional collective has arrived; other tensors as they are."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()  # type: ignore[no-any-return]


def _partial_update(original: Tensor, new: Tensor, dim: int, n_chunks: int, idx: int, add: bool) -> Tensor:
    """A copy of `original` in which chunk `idx` of `n_chunks` along `dim` is `new`, or the chunk plus `new`."""
    chunks = list(original.chunk(n_chunks, dim))
    if chunks[idx].shape != new.shape:
        raise AssertionError(f"new: expected shape {tuple(chunks[idx].shape)}, got {tuple(new.shape)}")
    chunks[idx] = chunks[idx] + new if add else new
    return torch.cat(chunks, dim)


class _SDPAMerger:
    """Running (out, lse) of partial results. A row without visible keys (lse −inf) adds nothing, also to another such row."""

    def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
        self._convert_to_f32, self._seq_dim = convert_to_f32, seq_dim
        self._total: tuple[Tensor, Tensor] | None = None
        self._dtypes = (torch.float32, torch.float32)
        self._squeeze = False

    def step(self, out: Tensor, lse: Tensor, partial: bool) -> None:
        """Merge a partial result: of all rows, or with `partial` of the second half of them."""
        self._dtypes = (out.dtype, lse.dtype)
        if self._convert_to_f32:
            out, lse = out.float(), lse.float()
        if lse.ndim < out.ndim:  # cuDNN's has a last dim of 1
            lse, self._squeeze = lse.unsqueeze(-1), True
        if self._total is None:
            self._total = out, lse
        elif partial:
            out_half, lse_half = (x.chunk(CHUNKS, dim=self._seq_dim)[1] for x in self._total)
            out, lse = (
                _partial_update(x, half, self._seq_dim, CHUNKS, 1, add=False)
                for x, half in zip(self._total, _merged(out_half, lse_half, out, lse))
            )
            self._total = out, lse
        else:
            self._total = _merged(*self._total, out, lse)

    def results(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in the dtypes of the last partial result."""
        if self._total is None:
            raise AssertionError("results: expected at least one step before, got none")
        out, lse = self._total
        return out.to(self._dtypes[0]), (lse.squeeze(-1) if self._squeeze else lse).to(self._dtypes[1])


def _merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    shift = total.clamp(min=torch.finfo(total.dtype).min)  # exp(−inf − finite) is 0, exp(−inf + inf) would be NaN
    return out * (lse - shift).exp() + other_out * (other_lse - shift).exp(), total


class _RingRotater(ABC):
    """Moves a buffer of each rank around a group: after n exchanges, `next_buffer` is the buffer of rank − n."""

    @abstractmethod
    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None: ...

    @abstractmethod
    def exchange_buffers(self, curr_buffer: Tensor) -> None: ...

    @abstractmethod
    def next_buffer(self) -> Tensor: ...


class _AllToAllRotater(_RingRotater):
    """Sends a buffer to the next rank, asynchronously."""

    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None:
        self._group = as_mesh(pg).group(0)
        self._exchange: tuple[Tensor, Pending] | None = None

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        group, sent = self._group, curr_buffer.contiguous()
        to_next, from_previous = [0] * group.size, [0] * group.size
        to_next[(group.rank + 1) % group.size] = from_previous[(group.rank - 1) % group.size] = len(sent)
        received = torch.empty_like(sent)
        self._exchange = received, group.all_to_all(received, sent, from_previous, to_next, what="rotation of a buffer")

    def next_buffer(self) -> Tensor:
        if self._exchange is None:
            raise AssertionError("next_buffer: expected exchange_buffers before, got none")
        received, pending = self._exchange
        pending.wait()
        return received


class _AllGatherRotater(_RingRotater):
    """Gathers the buffers of all ranks at the first exchange; further exchanges move nothing."""

    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None:
        self._mesh = as_mesh(pg)
        self._gathered: Tensor | None = None
        self._exchanges = 0

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        self._exchanges += 1
        if self._gathered is None:
            counts = [len(curr_buffer)] * self._mesh.size
            self._gathered = all_gather_rows(self._mesh, curr_buffer, counts, what="all-gather of a buffer")

    def next_buffer(self) -> Tensor:
        if self._gathered is None:
            raise AssertionError("next_buffer: expected exchange_buffers before, got none")
        return self._gathered.chunk(self._mesh.size)[self._mesh.rank - self._exchanges]


def _create_rotater(pg: dist.ProcessGroup, seq_dim: int, method: _RotateMethod | None = None) -> _RingRotater:
    """The rotater of a method; by default of `set_rotate_method`."""
    method = _cp_options.rotate_method if method is None else method
    rotaters = {_RotateMethod.ALL_TO_ALL: _AllToAllRotater, _RotateMethod.ALL_GATHER: _AllGatherRotater}
    if method not in rotaters:
        raise NotImplementedError(f"method: expected one of {list(rotaters)}, got {method!r}")
    return rotaters[method](pg, seq_dim)


# ------------------------------------------------------------------------------------------------------------------------ the ring


class _Block(NamedTuple):
    """The part of a ring step that is computed: all queries or their second half, all KV or its first half."""

    behavior: _CausalBehavior
    half_queries: bool
    half_kv: bool

    def queries(self, x: Tensor) -> Tensor:
        return x.chunk(CHUNKS, dim=2)[1].contiguous() if self.half_queries else x

    def kv(self, x: Tensor) -> Tensor:
        return x.chunk(CHUNKS, dim=2)[0] if self.half_kv else x

    def add_queries(self, total: Tensor, new: Tensor) -> Tensor:
        return _partial_update(total, new, 2, CHUNKS, 1, add=True) if self.half_queries else total + new

    def add_kv(self, total: Tensor, new: Tensor) -> Tensor:
        return _partial_update(total, new, 2, CHUNKS, 0, add=True) if self.half_kv else total + new


def _block(rank: int, size: int, step: int, is_causal: bool) -> _Block:
    balanced = _cp_options.enable_load_balance and is_causal and step > 0
    behavior = _is_causal_behavior(rank, size, step, is_causal)
    return _Block(behavior, half_queries=balanced and step > rank, half_kv=balanced and step <= rank)


def _rotated(group: dist.ProcessGroup, seq_dim: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The KV of this rank, rank − 1, rank − 2, …; the next transfer is in flight while a block is computed."""
    rotater, size = _create_rotater(group, seq_dim), dist.get_world_size(group)
    for step in range(size):
        if step:
            key, value = _split(rotater.next_buffer(), key, value)
        if step < size - 1:
            rotater.exchange_buffers(torch.cat([key.flatten(), value.flatten()]))
        yield key, value


def _split(buffer: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return buffer[: key.numel()].view(key.shape), buffer[key.numel() :].view(value.shape)


def _check_balance(is_causal: bool) -> None:
    if not is_causal and _cp_options.enable_load_balance:
        raise RuntimeError("Load balancing requires `is_causal=True`.")


def _templated_ring_attention(
    group: dist.ProcessGroup,
    seq_dim: int,
    op: _AttentionOp,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    **kwargs: object,
) -> tuple[Any, ...]:
    """(out, lse, further results of the last block) of this rank's queries over the KV of a group, block by block.

    With `_cp_options.enable_load_balance`, ranks hold head-tail shards. `op` gets `is_causal` for its block, and `kwargs`.
    """
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError("is_causal requires the same query and context sequence lengths")
    _check_balance(is_causal)
    if not isinstance(group, dist.ProcessGroup):
        raise AssertionError(f"group: expected a ProcessGroup, got {type(group).__name__}")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    merger, rest = _SDPAMerger(_cp_options.convert_to_f32, seq_dim), ()
    for step, (k, v) in enumerate(_rotated(group, seq_dim, key.contiguous(), value.contiguous())):
        block = _block(rank, size, step, is_causal)
        if block.behavior is _CausalBehavior.SKIP:
            continue
        out, lse, *rest = op(block.queries(query), block.kv(k), block.kv(v), is_causal=block.behavior.value, **kwargs)  # type: ignore[assignment]
        merger.step(out, lse, block.half_queries)
    return *merger.results(), *rest


def _templated_ring_attention_backward(
    group: dist.ProcessGroup,
    seq_dim: int,
    op: _AttentionOp,
    grad_out: Tensor,
    grad_out_name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """(grad_query, grad_key, grad_value, further results of the last block). `op` gets grad_out under `grad_out_name`.

    KV gradients move around the ring with the KV and return to the owner rank.
    """
    _check_balance(is_causal)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    dtype = torch.float32 if _cp_options.convert_to_f32 else query.dtype
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (query, key, value))
    rotater, rest = _create_rotater(group, seq_dim, _RotateMethod.ALL_TO_ALL), ()
    for step, (k, v) in enumerate(_rotated(group, seq_dim, key.contiguous(), value.contiguous())):
        block = _block(rank, size, step, is_causal)
        if step:
            grad_k, grad_v = _split(rotater.next_buffer(), grad_k, grad_v)
        if block.behavior is not _CausalBehavior.SKIP:
            q, rows, lse, grad_rows = (block.queries(x) for x in (query, out, logsumexp, grad_out))
            arguments = {**kwargs, grad_out_name: grad_rows, "out": rows, "logsumexp": lse, "is_causal": block.behavior.value}
            dq, dk, dv, *rest = op(query=q, key=block.kv(k), value=block.kv(v), **arguments)  # type: ignore[assignment]
            grad_q, grad_k, grad_v = block.add_queries(grad_q, dq), block.add_kv(grad_k, dk), block.add_kv(grad_v, dv)
        rotater.exchange_buffers(torch.cat([grad_k.flatten(), grad_v.flatten()]))
    grad_k, grad_v = _split(rotater.next_buffer(), grad_k, grad_v)
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype), *rest
