"""`AttentionDispatcher`: torch's two attention signatures over local shards, with the plans of the calls made through it.

A context, a module style and `torch_compat` each own one.

Legend: B batch, H heads, S_local tokens of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from longspan._comm.agreement import raise_on_all_ranks
from longspan._comm.mesh import MeshLike, context_mesh
from longspan._dropin.attn_mask import as_mask_mod, as_score_mod, gather_mask, with_four_dims
from longspan._dropin.dtensor import call_on_local
from longspan._dropin.global_layout import LayoutRule, SequenceLayouts
from longspan._dropin.intercept import hide_from_dynamo
from longspan._dropin.mask_keys import MaskKeys, MaskRequest
from longspan._dropin.negotiate import NO_SIZE, AgreedCall, LocalCall, negotiate
from longspan._engine.attention import AttendOptions, attend
from longspan._engine.checks import check_kernel_options
from longspan._engine.signatures import as_autocast, grouped_heads, is_no_mask, leading_dims
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal, full
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan._plan.sharding import check_dims, shard, unshard
from longspan._plan.strategies import StrategyName
from longspan._planner.plan import Plan
from longspan._planner.planning import plan

MAX_PLANS = 64


class AttentionDispatcher:
    """Attention calls on shards over one mesh under one rule for layouts.

    A plan is made at the first call of its kind. The last MAX_PLANS plans are cached.
    """

    def __init__(
        self, mesh: MeshLike, *, layout: str | Layout | LayoutRule, strategy: StrategyName | Schedule = "auto", lengths: Iterable[int] = ()
    ) -> None:
        self.mesh = context_mesh(mesh)
        self.sequences = SequenceLayouts(self.mesh, layout, lengths)
        # The layout is given, so "auto" has only the schedule to choose: the exchange moves only KV that some rank reads.
        exchange: StrategyName = "exchange" if len(self.mesh.axes) == 1 else "ulysses_exchange"
        self.strategy: StrategyName | Schedule = exchange if isinstance(strategy, str) and strategy == "auto" else strategy
        # Ulysses gives a rank some heads of every rank's queries.
        self._queries_stay = len(self.mesh.axes) == 1 and not (isinstance(self.strategy, str) and "ulysses" in self.strategy)
        self._plans: dict[Any, Plan] = {}
        self._mask_keys = MaskKeys()
        self.sdpa = hide_from_dynamo(self._sdpa)
        self.flex = hide_from_dynamo(self._flex)

    # ------------------------------------------------------------------------------------------------------------- shards

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of a whole tensor along `dim`. Differentiable. Makes the tensor's length known to the context."""
        _check_dim(x, dim, "shard")
        layout = self.sequences.layout(x.shape[dim])
        if len(layout.rows) > 1 and (dim % x.ndim == 0 or x.shape[0] != len(layout.rows)):
            raise ValueError(
                f"shard: expected dim 0 to be the batch of {len(layout.rows)} rows, for which the layout was made, got shape "
                f"{tuple(x.shape)} with sequence dim {dim}"
            )
        return shard(x, dim, layout, self.mesh.rank)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's shard along `dim`. A collective call. Differentiable."""
        try:
            _check_dim(x, dim, "unshard")
            layout = self.sequences.lookup("unshard", x.shape[dim], x.device)
        except (ValueError, TypeError) as error:
            raise_on_all_ranks(self.mesh, error)
        return unshard(x, dim, layout, self.mesh)

    def positions(self, length: int) -> Tensor:
        """Global positions of this rank's tokens of a sequence of `length`: int64 [S_local], or [B, S_local] if batch rows differ."""
        return self.sequences.layout(length).positions(self.mesh.rank)

    # -------------------------------------------------------------------------------------------------------------- calls

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention` of this rank's queries over the KV of all ranks."""
        wrapped = call_on_local(self.mesh, self.sdpa, (query, key, value), (attn_mask, dropout_p, is_causal, scale, enable_gqa), {})
        if wrapped is not None:
            return wrapped.result  # type: ignore[no-any-return]

        def check() -> LocalCall:
            if dropout_p:
                raise ValueError(f"dropout_p: expected 0, got {dropout_p}: attention dropout is not supported across ranks")
            if attn_mask is not None and is_causal:
                raise ValueError("expected attn_mask or is_causal=True, got both; torch refuses both as well")
            q, k, v = _with_four_dims(*as_autocast(query, key, value))
            q, k, v = grouped_heads(q, k, v, leading_dims(q, k, v, enable_gqa))
            if attn_mask is None:
                return LocalCall(q=q, k=k, v=v, mask=self._mask_keys.request(causal() if is_causal else full()))
            return self._with_attn_mask(q, k, v, attn_mask, query_dims=query.ndim)

        call = negotiate(self.sequences, query, check)
        mask, score_mod = (call.local.mask, None) if call.local.attn_mask is None else self._split_attn_mask(call, call.local.attn_mask)
        assert mask is not None
        out, _, _ = self._attend(call, mask, score_mod=score_mod, scale=scale)
        return out if query.ndim == 4 else out[:, 0] if query.ndim == 3 else out[0, 0]

    def _flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: BlockMask | Mask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: dict[str, Any] | None = None,
        *,
        return_aux: AuxRequest | None = None,
    ) -> Any:
        """`flex_attention` of this rank's queries over the KV of all ranks. Mods and `block_mask` get global positions."""
        rest = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
        wrapped = call_on_local(self.mesh, self.flex, (query, key, value), rest, {"return_aux": return_aux})
        if wrapped is not None:
            return wrapped.result

        def check() -> LocalCall:
            check_kernel_options(kernel_options)
            if return_lse and return_aux is not None:
                raise ValueError("expected return_lse or return_aux, got both; return_aux=AuxRequest(lse=True) is torch's newer form")
            q, k, v = as_autocast(query, key, value)
            if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
                raise ValueError(f"query, key, value: expected 4 dims, got shapes {[tuple(t.shape) for t in (q, k, v)]}")
            _check_heads(q, k, enable_gqa)
            if k.shape[0] == 1 < q.shape[0]:
                k, v = (t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
            mask, size = block_mask, NO_SIZE
            if isinstance(mask, BlockMask):
                mask, size = (None, NO_SIZE) if is_no_mask(mask) else (mask, (mask.seq_lengths[0], mask.seq_lengths[1]))
            return LocalCall(q=q, k=k, v=v, mask=self._mask_keys.request(full() if mask is None else mask), mask_size=size)

        call = negotiate(self.sequences, query, check)
        assert call.local.mask is not None
        wants_max = return_aux is not None and return_aux.max_scores
        wants_lse = return_lse or (return_aux is not None and return_aux.lse)
        out, lse, max_scores = self._attend(call, call.local.mask, score_mod=score_mod, scale=scale, lse=wants_lse, max_scores=wants_max)
        if return_aux is not None:
            return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores if wants_max else None)
        return (out, lse) if return_lse else out

    def _attend(
        self,
        call: AgreedCall,
        mask: MaskRequest,
        *,
        score_mod: Callable[..., Tensor] | None,
        scale: float | None,
        lse: bool = False,
        max_scores: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, max_scores) of a call; the last two only if they were asked for."""
        q, k, v = call.local.q, call.local.k, call.local.v
        made = self.plan(mask, call)
        return attend(q, k, v, AttendOptions(score_mod=score_mod, scale=scale, max_scores=max_scores, plan=made, return_lse=lse))

    def _with_attn_mask(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, *, query_dims: int) -> LocalCall:
        """A call with an attn_mask. Its contents matter if it is bool, hence part of the plan, or if its form is ambiguous."""
        # torch reads a mask of three dims as [batch, q, kv] for queries of three dims, as [heads, q, kv] for queries of four.
        has_no_heads = query_dims < 4 and isinstance(attn_mask, Tensor) and attn_mask.ndim >= 3
        mask = with_four_dims(as_autocast(attn_mask[:, None] if has_no_heads else attn_mask)[0], q.shape[0], q.shape[1])
        rows, columns = mask.shape[2:]
        matters = mask.dtype == torch.bool or rows == q.shape[2] == 1 or columns == k.shape[2] == 1
        digest = self._mask_keys.digest(attn_mask) if matters else ""
        return LocalCall(q=q, k=k, v=v, attn_mask=mask, mask_size=(rows, columns), digest=digest)

    def _split_attn_mask(self, call: AgreedCall, attn_mask: Tensor) -> tuple[MaskRequest, Callable[..., Tensor] | None]:
        """An attn_mask as a mask and a score_mod. A bool mask in parts is gathered when its plan is made: on all ranks or on none."""
        if attn_mask.dtype != torch.bool:
            score_mod = as_score_mod(attn_mask, call.form, call.shape, queries_stay=self._queries_stay)
            return self._mask_keys.request(full()), score_mod
        per_batch, per_head = (size != 1 for size in attn_mask.shape[:2])
        contents = call.local.digest if call.form == "whole" else call.parts

        def make() -> Mask:
            return as_mask_mod(gather_mask(attn_mask, call.form, call.shape))

        return MaskRequest(key=("attn_mask", contents), per_batch=per_batch, per_head=per_head, make=make), None

    # -------------------------------------------------------------------------------------------------------------- plans

    def plan(self, mask: MaskRequest, call: AgreedCall) -> Plan:
        """The plan of a call; the same object for calls of the same kind. Either all ranks make a plan or none does."""
        q, layouts = call.local.q, (call.shape.q, call.shape.kv)
        batch = q.shape[0] if mask.per_batch or any(len(layout.rows) > 1 for layout in layouts) else None
        heads = q.shape[1] if mask.per_head else None
        key = (mask.key, layouts[0].digest, layouts[1].digest, batch, heads)
        cached = self._plans.get(key)
        if cached is not None:
            return cached
        made_mask = mask.make()
        layout = layouts[0] if layouts[0] == layouts[1] else layouts
        lengths = (layouts[0].length, layouts[1].length)
        try:
            made = plan(made_mask, lengths, self.mesh, layout=layout, strategy=self.strategy, batch=batch, heads=heads)
        except (ValueError, TypeError) as error:
            raise_on_all_ranks(self.mesh, error)
        made.mask_sources = ()  # the key has the values that the plan holds; tensors may change, and have these values again
        while len(self._plans) >= MAX_PLANS:
            self._plans.pop(next(iter(self._plans)))
        self._plans[key] = made
        return made


def _check_dim(x: Tensor, dim: int, name: str) -> None:
    check_dims(name, dim)
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: expected a tensor and one of its dims, got {got} and dim {dim}")


def _check_heads(q: Tensor, k: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ValueError(f"key: expected {q.shape[1]} heads as in query, got {k.shape[1]}; pass enable_gqa=True for grouped heads")


def _with_four_dims(*tensors: Tensor) -> list[Tensor]:
    dims = {t.ndim for t in tensors}
    if len(dims) != 1 or not dims <= {2, 3, 4}:
        raise ValueError(f"query, key, value: expected the same 2 to 4 dims, got shapes {[tuple(t.shape) for t in tensors]}")
    return [t if t.ndim == 4 else t[:, None] if t.ndim == 3 else t[None, None] for t in tensors]
