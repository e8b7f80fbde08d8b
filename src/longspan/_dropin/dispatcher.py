"""One mesh, one rule of who owns which tokens, and the plans of the calls made under them.

`Spanning` is what a context, a module's style and torch's own names all stand on: torch's two attention signatures over local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from longspan._comm.agreement import refuse
from longspan._comm.mesh import as_mesh
from longspan._dropin.attn_mask import as_mask_mod, as_score_mod, four_dims, gathered
from longspan._dropin.dtensor import local_call
from longspan._dropin.global_layout import Lengths
from longspan._dropin.intercept import out_of_compilers_sight
from longspan._dropin.mask_keys import Asked, Contents
from longspan._dropin.negotiate import NO_SIZE, Given, Met, meet
from longspan._engine.attention import attend
from longspan._engine.checks import check_kernel_options
from longspan._engine.signatures import as_autocast, is_no_mask
from longspan._masks.algebra import Mask, causal, full
from longspan._plan.layout import Layout
from longspan._plan.sharding import shard, unshard
from longspan._planner.build import plan
from longspan._planner.plan import Plan

KEPT = 64  # plans


class Spanning:
    """Attention calls on shards over a mesh. Plans are made at the first call of their kind and kept here."""

    def __init__(
        self,
        mesh: Any,
        *,
        layout: str | Layout | Callable[[int, int], Layout],
        strategy: Any = "auto",
        lengths: Iterable[int] = (),
    ) -> None:
        self.mesh = as_mesh(mesh)
        self.lengths = Lengths(self.mesh, layout, lengths)
        # A layout is given, so that there is nothing for `auto` to weigh but how keys move: only those that somebody reads.
        one_axis = "exchange" if len(self.mesh.axes) == 1 else "ulysses_exchange"
        self.strategy = one_axis if isinstance(strategy, str) and strategy == "auto" else strategy
        # Ulysses hands a rank the queries of others.
        self._queries_stay = len(self.mesh.axes) == 1 and not (isinstance(self.strategy, str) and "ulysses" in self.strategy)
        self._plans: dict[Any, Plan] = {}
        self._contents = Contents()
        self._called = False
        self.sdpa = out_of_compilers_sight(self._sdpa)
        self.flex = out_of_compilers_sight(self._flex)

    # ------------------------------------------------------------------------------------------------------------- shards

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor along `dim`; its length is known to the context from now on. Differentiable."""
        _check_dim(x, dim, "shard")
        layout = self.lengths.layout(x.shape[dim])
        if len(layout.rows) > 1 and (dim % x.ndim == 0 or x.shape[0] != len(layout.rows)):
            raise ValueError(f"shard: batch rows are laid out differently: dim 0 must be the batch of {len(layout.rows)}, got {x.shape}")
        return shard(x, dim, layout, self.mesh.rank)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's part along `dim`: a collective call. Differentiable."""
        try:
            _check_dim(x, dim, "unshard")
            (layout,) = self.lengths.of([("unshard", x.shape[dim])], x.device)
        except ValueError as error:
            refuse(self.mesh, error)
        return unshard(x, dim, layout, self.mesh)

    def positions(self, length: int) -> Tensor:
        """Where this rank's tokens of a sequence of `length` stand in it: int64 [S_local], or [B, S_local] where batch rows differ."""
        return self.lengths.layout(length).positions(self.mesh.rank)

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
        """`F.scaled_dot_product_attention` of this rank's queries over the keys of all ranks."""
        wrapped = local_call(self.mesh, self.sdpa, (query, key, value), (attn_mask, dropout_p, is_causal, scale, enable_gqa), {})
        if wrapped is not None:
            return wrapped.result  # type: ignore[no-any-return]

        def check() -> Given:
            if dropout_p:
                raise ValueError(f"dropout_p: expected 0, got {dropout_p}: attention across ranks is exact and has no dropout")
            if attn_mask is not None and is_causal:
                raise ValueError("give attn_mask or is_causal=True, not both: torch refuses the pair as well")
            q, k, v = _four_dims(*as_autocast(query, key, value))
            if not enable_gqa and q.shape[1] != k.shape[1]:
                raise ValueError(f"key: expected {q.shape[1]} heads as in query, got {k.shape[1]}; pass enable_gqa=True for grouped heads")
            if attn_mask is None:
                return Given(q=q, k=k, v=v, asked=self._contents.asked(causal() if is_causal else full()))
            return self._with_table(q, k, v, attn_mask, heads_apart=query.ndim == 4)

        met = meet(self.lengths, query, check, first=not self._called)
        asked, score_mod = (met.given.asked, None) if met.given.table is None else self._of_table(met, met.given.table)
        out, _, _ = self._attend(met, asked, score_mod, scale, lse=False, peak=False)
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
        """`flex_attention` of this rank's queries over the keys of all ranks. Mods and `block_mask` speak of whole positions."""
        rest = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
        wrapped = local_call(self.mesh, self.flex, (query, key, value), rest, {"return_aux": return_aux})
        if wrapped is not None:
            return wrapped.result

        def check() -> Given:
            check_kernel_options(kernel_options)
            if return_lse and return_aux is not None:
                raise ValueError("give return_lse or return_aux, not both; return_aux=AuxRequest(lse=True) is torch's newer form")
            q, k, v = as_autocast(query, key, value)
            if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
                raise ValueError(f"query, key, value: expected 4 dims, got shapes {[tuple(t.shape) for t in (q, k, v)]}")
            if not enable_gqa and q.shape[1] != k.shape[1]:
                raise ValueError(f"key: expected {q.shape[1]} heads, got {k.shape[1]}; pass enable_gqa=True for grouped heads")
            if k.shape[0] == 1 < q.shape[0]:
                k, v = (t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
            mask, size = block_mask, NO_SIZE
            if isinstance(mask, BlockMask):
                mask, size = (None, NO_SIZE) if is_no_mask(mask) else (mask, (mask.seq_lengths[0], mask.seq_lengths[1]))
            return Given(q=q, k=k, v=v, asked=self._contents.asked(full() if mask is None else mask), size=size)

        met = meet(self.lengths, query, check, first=not self._called)
        peak = return_aux is not None and return_aux.max_scores
        returned = return_lse or (return_aux is not None and return_aux.lse)
        out, lse, most = self._attend(met, met.given.asked, score_mod, scale, lse=returned, peak=peak)
        if return_aux is not None:
            return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most if peak else None)
        return (out, lse) if return_lse else out

    def _attend(
        self, met: Met, asked: Asked | None, score_mod: Callable[..., Tensor] | None, scale: float | None, *, lse: bool, peak: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert asked is not None
        q, k, v = met.given.q, met.given.k, met.given.v
        self._called = True  # all ranks have met, whatever follows
        found = self.plan(asked, met.layouts, q)
        return attend(q, k, v, mask=None, score_mod=score_mod, scale=scale, sink=None, kernel="auto", peak=peak, plan=found, lse=lse)

    def _with_table(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, *, heads_apart: bool) -> Given:
        """A call with an attn_mask. Its contents are looked at where they are planned, and where one row or key may mean two things."""
        given = attn_mask if heads_apart or not isinstance(attn_mask, Tensor) or attn_mask.ndim < 3 else attn_mask[:, None]
        table = four_dims(as_autocast(given)[0], q.shape[0], q.shape[1])
        rows, columns = table.shape[2:]
        matters = table.dtype == torch.bool or rows == q.shape[2] == 1 or columns == k.shape[2] == 1
        return Given(q=q, k=k, v=v, table=table, size=(rows, columns), digest=self._contents.digest(attn_mask) if matters else "")

    def _of_table(self, met: Met, table: Tensor) -> tuple[Asked, Callable[..., Tensor] | None]:
        """An attn_mask as a mask and a score_mod. Parts are put together where a plan is made: on all ranks, or on none."""
        if table.dtype != torch.bool:
            return self._contents.asked(full()), as_score_mod(table, met.form, met.around, stay=self._queries_stay)
        per_batch, per_head = (size != 1 for size in table.shape[:2])
        key = ("attn_mask", met.given.digest if met.form == "whole" else met.told)
        return Asked(key=key, per_batch=per_batch, per_head=per_head, make=lambda: as_mask_mod(gathered(table, met.form, met.around))), None

    # -------------------------------------------------------------------------------------------------------------- plans

    def plan(self, asked: Asked, layouts: list[Layout], q: Tensor) -> Plan:
        """The plan for a call; the same object for calls of the same kind. Where one rank makes a plan, all do."""
        batch = q.shape[0] if asked.per_batch or any(len(layout.rows) > 1 for layout in layouts) else None
        heads = q.shape[1] if asked.per_head else None
        key = (asked.key, layouts[0].digest, layouts[1].digest, batch, heads)
        found = self._plans.get(key)
        if found is None:
            mask = asked.make()
            given = layouts[0] if layouts[0] == layouts[1] else (layouts[0], layouts[1])
            lengths = (layouts[0].length, layouts[1].length)
            try:
                found = plan(mask, lengths, self.mesh, layout=given, strategy=self.strategy, batch=batch, heads=heads)
            except (ValueError, TypeError) as error:
                refuse(self.mesh, error)
            while len(self._plans) >= KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = found
        return found


def _check_dim(x: Tensor, dim: int, what: str) -> None:
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{what}: expected a tensor and one of its dims, got {getattr(x, 'shape', type(x).__name__)} and dim {dim}")


def _four_dims(*tensors: Tensor) -> list[Tensor]:
    dims = {t.ndim for t in tensors}
    if len(dims) != 1 or not dims <= {2, 3, 4}:
        raise ValueError(f"query, key, value: expected the same 2 to 4 dims, got shapes {[tuple(t.shape) for t in tensors]}")
    return [t if t.ndim == 4 else t[:, None] if t.ndim == 3 else t[None, None] for t in tensors]
