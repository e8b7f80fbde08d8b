"""One attention call over a mesh, as one rank sees it: its kernel, its local schedule and its transposes.

Legend as in `longspan._kernels.protocol`; B, H, G, Q, K are those of this rank's shards (after the Ulysses transpose, where there is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement
from longspan._comm.group import Group
from longspan._engine.kv_exchange import KVExchange, KVFormat, sends_kv_separately
from longspan._engine.local_schedule import LocalSchedule, StepTiles
from longspan._engine.pass_setup import PassSetup
from longspan._engine.plan_cache import plan_cache
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule
from longspan._engine.spec import Spec
from longspan._engine.step_calls import StepCalls
from longspan._engine.ulysses import UlyssesTranspose
from longspan._engine.values import CallTensors
from longspan._kernels.protocol import AttentionInputs, Work, state_dtype
from longspan._kernels.registry import KernelCall, choose, combined_capabilities, torch_settings
from longspan._masks.block_table import BLOCK_SIZE
from longspan._masks.joint import Joint
from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedCall:
    """One pass over a mesh. Of tensors that its methods take, only shape, dtype and device matter, unless they say otherwise."""

    plan: PlanData
    spec: Spec
    scale: float
    score_captured: Sequence[Tensor]
    heads: int
    kv_heads: int
    device: torch.device
    agreement: Agreement
    setup: PassSetup | None = None  # of this pass; None for calls that are only checked, and for those without steps

    @cached_property
    def transpose(self) -> UlyssesTranspose | None:
        """The Ulysses transpose around the call; None where ranks do not share heads."""
        plan = self.plan
        if plan.head_axis is None or plan.degree == 1:
            return None
        members = next(group for group in plan.groups.tolist() if plan.mesh.rank in group)
        lengths, kv_lengths = (tuple(layout.local_len(r) for r in members) for layout in plan.layouts)
        return UlyssesTranspose(
            group=plan.mesh.group(plan.head_axis), lengths=lengths, kv_lengths=kv_lengths, heads=self.heads, kv_heads=self.kv_heads
        )

    @cached_property
    def captured_here(self) -> list[Tensor]:
        """The tensors that the score program reads, on the device of the queries."""
        return [t.to(self.device) for t in self.score_captured]

    @cached_property
    def _joint(self) -> Joint | None:
        return self.spec.joint(self.score_captured)

    def work(self, tiles: StepTiles, row: int, *, backward: bool, concurrent: bool = False) -> Work:
        """A step's tiles as work for a kernel. row: the batch row, where batch rows are laid out differently."""
        return Work(
            table=tiles.table,
            q_tiles=tiles.q_tiles,
            kv_tiles=tiles.kv_tiles,
            scale=self.scale,
            mask=self.plan.mask.program,
            mask_captured=plan_cache.captured(self.plan, self.device),
            score=self.spec.score,
            score_captured=self.captured_here,
            joint=self._joint if backward else None,
            first_batch=row if self.plan.batch_layouts > 1 else 0,
            first_head=0 if self.transpose is None else self.transpose.local_heads.start,
            mask_is_fixed=True,  # copies that belong to the plan
            complete_q_tiles=None if backward else tiles.complete_q_tiles,
            concurrent=concurrent,
        )

    def pass_setup(self, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> PassSetup:
        """The kernel of a pass and the local schedule in the kernel's tile size. Cached."""
        key = (self.spec.handle, q.shape, k.shape, v.shape, q.dtype, q.device, backward, torch_settings())
        return plan_cache.pass_setup(self.plan, key, lambda: self._choose(q, k, v, backward=backward))

    def kernel_calls(self, schedule: LocalSchedule, q: Tensor, k: Tensor, v: Tensor) -> list[KernelCall]:
        """The kernel calls of a pass, with batch rows as `distributed` slices them. k, v: as in `Kernel.capabilities`."""
        return [
            KernelCall(
                AttentionInputs(q=q[batch], k=k[batch], v=v[batch]), self.work(tiles, row, backward=True)
            )
            for step in schedule.steps
            for row, tiles in enumerate(step.tiles)
            if not tiles.empty or step is schedule.steps[0]
            for batch in [self.batch_slice(row)]
        ]  # fmt: skip

    def batch_slice(self, row: int) -> slice:
        """The batch rows of `tiles[row]` of a step: one where batch rows are laid out differently, else all."""
        return slice(row, row + 1) if self.plan.batch_layouts > 1 else slice(None)

    def _choose(self, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> PassSetup:
        """Choose the kernel for tiles of BLOCK_SIZE, then the schedule that it prefers and supports. Raises what the calls would raise."""
        heads = None if self.transpose is None else (self.transpose.local_heads.start, self.transpose.local_heads.stop)
        options = ScheduleOptions(
            block=(BLOCK_SIZE, BLOCK_SIZE), heads=heads, backward=backward, merge_stages=k.is_cuda or self._sends_kv_separately(k, v)
        )
        kernel, _ = choose(self.spec.kernel, self.kernel_calls(local_schedule(self.plan, options), q, k, v))
        preferred = replace(options, block=kernel.block_size(AttentionInputs(q=q, k=k, v=v), self.plan.tiles[0].table))
        candidates = [preferred, options]
        if backward:  # with the local KV in two parts, if the kernel supports both
            candidates.insert(0, replace(preferred, split_bytes=(k.element_size(), self.grad_kv_dtype(q.dtype).itemsize)))
        for candidate in candidates:
            schedule = local_schedule(self.plan, candidate)
            calls = self.kernel_calls(schedule, q, k, v)
            capabilities = combined_capabilities(kernel, calls)
            if capabilities.unsupported is None:
                break
        for inputs, work in calls:
            kernel.check(inputs, work)
        separate, per_batch_row = self._sends_kv_separately(k, v), self.plan.batch_layouts > 1
        two_buffers = separate and bool(schedule.steps[0].exchanges) and not per_batch_row and capabilities.two_kv_buffers
        fmt = KVFormat(separate=separate, per_batch_row=per_batch_row, two_buffers=two_buffers)
        return PassSetup(kernel, schedule, capabilities, fmt, StepCalls(kernel))

    def kv_group(self, setup: PassSetup) -> Group | None:
        """The group of the KV exchanges of a pass; None if there are none."""
        if not setup.schedule.exchanges:
            return None
        assert self.plan.kv_axis is not None
        return self.plan.mesh.group(self.plan.kv_axis)

    def kv_exchange(self, setup: PassSetup, group: Group | None, inputs: CallTensors, *, backward: bool) -> KVExchange:
        """The KV exchange of a pass; starts to send k and v. group: from `kv_group`."""
        steps, what = setup.schedule.steps, "backward" if backward else "forward"
        return KVExchange(group, (inputs.k, inputs.v), steps, setup.fmt, what, self.agreement)

    def _sends_kv_separately(self, k: Tensor, v: Tensor) -> bool:
        """Not after a Ulysses transpose, which leaves K and V side by side."""
        return self.transpose is None and sends_kv_separately(self.plan, k, v)

    def grad_kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which partial gradients of KV return to their owner rank, for inputs of `dtype`."""
        return self.plan.grad_reduce_dtype or state_dtype(dtype)

    def steps_may_overlap(self, inputs: CallTensors, needs: Sequence[bool]) -> bool:
        """Whether steps of this backward pass may run at the same time."""
        assert self.setup is not None
        calls = self.kernel_calls(self.setup.schedule, inputs.q, inputs.k, inputs.v)
        return len(calls) > 1 and combined_capabilities(self.setup.kernel, calls, needs=needs).concurrent_backward

    def check(self, inputs: CallTensors, needs: Sequence[bool] | None) -> PassSetup | None:
        """Raise whatever a kernel would raise for this call, else return its setup. needs: as in `BackwardTensors`, None in a forward pass.

        None for the dense kernel, which has neither tiles nor stages.
        """
        if self.spec.kernel == "dense":
            return None
        q, k, v = (inputs.q, inputs.k, inputs.v) if self.transpose is None else self.transpose.gathered_shapes(inputs.q, inputs.k, inputs.v)
        if needs is None:
            setup = self.pass_setup(q, k, v, backward=False)
            self.pass_setup(q, k, v, backward=True)
            return setup
        setup = self.pass_setup(q, k, v, backward=True)
        for call_inputs, work in self.kernel_calls(setup.schedule, q, k, v):
            setup.kernel.check(call_inputs, work, needs=needs)
        return setup
