"""`KVCache`: keys and values of many sequences in pages of a fixed size.

    host                                                     device
    ────                                                     ──────
    CachedSequence: pages, length, unfinished steps          k [layers, pages, G, page_size, D]
    PagePool: free pages, references                         v [layers, pages, G, page_size, E]
    PageAccounts: pages that a step takes
    step(ids, counts): takes pages, one upload       ──►     table [rows, width] int32, ranges of the step

Nothing here reads from the device. Page p of a sequence holds its tokens p · page_size … (p + 1) · page_size − 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from longspan._cache.arguments import integer, integers, is_several, one_each
from longspan._cache.copies import DeepCopied
from longspan._cache.page_accounts import PageAccounts, TakenPages
from longspan._cache.page_pool import PagePool
from longspan._cache.sequence import CachedSequence
from longspan._cache.step import CacheStep
from longspan._comm.agreement import raising_on_all_ranks
from longspan._comm.mesh import context_mesh
from longspan._kernels.paged import FP8, PagedKV, QueryRanges, SpreadPages, indexable, query_ranges
from longspan._torch_modes import default_modes

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class KVCache(DeepCopied):
    """A paged KV cache for inference: sequences grow, fork, shrink and end; `longspan.attention(cache=step, layer=i)` reads and writes it.

    Sequences that share a prefix share its pages; a page that several sequences hold is copied before one of them writes to it.
    Calls and attention must run on one CUDA stream.

    Args:
        pages: Number of pages, of each rank if there is a mesh.
        page_size: Tokens per page.
        layers: Number of attention layers.
        kv_heads: KV heads of a layer.
        head_dim: Head dim of keys (and queries).
        value_dim: Head dim of values; `head_dim` by default.
        shared_kv: Values are the first `value_dim` elements of keys, and stored once: the latent vectors of MLA. `attention` takes
            v = k[..., :value_dim] then.
        window: No token sees further back than the last `window` tokens, itself included: pages before are given back. A mask that
            reaches further raises.
        dtype: Of keys and values; torch's default dtype if None. With `torch.float8_e4m3fn`, pages store one byte per element,
            k / k_scale and v / v_scale rounded to nearest; q, k and v have another dtype. Finite elements are clamped to ±448 · scale.
        k_scale, v_scale: Positive; only for `torch.float8_e4m3fn`. For scales per layer, pass k / a and v / b to `attention` with
            scale = a · scale, and multiply its output by b.
        device: Of keys and values; torch's default device if None.
        mesh: A DeviceMesh, a ProcessGroup or a virtual mesh, over whose ranks each sequence's pages are spread in turn. All ranks make
            the same calls, and pass all new tokens to `attention`. Of axes ("tp", "cp"), the pages are spread along "cp", and `kv_heads` is
            the number of KV heads of a rank.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A size is below 1, or the dtype is not supported.

    Example:
        >>> cache = longspan.KVCache(pages=64, layers=1, kv_heads=2, head_dim=32, dtype=torch.float32)
        >>> ids = cache.allocate(2)
        >>> step = cache.step(ids, 3)
        >>> step.positions.tolist()
        [[0, 1, 2], [0, 1, 2]]
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int = 64,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        shared_kv: bool = False,
        window: int | None = None,
        dtype: torch.dtype | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        device: torch.device | str | None = None,
        mesh: Any = None,
    ) -> None:
        ranks = None if mesh is None else context_mesh(mesh)
        self.mesh = None if ranks is None or ranks.size == 1 else ranks
        self.ranks, self._rank = (1, 0) if self.mesh is None else (self.mesh.size, self.mesh.rank)
        sizes = {"pages": pages, "page_size": page_size, "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        checked = {name: integer(size, name, least=1) for name, size in sizes.items()}
        pages, self.page_size, self.layers, self.kv_heads, self.head_dim = checked.values()
        self.value_dim = self.head_dim if value_dim is None else integer(value_dim, "value_dim", least=1)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in (*_DTYPES, FP8):
            raise ValueError(f"dtype: expected one of {', '.join(map(str, (*_DTYPES, FP8)))}, got {dtype}")
        self.scales = _checked_scales(k_scale, v_scale, self.dtype)
        self.window = None if window is None else integer(window, "window", least=1)
        self.shared_kv = bool(shared_kv)
        if self.shared_kv and self.scales is not None:
            raise ValueError(f"shared_kv: expected a dtype of 16 bits or more, got {self.dtype}")
        if self.shared_kv and self.value_dim > self.head_dim:
            raise ValueError(f"shared_kv: expected value_dim of at most head_dim = {self.head_dim}, got {self.value_dim}")
        self._set_pages(*self._empty_pages(pages, device))
        self.device = self._k.device
        with torch.inference_mode(False):
            self._table = torch.zeros((0, 0), dtype=torch.int32, device=self.device)
        self._pool = PagePool(pages, self.ranks)
        self._accounts = PageAccounts(self._pool, self.page_size)
        self._sequences: dict[int, CachedSequence] = {}
        self._free_rows: list[int] = []
        self._next_id = 0
        self.version = 0  # counts changes of sequences
        self.table_version = 0  # counts moves of the pages and of the page table in memory
        self.prepared: dict[Hashable, Any] = {}  # launches of calls that repeat; the engine bounds it

    def _empty_pages(self, pages: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        shape = (self.layers, pages, self.kv_heads, self.page_size)
        with torch.inference_mode(False):  # an inference tensor could not be written to in torch.no_grad()
            if self.shared_kv:
                # Zeros: TMA loads whole tiles, and a NaN in a slot without a token would cost a second pass over its tile's split.
                k = torch.zeros((*shape, self.head_dim), dtype=self.dtype, device=device)
                return k, k[..., : self.value_dim]
            k = torch.empty((*shape, self.head_dim), dtype=self.dtype, device=device)
            return k, torch.empty((*shape, self.value_dim), dtype=self.dtype, device=device)

    def _set_pages(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        size = k.element_size()
        self._first_layer = k.data_ptr(), v.data_ptr(), k.stride(0) * size, v.stride(0) * size  # addresses and bytes of a layer

    def __getstate__(self) -> dict[str, Any]:
        own = {"prepared", "_first_layer", "_v" if self.shared_kv else ""}  # addresses of this cache's memory, and a view of it
        state = {name: value for name, value in vars(self).items() if name not in own}
        if self.scales is not None:  # pickle does not support tensors of FP8
            state |= {"_k": indexable(self._k), "_v": indexable(self._v)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        with default_modes():  # loaded in inference mode: see `_empty_pages`
            state = {name: x.clone() if isinstance(x, Tensor) and x.is_inference() else x for name, x in state.items()}
            if state["scales"] is not None:
                state |= {name: state[name].view(state["dtype"]) for name in ("_k", "_v")}
        vars(self).update(state, prepared={}, device=state["_k"].device)
        self._set_pages(self._k, self._k[..., : self.value_dim] if self.shared_kv else self._v)

    def grow(self, pages: int) -> None:
        """Add pages, of each rank if there is a mesh. Copies the pages that exist: double them rather than adding a few at a time.

        Raises:
            ValueError: `pages` is below 1.
        """
        pages = integer(pages, "grow: pages", least=1)
        before, (k, v) = self._k.shape[1], self._empty_pages(self._k.shape[1] + pages, self.device)
        k[:, :before] = self._k
        if not self.shared_kv:
            v[:, :before] = self._v
        self._set_pages(k, v)
        self.table_version += 1
        self.prepared.clear()  # launches that assume the alignment of the layers' old addresses
        self._pool.grow(pages)

    @property
    def pages(self) -> int:
        """Number of pages of a rank."""
        return self._k.shape[1]

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence holds, of all ranks."""
        return self._pool.free_of_all

    def allocate(self, n: int) -> list[int]:
        """Handles of n new, empty sequences. A handle is never used again.

        Raises:
            ValueError: n is negative.
        """
        n = integer(n, "allocate: n", least=0)
        self._grow_table(rows=len(self._sequences) + n, width=self._table.shape[1])
        return [self._add(CachedSequence(row=self._free_rows.pop(), shift=self._next_id % self.ranks)) for _ in range(n)]

    def lengths(self, ids: Any) -> Tensor:
        """Number of tokens of each sequence, int64 [n] on the cache's device. Tokens of a step count as soon as the step is made."""
        values = [s.length for s in self._selected(ids, "lengths")]
        host = torch.tensor(values, dtype=torch.int64, device="cpu")
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def step(self, ids: Any, counts: Any, *, longest: int | None = None) -> CacheStep:
        """Room for new tokens at the end of sequences: once per model step, for all layers.

        Args:
            ids: Handles of different sequences.
            counts: New tokens of every sequence: one int, or one per sequence.
            longest: For a step that a CUDA graph captures: the largest number of tokens to which a sequence may grow. `step.advance()`
                before each further replay makes room for the next tokens.

        Returns:
            A step; `step.positions` are the positions of the new tokens.

        Raises:
            RuntimeError: There are not enough free pages. Nothing has changed then; free or truncate sequences, then try again.
            ValueError: A sequence does not exist, was freed or is named twice, or a count is negative.

        Over a mesh, an error of one rank raises on all: here, or in the `attention` of this step.
        """
        with raising_on_all_ranks(self.mesh):
            return self._step(ids, counts, longest)

    def _step(self, ids: Any, counts: Any, longest: int | None) -> CacheStep:
        ids = tuple(integers(ids, "step: ids"))
        sequences = self._different(ids, "step")
        ragged = is_several(counts)
        counts = one_each(counts, len(ids), "step: counts")
        grown = max((s.length + c for s, c in zip(sequences, counts, strict=True)), default=0)
        if longest is not None and grown > integer(longest, "step: longest", least=1):
            raise ValueError(f"step: expected sequences of at most longest={longest} tokens, got {grown}")
        wanted = self._accounts.wanted(sequences, counts)
        self._accounts.check_room(wanted, sum(counts))
        width = max((len(w.sequence.pages) + w.more for w in wanted), default=0)
        if longest is not None:
            width = max(width, self._accounts.pages_of(longest))
        self._grow_table(rows=len(self._sequences), width=width)
        changes = [self._accounts.take(w) for w in wanted]
        starts = [s.length for s in sequences]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        try:
            with default_modes():
                ranges = self._uploaded_ranges(sequences, starts, lengths, changes)
        except BaseException:  # such as out of memory: the caller may free memory and try again
            for sequence, change in zip(sequences, changes, strict=True):
                self._accounts.give_back(sequence, change)
            raise
        step = CacheStep(cache=self, ids=ids, ranges=replace(ranges, longest=longest), ragged=ragged)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
            sequence.unfinished.append(step)
        self._release_before_window(ids, sequences)
        self.version += 1
        return step

    def _release_before_window(self, ids: tuple[int, ...], sequences: list[CachedSequence]) -> None:
        """Give back the pages that neither an unfinished step nor a later one reads."""
        if self.window is None:
            return
        for sequence_id, sequence in zip(ids, sequences, strict=True):
            oldest = sequence.unfinished[0]
            start = oldest.ranges.starts[oldest.ids.index(sequence_id)]
            self._pool.release(sequence.release_first(max(0, start - self.window + 1) // self.page_size))

    def missing_pages(self, ids: Any, counts: Any) -> int:
        """Pages that `grow` must add before `step(ids, counts)` has room; 0 if it has."""
        sequences = self._selected(ids, "missing_pages")
        counts = one_each(counts, len(sequences), "missing_pages: counts")
        needed = self._accounts.needed(self._accounts.wanted(sequences, counts))
        return max(0, *(count - self._pool.free(rank) for rank, count in enumerate(needed)))

    def _uploaded_ranges(
        self, sequences: list[CachedSequence], starts: list[int], lengths: list[int], changes: list[TakenPages]
    ) -> QueryRanges:  # fmt: skip
        """The ranges of a step. Also copies pages and then changes the page table, on the device, where they belong to this rank."""
        pool, rank = self._pool, self._rank
        entries = [  # row, column and page of changed entries of the table
            (s.row, column, s.pages[column])
            for s, new in zip(sequences, changes, strict=True)
            for column in range(new.first - (new.copy is not None), len(s.pages))
        ]
        updates = [(row, column, pool.local(page)) for row, column, page in entries if pool.owner(page) == rank]
        copies = [
            (pool.local(new.shared), pool.local(new.copy))
            for new in changes
            if new.shared is not None and new.copy is not None and pool.owner(new.copy) == rank
        ]
        spread = None
        if self.ranks > 1:
            spread = SpreadPages(ranks=self.ranks, rank=rank, shifts=tuple(s.shift for s in sequences), page_size=self.page_size)
        host = [torch.tensor(numbers, dtype=torch.int64) for numbers in (updates, copies)]
        ranges, (changed, moved) = query_ranges(starts, lengths, [s.row for s in sequences], host, self.device, spread)
        if copies:
            for x in (self._k,) if self.shared_kv else (self._k, self._v):
                elements = indexable(x)
                elements[:, moved[:, 1]] = elements[:, moved[:, 0]]
        if updates:
            self._table[changed[:, 0], changed[:, 1]] = changed[:, 2].int()
        return ranges

    def fork(self, id: int) -> int:
        """The handle of a new sequence with the tokens of an existing one. Pages are shared until one of the two writes to them.

        Raises:
            RuntimeError: A step of the sequence has not written all layers.
            ValueError: The sequence does not exist, or was freed.
        """
        (parent,) = self._selected([id], "fork")
        self._check_finished(id, parent, parent.length, "fork")
        (child_id,) = self.allocate(1)
        child = self._sequences[child_id]
        child.pages, child.length, child.shift = list(parent.pages), parent.length, parent.shift
        child.released = parent.released
        self._pool.share(child.held_pages)
        self._table[child.row].copy_(self._table[parent.row])
        self.version += 1
        return child_id

    def truncate(self, ids: Any, lengths: Any) -> None:
        """Drop the last tokens of sequences, such as rejected drafts.

        Args:
            ids: Handles of different sequences.
            lengths: Number of tokens that remain: one int, or one per sequence.

        Raises:
            ValueError: A length is negative or beyond the present length, or a sequence does not exist or was freed.
            RuntimeError: Tokens would remain that a step has not written in all layers.
        """
        sequences, lengths = self._checked_truncation(ids, lengths)
        for sequence, length in zip(sequences, lengths, strict=True):
            keep = self._accounts.pages_of(length)
            self._pool.release(sequence.pages[max(keep, sequence.released) :])
            del sequence.pages[keep:]
            sequence.released = min(sequence.released, keep)
            sequence.length = length
            sequence.unfinished.clear()
        self.version += 1

    def check_truncate(self, ids: Any, lengths: Any) -> None:
        """Raise what `truncate` would raise; change nothing."""
        self._checked_truncation(ids, lengths)

    def _checked_truncation(self, ids: Any, lengths: Any) -> tuple[list[CachedSequence], list[int]]:
        ids = integers(ids, "truncate: ids")
        sequences = self._different(ids, "truncate")
        lengths = one_each(lengths, len(ids), "truncate: lengths")
        for sequence_id, sequence, length in zip(ids, sequences, lengths, strict=True):
            if length > sequence.length:
                raise ValueError(f"truncate: expected at most the present length {sequence.length} of sequence {sequence_id}, got {length}")
            self._check_finished(sequence_id, sequence, length, "truncate")
            first = sequence.released * self.page_size
            if length and self.window is not None and max(0, length - self.window + 1) < first:
                raise ValueError(
                    f"truncate: expected 0 or at least {first + self.window - 1} tokens of sequence {sequence_id}, got {length}: the pages "
                    f"before token {first} were given back, as they were outside of the window of {self.window} tokens"
                )
        return sequences, lengths

    def free(self, ids: Any) -> None:
        """End sequences and give back their pages.

        Raises:
            ValueError: A sequence does not exist, was freed, or is named twice.
        """
        ids = integers(ids, "free: ids")
        for sequence_id, sequence in zip(ids, self._different(ids, "free"), strict=True):
            self._pool.release(sequence.held_pages)
            self._free_rows.append(sequence.row)
            del self._sequences[sequence_id]
        self.version += 1

    def sequence(self, id: int) -> CachedSequence:
        """The sequence of a handle."""
        try:
            return self._sequences[id]
        except KeyError:
            reason = f"sequence {id} was freed" if id < self._next_id else f"no sequence has the handle {id}"
            raise ValueError(f"cache: {reason}; expected a handle from KVCache.allocate or KVCache.fork") from None

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of keys, values and the page table: a CUDA graph reads these."""
        return self._k.data_ptr(), self._v.data_ptr(), self._table.data_ptr()

    @property
    def table_shape(self) -> torch.Size:
        """Rows and columns of the page table."""
        return self._table.shape

    def layer_addresses(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's keys and values."""
        k, v, k_bytes, v_bytes = self._first_layer
        return k + layer * k_bytes, v + layer * v_bytes

    def layer_pages(self, layer: int) -> PagedKV:
        """Keys, values and page table of a layer."""
        return PagedKV(k=self._k[layer], v=self._v[layer], table=self._table, shared=self.shared_kv, scales=self.scales)

    def check_tensors(self, k: Tensor, v: Tensor, layer: Any) -> int:
        """Raise unless k and v fit into the cache. Returns the layer as an int."""
        if layer is None:
            raise TypeError("layer: expected the layer's number with cache=…, got None")
        layer = integer(layer, "layer", least=0)
        if layer >= self.layers:
            raise ValueError(f"layer: expected 0 to {self.layers - 1}, got {layer}")
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            if x.dtype not in (_DTYPES if self.scales else (self.dtype,)) or x.device != self.device:
                dtype = f"a dtype of {', '.join(map(str, _DTYPES))}" if self.scales else self.dtype
                raise TypeError(f"{name}: expected {dtype} on {self.device} as the cache has, got {x.dtype} on {x.device}")
            if x.shape[1] != self.kv_heads or x.shape[3] != dim:
                raise ValueError(
                    f"{name}: expected {self.kv_heads} KV heads of dim {dim} as the cache has, got {x.shape[1]} of dim {x.shape[3]}"
                )
        if self.shared_kv and k.numel() and not _starts_in(v, k):
            raise ValueError(f"v: expected k[..., :{self.value_dim}], a view of k, as the cache has shared_kv, got another tensor")
        return layer

    def _add(self, sequence: CachedSequence) -> int:
        self._sequences[self._next_id] = sequence
        self._next_id += 1
        return self._next_id - 1

    def _selected(self, ids: Any, what: str) -> list[CachedSequence]:
        """The sequences of handles, which must differ."""
        return self._different(integers(ids, f"{what}: ids"), what)

    def _different(self, handles: Sequence[int], what: str) -> list[CachedSequence]:
        """The sequences of handles, which must differ."""
        if len(set(handles)) < len(handles):
            raise ValueError(f"{what}: expected different sequences, got {list(handles)}")
        return [self.sequence(h) for h in handles]

    def _check_finished(self, id: int, sequence: CachedSequence, length: int, what: str) -> None:
        """Raise if the first `length` tokens are not written in all layers."""
        for step in sequence.unfinished:
            if step.ranges.starts[step.ids.index(id)] < length:
                raise RuntimeError(f"{what}: a step of sequence {id} has not written all {self.layers} layers: finish the step")

    def _grow_table(self, *, rows: int, width: int) -> None:
        """Make room for rows and columns, at least doubling what grows. Steps that are not finished use the new table too."""
        old_rows, old_width = self._table.shape
        if rows <= old_rows and width <= old_width:
            return
        new_rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows, 8)
        new_width = old_width if width <= old_width else max(width, 2 * old_width, 16)
        with torch.inference_mode(False):
            table = torch.zeros((new_rows, new_width), dtype=torch.int32, device=self.device)
        table[:old_rows, :old_width] = self._table
        self._table = table
        self.table_version += 1
        self._free_rows += range(new_rows - 1, old_rows - 1, -1)


def _checked_scales(k_scale: Any, v_scale: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """The scales of keys and values; None for dtypes that have none."""
    scales = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, bool) or not isinstance(scale, Real):
            raise TypeError(f"{name}: expected a float, got {type(scale).__name__}")
        scale = float(scale)
        if not 2.0**-100 <= scale <= 2.0**100:
            raise ValueError(f"{name}: expected a number from 2**-100 to 2**100, got {scale}")
        if dtype != FP8 and scale != 1:
            raise ValueError(f"{name}: expected 1 for {dtype}, got {scale}: only {FP8} has scales")
        scales.append(scale)
    return (scales[0], scales[1]) if dtype == FP8 else None


def _starts_in(v: Tensor, k: Tensor) -> bool:
    """Whether v is the beginning of every key: the same memory, with the strides of k in dims of more than one element."""
    strides = zip(v.shape, v.stride(), k.stride(), strict=True)
    return v.data_ptr() == k.data_ptr() and all(size == 1 or own == other for size, own, other in strides)
