"""Compile Hopper's kernel for latent KV without a GPU, through the launches of real calls, and print its shared memory and spills.

Run as a process of its own, without Triton's interpreter (`tests.kernels.hopper_compile`).
"""

from __future__ import annotations

import re

import torch
from tests.kernels.compiled_record import Record, is_recorded
from tests.kernels.hopper_compile import SHARED_MEMORY, assemble, assembler_logs, check_arrivals, compile_instead_of_launching, compiled
from torch import Tensor

import longspan as ls
from longspan._kernels.hopper.latent_decode_call import latent_decode
from longspan._kernels.paged import PagedKV, PagedWork, query_ranges
from longspan._kernels.triton import decode_call
from longspan._masks.tracing import trace

SLOPES = torch.linspace(0.1, 0.9, 24)
OUTSIDE_LOOPS = 8  # bytes that the score group spills: addresses, used before and after a split


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(s / 30) + SLOPES[h] * (kv - q)


def one_call(work: PagedWork, dtype: torch.dtype, page_size: int, *, ragged: bool) -> None:
    """Launch the kernels of one call over two sequences."""
    k = torch.zeros(9, 1, page_size, 576, dtype=dtype)
    pages = PagedKV(k=k, v=k[..., :512], table=torch.zeros(2, 8, dtype=torch.int32), shared=True)
    ranges, _ = query_ranges([300, 200], [302, 202], [0, 1], [], torch.device("cpu"))
    shape = (1, 4) if ragged else (2, 2)
    q, new = (torch.zeros(shape[0], heads, shape[1], 576, dtype=dtype) for heads in (24, 1))
    by = latent_decode(q, pages)
    assert by is not None
    queries = decode_call.Queries(q, ranges, ragged, (new, new[..., :512]), by)
    decode_call.attend_new_tokens(queries, pages, work)


def main() -> None:
    record = Record(__file__)
    compile_instead_of_launching(record)
    mask, score = trace(ls.causal(), "mask"), trace(softcap, "score")
    plain = PagedWork(scale=0.1)
    masked = PagedWork(scale=0.1, mask=mask.program, score=score.program, score_captured=score.captured(), window=70)
    for work, dtype, page_size in ((plain, torch.bfloat16, 64), (masked, torch.float16, 128)):
        compiled.clear()
        one_call(work, dtype, page_size, ragged=work is masked)
        names = [name for name, _ in compiled]
        assert names == ["latent_decode_kernel", *["decode_kernel"] * (work is masked), "merge_kernel"], names
        code = compiled[0][1]
        if is_recorded(code):
            continue
        check_arrivals(code)
        log = assembler_logs.get(code.hash) or assemble(code)
        match = re.search(r"(\d+) bytes spill stores", log)
        spilled = None if match is None else int(match[1])
        print(f"{names[0]} {dtype}, pages of {page_size}: {code.metadata.shared} bytes shared, {spilled} bytes spilled", flush=True)
        if code.metadata.shared > SHARED_MEMORY:
            raise SystemExit(f"expected at most {SHARED_MEMORY} bytes of shared memory, the size of an SM")
        if "serialized" in log or spilled is None or (page_size == 64 and spilled > OUTSIDE_LOOPS):
            raise SystemExit(f"the assembler serialized wgmma, or spilled registers of the plain kernel: {log}")
    record.save()


if __name__ == "__main__":
    main()
