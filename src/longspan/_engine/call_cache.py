"""A bounded cache of calls on one device that repeat: one lookup finds everything that does not depend on addresses and values.

The key of a call: the layouts of q, k, v and the sink; the mask; the score program and the layouts of the tensors that it captures; scale
and kernel; torch's settings that a result or a choice of kernel depends on. Calls that something intercepts (a compiler, modes,
transforms, tensor subclasses) and calls in `longspan.invariant()` have no key and are never prepared. A call is prepared when it is made
for the second time: preparation takes longer than a call. The key takes longer than a guard of torch over q, k and v, so recent calls are
looked up by guards first (`CallCache.recent`).

Entries belong to the mask and are dropped with it; masks that read no tensor (`Mask.value_key`) share one owner. A mask that reads tensors
of the caller is looked up by their versions too, and has no key where versions cannot be trusted (`longspan._engine.table_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._engine.compile_ahead import compiles_only
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.prepared_call import PreparedCall
from longspan._engine.streams import is_captured
from longspan._engine.values import PLAIN, CallOptions, CallTensors
from longspan._kernels.protocol import ALIGNMENT
from longspan._masks.algebra import Full, Mask
from longspan._masks.remembered_mask import remembered_mask
from longspan._torch_private import (
    deterministic_algorithms,
    deterministic_algorithms_warn_only,
    guarded_calls_are_intercepted,
    is_transformed_tensor,
    nothing_intercepts_calls,
    tensor_guard,
    tensors_can_be_guarded,
)

_RECENT_LAYOUTS = 4  # of calls with the same mask, scale and kernel
_KERNELS = frozenset(("auto", "hopper", "triton", "cpu"))  # the others depend on more settings, or do not use the operator


class _RecentScore(NamedTuple):
    """The last prepared call with a score program, looked up by a guard over the tensors that the program captures. Holds no tensor."""

    guard: Callable[..., bool]
    program_key: str
    call: PreparedCall


@dataclass(eq=False)
class CallEntry:
    """A call that was made. `calls`: prepared ones by score program and layouts of its captured tensors; None until the second call."""

    calls: dict[Hashable, PreparedCall | None] = field(default_factory=dict)
    _recent_score: _RecentScore | None = None

    def call(self, score: Hashable) -> PreparedCall | None:
        """The prepared call of a score program (`score_key`), if its mask's tensors are unmodified."""
        call = self.calls.get(score)
        return call if call is not None and call.is_current() else None

    def call_with_score(self, program_key: str, captured: Sequence[Tensor]) -> PreparedCall | None:
        """The prepared call of a score program and the tensors that it captures."""
        if not captured:
            return self.call(score_key(program_key, captured))
        recent = self._recent_score
        if (
            recent is not None and recent.program_key == program_key and recent.guard(*captured) and _are_aligned(captured)
            and recent.call.is_current()
        ):  # fmt: skip
            return recent.call
        if any(type(t) not in PLAIN or is_transformed_tensor(t) or t.is_neg() for t in captured):
            return None
        call = self.call(score_key(program_key, captured))
        if call is not None and _are_aligned(captured):
            self._recent_score = _RecentScore(tensor_guard(*captured), program_key, call)
        return call


class _Recent(NamedTuple):
    """A prepared call, looked up without its key: by a guard over q, k and v, and by torch's settings. Holds no tensor."""

    guard: Callable[..., bool]
    settings: Hashable
    owner: ReferenceType[Mask]
    entry: ReferenceType[CallEntry]


class CallKey(NamedTuple):
    """The key of a cached call: its owner, a mask, and its layouts and settings."""

    owner: Mask
    layouts: Hashable


class CallCache:
    """Prepared calls: at most `size` layouts per mask that reads tensors and as many for all other masks, `variants` programs of each."""

    def __init__(self, size: int = 64, variants: int = 16) -> None:
        self._variants = variants
        self._shared: Mask = Full()  # the owner of calls whose mask is part of the key
        self._entries: DerivedCache[Mask, CallEntry] = DerivedCache(size)
        self._size, self._shared_entries = size, self._entries.values_of(self._shared)
        self._recent: dict[Hashable, tuple[_Recent, ...]] = {}  # by mask, scale and kernel

    def recent(self, q: Any, k: Any, v: Any, options: Any) -> CallEntry | None:
        """The entry of a recent call with the same key, in a third of the time of `key` and `entry`; else None. Arguments as of `key`."""
        mask, _, scale, sink, kernel, max_scores, _, _ = options
        if sink is not None or max_scores or (scale is not None and type(scale) is not float) or type(kernel) is not str:
            return None
        if mask is None:
            owner, mask_key = self._shared, None
        elif isinstance(mask, Mask):
            mask_key = mask.value_key
            owner = self._shared if mask_key is not None else mask
        else:
            return None
        recents = self._recent.get((mask_key or id(owner), scale, kernel))
        if recents is None or not tensors_can_be_guarded(q, k, v):
            return None
        for recent in recents:
            if recent.guard(q, k, v) and recent.owner() is owner and recent.settings == _settings(q):
                plain = not guarded_calls_are_intercepted() and not is_invariant()
                return recent.entry() if plain and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT else None
        return None

    def note_recent(self, q: Tensor, k: Tensor, v: Tensor, options: Any, key: CallKey, entry: CallEntry) -> None:
        """Let `recent` find the entry of a key. Arguments as of `key`."""
        mask, _, scale, sink, kernel, *_ = options
        if sink is not None or not (mask is None or isinstance(mask, Mask)) or q is k or q is v or k is v:  # a guard needs distinct objects
            return
        recent_key = (mask.value_key if mask is not None else None) or id(key.owner), scale, kernel
        older = [r for r in self._recent.get(recent_key, ()) if r.entry() is not None]
        if len(self._recent) >= self._size:
            self._recent.clear()
        recent = _Recent(tensor_guard(q, k, v), _settings(q), ref(key.owner), ref(entry))
        self._recent[recent_key] = recent, *older[: _RECENT_LAYOUTS - 1]

    def key(self, q: Any, k: Any, v: Any, options: Any) -> CallKey | None:
        """The key of a call whose arguments are not checked yet; None if it is not to be cached. options: `AttendOptions`."""
        mask, _, scale, sink, kernel, max_scores, _, _ = options
        if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or not nothing_intercepts_calls():
            return None
        # Tensors left over from a transform, which only the operator unwraps, and lazily negated views, copied at every call.
        if is_transformed_tensor(q) or is_transformed_tensor(k) or is_transformed_tensor(v) or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if (scale is not None and (type(scale) is not float or not scale)) or max_scores or is_invariant():
            return None
        owner, value_key, sink_layout = self._shared, None, None
        if mask is not None:
            if not isinstance(mask, Mask):
                try:
                    mask = remembered_mask(mask)
                except Exception:  # a mod that cannot be traced: the checks come first, then tracing raises again
                    return None
            if mask is None or mask.has_selection:  # a selection is new at every call
                return None
            value_key = mask.value_key
            owner = mask if value_key is None else owner
        try:
            if kernel not in _KERNELS or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
                return None
            if sink is not None:
                if type(sink) not in PLAIN or is_transformed_tensor(sink) or sink.is_neg():
                    return None
                sink_layout = sink.dtype, sink.shape, sink.stride(), sink.device
            return CallKey(owner, (
                q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
                sink_layout, value_key, scale, kernel, torch.is_inference_mode_enabled(), _settings(q),
            ))  # fmt: skip
        except (RuntimeError, NotImplementedError, TypeError):  # sparse or nested tensors, arguments without a hash: the checks will raise
            return None

    def entry(self, key: CallKey) -> CallEntry | None:
        """The calls of a key, if there was one."""
        if key.owner is self._shared and 2 * len(self._shared_entries) < self._size:  # uses need not be noted yet
            return self._shared_entries.get(key.layouts)
        return self._entries.peek(key.owner, key.layouts)

    def add(self, key: CallKey, score: Hashable, inputs: CallTensors, options: CallOptions) -> None:
        """Note a call that was made. Prepare it if it was noted before; not in a CUDA graph capture, to whose memory its tensors would
        belong, nor before its kernels are compiled.
        """
        fixed_mask = key.owner is self._shared or key.owner.reads_copies
        if not fixed_mask and not _versions_tell(key.owner, inputs.mask_captured):
            return
        if any(t.device != inputs.q.device for t in inputs.score_captured):  # single numbers, which are moved at every call
            return
        if is_captured(inputs.q) or compiles_only():
            return
        entry = self._entries.get(key.owner, key.layouts, CallEntry)
        if score not in entry.calls:
            if len(entry.calls) >= self._variants:
                entry.calls.clear()
            entry.calls[score] = None
        else:
            entry.calls[score] = PreparedCall(inputs, options, fixed_mask=fixed_mask)


def _settings(q: Tensor) -> Hashable:
    """Settings of torch that a result or a choice of kernel depends on."""
    deterministic = deterministic_algorithms(), deterministic_algorithms_warn_only()
    return (*deterministic, torch.backends.cuda.matmul.fp32_precision) if q.dtype == torch.float32 else deterministic


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return not addresses % ALIGNMENT


def score_key(program_key: str | None, captured: Sequence[Tensor]) -> Hashable:
    """The key of a score program and of the layouts of the tensors that it captures."""
    if program_key is None:
        return None
    return program_key, *((t.dtype, t.shape, t.stride(), t.device, t.data_ptr() % ALIGNMENT) for t in captured)


def _versions_tell(mask: Mask, captured: Sequence[Tensor]) -> bool:
    """Whether versions of the tensors that a mask's program reads tell all modifications: they must be the caller's own tensors, not
    copies on another device or results of a preamble, and torch must count their modifications.
    """
    traced = mask.traced
    sources = {id(t) for t in traced.sources}
    return traced.preamble is None and all(id(t) in sources and _is_versioned(t) for t in captured)


def _is_versioned(tensor: Tensor) -> bool:
    """Whether torch counts all modifications of a tensor."""
    return tensor.is_cuda and not tensor.is_inference()


calls = CallCache()
