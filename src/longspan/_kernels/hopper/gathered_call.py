"""Launches of the kernels over single chosen keys (`hopper.gathered_forward`, `hopper.gathered_backward`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.chosen_keys import ChosenKeys, ChosenKeysCall
from longspan._kernels.gpu.compile_options import FUSED, REGISTERS
from longspan._kernels.gpu.launch_call import LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.hopper.config import MIN_GATHERED_ROWS, gathered_backward_config, gathered_forward_config
from longspan._kernels.hopper.gathered_backward import gathered_backward_kernel
from longspan._kernels.hopper.gathered_backward_pair import gathered_backward_pair_kernel
from longspan._kernels.hopper.gathered_forward import gathered_forward_kernel
from longspan._kernels.hopper.passes import persistent_ctas, streamable
from longspan._kernels.hopper.state import final_state
from longspan._kernels.protocol import AttentionInputs, Grads, Selection, State, Work

_DIMS = {64, 128}


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredKeys:
    """A selection of single keys. Its lists are made by the first pass."""

    selection: Selection
    lists: list[ChosenKeys] = field(default_factory=list)

    @property
    def signature(self) -> Hashable:
        return "gathered", self.selection.q_granularity, self.selection.heads_per_choice, tuple(self.selection.indices.shape)


def gathers_heads(inputs: AttentionInputs, selection: Selection) -> bool:
    """Whether these kernels support the head dims and the heads of a selection of single keys, and are faster than those of triton."""
    heads, queries = _rows(inputs, selection)
    fits = gathered_forward_config(heads, queries) is not None and {inputs.q.shape[-1], inputs.v.shape[-1]} <= _DIMS
    return selection.granularity == 1 and heads * queries >= MIN_GATHERED_ROWS and fits


def _rows(inputs: AttentionInputs, selection: Selection) -> tuple[int, int]:
    """Query heads of one KV head and queries with one list."""
    return min(inputs.q.shape[1] // inputs.k.shape[1], selection.heads_per_choice), selection.q_granularity


def gatherable(tensor: Tensor) -> Tensor:
    """Keys or values whose rows the kernels can copy: the tensor, or a contiguous copy.

    Triton knows that a row is aligned, as cp.async needs it, only if all strides are multiples of 16 elements, also those of dims of size
    1. The kernels multiply by the bytes of a row in 32 bits, unsigned.
    """
    aligned = all(stride % 16 == 0 for stride in tensor.stride()[:3])
    fits = aligned and tensor.stride(2) * tensor.element_size() < 2**32
    return streamable(tensor) if fits else tensor.clone(memory_format=torch.contiguous_format)


def _in_column_order(added: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of `gathered_backward_kernel` with columns in their order. In memory, column 8 h + 2 c + e of 16 is at 4 c + 2 h + e."""
    result = torch.empty(added.shape, dtype=dtype, device=added.device)
    result.unflatten(-1, (-1, 2, 4, 2)).copy_(added.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2))
    return result


class GatheredCall(LaunchCall):
    """The tensors of one call over single chosen keys."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        inputs = AttentionInputs(q=streamable(inputs.q), k=gatherable(inputs.k), v=gatherable(inputs.v))
        super().__init__(inputs, work)
        assert isinstance(work.device_tables, GatheredKeys)
        self._selection, made = work.device_tables.selection, work.device_tables.lists
        self._rows = _rows(inputs, self._selection)
        if not made:
            made.append(ChosenKeysCall(inputs, work, self._selection).lists())
        self._lists = made[0]

    def forward(self, old: State | None) -> State:
        """The final state, merged with `old`."""
        result, states = final_state(self.q, self.v, old)
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "keys_ptr": self._lists.keys, "counts_ptr": self._lists.counts, **states,
        }  # fmt: skip
        settings = {"SCALE_IN_EXP": self.work.scale > 0}
        self.launch(Pass(name="gathered forward", kernel=gathered_forward_kernel, tensors=tensors, settings=settings))
        return result

    def backward(self, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Grads:
        """Gradients in the dtypes of q, k and v."""
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (self.k, self.v))
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "keys_ptr": self._lists.keys, "counts_ptr": self._lists.counts,
            "do_ptr": streamable(grad_out), "lse_ptr": lse, "delta_ptr": delta, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv,
        }  # fmt: skip
        pair = gathered_backward_config(*self._rows).groups == 2
        kernel = gathered_backward_pair_kernel if pair else gathered_backward_kernel
        self.launch(Pass(name="gathered backward", kernel=kernel, tensors=tensors))
        return Grads(q=dq, k=_in_column_order(dk, self.k.dtype), v=_in_column_order(dv, self.v.dtype), captured=[])

    def prepare(self, one: Pass) -> PreparedLaunch:
        q, keys = self.q, self._lists.keys
        batch, heads, q_len, d = q.shape
        config = (gathered_forward_config if one.kernel is gathered_forward_kernel else gathered_backward_config)(*self._rows)
        assert config is not None
        settings = {"GROUPS": config.groups, "REGISTERS": config.registers, "V_STAGES": config.v_stages}
        items = batch * (heads // config.heads) * -(-q_len // config.queries)
        masked = self.work.mask if self._selection.q_granularity > 1 else None  # otherwise the lists are masked
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": 4, "maxnreg": config.start_registers, **FUSED, **REGISTERS},
            ctas=min(items, config.ctas_per_sm * persistent_ctas(q.device)),
            device=q.device,
            descriptors={},
            constants={
                **self._strides(one), **one.settings,
                "mask_sizes": launch.pack_sizes(self.work.mask_captured),
                "list_sizes": (*keys.shape[:3], self._selection.q_granularity, self._selection.heads_per_choice),
                "heads": heads, "shared": heads // self.k.shape[1], "q_len": q_len, "entries": keys.shape[3], "items": items,
                "MASK": launch.function(masked, self.program_options), "H": config.heads, "QUERIES": config.queries,
                "N": config.n, "STAGES": config.stages, "D": d, "E": self.v.shape[-1],
                "LOAD_REGISTERS": config.load_registers, **{n: x for n, x in settings.items() if n in one.kernel.arg_names},
            },
        )  # fmt: skip
