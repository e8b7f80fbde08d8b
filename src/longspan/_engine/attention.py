"""`attention`: checks, tracing of mods, and the choice between the operator, its eager form and the compiled form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longspan._cache.step import CacheStep
from longspan._comm.agreement import raising_on_all_ranks
from longspan._engine import eager, ops, selected, selected_mesh, selected_mesh_ops
from longspan._engine.cached import CachedCall, attend_cached
from longspan._engine.cached_prepared import attend_same
from longspan._engine.call_cache import CallEntry, calls, score_key
from longspan._engine.checks import (
    check_captured,
    check_scale,
    check_sink,
    check_tensors,
    is_plain,
    reject_transforms,
    tracing_under_transforms,
)
from longspan._engine.dense_distributed import dense_over_mesh
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.plan_cache import plan_cache
from longspan._engine.repeated_calls import repeated_calls
from longspan._engine.spec import Spec
from longspan._engine.streams import is_captured
from longspan._engine.table_cache import DeviceCopies
from longspan._engine.values import PLAIN, CallOptions, CallTensors
from longspan._kernels.dense import Scoring, dense_attention
from longspan._kernels.protocol import MASK_IN_GRAPH, state_dtype
from longspan._kernels.registry import INVARIANT, NotSupported, check_name
from longspan._masks.algebra import FromBlockMask, Full, Mask, MaskLike, as_mask
from longspan._masks.extent import AttentionSizes
from longspan._masks.program import Program
from longspan._masks.selected import split_selection
from longspan._masks.static_mask import static_mask_of
from longspan._masks.trace_cache import traces
from longspan._masks.tracing import Traced
from longspan._plan.handle import PlanHandle
from longspan._torch_modes import without_user_defaults
from longspan._torch_private import forward_mode_is_active, is_transformed

_device_copies = DeviceCopies()
_SELECTED_MESH_COMPILED = (
    "mask=longspan.selected(…) with plan=… is not supported under torch.compile: which KV moves follows from the choice on the host. "
    "Call it from a function under @torch.compiler.disable"
)
_NOTHING = torch.empty(0, device="cpu")  # in place of results that the caller does not use


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[False] = False, kernel: str = "auto",
    plan: PlanHandle | None = None, cache: CacheStep | None = None, layer: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[True], kernel: str = "auto",
    plan: PlanHandle | None = None, cache: CacheStep | None = None, layer: int | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: bool, kernel: str = "auto",
    plan: PlanHandle | None = None, cache: CacheStep | None = None, layer: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    plan: PlanHandle | None = None,
    cache: CacheStep | None = None,
    layer: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q over k and v, forward and backward, on one device or over the ranks of a plan.

    Scores, softmax sums and running results are float32 (float64 for float64 inputs); P is rounded to the dtype of v before P·V by
    the GPU kernels. A query that sees no key gives out 0, lse −inf (the sink's logit if there is a sink) and gradients 0. Query i has
    position i, key j has position j.

    On CUDA, the first call with a mask and its first backward pass copy the mask's tables to the device, on the current stream. Before
    another stream uses the same mask, let it wait for them.

    Args:
        q: Queries [B, H, Q, D].
        k: Keys [B, G, K, D]; H is a multiple of G (GQA).
        v: Values [B, G, K, E].
        mask: A longspan mask, a torch BlockMask or a mask_mod callable; None: every query sees every key.
        score_mod: fn(score, b, h, q_idx, kv_idx) → score, FlexAttention's contract. Tensors that it captures get gradients.
        scale: Factor of q·k before `score_mod`; 1/√D by default.
        sink: A logit per head [H] in every softmax of the head, with value 0. It is part of lse.
        return_lse: Also return lse, differentiable.
        kernel: "auto", "cpu", "triton", "hopper", "dense", or one of torch's SDPA kernels: "flash", "efficient", "cudnn", or "aten" for
            the first of them that supports the call. A kernel named explicitly runs the call or raises.
        plan: From `longspan.plan`. q, k, v are this rank's shards, and all ranks of the plan's mesh make this call. The plan holds the
            mask; mods get global positions. With `mask=selected(…)`, each rank passes the choice of its own queries: one row for each of
            `plan.query_blocks(q_granularity)`, with blocks of the whole sequence. A pair must also be visible in the plan's mask.
            Gradients of captured tensors and of the sink are this rank's share: sum them over ranks.
        cache: From `KVCache.step`. k and v are the step's new tokens: they are written into the cache, then q, at the positions of the new
            tokens, attends to each whole sequence. q, k, v are [n, …, count, …] for n sequences, or ragged [1, …, T, …] with all T new
            tokens one after the other. Mods get a sequence's index in the step as b, and positions in the sequence. No gradients.
        layer: The layer of the cache that this call writes and reads; required with `cache`.

    Returns:
        out [B, H, Q, E] in the dtype of q, with its dims ordered in memory as those of q; with `return_lse`, (out, lse [B, H, Q]): the
        natural log of each softmax's denominator in float32 (float64).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes, dtypes or devices do not fit, or the named kernel does not support the call.
        RuntimeError: The cache's step was used before for this layer, or out of order, or an input requires gradients.
    """
    if cache is not None:
        if plan is not None:
            raise ValueError("attention: expected either plan=… or cache=…, got both")
        call = cache, layer, mask, score_mod, scale, sink, kernel, return_lse
        results = attend_same(q, k, v, call)
        if results is None:
            results = attend_cached(q, k, v, CachedCall(*call))
        if not return_lse:
            return results[0]
        assert results[1] is not None
        return results[0], results[1]
    if layer is not None:
        raise ValueError(f"layer: expected None without cache=…, got {layer}")
    # By position: names take a microsecond more.
    out, lse, _ = attend(q, k, v, AttendOptions(mask, score_mod, scale, sink, kernel, False, plan, return_lse))
    return (out, lse) if return_lse else out


class AttendOptions(NamedTuple):
    """The arguments of `attention` besides q, k and v; a NamedTuple, because Dynamo traces these.

    Attributes:
        max_scores: Whether each row's largest score is returned.
        return_lse: Whether the caller uses lse. Ranks that share heads must agree on it: its gradient is exchanged.
    """

    mask: Any = None
    score_mod: Callable[..., Tensor] | None = None
    scale: float | None = None
    sink: Tensor | None = None
    kernel: str = "auto"
    max_scores: bool = False
    plan: PlanHandle | None = None
    return_lse: bool = True


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> ops.Outputs:
    """(out, lse, max scores) after all checks; max scores has no elements unless asked for."""
    if options.plan is not None:
        return _attend_over_mesh(q, k, v, options, options.plan)
    key, score = None, None
    if not torch.compiler.is_dynamo_compiling():
        entry = calls.recent(q, k, v, options)
        if entry is not None:
            score = _repeated_score(q, options)
            repeated = _attend_prepared(q, k, v, options, entry, score)
            if repeated is not None:
                return repeated
        key = calls.key(q, k, v, options)
        entry = None if key is None else calls.entry(key)
        if key is not None and entry is not None:
            score = score or _repeated_score(q, options)
            repeated = _attend_prepared(q, k, v, options, entry, score)
            if repeated is not None:
                calls.note_recent(q, k, v, options, key, entry)
                return repeated
    scale = _checked_scale(q, k, v, options)
    chosen = _attend_selected(q, k, v, options, scale)
    if chosen is not None:
        return chosen
    if key is not None and not torch.compiler.is_dynamo_compiling():
        chosen = _attend_listed(q, k, v, options, scale, key.owner)
        if chosen is not None:
            return chosen
    if torch.compiler.is_dynamo_compiling() and isinstance(options.mask, Mask) and options.mask.has_selection:
        compiled = _attend_selected_compiled(q, k, v, options, scale)
        if compiled is not None:
            return compiled
    # The remembered mask of a BlockMask, whose conversion takes launches.
    mask = _checked_mask(key.owner if key is not None and isinstance(key.owner, FromBlockMask) else options.mask, q, k)
    if torch.compiler.is_dynamo_compiling():
        from longspan._engine.compiled import attend_compiled

        return attend_compiled(q, k, v, options, mask=mask, scale=scale, returned=True)
    if options.kernel != "dense":
        reject_transforms()
    score_dtype = state_dtype(q.dtype)  # before the context, which raises for any use of a transformed q
    with tracing_under_transforms():
        mask_traced = None if mask is None else mask.traced
        score_traced = None if score is not None else _traced_score(options.score_mod, score_dtype)
    score = score or _Score.of(score_traced)
    inputs = _call_tensors(q, k, v, options, mask_traced, score)
    results = _run(inputs, options, mask_traced, score, scale)
    if key is not None and all(type(t) in PLAIN and not is_transformed(t) for t in inputs.score_captured):
        call = CallOptions(spec=_spec(options, mask_traced, score), scale=scale)
        calls.add(key, score_key(None if score is None else score.program.key, inputs.score_captured), inputs, call)
    return results


class _Score(NamedTuple):
    """The program of a call's `score_mod` and the tensors that it captures.

    Made once per call: a preamble runs under autograd, and activation checkpointing compares the tensors that autograd saves in a call and
    in its recomputation.
    """

    program: Program
    captured: Sequence[Tensor]

    @classmethod
    def of(cls, traced: Traced | None) -> _Score | None:
        return None if traced is None else cls(traced.program, traced.captured())


def _repeated_score(q: Tensor, options: AttendOptions) -> _Score | None:
    """The score program of a call that may be prepared: by the guard of a cached trace if it passes, else traced."""
    if options.score_mod is None:
        return None
    guarded = traces.guarded(options.score_mod, "score", score_dtype=state_dtype(q.dtype))
    return _Score.of(_traced_score(options.score_mod, state_dtype(q.dtype))) if guarded is None else _Score(*guarded)


def _attend_prepared(
    q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, entry: CallEntry, score: _Score | None
) -> ops.Outputs | None:  # fmt: skip
    """`attend` by a prepared call of the entry; None if there is none."""
    captured = () if score is None else score.captured
    call = entry.call(None) if score is None else entry.call_with_score(score.program.key, captured)
    if call is None:
        return None
    out, lse = call(q, k, v, options.sink, captured, lse=options.return_lse)
    return out, _NOTHING if lse is None else lse, _NOTHING


def _attend_selected(q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, scale: float) -> ops.Outputs | None:
    """`attend` over keys chosen at run time by a kernel that makes its tile lists on the device; None for other calls."""
    if torch.compiler.is_dynamo_compiling() or options.max_scores:
        return None
    split = selected.split_mask(options.mask, q, k, kernel=options.kernel)
    if split is None:
        return None
    rest = None if split.rest is None else split.rest.traced
    score = _Score.of(_traced_score(options.score_mod, state_dtype(q.dtype)))
    inputs = _call_tensors(q, k, v, options, rest, score)
    results = selected.attend(inputs, CallOptions(spec=_spec(options, rest, score), scale=scale), split)
    return None if results is None else (*results, _NOTHING)


def _attend_listed(q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, scale: float, owner: Any) -> ops.Outputs | None:
    """`attend` over the tiles of a BlockMask on a GPU, whose lists stay there; None for other calls. owner: the mask of the call."""
    if options.max_scores or not selected.lists_tiles(owner, q, k, kernel=options.kernel):
        return None
    mask = _checked_mask(selected.read_again(owner) if is_captured(q) else owner, q, k)
    assert isinstance(mask, FromBlockMask)
    score = _Score.of(_traced_score(options.score_mod, state_dtype(q.dtype)))
    inputs = _call_tensors(q, k, v, options, mask.traced, score, mask_on_host=False)
    results = selected.attend_listed(inputs, CallOptions(spec=_spec(options, mask.traced, score), scale=scale), mask.listed)
    return None if results is None else (*results, _NOTHING)


def _attend_selected_compiled(q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, scale: float) -> ops.Outputs | None:
    """`attend` as Dynamo traces it, over keys chosen at run time; None for calls that take the choice as a lookup table."""
    from longspan._engine.compiled import attend_compiled

    split = split_selection(options.mask)
    if split is None or options.max_scores or options.kernel == "dense":
        return None
    sizes = AttentionSizes(q_len=q.shape[2], kv_len=k.shape[2], batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1])
    options.mask.extent.check(f"mask {options.mask}", q_len=sizes.q_len, kv_len=sizes.kv_len, batch=sizes.batch, heads=sizes.heads)
    rest = None if split.rest is None or isinstance(split.rest, Full) else split.rest
    return attend_compiled(q, k, v, options, mask=rest, scale=scale, returned=True, selection=split.selection.checked(sizes))


def _attend_over_mesh(q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, plan: PlanHandle) -> ops.Outputs:
    """`attend` with a plan. If the arguments of one rank are wrong, every rank raises."""
    if not isinstance(plan, PlanHandle):
        hint = "; this is a set of plans: pick one by its mask's name, plans[name]" if isinstance(plan, Mapping) else ""
        raise TypeError(f"plan: expected a plan made by longspan.plan, got {type(plan).__name__}{hint}")
    if torch.compiler.is_dynamo_compiling():
        from longspan._engine.compiled import attend_compiled

        if isinstance(options.mask, Mask) and options.mask.has_selection:
            raise RuntimeError(_SELECTED_MESH_COMPILED)
        _reject_mask(options.mask)
        scale = _checked_scale(q, k, v, options)
        # Without shared heads, lse is not exchanged.
        return attend_compiled(q, k, v, options, mask=None, scale=scale, returned=options.return_lse or plan.data.degree == 1)
    repeated = repeated_calls.options(plan.data, q, k, v, options)
    if repeated is not None:
        if plan.mask_sources:
            with raising_on_all_ranks(plan.data.mesh):
                plan.check_mask()
        return eager.attend(CallTensors(q=q, k=k, v=v), repeated, plan.data)
    with raising_on_all_ranks(plan.data.mesh):
        selects = isinstance(options.mask, Mask) and options.mask.has_selection
        scale = _checked_scale_over_mesh(q, k, v, options, plan, selects=selects)
        score = _Score.of(_traced_score(options.score_mod, state_dtype(q.dtype)))
        inputs = _call_tensors(q, k, v, options, None, score)
        chosen = None
        if selects:
            call = CallOptions(spec=_spec(options, None, score), scale=scale)
            chosen = selected_mesh.checked_selection(plan.data, options.mask, inputs, call)
    if chosen is not None:
        return *selected_mesh_ops.attend(inputs, call, plan, chosen), _NOTHING
    results = _run(inputs, options, None, score, scale)
    if options.kernel != "dense" and is_plain((q, k, v)) and inputs.q is q and inputs.k is k and inputs.v is v:
        repeated_calls.add(plan.data, q, k, v, options, CallOptions(spec=_spec(options, None, score), scale=scale))
    return results


def _checked_scale_over_mesh(
    q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, plan: PlanHandle, *, selects: bool
) -> float:  # fmt: skip
    """`_checked_scale` of a call with a plan. Checks that depend on the key of a call only are made once.

    selects: The mask is a selection, the only mask that may be given with a plan.
    """
    callable_mod = options.score_mod is None or callable(options.score_mod)
    key = calls.key(q, k, v, options) if options.mask is None and callable_mod else None
    if key is not None:
        plan.check_mask()
        return plan_cache.scale(plan.data, key.layouts, lambda: _checked_scale(q, k, v, options))
    reject_transforms(planned=True)
    plan.check_mask()
    if not selects:
        _reject_mask(options.mask)
    return _checked_scale(q, k, v, options)


def _run(inputs: CallTensors, options: AttendOptions, mask: Traced | None, score: _Score | None, scale: float) -> ops.Outputs:
    """Run traced programs on checked tensors."""
    plan, kernel, spec = options.plan, options.kernel, _spec(options, mask, score)
    call = CallOptions(spec=spec, scale=scale, max_scores=options.max_scores)
    if kernel == "dense":
        if spec.invariant:
            raise NotSupported(f"kernel 'dense' does not support longspan.invariant(): expected 'auto' or one of {', '.join(INVARIANT)}")
        with without_user_defaults():
            return _dense(inputs, call) if plan is None else dense_over_mesh(inputs, call, plan.data)
    try:
        if is_plain([*inputs.differentiable, *inputs.mask_captured]):
            return eager.attend(inputs, call, None if plan is None else plan.data)
        out, lse, max_scores = ops.attend(
            inputs.q, inputs.k, inputs.v, inputs.sink, inputs.mask_captured, inputs.score_captured,
            None if plan is None else plan.token, spec.handle, scale, options.max_scores,
        )  # fmt: skip
    except RuntimeError as error:
        if "functorch transforms" in str(error):
            raise RuntimeError(ops.NO_TRANSFORMS) from error
        raise
    return out, lse, max_scores.detach()


def _spec(options: AttendOptions, mask: Traced | None, score: _Score | None) -> Spec:
    """The programs of a call. With a plan whose ranks share no heads, lse is not exchanged."""
    returns_lse = options.return_lse or options.plan is None or options.plan.data.degree == 1
    mask_program, score_program = None if mask is None else mask.program, None if score is None else score.program
    return ops.specs.of(mask_program, score_program, options.kernel, lse=returns_lse, invariant=is_invariant())


def _dense(inputs: CallTensors, options: CallOptions) -> ops.Outputs:
    scoring = Scoring(
        scale=options.scale, mask=options.spec.mask, mask_captured=inputs.mask_captured,
        score=options.spec.score, score_captured=inputs.score_captured,
    )  # fmt: skip
    return dense_attention(inputs.q, inputs.k, inputs.v, scoring, sink=inputs.sink)


def _call_tensors(
    q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, mask: Traced | None, score: _Score | None, *, mask_on_host: bool = True
) -> CallTensors:  # fmt: skip
    """The tensors of the call and the tensors that its programs capture, checked.

    mask_on_host: Tile lists that the host makes depend on the mask, so that a CUDA graph cannot see a mask that changes.
    """
    mask_captured = [] if mask is None else mask.captured()
    if mask_captured and mask_on_host and is_captured(q) and static_mask_of(mask_captured) is None:
        raise RuntimeError(MASK_IN_GRAPH)
    # Kernels read memory, which holds the opposite sign of a lazily negated view (x.conj().imag).
    inputs = CallTensors(
        q=q.resolve_neg(),
        k=k.resolve_neg(),
        v=v.resolve_neg(),
        sink=None if options.sink is None else options.sink.resolve_neg(),
        mask_captured=[_device_copies.on(t.detach() if t.requires_grad else t, q.device).resolve_neg() for t in mask_captured],
        score_captured=[] if score is None else [t.resolve_neg() for t in score.captured],
    )
    check_captured(inputs.score_captured, q, "score_mod")
    if options.kernel != "dense":
        _reject_forward_mode(inputs.differentiable)
    return inputs


def _traced_score(score_mod: Callable[..., Tensor] | None, score_dtype: torch.dtype) -> Traced | None:
    return None if score_mod is None else traces.trace(score_mod, "score", score_dtype=score_dtype)


def _checked_scale(q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> float:
    """Check every argument that needs neither the mask nor the plan. Return the scale."""
    check_tensors(q, k, v)
    check_sink(options.sink, q)
    check_name(options.kernel)
    if options.score_mod is not None and not callable(options.score_mod):
        got = type(options.score_mod).__name__
        raise TypeError(f"score_mod: expected a callable (score, b, h, q_idx, kv_idx) -> score, got {got}")
    return check_scale(options.scale, q.shape[-1])


def _reject_mask(mask: Any) -> None:
    if mask is not None:
        raise ValueError(
            "attention: expected mask=None, or mask=longspan.selected(…), with plan=…: the plan holds the mask. Leave out mask=, or make a "
            "plan for this mask"
        )


def _reject_forward_mode(tensors: list[Tensor]) -> None:
    """Raise for dual tensors: the operator has no rule for tangents, and torch would drop them silently."""
    if forward_mode_is_active() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(ops.NO_TRANSFORMS)


def _checked_mask(value: Any, q: Tensor, k: Tensor) -> Mask | None:
    """The mask of a user's value, None for full attention."""
    if value is None:
        return None
    mask = as_mask(value)
    sizes = AttentionSizes(q_len=q.shape[2], kv_len=k.shape[2], batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1])
    mask.extent.check(f"mask {mask}", q_len=sizes.q_len, kv_len=sizes.kv_len, batch=sizes.batch, heads=sizes.heads)
    return None if isinstance(mask, Full) else mask.for_sizes(sizes)
