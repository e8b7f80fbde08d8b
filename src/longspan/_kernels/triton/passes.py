"""The three passes of one call as launches: forward and dQ by query tiles, dK/dV by key tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.launch_call import LaunchCall
from longspan._kernels.gpu.prepared_launch import Prepared
from longspan._kernels.protocol import State, Work
from longspan._kernels.triton.backward import dkdv_kernel, dq_kernel
from longspan._kernels.triton.config import FINE, Config, choose
from longspan._kernels.triton.forward import forward_kernel


class TritonCall(LaunchCall):
    """The tensors of one call. Its methods launch; `config` replaces the built-in choice of tile sizes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, capability: tuple[int, int], config: Config | None) -> None:
        super().__init__(q, k, v, work, variant=config)
        self._capability, self._config = capability, config

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

    def _prepare(
        self,
        which: str,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        known: dict[str, Any],
        needs: tuple[bool, ...] | None,
        busy_only: bool,
    ) -> Prepared:
        """One program per sub-tile of the table's rows: rows of query tiles, or of key tiles in the transposed table."""
        q, work = self.q, self.work
        d, e = q.shape[-1], self.v.shape[-1]
        config = self._config or choose(
            capability=self._capability, d=launch.padded(d), e=launch.padded(e), dtype=q.dtype, scored=work.score is not None,
            looks_up=len(work.mask_captured) > 0, fine=work.table.block == FINE,
        )  # fmt: skip
        by_query = which != "dkdv"
        step = getattr(config, which)
        m, n = launch.sub_tile(work.q_tiles.block, step.m), launch.sub_tile(work.kv_tiles.block, step.n)
        kernel = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}[which]
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
