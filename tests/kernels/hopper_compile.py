"""Compile the Hopper kernels on a machine without a GPU, through the launches that a call makes, and print what each program takes.

Run in a process of its own, without Triton's interpreter: Triton is given a driver that only knows what to compile for. Fails where a
program takes more shared memory than a multiprocessor has, or where the assembler says that it runs matrix products one after the other.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from tests.kernels.calls import backward, forward
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import longspan as ls
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.hopper import HopperKernel, dq_order
from longspan._kernels.hopper.kernel import HopperState
from longspan._kernels.protocol import Grads, State, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

HOPPER = HopperKernel(fallback=TritonKernel())

SHARED_MEMORY = 227 * 1024
ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
IDS = torch.arange(1400) // 90
SLOPES = torch.linspace(0.1, 0.9, 4)
compiled: list[Any] = []


class Elsewhere:
    """A driver for a device that is not here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def stand_in() -> None:
    """Launches compile and go no further."""
    driver.set_active(Elsewhere())  # type: ignore[arg-type]
    CompiledKernel._init_handles = lambda self: None  # type: ignore[method-assign]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment, return-value]
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, found))
        return found

    JITFunction.run = only_compile  # type: ignore[method-assign]
    # A launch that was made before would be made without Triton.
    PreparedLaunch.__call__ = PreparedLaunch.compile_and_launch  # type: ignore[method-assign]


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (IDS[q] == IDS[kv])


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(s / 30) + SLOPES[h] * (kv - q)


def zero_state(dims: tuple[int, int]) -> State:
    return State(out=torch.zeros(1, 4, 400, dims[1]), lse=torch.zeros(1, 4, 400))


def one_call(dims: tuple[int, int], dtype: torch.dtype, *, scored: bool, staged: bool) -> None:
    """Both passes of one call; `staged`: folded into a state, tiles by arrays, gradients added; and with rows that are complete, and with
    keys from two places.
    """
    q, k, v = (torch.randn(1, h, 400, d, dtype=dtype) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    traced = trace(documents, "mask")
    tiles = Tiling(length=400, block=128)
    if staged:
        row = torch.tensor([0, 128, 256, 384])
        tiles = Tiling(length=400, block=128, row=row, pos=row + 1000, count=torch.tensor([128, 128, 128, 16]))
    score = trace(softcap, "score")
    more = {"score": score.program, "score_captured": score.captured(), "joint": joint_of(score.program)} if scored else {}
    work = Work(
        table=(ls.causal() & ls.documents(ids=IDS[:400])).block_table(400, 400, block=128), q_tiles=tiles, kv_tiles=tiles, scale=0.1,
        mask=traced.program, mask_captured=traced.captured(), **more,
    )  # fmt: skip
    state = zero_state(dims) if staged else None
    of = HOPPER
    found = forward(of, q, k, v, work, state=state, final=not staged, max_scores=staged)
    if staged:
        some = replace(work, complete_q_tiles=torch.tensor([True, True, False, False]))
        for before in (None, zero_state(dims)):
            state = forward(of, q, k, v, some, state=before, final=False)
            assert isinstance(state, HopperState) and state.completed_out is not None
        for final in (False, True):
            forward(of, q, k, v, work, state=zero_state(dims), final=final, max_scores=False)
    out = found.out.to(dtype)
    grad = torch.randn_like(out)
    backward(of, q, k, v, out, found.lse, grad, None, work, needs=[True] * scored, wide=staged)
    torch.use_deterministic_algorithms(True)
    for least in (0.0, 2.0):  # in turns, and in two passes
        dq_order.MIN_DENSITY = least
        backward(of, q, k, v, out, found.lse, grad, None, work, needs=[False] * scored, wide=staged)
    torch.use_deterministic_algorithms(False)
    if staged:  # KV in two buffers
        local_kv, received = (k[:, :, :128], v[:, :, :128]), (k[:, :, 128:], v[:, :, 128:])
        forward(of, q, *received, work, local_kv=local_kv)
        into = Grads(q=torch.zeros(q.shape), k=torch.zeros(k.shape), v=torch.zeros(v.shape), captured=[None] * scored)
        backward(of, q, *received, out, found.lse, grad, None, work, local_kv=local_kv, needs=[False] * scored, wide=True, into=into)


def assembled(code: Any) -> str:
    """What the assembler says of a program: registers, and its warnings."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(code.asm["ptx"], encoding="utf-8")
        command = [str(ASSEMBLER), "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> None:
    stand_in()
    grid = [((128, 128), torch.bfloat16, True, True)]
    if "--all" in sys.argv:
        dims = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        grid = [(d, torch.bfloat16, scored, staged) for d in dims for scored in (False, True) for staged in (False, True)]
    for dims, dtype, scored, staged in grid:
        compiled.clear()
        one_call(dims, dtype, scored=scored, staged=staged)
        assert compiled, "nothing was launched"
        for name, code in compiled:
            said = assembled(code)
            spilled = re.search(r"(\d+) bytes spill stores", said)
            used = f"{code.metadata.shared} bytes shared, {spilled[1] if spilled else '?'} bytes spilled"
            print(f"{name} {dims} {dtype} scored={scored} staged={staged}: {used}", flush=True)
            if code.metadata.shared > SHARED_MEMORY:
                raise SystemExit("more shared memory than a multiprocessor has")
            if "serialized" in said:
                raise SystemExit(f"matrix products one after the other: {said}")


if __name__ == "__main__":
    main()
