"""Launches of `hopper.forward_one` and `hopper.backward_one`: chosen tiles of 64 queries, whose heads are computed one by one."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.compile_options import FUSED, REGISTERS
from longspan._kernels.gpu.launch_call import Cut, LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.gpu.row_bounds import bounds_functions
from longspan._kernels.gpu.workspace import Workspace
from longspan._kernels.hopper.backward_one import dq_one_kernel
from longspan._kernels.hopper.config import one_group_config
from longspan._kernels.hopper.descriptors import tile_descriptor, width
from longspan._kernels.hopper.forward_one import forward_one_kernel
from longspan._kernels.hopper.passes import L2_BYTES, RowGrads, persistent_ctas, streamable
from longspan._kernels.hopper.state import final_state
from longspan._kernels.protocol import AttentionInputs, State, Work

_CTAS_PER_SM = 2


class OneGroupCall(LaunchCall):
    """The tensors of one call."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        super().__init__(AttentionInputs(q=streamable(inputs.q), k=streamable(inputs.k), v=streamable(inputs.v)), work)

    def forward(self, old: State | None) -> State:
        """The final state, merged with `old`."""
        result, states = final_state(self.q, self.v, old)
        tensors: dict[str, Tensor | None] = {"q_ptr": self.q, "k_desc": self.k, "v_desc": self.v, **states}
        settings = {"SCALE_IN_EXP": self.work.scale > 0}
        self.launch(Pass(name="forward by one group", kernel=forward_one_kernel, tensors=tensors, settings=settings))
        return result

    def dq(self, row_grads: RowGrads, dq: Tensor) -> None:
        """Fill dq."""
        tensors: dict[str, Tensor | None] = {
            "q_ptr": self.q, "k_desc": self.k, "v_desc": self.v, "do_ptr": row_grads.grad_out, "norm_ptr": row_grads.norm,
            "delta_ptr": row_grads.delta, "dq_ptr": dq,
        }  # fmt: skip
        self.launch(Pass(name="dq by one group", kernel=dq_one_kernel, tensors=tensors))

    def prepare(self, one: Pass) -> PreparedLaunch:
        q, mask, d, e = self.q, self.work.mask, width(self.q.shape[-1]), width(self.v.shape[-1])
        config, ctas = one_group_config(d, e, with_q=one.kernel is dq_one_kernel), _CTAS_PER_SM * persistent_ctas(q.device)
        items, shared = self.work_arguments(one, Cut(m=config.m, n=config.n, l2_bytes=L2_BYTES, ctas_in_flight=ctas))
        bounds, visible = bounds_functions(mask, launch.options(self.work, q.dtype))
        kv = partial(tile_descriptor, rows=config.n)
        own = {
            "items": items, "BOUNDS": bounds, "VISIBLE": visible, "MASKED": mask is not None or self.kv_len % self.work.kv_tiles.block != 0,
            "D": q.shape[-1], "DP": d, "EP": e, "STAGES": config.stages, "V_STAGES": config.second_stages,
        }  # fmt: skip
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": 4, "maxnreg": config.start_registers, **FUSED, **REGISTERS},
            ctas=min(items, ctas),
            device=q.device,
            descriptors={"k_desc": kv, "v_desc": kv},
            constants={**one.settings, **shared, **own},
            workspace=Workspace(device=q.device, zeros=(1,)),  # the item counter
            tables_vary=True,
        )
