"""What the settings of a config mean for ranks: one table per question."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.integrations import _configs
from longspan.integrations._configs import (
    check_config,
    check_encoder,
    check_implementation,
    check_positions,
    chunk_size,
    default_positions,
    dropout_field,
    head_counts,
    is_masked_lm,
    layers_without_mixing,
    position_rule,
    spans_of,
    text_config,
)


def config(**settings: Any) -> Any:
    return SimpleNamespace(**settings)


def outer(**settings: Any) -> Any:
    """A config of several parts, whose text config has the settings."""
    inner = config(**settings)
    return config(get_text_config=lambda: inner, model_type="outer")


def test_the_text_config_is_the_inner_one_if_there_is_one() -> None:
    plain = config(a=1)
    assert text_config(plain) is plain and text_config(outer(a=2)).a == 2


class TinyForMaskedLM:
    config = None


class TinyForCausalLM:
    config = None


class WithoutConfigForMaskedLM:
    pass


def test_only_models_of_masked_language_modelling_are_encoders() -> None:
    assert is_masked_lm(TinyForMaskedLM()) and not is_masked_lm(TinyForCausalLM()) and not is_masked_lm(WithoutConfigForMaskedLM())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bert"}, None),
        ({"model_type": "xmod", "position_embedding_type": "absolute", "token_dropout": False}, None),
        ({"model_type": "bert", "position_embedding_type": None}, None),
        ({"model_type": "deberta"}, "got an encoder of type 'deberta'.* one of 'albert', 'bert',"),
        ({}, "got an encoder of type ''"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "='absolute', got 'relative_key'"),
        ({"model_type": "esm", "token_dropout": True}, "expected token_dropout=False, got True"),
    ],
)
def test_encoders_that_are_supported(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_encoder(config(**settings))
        return
    with pytest.raises(ValueError, match=message):
        check_encoder(config(**settings))


def test_implementations_other_than_longspans_raise() -> None:
    for allowed in (config(), config(_attn_implementation=None), config(_attn_implementation="longspan")):
        check_implementation(allowed)
    for wrong in (config(_attn_implementation="eager"), outer(_attn_implementation="eager")):
        with pytest.raises(ValueError, match="expected a model with attn_implementation='longspan', got 'eager'"):
            check_implementation(wrong)


LAYERS = [
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid", "recurrent", "mlp", "moe",
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, None),
        ({"layer_types": LAYERS}, None),
        ({"layer_types": None}, None),
        ({"layer_types": [*LAYERS, "b", "a"]}, "got 'a', 'b' in SimpleNamespace"),
        ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, None),
        ({"rope_scaling": {"type": "yarn"}}, None),
        ({"rope_scaling": {"factor": 2.0}}, None),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "got 'dynamic', which depends on the longest"),
        ({"rope_scaling": {"type": "longrope"}}, "got 'longrope'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "got 'longrope'"),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": {"type": "dynamic"}}}, "got 'dynamic'"),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "rope_type": "dynamic"}}, None),
        ({"attn_temperature_tuning": True, "model_type": "llama4_text"}, None),
        ({"attn_temperature_tuning": False, "model_type": "other"}, None),
        ({"attn_temperature_tuning": True, "model_type": "other"}, "attn_temperature_tuning=False in SimpleNamespace, got True"),
        ({"output_router_logits": False}, None),
        ({"output_router_logits": True}, "output_router_logits=False, got True"),
    ],
)
def test_settings_that_are_supported_on_ranks(settings: dict[str, Any], message: str | None) -> None:
    for made in (config(**settings), outer(**settings)):
        if message is None:
            check_config(made)
            continue
        with pytest.raises(ValueError, match=message):
            check_config(made)


def test_layers_that_mix_no_tokens_are_named_by_the_config() -> None:
    assert layers_without_mixing(config()) == layers_without_mixing(config(layer_types=None)) == set()
    assert layers_without_mixing(config(layer_types=["moe", "full_attention", "mlp", "conv"])) == {0, 2}


@pytest.mark.parametrize(
    ("settings", "spans"),
    [
        ({}, []),
        ({"sliding_window": 7}, [("sliding", 7)]),
        ({"sliding_window": None, "use_sliding_window": True}, []),
        ({"sliding_window": 7, "use_sliding_window": False, "layer_types": ["sliding_attention"]}, []),
        ({"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention"]}, [("sliding", 7)]),
        ({"sliding_window": 7, "layer_types": []}, []),
        ({"attention_chunk_size": 9, "layer_types": ["full_attention"]}, []),
        ({"attention_chunk_size": 9.0, "layer_types": ["chunked_attention"]}, [("chunked", 9)]),
        ({"sliding_window": 7.0, "attention_chunk_size": 9, "layer_types": LAYERS}, [("sliding", 7), ("chunked", 9)]),
    ],
)
def test_windows_and_chunks_of_layers(settings: dict[str, Any], spans: list[tuple[str, int]]) -> None:
    assert spans_of(config(**settings)) == spans_of(outer(**settings)) == spans
    chunks = [size for kind, size in spans if kind == "chunked"]
    assert chunk_size(config(**settings)) == chunk_size(outer(**settings)) == (chunks[0] if chunks else None)
    assert all(type(size) is int for _, size in spans_of(config(**settings)))


FALCON = {"model_type": "falcon", "num_attention_heads": 12, "num_kv_heads": 12}


@pytest.mark.parametrize(
    ("settings", "ranks", "heads"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 2, (6, 2)),
        ({"num_attention_heads": 12, "num_key_value_heads": None}, 3, (4, 4)),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3, None),
        ({"num_attention_heads": 9, "num_key_value_heads": 4}, 2, None),
        ({"num_attention_heads": [12, 12], "num_key_value_heads": 4}, 1, None),
        ({"num_attention_heads": 12, "num_key_value_heads": [4]}, 1, None),
        ({}, 1, None),
        ({**FALCON, "multi_query": True, "new_decoder_architecture": False}, 1, (12, 1)),
        ({**FALCON, "multi_query": False, "new_decoder_architecture": False}, 1, (12, 12)),
        ({**FALCON, "multi_query": True, "new_decoder_architecture": True}, 2, (6, 6)),
        ({**FALCON, "multi_query": True, "new_decoder_architecture": False}, 2, None),
    ],
)
def test_heads_of_one_rank(settings: dict[str, Any], ranks: int, heads: tuple[int, int] | None) -> None:
    want = {} if heads is None else {"heads": heads[0], "kv_heads": heads[1]}
    assert head_counts(config(**settings), ranks) == head_counts(outer(**settings), ranks) == want


def test_positions_of_a_whole_batch() -> None:
    ids = torch.tensor([[1, 5, 6, 1, 7], [5, 5, 1, 1, 1]])
    real = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    by_place = [[0, 1, 2, 3, 4]] * 2
    roberta, opt, other = (config(model_type=name, pad_token_id=1) for name in ("roberta", "opt", "llama"))
    assert [position_rule(c) for c in (roberta, opt, other, config())] == ["by pad token", "by mask", "by place", "by place"]
    assert position_rule(outer(model_type="opt")) == "by mask"
    assert default_positions(roberta, ids, real).tolist() == [[1, 2, 3, 1, 4], [2, 3, 1, 1, 1]]
    assert default_positions(roberta, torch.zeros(2, 5, 3), real).tolist() == [[2, 3, 4, 5, 6]] * 2
    assert default_positions(opt, ids, real).tolist() == [[-1, 0, 1, 2, -1], [0, 1, 2, 3, 4]]
    for made in (
        default_positions(opt, ids, None), default_positions(other, ids, real), default_positions(None, torch.zeros(2, 5, 3), real)
    ):  # fmt: skip
        assert made.tolist() == by_place and made.dtype == torch.int64


def test_positions_by_another_rule_than_the_models_raise() -> None:
    opt = config(model_type="opt")
    for plans in (object(), config(position_rule=None), config(position_rule="by mask")):
        check_positions(opt, plans)
    with pytest.raises(ValueError, match="expected positions by mask, as SimpleNamespace numbers tokens, got positions by place"):
        check_positions(opt, config(position_rule="by place"))


@pytest.mark.parametrize("field", _configs._DROPOUT_FIELDS)
def test_the_field_of_the_dropout_is_named(field: str) -> None:
    first, *rest = field.split(".")
    made = config(attention_dropout=0.5, **{first: config(**{rest[0]: 0.25}) if rest else 0.25} if field != "attention_dropout" else {})
    if field == "attention_dropout":
        made.attention_dropout = 0.25
    assert dropout_field(made, 0.25) == f"config.{field}"
    assert dropout_field(made, 0.125) == "the config's attention dropout"
