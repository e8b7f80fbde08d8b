"""DTensor's sharding rules for SDPA.

torch registers rules by which DTensor runs its ring. Here the engine runs above DTensor, so registering the rules enables the dispatcher
in this thread.

torch has no sharding rule for the CPU's flash attention and derives one that shards the sequence, which is wrong. The rule below is that
of torch's CUDA kernels: batch and heads may be sharded, the sequence may not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from longspan.torch_compat._dispatcher import disable, enable

_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@register_sharding(_cpu_flash.default)
def _cpu_flash_rule(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
    """Placements of (out, lse) for those of (q, k, v, dropout_p, is_causal); attn_mask and scale are keywords."""
    placements = (Replicate(), Shard(0), Shard(1))
    mask = kwargs.get("attn_mask")
    return [([p, p], [p, p, p, *([None] * len(rest))]) for p in placements if mask is None or isinstance(p, Replicate)]


def register_cp_sharding_rules() -> None:
    """Run SDPA on DTensors that are sharded along the sequence over their mesh, in this thread."""
    enable()


def unregister_cp_sharding_rules(clear_the_cache: bool = False) -> None:
    """Undo `register_cp_sharding_rules`. `clear_the_cache` has no effect: nothing is cached."""
    disable()
