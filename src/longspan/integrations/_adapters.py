"""transformers families whose attention layers do not call the attention interface: their layers, over longspan's attention.

`adapt` runs when a model with attn_implementation="longspan" is made, before its layers are. It replaces the part of an attention layer
between projections. A layer whose mask is a tensor, of a model with another attention implementation, runs transformers' code.

Legend: B batch, H query heads, G KV heads, L tokens, D head dim.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from longspan.integrations._configs import NAME
from longspan.integrations._forward import PLAN_KEYWORD, plan_in_context
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._plan_use import guarded_forward
from longspan.integrations._relative_bias import adapt_t5, adapt_umt5

AttentionForward = Callable[..., tuple[Tensor, None]]


def adapt(model_class: type, config: Any, attend: AttentionForward) -> None:
    """Prepare the attention layers of a model's family. Raises ValueError for a family with layers of its own that is not adapted."""
    owner: Any = next(kind for kind in model_class.__mro__ if "forward" in vars(kind))
    if hasattr(owner, "base_model_prefix") and not hasattr(owner.forward, "_longspan_guarded"):
        owner.forward = guarded_forward(owner.forward)
    module = sys.modules[model_class.__module__]
    adapter = _ADAPTERS.get(module.__name__.rsplit(".", 1)[-1])
    if adapter is not None and not hasattr(module, "_longspan_adapted"):
        adapter(module, attend)
        module._longspan_adapted = True  # type: ignore[attr-defined]
    for name, classes in vars(module).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(classes, dict) and NAME not in classes:
            raise ValueError(
                f"longspan: expected a model whose attention layers call transformers' attention interface, got {model_class.__name__}, "
                f"which has classes of its own for {', '.join(map(repr, classes))}. This model is not supported; use attn_implementation="
                "'sdpa' or 'eager'"
            )
    if getattr(config, "model_type", "") == "falcon" and config.alibi:
        raise ValueError(
            "longspan: expected config.alibi=False for Falcon, got True, which is not supported; use attn_implementation='eager'"
        )


def _between_projections(scale: Callable[[Any], float], window: Callable[[Any], int | None] = lambda _: None) -> Any:
    """A replacement for `_attn(query, key, value, attention_mask)` of GPT-J's kind, which returns (out [B, H, L, D], weights)."""

    def replacement(attend: AttentionForward, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def attn(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
            if not isinstance(attention_mask, ModelMask):
                return own(self, query, key, value, attention_mask)
            dropout = self.attn_dropout.p if self.training else 0.0  # type: ignore[union-attr]
            query, key = query.to(value.dtype), key.to(value.dtype)
            tokens = window(self)
            mask = attention_mask if tokens is None else attention_mask.within(tokens)
            out, weights = attend(self, query, key, value, mask, scaling=scale(self), dropout=dropout, sliding_window=tokens)
            return out.transpose(1, 2), weights

        return attn

    return replacement


def _adapt_gptj(module: ModuleType, attend: AttentionForward) -> None:
    layer = module.GPTJAttention
    layer._attn = _between_projections(lambda self: 1 / self.scale_attn)(attend, layer._attn)
    module.GPTJ_ATTENTION_CLASSES[NAME] = layer


def _adapt_codegen(module: ModuleType, attend: AttentionForward) -> None:
    layer = module.CodeGenAttention
    layer._attn = _between_projections(lambda self: 1 / self.scale_attn)(attend, layer._attn)


def _adapt_gpt_neo(module: ModuleType, attend: AttentionForward) -> None:
    layer = module.GPTNeoSelfAttention
    window = lambda self: self.config.window_size if self.attention_type == "local" else None  # noqa: E731
    layer._attn = _between_projections(lambda self: 1.0, window)(attend, layer._attn)
    module.GPT_NEO_ATTENTION_CLASSES[NAME] = layer


def _adapt_falcon(module: ModuleType, attend: AttentionForward) -> None:
    layer = module.FalconAttention
    own = layer.forward

    @functools.wraps(own)
    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(attention_mask, ModelMask):
            return own(
                self, hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions, position_embeddings,
                **kwargs,
            )  # fmt: skip
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        query, key = module.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, weights = attend(self, query, key, value, attention_mask, output_attentions=output_attentions)
        return self.dense(out.flatten(2)), weights

    layer.forward = forward
    module.FALCON_ATTENTION_CLASSES[NAME] = layer


def _alibi(slopes: Tensor) -> Callable[..., Tensor]:
    """ALiBi's score_mod. transformers adds slope × kv instead: the same for softmax, and less exact far from token 0."""

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def _adapt_bloom(module: ModuleType, attend: AttentionForward) -> None:
    layer = module.BloomAttention
    own = layer.forward

    @functools.wraps(own)
    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(attention_mask, ModelMask):
            return own(self, hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.training else 0.0,
            score_mod=_alibi(module._get_alibi_slopes(self.num_heads, query.device).float().flatten()),
            output_attentions=output_attentions,
        )
        output = self.dense(out.flatten(2))
        return module.dropout_add(output, residual, self.hidden_dropout, self.training), weights

    layer.forward = forward
    _mark_relative(module)


def _adapt_mpt(module: ModuleType, attend: AttentionForward) -> None:
    layer = module.MptAttention
    own = layer.forward

    @functools.wraps(own)
    def forward(
        self: Any, hidden_states: Tensor, position_bias: Tensor, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        if not isinstance(attention_mask, ModelMask):
            return own(self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        slopes = (position_bias[:, 0, -1] - position_bias[:, 0, -2]).float()  # the bias of neighbouring keys differs by the slope
        dropout = self.attn_dropout_p if self.training else 0.0
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=self.softmax_scale, dropout=dropout, score_mod=_alibi(slopes)
        )
        return self.out_proj(out.flatten(2)), weights

    layer.forward = forward
    _mark_relative(module)


def _adapt_llama4(module: ModuleType, attend: AttentionForward) -> None:
    """Layers without rotary embeddings scale queries by their places in the sequence, not in this rank's shard."""
    layer = module.Llama4TextAttention
    own = layer.forward

    @functools.wraps(own)
    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        plan = kwargs.get(PLAN_KEYWORD)
        plan = plan_in_context(self) if plan is None else plan
        if self.use_rope or not self.attn_temperature_tuning or plan is None:
            return own(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = plan.positions.to(query.device).float()  # not torch's default dtype, which may have 8 bits
        scales = torch.log1p(torch.floor((positions + 1.0) / self.floor_scale)) * self.attn_scale + 1.0
        query = (query * (scales[:, None] if scales.ndim == 1 else scales[:, None, :, None])).to(query.dtype)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2)), weights

    layer.forward = forward
    layer._longspan_plan_positions = True


def _mark_relative(module: ModuleType) -> None:
    """Mark the family's models as needing no position_ids."""
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "base_model_prefix"):
            value._longspan_relative_positions = True  # type: ignore[attr-defined]


_ADAPTERS: dict[str, Callable[[ModuleType, AttentionForward], None]] = {
    "modeling_bloom": _adapt_bloom,
    "modeling_codegen": _adapt_codegen,
    "modeling_falcon": _adapt_falcon,
    "modeling_gpt_neo": _adapt_gpt_neo,
    "modeling_gptj": _adapt_gptj,
    "modeling_llama4": _adapt_llama4,
    "modeling_mpt": _adapt_mpt,
    "modeling_mt5": adapt_t5,
    "modeling_switch_transformers": adapt_t5,
    "modeling_t5": adapt_t5,
    "modeling_umt5": adapt_umt5,
}


def adapting(init: Callable[..., None], attend: AttentionForward) -> Callable[..., None]:
    """`PreTrainedModel.__init__`, after which a model's family is adapted if the config asks for longspan's attention."""

    @functools.wraps(init)
    def adapted(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        if getattr(config, "_attn_implementation", None) == NAME:
            adapt(type(self), config, attend)

    return adapted


def adapting_later(set_implementation: Callable[..., None], attend: AttentionForward) -> Callable[..., None]:
    """`PreTrainedModel.set_attn_implementation`, after which the families of a model and of its parts are adapted."""

    @functools.wraps(set_implementation)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> None:
        set_implementation(self, *args, **kwargs)
        for module in self.modules():
            config = getattr(module, "config", None)
            if hasattr(type(module), "base_model_prefix") and getattr(config, "_attn_implementation", None) == NAME:
                adapt(type(module), config, attend)

    return adapted
