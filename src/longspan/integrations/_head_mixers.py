"""Gated delta nets (Qwen3-Next, Qwen3.5) split over ranks by heads.

Projections of single tokens run on this rank's tokens. Between them, an all-to-all moves to all tokens of 1/N of the heads, on which the
layer's own code convolves and scans, and back. Each rank's gradients of weights by head are those of its heads: their sum over ranks is the
gradient, as for all other weights.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank, N ranks, K key heads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from longspan._planner.plan import Plan

_COMMON = {"conv1d", "norm", "out_proj"}
_GROUPED = _COMMON | {"in_proj_qkvz", "in_proj_ba"}  # one projection, in which the parts of a key head are neighbours
_SEPARATE = _COMMON | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
_BY_HEAD = {"A_log", "dt_bias"}  # weights [value heads]
_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")


def splits_by_heads(module: nn.Module, ranks: int) -> bool:
    """Whether a layer is a gated delta net whose key heads can be divided by the ranks."""
    parts, weights = set(module._modules), set(module._parameters)
    if parts not in (_GROUPED, _SEPARATE) or weights != _BY_HEAD or not all(hasattr(module, name) for name in _SIZES):
        return False
    heads, per_head, conv, norm = module.num_k_heads, module.head_v_dim, module.conv1d, module.norm
    by_channel = isinstance(conv, nn.Conv1d) and conv.groups == conv.in_channels == module.conv_dim
    normed_by_head = all(weight.shape == (per_head,) for weight in norm.parameters())  # type: ignore[operator, union-attr]
    return bool(by_channel and normed_by_head and heads % ranks == 0)  # type: ignore[operator]


def run_by_heads(module: Any, hidden: Tensor, plan: Plan, real: Tensor | None) -> Tensor:
    """The layer's output [B, L, D] of this rank's tokens. hidden: [B, L, D]. real: bool [B, S], False for padding, or None."""
    if real is not None:
        hidden = hidden * plan.shard(real.to(hidden.device), 1)[:, :, None]
    projected = _projections(module, hidden, plan)
    layer = _layer_of_some_heads(module, plan, projected)
    # The layer reads the shape and dtype of its input only.
    whole = hidden.new_zeros(()).expand(hidden.shape[0], plan.layout.length, hidden.shape[2])
    output: Tensor = type(module).forward(layer, whole)
    return output


def _projections(module: Any, hidden: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Results of the input projections for all tokens [B, S, ...] and this rank's heads, by name."""
    heads = module.num_k_heads
    parts: dict[str, list[Tensor]] = {}
    for name in sorted(set(module._modules) - _COMMON):
        y = getattr(module, name)(hidden)
        sizes = [module.key_dim, module.key_dim, module.value_dim] if name == "in_proj_qkv" else [y.shape[-1]]
        parts[name] = [part.unflatten(-1, (heads, -1)) for part in y.split(sizes, -1)]  # [B, L, K, width]
    flat = [part for name in parts for part in parts[name]]
    widths = [part.shape[-1] for part in flat]
    moved = iter(plan.relayout(torch.cat(flat, -1), 1, to="heads", heads_dim=2).split(widths, -1))
    return {name: torch.cat([next(moved).flatten(2) for _ in parts[name]], -1) for name in parts}


def _layer_of_some_heads(module: Any, plan: Plan, projected: dict[str, Tensor]) -> Any:
    """The layer with this rank's heads only, whose projections return `projected` and whose output projection moves back."""
    ranks, rank = plan.mesh.size, plan.mesh.rank
    layer = object.__new__(type(module))
    layer.__dict__.update(module.__dict__)
    layer._modules, layer._parameters = {"norm": module.norm}, {}
    local: dict[str, Any] = {name: getattr(module, name) // ranks for name in _SIZES}
    local |= {name: getattr(module, name).chunk(ranks)[rank] for name in _BY_HEAD}
    local |= {name: lambda _, y=y: y for name, y in projected.items()}
    channels = [module.key_dim, module.key_dim, module.value_dim]

    def local_channels(weight: Tensor) -> Tensor:
        return torch.cat([part.chunk(ranks)[rank] for part in weight.split(channels)])

    bias = None if module.conv1d.bias is None else local_channels(module.conv1d.bias)
    local["conv1d"] = SimpleNamespace(weight=local_channels(module.conv1d.weight), bias=bias)

    def out_proj(y: Tensor) -> Any:
        by_head = y.unflatten(-1, (module.num_k_heads // ranks, -1))
        return module.out_proj(plan.relayout(by_head, 1, source="heads", to="plan", heads_dim=2).flatten(2))

    layer.__dict__.update(local, out_proj=out_proj)
    return layer
