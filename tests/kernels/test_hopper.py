"""The Hopper kernels where there is no Hopper GPU: they compile, and refuse with a reason. What they compute is tested on the GPU, in
`tests/engine/test_grid.py` and `test_stages.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan as ls
from longspan.kernels.registry import KernelRefused


def test_the_kernels_compile_for_hopper_without_one() -> None:
    pytest.importorskip("triton.experimental.gluon")
    script = Path(__file__).with_name("hopper_compile.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_another_device_is_refused_with_the_reason() -> None:
    pytest.importorskip("triton.experimental.gluon")
    q = torch.randn(1, 2, 130, 64)
    with pytest.raises(KernelRefused, match=r"'hopper' cannot do this.*(interpreter|needs a Hopper GPU)"):
        ls.attention(q, q, q, mask=ls.causal(), kernel="hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [(torch.float32, 64, "bfloat16 and float16"), (torch.bfloat16, 44, "multiples of 8")],
    ids=["float32", "odd dim"],
)
def test_what_it_cannot_do_is_refused_and_auto_does_it(dtype: torch.dtype, dim: int, reason: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q = torch.randn(1, 2, 130, dim, device="cuda", dtype=dtype)
    with pytest.raises(KernelRefused, match=reason):
        ls.attention(q, q, q, mask=ls.causal(), kernel="hopper")
    assert ls.attention(q, q, q, mask=ls.causal()).isfinite().all()
