"""Cached launches of single decode kernels. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.prepared_launch import Layouts, PreparedLaunch, hold_for_graph, layouts
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.gpu.workspace import Workspace

FLOATS = torch.empty(4, dtype=torch.float32, device="cpu")  # placeholder of the partial results in cache keys: every launch allocates them
FLAGS = torch.empty(4, dtype=torch.int32, device="cpu")  # of the flags


class LaunchShape(NamedTuple):
    """How a kernel is launched: CTAs, warps, pipeline stages; `early`: while the kernel before it ends (programmatic dependent launch);
    registers of a thread, 0: as many as the assembler likes; zeros that the kernel counts in.
    """

    ctas: int
    warps: int
    stages: int = 1
    early: bool = False
    registers: int = 0
    counters: int = 0


def prepared_for(
    kernel: Any, tensors: dict[str, Tensor | None], constants: dict[str, Any], how: LaunchShape, per_call: dict[str, Any]
) -> PreparedLaunch:  # fmt: skip
    """The launch of a kernel or of a `SplitKernel`, cached by the layouts of tensors and by constants."""
    device = next(t.device for t in reversed(tensors.values()) if t is not None and t is not FLOATS and t is not FLAGS)
    captured = [t for name in ("mask_captured", "score_captured") for t in per_call.get(name, ())]
    names = [name for name in (kernel.kernel if isinstance(kernel, SplitKernel) else kernel).arg_names if name.endswith("_stride")]
    names = [name for name in names if name not in constants]
    strides = {name: stride_of(tensors[f"{name.removesuffix('_stride')}_ptr"]) for name in names}
    prepared = _prepared(kernel, device, layouts([*tensors.values(), *captured]), tuple({**constants, **strides}.items()), how)
    if launch.capturing(device):
        hold_for_graph(prepared)
    return prepared


def stride_of(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


@lru_cache(maxsize=512)
def _prepared(
    kernel: Any, device: torch.device, _layouts: Layouts, constants: tuple[tuple[str, Any], ...], how: LaunchShape
) -> PreparedLaunch:  # fmt: skip
    known, early = dict(constants), {"launch_pdl": True} if how.early else {}
    if isinstance(kernel, SplitKernel):
        return PreparedLaunch(
            kernel=kernel.kernel, options={**kernel.options, **FUSED, **early}, ctas=how.ctas, device=device,
            descriptors=kernel.descriptors, constants=known,
        )  # fmt: skip
    tiles = {"k_desc": "DP", "rest_desc": "RESTP"} if known.get("TMA") else {}
    options = {"num_warps": how.warps, "num_stages": how.stages, **FUSED, **early}
    if how.registers:
        options["maxnreg"] = how.registers
    return PreparedLaunch(
        kernel=kernel, options=options, ctas=how.ctas, device=device,
        descriptors={name: partial(_described, rows=known["N"], columns=known[dim]) for name, dim in tiles.items()}, constants=known,
        workspace=Workspace(device=device, zeros=(how.counters,)) if how.counters else None,
    )  # fmt: skip


def _described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of keys [P, G, page_size, D] or [B, G, K, D], in tiles of rows × columns."""
    return TensorDescriptor(tensor, *launch.extents(tensor), [1, 1, rows, columns])
