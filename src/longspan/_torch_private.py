"""Every private part of torch that longspan uses, and why no public one would do.

`BaseHOP`                 Dynamo has no public way to turn a Python callable into a graph that an operator receives; this is the class
                          through which torch lets an operator take one (see `longspan.engine.compiled`).
`_disable_current_modes`  A mod is traced on the side. Modes of the caller (selective checkpointing, fake tensors, AOTAutograd's own
                          tracing) must not see, record or replay those operations; there is no public way to step out of them.
`tracing`                 `make_fx` takes the fake mode of a compilation in progress from this context, whatever modes are active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._guards import tracing
from torch._higher_order_ops.base_hop import BaseHOP
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["BaseHOP", "outside_of_modes"]


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Run as if no dispatch mode and no compilation were active."""
    with _disable_current_modes(), tracing(None):
        yield
