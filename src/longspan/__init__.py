"""longspan: exact attention over sequences split across devices.

Public names are imported on first use: `import longspan` does not import torch, and the command line checks its options without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "ContextParallel",
    "Layout",
    "Mask",
    "Mesh",
    "Plan",
    "PlanSet",
    "ProgramError",
    "Schedule",
    "attention",
    "causal",
    "context_parallel",
    "documents",
    "flex_attention",
    "full",
    "mask_mod",
    "plan",
    "prefix",
    "scaled_dot_product_attention",
    "sliding_window",
]


if TYPE_CHECKING:
    from longspan import integrations as integrations
    from longspan import testing as testing
    from longspan import torch_compat as torch_compat
    from longspan._comm.mesh import Mesh
    from longspan._dropin.context import context_parallel
    from longspan._dropin.parallel_style import ContextParallel
    from longspan._engine.attention import attention
    from longspan._engine.signatures import flex_attention, scaled_dot_product_attention
    from longspan._masks.algebra import Mask
    from longspan._masks.block_table import BlockTable
    from longspan._masks.constructors import causal, documents, full, mask_mod, prefix, sliding_window
    from longspan._masks.tracing import ProgramError
    from longspan._plan.layout import Layout
    from longspan._plan.schedule import Schedule
    from longspan._planner.plan import Plan
    from longspan._planner.plan_set import PlanSet
    from longspan._planner.planning import plan
else:
    # The module of each public name, as in the imports above.
    _MODULES = {
        "BlockTable": "_masks.block_table",
        "ContextParallel": "_dropin.parallel_style",
        "Layout": "_plan.layout",
        "Mask": "_masks.algebra",
        "Mesh": "_comm.mesh",
        "Plan": "_planner.plan",
        "PlanSet": "_planner.plan_set",
        "ProgramError": "_masks.tracing",
        "Schedule": "_plan.schedule",
        "attention": "_engine.attention",
        "causal": "_masks.constructors",
        "context_parallel": "_dropin.context",
        "documents": "_masks.constructors",
        "flex_attention": "_engine.signatures",
        "full": "_masks.constructors",
        "mask_mod": "_masks.constructors",
        "plan": "_planner.planning",
        "prefix": "_masks.constructors",
        "scaled_dot_product_attention": "_engine.signatures",
        "sliding_window": "_masks.constructors",
    }
    _SUBPACKAGES = ("integrations", "testing", "torch_compat")

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            value = globals()[name] = getattr(import_module(f"longspan.{_MODULES[name]}"), name)
            return value
        if name in _SUBPACKAGES:
            return import_module(f"longspan.{name}")
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, *_SUBPACKAGES})
