"""`longspan warm`: compile kernels before a job begins."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError

DTYPES = ("bfloat16", "float16", "float32")
KERNELS = ("auto", "hopper", "triton")


def warm(
    mask: Annotated[str, typer.Option(help="a mask, as for `longspan plan`")] = "causal",
    tokens: Annotated[str, typer.Option(help="sequence length")] = "8k",
    heads: Annotated[str, typer.Option(help="query heads, or query/KV heads")] = "32/8",
    dim: Annotated[str, typer.Option(help="head dim, or head dim of q and k/head dim of v")] = "128",
    batch: Annotated[str, typer.Option(help="batch rows")] = "1",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    forward_only: Annotated[bool, typer.Option("--forward-only", help="not the backward kernels")] = False,
    kernel: Annotated[str, typer.Option(help=f"the kernel to compile: {', '.join(KERNELS)}")] = "auto",
) -> None:
    """Compile attention kernels before a job begins.

    The kernels go into Triton's cache on disk, compiled or, for common calls, taken from the package; forward and backward compile in
    parallel. A job that begins afterwards takes them from there, on every rank of this machine. Calls with a plan compile their kernels at
    the first call.
    """
    length, (q_heads, kv_heads) = parse.count(tokens, "--tokens"), parse.heads(heads)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    key_dim, _, value_dim = dim.partition("/")
    dims = parse.count(key_dim, "--dim"), parse.count(value_dim or key_dim, "--dim")
    parsed, rows = parse.mask(mask, length), parse.count(batch, "--batch")
    if kernel not in KERNELS:
        raise UsageError(f"--kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")

    import torch

    import longspan as ls

    if not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device here; run on a machine with the GPU of the job")
    started = time.perf_counter()
    try:
        kernels = ls.warm(
            parsed, length, heads=q_heads, kv_heads=kv_heads, head_dim=dims[0], value_dim=dims[1], batch=rows,
            dtype=getattr(torch, dtype), backward=not forward_only, kernel=kernel,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None
    typer.echo(f"{kernels} kernels in {time.perf_counter() - started:.1f} s, in Triton's cache")
