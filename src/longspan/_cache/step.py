"""`CacheStep`: room for the new tokens of one model step, used once by every layer.

Legend: n sequences of the step, T new tokens in all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from longspan._kernels.paged import QueryRanges

if TYPE_CHECKING:
    from longspan._cache.kv_cache import KVCache


T = TypeVar("T")
_MOVED = "advance: the cache or its page table has grown since the step's layers were computed; capture the graph again"


@dataclass(kw_only=True, eq=False)
class CacheStep:
    """The new tokens of one model step. Made by `KVCache.step`; passed to `longspan.attention(cache=step, layer=i)` once per layer.

    Attributes:
        cache: The cache that the step writes into.
        ids: Handles of its sequences.
        ranges: Positions of the new tokens in their sequences.
        ragged: Whether counts were given one by one: `positions` is [1, T] then, else [n, count].
        passed: Over a mesh, by layer: which tensors ranks passed to each other, "KV", "partial results" or "KV and partial results".
    """

    cache: KVCache = field(repr=False)
    ids: tuple[int, ...]
    ranges: QueryRanges
    ragged: bool
    passed: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _used: list[int] = field(default_factory=list, init=False, repr=False)  # layers that were written, ascending
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)  # a few per mask and sequence
    _addresses: tuple[int, int, int] | None = field(default=None, init=False, repr=False)  # that a CUDA graph reads
    _prepared: tuple[int, dict[Hashable, Any]] = field(
        default_factory=lambda: (-1, {}), init=False, repr=False
    )  # of a version of the page table
    last_call: Any = field(default=None, init=False, repr=False)  # of the engine: the prepared call that was made last
    _checked: int = field(default=-1, init=False, repr=False)  # the cache's version at the last complete check

    def __getstate__(self) -> dict[str, Any]:
        """Without prepared calls and addresses: a copy belongs to a copy of the cache, in other memory."""
        empty: dict[str, Any] = {"_derived": {}, "_addresses": None, "_prepared": (-1, {}), "last_call": None, "_checked": -1}
        return {name: empty.get(name, value) for name, value in vars(self).items() if name != "positions"}

    @cached_property
    def positions(self) -> Tensor:
        """Position of each new token in its sequence, int64 on the cache's device: [n, count], or [1, T] if `ragged`."""
        shape = (1, -1) if self.ragged else (len(self.ids), self.ranges.counts[0] if self.ids else 0)
        return self.ranges.positions.view(shape)

    def prepared_calls(self) -> dict[Hashable, Any]:
        """Prepared calls of this step by key. Empty after the page table has moved."""
        if self._prepared[0] != self.cache.table_version:
            self._prepared = self.cache.table_version, {}
        return self._prepared[1]

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made once for all layers; made at every call if the key is None."""
        if key is None:
            return make()
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[no-any-return]

    def advance(self) -> None:
        """Make room for the next tokens of the same sequences, in the same tensors: before each further replay of a CUDA graph.

        Counts as a finished step: the replay writes all layers.

        Raises:
            RuntimeError: The step was made without longest=…, not all layers were captured, there are not enough free pages, or the cache
                has grown, so that the graph would read old memory.
            ValueError: A sequence would have more than `longest` tokens, was freed, or has another unfinished step.
        """
        ranges, cache = self.ranges, self.cache
        if ranges.longest is None:
            raise RuntimeError("advance: expected a step made with KVCache.step(…, longest=…)")
        if len(self._used) < cache.layers:
            raise RuntimeError(f"advance: expected all {cache.layers} layers of the step to be captured, got {len(self._used)}")
        if self._addresses != cache.addresses:
            raise RuntimeError(_MOVED)
        waiting = [sequence_id for sequence_id in self.ids if cache.sequence(sequence_id).unfinished]
        if waiting:
            raise ValueError(f"advance: expected no other unfinished step, got one of sequences {waiting}: write all of its layers first")
        counts = ranges.counts if self.ragged else ranges.counts[0]
        new = cache.step(self.ids, counts, longest=ranges.longest)
        for sequence_id in self.ids:
            cache.sequence(sequence_id).unfinished.remove(new)
        if self._addresses != cache.addresses:
            cache.truncate(self.ids, new.ranges.starts)
            raise RuntimeError(_MOVED)
        device = {name: getattr(ranges, name).copy_(getattr(new.ranges, name)) for name in ("device_ranges", "positions", "token_rows")}
        self.ranges = replace(new.ranges, **device)
        self._checked = -1

    def check_layer(self, layer: int) -> None:
        """Raise unless `layer` is the next to be written by this step."""
        if self._checked != self.cache.version:
            self._check_sequences(layer)
        used = self._used
        if not used or layer > used[-1]:
            return
        if layer in used:
            raise RuntimeError(f"cache: layer {layer} of this step was computed before; make a new step with KVCache.step for new tokens")
        raise RuntimeError(f"cache: layers of a step run in ascending order, got layer {layer} after layer {used[-1]}")

    def _check_sequences(self, layer: int) -> None:
        """Raise if a sequence was freed or truncated, or if an earlier step has not written this layer."""
        alone = True
        for sequence_id in self.ids:
            sequence = self.cache.sequence(sequence_id)
            if self not in sequence.unfinished:
                raise RuntimeError(f"cache: sequence {sequence_id} was truncated after this step was made; make a new step")
            for earlier in sequence.unfinished[: sequence.unfinished.index(self)]:
                alone = False
                if layer not in earlier._used:
                    raise RuntimeError(
                        f"cache: steps of a sequence run in order: an earlier step of sequence {sequence_id} has not written layer {layer}"
                    )
        if alone:
            self._checked = self.cache.version

    def finish_layer(self, layer: int) -> None:
        """Record that a layer was written. After the last layer, the step is finished."""
        cache, used = self.cache, self._used
        if not used and self.ranges.longest is not None:
            self._addresses = cache.addresses
        used.append(layer)
        if len(used) == cache.layers:
            for sequence_id in self.ids:
                cache.sequence(sequence_id).unfinished.remove(self)


def tokens_first(x: Tensor) -> Tensor:
    """[n, G, count, D] or [1, G, T, D] as [T, G, D]."""
    return x[0].transpose(0, 1) if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)
