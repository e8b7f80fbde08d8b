"""The three passes of one call as launches: forward and dQ by query tiles, dK and dV by KV tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.launch_call import Cut, LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.protocol import AttentionInputs, State, Work
from longspan._kernels.triton.backward import dkdv_kernel, dq_kernel
from longspan._kernels.triton.config import FINE, Config, choose
from longspan._kernels.triton.forward import forward_kernel

_WALKED = {"forward": ("k_ptr", "v_ptr"), "dq": ("k_ptr", "v_ptr"), "dkdv": ("q_ptr", "do_ptr")}  # tensors that the loop over tiles reads


@dataclass(frozen=True, kw_only=True)
class RowTerms:
    """Values per query row of backward passes [B, H, Q], float32, contiguous.

    `norm`: lse in base 2, written by dQ. `delta`: Σ out · grad_out − grad_lse, written by dQ if `out` is given, else read.
    """

    lse: Tensor
    norm: Tensor
    delta: Tensor
    out: Tensor | None = None
    grad_lse: Tensor | None = None


class TritonCall(LaunchCall):
    """The tensors of one call, with a method per pass. `config` replaces the built-in choice of tile sizes."""

    def __init__(self, inputs: AttentionInputs, work: Work, *, capability: tuple[int, int], config: Config | None) -> None:
        assert inputs.local_kv is None
        super().__init__(inputs, work, variant=config)
        self._capability, self._config = capability, config

    def forward(self, result: State, old: State | None, *, busy_only: bool) -> None:
        """Fill `result`, merged with the state `old`; both may be the same tensors. `busy_only`: only rows that see a tile."""
        old_out, old_lse, old_max = (None, None, None) if old is None else (old.out, old.lse, old.max_scores)
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v,
            "out_ptr": result.out, "lse_ptr": result.lse, "max_scores_ptr": result.max_scores,
            "old_out_ptr": old_out, "old_lse_ptr": old_lse, "old_max_scores_ptr": old_max,
        }  # fmt: skip
        settings = {"FOLD": self.work.score is None and self.work.scale > 0}
        self.launch(Pass(name="forward", kernel=forward_kernel, tensors=tensors, settings=settings, busy_only=busy_only))

    def dq(self, grad_out: Tensor, terms: RowTerms, dq: Tensor, captured: Sequence[Tensor | None], *, add: bool) -> None:
        """Fill `dq`, or add to it, and `terms`; add to the gradients of captured tensors that are not None."""
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "do_ptr": grad_out,
            "lse_ptr": terms.lse, "norm_ptr": terms.norm, "delta_ptr": terms.delta,
            "dq_ptr": dq, "out_ptr": terms.out, "grad_lse_ptr": terms.grad_lse,
        }  # fmt: skip
        needs = tuple(g is not None for g in captured)
        grads = tuple(g for g in captured if g is not None) or (terms.lse,)  # Triton takes no empty tuple
        self.launch(
            Pass(name="dq", kernel=dq_kernel, tensors=tensors, settings={"ADD": add}, needs=needs, grads=grads, busy_only=add)
        )  # fmt: skip

    def dkdv(self, grad_out: Tensor, terms: RowTerms, dk: Tensor, dv: Tensor) -> None:
        """Fill `dk` and `dv`. `terms`: as `dq` filled them."""
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "do_ptr": grad_out,
            "norm_ptr": terms.norm, "delta_ptr": terms.delta, "dk_ptr": dk, "dv_ptr": dv,
        }  # fmt: skip
        self.launch(Pass(name="dkdv", kernel=dkdv_kernel, tensors=tensors, needs=(False,) * len(self.work.score_captured)))

    def prepare(self, one: Pass) -> PreparedLaunch:
        """One CTA per sub-tile of the table's rows: rows of query tiles, or of KV tiles in the transposed table."""
        q, work = self.q, self.work
        d, e = q.shape[-1], self.v.shape[-1]
        config = self._config or choose(
            capability=self._capability, d=launch.padded(d), e=launch.padded(e), dtype=q.dtype, scored=work.score is not None,
            looks_up=len(work.mask_captured) > 0, fine=work.table.block == FINE,
        )  # fmt: skip
        tile = getattr(config, one.name)
        m, n = launch.sub_tile(work.q_tiles.block, tile.m), launch.sub_tile(work.kv_tiles.block, tile.n)
        in_flight = launch.programs_in_flight(q.device)
        items, constants = self.work_arguments(one, Cut(m=m, n=n, l2_bytes=config.l2_bytes, ctas_in_flight=in_flight))
        walked = _WALKED[one.name]
        # TMA reads past a short tile's end: there must be rows of other tiles, not uninitialised memory.
        tma = (
            tile.tma
            and launch.facts(work.kv_tiles if one.by_query else work.q_tiles).covers
            and all(t is not None and launch.describable(t) for t in map(one.tensors.get, walked))
        )
        describe = partial(launch.described, rows=n if one.by_query else m)
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": tile.warps, "num_stages": tile.stages, **FUSED},
            ctas=items,
            device=q.device,
            descriptors=dict.fromkeys(walked, describe) if tma else {},
            tables_vary=work.device_tables is not None,
            constants={**one.settings, **constants, "M": m, "D": d, "PRECISION": self.precision, "TMA": tma},
        )
