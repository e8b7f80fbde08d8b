"""What an attention operator must know besides tensors, behind one integer.

Custom operators take tensors and plain numbers. The programs and the kernel's name travel as a handle: the digest of their
contents. A handle therefore means the same thing in every process, and a stale one can be missing but never wrong.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Any

from torch import Tensor

from longspan._masks.joint import Joint, joint_of
from longspan._masks.program import Program

_JOINTS = 64  # sizes of captured tensors for which a gradient is kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """The programs of one attention call, and the kernel that was asked for. `lse`: lse is returned and may get a gradient."""

    mask: Program | None
    score: Program | None
    kernel: str
    lse: bool = True
    _joints: dict[tuple[tuple[int, ...], ...] | None, Joint] = field(default_factory=dict, init=False, repr=False)

    def joint(self, captured: Sequence[Tensor]) -> Joint | None:
        """The gradient of the score program, for captured tensors of these sizes. Kept."""
        if self.score is None:
            return None
        sizes = None if self.score.pointwise else tuple(tuple(t.shape) for t in captured)
        found = self._joints.get(sizes)
        if found is None:
            if len(self._joints) >= _JOINTS:
                self._joints.clear()
            found = self._joints[sizes] = joint_of(self.score, sizes)
        return found

    @cached_property
    def handle(self) -> int:
        parts = [p.key if p is not None else "" for p in (self.mask, self.score)]
        return int.from_bytes(hashlib.sha256("/".join([*parts, self.kernel, str(self.lse)]).encode()).digest()[:7], "big")


@dataclass
class SpecRegistry:
    """Handle → spec. Holds all but the latest weakly: a spec lives as long as a call, an autograd graph or compiled code needs it."""

    _live: weakref.WeakValueDictionary[int, Spec] = field(default_factory=weakref.WeakValueDictionary)
    _pinned: dict[int, Spec] = field(default_factory=dict)
    _latest: OrderedDict[tuple[str | None, str | None, str, bool], Spec] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=RLock)

    def of(self, mask: Program | None, score: Program | None, kernel: str, *, lse: bool = True) -> Spec:
        """The spec of these parts. The latest ones are kept: making and hashing one takes longer than a short call may."""
        key = (None if mask is None else mask.key, None if score is None else score.key, kernel, lse)
        with self._lock:
            found = self._latest.pop(key, None) or self.intern(Spec(mask=mask, score=score, kernel=kernel, lse=lse))
            self._latest[key] = found
            if len(self._latest) > 128:
                self._latest.popitem(last=False)
        return found

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
