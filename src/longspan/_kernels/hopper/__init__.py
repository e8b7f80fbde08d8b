"""The `hopper` kernel: any mask and score program at the speed of the chip, in Gluon (Triton's lower language), on Hopper GPUs."""

from longspan._kernels.hopper.kernel import HopperKernel

__all__ = ["HopperKernel"]
