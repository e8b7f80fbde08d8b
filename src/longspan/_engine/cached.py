"""`attention(cache=step, layer=i)`: new tokens written into the paged cache, then attention over each whole sequence.

    new tokens of a sequence      path
    ────────────────────────      ──────────────────────────────────────────────────────────────────────────
    at most FEW_QUERIES           split-KV over the pages: all such sequences in one call of the decode kernel
    more (prefill, chunks)        pages gathered into one tensor per sequence, then the kernels of training

Over a mesh: `longspan._engine.cached_mesh`. Legend as in `longspan._kernels.paged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan._cache.step import CacheStep, tokens_first
from longspan._comm.agreement import raising_on_all_ranks
from longspan._engine.cached_chunk import Chunk, attend_chunk, first_gathered
from longspan._engine.cached_local import local_programs
from longspan._engine.cached_mesh import attend_over_mesh
from longspan._engine.cached_prepared import attend_again, prepare, repeated_key, split_kernel
from longspan._engine.cached_tokens import StepQueries, StepResults
from longspan._engine.checks import check_captured, check_scale, check_sink, check_tensors, reject_transforms
from longspan._engine.invariant_mode import is_invariant
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork
from longspan._kernels.paged_splits import attend_sequence, gathered_keys
from longspan._kernels.protocol import like_query, state_dtype
from longspan._kernels.registry import NotSupported, check_name, has_triton, kernel_named
from longspan._masks.algebra import Causal, Full, Mask, as_mask
from longspan._masks.block_table import BLOCK_SIZE
from longspan._masks.trace_cache import traces
from longspan._masks.tracing import ProgramError
from longspan._torch_modes import without_user_defaults

BLOCK = (BLOCK_SIZE, BLOCK_SIZE)
KERNELS = ("auto", "cpu", "triton")
_GRAPH_NEEDS_DECODE_KERNEL = (
    "cache=…: expected a call that the triton decode kernel supports in a CUDA graph (kernel='auto' or 'triton', no float64); other "
    "kernels read lengths on the host, which a replay would not update"
)


class CachedCall(NamedTuple):
    """The arguments of `attention` with a cache, besides q, k and v."""

    step: CacheStep
    layer: Any
    mask: Any = None
    score_mod: Any = None
    scale: float | None = None
    sink: Tensor | None = None
    kernel: str = "auto"
    return_lse: bool = False


def attend_cached(q: Tensor, k: Tensor, v: Tensor, call: CachedCall) -> tuple[Tensor, Tensor | None]:
    """(out [n, H, count, E] or [1, H, T, E], lse) after all checks; lse may be None unless asked for.

    A call that raises a check's error has written nothing.
    """
    mesh = call.step.cache.mesh if isinstance(call.step, CacheStep) else None
    key = repeated_key(q, k, v, call)
    if key is not None and (result := attend_again(q, k, v, call, key)) is not None:
        return result
    with raising_on_all_ranks(mesh):
        layer, work = _checked(q, k, v, call)
        step, q, k, v = call.step, *(x.resolve_neg() for x in (q, k, v))
        by_kernel = _decodes_by_kernel(q, v, step, work, call.kernel)
        if q.is_cuda and not by_kernel and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_GRAPH_NEEDS_DECODE_KERNEL)
    pages = step.cache.layer_pages(layer)
    with torch.no_grad(), without_user_defaults():
        if mesh is not None:
            with raising_on_all_ranks(mesh):
                pages.write(tokens_first(k), tokens_first(v), step.ranges)
            queries = StepQueries(q, step, layer)
            out, lse = attend_over_mesh(queries, pages, work, mesh, kernel=call.kernel, with_lse=call.return_lse, by_kernel=by_kernel)
        else:
            out, lse = _attend_alone(_Tokens(q, k, v), pages, call, work, by_kernel=by_kernel)
    step.finish_layer(layer)
    if by_kernel and key is not None:
        prepare(q, k, v, call, work, key)
    return out, lse


def write_cached(k: Tensor, v: Tensor, step: CacheStep, layer: int) -> None:
    """Write new tokens k [n, G, count, D] or [1, G, T, D], and v alike, without attention: for layers that attend in another way."""
    check_tensors(k, k, v)
    layer = step.cache.check_tensors(k, v, layer)
    _check_tokens(k, k, step)
    step.check_layer(layer)
    with torch.no_grad():
        step.cache.layer_pages(layer).write(tokens_first(k), tokens_first(v), step.ranges)
    step.finish_layer(layer)


class _Tokens(NamedTuple):
    """The new tokens of a step: q [n, H, count, D] or [1, H, T, D], k and v alike."""

    q: Tensor
    k: Tensor
    v: Tensor


def _attend_alone(tokens: _Tokens, pages: PagedKV, call: CachedCall, work: PagedWork, *, by_kernel: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) on one device."""
    (q, k, v), step = tokens, call.step
    if by_kernel:
        out, lse = _decode(tokens, pages, call, work)
    else:
        pages.write(tokens_first(k), tokens_first(v), step.ranges)
        out = like_query(q, v.shape[-1], q.dtype)
        lse = torch.empty(q.shape[:3], dtype=state_dtype(q.dtype), device=q.device)
    results = StepResults(StepQueries(q, step), out, lse)
    for i, count in enumerate(step.ranges.counts):
        if count > FEW_QUERIES:
            _attend_gathered(results, i, pages, work, call, by_kernel=by_kernel)
        elif count and not by_kernel:
            keys = gathered_keys(pages, step.ranges, i, work)
            results.add(i, *attend_sequence(results.queries(i), keys, step.ranges.starts[i], work))
    return out, lse


def _decodes_by_kernel(q: Tensor, v: Tensor, step: CacheStep, work: PagedWork, kernel: str) -> bool:
    """Whether the decode kernel computes the sequences with few queries: on one device, all of them, and it may write their new tokens;
    over a mesh, this rank's partial results. Raises if it is named and does not support the call.
    """
    if kernel == "cpu" or (kernel == "auto" and not (q.is_cuda and has_triton())):
        return False
    kernel_named("triton")  # raises if it is not installed
    from longspan._kernels.triton.decode_call import unsupported_program, unsupported_reason

    longest = _longest(step)
    dims = q.shape[-1], v.shape[-1]
    reason = unsupported_reason(q, dims, work, sequences=len(step.ids), longest=longest, shared=step.cache.shared_kv)
    if reason is None and step.ranges.spread is not None:
        try:
            reason = unsupported_program(local_programs(work, step.ranges.spread), q.dtype, longest)
        except ProgramError as error:
            reason = str(error)
    if reason is not None and kernel == "triton":
        raise NotSupported(f"kernel 'triton' does not support this call: {reason}. kernel='auto' picks one that does")
    return reason is None


def _decode(tokens: _Tokens, pages: PagedKV, call: CachedCall, work: PagedWork) -> tuple[Tensor, Tensor]:
    """Write k and v, and compute (out, lse) of the sequences with few queries, by the triton kernel."""
    from longspan._kernels.triton.decode_call import Queries, attend_new_tokens

    (q, k, v), step = tokens, call.step
    ragged, by = q.shape[0] != len(step.ids), split_kernel(q, pages, call.kernel)
    return attend_new_tokens(Queries(q, step.ranges, ragged, (k, v), by), pages, work)


def _attend_gathered(results: StepResults, index: int, pages: PagedKV, work: PagedWork, call: CachedCall, *, by_kernel: bool) -> None:
    """Many queries of one sequence over its gathered KV."""
    ranges = call.step.ranges
    start, length = ranges.starts[index], ranges.lengths[index]
    chunk = Chunk(index, start, length, first_gathered(work, start), length)
    place = ranges.rows[index], chunk.first, length
    if by_kernel:
        from longspan._kernels.triton.gather_pages import gather_pages

        k, v = gather_pages(pages, *place, dtype=results.of.q.dtype)
    else:
        k, v = pages.gather(*place)
    results.add(index, *attend_chunk((results.queries(index), k, v), chunk, call.step, work, call.kernel))


# ------------------------------------------------------------------------------------------------ checks


def _checked(q: Tensor, k: Tensor, v: Tensor, call: CachedCall) -> tuple[int, PagedWork]:
    """Check every argument. Returns the layer and the traced programs."""
    step = call.step
    if not isinstance(step, CacheStep):
        raise TypeError(f"cache: expected a step made by KVCache.step, got {type(step).__name__}")
    check_tensors(q, k, v)
    layer = step.cache.check_tensors(k, v, call.layer)
    _check_tokens(q, k, step)
    check_sink(call.sink, q)
    _check_kernel(call.kernel)
    reject_transforms()
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        _check_captured(step)
    if is_invariant():
        raise NotSupported("cache=…: longspan.invariant() is not supported with a cache; leave the context, or call without a cache")
    mask = _checked_mask(call.mask, step, q.shape[1])
    _check_window(mask, step.cache.window)
    if type(mask) is Causal and max(step.ranges.counts, default=0) <= 1:
        mask = None  # the last token of a sequence sees all of it
    mask_traced = None if mask is None else mask.traced
    score_traced = None if call.score_mod is None else traces.trace(call.score_mod, "score", score_dtype=state_dtype(q.dtype))
    mask_captured = [] if mask_traced is None else [t.to(q.device).resolve_neg() for t in mask_traced.captured()]
    score_captured = [] if score_traced is None else score_traced.captured()
    check_captured(score_captured, q, "score_mod")
    _reject_gradients([q, k, v, *([] if call.sink is None else [call.sink]), *score_captured])
    step.check_layer(layer)
    scale, scales = check_scale(call.scale, q.shape[-1]), step.cache.scales
    return layer, PagedWork(
        scale=scale if scales is None else scale * scales[0],
        mask=None if mask_traced is None else mask_traced.program,
        mask_captured=mask_captured,
        score=None if score_traced is None else score_traced.program,
        score_captured=[t.to(q.device).resolve_neg() for t in score_captured],
        sink=None if call.sink is None else call.sink.resolve_neg(),
        window=None if mask is None else mask.left_reach,
        scales=scales,
    )


def _check_tokens(q: Tensor, k: Tensor, step: CacheStep) -> None:
    """Raise unless q and k hold the step's new tokens."""
    counts = step.ranges.counts
    shapes = [(1, sum(counts))] + ([(len(counts), counts[0])] if len(set(counts)) == 1 else [])
    for name, x in (("q", q), ("k", k)):
        if (x.shape[0], x.shape[2]) not in shapes:
            expected = " or ".join(f"[{b}, heads, {t}, head_dim]" for b, t in reversed(shapes))
            raise ValueError(f"{name}: expected the step's new tokens, {expected}, got {tuple(x.shape)}")


def _longest(step: CacheStep) -> int:
    """The number of tokens that a sequence of the step has, or will have when the step advances in a CUDA graph."""
    return max((*step.ranges.lengths, step.ranges.longest or 0))


def _check_captured(step: CacheStep) -> None:
    """Raise unless a CUDA graph may capture the step."""
    if step.ranges.longest is None:
        raise RuntimeError(
            "cache=…: expected a step made with KVCache.step(…, longest=…) in a CUDA graph; replays of another step would write to the "
            "same positions again"
        )
    if max(step.ranges.counts, default=0) > FEW_QUERIES or step.cache.mesh is not None:
        raise RuntimeError(f"cache=…: expected at most {FEW_QUERIES} new tokens per sequence and no mesh in a CUDA graph")


def _check_kernel(kernel: str) -> None:
    check_name(kernel)
    if kernel not in KERNELS:
        raise NotSupported(f"kernel {kernel!r} does not support cache=…: expected one of {', '.join(map(repr, KERNELS))}")


def _checked_mask(value: Any, step: CacheStep, heads: int) -> Mask | None:
    """The mask of a user's value, None for full attention. A mask made for more tokens than a sequence has is valid for the sequence."""
    if value is None:
        return None
    mask = as_mask(value)
    if mask.has_selection:
        raise ValueError(f"mask {mask}: longspan.selected is not supported with cache=; gather the chosen keys, or call without a cache")
    extent, longest = mask.extent, _longest(step)
    extent.check(f"mask {mask}", batch=len(step.ids), heads=heads)
    for size in (extent.q_len, extent.kv_len):
        if size is not None and size < longest:
            raise ValueError(f"mask {mask} was made for {size} tokens, got a sequence of {longest}: make a mask for these sizes")
    return None if isinstance(mask, Full) else mask


def _check_window(mask: Mask | None, window: int | None) -> None:
    """Raise ValueError if queries may see tokens whose pages the cache has given back."""
    reach = None if mask is None else mask.left_reach
    if window is not None and (reach is None or reach > window):
        seen = "all tokens" if reach is None else f"{reach} tokens back"
        raise ValueError(
            f"mask {mask}: expected a window of at most {window} tokens as the cache holds, got a mask that sees {seen}; combine it with "
            f"sliding_window({window}), or make the cache without window="
        )


def _reject_gradients(tensors: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            "cache=…: attention over a cache has no gradients, got a tensor that requires them; call it in torch.no_grad() or "
            "torch.inference_mode()"
        )
