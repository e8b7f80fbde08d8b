"""Hugging Face transformers: `attn_implementation="longspan"`.

    import longspan.integrations.transformers as lst
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longspan")
    loss = model(**lst.prepare_batch(batch, mesh, config=model)).loss

Importing this module registers the implementation with transformers, and wraps `PreTrainedModel.__call__`: a forward that is given a plan
raises if an attention layer does not use it.

The plan of a batch reaches every attention layer through the model's keyword arguments, as `longspan_plan`. A layer without a plan
computes on one device. Settings that are not supported raise.

Legend: B batch, H query heads, G KV heads, L tokens of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan._engine.attention import attention
from longspan._engine.signatures import as_autocast
from longspan._masks.constructors import causal, mask_mod
from longspan._masks.constructors import sliding_window as window_mask
from longspan._planner.plan import Plan
from longspan._planner.plan_set import PlanSet
from longspan.integrations._adapters import adapting, adapting_later
from longspan.integrations._batch import prepare_batch
from longspan.integrations._batch_parts import PreparedBatch, RealKeys
from longspan.integrations._configs import NAME, check_config, dropout_field
from longspan.integrations._cross_plans import cross_plan, crosses
from longspan.integrations._decoders import has_whole_inputs, is_cross_attention, reject_cross_attention, sees_features, sees_images
from longspan.integrations._forward import current_forward, described, plan_in_context
from longspan.integrations._model_mask import (
    PACKED,
    CompiledMask,
    ModelMask,
    foreign_part,
    is_bidirectional,
    keeping_masks,
    mask_parts,
    span_of,
    visible_keys,
    with_offsets,
)
from longspan.integrations._one_query import attend_one_query
from longspan.integrations._pair_masks import attend_pairs
from longspan.integrations._plan_use import checked_call, record_use, recording_loss, searching
from longspan.integrations._plans import CHUNKED, FULL, SLIDING, ModelPlans, Span
from longspan.integrations.memory import long_context

try:
    from transformers import AttentionInterface, PreTrainedModel, masking_utils
    from transformers.masking_utils import (
        AttentionMaskInterface,
        _preprocess_mask_arguments,
        causal_mask_function,
        find_packed_sequence_indices,
    )
except ImportError as error:
    raise ImportError(
        f"longspan.integrations.transformers needs transformers 5.22, with which it is tested ({error}), or 5.23: pip install "
        "'longspan[hf]', or 'transformers<5.24' if a later one is installed"
    ) from error

from longspan.integrations._paged_attention import attend_paged  # imports transformers
from longspan.integrations._paged_cache import PagedCache, take_update

__all__ = ["NAME", "PagedCache", "PreparedBatch", "attention_forward", "attention_mask", "long_context", "prepare_batch"]

# Keyword arguments of a layer that do not change its attention, or repeat the mask.
_IGNORED_KEYWORDS = (
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict", "labels", "shift_labels", "num_items_in_batch",
    "logits_to_keep", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "is_causal",
    "vision_feature_layer",
)  # fmt: skip


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    **rest: Any,
) -> ModelMask | CompiledMask:
    """transformers' mask interface: the mask of a forward, without an S × S tensor.

    Returns:
        A `ModelMask`; a `CompiledMask` while torch.compile traces, when only a plan can hold the mask.
    """
    if torch.compiler.is_compiling():
        # Dynamo does not look into closures. transformers sets use_vmap if a model adds a mask function of its own.
        if attention_mask is not None or rest.get("use_vmap"):
            raise ValueError(_NOT_COMPILED)
        return CompiledMask(**span_of(rest.get("local_size"), rest.get("config")))
    if isinstance(attention_mask, ModelMask):
        return attention_mask  # `generate` made it already, for a static cache
    family = type(rest["config"]).__name__ if rest.get("config") is not None else "this config"
    real = None if attention_mask is None else _real_keys(attention_mask, kv_length, int(kv_offset))
    mask, row = None, None
    if q_length == 1 and mask_function is not None and not rest.get("use_vmap"):
        if mask_function is not causal_mask_function or int(q_offset) + 1 != kv_length + int(kv_offset):  # else all keys are visible
            row = visible_keys(mask_function, batch_size, kv_length, q_offset, int(kv_offset), rest.get("device"))
        if real is not None and (real.is_cuda or not bool(real.all())):
            row = real if row is None else row & real.to(row.device)
    else:
        mask = causal() if mask_function is None else mask_mod(with_offsets(mask_function, q_offset, kv_offset))
        if real is not None:
            mask = mask & RealKeys(real[0] if batch_size == 1 else real)
    made = ModelMask(
        mask=mask,
        padding_mask=real,
        row=row,
        **span_of(rest.get("local_size"), rest.get("config")),
        foreign=foreign_part(mask_function),
        bidirectional=is_bidirectional(mask_function),
        packed=PACKED in mask_parts(mask_function),
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        whole=_made_of_whole_batch(),
        family=family,
    )
    forward = current_forward.get()
    if forward is not None:
        forward.model_mask = made
    return made


def _made_of_whole_batch() -> bool:
    forward = current_forward.get()
    return forward is not None and has_whole_inputs(forward.plan) and not forward.in_decoder


def _real_keys(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """bool [B, kv_length], False for padding, from a mask by token, which may cover fewer tokens than a static cache."""
    missing = kv_offset + kv_length - attention_mask.shape[1]
    covered = attention_mask if missing <= 0 else torch.nn.functional.pad(attention_mask, (0, missing))
    return covered[:, kv_offset : kv_offset + kv_length].bool()


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    longspan_plan: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: attention of one layer, over all ranks of the plan's mesh if there is a plan.

    Args:
        module: The attention layer.
        query: [B, H, L, D].
        key: [B, G, L, D].
        value: [B, G, L, D].
        attention_mask: A `ModelMask`, None, or without a plan a tensor [B or 1, H or 1, Q, K], as torch's SDPA takes it.
        scaling: Multiplies the scores; 1/√D by default.
        dropout: Must be 0.
        sliding_window: The layer's window. With a plan set, the window of the mask, if there is one, else this selects the plan.
        softcap: Scores become softcap · tanh(score / softcap).
        s_aux: [H], the logits of attention sinks.
        score_mod: As `longspan.attention` takes it; not together with softcap.
        longspan_plan: From `prepare_batch`, or a Plan or PlanSet. By default the plan of the forward that the layer runs in. Without
            one, the layer computes on one device.
        **rest: Other keywords of the model's forward. An unknown one raises.

    Returns:
        (out [B, L, H, D], None). Attention weights are never formed.

    Raises:
        ValueError: If a setting is not supported.
    """
    update = take_update()  # before anything raises: the next layer's update would find it
    _check_supported(module, dropout, rest)
    _check_documents(attention_mask, rest)
    if softcap is not None and score_mod is not None:
        raise ValueError("longspan: expected softcap or score_mod, got both; apply the soft cap in score_mod")
    query, key, value = as_autocast(query, key, value)  # rotary embeddings leave q and k in another dtype than v
    options: dict[str, Any] = {"scale": scaling, "sink": s_aux, "score_mod": score_mod if softcap is None else _softcap(float(softcap))}
    if longspan_plan is None:
        longspan_plan = plan_in_context(module)
    elif has_whole_inputs(longspan_plan) and _made_of_whole_batch():
        longspan_plan = None  # a vision or audio tower, which computes on whole inputs
    if update is not None:
        if longspan_plan is not None:
            raise ValueError("longspan: expected either a plan or a PagedCache, got both; to generate, do not give longspan_plan")
        paged = attend_paged(update, module, (query, key, value), attention_mask, options)
        if paged is not None:
            return paged, None
    if longspan_plan is not None and sees_features(module, key) and isinstance(attention_mask, Tensor | None):
        record_use(module)
        return attend_pairs(query, key, value, attention_mask, to_tokens=False, **options), None
    if longspan_plan is None:
        if isinstance(attention_mask, Tensor) and not torch.compiler.is_compiling():
            return attend_pairs(query, key, value, attention_mask, to_tokens=not sees_images(module), **options), None
        one = attend_one_query(query, key, value, attention_mask, **options)
        if one is not None:
            return one, None
        options["mask"] = _mask_on_one_device(module, query, key, attention_mask, sliding_window, rest)
    else:
        bidirectional, span = _is_bidirectional(module, attention_mask, rest), _span(attention_mask, sliding_window)
        is_cross = crosses(longspan_plan, bidirectional)
        _check_planned(module, None if is_cross else (query.shape[2], key.shape[2]), attention_mask)
        if not is_cross:
            _check_direction(module, attention_mask, rest, longspan_plan)
        if is_cross:
            options["plan"] = cross_plan(longspan_plan, module, span, query.shape[1], key.shape[1])
        elif isinstance(attention_mask, ModelMask) and attention_mask.whole and attention_mask.foreign:
            options["plan"] = _plan_of_model_mask(longspan_plan, attention_mask)
        else:
            options["plan"] = _plan_for(longspan_plan, span, query.shape[1], key.shape[1])
        record_use(module)
    out: Tensor = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_supported(module: torch.nn.Module, dropout: float, rest: dict[str, Any]) -> None:
    if dropout:
        setting = dropout_field(getattr(module, "config", None), dropout)
        raise ValueError(f"longspan: expected no attention dropout, got dropout={dropout}; set {setting}=0.0")
    if rest.get("output_attentions"):
        raise ValueError(
            "longspan: expected output_attentions=False, got True: attention weights are never formed; use attn_implementation='eager'"
        )
    unknown = [name for name, value in rest.items() if name not in _IGNORED_KEYWORDS and value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"longspan: got the unknown keyword {', '.join(map(repr, unknown))} for attention, and ignoring it could be wrong. Do not give "
            "it to the model, or use another attn_implementation"
        )


def _check_documents(mask: Any, rest: dict[str, Any]) -> None:
    """Raise ValueError if cu_seq_lens_q names several documents that the mask does not separate."""
    bounds = rest.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor) and bounds.shape[0] > 2 and not (isinstance(mask, ModelMask) and mask.packed):
        raise ValueError(
            "longspan: expected position_ids that start again at each document beside cu_seq_lens_q, use_cache=False and no "
            "attention_mask, by which transformers makes the mask of packed documents, got others; on several ranks, give cu_seq_lens_q "
            "to prepare_batch"
        )


def _check_planned(module: torch.nn.Module, lengths: tuple[int, int] | None, mask: Any) -> None:
    """Raise ValueError for what a model may not ask for beside a plan, which holds the mask. lengths: of queries and keys."""
    if lengths is not None:
        reject_cross_attention(module)
    if lengths is not None and lengths[0] != lengths[1]:
        raise ValueError(
            f"longspan: expected queries and keys of the same tokens with a plan, got {lengths[0]} and {lengths[1]}: a cache holds a "
            "shard only. Give use_cache=False and no past_key_values; to generate, call the model without a plan"
        )
    if isinstance(mask, CompiledMask):
        mask = None
    if mask is not None and not isinstance(mask, ModelMask):
        raise ValueError(
            f"longspan: expected no mask beside a plan, got attention_mask of type {type(mask).__name__}; longspan.plan takes masks"
        )
    if mask is not None and mask.padding and not mask.whole:
        raise ValueError(
            "longspan: expected no attention_mask beside a plan, got one; give attention_mask to prepare_batch, so that the plan covers "
            "the padding of all ranks"
        )
    if mask is not None and mask.foreign and (lengths is None or not mask.whole):
        raise ValueError(
            f"longspan: expected a causal mask, got the part {mask.foreign!r}, which the plan does not hold. This model is not supported "
            "on several ranks"
        )
    config = getattr(module, "config", None)
    if config is not None:
        check_config(config)


def _is_causal(module: torch.nn.Module, rest: dict[str, Any]) -> bool:
    return bool(getattr(module, "is_causal", True) if rest.get("is_causal") is None else rest["is_causal"])


def _is_bidirectional(module: torch.nn.Module, mask: Any, rest: dict[str, Any]) -> bool:
    """Whether a layer lets tokens see later tokens: by its mask, or without one by the layer's is_causal."""
    return mask.bidirectional if isinstance(mask, ModelMask) else not _is_causal(module, rest)


def _check_direction(module: torch.nn.Module, mask: Any, rest: dict[str, Any], plans: Any) -> None:
    """Raise ValueError for a causal layer beside a plan of an encoder, and the other way round."""
    planned = isinstance(plans, ModelPlans) and plans.bidirectional
    is_causal, bidirectional = _is_causal(module, rest), _is_bidirectional(module, mask, rest)
    if isinstance(mask, ModelMask) and mask.whole and not planned:
        return  # a mask of its own, a causal one, or cross-attention
    if bidirectional != planned or (not planned and not is_causal):
        expected, got = (f"{'not ' * no}a causal layer" for no in (planned, bidirectional or not is_causal))
        raise ValueError(
            f"longspan: expected {expected}, as the plan of prepare_batch is made for, got {got}, {described(module)}. Give the model to "
            "prepare_batch, which plans a ForMaskedLM model for bidirectional attention, or call the model without a plan on one device"
        )


def _plan_of_model_mask(plans: Any, mask: ModelMask) -> Plan:
    """The plan of a mask that a model made of the whole batch, such as one with bidirectional image tokens."""
    if not isinstance(plans, ModelPlans) or plans.states_documents or plans.documents_from_positions or mask.mask is None:
        raise ValueError(
            f"longspan: expected one document per row beside a mask with the part {mask.foreign!r}, got packed documents; give one "
            "document per row"
        )
    return plans.by_mask(mask.mask)


def _span(mask: Any, sliding_window: int | None) -> Span | None:
    """The window or chunk size of a layer; None for full attention."""
    if isinstance(mask, ModelMask | CompiledMask):
        if mask.chunk is not None:
            return CHUNKED, mask.chunk
        sliding_window = mask.window  # as in eager attention, where the mask decides
    return None if sliding_window is None else (SLIDING, sliding_window)


def _plan_for(plans: Any, span: Span | None, heads: int, kv_heads: int) -> Plan:
    """The plan of a layer with this window or chunk size and these heads."""
    if isinstance(plans, ModelPlans):
        return plans.of(span, heads, kv_heads)
    kind = FULL if span is None else span[0]
    if isinstance(plans, PlanSet):
        return plans[kind]
    if span is None or not isinstance(plans, Plan):
        return plans  # type: ignore[no-any-return]
    within = f"mask & sliding_window({span[1]})" if kind == SLIDING else f"mask & …, for chunks of {span[1]} tokens"
    raise ValueError(
        f"longspan: expected a plan for this layer's {'window' if kind == SLIDING else 'chunks'} of {span[1]} tokens, got one plan for all "
        f"layers; use prepare_batch, or give longspan.plan({{{FULL!r}: mask, {kind!r}: {within}}}, …)"
    )


def _mask_on_one_device(module: torch.nn.Module, query: Tensor, key: Tensor, mask: Any, window: int | None, rest: dict[str, Any]) -> Any:
    """The mask of a layer without a plan: the one that the model asked for."""
    if isinstance(mask, ModelMask):
        return mask.mask if mask.row is None else RealKeys(mask.row[0] if len(mask.row) == 1 else mask.row)
    if isinstance(mask, CompiledMask) or torch.compiler.is_compiling():
        raise ValueError(_NOT_COMPILED)
    if mask is not None:
        return mask
    if not _is_causal(module, rest) or is_cross_attention(module):
        return None  # as in eager attention, where a window is part of the mask
    if query.shape[2] == 1:
        return None if window is None else mask_mod(lambda b, h, q, kv: kv > key.shape[2] - 1 - window)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"longspan: expected a mask for {query.shape[2]} queries over {key.shape[2]} keys, got none")
    return causal() if window is None else causal() & window_mask(window)


_NOT_COMPILED = (
    "longspan: under torch.compile a model needs longspan_plan, from prepare_batch, and no mask of its own: without a plan, masks are made "
    "from the contents of tensors"
)


def _softcap(cap: float) -> Callable[..., Tensor]:
    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return softcap


if not hasattr(PreTrainedModel.__call__, "__wrapped__"):  # not twice, when the module is reloaded
    PreTrainedModel.__call__ = checked_call(PreTrainedModel.__call__)  # type: ignore[method-assign]
    PreTrainedModel.__init__ = adapting(PreTrainedModel.__init__, attention_forward)  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = adapting_later(  # type: ignore[method-assign]
        PreTrainedModel.set_attn_implementation, attention_forward
    )
    loss_function: Any = PreTrainedModel.loss_function
    PreTrainedModel.loss_function = property(recording_loss(loss_function.fget), loss_function.fset)  # type: ignore[method-assign, assignment]
    masking_utils.find_packed_sequence_indices = searching(find_packed_sequence_indices)
    masking_utils._preprocess_mask_arguments = keeping_masks(_preprocess_mask_arguments)
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
