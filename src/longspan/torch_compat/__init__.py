"""The context parallelism of `torch.distributed.tensor.experimental`, under torch's names, over longspan's engine.

Code written for torch's context parallelism runs after a change of its imports, and without some of torch's limits: on the CPU too, for
any mask and score_mod, for any length, with gradients through shards. New code should use `longspan.plan`.

While `context_parallel` is active, or the dispatcher is enabled, torch's attention functions are replaced in that thread: see
`longspan.context_parallel`.

Two of torch's habits remain. `_cp_options` is one object for the process. `_context_parallel_shard` sets its `enable_load_balance`, and
`context_parallel_unshard` without a balancer reads it.
"""

from longspan.torch_compat._attention import (
    _CausalBehavior,
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _is_causal_behavior,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from longspan.torch_compat._cp_custom_ops import flex_cp_allgather
from longspan.torch_compat._load_balancer import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from longspan.torch_compat._sharding_rules import register_cp_sharding_rules, unregister_cp_sharding_rules

__all__ = [
    "_CausalBehavior",
    "_ContextParallel",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "context_parallel",
    "context_parallel_unshard",
    "flex_cp_allgather",
    "register_cp_sharding_rules",
    "set_rotate_method",
    "unregister_cp_sharding_rules",
]
