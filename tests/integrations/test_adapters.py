"""Families with attention code of their own: one process and three ranks equal transformers' eager attention."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.integrations.families import VOCAB, batch_of, tiny_model, try_family
from tests.integrations.tiny_models import FAMILIES as TINY
from tests.integrations.tiny_models import model_of

FAMILIES = ("gptj", "gpt_neo", "codegen", "bloom", "mpt", "falcon")
SAMPLE = ("gpt_neo", "bloom", "falcon")
GENERATED = list(product((*TINY, *FAMILIES, "opt", "phi3"), ("dynamic", "static", "quantized"), ("plain", "left")))
GENERATED_SAMPLE = [
    ("llama", "static", "left"),
    ("gemma3", "dynamic", "plain"),
    ("gemma3", "static", "left"),
    ("gpt_neo", "dynamic", "left"),
    ("llama", "quantized", "left"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--whole-grid")
    if metafunc.function.__name__ == "test_an_adapted_family_equals_eager":
        metafunc.parametrize("family", FAMILIES if whole else SAMPLE)
    if metafunc.function.__name__ == "test_generate_gives_the_tokens_of_eager":
        metafunc.parametrize(("family", "cache", "kind"), GENERATED if whole else GENERATED_SAMPLE)


def test_an_adapted_family_equals_eager(family: str, pytestconfig: pytest.Config) -> None:
    kinds = ("plain", "packed", "left", "right") if pytestconfig.getoption("--whole-grid") else ("left",)
    outcome = try_family(family, kinds)
    for where in ("one process", "ranks"):
        for kind, cell in outcome[where].items():
            raises = kind == "packed" and where == "ranks" and family in ("bloom", "mpt", "falcon")
            assert cell.verdict == ("raises" if raises else "right"), f"{family} {where} {kind}: {cell.detail}"


def test_a_family_with_sinks_generates_from_masks_of_single_queries() -> None:
    assert_generates_as_eager("gpt_oss", "dynamic", "left")


_CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
}


def assert_generates_as_eager(family: str, cache: str, kind: str) -> None:
    """20 tokens after a prompt, with transformers' dynamic (sliding layers: sliding), static or quantized cache.

    What transformers does not support with eager attention is not supported with longspan's: both raise.
    """
    made: list[Any] = []
    batch = {name: value[:, -23:] for name, value in batch_of(kind).items() if name != "labels"}
    for implementation in ("eager", "longspan"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = model_of(family, implementation) if family in TINY else tiny_model(family, implementation)
            model.generation_config.eos_token_id = None
            try:
                made.append(model.generate(**batch, max_new_tokens=20, do_sample=False, pad_token_id=0, **_CACHES[cache]))
            except (ValueError, NotImplementedError, TypeError, AttributeError) as error:
                if cache != "quantized":
                    raise
                made.append(str(error))
    if isinstance(made[0], str):
        assert made[1] == made[0]
    else:
        assert not isinstance(made[1], str) and made[0].shape[1] == 43 and made[0].equal(made[1])


def test_generate_gives_the_tokens_of_eager(family: str, cache: str, kind: str) -> None:
    assert_generates_as_eager(family, cache, kind)


@pytest.mark.parametrize(("family", "message"), [("xglm", r"XGLMConfig reads mask\.size"), ("doge", "DogeConfig")])
def test_a_model_that_computes_with_its_mask_is_named(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(family, "longspan")(**batch_of("plain"))


def test_attention_dropout_is_named_by_the_models_own_field() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64, attn_pdrop=0.1)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="longspan").train()
    with pytest.raises(ValueError, match=r"dropout=0\.1; set config\.attn_pdrop=0\.0"):
        model(**batch_of("plain"))


def test_falcon_with_alibi_raises_by_its_field() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    with pytest.raises(ValueError, match=r"config\.alibi=False"):
        FalconForCausalLM._from_config(config, attn_implementation="longspan")
