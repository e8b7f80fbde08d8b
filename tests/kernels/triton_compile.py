"""Compile the triton kernels without a GPU and print the shared memory of a CTA.

The interpreter accepts Python that Triton's compiler rejects. test_triton runs this script in a process without the interpreter, for two
configurations. Kernels of its record (`tests.kernels.compiled_record`) are not compiled again.
`python triton_compile.py --all` compiles all configurations in some minutes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from tests.kernels.compiled_record import Record, is_recorded
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longspan._kernels.gpu import codegen
from longspan._kernels.gpu.hoisted_lookups import early_function, early_options
from longspan._kernels.triton import Tile
from longspan._kernels.triton.backward import dkdv_kernel, dq_kernel
from longspan._kernels.triton.config import choose
from longspan._kernels.triton.decode import decode_kernel
from longspan._kernels.triton.decode_call import choose_tile
from longspan._kernels.triton.forward import forward_kernel
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

triton.knobs.compilation.disable_line_info = True  # a quarter of the time
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
OPTIONS = codegen.Options(fast=True)
RECORD = Record(__file__)
TABLE = torch.zeros(64)


def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q // 3 % 5 != 1)


def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(s / 30) + (kv - q) * TABLE[h]


def compile_kernel(
    kernel: Any, tile: Tile, *, dims: tuple[int, int], dtype: str, target: int, scored: bool, streamed: tuple[str, ...], arrays: bool
) -> int:
    """Compile one kernel for contiguous inputs; returns bytes of shared memory."""
    program = trace(score, "score").program
    padded = [max(16, triton.next_power_of_2(d)) for d in dims]
    functions: dict[str, Any] = {"MASK": codegen.program_function(trace(mask, "mask").program, OPTIONS), "SCORE": None, "JOINT": None}
    if scored:
        functions["SCORE"] = codegen.program_function(program, OPTIONS)
        functions["JOINT"] = codegen.joint_function(program, joint_of(program), [kernel is dq_kernel], OPTIONS)
    known: dict[str, Any] = {
        **functions, "PER_BATCH": False, "PER_HEAD": True, "LEAD": arrays, "FOLD": not scored, "TMA": tile.tma, "ADD": arrays,
        "M": tile.m, "N": tile.n, "M_SUBS": 128 // tile.m, "N_SUBS": 128 // tile.n,
        "D": dims[0], "DP": padded[0], "E": dims[1], "EP": padded[1], "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in known:
            signature[name], constants[i,] = "constexpr", known[name]
        elif name.endswith("_stride"):
            signature[name], constants[i, 3] = ("i32", "i32", "i32", "constexpr"), 1
            attributes.update({(i, j): [["tt.divisibility", 16]] for j in range(3)})
        elif name in ("q_side", "kv_side"):
            signature[name] = ("*i32" if arrays else "constexpr",) * 3
            constants.update({} if arrays else {(i, j): None for j in range(3)})
        elif name in ("max_scores_ptr", "old_out_ptr", "old_lse_ptr", "old_max_scores_ptr") and not arrays:
            signature[name], constants[i,] = "constexpr", None
        elif tile.tma and name in streamed:
            rows, dim = (tile.m if kernel is dkdv_kernel else tile.n), padded[0 if name in ("q_ptr", "k_ptr") else 1]
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows}, {dim}]>"
        elif name in ("full", "partial"):
            signature[name] = ("*i32",) * (4 if arrays and name == "partial" else 3)
        elif name in ("mask_captured", "score_captured", "grads"):
            signature[name] = ("*fp32",)
        elif name in ("mask_sizes", "score_sizes"):
            signature[name] = ("i32",)
        elif name.endswith("_ptr"):
            in_float32 = name.startswith(("lse", "norm", "delta", "old", "max_scores"))
            signature[name] = "*fp32" if in_float32 else f"*{dtype}"
            attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = {"order": "*i32", "scale": "fp32"}.get(name, "i32")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return shared_memory(source, target, {"num_warps": tile.warps, "num_stages": tile.stages})


def shared_memory(source: ASTSource, target: int, options: dict[str, Any]) -> int:
    """Bytes of shared memory of a kernel, compiled or recorded."""
    return int(RECORD.take_or_compile(triton.compile, source, GPUTarget("cuda", target, 32), options).metadata.shared)


def decisive(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return ((q / 41).floor() == (kv / 41).floor()) & (q * 0.1 - 2.5 > torch.sqrt(kv + 0.5)) & (h / 3 < 0.7)


@triton.jit
def mask_kernel(out_ptr, b, h, captured, sizes, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    q, kv = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    tl.store(out_ptr + q * 32 + kv, MASK(b, h, q, kv, captured, sizes))


def check_rounding() -> None:
    """Raise if the machine code of a mask with comparisons has approximate quotients or fused products."""
    program = codegen.program_function(trace(decisive, "mask").program, OPTIONS)
    kinds: dict[str, Any] = {"out_ptr": "*i1", "b": "i32", "h": "i32", "captured": ("*fp32",), "sizes": ("i32",), "MASK": "constexpr"}
    source = ASTSource(fn=mask_kernel, signature=kinds, constexprs={(5,): program})
    kernel = RECORD.take_or_compile(triton.compile, source, GPUTarget("cuda", 90, 32), {})
    if is_recorded(kernel):
        return
    code = kernel.asm["ptx"]
    for wanted in ("div.rn.f32", "sqrt.rn.f32", "mul.rn.f32"):
        if wanted not in code:
            raise SystemExit(f"expected {wanted} in the mask's code")
    for other in ("div.full", "sqrt.approx", "rcp.", "fma.rn.f32"):
        if other in code:
            raise SystemExit(f"{other} in the mask's code: its last bit may be another than torch's")


def compile_decode(target: int, page_size: int, rows: int, *, latent: bool = False, merges: bool = False, fp8: bool = False) -> int:
    """Compile the decode kernel for pages, with programs; returns bytes of shared memory. latent: keys of 512 + 64 elements hold values.
    merges: its last CTA of a tile merges partial results. Otherwise, of 16 rows, a CTA computes a group of splits and stores results.
    fp8: pages hold FP8 elements.
    """
    dim = 512 if latent else 128
    tile = choose_tile(dim=dim, dtype=torch.bfloat16, rows=rows, waves=1.0, fp8=fp8)
    program, direct = trace(score, "score").program, rows == 16 and not latent and not merges
    early = early_options(program, replace(OPTIONS, direct=True))
    known: dict[str, Any] = {
        "MASK": codegen.program_function(trace(mask, "mask").program, OPTIONS), "WINDOW": 100, "PAGE": page_size, "RAGGED": True,
        "SCORE": codegen.program_function(program, early), "FOLD": False, "R": 4, "M": rows, "N": tile.n,
        "D": dim, "DP": dim, "E": dim, "EP": dim, "REST": 64 if latent else 0, "RESTP": 64, "SHARED": latent,
        "SAFE_DIM": 128, "TMA": tile.tma, "PRECISION": "tf32", "EARLY": target >= 90, "flags_ptr": None,
        "GROUPED": direct, "DIRECT": direct, "MASK_LOOKUPS": None,
        "SCORE_LOOKUPS": early_function(program, early), "SPLITS": 8, "MERGED_ROWS": 4 if merges else 0,
        "K_SCALE": 0.5 if fp8 else None, "V_SCALE": 0.5 if fp8 else None,
    }  # fmt: skip
    if not merges:
        known["counters_ptr"] = None
        known |= {} if direct else dict.fromkeys(("out_ptr", "lse_ptr", "sink_ptr"))
    kinds: dict[str, Any] = {
        "q_ptr": "*bf16",
        "k_ptr": "*fp8e4nv" if fp8 else "*bf16",
        "v_ptr": "*fp8e4nv" if fp8 else "*bf16",
        "k_new_ptr": "*bf16",
        "v_new_ptr": "*bf16",
        "out_ptr": "*bf16",
        "sink_ptr": "*fp32",
        "lse_ptr": "*fp32",
    }
    kinds |= {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "scale": "fp32", "lse_stride": ("i64", "i64", "i64")}
    kinds |= dict.fromkeys(("table_ptr", "ranges_ptr", "counters_ptr"), "*i32")
    kinds |= dict.fromkeys(("mask_captured", "score_captured"), ("*fp32",)) | dict.fromkeys(("mask_sizes", "score_sizes"), ("i32",))
    if tile.tma:
        kinds |= {name: f"tensordesc<bf16[1, 1, {tile.n}, {width}]>" for name, width in (("k_desc", dim), ("rest_desc", 64))}
    else:
        known |= {"k_desc": None, "rest_desc": None}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(decode_kernel.arg_names):
        if name in known:
            signature[name], constants[i,] = "constexpr", known[name]
        elif name.endswith("_stride") and name not in kinds:
            signature[name], constants[i, 3] = ("i64", "i64", "i64", "constexpr"), 1
            attributes.update({(i, j): [["tt.divisibility", 16]] for j in range(3)})
        else:
            signature[name] = kinds.get(name, "i32")
            if name.endswith("_ptr"):
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=decode_kernel, signature=signature, constexprs=constants, attrs=attributes)
    return shared_memory(source, target, {"num_warps": tile.warps, "num_stages": tile.stages(paged=page_size > 0)})


def main() -> None:
    check_rounding()
    print(f"sm_90 decode_kernel that merges: {compile_decode(90, 64, 16, merges=True)} bytes", flush=True)
    print(f"sm_90 decode_kernel of FP8 pages: {compile_decode(90, 64, 16, fp8=True)} bytes", flush=True)
    for target, page_size, rows in [(90, 64, 16), (80, 16, 16), (90, 16, 64)] * ("--all" in sys.argv):
        print(f"sm_{target} decode_kernel, pages of {page_size}, {rows} rows: {compile_decode(target, page_size, rows)} bytes", flush=True)
    if "--all" in sys.argv:
        for target, rows in ((90, 16), (90, 64)):
            print(f"sm_{target} decode_kernel, latent, {rows} rows: {compile_decode(target, 64, rows, latent=True)} bytes", flush=True)
    grid = [(90, (64, 64), "bf16", True, True), (80, (32, 32), "fp16", False, False)]
    if "--all" in sys.argv:
        grid += [(90, (128, 128), "bf16", True, True), (80, (64, 64), "fp16", False, False)]
        grid += [(target, (64, 64), "bf16", False, True) for target in (80, 90)]
        grid += [(t, d, dt, True, False) for t in (80, 90) for d in ((128, 128), (192, 128), (256, 256)) for dt in ("fp16", "fp32")]
    for target, dims, dtype, scored, arrays in grid:
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        d, e = (max(16, triton.next_power_of_2(x)) for x in dims)
        config = choose(capability=(target // 10, target % 10), d=d, e=e, dtype=torch_dtype, scored=scored, looks_up=False, fine=False)
        for kernel, tile in ((forward_kernel, config.forward), (dkdv_kernel, config.dkdv), (dq_kernel, config.dq)):
            tile = replace(tile, tma=target >= 90)
            if "--all" not in sys.argv:  # the same code, unrolled less
                tile = replace(tile, m=64, n=32, warps=4)
            streamed = ("q_ptr", "do_ptr") if kernel is dkdv_kernel else ("k_ptr", "v_ptr")
            used = compile_kernel(kernel, tile, dims=dims, dtype=dtype, target=target, scored=scored, streamed=streamed, arrays=arrays)
            print(f"sm_{target} {kernel.fn.__name__} {dims} {dtype} {tile} scored={scored} arrays={arrays}: {used} bytes", flush=True)
            if used > SHARED_MEMORY[target]:
                raise SystemExit(f"more shared memory than sm_{target} has")
    RECORD.save()


if __name__ == "__main__":
    main()
