"""Hugging Face transformers: `attn_implementation="longspan"`. Importing this module registers it.

    import longspan.integrations.transformers as lst
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longspan")
    loss = model(**lst.prepare_batch(batch, mesh, config=model.config)).loss

The plan of a batch travels through the model's keyword arguments to every attention layer, as `longspan_plan`. Without one, a layer
computes what it would on one device. What cannot be honoured raises.

Importing this module also wraps `PreTrainedModel.__call__`: a forward that was given a plan raises if an attention layer did not use it.

Legend: B batch, H query heads, G key heads, L tokens of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._engine.attention import attention
from longspan._engine.signatures import as_autocast
from longspan._masks.algebra import Mask, causal, mask_mod, sliding_window
from longspan._planner.plan import Plan, PlanSet
from longspan.integrations._batch import RealKeys, prepare_batch
from longspan.integrations._configs import NAME, check_config
from longspan.integrations._plan_use import check_no_plan_was_dropped, checked, used_by
from longspan.integrations._plans import FULL, SLIDING, ModelPlans

try:
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        f"longspan.integrations.transformers needs transformers 5.22 or later ({error}): pip install 'longspan[hf]'"
    ) from error

__all__ = ["NAME", "attention_forward", "attention_mask", "prepare_batch"]

# Of transformers' mask functions, those whose part in a mask a plan takes over, by the name of the function that makes them.
_PLANNED = ("causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function")
# Keyword arguments that reach a layer and say nothing about its attention, or repeat what the mask says.
_HARMLESS = (
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict", "labels", "shift_labels", "num_items_in_batch",
    "logits_to_keep", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "is_causal",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelMask:
    """What a model asked for as its mask: the mask itself, for one device, and what a plan would have to know of it."""

    mask: Mask
    padding: bool
    foreign: str  # the part of it that no plan takes over; "" for none

    def to(self, *_: Any, **__: Any) -> ModelMask:
        return self


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Any:
    """transformers' mask interface: a `ModelMask`; None while a compiler traces, where only a plan can say what the mask is."""
    if torch.compiler.is_compiling():
        # Dynamo does not look into closures; transformers says with use_vmap that a model added something of its own.
        if attention_mask is not None or rest.get("use_vmap"):
            raise ValueError(_NOT_COMPILED)
        return None
    mask = causal() if mask_function is None else mask_mod(_moved(mask_function, q_offset, kv_offset))
    if attention_mask is not None:
        real = attention_mask[:, -kv_length:].bool()
        mask = mask & RealKeys(real[0].contiguous() if batch_size == 1 else real)
    return ModelMask(mask=mask, padding=attention_mask is not None, foreign=_foreign(mask_function))


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
    longspan_plan: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, L, D], key and value [B, G, L, D] → (out [B, L, H, D], None).

    softcap: scores become softcap · tanh(score / softcap). s_aux [H]: sinks. sliding_window: with a plan, which of its plans is used.
    """
    _refuse(dropout, rest)
    query, key, value = as_autocast(query, key, value)  # rotary embeddings leave q and k in another dtype than v
    options: dict[str, Any] = {"scale": scaling, "sink": s_aux, "score_mod": None if softcap is None else _softcap(float(softcap))}
    if longspan_plan is None:
        if not torch.compiler.is_compiling():
            check_no_plan_was_dropped(module)
        options["mask"] = _one_device(module, query, key, attention_mask, sliding_window, rest)
    else:
        _check_planned(module, query, key, attention_mask, rest)
        options["plan"] = _plan_for(longspan_plan, sliding_window)
        if not torch.compiler.is_compiling():
            used_by(module)
    out = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _refuse(dropout: float, rest: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"longspan: attention dropout is not there, got dropout={dropout}: set config.attention_dropout=0.0")
    if rest.get("output_attentions"):
        raise ValueError(
            "longspan: attention weights are never formed, so output_attentions=True has nothing to give: use 'eager' for that"
        )
    unknown = [name for name, value in rest.items() if name not in _HARMLESS and value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"longspan: got {', '.join(map(repr, unknown))} for attention, which it does not know; it would be wrong to leave it out. "
            "Use another attn_implementation for this model, or do not give it to the model"
        )


def _check_planned(module: torch.nn.Module, query: Tensor, key: Tensor, mask: Any, rest: dict[str, Any]) -> None:
    """What a model may not ask for beside a plan: the plan's mask is the mask."""
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"longspan: with a plan, queries and keys are the same tokens, got {query.shape[2]} and {key.shape[2]}: a cache holds a shard "
            "only. Give use_cache=False and no past_key_values; to generate, call the model without a plan"
        )
    if mask is not None and not isinstance(mask, ModelMask):
        raise ValueError(f"longspan: with a plan the model takes no mask of its own, got attention_mask of type {type(mask).__name__}")
    if mask is not None and mask.padding:
        raise ValueError(
            "longspan: give attention_mask to prepare_batch and not to the model: the plan then knows the padding of all ranks"
        )
    if mask is not None and mask.foreign:
        raise ValueError(f"longspan: the model's mask has a part {mask.foreign!r} that the plan does not know of; expected causal masks")
    if rest.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError("longspan: this layer is not causal, and plans of prepare_batch are: call the model without a plan")
    config = getattr(module, "config", None)
    if config is not None:
        check_config(config)


def _plan_for(plans: Any, window: int | None) -> Plan:
    """The plan of a layer with this window."""
    if isinstance(plans, ModelPlans):
        return plans.of(window)
    if isinstance(plans, PlanSet):
        return plans[FULL if window is None else SLIDING]
    if window is None or not isinstance(plans, Plan):
        return plans
    raise ValueError(
        f"longspan: this layer has a window of {window} tokens, and longspan_plan is one plan for all layers: use prepare_batch, or give "
        f"longspan.plan({{{FULL!r}: mask, {SLIDING!r}: mask & sliding_window({window})}}, …)"
    )


def _one_device(module: torch.nn.Module, query: Tensor, key: Tensor, mask: Any, window: int | None, rest: dict[str, Any]) -> Any:
    """The mask where there is no plan: what the model asked for."""
    if isinstance(mask, ModelMask):
        return mask.mask
    if torch.compiler.is_compiling():
        raise ValueError(_NOT_COMPILED)
    if isinstance(mask, Tensor):
        raise ValueError(
            f"longspan: expected no mask of pairs, got attention_mask of shape {tuple(mask.shape)}: no S × S mask is ever used"
        )
    if mask is not None:
        return mask
    is_causal = rest.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or query.shape[2] == 1:
        return None if window is None else mask_mod(lambda b, h, q, kv: kv > key.shape[2] - 1 - window)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"longspan: {query.shape[2]} queries over {key.shape[2]} keys came without a mask")
    return causal() if window is None else causal() & _window(window)


_NOT_COMPILED = (
    "longspan: under torch.compile a model needs longspan_plan, from prepare_batch, and no mask of its own: without a plan, masks are made "
    "from what the tensors hold"
)


def _window(window: int) -> Mask:
    return sliding_window(window)


def _softcap(cap: float) -> Callable[..., Tensor]:
    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return softcap


def _moved(mask_function: Callable[..., Any], q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    """A mask function where queries and keys begin later than 0, behind a cache."""
    q_first, kv_first = int(q_offset), int(kv_offset)
    if not q_first and not kv_first:
        return mask_function
    return lambda b, h, q, kv: mask_function(b, h, q + q_first, kv + kv_first)


def _foreign(mask_function: Callable[..., Any] | None) -> str:
    """The first part of a mask function that a plan does not take over. transformers joins functions in a closure over a tuple of them."""
    if mask_function is None:
        return ""
    parts = [c.cell_contents for c in getattr(mask_function, "__closure__", None) or () if isinstance(c.cell_contents, tuple)]
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
    if name in ("and_masks", "or_masks") and len(parts) == 1:
        return next((found for part in parts[0] if (found := _foreign(part))), "")
    return "" if name in _PLANNED else name


if not hasattr(PreTrainedModel.__call__, "__wrapped__"):
    PreTrainedModel.__call__ = checked(PreTrainedModel.__call__)
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
