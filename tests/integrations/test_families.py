"""docs/families.md says what each family of transformers does."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.integrations.families import _reason, causal_lm_types, row, try_family, written_rows

SAMPLE = ("opt", "lfm2")  # right but for packed position_ids; layers that are not attention


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(causal_lm_types()) if metafunc.config.getoption("--whole-grid") else SAMPLE)


def test_the_page_has_the_family_as_it_is(family: str) -> None:
    assert row(family, try_family(family)) == written_rows()[family]


def test_no_family_is_silently_wrong() -> None:
    rows = written_rows()
    assert rows.keys() == causal_lm_types().keys()
    assert not [line for line in rows.values() if "WRONG" in line]


def test_notes_are_sentences_or_end_at_a_word() -> None:
    assert _reason("KeyError: 'x'") == "KeyError: 'x'"
    assert _reason("RuntimeError: Validation error for 'x': ValueError: a must be b. Call c() first.") == "a must be b"
    assert _reason("ValueError: " + "word " * 40) == "word " * 24 + "…"
