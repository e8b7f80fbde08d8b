"""Integrations: whole batches to ranks' batches, the exact loss, and Hugging Face transformers.

Public modules:

- `longspan.integrations.transformers`: `attn_implementation="longspan"` (needs transformers).
- `longspan.integrations.trainer`: `SpanningTrainer`, a `transformers.Trainer` with a mesh (needs transformers and accelerate).
- `longspan.integrations.generation`: text over a paged KV cache, as `longspan generate` makes it (needs transformers).
- `longspan.integrations.lightning`: `SpanningStrategy`, Lightning's DDP over data × context ranks (needs lightning).
- `longspan.integrations.accelerate`: `SpanningAccelerator`, whose `maybe_context_parallel` is longspan's (needs accelerate).
- `longspan.integrations.torchtitan`: `SpanningTrainer` and an override of attention for torchtitan (needs torchtitan).
- `longspan.integrations.samples`: batches of an optimizer's step, from samples of very different lengths.
- `longspan.integrations.loss`: the exact loss of a sequence that is split over ranks.
- `longspan.integrations.memory`: checkpointing that computes attention once, host memory, tiled MLPs and loss for long steps.

`prepare_batch` is here too, for models other than transformers'.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.integrations._batch import prepare_batch
from longspan.integrations._batch_parts import PlanOptions, PreparedBatch

if TYPE_CHECKING:
    from longspan.integrations import accelerate as accelerate
    from longspan.integrations import generation as generation
    from longspan.integrations import lightning as lightning
    from longspan.integrations import loss as loss
    from longspan.integrations import memory as memory
    from longspan.integrations import samples as samples
    from longspan.integrations import torchtitan as torchtitan
    from longspan.integrations import trainer as trainer
    from longspan.integrations import transformers as transformers
else:

    def __getattr__(name: str) -> Any:
        """Import a public module when it is asked for: transformers takes seconds to import."""
        if name in ("accelerate", "generation", "lightning", "loss", "memory", "samples", "torchtitan", "trainer", "transformers"):
            return import_module(f"longspan.integrations.{name}")
        raise AttributeError(f"module 'longspan.integrations' has no attribute {name!r}")


__all__ = [
    "PlanOptions", "PreparedBatch", "accelerate", "generation", "lightning", "loss", "memory", "prepare_batch", "samples", "torchtitan",
    "trainer", "transformers",
]  # fmt: skip
