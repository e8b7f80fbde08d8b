"""Compile options that all kernels share."""

from __future__ import annotations

# Scores, exponents and sums are written for fused multiply-adds. Triton 3.9 warns if the option is not given; from 3.10 on, it is off by
# default.
FUSED = {"enable_fp_fusion": True}
