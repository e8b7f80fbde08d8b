"""`prepare_batch` for encoder-decoder models: two sequences, each with a layout of its own, and cross-attention between them.

Legend: B batch, S tokens of the encoder, T tokens of the decoder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from longspan._comm.mesh import MeshLike
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal, full
from longspan.integrations._batch_parts import (
    PreparedBatch,
    RealKeys,
    check_every_rank_has_tokens,
    label_keywords,
    own_labels,
    real_tokens,
)
from longspan.integrations._configs import check_config, check_implementation, head_counts, spans_of
from longspan.integrations._cross_plans import CrossPlans, check_encoder_decoder
from longspan.integrations._meshes import MeshRoles, device_of, mesh_roles
from longspan.integrations._plans import ModelPlans, model_plans

_ENCODER_INPUTS = ("input_ids", "inputs_embeds", "input_features")
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
_KNOWN = (*_ENCODER_INPUTS, *_DECODER_INPUTS, "attention_mask", "decoder_attention_mask", "labels", "shift_labels")


def prepare_two_sequences(
    batch: Mapping[str, Any],
    mesh: MeshLike,
    model: Any,
    *,
    count: Tensor | float | None,
    gradients: Literal["mean", "sum"],
    device: torch.device | str | None,
    options: Mapping[str, Any],
) -> PreparedBatch:
    """The keywords of an encoder-decoder's forward: whole inputs, this rank's labels, and plans. See `prepare_batch`."""
    check_encoder_decoder(model)
    check_implementation(model.config)
    check_config(model.config)
    _check_entries(batch, options)
    roles = mesh_roles(mesh)
    inputs = {name: batch[name] for name in _KNOWN[:-2] if batch.get(name) is not None}
    if not any(name in inputs for name in _DECODER_INPUTS):
        inputs["decoder_input_ids"] = _decoder_inputs(model, batch)
    size, kv_len = _encoder_size(model, inputs)
    decoded = next(inputs[name] for name in _DECODER_INPUTS if name in inputs)
    for name, length in (("attention_mask", kv_len), ("decoder_attention_mask", decoded.shape[1]), ("labels", decoded.shape[1])):
        given = batch.get(name)
        if given is not None and tuple(given.shape) != (size, length):
            raise ValueError(f"prepare_batch: expected {name} of shape [{size}, {length}], got shape {tuple(given.shape)}")
    plan_options = {"batch": size, **head_counts(model.config, roles.heads_size), **options}
    plans, blind = _plans(model, batch, roles, (decoded.shape[1], kv_len), plan_options)

    device = device_of(mesh) if device is None else device
    prepared: Any = {name: x if device is None else x.to(device) for name, x in inputs.items()}
    prepared.update(longspan_plan=plans, use_cache=False)
    labels = own_labels(batch, blind, "an encoder-decoder model")
    if labels is not None:
        local = lambda x: plans.shard(x, 1).to(device if device is not None else x.device)  # noqa: E731
        prepared.update(label_keywords(labels, local, roles, count=count, gradients=gradients))
    return prepared  # type: ignore[no-any-return]


def _check_entries(batch: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    unknown = [name for name, value in batch.items() if name not in _KNOWN and value is not None]
    if unknown:
        raise ValueError(
            f"prepare_batch: expected entries {', '.join(_KNOWN[:-1])} for an encoder-decoder model, got {', '.join(unknown)}, which is "
            "not supported on several ranks"
        )
    for name in ("layout", "strategy"):
        if not isinstance(options.get(name, ""), str):
            raise ValueError(
                f"prepare_batch: expected the name of a {name} for an encoder-decoder model, whose sequences differ in length, got "
                f"{type(options[name]).__name__}"
            )


def _decoder_inputs(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """`decoder_input_ids` [B, T], which the model would make of its labels."""
    labels = batch.get("labels")
    if labels is None:
        raise ValueError("prepare_batch: expected labels or decoder_input_ids for an encoder-decoder model, got neither")
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[no-any-return]
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is None:
        raise ValueError(f"prepare_batch: expected decoder_input_ids for {type(model).__name__}, got labels only")
    return shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)  # type: ignore[no-any-return]


def _encoder_size(model: Any, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """(B, S) of the encoder's hidden states."""
    given = [name for name in _ENCODER_INPUTS if name in inputs]
    if len(given) != 1:
        raise ValueError(f"prepare_batch: expected one of {', '.join(_ENCODER_INPUTS)}, got {', '.join(given) or 'none'}")
    x = inputs[given[0]]
    if given[0] != "input_features":
        return x.shape[0], x.shape[1]
    if "attention_mask" in inputs:
        raise ValueError("prepare_batch: expected no attention_mask beside input_features, got one: the encoder attends to all features")
    return x.shape[0], int(model.config.max_source_positions)


def _plans(
    model: Any, batch: Mapping[str, Any], roles: MeshRoles, lengths: tuple[int, int], options: dict[str, Any]
) -> tuple[CrossPlans, Tensor | None]:
    """The plans of both stacks, and the decoder's tokens that see nothing, bool [B, T] or None."""
    spans = spans_of(model.config)
    stacks: list[ModelPlans] = []
    cross_mask: Mask = full()
    for name, length, bidirectional in (("attention_mask", lengths[1], True), ("decoder_attention_mask", lengths[0], False)):
        mask: Mask = full() if bidirectional else causal()
        real = real_tokens(batch, name)
        real = None if real is None or bool(real.all()) else real
        if real is not None:
            if bidirectional and not bool(real.any(1).all()):
                empty = real.any(1).logical_not().nonzero().flatten().tolist()
                raise ValueError(
                    f"prepare_batch: expected a token in every row of attention_mask, got padding only in rows {empty}, whose decoder "
                    "tokens would see nothing of the encoder; leave these rows out"
                )
            keys = RealKeys(real[0] if bool((real == real[:1]).all()) else real)
            mask = mask & keys
            if bidirectional:
                cross_mask = keys
        made = model_plans(mask, length, roles.context, spans=spans, real_tokens=real, bidirectional=bidirectional, options=options)
        check_every_rank_has_tokens(made, roles.context_size, length)
        stacks.append(made)
    encoder, decoder = stacks
    blind = None if decoder.real_tokens is None else decoder.real_tokens.cumsum(1) == 0
    return CrossPlans.of_stacks(decoder, encoder, cross_mask, options.get("strategy", "auto")), blind
