"""Masks that command lines name."""

from __future__ import annotations

from typing import Any

NUMBER = 7


def even(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (kv // 64 % 2 == 0)
