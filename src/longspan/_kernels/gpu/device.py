"""Properties of the CUDA device that launches depend on."""

from __future__ import annotations

from functools import cache

import torch

from longspan._kernels.gpu.interpreter import interpreted


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (8, 0) in the interpreter."""
    return (8, 0) if interpreted() else torch.cuda.get_device_capability(device)


@cache
def sm_count(device: torch.device) -> int:
    """Number of SMs; 1 in the interpreter."""
    return 1 if interpreted() else int(torch.cuda.get_device_properties(device).multi_processor_count)
