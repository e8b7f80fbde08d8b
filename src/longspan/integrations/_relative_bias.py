"""T5's relative position bias as a score_mod: a table by distance, clamped where T5's last bucket begins, in place of an S × S tensor.

Legend: B batch, H heads, L tokens, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from longspan.integrations._configs import NAME

AttentionForward = Callable[..., tuple[Tensor, None]]


class RelativeBias:
    """The position bias that the layers of a stack share: that of `layer`, or none. Stands in for T5's tensor [1, H, L, L]."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def score_mod(self, past: int) -> Callable[..., Tensor] | None:
        """Adds the bias to scores of queries behind `past` cached tokens."""
        if not self.layer.has_relative_attention_bias:
            return None
        farthest = _farthest(self.layer)
        distances = torch.arange(-farthest, farthest + 1, device=self.layer.relative_attention_bias.weight.device)
        table = self.layer.relative_attention_bias(_buckets(self.layer, distances)).float()  # [distances, H]

        def relative_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[(kv_idx - q_idx - past).clamp(-farthest, farthest) + farthest, h]

        return relative_bias


def _farthest(layer: Any) -> int:
    """The distance from which on all distances have the last bucket.

    Raises:
        ValueError: Distances beyond `relative_attention_max_distance` have buckets of their own, so that there is no such distance.
    """
    farthest, buckets = layer.relative_attention_max_distance, layer.relative_attention_num_buckets
    exact = buckets // (2 if layer.is_decoder else 4)
    if farthest <= exact:
        raise ValueError(
            f"longspan: expected relative_attention_max_distance above {exact}, the distances of {type(layer).__name__} that have buckets "
            f"of their own with relative_attention_num_buckets={buckets}, got {farthest}; use attn_implementation='eager'"
        )
    return int(farthest)


def _buckets(layer: Any, distances: Tensor) -> Tensor:
    """The bucket of each distance, key minus query. All distances beyond `relative_attention_max_distance` have the last bucket."""
    if type(layer).__name__.startswith("UMT5"):
        return layer._relative_position_bucket(distances)  # type: ignore[no-any-return]
    return layer._relative_position_bucket(  # type: ignore[no-any-return]
        distances,
        bidirectional=not layer.is_decoder,
        num_buckets=layer.relative_attention_num_buckets,
        max_distance=layer.relative_attention_max_distance,
    )


def _attend(
    self: Any, hidden: Tensor, encoded: Tensor | None, mask: Any, bias: RelativeBias, past: Any, attend: AttentionForward, **kwargs: Any
) -> Tensor:
    """T5's attention layer, from hidden states [B, L, …] to its output. encoded: of cross-attention."""
    by_head = lambda x: x.unflatten(-1, (self.n_heads, self.key_value_proj_dim)).transpose(1, 2)  # noqa: E731
    past_tokens = 0 if past is None else int(past.get_seq_length(self.layer_idx))
    is_split = hasattr(past, "cross_attention_cache")
    cache = past if not is_split else past.self_attention_cache if encoded is None else past.cross_attention_cache
    if is_split and encoded is not None and past.is_updated.get(self.layer_idx):
        key, value = cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
    else:
        states = hidden if encoded is None else encoded
        key, value = by_head(self.k(states)), by_head(self.v(states))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if is_split and encoded is not None:
                past.is_updated[self.layer_idx] = True
    dropout = self.dropout if self.training else 0.0
    out, _ = attend(
        self, by_head(self.q(hidden)), key, value, mask, dropout=dropout, scaling=self.scaling, score_mod=bias.score_mod(past_tokens),
        **kwargs,
    )  # fmt: skip
    return self.o(out.flatten(2))  # type: ignore[no-any-return]


def adapt_t5(module: ModuleType, attend: AttentionForward) -> None:
    """Adapt the attention layers of T5, mT5 and Switch Transformers, whose first layer's bias is given to the others."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        mask: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        bias = RelativeBias(self) if position_bias is None else position_bias
        if not isinstance(bias, RelativeBias):
            raise ValueError(f"longspan: expected no position_bias for {type(self).__name__}, got {type(bias).__name__}")
        return _attend(self, hidden_states, key_value_states, mask, bias, past_key_values, attend, **kwargs), bias, None

    _replace_forward(module, forward)


def adapt_umt5(module: ModuleType, attend: AttentionForward) -> None:
    """Adapt the attention layers of UMT5, each of which has its own bias."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        bias = RelativeBias(self)
        return _attend(self, hidden_states, encoder_hidden_states, attention_mask, bias, past_key_values, attend, **kwargs), None

    _replace_forward(module, forward)


def _replace_forward(module: ModuleType, forward: Callable[..., Any]) -> None:
    """Let the attention layers of a module run `forward` where their implementation is longspan, their own otherwise."""
    layer = _attention_class(module)
    own = layer.forward

    @functools.wraps(own)
    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = forward if self.config._attn_implementation == NAME else own
        return run(self, *args, **kwargs)

    layer.forward = choose  # type: ignore[method-assign]


def _attention_class(module: ModuleType) -> type[nn.Module]:
    """The class of a module of transformers that has a bias by relative position."""
    return next(
        value for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and hasattr(value, "_relative_position_bucket")
    )  # fmt: skip
