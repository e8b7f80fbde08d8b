"""Compile the Hopper kernels without a GPU, through the launches of real calls, and print their shared memory and register spills.

Run as a process of its own, without Triton's interpreter: Triton gets a driver that knows the compilation target only. Fails if a kernel
needs more shared memory than an SM has, if the assembler serializes wgmma, or if a warp group may arrive at an mbarrier before all of its
warps are there. Compiles kernels that its record does not have (`tests.kernels.compiled_record`). `--all` compiles all head dims and
variants, `--selected` only kernels of chosen tiles and keys. Another Triton: put its folder first in PYTHONPATH.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from tests.kernels.calls import backward, forward
from tests.kernels.compiled_record import TARGET, Record, is_recorded, parameter_bytes
from tests.kernels_of_calls import SHARED_MEMORY, pretend_device
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import longspan as ls
from longspan._kernels.gpu import assembler, compilation, prepared_launch
from longspan._kernels.gpu.driver_launch import parameters
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.gpu.selected_tables import computes_heads_alone
from longspan._kernels.hopper import HopperKernel, kernel, passes
from longspan._kernels.hopper.kernel import HopperState
from longspan._kernels.protocol import AttentionInputs, Grads, Selection, State, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

HOPPER = HopperKernel(fallback=TritonKernel())

ASSEMBLER = assembler.tool(TARGET).path
IDS = torch.arange(1400) // 90
SLOPES = torch.linspace(0.1, 0.9, 4)
compiled: list[Any] = []  # (kernel's name, compiled kernel)
assembler_logs: dict[str, str] = {}  # by hash of the compiled kernel; kernels of Triton's cache are not assembled again


def compile_instead_of_launching(record: Record) -> None:
    """Patch torch and Triton so that launches for CPU tensors compile for sm_90, unless the record has the kernel, and stop there."""
    triton.knobs.nvidia.dump_ptxas_log = True  # Triton prints the log of the assembler
    triton.knobs.compilation.disable_line_info = True  # a quarter of the time
    pretend_device()
    CompiledKernel._init_handles = lambda self: None  # type: ignore[method-assign]
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        with redirect_stdout(io.StringIO()) as printed:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))
        if printed.getvalue():
            assembler_logs[kernel.hash] = printed.getvalue()
        return kernel

    JITFunction.run = only_compile  # type: ignore[method-assign]
    compilation._take_or_compile = partial(record.take_or_compile, compilation._compile_once)
    prepared_launch.driver_launch = check_parameters  # type: ignore[assignment]
    # A prepared launch would bypass Triton the second time.
    PreparedLaunch.__call__ = PreparedLaunch.compile  # type: ignore[method-assign]


def check_parameters(code: Any, arguments: list[Any], varying: list[bool], **_: Any) -> None:
    """Check the layout of a driver launch's argument block against the parameters in PTX."""
    expected = [p.bytes for p in parameters(code, arguments, varying)] + [8, 8]
    sizes = parameter_bytes(code)
    if sizes != expected:
        raise SystemExit(f"{code.name}: expected kernel parameters of {expected} bytes, PTX has {sizes}")


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (IDS[q] == IDS[kv])


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(s / 30) + SLOPES[h] * (kv - q)


def zero_state(dims: tuple[int, int]) -> State:
    return State(out=torch.zeros(1, 4, 400, dims[1]), lse=torch.zeros(1, 4, 400))


def one_call(dims: tuple[int, int], dtype: torch.dtype, *, scored: bool, staged: bool) -> None:
    """Forward and backward of one call.

    staged: with a running state, tilings by arrays and gradients that are added to; also with complete query tiles and KV in two buffers.
    """
    q, k, v = (torch.randn(1, h, 400, d, dtype=dtype) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    # A mask of bounds by row (`gpu.row_bounds`), and one that is evaluated for each pair.
    traced = trace(ls.causal() & ls.documents(ids=IDS) if staged and not scored else documents, "mask")
    tiles = Tiling(length=400, block=128)
    if staged:
        row = torch.tensor([0, 128, 253, 381])  # not multiples of 4
        tiles = Tiling(length=400, block=128, row=row, pos=row + 1000, count=torch.tensor([128, 125, 128, 19]))
    score = trace(softcap, "score")
    more = {"score": score.program, "score_captured": score.captured(), "joint": joint_of(score.program)} if scored else {}
    work = Work(
        table=(ls.causal() & ls.documents(ids=IDS[:400])).block_table(400, 400, block=128), q_tiles=tiles, kv_tiles=tiles, scale=0.1,
        mask=traced.program, mask_captured=traced.captured(), **more,
    )  # fmt: skip
    if max(dims) <= 64 and not scored and not staged:  # with three consumer warp groups, with and without a mask
        with patch.object(passes, "takes_three_groups", lambda **sizes: True):
            for masked in (work, replace(work, mask=None, mask_captured=())):
                forward(HOPPER, q, k, v, masked, state=None, final=True)
    local_kv, received = (k[:, :, :128], v[:, :, :128]), (k[:, :, 128:], v[:, :, 128:])
    if not staged:
        result = forward(HOPPER, q, k, v, work, state=None, final=True)
    else:
        complete = replace(work, complete_q_tiles=torch.tensor([True, True, False, False]))
        # All in one program: a forward kernel takes 11 s.
        result = forward(HOPPER, q, *received, complete, local_kv=local_kv, state=zero_state(dims), final=False)
        assert isinstance(result, HopperState) and result.completed_out is not None
        if "--all" in sys.argv:
            forward(HOPPER, q, k, v, complete, state=zero_state(dims), final=False)
            forward(HOPPER, q, *received, work, local_kv=local_kv, max_scores=True)
            forward(HOPPER, q, k, v, complete, state=None, final=False)
            for final, max_scores in ((False, True), (False, False), (True, False)):
                forward(HOPPER, q, k, v, work, state=zero_state(dims), final=final, max_scores=max_scores)
    out = result.out.to(dtype)
    grad = torch.randn_like(out)
    backward(HOPPER, q, k, v, out, result.lse, grad, None, work, needs=[True] * scored, wide=staged)
    if max(dims) <= 64 and not scored:  # with dQ one step late
        with patch.object(passes, "takes_late_dq", lambda steps: True):
            backward(HOPPER, q, k, v, out, result.lse, grad, None, work, needs=[], wide=staged)
    torch.use_deterministic_algorithms(True)
    # dQ in a fixed order, and by a kernel of its own, as gradients of captured tensors need it too
    for ordered in (True, False) if "--all" in sys.argv or not scored else (True,):
        with patch.object(kernel, "ordered_dq_pays", lambda *_, ordered=ordered, **__: ordered):
            backward(HOPPER, q, k, v, out, result.lse, grad, None, work, needs=[False] * scored, wide=staged)
    torch.use_deterministic_algorithms(False)
    if not scored:  # partial tiles before full ones; dQ with dK and dV, and by a kernel of its own
        window = replace(work, invariant=True, table=ls.sliding_window(300).block_table(400, 400, block=128))
        for ordered in (True, False):
            with patch.object(kernel, "ordered_dq_pays", lambda *_, ordered=ordered, **__: ordered):
                backward(HOPPER, q, k, v, out, result.lse, grad, None, window, wide=False)
    if staged:  # KV in two buffers
        into = Grads(q=torch.zeros(q.shape), k=torch.zeros(k.shape), v=torch.zeros(v.shape), captured=[None] * scored)
        backward(HOPPER, q, *received, out, result.lse, grad, None, work, local_kv=local_kv, needs=[False] * scored, wide=True, into=into)


def selected_call(block: tuple[int, int], dims: tuple[int, int], *, shared: int = 2) -> None:
    """Forward and backward over chosen tiles of `block` queries and keys. shared: query heads of a KV head."""
    q, k, v = (torch.randn(1, h, 400, d, dtype=torch.bfloat16) for h, d in ((2 * shared, dims[0]), (2, dims[0]), (2, dims[1])))
    traced = trace(ls.causal(), "mask")
    table = ls.causal().block_table(400, 400, block=block)
    tiles = (Tiling(length=400, block=b) for b in block)
    work = Work(table=table, q_tiles=next(tiles), kv_tiles=next(tiles), scale=0.1, mask=traced.program, selects=True)
    indices = torch.zeros(1, 2, -(-400 // block[0]), 3, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=block[1], q_granularity=block[0], heads_per_choice=shared)
    work = HOPPER.select(AttentionInputs(q=q, k=k, v=v), work, selection)
    alone = computes_heads_alone(work)
    result = forward(HOPPER, q, k, v, work, state=None, final=True, max_scores=not alone)
    if alone:
        forward(HOPPER, q, k, v, work, state=State(out=torch.zeros(result.out.shape), lse=torch.zeros(result.lse.shape)), final=True)
    elif "--all" in sys.argv:
        result = forward(HOPPER, q, k, v, work, state=None, final=True)
    out = result.out.to(q.dtype)
    backward(HOPPER, q, k, v, out, result.lse, torch.randn_like(out), None, work, needs=[], wide=False)


def gathered_call(heads: int, dims: tuple[int, int], queries: int = 1) -> None:
    """Forward and backward over single chosen keys of one KV head, a list for `queries` queries."""
    q, k, v = (torch.randn(1, h, 400, d, dtype=torch.bfloat16) for h, d in ((heads, dims[0]), (1, dims[0]), (1, dims[1])))
    traced = trace(ls.causal(), "mask")
    tiles = Tiling(length=400, block=64)
    table = ls.causal().block_table(400, 400, block=(64, 64))
    work = Work(table=table, q_tiles=tiles, kv_tiles=tiles, scale=0.1, mask=traced.program, selects=True)
    indices = torch.zeros(1, 1, 400 // queries, 70, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=1, q_granularity=queries, heads_per_choice=heads)
    work = HOPPER.select(AttentionInputs(q=q, k=k, v=v), work, selection)
    sink = State(out=torch.zeros(1, heads, 400, dims[1]), lse=torch.zeros(1, heads, 400))
    for state in (None, sink) if "--all" in sys.argv else (None,):
        result = forward(HOPPER, q, k, v, work, state=state, final=True)
    out = result.out.to(q.dtype)
    backward(HOPPER, q, k, v, out, result.lse, torch.randn_like(out), None, work, needs=[], wide=False)


def assemble(code: Any) -> str:
    """The assembler's output for a compiled kernel: registers, spills and warnings."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(code.asm["ptx"], encoding="utf-8")
        command = [ASSEMBLER, "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check_arrivals(code: Any) -> None:
    """Check that a barrier of the warp or warp group precedes every arrival and every release addition by one of its threads.

    Without it, other threads could still access the buffer that the arrival releases. Gluon inserts these barriers in all supported
    versions of Triton, but does not document it.

    Not checked: cp.async.mbarrier.arrive, by which each thread arrives for its own copies.
    """
    orders_or_stores = r"\b(bar|barrier|mbarrier|wgmma|fence|cp)\.|\bst\.(shared|global)|stmatrix"
    by_kind = {  # what hands over, and instructions that may not stand between a barrier and it
        r"(?<!cp\.async\.)mbarrier\.arrive\.shared": rf"{orders_or_stores}|\bld\.shared|ldmatrix",
        r"\b(atom|red)\.global\.gpu\.(release|acq_rel)\.": orders_or_stores,  # of global memory: the adding thread may load its address
    }
    before = dict.fromkeys(by_kind, "")
    for line in code.asm["ptx"].splitlines():
        for kind, others in by_kind.items():
            if re.search(kind, line) and not re.search(r"\bbar(rier)?\.(cta\.|warp\.)?sync", before[kind]):
                raise SystemExit(f"expected a barrier of the warp group before {line.strip()}, got {before[kind].strip()}")
            if re.search(others, line):
                before[kind] = line


ONE_GROUP = ("forward_one_kernel", "dq_one_kernel")  # kernels of which two CTAs share an SM


def check_counters(name: str, code: Any) -> None:
    """Item counters, one site before the loop and one in it, are relaxed. Arrival counters of split items hand over partial results.

    Of kernels with one consumer warp group, the first item is the CTA's number: they have no site before the loop.
    """
    orders = re.findall(r"atom\.global\.gpu\.(\w+)\.add\.u32", code.asm["ptx"])
    expected = 1 if name in ("columns_kernel", *ONE_GROUP) else 2 if "counter" in code.src.fn.arg_names else 0
    assert orders.count("relaxed") == expected, f"{name}: item counters are {orders}"
    assert name != "forward_kernel" or orders.count("acq_rel") in (0, 2), f"{name}: arrival counters are {orders}"


def check_functions(name: str, code: Any) -> None:
    """The warp groups of the forward kernel, all of four warps, share functions: the main loop is traced once for each kind of block."""
    loops = re.findall(r"tt\.func private @\S*attend_blocks", code.asm["source"])
    assert len(loops) <= 2 or name != "forward_kernel", f"{name}: the main loop was traced {len(loops)} times"


def main() -> None:
    record = Record(__file__)
    compile_instead_of_launching(record)
    grid = [((128, 128), torch.bfloat16, True, True)]
    if "--all" in sys.argv:
        dims = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (72, 200), (256, 256))
        grid = [(d, torch.bfloat16, scored, staged) for d in dims for scored in (False, True) for staged in (False, True)]
    calls = [
        (f"{dims} {dtype} scored={scored} staged={staged}", partial(one_call, dims, dtype, scored=scored, staged=staged))
        for dims, dtype, scored, staged in grid
    ]
    blocks = ((64, 64), (128, 64), (64, 128), (128, 128)) if "--all" in sys.argv else ((64, 64),)
    calls += [(f"(128, 128) selected={block}", partial(selected_call, block, (128, 128))) for block in blocks]
    alone = (((64, 64), (128, 128)), ((64, 128), (64, 128)), ((64, 64), (72, 40))) if "--all" in sys.argv else (((64, 64), (128, 128)),)
    calls += [(f"{dims} selected={block}, one head", partial(selected_call, block, dims, shared=1)) for block, dims in alone]
    gathered = ((64, (128, 128), 1), (128, (128, 128), 1), (64, (64, 64), 1), (32, (128, 64), 1), (8, (128, 128), 16))
    gathered = gathered if "--all" in sys.argv else gathered[:1]
    calls += [(f"{call[1]} {call[0]} heads, {call[2]} queries gathered", partial(gathered_call, *call)) for call in gathered]
    for name_of_call, call in calls if "--selected" not in sys.argv else calls[-len(blocks) - len(alone) - len(gathered) :]:
        compiled.clear()
        call()
        assert compiled, "no kernel was launched"
        programs = {code.hash: (name, code) for name, code in compiled}  # several calls launch the same program: assemble it once
        for name, code in programs.values():
            if is_recorded(code):
                continue
            check_arrivals(code)
            check_counters(name, code)
            check_functions(name, code)
            log = assembler_logs.get(code.hash) or assemble(code)
            spilled = re.search(r"(\d+) bytes spill stores", log)
            used = f"{code.metadata.shared} bytes shared, {spilled[1] if spilled else '?'} bytes spilled"
            print(f"{name} {name_of_call}: {used}", flush=True)
            limit = SHARED_MEMORY // 2 - 512 if name in ONE_GROUP else SHARED_MEMORY  # two CTAs and 1 KiB of each
            if code.metadata.shared > limit:
                raise SystemExit(f"expected at most {limit} bytes of shared memory")
            if "serialized" in log:
                raise SystemExit(f"the assembler serialized wgmma: {log}")
    record.save()


if __name__ == "__main__":
    main()
