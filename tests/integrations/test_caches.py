"""`generate` with transformers' own caches: greedy tokens as with eager attention."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.integrations.caches_grid import CACHES, FAMILIES, has_windows, is_supported, tokens_of
from tests.integrations.families import tiny_model

SAMPLE = (("gemma3_text", "static"), ("llama", "quantized"), ("gpt_oss", "dynamic"), ("bloom", "static"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cache" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole-grid")
        metafunc.parametrize(("family", "cache"), [(f, c) for f in FAMILIES for c in CACHES] if whole else SAMPLE)


def test_tokens_equal_those_of_eager_attention(family: str, cache: str) -> None:
    model = tiny_model(family, "longspan")
    if not is_supported(model, cache):
        pytest.skip("transformers has no quantized cache for sliding layers")
    assert tokens_of(model, cache) == tokens_of(tiny_model(family, "eager"), cache)


def test_some_families_have_windows() -> None:
    assert has_windows(tiny_model("gemma3_text", "longspan")) and not has_windows(tiny_model("llama", "longspan"))
