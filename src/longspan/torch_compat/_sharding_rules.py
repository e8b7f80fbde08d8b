"""DTensor's rules for SDPA.

Across a sequence's shards attention is computed by the engine, above DTensor: registering "the rules of context parallelism" turns that
on for this thread's SDPA calls on DTensors, as enabling the dispatcher does.

torch has sharding rules for CUDA's fused kernels but none for the CPU's, and guesses one that shards the sequence. The rule here is that
of the others: batch and heads may be sharded, the sequence not.
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
    """(out, lse) of (q, k, v, dropout_p, is_causal), attn_mask and scale being keywords."""
    placements = (Replicate(), Shard(0), Shard(1))
    mask = kwargs.get("attn_mask")
    return [([p, p], [p, p, p, *([None] * len(rest))]) for p in placements if mask is None or isinstance(p, Replicate)]


def register_cp_sharding_rules() -> None:
    """Let SDPA on DTensors that are sharded along the sequence span their mesh, in this thread."""
    enable()


def unregister_cp_sharding_rules(clear_the_cache: bool = False) -> None:
    """Leave such DTensors to torch again. Nothing is cached here that could be stale: `clear_the_cache` is torch's own argument."""
    disable()
