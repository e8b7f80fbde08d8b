"""The three passes of one call as launches: forward and dQ by query tiles, dK/dV by key tiles."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.prepared_launch import Prepared, keep_for_good, layout, prepared
from longspan._kernels.protocol import State, Work
from longspan._kernels.triton.backward import keys_kernel, queries_kernel
from longspan._kernels.triton.config import FINE, Config, choose
from longspan._kernels.triton.forward import forward_kernel

_Tensors = tuple[Tensor | None, ...]
_CAPTURED_MASK = (
    "a CUDA graph is being captured, and the mask reads tensors: which tiles exist follows from what they hold now, and a replay would not "
    "see a change. Call outside the graph, use a mask that reads no tensor, or a plan, which keeps what its mask reads"
)


def _refused() -> Prepared:
    raise RuntimeError(
        "a CUDA graph is being captured, and a call like this was never made before: make it once outside of the graph first"
    )


def _tf32() -> bool:
    """Whether float32 products may be rounded to tf32. Once the newer setting was used, torch raises where the older one is read."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


class Call:
    """The tensors of one call. Its methods launch; `config` replaces the built-in choice of tile sizes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, capability: tuple[int, int], config: Config | None) -> None:
        self.q, self.k, self.v, self.work = q, k, v, work
        self.kv_len = k.shape[2]
        self._capability, self._given = capability, config
        self.precision = "ieee" if q.dtype == torch.float32 and not _tf32() else "tf32"
        self._changing: dict[str, Any] = {
            "mask_captured": launch.pack_captured(work.mask_captured, q),
            "score_captured": launch.pack_captured(work.score_captured, q),
            "scale": float(work.scale),
            "first_b": work.first_batch,
            "first_h": work.first_head,
        }

    def forward(self, result: State, old: State | None, *, busy_only: bool) -> None:
        """Fill `result`, folding `old` in; they may be the same. `busy_only`: only rows that see something."""
        q, k, v = self.q, self.k, self.v
        before = (None, None, None) if old is None else (old.out, old.lse, old.peak)
        tensors = (q, k, v, result.out, result.lse, result.peak, *before)
        strided = (q, k, v, result.out, result.out if old is None else old.out)
        known = {"FOLD": self.work.score is None and self.work.scale > 0}
        self._launch("forward", tensors, strided, known, busy_only=busy_only)

    def queries(
        self,
        grad_out: Tensor,
        lse: Tensor,
        norm: Tensor,
        delta: Tensor,
        dq: Tensor,
        captured: Sequence[Tensor | None],
        made_of: tuple[Tensor, Tensor | None] | None,
        *,
        add: bool,
    ) -> None:
        """Fill dq, or add to it, and norm; add to gradients of captured tensors that are not None. Given (out, grad_lse), fill delta."""
        q, k, v = self.q, self.k, self.v
        out, grad_lse = made_of or (None, None)
        tensors = (q, k, v, grad_out, lse, norm, delta, dq, out, grad_lse)
        self._changing["grads"] = tuple(g for g in captured if g is not None) or (lse,)
        needs = tuple(g is not None for g in captured)
        self._launch("dq", tensors, (q, k, v, grad_out, dq, q if out is None else out), {"ADD": add}, needs=needs, busy_only=add)

    def keys(self, grad_out: Tensor, norm: Tensor, delta: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Fill dk and dv. norm and delta: what `queries` filled."""
        q, k, v = self.q, self.k, self.v
        needs = (False,) * len(self.work.score_captured)
        self._launch("dkdv", (q, k, v, grad_out, norm, delta, dk, dv), (q, k, v, grad_out, dk, dv), {}, needs=needs)

    def _launch(
        self,
        which: str,
        tensors: _Tensors,
        strided: tuple[Tensor, ...],
        known: dict[str, Any],
        *,
        needs: tuple[bool, ...] | None = None,
        busy_only: bool = False,
    ) -> None:
        work = self.work
        key: Hashable = (
            type(self),
            which,
            self.q.device,
            self._given,
            work.q_tiles.name,
            work.kv_tiles.name,
            None if work.mask is None else work.mask.key,
            None if work.score is None else work.score.key,
            self.precision,
            needs,
            busy_only,
            *known.values(),
            *map(layout, tensors),
            *map(layout, self._changing["mask_captured"]),
            None,
            *map(layout, self._changing["score_captured"]),
            None,
            *map(layout, self._changing.get("grads", ())),
        )
        make = partial(self._prepare, which, tensors, strided, known, needs, busy_only)
        capturing = launch.capturing(self.q.device)
        if capturing and work.mask_captured and not work.mask_is_fixed:
            raise RuntimeError(_CAPTURED_MASK)
        found = prepared(work.table, key, _refused if capturing else make)
        if capturing:
            keep_for_good(found)
        found(tensors, self._changing)

    def _prepare(
        self,
        which: str,
        tensors: _Tensors,
        strided: tuple[Tensor, ...],
        known: dict[str, Any],
        needs: tuple[bool, ...] | None,
        busy_only: bool,
    ) -> Prepared:
        """One program per sub-tile of the table's rows: rows of query tiles, or of key tiles in the transposed table."""
        q, work = self.q, self.work
        d, e = q.shape[-1], self.v.shape[-1]
        config = self._given or choose(
            capability=self._capability, d=launch.padded(d), e=launch.padded(e), dtype=q.dtype, scored=work.score is not None,
            looks_up=len(work.mask_captured) > 0, fine=work.table.block == FINE,
        )  # fmt: skip
        by_query = which != "dkdv"
        step = getattr(config, which)
        m, n = launch.sub_tile(work.q_tiles.block, step.m), launch.sub_tile(work.kv_tiles.block, step.n)
        kernel = {"forward": forward_kernel, "dq": queries_kernel, "dkdv": keys_kernel}[which]
        in_flight = launch.programs_in_flight(q.device)
        items, shared = self._arguments(
            which, kernel, strided, m=m, n=n, l2_bytes=config.l2_bytes, in_flight=in_flight, needs=needs, busy_only=busy_only
        )
        streamed = (1, 2) if by_query else (0, 3)
        # Past a tile's end the copy engine reads on: what lies there must be rows of other tiles, not memory that nobody wrote.
        tma = (
            step.tma
            and launch.facts(work.kv_tiles if by_query else work.q_tiles).covers
            and all(t is not None and launch.describable(t) for t in (tensors[i] for i in streamed))
        )
        describe = partial(launch.described, rows=n if by_query else m)
        return Prepared(
            kernel=kernel,
            options={"num_warps": step.warps, "num_stages": step.stages},
            programs=items,
            device=q.device,
            described=dict.fromkeys(streamed, describe) if tma else {},
            known={**known, **shared, "M": m, "D": d, "PRECISION": self.precision, "TMA": tma},
        )

    def _arguments(
        self,
        which: str,
        kernel: Any,
        strided: tuple[Tensor, ...],
        *,
        m: int,
        n: int,
        l2_bytes: int,
        in_flight: int,
        needs: tuple[bool, ...] | None,
        busy_only: bool,
        added: int = 0,
        parts: int = 1,
    ) -> tuple[int, dict[str, Any]]:
        """How many items there are, sub-tiles of m queries or of n keys in every head; and the arguments that follow from the work.
        `added`: bytes of each row walked that programs add to. `parts`: of the query heads of a key head, over which programs walk.
        """
        q, k, work = self.q, self.k, self.work
        if not launch.capturing(q.device):  # it may read captured tensors, which a CUDA graph that is being captured forbids
            check_lookups(work, q.shape[0], q.shape[1])
        d, e = q.shape[-1], self.v.shape[-1]
        by_query = which != "dkdv"
        table = work.table if by_query else work.table.transposed
        columns = work.kv_tiles if by_query else work.q_tiles
        B, H, G = q.shape[0], q.shape[1], k.shape[1] * parts
        shared = H // G
        heads = H if by_query else G
        m_subs, n_subs = work.q_tiles.block // m, work.kv_tiles.block // n
        per_batch, per_head = table.batch > 1, table.heads > 1
        rows = table.q_tiles * table.batch * (heads if per_head else 1)
        if busy_only:
            rows = launch.busy_rows(table)
        walked = self.kv_len if by_query else q.shape[2] * shared
        head_bytes = table.batch * walked * ((d + e) * q.element_size() + added)
        programs = rows * (m_subs if by_query else n_subs)
        together = shared if by_query else 1
        group = 1 if per_head else launch.head_group(heads, together, head_bytes, l2_bytes, programs=programs, in_flight=in_flight)
        on_device = launch.device_table(table, columns, q.device, shared=1 if by_query else shared, positions=work.score is not None)
        options = launch.options(work, q.dtype)
        joint = None
        if work.score is not None and work.joint is not None and needs is not None:
            joint = codegen.joint_function(work.score, work.joint, needs, options)
        strides = [name for name in kernel.arg_names if name.endswith("_stride")]
        return programs * (1 if per_batch else B) * (1 if per_head else heads), {
            **{name: t.stride() for name, t in zip(strides, strided, strict=True)}, **on_device._asdict(),
            "q_side": launch.side(work.q_tiles, q.device), "kv_side": launch.side(work.kv_tiles, q.device),
            "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
            "rows": rows, "tiles": table.q_tiles, "heads": H, "kv_heads": G, "shared": shared, "group": group,
            "q_len": q.shape[2], "kv_len": self.kv_len,
            "MASK": launch.function(work.mask, options), "SCORE": launch.function(work.score, options), "JOINT": joint,
            "PER_BATCH": per_batch, "PER_HEAD": per_head, "N": n, "M_SUBS": m_subs, "N_SUBS": n_subs,
            "DP": launch.padded(d), "E": e, "EP": launch.padded(e),
        }  # fmt: skip
