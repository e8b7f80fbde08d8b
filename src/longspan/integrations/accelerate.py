"""accelerate's context parallelism by longspan: any length, and each rank receives only the KV that its queries see.

    accelerator = SpanningAccelerator(parallelism_config=ParallelismConfig(cp_size=4, …), fsdp_plugin=…)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.maybe_context_parallel(buffers=[ids, labels], buffer_seq_dims=[1, 1]):
        …

accelerate has no setting for the function behind `maybe_context_parallel`, so that a subclass replaces the method. Models run torch's
attention (`attn_implementation="sdpa"`), which `longspan.context_parallel` replaces inside of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from longspan._dropin.context import context_parallel
from longspan.integrations._configs import check_config, spans_of, text_config

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"longspan.integrations.accelerate needs accelerate ({error}): pip install 'longspan[hf]'") from error

__all__ = ["SpanningAccelerator"]


_in_context: ContextVar[bool] = ContextVar("longspan_accelerate", default=False)


class SpanningAccelerator(Accelerator):
    """`accelerate.Accelerator` whose `maybe_context_parallel` is `longspan.context_parallel`.

    Args:
        *args: As for `Accelerator`.
        context_mesh: The ranks that share a sequence; by default the axis "cp" of the parallelism_config, which accelerate allows on GPUs
            only. With a mesh, DDP works too. Do not `prepare` data loaders then: accelerate would give every process another batch.
        context_options: Keywords of `longspan.context_parallel`, such as {"layout": "contiguous"}.
        **kwargs: As for `Accelerator`.
    """

    def __init__(self, *args: Any, context_mesh: Any = None, context_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_mesh = context_mesh
        self.context_options = dict(context_options or {})

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's `prepare`. With a context_mesh, attention layers get no mask of local tokens, as accelerate does with its own axis.

        Raises:
            ValueError: If a model has layers with other masks than causal ones, which would be lost.
        """
        for module in args if self.context_mesh is not None else ():
            if isinstance(module, nn.Module):
                _drop_masks(module)
        return super().prepare(*args, **kwargs)

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Iterator[None]:
        """accelerate's context. Without a mesh and without context parallelism in the parallelism_config it does nothing."""
        mesh, config = self.context_mesh, self.parallelism_config
        if mesh is None and config is not None and config.cp_enabled:
            mesh = self.torch_device_mesh["cp"]
        if mesh is None:
            yield
            return
        options = {"buffers": buffers, "buffer_seq_dims": buffer_seq_dims, "no_restore_buffers": no_restore_buffers, **self.context_options}
        token = _in_context.set(True)
        try:
            with context_parallel(mesh, **options):
                yield
        finally:
            _in_context.reset(token)


def _drop_masks(model: nn.Module) -> None:
    """Call the attention layers of a transformers model with `is_causal` in place of a mask made from this rank's tokens."""
    config = getattr(model, "config", None)
    if config is None:
        return
    check_config(config)
    if set(getattr(text_config(config), "layer_types", None) or ()) - {"full_attention"} or spans_of(config):
        raise ValueError(
            f"SpanningAccelerator: expected full causal attention, got other layers in {type(model).__name__}, whose masks would be lost; "
            "use attn_implementation='longspan' and prepare_batch"
        )

    def before(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        drops = _in_context.get() and "attention_mask" in kwargs
        return args, {**kwargs, "attention_mask": None, "is_causal": True} if drops else kwargs

    model.register_forward_pre_hook(_check_batch, with_kwargs=True, prepend=True)
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def _check_batch(_model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a batch in the context has padding or packed documents, which attention would not see."""
    if not _in_context.get():
        return
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all())
    packed = isinstance(positions, Tensor) and positions.ndim == 2 and bool((positions.diff(dim=1) < 0).any())
    if padded or packed:
        raise ValueError(
            f"SpanningAccelerator: expected whole causal sequences, got {'padding' if padded else 'position_ids that start again'}; use "
            "attn_implementation='longspan' and prepare_batch"
        )
