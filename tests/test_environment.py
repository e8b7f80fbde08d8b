"""Switches of the environment: 0 and 1 are honoured, other words are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import longspan as ls
from longspan._comm.watchdog import Watchdog
from longspan._environment import switch


def prebuilt() -> Any:
    pytest.importorskip("triton")
    from longspan._kernels.gpu.prebuilt import may_be_prebuilt, prebuilt_kernel

    with pytest.raises(ValueError, match="LONGSPAN_PREBUILT"):
        prebuilt_kernel(None, None, {})
    return may_be_prebuilt(None, ())


def isolation() -> Any:
    pytest.importorskip("triton.experimental.gluon")
    from longspan._kernels.hopper.isolation import isolation_demanded, isolation_enabled

    with pytest.raises(ValueError, match="LONGSPAN_ISOLATE"):
        isolation_demanded()
    return isolation_enabled()


def watchdog() -> Any:
    made = Watchdog()
    with pytest.raises(ValueError, match="LONGSPAN_WATCHDOG"):
        made._start()
    return made._start()  # raises again: the first error starts nothing


READERS: dict[str, Callable[[], Any]] = {
    "LONGSPAN_EXPLAIN": lambda: ls.plan(ls.causal(), 100, ls.Mesh.abstract(3, rank=2)),
    "LONGSPAN_WATCHDOG": watchdog,
    "LONGSPAN_ISOLATE": isolation,
    "LONGSPAN_PREBUILT": prebuilt,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("word", ["false", "off", "true", "2", " 1"])
def test_other_words_are_refused_by_name(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, word)
    with pytest.raises(ValueError, match=f"^{name}: expected 0 or 1, got {word!r}$"):
        READERS[name]()


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, want in ((None, (True, False)), ("", (True, False)), ("0", (False, False)), ("1", (True, True))):
        if text is None:
            monkeypatch.delenv("LONGSPAN_ISOLATE", raising=False)
        else:
            monkeypatch.setenv("LONGSPAN_ISOLATE", text)
        assert (switch("LONGSPAN_ISOLATE", default=True), switch("LONGSPAN_ISOLATE", default=False)) == want
