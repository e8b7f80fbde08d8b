"""torch's ring forms of its three attention kernels, forward and backward, run by the engine with its own choice of kernel.

Arguments and results are those of torch's operators. Results that only the same operator's backward reads (random states) are empty.
Works on the CPU too.

Legend: B batch, H heads, S tokens of this rank, D head dim.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan._comm.mesh import Mesh, context_mesh
from longspan._engine import ops
from longspan._engine.attention import AttendOptions, attend
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._masks.constructors import causal, full
from longspan._plan.strategies import StrategyName
from longspan._planner.plan import Plan
from longspan._planner.planning import plan
from longspan.torch_compat._dispatcher import default_layout
from longspan.torch_compat._options import _cp_options, strategy

MAX_PLANS = 64


@lru_cache(maxsize=MAX_PLANS)
def _plan(mesh: Mesh, q_len: int, kv_len: int, is_causal: bool, balanced: bool, how: StrategyName) -> Plan:
    """The plan of shards of equal lengths. `balanced` is part of the key: `default_layout` reads the option."""
    if not is_causal:
        return plan(full(), (q_len, kv_len), mesh, layout="contiguous", strategy=how)  # any layout gives the same
    return plan(causal(), q_len, mesh, layout=default_layout(q_len, mesh.size), strategy=how)


def _plan_of(mesh: DeviceMesh, query: Tensor, key: Tensor, is_causal: bool, dropout_p: float) -> Plan:
    if dropout_p:
        raise NotImplementedError(f"dropout_p: expected 0, got {dropout_p}: attention dropout is not supported across ranks")
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError("is_causal requires the same query and context sequence lengths")
    whole = context_mesh(mesh)
    lengths = (query.shape[2] * whole.size, key.shape[2] * whole.size)
    return _plan(whole, *lengths, is_causal, _cp_options.enable_load_balance, strategy())


@torch.no_grad()
def _forward(
    mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, D], lse [B, H, S])."""
    out, lse, _ = attend(q, k, v, AttendOptions(plan=_plan_of(mesh, q, k, is_causal, dropout_p), scale=scale))
    return out, lse


@torch.no_grad()
def _backward(
    mesh: DeviceMesh,
    grad_out: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. lse: [B, H, S], with a further dim of 1, or padded along S."""
    q, k, v = qkv
    lse = lse.reshape(*lse.shape[:2], -1)[..., : q.shape[2]].contiguous()
    inputs = CallTensors(q=q, k=k, v=v)
    tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=grad_out, grad_lse=None, needs=())
    options = CallOptions(spec=ops.specs.of(None, None, "auto"), scale=scale or 1 / math.sqrt(q.shape[3]))
    grad_q, grad_k, grad_v = ops.run_backward(tensors, options, _plan_of(mesh, q, k, is_causal, dropout_p).data)
    return grad_q, grad_k, grad_v


def _refuse(name: str, value: Any) -> None:
    if value is not None and value is not False:
        raise NotImplementedError(f"{name} is not supported yet")


def _random_state(q: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=q.device)


def _scaled_dot_product_ring_flash_attention(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(out, lse, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask) over the ranks of a mesh."""
    _refuse("return_debug_mask", return_debug_mask)
    out, lse = _forward(mesh, query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    state = _random_state(query)
    return out, lse, None, None, query.shape[2], key.shape[2], state, state, state


def _scaled_dot_product_ring_efficient_attention(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    compute_log_sumexp: bool = True,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(out, lse, philox_seed, philox_offset) over the ranks of a mesh. lse is always computed."""
    _refuse("attn_bias", attn_bias)
    out, lse = _forward(mesh, query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    return out, lse, _random_state(query), _random_state(query)


def _scaled_dot_product_ring_cudnn_attention(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    compute_log_sumexp: bool = True,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(out, lse [B, H, S, 1], cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask) over a mesh."""
    _refuse("attn_bias", attn_bias)
    _refuse("return_debug_mask", return_debug_mask)
    out, lse = _forward(mesh, query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    state = _random_state(query)
    return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], state, state, None


def _scaled_dot_product_ring_flash_attention_backward(
    mesh: DeviceMesh,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(grad_query, grad_key, grad_value) of this rank."""
    return _backward(mesh, grad_out, (query, key, value), out, logsumexp, dropout_p=dropout_p, is_causal=is_causal, scale=scale)


def _scaled_dot_product_ring_efficient_attention_backward(
    mesh: DeviceMesh,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: tuple[bool, ...],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(grad_query, grad_key, grad_value, None for the bias) of this rank."""
    _refuse("bias", bias)
    grads = _backward(mesh, grad_out, (query, key, value), out, logsumexp, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    return *grads, None


def _scaled_dot_product_ring_cudnn_attention_backward(
    mesh: DeviceMesh,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(grad_query, grad_key, grad_value) of this rank."""
    _refuse("attn_bias", attn_bias)
    return _backward(mesh, grad_out, (query, key, value), out, logsumexp, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
