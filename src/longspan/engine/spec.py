"""What an attention operator must know besides tensors, behind one integer.

Custom operators take tensors and plain numbers. The programs and the kernel's name travel as a handle: the digest of their
contents. A handle therefore means the same thing in every process, and a stale one can be missing but never wrong.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from functools import cached_property

from longspan.masks.joint import Joint, joint_of
from longspan.masks.program import Program


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """The programs of one attention call, and the kernel that was asked for."""

    mask: Program | None
    score: Program | None
    kernel: str

    @cached_property
    def joint(self) -> Joint | None:
        return None if self.score is None else joint_of(self.score)

    @cached_property
    def handle(self) -> int:
        parts = [p.key if p is not None else "" for p in (self.mask, self.score)]
        return int.from_bytes(hashlib.sha256("/".join([*parts, self.kernel]).encode()).digest()[:7], "big")


@dataclass
class SpecRegistry:
    """Handle → spec. Holds specs weakly: a spec lives as long as a call, an autograd graph or a compiled function needs it."""

    _live: weakref.WeakValueDictionary[int, Spec] = field(default_factory=weakref.WeakValueDictionary)
    _pinned: dict[int, Spec] = field(default_factory=dict)

    def intern(self, spec: Spec) -> Spec:
        """The registered spec with these contents: this one, or an equal one that is there already (with its gradient traced)."""
        return self._live.setdefault(spec.handle, spec)

    def pin(self, spec: Spec) -> Spec:
        """Keep a spec for good: compiled code refers to it by number alone."""
        return self._pinned.setdefault(spec.handle, self.intern(spec))

    def __getitem__(self, handle: int) -> Spec:
        try:
            return self._live[handle]
        except KeyError:
            raise RuntimeError(
                f"longspan: no program is registered under handle {handle}. Operators of longspan are called through "
                "longspan.attention and its siblings; a graph that was compiled or exported in another process must be traced again here"
            ) from None
