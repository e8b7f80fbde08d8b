"""`longspan calibrate`: measure this machine and write a cluster profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli import files, parse
from longspan.cli.app import UsageError, usage_errors


def calibrate(
    out: Annotated[Path, typer.Argument(help="the TOML file to write")] = Path("cluster.toml"),
    name: Annotated[str | None, typer.Option(help="name of the profile")] = None,
    kernel: Annotated[str, typer.Option(help="the kernel to measure: triton, aten, cpu")] = "auto",
    heads: Annotated[str, typer.Option(help="query heads, or query/KV heads")] = "32/8",
    dim: Annotated[str, typer.Option(help="head dim")] = "128",
    quick: Annotated[bool, typer.Option("--quick", help="short sequences and few repetitions")] = False,
) -> None:
    """Measure this machine, for `longspan plan --cluster`.

    Measures kernels by tile shape, copies and, under torchrun, collectives, and writes a cluster profile.
    """
    from longspan._cost.clusters import dump
    from longspan.cli.measure import measured

    q_heads, kv_heads = parse.heads(heads)
    files.check(out, "OUT")
    try:
        profile, lines = measured(
            name=name, kernel=kernel, heads=q_heads, kv_heads=kv_heads, head_dim=parse.count(dim, "--dim"), quick=quick
        )
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    if profile is not None:  # rank 0
        with usage_errors(f"OUT: {out}", OSError):
            out.write_text(dump(profile), encoding="utf-8")
        typer.echo("\n".join([*lines, f"written to {out}"]))
