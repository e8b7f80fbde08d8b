"""The plans of one batch for all layers of a model: one for full attention, one per window and per chunk size, over one layout."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longspan._comm.mesh import MeshLike, context_mesh
from longspan._masks.algebra import Mask
from longspan._masks.constructors import sliding_window
from longspan._masks.extent import Extent
from longspan._planner.plan import Plan
from longspan._planner.plan_set import PlanSet
from longspan._planner.planning import plan
from longspan.integrations._recent_plans import RecentPlans, plans_key

FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
_MODEL_MASKS = 8  # plans by masks of a model's own: two or three in a forward
_recent = RecentPlans(8)  # a few lengths, or training and evaluation by turns; virtual ranks need one each
Span = tuple[str, int]  # (SLIDING, tokens of the window) or (CHUNKED, tokens of a chunk)


class ModelPlans(PlanSet):
    """Plans by name: "full", "sliding" for layers with a window ("sliding 512" and so on for further windows), "chunked" likewise.

    Shards and positions are common to all. A window or chunk size that `prepare_batch` did not know is planned when a layer first asks for
    it, over the same layout, the same on every rank.

    documents_from_positions: whether documents were derived from position_ids. A model that would not do so on one process raises.
    position_rule: how tokens were numbered (`position_rule` of the config); None if the batch had position_ids.
    real_tokens: bool [B, S] on the CPU, False for padding; None without padding.
    chunk_origins: int64 [B, S] on the CPU, the place from which a token's chunks are counted; None: its row's first real token.
    states_documents: whether the batch says by itself which document a token belongs to (document_ids, seq_idx, cu_seq_lens).
    bidirectional: whether tokens see later tokens too, as in encoders; labels are then not shifted.
    whole_inputs: whether the model is given the whole batch, of which its text decoder takes this rank's tokens (`_decoders`).
    """

    documents_from_positions: bool = False
    position_rule: str | None = None
    real_tokens: Tensor | None = None
    chunk_origins: Tensor | None = None
    states_documents: bool = False
    bidirectional: bool = False
    whole_inputs: bool = False

    def __init__(self, plans: dict[str, Plan], *, mask: Mask, spans: Mapping[Span, str], options: Mapping[str, Any]) -> None:
        super().__init__(plans)
        self._mask, self._spans, self._options = mask, dict(spans), dict(options)
        self._lock = threading.Lock()
        self._by_mask: dict[int, tuple[Mask, Plan]] = {}  # by id of the mask

    def by_mask(self, mask: Mask) -> Plan:
        """The plan of a mask that the model made of the whole batch, over the same layout. Holds the masks of one forward."""
        with self._lock:
            made = self._by_mask.get(id(mask))
            if made is None:
                if len(self._by_mask) >= _MODEL_MASKS:
                    self._by_mask.clear()
                made = self._by_mask[id(mask)] = mask, self._of_mask(mask, {})
        return made[1]

    def of(self, span: Span | None, heads: int | None = None, kv_heads: int | None = None) -> Plan:
        """The plan for layers of this window or chunk size, None for full attention, and of these heads."""
        if span is not None and span not in self._spans:
            self._add(span)
        name = FULL if span is None else self._spans[span]
        made = self._plans[name]
        planned = (made.data.heads, made.data.kv_heads)
        if heads is None or None in planned or planned == (heads, kv_heads):
            return made
        # A few models have layers with other numbers of heads than their config says.
        other = f"{name}, {heads} heads, {kv_heads} KV heads"
        if other not in self._plans:
            with self._lock:
                self._plans[other] = self._over_same_layout(span, {"heads": heads, "kv_heads": kv_heads})
        return self._plans[other]

    def _add(self, span: Span) -> None:
        with self._lock:
            if span not in self._spans:
                name = span_name(span, self._spans)
                self._plans[name] = self._over_same_layout(span, {})
                self._spans[span] = name

    def _over_same_layout(self, span: Span | None, heads: Mapping[str, int | None]) -> Plan:
        mask = within(self._mask, span, self.real_tokens, bidirectional=self.bidirectional, origins=self.chunk_origins)
        return self._of_mask(mask, heads)

    def _of_mask(self, mask: Mask, heads: Mapping[str, int | None]) -> Plan:
        full = self._plans[FULL]
        strategy = full.strategy if full.data.head_axis is not None else "auto"
        options = {**self._options, **heads, "layout": full.layout, "strategy": strategy}
        return plan(mask, full.data.q_len, full.mesh, **options)

    def on(self, mesh: Any) -> ModelPlans:
        """The same plans as another rank's, or on another mesh of equal shape."""
        plans = {name: plan.on(mesh) for name, plan in self._plans.items()}
        made = ModelPlans(plans, mask=self._mask, spans=self._spans, options=self._options)
        made.__dict__.update(self._facts())
        return made

    def _facts(self) -> dict[str, Any]:
        """What the plans say about their batch."""
        names = (
            "documents_from_positions", "position_rule", "real_tokens", "chunk_origins", "states_documents", "bidirectional", "whole_inputs"
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._plans, self._mask, self._spans, self._options), self._facts()


def _unpickle(plans: dict[str, Plan], mask: Mask, spans: dict[Span, str], options: dict[str, Any]) -> ModelPlans:
    return ModelPlans(plans, mask=mask, spans=spans, options=options)


def span_name(span: Span, spans_before: Mapping[Span, str]) -> str:
    """The name of a span's plan: "sliding" for the first window, "sliding 512" for further ones; likewise "chunked"."""
    kind, size = span
    return f"{kind} {size}" if any(before[0] == kind for before in spans_before) else kind


@dataclass(frozen=True, eq=False)
class Chunks(Mask):
    """The mask by which tokens see their chunk of `size` tokens.

    `first`: int64 [B] or [B, S], the place from which chunks of a row, or of each of its tokens, are counted; None: 0.
    """

    size: int
    first: Tensor | None = None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.first is None:
            return q_idx // self.size == kv_idx // self.size
        first = self.first.to(q_idx.device) if q_idx.is_cuda else self.first
        q_first, kv_first = (first[b], first[b]) if first.ndim == 1 else (first[b, q_idx], first[b, kv_idx])
        return (q_idx - q_first) // self.size == (kv_idx - kv_first) // self.size

    @property
    def extent(self) -> Extent:
        return Extent(batch=None if self.first is None else self.first.shape[0])

    def __str__(self) -> str:
        return f"chunks({self.size})"


def within(
    mask: Mask, span: Span | None, real_tokens: Tensor | None, *, bidirectional: bool = False, origins: Tensor | None = None
) -> Mask:
    """The mask of layers with a window or chunks. Chunks are counted from `origins`, or a row's first real token, as in transformers.

    A window of n tokens holds a token and the n - 1 before it; a bidirectional one, the n tokens before and the n after it too.
    """
    if span is None:
        return mask
    kind, size = span
    if kind == SLIDING:
        return mask & (sliding_window(size + 1, size) if bidirectional else sliding_window(size))
    if origins is not None:
        return mask & Chunks(size, origins)
    padding = None if real_tokens is None else (real_tokens.cumsum(1) == 0).sum(1)
    return mask & Chunks(size, None if padding is None or not bool(padding.any()) else padding)


def model_plans(
    mask: Mask,
    seq_len: int,
    mesh: MeshLike,
    *,
    spans: list[Span],
    real_tokens: Tensor | None,
    bidirectional: bool,
    options: Mapping[str, Any],
    chunk_origins: Tensor | None = None,
) -> ModelPlans:
    """Plans for layers of full attention and of each span, or those of a recent batch with equal masks. `options`: for `longspan.plan`."""
    names: dict[Span, str] = {}
    for span in spans:
        names[span] = span_name(span, names)
    windows = {name: within(mask, span, real_tokens, bidirectional=bidirectional, origins=chunk_origins) for span, name in names.items()}
    masks = {FULL: mask, **windows}
    context = context_mesh(mesh)
    key = plans_key(masks, seq_len, context, options)
    plans = _recent.get(key, context, lambda: dict(plan(masks, seq_len, context, **options)))
    later_options = {name: value for name, value in options.items() if name not in ("layout", "strategy", "stages")}
    made = ModelPlans(plans, mask=mask, spans=names, options=later_options)
    made.real_tokens, made.bidirectional, made.chunk_origins = real_tokens, bidirectional, chunk_origins
    return made
