"""The programs and the kernel name of an attention call, behind one integer.

Custom operators take tensors and numbers only. The handle of a `Spec` is a digest of its contents: it means the same in every process, and
a stale handle can be missing but never wrong.
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

_MAX_JOINTS = 64  # sizes of captured tensors for which a gradient program is cached


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """The programs of one attention call and the requested kernel.

    `lse`: whether lse is returned and may get a gradient. `invariant`: whether the call was made in `longspan.invariant()`.
    """

    mask: Program | None
    score: Program | None
    kernel: str
    lse: bool = True
    invariant: bool = False
    _joints: dict[tuple[tuple[int, ...], ...] | None, Joint] = field(default_factory=dict, init=False, repr=False)

    def joint(self, captured: Sequence[Tensor]) -> Joint | None:
        """The gradient program of the score program, for captured tensors of these sizes. Cached."""
        if self.score is None:
            return None
        sizes = None if self.score.pointwise else tuple(tuple(t.shape) for t in captured)
        joint = self._joints.get(sizes)
        if joint is None:
            if len(self._joints) >= _MAX_JOINTS:
                self._joints.clear()
            joint = self._joints[sizes] = joint_of(self.score, sizes)
        return joint

    @cached_property
    def handle(self) -> int:
        """56 bits of a digest of the contents."""
        parts = [p.key if p is not None else "" for p in (self.mask, self.score)]
        return int.from_bytes(
            hashlib.sha256("/".join([*parts, self.kernel, str(self.lse), str(self.invariant)]).encode()).digest()[:7], "big"
        )


@dataclass
class SpecRegistry:
    """Specs by handle. Holds the latest 128 and pinned ones; others live as long as a call or an autograd graph holds them."""

    _live: weakref.WeakValueDictionary[int, Spec] = field(default_factory=weakref.WeakValueDictionary)
    _pinned: dict[int, Spec] = field(default_factory=dict)
    _latest: OrderedDict[tuple[str | None, str | None, str, bool, bool], Spec] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=RLock)

    def of(self, mask: Program | None, score: Program | None, kernel: str, *, lse: bool = True, invariant: bool = False) -> Spec:
        """The spec of these parts, cached: hashing one takes longer than a short call."""
        key = (None if mask is None else mask.key, None if score is None else score.key, kernel, lse, invariant)
        with self._lock:
            spec = self._latest.pop(key, None) or self.intern(Spec(mask=mask, score=score, kernel=kernel, lse=lse, invariant=invariant))
            self._latest[key] = spec
            if len(self._latest) > 128:
                self._latest.popitem(last=False)
        return spec

    def intern(self, spec: Spec) -> Spec:
        """The registered spec with these contents: this one, or an equal one that was registered before."""
        return self._live.setdefault(spec.handle, spec)

    def pin(self, spec: Spec) -> Spec:
        """Register a spec forever: compiled code refers to it by handle only."""
        return self._pinned.setdefault(spec.handle, self.intern(spec))

    def __getitem__(self, handle: int) -> Spec:
        try:
            return self._live[handle]
        except KeyError:
            raise RuntimeError(
                f"longspan: no program is registered under handle {handle}. Call longspan.attention instead of its operators, and trace "
                "graphs that were compiled or exported in another process again in this one"
            ) from None
