"""docs/families.md says what each family of transformers does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.families import (
    batch_of,
    causal_lm_types,
    for_installed_version,
    on_ranks,
    reason_of,
    row,
    tiny_model,
    try_family,
    written_rows,
)
from tests.integrations.family_cases import case_of

SAMPLE = ("opt", "lfm2", "git")  # right but for packed position_ids; layers that are not attention; with an image


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(causal_lm_types()) if metafunc.config.getoption("--whole-grid") else SAMPLE)


def test_the_page_has_the_family_as_it_is(family: str) -> None:
    if not case_of(causal_lm_types()[family]).is_possible:
        pytest.skip(f"needs {case_of(causal_lm_types()[family]).package}")
    line = for_installed_version(written_rows()[family])
    if line is None:
        pytest.skip("was tried with another transformers")
    assert row(family, try_family(family)) == line


def test_all_families_are_tested_and_none_is_silently_wrong() -> None:
    rows = written_rows()
    assert rows.keys() >= causal_lm_types().keys()  # the page may be of a later transformers
    assert not [line for line in rows.values() if "WRONG" in line or "not tested" in line]


def test_notes_are_sentences_or_end_at_a_word() -> None:
    assert reason_of("KeyError: 'x'") == "KeyError: 'x'"
    assert reason_of("RuntimeError: Validation error for 'x': ValueError: a must be b. Call c() first.") == "a must be b"
    assert reason_of("ValueError: " + "word " * 40) == "word " * 24 + "…"


def test_attention_code_of_its_own_that_fails_on_a_shard_raises() -> None:
    model = tiny_model("reformer", "longspan")  # whose chunks of 9 tokens do not divide a shard
    with pytest.raises(ValueError, match="no attention layer used it") as raised:
        on_ranks(model, batch_of("plain"))
    assert "multiple of least common multiple chunk_length" in str(raised.value.__cause__)


def test_an_error_on_ranks_of_a_model_without_attention_is_its_own() -> None:
    model, batch = tiny_model("mamba", "longspan"), batch_of("plain")
    batch["input_ids"][0, 3] = model.config.vocab_size  # no such token
    with pytest.raises(IndexError, match="index out of range"):
        on_ranks(model, batch)


def test_a_class_of_a_removed_module_does_not_hide_the_error_of_its_model() -> None:
    model = tiny_model("reformer", "longspan")
    model.remote = type("Remote", (torch.nn.Module,), {"__module__": "removed"})()
    with pytest.raises(ValueError, match="its forward failed on this rank's shard"):
        on_ranks(model, batch_of("plain"))


def test_an_interrupt_is_not_blamed_on_attention_code_of_its_own() -> None:
    model = tiny_model("reformer", "longspan")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model.reformer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(model, batch_of("plain"))
