"""Settings of a transformers config that matter to a sequence split over ranks. Read by attribute, so transformers is not imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "longspan"  # of the attention implementation
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_MIXER_LAYERS = ("linear_attention", "conv", "hybrid", "recurrent")  # run on whole sequences
_TOKEN_LAYERS = ("mlp", "moe")  # mix no tokens
_SCALES_BY_POSITION = ("llama4_text",)  # adapted: layers scale queries by the plan's positions
_ROPES_BY_LONGEST_POSITION = ("dynamic", "longrope")
# Model types that number tokens otherwise than 0, 1, 2, … if they get no position_ids.
_POSITIONS_BY_PAD_TOKEN = (
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "xmod", "kosmos_2_text_model",
    "kosmos_2_5_text_model", "esm",
)  # fmt: skip
_POSITIONS_BY_MASK = ("opt",)
# Encoders whose loss and gradients on ranks were compared with one process (docs/other-families.md).
_ENCODERS = (
    "albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "gte",
    "jina_embeddings_v3", "modernbert", "modernvbert", "neomme", "nomic_bert", "roberta", "roberta-prelayernorm", "roc_bert", "ultrabert",
    "ultravbert", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_config.attn_pdrop",
    "dropout_rate",
    "dropout",
)


def text_config(config: Any) -> Any:
    """The config of a model's text decoder."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def is_masked_lm(model: Any) -> bool:
    """Whether a model, not a config, is an encoder for masked language modelling."""
    return hasattr(model, "config") and type(model).__name__.endswith("ForMaskedLM")


def check_encoder(config: Any) -> None:
    """Raise ValueError for encoders that were not compared with one process, or compute something from their shard only."""
    kind = getattr(config, "model_type", "")
    if kind not in _ENCODERS:
        raise ValueError(
            f"longspan: got an encoder of type {kind!r}, which is not supported on several ranks: expected one of "
            f"{', '.join(map(repr, _ENCODERS))}; call the model without a plan on one device"
        )
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise ValueError(
            f"longspan: expected position_embedding_type='absolute', got {config.position_embedding_type!r}, by which layers number the "
            "tokens of their shard from 0. This model is not supported on several ranks"
        )
    if getattr(config, "token_dropout", False):
        raise ValueError(
            "longspan: expected token_dropout=False, got True, by which a model scales its embeddings by the share of masked tokens in its "
            "shard. Set config.token_dropout=False"
        )


def check_implementation(config: Any) -> None:
    """Raise ValueError if the config says that its model runs another attention implementation than longspan's."""
    implementation = getattr(text_config(config), "_attn_implementation", None)
    if implementation not in (None, NAME):
        raise ValueError(
            f"longspan: expected a model with attn_implementation={NAME!r}, got {implementation!r}, with which each rank would attend to "
            f"its own shard only. Call model.set_attn_implementation({NAME!r}), or give attn_implementation={NAME!r} to from_pretrained"
        )


def check_config(config: Any) -> None:
    """Raise ValueError for settings by which a model would compute something from its shard only, and be wrong."""
    config = text_config(config)
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - {*_ATTENTION_LAYERS, *_MIXER_LAYERS, *_TOKEN_LAYERS})
    if other_layers:
        raise ValueError(
            f"longspan: expected layers of type {' or '.join(map(repr, _ATTENTION_LAYERS))}, got {', '.join(map(repr, other_layers))} in "
            f"{type(config).__name__}: such layers would mix tokens within each rank's shard only. This model is not supported on several "
            "ranks"
        )
    for rope in _rope_types(config):
        if rope in _ROPES_BY_LONGEST_POSITION:
            raise ValueError(
                f"longspan: expected rope type 'default', 'linear', 'yarn' or 'llama3', got {rope!r}, which depends on the longest "
                "position in the batch: ranks hold different ones"
            )
    if getattr(config, "attn_temperature_tuning", False) and config.model_type not in _SCALES_BY_POSITION:
        raise ValueError(
            f"longspan: expected attn_temperature_tuning=False in {type(config).__name__}, got True, by which a layer scales queries by "
            "their places in the shard. Set config.attn_temperature_tuning=False, or call the model without a plan on one device"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "longspan: expected output_router_logits=False, got True: it adds a load-balancing loss, which is no sum over tokens, so that "
            "each rank would balance its own shard. Set config.output_router_logits=False"
        )


def layers_without_mixing(config: Any) -> set[int]:
    """The layers that mix no tokens, by the config's layer types."""
    types = getattr(text_config(config), "layer_types", None) or ()
    return {i for i, kind in enumerate(types) if kind in _TOKEN_LAYERS}


def _rope_types(config: Any) -> list[str]:
    types = []
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            per_layer_type = [v for v in value.values() if isinstance(v, dict)]
            types += [str(v.get("rope_type", v.get("type", "default"))) for v in (per_layer_type or [value])]
    return types


def spans_of(config: Any) -> list[tuple[str, int]]:
    """The windows ("sliding", tokens) and chunk sizes ("chunked", tokens) of a model's layers."""
    config = text_config(config)
    windows, chunk = [w for w in _by_layer(config, "sliding_window") if w is not None], chunk_size(config)
    layer_types = getattr(config, "layer_types", None)
    enabled = getattr(config, "use_sliding_window", True) and (layer_types is None or "sliding_attention" in layer_types)
    spans = [("sliding", int(window)) for window in windows if enabled]
    return spans if chunk is None else [*spans, ("chunked", chunk)]


def _by_layer(config: Any, name: str) -> list[Any]:
    """The distinct values of a setting over the layers of a config, which may differ (`per_layer_config`)."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = [getattr(layer, name, None) for layer in layers]
    return [value for i, value in enumerate(values) if value not in values[:i]]


def chunks_by_position() -> bool:
    """Whether the installed transformers counts chunks by the positions of packed documents, as 5.23 and later do."""
    try:
        from transformers import masking_utils
    except ImportError:
        return True
    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def chunk_size(config: Any) -> int | None:
    """The chunk size of layers of type "chunked_attention"; None without such layers."""
    config = text_config(config)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return int(config.attention_chunk_size) if chunked else None


def head_counts(config: Any, heads_size: int) -> dict[str, int]:
    """Query and KV heads of one rank, {"heads": …, "kv_heads": …}, if `heads_size` ranks share them; {} if the config does not say."""
    config = text_config(config)
    by_layer = _by_layer(config, "num_attention_heads"), _by_layer(config, "num_key_value_heads")
    if any(len(values) > 1 for values in by_layer):
        return {}
    heads, kv_heads = by_layer[0][0], by_layer[1][0] or by_layer[0][0]
    if getattr(config, "model_type", "") == "falcon" and config.multi_query and not config.new_decoder_architecture:
        kv_heads = 1
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % heads_size or kv_heads % heads_size:
        return {}
    return {"heads": heads // heads_size, "kv_heads": kv_heads // heads_size}


def position_rule(config: Any) -> str:
    """How a model numbers tokens that come without position_ids: "by place", "by pad token" or "by mask"."""
    kind = getattr(text_config(config), "model_type", "")
    return "by pad token" if kind in _POSITIONS_BY_PAD_TOKEN else "by mask" if kind in _POSITIONS_BY_MASK else "by place"


def default_positions(config: Any, tokens: Tensor, real: Tensor | None) -> Tensor:
    """The positions [B, S] that a model gives to the tokens of a whole batch, on their device.

    tokens: ids [B, S] or embeddings [B, S, D]. real: bool [B, S], False for padding; None without padding.
    """
    batch_size, length = tokens.shape[:2]
    by_place = torch.arange(length, device=tokens.device).expand(batch_size, length)
    rule = "by place" if config is None else position_rule(config)
    if rule == "by pad token" and tokens.ndim == 2:
        pad = text_config(config).pad_token_id
        counted = tokens != pad
        return counted.cumsum(1) * counted + pad
    if rule == "by pad token":
        return by_place + text_config(config).pad_token_id + 1
    if rule == "by mask" and real is not None:
        real = real.to(tokens.device)
        return real.cumsum(1) * real - 1
    return by_place


def check_positions(config: Any, plans: Any) -> None:
    """Raise ValueError if `prepare_batch` numbered tokens otherwise than this model does."""
    rule = getattr(plans, "position_rule", None)
    if rule is not None and rule != position_rule(config):
        raise ValueError(
            f"longspan: expected positions {position_rule(config)}, as {type(text_config(config)).__name__} numbers tokens, got positions "
            f"{rule}; give the model to prepare_batch: prepare_batch(batch, mesh, config=model)"
        )


def dropout_field(config: Any, dropout: float) -> str:
    """The name of the config's field that holds the dropout of attention weights."""
    for name in _DROPOUT_FIELDS:
        value = config
        for part in name.split("."):
            value = getattr(value, part, None)
        if value == dropout:
            return f"config.{name}"
    return "the config's attention dropout"
