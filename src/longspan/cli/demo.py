"""`longspan demo`: one packed sequence over processes of this machine, by every strategy, against one process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from longspan.cli import parse
from longspan.cli.app import Refused

_MOST_ERROR = 1e-4


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    tokens: Annotated[str, typer.Option(help="tokens of the packed sequence: 4096, 16k (k = 1024)")] = "16k",
    processes: Annotated[str, typer.Option(help="processes to start; under torchrun its own are used")] = "4",
    heads: Annotated[str, typer.Option(help="query heads, or query/key heads")] = "4/2",
    dim: Annotated[str, typer.Option(help="head dim")] = "32",
) -> int:
    """Split a packed batch over processes, run forward and backward by every strategy, and compare with one process."""
    import torch

    from longspan._training import launch
    from longspan._training.demo_ranks import Sizes

    q_heads, kv_heads = parse.heads(heads)
    sizes = Sizes(tokens=parse.count(tokens, "--tokens"), heads=q_heads, kv_heads=kv_heads, dim=parse.count(dim, "--dim"))
    started = parse.count(processes, "--processes")
    if sizes.tokens < 64 * launch.world_size(started):
        raise Refused(f"--tokens: expected 64 or more for each of {launch.world_size(started)} processes, got {sizes.tokens}")
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
        model = f"{sizes.heads} query heads over {sizes.kv_heads} key heads of {sizes.dim}"
        print(f"{packed}, over {dist.get_world_size()} {kind}; {model}\n", flush=True)
    alone, lines = on_rank(device, sizes)
    if dist.get_rank():
        return 0
    _show(alone, lines)
    worst = max(max(line.error, line.error_gradients) for line in lines)
    if not worst < _MOST_ERROR:
        print(f"does not match one process: relative error {worst:.1e}")
        return 1
    print("\nevery strategy gives what one process gives, forward and backward")
    return 0


def _show(alone: float, lines: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    found = Console(highlight=False)
    console = found if found.is_terminal else Console(highlight=False, width=120)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy")
    for name in ("layout", "error out", "error grads", "balance", "received", "memory", "seconds"):
        table.add_column(name, justify="right")
    table.add_row("one process", "", "", "", "", "", "", f"{alone:.2f}")
    for line in lines:
        table.add_row(
            line.strategy, line.layout, f"{line.error:.1e}", f"{line.error_gradients:.1e}", f"{line.balance:.3f}",
            f"{line.received / 2**20:.1f} MiB", f"{line.memory / 2**20:.1f} MiB", f"{line.seconds:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\nerror: relative, against one process.  balance: the busiest rank's work over the mean.  received: keys and values (for\n"
        "ulysses queries and outputs too) that a rank gets in a forward pass.  memory: what attention holds on a rank, by plan.",
        soft_wrap=True,
    )
