"""`longspan demo`: a packed sequence split over processes of this machine, by every strategy, compared with one process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError

_MAX_ERROR = 1e-4


def demo(
    tokens: Annotated[str, typer.Option(help="tokens of the packed sequence: 4096, 16k (k = 1024)")] = "16k",
    processes: Annotated[str, typer.Option(help="processes to start; under torchrun, its processes are used")] = "4",
    heads: Annotated[str, typer.Option(help="query heads, or query/KV heads")] = "4/2",
    dim: Annotated[str, typer.Option(help="head dim")] = "32",
) -> int:
    """Split a batch over processes; compare with one.

    Runs forward and backward of a packed batch by every strategy.
    """
    q_heads, kv_heads = parse.heads(heads)
    length, head_dim = parse.count(tokens, "--tokens"), parse.count(dim, "--dim")
    started = parse.processes(processes)

    import torch

    from longspan._training import launch
    from longspan._training.demo_ranks import DemoSizes

    sizes = DemoSizes(tokens=length, heads=q_heads, kv_heads=kv_heads, dim=head_dim)
    if sizes.tokens < 64 * launch.world_size(started):
        raise UsageError(f"--tokens: expected at least 64 per process for {launch.world_size(started)} processes, got {sizes.tokens}")
    if torch.cuda.is_available() and not launch.is_rank():
        started = min(started, torch.cuda.device_count())
    return launch.run_ranks(_rank, started, sizes)


def _rank(device: Any, sizes: Any) -> int:
    import torch
    import torch.distributed as dist

    from longspan._training.demo_ranks import on_rank

    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    lengths = sizes.lengths()
    if dist.get_rank() == 0:
        kind = "GPUs" if device.type == "cuda" else "processes"
        packed = f"{sizes.tokens:,} tokens in {len(lengths)} packed documents of {min(lengths):,} to {max(lengths):,}"
        model = f"{sizes.heads} query heads over {sizes.kv_heads} KV heads of {sizes.dim}"
        print(f"{packed}, over {dist.get_world_size()} {kind}; {model}\n", flush=True)
    alone, results = on_rank(device, sizes)
    if dist.get_rank():
        return 0
    _show(alone, results)
    too_large = [error for line in results for error in (line.error, line.error_gradients) if not error < _MAX_ERROR]  # or NaN
    if too_large:
        print(f"results differ from one process: relative error {max(too_large):.1e}")
        return 1
    print("\nevery strategy matches one process, forward and backward")
    return 0


def _show(alone: float, results: list[Any]) -> None:
    """Print a table with one line per strategy."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy")
    for name in ("layout", "error out", "error grads", "balance", "received", "memory", "seconds"):
        table.add_column(name, justify="right")
    table.add_row("one process", "", "", "", "", "", "", f"{alone:.2f}")
    for line in results:
        table.add_row(
            line.strategy, line.layout, f"{line.error:.1e}", f"{line.error_gradients:.1e}", f"{line.balance:.3f}",
            f"{line.received / 2**20:.1f} MiB", f"{line.memory / 2**20:.1f} MiB", f"{line.seconds:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\nerror: relative to one process.  balance: the busiest rank's work over the mean.  received: bytes that a rank receives in a\n"
        "forward pass (KV; for ulysses also queries and outputs).  memory: of attention per rank, predicted by the plan.",
        soft_wrap=True,
    )
