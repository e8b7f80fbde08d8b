"""What a transformers config says that matters to a sequence on many ranks. Read by attribute: transformers itself is not needed."""

from __future__ import annotations

from typing import Any

NAME = "longspan"  # of the attention implementation
_LAYERS = ("full_attention", "sliding_attention")
# These look at the largest position there is, and a shard has its own.
_LOCAL_ROPE = ("dynamic", "longrope")


def text_config(config: Any) -> Any:
    """The decoder's part of a config."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def check_implementation(config: Any) -> None:
    """Raise ValueError if a model of this config runs another attention implementation than ours, if the config says so."""
    implementation = getattr(text_config(config), "_attn_implementation", None)
    if implementation not in (None, NAME):
        raise ValueError(
            f"longspan: expected a model with attn_implementation={NAME!r}, got {implementation!r}, with which each rank would attend to "
            f"its own shard alone. Call model.set_attn_implementation({NAME!r}), or give attn_implementation={NAME!r} to from_pretrained"
        )


def check_config(config: Any) -> None:
    """Raise ValueError for what would be computed from a shard alone and be wrong."""
    config = text_config(config)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
    if kinds:
        raise ValueError(
            f"longspan: {type(config).__name__} has layers of type {', '.join(map(repr, kinds))}, which mix tokens in ways that a "
            f"split sequence does not see; expected {' or '.join(map(repr, _LAYERS))}"
        )
    for rope in _ropes(config):
        if rope in _LOCAL_ROPE:
            raise ValueError(
                f"longspan: rope type {rope!r} depends on the longest position in the batch, and ranks hold different ones; expected "
                "'default', 'linear', 'yarn' or 'llama3'"
            )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "longspan: output_router_logits=True adds a load-balancing loss, which is no sum over tokens: each rank would balance its own "
            "shard. Set config.output_router_logits=False"
        )


def _ropes(config: Any) -> list[str]:
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            nested = [v for v in value.values() if isinstance(v, dict)]
            found += [str(v.get("rope_type", v.get("type", "default"))) for v in (nested or [value])]
    return found


def windows_of(config: Any) -> list[int]:
    """The windows of a model's layers, ascending."""
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    used = getattr(config, "use_sliding_window", True)
    if window is None or not used or (kinds is not None and "sliding_attention" not in kinds):
        return []
    return [int(window)]


def head_counts(config: Any, shared: int) -> dict[str, int]:
    """Query and key heads that one rank holds, if the config says so. `shared`: ranks that share the heads."""
    config = text_config(config)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % shared or kv_heads % shared:
        return {}
    return {"heads": heads // shared, "kv_heads": kv_heads // shared}
