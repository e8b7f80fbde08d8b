"""Sizes of an attention call, and sizes that a mask is valid for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of an attention call. kv_heads: None where not known."""

    q_len: int
    kv_len: int
    batch: int
    heads: int
    kv_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Sizes that a mask is valid for; None means any size.

    Attributes:
        q_len: Number of queries.
        kv_len: Number of keys.
        batch: Batch size.
        heads: Number of query heads.
    """

    q_len: int | None = None
    kv_len: int | None = None
    batch: int | None = None
    heads: int | None = None

    def check(self, what: str, **got: int) -> None:
        """Raise ValueError for the first size in `got` that differs from this extent; `what` names the mask in the message."""
        for name, size in got.items():
            expected = getattr(self, name)
            if expected is not None and expected != size:
                raise ValueError(f"{what} was made for {name}={expected}, got {name}={size}: make a mask for these sizes")

    def joined(self, other: Extent, what: str) -> Extent:
        """Extent of a combination of two masks; raises ValueError if a size differs. `what` names the combination in the message."""
        sizes: dict[str, int | None] = {}
        for name in ("q_len", "kv_len", "batch", "heads"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and a != b:
                raise ValueError(
                    f"{what}: the parts were made for different sizes, {name}={a} and {name}={b}: make both for the same sizes"
                )
            sizes[name] = b if a is None else a
        return Extent(**sizes)
