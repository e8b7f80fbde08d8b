"""The `hopper` kernel: attention with any mask and score mod on Hopper GPUs, written in Gluon, the language below Triton."""

from longspan._kernels.hopper.kernel import HopperKernel

__all__ = ["HopperKernel"]
