"""The examples of models that choose keys at run time, on tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("name", ["moba", "nsa", "dsa"])
def test_an_example_matches_its_dense_definition(name: str, capsys: Any) -> None:
    from importlib import import_module

    import_module(f"examples.{name}").main(tokens=150)
    assert "all match" in capsys.readouterr().out
