"""Batches with images, audio or video: the model embeds whole inputs, and its text decoder computes this rank's tokens.

Positions and masks of such models depend on all inputs. Everything before the text decoder therefore runs on the whole batch on every rank:
embeddings, vision and audio towers, M-RoPE positions, masks with bidirectional image tokens. A hook on the decoder takes this rank's tokens
of its arguments. Each rank's gradients of towers and embeddings are those of its tokens: their sum over ranks is the gradient.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan._planner.plan import Plan
from longspan.integrations._configs import default_positions, text_config
from longspan.integrations._forward import PLAN_KEYWORD, current_forward, described
from longspan.integrations._plans import ModelPlans

# Tensors [B or 1, S, ...] among a decoder's keywords.
_BY_TOKEN = (
    "input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "visual_pos_masks", "vision_mask", "per_layer_inputs",
    "image_embeds_position_mask",
)  # fmt: skip
# Features [B, image tokens of a row, D] that a decoder, which embeds its tokens itself, puts in place of image tokens, and their mask.
_IN_PLACE, _IN_PLACE_MASK = "image_embeds", "image_embeds_position_mask"
# Features of image tokens, a list or a dict by layer of [image tokens of all rows, D], and the mask of these tokens, [B, S] or [B, S, 1].
_BY_IMAGE_TOKEN = {"deepstack_visual_embeds": "visual_pos_masks", "deepstack_features": "vision_mask", _IN_PLACE: _IN_PLACE_MASK}
# Features [..., D] of all images that cross-attention layers of a decoder see, whole on every rank, and tensors [B, 1, S, ...] beside them.
_SEEN_FEATURES, _BY_QUERY = "cross_attention_states", ("cross_attention_mask", "full_text_row_masked_out_mask")
_LOCAL = (PLAN_KEYWORD, "labels", "shift_labels", "num_items_in_batch")  # this rank's already

_install_lock = threading.Lock()


def decoder_of(model: Any) -> Any:
    """The text decoder of a model with several kinds of inputs.

    Raises:
        ValueError: The model has no inner model of its text config that takes embeddings.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    takes = set(inspect.signature(decoder.forward).parameters) if isinstance(decoder, nn.Module) else set()
    is_inner = decoder is not model and hasattr(type(decoder), "base_model_prefix")
    if not is_inner or not {"inputs_embeds", "position_ids"} <= takes or type(decoder.config) is not type(text_config(model.config)):
        raise ValueError(
            f"longspan: expected a model with an inner text decoder for a batch with images, audio, video or token types, got "
            f"{type(model).__name__}. Such batches are not supported on several ranks for this model"
        )
    return decoder


def only_decoder_takes_positions(model: Any) -> bool:
    """Whether a model, not a config, takes no position_ids, but a text decoder with a config of its own does: it needs whole inputs."""
    is_model = isinstance(model, nn.Module) and hasattr(type(model), "base_model_prefix")  # no wrapper, whose forward takes anything
    if not is_model or "position_ids" in inspect.signature(type(model).forward).parameters:
        return False
    try:
        return type(decoder_of(model).config) is not type(model.config)
    except ValueError:
        return False


def install(model: nn.Module) -> nn.Module:
    """Hook the text decoder of a model, once. The hooks do nothing in a forward without whole inputs. Returns the decoder."""
    decoder: nn.Module = decoder_of(model)
    with _install_lock:  # ranks of a virtual world share a model
        if not hasattr(decoder, "_longspan_decoder"):
            decoder._longspan_decoder = True  # type: ignore[assignment]
            decoder.register_forward_pre_hook(_shard_arguments, with_kwargs=True)
            decoder.register_forward_hook(_leave_decoder, always_call=True)
    return decoder


def has_whole_inputs(plans: Any) -> bool:
    """Whether a plan is of a batch whose inputs are whole."""
    return isinstance(plans, ModelPlans) and plans.whole_inputs


def _shard_arguments(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a decoder for this rank's tokens."""
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    if forward is None or not has_whole_inputs(forward.plan) or forward.in_decoder:
        return None
    plans: ModelPlans = forward.plan
    names = list(inspect.signature(decoder.forward).parameters)
    arguments = {**dict(zip(names, args)), **kwargs}
    plan = plans.of(None)
    tokens = plan.layout.length
    inputs = _whole_inputs(decoder, arguments, tokens)
    _check_mask(decoder, arguments.get("attention_mask"), plans)
    positions = arguments.get("position_ids")
    made_positions = positions is not None and arguments.get("attention_mask") is None
    if isinstance(arguments.get("attention_mask"), Tensor):
        arguments["attention_mask"] = None
    if positions is None:
        positions = default_positions(getattr(decoder, "config", None), inputs, plans.real_tokens)
    positions = positions.to(inputs.device)
    arguments["position_ids"] = _local_positions(positions, plan, inputs.shape[0])
    forward.made_positions = (positions, arguments["position_ids"]) if made_positions else None
    for name, mask in _BY_IMAGE_TOKEN.items():
        if arguments.get(name) is not None and arguments.get(mask) is not None:
            is_image = arguments[mask] == 1
            _check_features(name, arguments[name], int(is_image.sum()))
            chosen = _local_image_tokens(is_image, plan)
            arguments[name] = _local_features(arguments[name], chosen, in_place=name == _IN_PLACE)
    for name, value in arguments.items():
        if name in (*_BY_TOKEN, *_BY_QUERY) and value is not None:
            arguments[name] = plan.shard(value.expand(inputs.shape[0], *value.shape[1:]), 1 if name in _BY_TOKEN else 2)
    _check_others(decoder, arguments, tokens)
    forward.in_decoder, forward.seen_features = True, arguments.get(_SEEN_FEATURES)
    return (), arguments


def _whole_inputs(decoder: nn.Module, arguments: dict[str, Any], tokens: int) -> Tensor:
    """A decoder's inputs_embeds [B, S, D] of the whole batch, or input_ids [B, S] if it is given features of images beside them.

    Raises:
        ValueError: The decoder is given neither.
    """
    embeds, ids = arguments.get("inputs_embeds"), arguments.get("input_ids")
    has_features = any(arguments.get(name) is not None for name in (_IN_PLACE_MASK, _SEEN_FEATURES))
    if embeds is None and isinstance(ids, Tensor) and ids.shape[1:] == (tokens,) and has_features:
        return ids
    if isinstance(embeds, Tensor) and embeds.ndim == 3 and embeds.shape[1] == tokens:
        return embeds
    got = f"shape {tuple(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
    raise ValueError(
        f"longspan: expected inputs_embeds [B, {tokens}, D] of the whole batch for {described(decoder)}, got {got}. A batch with "
        "images, audio, video or token types is not supported on several ranks for this model"
    )


def sees_features(module: nn.Module, key: Tensor) -> bool:
    """Whether a layer with a plan is cross-attention to features of images, which every rank has: its tokens need no exchange."""
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    features = None if forward is None else forward.seen_features
    return features is not None and is_cross_attention(module) and key.shape[0] * key.shape[2] == features.shape[:-1].numel()


def sees_images(module: nn.Module) -> bool:
    """Whether a layer is cross-attention to features of images, by its config (Mllama's); BLT's cross-attention is to tokens."""
    return is_cross_attention(module) and module.layer_idx in (getattr(module.config, "cross_attention_layers", None) or ())


def is_cross_attention(module: nn.Module) -> bool:
    """Whether a module is a cross-attention layer of a decoder, by transformers' conventions."""
    return _is_marked_cross(module) and getattr(module, "layer_idx", None) is not None


def _is_marked_cross(module: nn.Module) -> bool:
    return "CrossAttention" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))


def reject_cross_attention(module: nn.Module) -> None:
    """Raise ValueError for a cross-attention layer: a plan of one sequence would exchange its keys as if they were tokens."""
    if _is_marked_cross(module):
        raise ValueError(
            f"longspan: expected queries and keys of the same tokens with a plan, got cross-attention, {described(module)}. If its layer "
            "is compiled, compile the decoder's other layers only; otherwise call the model without a plan on one device"
        )


def _local_positions(positions: Tensor, plan: Plan, batch: int) -> Tensor:
    """Positions [B or 1, S] or, by axis of M-RoPE, [axes, B or 1, S] of this rank's tokens."""
    if positions.ndim == 3:
        return torch.stack([_local_positions(axis, plan, batch) for axis in positions])
    return plan.shard(positions.expand(batch, -1), 1)


def check_no_documents(forward: Any, local: Tensor, search: Callable[[Tensor], Any]) -> None:
    """Raise ValueError if a model looks for packed documents in positions that it made of images, and would find some.

    local: the positions of this rank's tokens, in which it looks; search: transformers' search.
    """
    made, plans = forward.made_positions, forward.plan
    if made is None or plans.documents_from_positions or plans.states_documents:
        return
    if any(search(axis) is not None for axis in _axes_of(local, *made)):
        raise ValueError(
            "longspan: the model takes positions of images for the beginnings of packed documents, which the plan does not separate. Give "
            "attention_mask (ones, without padding) to prepare_batch: transformers then looks for no documents"
        )


def _axes_of(local: Tensor, whole: Tensor, sharded: Tensor) -> list[Tensor]:
    """The axes of whole positions that a model reads, by its view of sharded ones; by their values if it made others; else all.

    A shard of text only has equal values in all axes: by values alone, ranks may disagree.
    """
    if whole.ndim == 2:
        return [whole]
    by_view = [x for x, part in zip(whole, sharded) if part.data_ptr() == local.data_ptr()]
    by_value = [x for x, part in zip(whole, sharded) if part.shape == local.shape and torch.equal(part, local)]
    return by_view or by_value or list(whole)


def _check_features(name: str, features: Any, image_tokens: int) -> None:
    """Raise ValueError unless features [..., D], in each layer, are as many as image tokens: others would be of another image's tokens."""
    for x in features.values() if isinstance(features, dict) else features if isinstance(features, list | tuple) else [features]:
        if x.shape[:-1].numel() != image_tokens:
            raise ValueError(
                f"longspan: expected as many features of images in {name!r} as image tokens in the batch, got {x.shape[:-1].numel()} and "
                f"{image_tokens}; do not truncate image tokens"
            )


def _local_image_tokens(is_image: Tensor, plan: Plan) -> Tensor:
    """The numbers of this rank's image tokens among all image tokens, in the order of local tokens. is_image: bool [B, S] or [B, S, 1]."""
    number = (is_image.flatten().cumsum(0) - 1).view(is_image.shape)
    return plan.shard(number, 1)[plan.shard(is_image, 1)]


def _local_features(features: Any, chosen: Tensor, *, in_place: bool) -> Any:
    """The features of the image tokens of these numbers: by layer, or of shape [image tokens, D] if `in_place`."""
    if in_place:
        return features.flatten(0, -2)[chosen.to(features.device)]
    if isinstance(features, dict):
        return {layer: x[chosen.to(x.device)] for layer, x in features.items()}
    return [x[chosen.to(x.device)] for x in features]


def _check_mask(decoder: nn.Module, mask: Any, plans: ModelPlans) -> None:
    """Raise ValueError for a mask by token that is not the one of the plan."""
    if isinstance(mask, Tensor):
        expected = torch.ones_like(mask, dtype=torch.bool) if plans.real_tokens is None else plans.real_tokens.to(mask.device)
        if mask.shape != expected.shape or mask.ndim != 2 or bool((mask != expected).any()):
            raise ValueError(
                f"longspan: expected the attention_mask [B, S] that prepare_batch was given for {described(decoder)}, got another of shape "
                f"{tuple(mask.shape)}. This model is not supported on several ranks"
            )


def _check_others(decoder: nn.Module, arguments: dict[str, Any], tokens: int) -> None:
    """Raise ValueError for other tensors, which may be of the whole sequence. A single vector [1, D] is the same for all tokens."""
    features = [name for name, mask in _BY_IMAGE_TOKEN.items() if arguments.get(mask) is not None]
    known = (*_BY_TOKEN, *_BY_QUERY, *_LOCAL, *features, _SEEN_FEATURES, "position_ids", "attention_mask")
    for name, value in arguments.items():
        held = value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, dict) else [value]
        tensors = [x for x in held if isinstance(x, Tensor) and x.ndim > 0]
        if name not in known and not all(x.is_floating_point() and x.shape[0] == 1 and x.numel() == x.shape[-1] != tokens for x in tensors):
            raise ValueError(
                f"longspan: {described(decoder)} was given {name!r}, which cannot be split over ranks. A batch with images, audio or video "
                "is not supported on several ranks for this model"
            )


def _leave_decoder(decoder: nn.Module, args: Any, output: Any) -> None:
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    if forward is not None:
        forward.in_decoder = False
