"""`PagedCache`: a transformers cache over `longspan.KVCache`, on one device or over the ranks of a mesh.

    model.generate(…, past_key_values=PagedCache(model.config, mesh=mesh))
        attention layer: cache.update(k, v, layer)     returns the new k and v; notes that this layer's attention is to come
        attention_forward(module, q, k, v, mask)       writes k and v into pages, then attends over them

Layers with the same window share one `KVCache`; one with a window gives back the pages before it. A sequence holds the tokens that are not
padding: batch rows of different lengths take different numbers of pages.

Legend: B batch rows, n columns of a forward (new tokens and padding), H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from longspan._cache.copies import DeepCopied
from longspan._cache.kv_cache import KVCache
from longspan._cache.step import CacheStep
from longspan._comm.agreement import CallDescription, agree, raise_on_all_ranks
from longspan._comm.mesh import context_mesh
from longspan.integrations._configs import check_implementation, text_config
from longspan.integrations._forward import current_forward

_FIRST_PAGES = 64  # of each rank, in a cache that grows


class PendingUpdate(NamedTuple):
    """The update of a layer whose attention has not run yet. k, v: as the model gave them to the cache."""

    cache: PagedCache
    layer: int
    k: Tensor
    v: Tensor


def take_update() -> PendingUpdate | None:
    """The update before this attention call, once; None if the layer did not update a `PagedCache`."""
    if torch.compiler.is_compiling():  # which cannot trace a ContextVar; an update raises there
        return None
    forward = current_forward.get()
    if forward is None or forward.cache_update is None:
        return None
    update: PendingUpdate = forward.cache_update
    forward.cache_update = None
    return update


@dataclass(kw_only=True, eq=False)
class _LayerGroup:
    """The layers of one window: their indices in the model, their cache, and its sequences by batch row. Made by the first forward."""

    window: int | None
    layers: list[int] = field(default_factory=list)
    cache: KVCache | None = None
    ids: list[int] = field(default_factory=list)
    step: CacheStep | None = None


class _PagedLayer(CacheLayerMixin):
    """One layer as transformers sees it. Keys and values are in the pages of the whole cache."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache, self.index = ref(cache), index  # no cycle: pages are freed with the last reference to the cache
        self.is_sliding = window is not None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    @property
    def cache(self) -> PagedCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: pages are made by the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values. Attention writes them into pages."""
        forward = None if torch.compiler.is_compiling() else current_forward.get()
        if forward is None:
            raise RuntimeError(
                "longspan: expected an update of a PagedCache by a layer of a transformers model that is not compiled, got a call outside "
                "of a forward or under torch.compile; call the model, and do not compile it"
            )
        if forward.cache_update is not None:
            raise RuntimeError(
                f"longspan: layer {forward.cache_update.layer} updated a PagedCache, but its attention did not run by longspan; make the "
                "model with attn_implementation='longspan'"
            )
        forward.cache_update = PendingUpdate(self.cache, self.index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1


class PagedCache(DeepCopied, Cache):
    """A cache for transformers' `generate` and `forward`, in the pages of a `longspan.KVCache`.

    Supports left and right padding, chunked prefill, sampling, beam search and assisted decoding. Under a mesh, all ranks call the model
    with the same tokens; each rank holds its share of the pages, and attends to it. `copy.deepcopy` copies all pages: a prompt that was
    prefilled once serves several continuations.

    Args:
        config: The model, or its config, with attn_implementation="longspan".
        max_tokens: Pages are made once, for at least so many tokens of all sequences together; a forward that finds no free page raises.
            None: pages are added as needed.
        page_size: Tokens per page.
        mesh: A DeviceMesh, a ProcessGroup or a virtual mesh over whose ranks pages are spread; None for one device.
        dtype: Of keys and values in pages: `torch.float8_e4m3fn`, with scales 1, or the model's. None: the model's.

    Raises:
        TypeError: `dtype` is no dtype.
        ValueError: The model has layers that are neither full nor sliding attention, or layers that share KV. The first forward raises
            where the model's KV cannot be held in `dtype`: latent KV (MLA), and other dtypes than these two.
    """

    def __init__(
        self, config: Any, *, max_tokens: int | None = None, page_size: int = 64, mesh: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {type(dtype).__name__}")
        config = getattr(config, "config", config)
        check_implementation(config)
        self.windows = windows = _layer_windows(text_config(config))  # of each layer, None for full attention
        super().__init__(layers=[_PagedLayer(self, i, window) for i, window in enumerate(windows)])
        self.mesh = None if mesh is None else context_mesh(mesh)
        self._max_tokens, self._page_size, self._dtype = max_tokens, page_size, dtype
        self._groups = {window: _LayerGroup(window=window) for window in dict.fromkeys(windows)}
        for i, window in enumerate(windows):
            self._groups[window].layers.append(i)
        self._columns: list[tuple[int, Tensor | None]] = []  # ranges of columns, and which are tokens: bool [B, n], or None for all
        self._new: tuple[int, Tensor | None] = (0, None)  # columns of the current forward, and which are tokens
        self._left: set[int] = set()  # layers of the current forward that have not run

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for layer in self.layers:
            vars(layer)["_cache"] = ref(self)

    @property
    def columns(self) -> int:
        """Columns of all forwards: tokens of the longest row, and its padding."""
        return sum(count for count, _ in self._columns)

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence holds, of all layers and ranks."""
        return sum(group.cache.free_pages for group in self._groups.values() if group.cache is not None)

    def step_for(
        self, layer: int, k: Tensor, v: Tensor, real: Tensor | None, *, shared_kv: bool = False
    ) -> tuple[CacheStep, int, Tensor | None]:
        """(step of the current forward, the layer's index in it, which of the new columns are tokens: bool [B, n] on the host, or None).

        Args:
            layer: Index in the model.
            k, v: [B, G, n, D], of the new columns.
            real: bool [B, columns + n], False for padding; None without padding.
        """
        group = self._groups[self.windows[layer]]
        begins = layer not in self._left
        try:
            if begins:
                self._begin_forward(k, real)
            if group.step is None:
                group.step = self._make_step(group, k, v, shared_kv)
        except (ValueError, RuntimeError) as error:
            if self.mesh is None:
                raise
            raise_on_all_ranks(self.mesh, error)  # the other ranks wait for this one
        if begins and self.mesh is not None:
            agree(self.mesh, CallDescription("forward over a PagedCache", {"columns": str(self.columns), "new tokens": _tokens_digest()}))
        self._left.discard(layer)
        return group.step, group.layers.index(layer), self._new[1]

    def _begin_forward(self, k: Tensor, real: Tensor | None) -> None:
        if self._left:
            raise RuntimeError(
                f"longspan: the last forward with this cache ended before layer {min(self._left)}; call cache.reset(), then prefill again"
            )
        count = k.shape[2]
        rows = next((len(group.ids) for group in self._groups.values() if group.ids), k.shape[0])
        if rows != k.shape[0]:
            raise ValueError(
                f"longspan: expected {rows} batch rows as this cache holds, got {k.shape[0]}; call cache.reset() for a new batch"
            )
        self._new = count, self._checked_real(real, rows, count)
        forward = current_forward.get()
        if forward is not None:
            forward.cache_columns.setdefault(id(self), (self, self.columns))
        self._add_columns(*self._new)
        self._left = set(range(len(self.layers)))
        for group in self._groups.values():
            group.step = None

    def _checked_real(self, real: Tensor | None, rows: int, count: int) -> Tensor | None:
        """Which new columns are tokens, bool [rows, count] on the host; None if all are. Raises if padding of earlier columns changed."""
        if real is None and all(r is None for _, r in self._columns):
            return None
        if real is None or real.shape[1] != self.columns + count:
            raise ValueError(
                f"longspan: expected an attention_mask of all {self.columns} earlier and {count} new columns, got "
                f"{'none' if real is None else f'{real.shape[1]} columns'}"
            )
        real = real.expand(rows, -1)
        new, first = real[:, self.columns :].cpu(), 0
        for columns, before in self._columns:
            given = real[:, first : first + columns]
            if not (bool(given.all()) if before is None else torch.equal(given.cpu(), before)):
                raise ValueError(
                    "longspan: expected the padding of earlier columns as in earlier forwards, got an attention_mask with other padding"
                )
            first += columns
        return None if bool(new.all()) else new.clone()

    def _add_columns(self, count: int, real: Tensor | None) -> None:
        if real is None and self._columns and self._columns[-1][1] is None:
            count += self._columns.pop()[0]
        self._columns.append((count, real))

    def _make_step(self, group: _LayerGroup, k: Tensor, v: Tensor, shared_kv: bool) -> CacheStep:
        if group.cache is None:
            group.cache = self._make_cache(group, k, v, shared_kv)
        if not group.ids:
            group.ids = group.cache.allocate(k.shape[0])
        count, real = self._new
        counts: Any = count if real is None else real.sum(1).tolist()
        if self._max_tokens is None:
            self._grow(group.cache, group.ids, counts)
        return group.cache.step(group.ids, counts)

    def _make_cache(self, group: _LayerGroup, k: Tensor, v: Tensor, shared_kv: bool) -> KVCache:
        ranks = 1 if self.mesh is None else self.mesh.size
        pages, dtype = _FIRST_PAGES, self._dtype or k.dtype
        if dtype not in (k.dtype, torch.float8_e4m3fn):
            raise ValueError(f"dtype: expected {k.dtype}, the model's, or torch.float8_e4m3fn, got {dtype}")
        if shared_kv and dtype != k.dtype:
            raise ValueError(f"dtype: expected {k.dtype}, the model's, of latent KV, got {dtype}")
        if self._max_tokens is not None:  # the last page of a sequence is not full, and pages of a sequence need not divide by ranks
            pages = -(-self._max_tokens // (self._page_size * ranks)) + 2 * k.shape[0]
        return KVCache(
            pages=pages, page_size=self._page_size, layers=len(group.layers), kv_heads=k.shape[1], head_dim=k.shape[3],
            value_dim=v.shape[3], shared_kv=shared_kv, window=group.window, dtype=dtype, device=k.device, mesh=self.mesh,
        )  # fmt: skip

    def _grow(self, cache: KVCache, ids: Sequence[int], counts: Any) -> None:
        """Add pages until every rank has room for the new tokens."""
        missing = cache.missing_pages(ids, counts)
        if missing:
            cache.grow(max(missing, cache.pages))

    # ------------------------------------------------------------------------------------------------ transformers' interface

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last −tokens_to_remove columns, such as rejected drafts. 0 changes nothing."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected the number of tokens to remove as a negative number, got {tokens_to_remove}")
        self._check_complete("crop")
        if self.columns + tokens_to_remove < 0:
            raise ValueError(f"crop: expected to remove at most {self.columns} tokens, got {-tokens_to_remove}")
        self._truncate(self.columns + tokens_to_remove)

    def _truncate(self, columns: int) -> None:
        """Keep the first columns. Nothing changes if a layer cannot drop the others."""
        remaining: list[tuple[int, Tensor | None]] = []
        for count, real in self._columns:
            left = min(count, columns - sum(n for n, _ in remaining))
            if left:
                remaining.append((left, None if real is None else real[:, :left]))
        held = [(g.cache, g.ids, _row_lengths(remaining, len(g.ids))) for g in self._groups.values() if g.cache is not None and g.ids]
        for cache, ids, lengths in held:
            cache.check_truncate(ids, lengths)
        for cache, ids, lengths in held:
            cache.truncate(ids, lengths)
        for group in self._groups.values():
            group.step = None
        self._columns = remaining

    def undo_forward(self, columns: int) -> None:
        """Drop the tokens of a forward that failed. `columns`: before it."""
        self._left = set()
        if columns == 0:
            self.reset()
            return
        try:
            self._truncate(columns)
        except (ValueError, RuntimeError):  # a window before these columns was given back
            self._left = {len(self.layers)}  # no layer: every forward raises until `reset`

    def reset(self) -> None:
        """Free all sequences. On one device, the pages stay allocated for the next ones.

        Over a mesh, the next forward makes new caches: after a failure of one rank, ranks may have counted their sequences differently.
        """
        for group in self._groups.values():
            if self.mesh is not None:
                group.cache = None
            elif group.cache is not None and group.ids:
                group.cache.free(group.ids)
            group.ids, group.step = [], None
        self._columns, self._left = [], set()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row i becomes the former row beam_idx[i]: forks, which share pages."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row becomes `repeats` rows, which share pages."""
        rows = next((len(group.ids) for group in self._groups.values() if group.ids), 0)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Batch row i becomes the former row indices[i]."""
        self._check_complete("batch_select_indices")
        chosen = torch.as_tensor(indices).cpu()
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().flatten()
        if not len(chosen):
            self.reset()
            return
        for group in self._groups.values():
            if group.cache is not None and group.ids:
                forks = [group.cache.fork(group.ids[i]) for i in chosen.tolist()]
                group.cache.free(group.ids)
                group.ids, group.step = forks, None
        self._columns = [(count, None if real is None else real[chosen]) for count, real in self._columns]

    def activate_past_recording(self) -> None:
        """Nothing: pages before a window are given back one forward later, so that `crop` can undo the last forward."""

    def _check_complete(self, what: str) -> None:
        if self._left:
            raise RuntimeError(f"{what}: the last forward ended before layer {min(self._left)}; call cache.reset(), then prefill again")


def _tokens_digest() -> str:
    """A digest of the current forward's input_ids: ranks that sampled different tokens would compute different models. "" without them."""
    forward = current_forward.get()
    tokens = None if forward is None else forward.tokens
    if not isinstance(tokens, Tensor) or tokens.is_floating_point():
        return ""
    return hashlib.sha256(str((tuple(tokens.shape), tokens.tolist())).encode()).hexdigest()[:16]


def _row_lengths(columns: Sequence[tuple[int, Tensor | None]], rows: int) -> list[int]:
    """Tokens of each row in ranges of columns."""
    lengths = torch.zeros(rows, dtype=torch.int64)
    for count, real in columns:
        lengths += count if real is None else real.sum(1)
    return lengths.tolist()  # type: ignore[no-any-return]


def _layer_windows(config: Any) -> list[int | None]:
    """The window of each layer, None for full attention."""
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"PagedCache: expected windows by layer_types, got local attention layers of {type(config).__name__}; use transformers' "
            "DynamicCache"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            f"PagedCache: expected layers with KV of their own, got num_kv_shared_layers={config.num_kv_shared_layers} in "
            f"{type(config).__name__}; use transformers' DynamicCache"
        )
    kinds, options = get_layer_types_and_kwargs(config)
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        raise ValueError(
            f"PagedCache: expected layers of type 'full_attention' or 'sliding_attention', got {', '.join(map(repr, other))} in "
            f"{type(config).__name__}; use transformers' DynamicCache"
        )
    return [extra.get("sliding_window") if kind == "sliding_attention" else None for kind, extra in zip(kinds, options, strict=True)]
