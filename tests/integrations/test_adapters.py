"""Families with attention code of their own: one process and three ranks equal transformers' eager attention."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.families import VOCAB, batch_of, tiny_model, try_family
from tests.integrations.tiny_models import model_of

FAMILIES = ("gptj", "gpt_neo", "codegen", "bloom", "mpt", "falcon")
SAMPLE = ("gpt_neo", "bloom", "falcon")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__name__ == "test_an_adapted_family_equals_eager":
        metafunc.parametrize("family", FAMILIES if metafunc.config.getoption("--whole-grid") else SAMPLE)


def test_an_adapted_family_equals_eager(family: str, pytestconfig: pytest.Config) -> None:
    kinds = ("plain", "packed", "left", "right") if pytestconfig.getoption("--whole-grid") else ("plain", "left")
    outcome = try_family(family, kinds)
    for where in ("one process", "ranks"):
        for kind, cell in outcome[where].items():
            refused = kind == "packed" and where == "ranks" and family in ("bloom", "mpt", "falcon")
            assert cell.verdict == ("refused" if refused else "right"), f"{family} {where} {kind}: {cell.detail}"


def generated(model: Any, **options: Any) -> torch.Tensor:
    ids = batch_of("plain")["input_ids"][:, :17]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("family", ["bloom", "gpt_neo", "gptj"])
def test_adapted_families_generate_the_tokens_of_eager(family: str) -> None:
    models = [tiny_model(family, name) for name in ("eager", "longspan")]
    for model in models:
        model.generation_config.eos_token_id = None
    want, got = (generated(model, use_cache=True) for model in models)
    assert want.equal(got)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_with_a_static_cache_gives_the_tokens_of_eager(family: str) -> None:
    want, got = (generated(model_of(family, name), cache_implementation="static", disable_compile=True) for name in ("eager", "longspan"))
    assert want.equal(got)


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


def test_falcon_with_alibi_is_refused_by_its_field() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    with pytest.raises(ValueError, match=r"config\.alibi=False"):
        FalconForCausalLM._from_config(config, attn_implementation="longspan")
