"""The plans of an encoder-decoder model, and the model on ranks: both sequences are sharded, each by a layout of its own.

Embeddings and positions are computed from whole inputs on every rank. In front of the first layer of either stack, a hook takes this
rank's tokens. Cross-attention runs over a plan whose queries have the decoder's layout and whose keys have the encoder's. Each rank's
gradients of embeddings are those of its tokens: their sum over ranks is the gradient.

Legend: B batch, S tokens of a stack's whole sequence, L tokens of this rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan._masks.algebra import Mask
from longspan._planner.plan import Plan
from longspan._planner.planning import plan
from longspan.integrations._forward import Forward, current_forward, described
from longspan.integrations._mixers import is_compiled
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._plans import FULL, ModelPlans, Span

# Encoder-decoders whose loss and gradients on ranks were compared with one process (docs/other-families.md).
_TYPES = (
    "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "pegasus", "plbart", "seamless_m4t", "seamless_m4t_v2",
    "t5", "t5gemma", "umt5", "whisper",
)  # fmt: skip
_CLASSES = ("ForConditionalGeneration", "MTModel", "ForTextToText", "EncoderDecoderModel")
_LISTS = ("layers", "block")  # the layers of a stack
_BY_TOKEN = ("position_embeddings", "position_ids")  # arguments of layers, [B or 1, S, ...], or tuples of such
_MASKS = ("attention_mask", "decoder_attention_mask")

_install_lock = threading.Lock()


class CrossPlans(ModelPlans):
    """The plans of a decoder behind an encoder: of its own layers, of the encoder's (`encoder`) and of cross-attention (`cross`)."""

    encoder: ModelPlans
    cross_mask: Mask
    cross_strategy: str

    def cross(self, heads: int, kv_heads: int) -> Plan:
        """The plan of cross-attention with these heads: queries in this layout, keys in the encoder's."""
        name = f"cross, {heads} heads, {kv_heads} KV heads"
        with self._lock:
            if name not in self._plans:
                own, other = self._plans[FULL], self.encoder[FULL]
                options: dict[str, Any] = {
                    **self._options, "heads": heads, "kv_heads": kv_heads, "layout": (own.layout, other.layout),
                    "strategy": own.strategy if own.data.head_axis is not None else self.cross_strategy,
                }  # fmt: skip
                self._plans[name] = plan(self.cross_mask, (own.data.q_len, other.data.q_len), own.mesh, **options)
            return self._plans[name]

    @classmethod
    def of_stacks(cls, decoder: ModelPlans, encoder: ModelPlans, cross_mask: Mask, strategy: str) -> CrossPlans:
        """The plans of both stacks, joined."""
        made = cls(dict(decoder), mask=decoder._mask, spans=decoder._spans, options=decoder._options)
        made.__dict__.update(decoder._facts())
        made.encoder, made.cross_mask, made.cross_strategy, made.whole_inputs = encoder, cross_mask, strategy, True
        return made

    def on(self, mesh: Any) -> CrossPlans:
        """The same plans as another rank's, or on another mesh of equal shape."""
        return self.of_stacks(super().on(mesh), self.encoder.on(mesh), self.cross_mask, self.cross_strategy)

    def __reduce__(self) -> tuple[Any, ...]:
        own = ModelPlans(self._plans, mask=self._mask, spans=self._spans, options=self._options)
        own.__dict__.update(self._facts())
        return CrossPlans.of_stacks, (own, self.encoder, self.cross_mask, self.cross_strategy)


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model, not a config, is an encoder-decoder with a language modelling head."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and type(model).__name__.endswith(_CLASSES)


def check_encoder_decoder(model: Any) -> None:
    """Raise ValueError for models that were not compared with one process, or compute something from their shard only."""
    kind = model.config.model_type
    if kind not in _TYPES:
        raise ValueError(
            f"longspan: got an encoder-decoder of type {kind!r}, which is not supported on several ranks: expected one of "
            f"{', '.join(map(repr, _TYPES))}; call the model without a plan on one device"
        )
    if getattr(model.config, "apply_spec_augment", False):
        raise ValueError(
            "longspan: expected apply_spec_augment=False, got True, by which each rank would mask other features of the same audio. Set "
            "config.apply_spec_augment=False, and mask features before prepare_batch"
        )


def install(model: Any, plans: CrossPlans, inputs: Mapping[str, Any]) -> None:
    """Hook the layers of both stacks, once, and check the inputs of a forward. The hooks do nothing in a forward without such plans.

    Raises:
        ValueError: The model is not supported on ranks as it is set, or its inputs are not those of the plans.
    """
    if not is_encoder_decoder(model):
        raise ValueError(
            f"longspan: expected a plan for {type(model).__name__}, got one for an encoder-decoder model; give the model to prepare_batch"
        )
    for name, part in model.named_modules():
        if is_compiled(part):
            raise ValueError(
                f"longspan: {name or type(model).__name__} is compiled: not supported for encoder-decoders on several ranks; do not "
                "compile the model"
            )
    for name, part in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        if model.training and getattr(part, "layerdrop", 0.0):
            raise ValueError(
                f"longspan: expected config.{name}_layerdrop=0.0, got {part.layerdrop}, by which ranks would leave out different layers"
            )
        _hook(part, name)
    if inputs.get("use_cache") or inputs.get("past_key_values") is not None:
        raise ValueError(
            "longspan: expected use_cache=False and no past_key_values beside a plan, got a cache, which would hold a shard only; to "
            "generate, call the model without a plan"
        )
    for name, real in zip(_MASKS, (plans.encoder.real_tokens, plans.real_tokens)):
        mask = inputs.get(name)
        if not (real is None if mask is None else _is_mask_of(real, mask)):
            raise ValueError(f"longspan: expected the {name} that prepare_batch was given, got another")


def _is_mask_of(real: Tensor | None, mask: Tensor) -> bool:
    """Whether a mask by token is 0 for the padding of a plan and 1 elsewhere. real: bool [B, S] on the CPU; None without padding."""
    expected = torch.ones(mask.shape, dtype=torch.bool) if real is None else real
    return mask.shape == expected.shape and bool((mask.cpu() == expected).all())


def layers_of(stack: nn.Module) -> nn.ModuleList:
    """The layers of an encoder or a decoder."""
    return next(getattr(stack, name) for name in _LISTS if isinstance(getattr(stack, name, None), nn.ModuleList))


def _hook(stack: nn.Module, name: str) -> None:
    with _install_lock:  # ranks of a virtual world share a model
        if hasattr(stack, "_longspan_stack"):
            return
        stack._longspan_stack = name  # type: ignore[assignment]
        for index, layer in enumerate(layers_of(stack)):
            layer._longspan_place = name, index  # type: ignore[assignment]
            layer.register_forward_pre_hook(_enter_layer, with_kwargs=True)
            layer.register_forward_hook(_leave_layer, always_call=True)


def _forward_of_stacks() -> Forward | None:
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    return forward if forward is not None and isinstance(forward.plan, CrossPlans) else None


def _enter_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a layer for this rank's tokens."""
    forward = _forward_of_stacks()
    if forward is None:
        return None
    stack, index = layer._longspan_place  # type: ignore[misc]
    forward.in_decoder, forward.in_encoder = True, stack == "encoder"
    plans = forward.active_plan
    names = list(inspect.signature(layer.forward).parameters)
    arguments = {**dict(zip(names, args)), **kwargs}
    hidden = arguments[names[0]]
    tokens = plans.layout.length if index == 0 else plans.local_len
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[1] != tokens:
        got = f"shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(
            f"longspan: expected hidden states [B, {tokens}, D] for layer {index} of the {stack}, got {got}. Give the model the inputs "
            "that prepare_batch returned"
        )
    if index == 0:
        arguments[names[0]] = plans.shard(hidden, 1)
        _check_padding(arguments, plans, stack)
    # Hidden states stay positional: transformers takes output_hidden_states from there.
    hidden = arguments.pop(names[0])
    return (hidden,), {name: _local(value, plans, hidden.shape[0]) if name in _BY_TOKEN else value for name, value in arguments.items()}


def _check_padding(arguments: Mapping[str, Any], plans: ModelPlans, stack: str) -> None:
    """Raise ValueError for a mask of a stack's own tokens with another padding than the plan's. Some models look for pad tokens."""
    for mask in arguments.values():
        padding = mask.padding_mask if isinstance(mask, ModelMask) and mask.bidirectional == plans.bidirectional else None
        if padding is not None and not _is_mask_of(plans.real_tokens, padding):
            name = _MASKS[0 if stack == "encoder" else 1]
            raise ValueError(
                f"longspan: expected the padding that prepare_batch was told of, got another in the {stack}, which takes pad tokens "
                f"for padding; give {name} to prepare_batch"
            )


def _local(value: Any, plans: ModelPlans, batch: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_local(x, plans, batch) for x in value)
    return value if value is None else plans.shard(value.expand(batch, *value.shape[1:]), 1)


def _leave_layer(layer: nn.Module, args: Any, output: Any) -> None:
    forward = _forward_of_stacks()
    if forward is not None:
        forward.in_decoder = forward.in_encoder = False


def crosses(plans: Any, bidirectional: bool) -> bool:
    """Whether an attention layer with this direction, in the stack of these plans, is cross-attention."""
    return isinstance(plans, CrossPlans) and bidirectional


def cross_plan(plans: CrossPlans, module: nn.Module, span: Span | None, heads: int, kv_heads: int) -> Plan:
    """The plan of a cross-attention layer. Raises ValueError for a window."""
    if span is not None:
        raise ValueError(
            f"longspan: expected cross-attention to all tokens of the encoder, got a window of {span[1]} tokens in {described(module)}: "
            "not supported on several ranks"
        )
    return plans.cross(heads, kv_heads)


def layers_without_plan(model: Any, forward: Forward) -> list[str]:
    """Names of the attention layers of both stacks that did not use the plan."""
    names = []
    for stack in (model.get_encoder(), model.get_decoder()):
        for index, layer in enumerate(layers_of(stack)):
            inner = [(n, m) for n, m in layer.named_modules() if "Attention" in type(m).__name__]
            unused = [n for n, m in inner if not any(id(part) in forward.module_ids for part in m.modules())]
            names += [f"{stack._longspan_stack}.{index}.{n}" for n in unused]
            if not inner:
                names.append(f"{stack._longspan_stack}.{index}")
    return names
