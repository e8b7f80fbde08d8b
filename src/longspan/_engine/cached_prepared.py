"""Calls over a cache that repeat, from layer to layer and from step to step: one lookup, then launches.

A call is prepared when it was made once: its kernels are compiled then. Its key covers the layouts of q, k, v and the sink, the mask, the
score program, scale, kernel and settings; and of the step, the numbers of new tokens and the sizes of launches. Masks and mods that read
tensors are not prepared. Legend as in `longspan._kernels.paged`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longspan._cache.step import CacheStep
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.values import PLAIN
from longspan._kernels.paged import PagedKV, PagedWork
from longspan._kernels.protocol import ALIGNMENT, state_dtype
from longspan._kernels.registry import first_candidate
from longspan._masks.algebra import Mask, as_mask
from longspan._masks.extent import Extent
from longspan._masks.remembered_mask import remembered_mask
from longspan._masks.trace_cache import traces
from longspan._torch_private import (
    current_stream_is_captured,
    guarded_calls_are_intercepted,
    nothing_intercepts_calls,
    tensor_guard,
    tensors_can_be_guarded,
)

if TYPE_CHECKING:
    from longspan._engine.cached import CachedCall
    from longspan._kernels.gpu.split_kernel import SplitKernel
    from longspan._kernels.triton.decode_prepared import StepDecode

# The fields of a `CachedCall`, or these in a plain tuple: a repeated call does not take the time to make a `CachedCall`.
CallArguments = tuple[Any, Any, Any, Any, float | None, Tensor | None, str, bool]

MAX_PREPARED = 64  # calls per cache
_ANY_SIZE = Extent()  # of masks that fit sequences of any length


class LastCall(NamedTuple):
    """The prepared call that a step made last, without a score mod or a sink. Holds no tensor.

    guard: of q, k and v (`tensor_guard`), none of which requires gradients. one_tensor: whether v begins where k does.
    table_version: the cache's, when the call was prepared.
    """

    guard: Callable[..., bool]
    mask: Mask | None
    scale: float | None
    kernel: str
    one_tensor: bool
    table_version: int
    prepared: StepDecode


def attend_same(q: Any, k: Any, v: Any, call: CallArguments) -> tuple[Tensor, Tensor | None] | None:
    """`attend_again` of a call like the step's last one, in another layer: a comparison instead of a key. None if it differs."""
    step, layer, mask, score_mod, scale, sink, kernel, with_lse = call
    last: LastCall | None = step.last_call if type(step) is CacheStep else None
    if last is None or score_mod is not None or sink is not None:
        return None
    guard, last_mask, last_scale, last_kernel, one_tensor, table_version, prepared = last
    cache = step.cache
    if mask is not last_mask or scale != last_scale or kernel != last_kernel or table_version != cache.table_version:
        return None
    if type(layer) is not int or not 0 <= layer < cache.layers or q is k or k is v or q is v:
        return None
    if is_invariant() or not tensors_can_be_guarded(q, k, v) or not guard(q, k, v) or guarded_calls_are_intercepted():
        return None
    addresses = q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (q_address | k_address | v_address) % ALIGNMENT or (k_address == v_address) != one_tensor:
        return None
    return _attend(step, layer, addresses, with_lse, prepared)


def _remember(q: Tensor, k: Tensor, v: Tensor, call: CachedCall, prepared: StepDecode) -> None:
    """Make a prepared call the step's last one, if `attend_same` may compare calls with it."""
    mask, step = call.mask, call.step
    if (mask is not None and not isinstance(mask, Mask)) or call.score_mod is not None or call.sink is not None:
        return
    if q.dtype == torch.float32 or q.requires_grad or k.requires_grad or v.requires_grad:  # TF32 is a setting that may change
        return
    one_tensor = k.data_ptr() == v.data_ptr()
    step.last_call = LastCall(tensor_guard(q, k, v), mask, call.scale, call.kernel, one_tensor, step.cache.table_version, prepared)


def repeated_key(q: Any, k: Any, v: Any, call: CachedCall) -> Hashable:
    """The key of a call whose arguments are not checked yet; None if it is not to be prepared."""
    step = call.step
    if type(step) is not CacheStep or type(q) not in PLAIN or not _on_gpu(q) or step.cache.mesh is not None:
        return None
    return _call_key(q, k, v, call)


def _call_key(q: Any, k: Any, v: Any, call: CachedCall) -> Hashable:
    mask, sink, scale = call.mask, call.sink, call.scale
    if type(k) not in PLAIN or type(v) not in PLAIN or call.kernel not in ("auto", "triton") or not nothing_intercepts_calls():
        return None
    if is_invariant() or (scale is not None and type(scale) is not float):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)):
        return None
    try:
        value_key, score = None, None
        if mask is not None:
            mask = mask if isinstance(mask, Mask) else remembered_mask(mask)
            if mask is None or mask.has_selection or mask.value_key is None:
                return None
            value_key = mask.value_key
        if call.score_mod is not None:
            traced = traces.trace(call.score_mod, "score", score_dtype=state_dtype(q.dtype))
            if traced.captured():
                return None
            score = traced.program.key
        sink_layout = None
        if q.is_neg() or k.is_neg() or v.is_neg():  # lazily negated views, copied at every call
            return None
        if sink is not None:
            if type(sink) not in PLAIN or sink.is_neg() or not sink.is_contiguous() or sink.data_ptr() % ALIGNMENT:
                return None
            sink_layout = sink.dtype, sink.shape, sink.device
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            return None
        return (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            value_key, score, sink_layout, scale, torch.backends.cuda.matmul.fp32_precision if q.dtype == torch.float32 else None,
            v.data_ptr() == k.data_ptr(), call.kernel,
        )  # fmt: skip
    except Exception:  # a mod that cannot be traced, a sparse tensor: the checks of the call raise
        return None


def split_kernel(q: Tensor, pages: PagedKV, kernel: str) -> SplitKernel | None:
    """The kernel that computes partial results in place of triton's decode kernel; None if that one does.

    kernel: of the call. "auto" takes hopper's kernel for latent KV where it supports the call.
    """
    if not pages.shared or kernel != "auto" or not q.is_cuda or first_candidate(q.device) != "hopper":
        return None
    from longspan._kernels.hopper.latent_decode_call import latent_decode

    return latent_decode(q, pages)


def _step_key(step: CacheStep, q: Tensor, kernel: str) -> Hashable:
    """The properties of a step on which launches depend: numbers of new tokens, sizes of launches, shape of the page table."""
    from longspan._kernels.triton.decode_call import Queries, page_sizes

    ragged, pages = q.shape[0] != len(step.ids), step.cache.layer_pages(0)
    sizes = page_sizes(Queries(q, step.ranges, ragged, by=split_kernel(q, pages, kernel)), pages)
    return tuple(step.ranges.counts), tuple(sizes), step.cache.table_shape, ragged


def attend_again(q: Tensor, k: Tensor, v: Tensor, call: CachedCall, key: Hashable) -> tuple[Tensor, Tensor | None] | None:
    """(out, lse) of a prepared call; None if it is not prepared. Raises if the layer is not the step's next one."""
    step, layer = call.step, call.layer
    cache = step.cache
    if type(layer) is not int or not 0 <= layer < cache.layers or not cache.prepared:
        return None
    calls = step.prepared_calls()
    prepared = calls.get(key)
    if prepared is None:
        made = cache.prepared.get((key, _step_key(step, q, call.kernel)))
        if made is None:
            return None
        prepared = calls[key] = made.at(cache.layer_pages(0), step.ranges)
    _remember(q, k, v, call, prepared)
    addresses = tuple(x.data_ptr() for x in (q, k, v, call.sink) if x is not None)
    return _attend(step, layer, addresses, call.return_lse, prepared)


def _attend(
    step: CacheStep, layer: int, addresses: tuple[int, ...], with_lse: bool, prepared: StepDecode
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """(out, lse) of a call that is prepared for its step. addresses: of q, k, v and the sink if there is one."""
    captured = current_stream_is_captured()
    if captured and step.ranges.longest is None:
        return None  # the call's checks raise
    step.check_layer(layer)
    run, of_step = prepared
    result = run(of_step, step.cache.layer_addresses(layer), addresses, with_lse, captured)
    if result is not None:
        step.finish_layer(layer)
    return result


def prepare(q: Tensor, k: Tensor, v: Tensor, call: CachedCall, work: PagedWork, key: Hashable) -> None:
    """Prepare a call that the decode kernels have computed."""
    from longspan._kernels.triton.decode_prepared import LayerTensors, PreparedDecode, StepPlace

    step, tensors = call.step, LayerTensors(q, k, v, call.sink)
    cache = step.cache
    pages, key_in_cache = cache.layer_pages(0), (key, _step_key(step, q, call.kernel))
    place = StepPlace(step.ranges, q.shape[0] != len(step.ids), split_kernel(q, pages, call.kernel))
    if key_in_cache in cache.prepared or _is_captured(q):
        return
    if call.mask is not None and as_mask(call.mask).extent != _ANY_SIZE:  # checked at every call
        return
    if any(address % ALIGNMENT for layer in (0, 1) for address in cache.layer_addresses(layer)):
        return
    if not PreparedDecode.supports(tensors, pages, place, work):
        return
    made = PreparedDecode(tensors, pages, place, work)
    if made.is_compiled:
        if len(cache.prepared) >= MAX_PREPARED:
            cache.prepared.clear()
        cache.prepared[key_in_cache] = made


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def _is_captured(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()
