"""accelerate's context parallelism by longspan: any length, and each rank receives only the KV that its queries see.

    accelerator = SpanningAccelerator(parallelism_config=ParallelismConfig(cp_size=4, …), fsdp_plugin=…)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.maybe_context_parallel(buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
        model(input_ids=ids, position_ids=positions)

accelerate has no setting for the function behind `maybe_context_parallel`, so that a subclass replaces the method. Models run torch's
attention (`attn_implementation="sdpa"`), which `longspan.context_parallel` replaces inside of the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from longspan._dropin.context import Context, context_parallel
from longspan.integrations._configs import check_config, spans_of, text_config

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"longspan.integrations.accelerate needs accelerate ({error}): pip install 'longspan[hf]'") from error

__all__ = ["SpanningAccelerator"]


_context: ContextVar[Context | None] = ContextVar("longspan_accelerate", default=None)


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
        """accelerate's `prepare`, with checks of models now and of their batches inside of the context.

        Inside of the context, attention layers get no mask made from this rank's tokens: accelerate's hooks drop it with the axis "cp",
        longspan's with a context_mesh.

        Raises:
            ValueError: If a model has layers with other masks than causal ones, which would be lost.
        """
        config = self.parallelism_config
        for module in args:
            if isinstance(module, nn.Module) and (self.context_mesh is not None or (config is not None and config.cp_enabled)):
                _check_model(module)
                if self.context_mesh is not None:
                    _drop_masks(module)
        return super().prepare(*args, **kwargs)

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Iterator[None]:
        """accelerate's context. Without a mesh and without context parallelism in the parallelism_config it does nothing.

        Raises:
            ValueError: Inside, if a transformers model is called without the `position_ids` of this rank's tokens, with padding or with
                packed documents. Give positions [B, S] as a buffer.
        """
        mesh, config = self.context_mesh, self.parallelism_config
        if mesh is None and config is not None and config.cp_enabled:
            mesh = self.torch_device_mesh["cp"]
        if mesh is None:
            yield
            return
        options = {"buffers": buffers, "buffer_seq_dims": buffer_seq_dims, "no_restore_buffers": no_restore_buffers, **self.context_options}
        with context_parallel(mesh, **options) as context:
            token = _context.set(context)
            try:
                yield
            finally:
                _context.reset(token)


def _check_model(model: nn.Module) -> None:
    """Raise ValueError for a transformers model whose masks would be lost; check its batches inside of the context."""
    config = getattr(model, "config", None)
    if config is None:
        return
    check_config(config)
    if set(getattr(text_config(config), "layer_types", None) or ()) - {"full_attention"} or spans_of(config):
        raise ValueError(
            f"SpanningAccelerator: expected full causal attention, got other layers in {type(model).__name__}, whose masks would be lost; "
            "use attn_implementation='longspan' and prepare_batch"
        )
    model.register_forward_pre_hook(_check_batch, with_kwargs=True, prepend=True)


def _drop_masks(model: nn.Module) -> None:
    """Call the attention layers of a transformers model with `is_causal` in place of a mask made from this rank's tokens."""

    def before(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        drops = _context.get() is not None and "attention_mask" in kwargs
        return args, {**kwargs, "attention_mask": None, "is_causal": True} if drops else kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn") and getattr(model, "config", None) is not None:
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def _check_batch(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a batch in the context has padding, packed documents or the positions of other tokens."""
    context = _context.get()
    if context is None:
        return
    arguments = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs}
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise ValueError(_UNSUPPORTED.format("got padding"))
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)
    if not isinstance(tokens, Tensor):
        return
    given = torch.arange(tokens.shape[1]) if positions is None else positions.cpu()
    layouts = context.dispatcher.sequences.by_length
    expected = [context.positions(length) for length in layouts if layouts[length].local_len(context.mesh.rank) == tokens.shape[1]]
    if expected and not any(bool((given == places).all()) for places in expected):
        got = "got none" if positions is None else "got others, as of packed documents"
        raise ValueError(_UNSUPPORTED.format(f"with the position_ids of this rank's tokens, {got}: give positions [B, S] as a buffer"))


_UNSUPPORTED = (
    "SpanningAccelerator: expected whole causal sequences, {}. For padding and packed documents use attn_implementation='longspan' and "
    "prepare_batch"
)
