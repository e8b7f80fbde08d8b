"""Settings of a transformers config that matter to a sequence split over ranks. Read by attribute, so transformers is not imported."""

from __future__ import annotations

from typing import Any

NAME = "longspan"  # of the attention implementation
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
_ROPES_BY_LONGEST_POSITION = ("dynamic", "longrope")


def text_config(config: Any) -> Any:
    """The config of a model's text decoder."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


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
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_LAYERS))
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
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "longspan: expected output_router_logits=False, got True: it adds a load-balancing loss, which is no sum over tokens, so that "
            "each rank would balance its own shard. Set config.output_router_logits=False"
        )


def _rope_types(config: Any) -> list[str]:
    types = []
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            per_layer_type = [v for v in value.values() if isinstance(v, dict)]
            types += [str(v.get("rope_type", v.get("type", "default"))) for v in (per_layer_type or [value])]
    return types


def windows_of(config: Any) -> list[int]:
    """The window sizes of a model's layers."""
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    enabled = getattr(config, "use_sliding_window", True)
    if window is None or not enabled or (layer_types is not None and "sliding_attention" not in layer_types):
        return []
    return [int(window)]


def head_counts(config: Any, heads_size: int) -> dict[str, int]:
    """Query and KV heads of one rank, {"heads": …, "kv_heads": …}, if `heads_size` ranks share them; {} if the config does not say."""
    config = text_config(config)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % heads_size or kv_heads % heads_size:
        return {}
    return {"heads": heads // heads_size, "kv_heads": kv_heads // heads_size}
