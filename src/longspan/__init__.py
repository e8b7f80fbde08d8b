"""longspan: exact attention over sequences split across devices."""

import sys
from importlib import import_module
from importlib import reload as _reload
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

# A command (`longspan …`, `python -m longspan …`) reads its options before it loads torch, which takes seconds. Until then this package is
# empty; the first use of a name fills it. While Python imports the package of `-m`, argv[0] is "-m".
_is_command = "_is_command" not in globals() and (sys.argv[:1] == ["-m"] or _Path(sys.argv[0] if sys.argv else "").stem == "longspan")

if TYPE_CHECKING or not _is_command:
    from longspan._cache.kv_cache import KVCache
    from longspan._comm.mesh import Mesh
    from longspan._cost.timeline import Conditions
    from longspan._dropin.context import context_parallel
    from longspan._engine.attention import attention
    from longspan._engine.invariant_mode import invariant
    from longspan._engine.signatures import flex_attention, scaled_dot_product_attention
    from longspan._engine.warm import warm
    from longspan._masks.algebra import Mask
    from longspan._masks.block_table import BlockTable
    from longspan._masks.constructors import causal, documents, full, mask_mod, prefix, sliding_window
    from longspan._masks.selected import selected
    from longspan._masks.static_mask import StaticMask
    from longspan._masks.tracing import ProgramError
    from longspan._plan.layout import Layout
    from longspan._plan.schedule import Schedule
    from longspan._planner.plan import Plan
    from longspan._planner.plan_set import PlanSet
    from longspan._planner.planning import plan
    from longspan._planner.steps import plan_step

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "Conditions",
    "ContextParallel",
    "KVCache",
    "Layout",
    "Mask",
    "Mesh",
    "Plan",
    "PlanSet",
    "ProgramError",
    "Schedule",
    "StaticMask",
    "attention",
    "causal",
    "context_parallel",
    "documents",
    "flex_attention",
    "full",
    "invariant",
    "mask_mod",
    "plan",
    "plan_step",
    "prefix",
    "scaled_dot_product_attention",
    "selected",
    "sliding_window",
    "warm",
]


if TYPE_CHECKING:
    from longspan import integrations as integrations
    from longspan import testing as testing
    from longspan import torch_compat as torch_compat
    from longspan._dropin.parallel_style import ContextParallel
else:
    # Imported on first use: these load more of torch (DTensor, multiprocessing) or optional packages.
    _LAZY_MODULES = ("integrations", "testing", "torch_compat")

    def __getattr__(name: str) -> Any:
        if _is_command and name in __all__:
            return getattr(_reload(sys.modules[__name__]), name)
        if name == "ContextParallel":
            from longspan._dropin.parallel_style import ContextParallel

            return ContextParallel
        if name in _LAZY_MODULES:
            return import_module(f"longspan.{name}")
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), "ContextParallel", *_LAZY_MODULES})
