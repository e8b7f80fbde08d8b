"""docs/other-families.md says what encoders, encoder-decoders and vision-language classes of transformers do."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.integrations.other_families import classes, row, try_class, written_rows

SAMPLE = (("encoder", "bert"),)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "key" in metafunc.fixturenames:
        keys = list(classes()) if metafunc.config.getoption("--whole-grid") else list(SAMPLE)
        metafunc.parametrize("key", keys, ids=[" ".join(key) for key in keys])


def test_the_page_has_the_class_as_it_is(key: tuple[str, str]) -> None:
    assert row(key, try_class(key)) == written_rows()[key]


def test_no_class_is_silently_wrong() -> None:
    rows = written_rows()
    assert rows.keys() == classes().keys()
    assert not [line for line in rows.values() if "WRONG" in line]
