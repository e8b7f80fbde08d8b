"""`PassSetup`: the decisions that all calls of one kind have in common."""

from __future__ import annotations

from typing import NamedTuple

from longspan._engine.kv_exchange import KVFormat
from longspan._engine.local_schedule import LocalSchedule
from longspan._engine.step_calls import StepCalls
from longspan._kernels.protocol import Capabilities, Kernel


class PassSetup(NamedTuple):
    """One kind of pass over a mesh, as one rank makes it.

    Attributes:
        kernel: The kernel of all steps.
        schedule: This rank's steps, in the kernel's tile size.
        capabilities: The kernel's capabilities for all steps together.
        fmt: How KV lies in buffers.
        calls: The kernel calls of the steps, prepared where they repeat.
    """

    kernel: Kernel
    schedule: LocalSchedule
    capabilities: Capabilities
    fmt: KVFormat
    calls: StepCalls
