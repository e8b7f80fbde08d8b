"""Fixtures of prepared calls."""

from __future__ import annotations

import pytest

from longspan._engine.call_cache import CallCache
from longspan._engine.prepared_call import PreparedCall


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> CallCache:
    """An empty cache for calls of `longspan.attention`."""
    from longspan._engine import attention

    cache = CallCache()
    monkeypatch.setattr(attention, "calls", cache)
    return cache


@pytest.fixture
def prepared(fresh: CallCache, monkeypatch: pytest.MonkeyPatch) -> list[PreparedCall]:
    """The prepared calls that were used."""
    used: list[PreparedCall] = []
    call = PreparedCall.__call__
    monkeypatch.setattr(PreparedCall, "__call__", lambda self, *args, **kwargs: (used.append(self), call(self, *args, **kwargs))[1])
    return used
