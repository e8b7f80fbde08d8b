"""One mesh, one rule of who owns which tokens, and the plans of the calls made under them.

`Spanning` is what a context, a module's style and torch's own names all stand on: torch's two attention signatures over local shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from longspan.comm.agree import agree
from longspan.comm.mesh import as_mesh
from longspan.dropin.dtensors import local_call
from longspan.dropin.intercept import out_of_compilers_sight
from longspan.dropin.lengths import Lengths
from longspan.dropin.masks import Around, as_mask_mod, as_score_mod, whole_mask
from longspan.engine.attention import attend
from longspan.engine.checks import check_kernel_options
from longspan.masks.algebra import Causal, Full, Mask, as_mask, causal, full
from longspan.plan.layout import Layout
from longspan.plan.make import plan
from longspan.plan.plan import Plan
from longspan.plan.shards import shard, unshard

KEPT = 64  # plans


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A mask as it was: the object, and the versions of what it captured."""

    mask: Mask
    of: weakref.ref[Any]
    captured: tuple[tuple[weakref.ref[Tensor], int], ...]

    def holds(self, value: Any) -> bool:
        return self.of() is value and all((t := ref()) is not None and t._version == version for ref, version in self.captured)


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
        self._plans: dict[Any, Plan] = {}
        self._masks: dict[int, _Kept] = {}
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
        _check_dim(x, dim, "unshard")
        (layout,) = self.lengths.of([("unshard", x.shape[dim])], x.device)
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
        try:
            if dropout_p:
                raise ValueError(f"dropout_p: expected 0, got {dropout_p}: attention across ranks is exact and has no dropout")
            if attn_mask is not None and is_causal:
                raise ValueError("give attn_mask or is_causal=True, not both: torch refuses the pair as well")
            q, k, v = _four_dims(query, key, value)
            if not enable_gqa and q.shape[1] != k.shape[1]:
                raise ValueError(f"key: expected {q.shape[1]} heads as in query, got {k.shape[1]}; pass enable_gqa=True for grouped heads")
            q, k, v, attn_mask = _as_autocast(q, k, v, attn_mask)
            layouts = self.lengths.of([("query", q.shape[2]), ("key", k.shape[2])], q.device)
        except (ValueError, TypeError) as error:
            self._refuse(error, query)
            raise
        mask, score_mod = (causal() if is_causal else full()), None
        if attn_mask is not None:
            around = Around(mesh=self.mesh, q=layouts[0], kv=layouts[1], batch=q.shape[0], heads=q.shape[1])
            found = whole_mask(attn_mask if query.ndim == 4 or attn_mask.ndim < 3 else attn_mask[:, None], around)
            if found.dtype == torch.bool:
                mask = self._remembered(attn_mask, lambda: as_mask_mod(found, around))
            else:
                score_mod = as_score_mod(found, around)
        out, _, _ = self._attend(q, k, v, mask, score_mod, scale, layouts)
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
        try:
            check_kernel_options(kernel_options)
            if return_lse and return_aux is not None:
                raise ValueError("give return_lse or return_aux, not both; return_aux=AuxRequest(lse=True) is torch's newer form")
            if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
                raise ValueError(f"query, key, value: expected 4 dims, got shapes {[tuple(t.shape) for t in (query, key, value)]}")
            if not enable_gqa and query.shape[1] != key.shape[1]:
                raise ValueError(f"key: expected {query.shape[1]} heads, got {key.shape[1]}; pass enable_gqa=True for grouped heads")
            if key.shape[0] == 1 < query.shape[0]:
                key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
            layouts = self.lengths.of([("query", query.shape[2]), ("key", key.shape[2])], query.device)
            _check_block_mask(block_mask, layouts)
        except (ValueError, TypeError) as error:
            self._refuse(error, query)
            raise
        unmasked = block_mask is None or (isinstance(block_mask, BlockMask) and min(block_mask.BLOCK_SIZE) >= 1 << 30)
        mask = full() if unmasked else self._remembered(block_mask, lambda: as_mask(block_mask))
        peak = return_aux is not None and return_aux.max_scores
        out, lse, most = self._attend(query, key, value, mask, score_mod, scale, layouts, peak=peak)
        if return_aux is not None:
            return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most if peak else None)
        return (out, lse) if return_lse else out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        score_mod: Callable[..., Tensor] | None,
        scale: float | None,
        layouts: list[Layout],
        *,
        peak: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self.plan(mask, layouts, q, k)
        self._called = True
        return attend(q, k, v, mask=None, score_mod=score_mod, scale=scale, sink=None, kernel="auto", peak=peak, plan=found)

    # -------------------------------------------------------------------------------------------------------------- plans

    def plan(self, mask: Mask, layouts: list[Layout], q: Tensor, k: Tensor) -> Plan:
        """The plan for a call; the same object for calls of the same kind."""
        rows = max(len(layout.rows) for layout in layouts)
        program = None if isinstance(mask, Full | Causal) else mask.traced.program  # those two depend on neither batch nor head
        batch = q.shape[0] if rows > 1 or (program is not None and program.uses_batch) else None
        heads = q.shape[1] if program is not None and program.uses_head else None
        key = (type(mask) if isinstance(mask, Full | Causal) else mask, layouts[0].digest, layouts[1].digest, batch, heads)
        found = self._plans.get(key)
        if found is None:
            given = layouts[0] if layouts[0] == layouts[1] else (layouts[0], layouts[1])
            lengths = (layouts[0].length, layouts[1].length)
            found = plan(mask, lengths, self.mesh, layout=given, strategy=self.strategy, batch=batch, heads=heads)
            while len(self._plans) >= KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = found
        return found

    def _remembered(self, value: Any, make: Callable[[], Mask]) -> Mask:
        """The mask made from a user's object, while the object and what it captures are as they were."""
        kept = self._masks.get(id(value))
        if kept is not None and kept.holds(value):
            return kept.mask
        mask = make()
        sources = (value, *mask.traced.sources) if isinstance(value, Tensor) else mask.traced.sources
        captured = tuple((weakref.ref(t), t._version) for t in sources if not t.is_inference())
        try:
            entry = _Kept(mask=mask, of=weakref.ref(value), captured=captured)
        except TypeError:  # cannot be referred to weakly, so not be recognised again
            return mask
        while len(self._masks) >= KEPT:
            self._masks.pop(next(iter(self._masks)))
        self._masks[id(value)] = entry
        return mask

    def _refuse(self, error: Exception, q: Any) -> None:
        """What this rank finds wrong in the first call, all ranks learn."""
        if not self._called:
            agree(self.mesh, {}, error, device=q.device if isinstance(q, Tensor) and q.is_cuda else "cpu")


def _check_dim(x: Tensor, dim: int, what: str) -> None:
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{what}: expected a tensor and one of its dims, got {getattr(x, 'shape', type(x).__name__)} and dim {dim}")


def _four_dims(*tensors: Tensor) -> list[Tensor]:
    dims = {t.ndim for t in tensors}
    if len(dims) != 1 or not dims <= {2, 3, 4}:
        raise ValueError(f"query, key, value: expected the same 2 to 4 dims, got shapes {[tuple(t.shape) for t in tensors]}")
    return [t if t.ndim == 4 else t[:, None] if t.ndim == 3 else t[None, None] for t in tensors]


def _as_autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What autocast would do to the arguments of torch's own function."""
    if not torch.is_autocast_enabled(q.device.type) or q.dtype == torch.float64:
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(q.device.type)
    mask = mask.to(dtype) if mask is not None and mask.dtype.is_floating_point else mask
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


def _check_block_mask(block_mask: Any, layouts: list[Layout]) -> None:
    if not isinstance(block_mask, BlockMask) or min(block_mask.BLOCK_SIZE) >= 1 << 30:
        return
    whole, got = (layouts[0].length, layouts[1].length), tuple(block_mask.seq_lengths)
    if whole != got:
        raise ValueError(
            f"block_mask: expected one over the whole sequence, {whole[0]} queries by {whole[1]} keys, got {got[0]} by {got[1]}; make it "
            f"with create_block_mask(mask_mod, B, H, {whole[0]}, {whole[1]}), the same on every rank"
        )
