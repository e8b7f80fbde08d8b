"""The `triton` kernel: any mask and score program, compiled into the kernel; forward, dK/dV and dQ, on Ampere and later."""

from longspan._kernels.triton.config import Config, Tile
from longspan._kernels.triton.kernel import TritonKernel

__all__ = ["Config", "Tile", "TritonKernel"]
