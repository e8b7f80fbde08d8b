"""Fixtures of prepared calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # `tests/conftest.py` prepares a process before it imports longspan
    from longspan._engine.call_cache import CallCache
    from longspan._engine.prepared_call import PreparedCall


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> CallCache:
    """An empty cache for calls of `longspan.attention`."""
    from longspan._engine import attention
    from longspan._engine.call_cache import CallCache

    cache = CallCache()
    monkeypatch.setattr(attention, "calls", cache)
    return cache


@pytest.fixture
def prepared(fresh: CallCache, monkeypatch: pytest.MonkeyPatch) -> list[PreparedCall]:
    """The prepared calls that were used."""
    from longspan._engine.prepared_call import PreparedCall

    used: list[PreparedCall] = []
    call = PreparedCall.__call__
    monkeypatch.setattr(PreparedCall, "__call__", lambda self, *args, **kwargs: (used.append(self), call(self, *args, **kwargs))[1])
    return used
