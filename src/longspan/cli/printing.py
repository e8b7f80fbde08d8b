"""Printed pictures and tables, in colour if the terminal supports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan._report.terminal import bar, grid_lines


def _console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def text(value: str) -> None:
    _console().print(value, markup=False, soft_wrap=True)


def _colour(rank: int) -> str:
    """A colour of the 256-colour cube; neighbouring ranks get distant colours."""
    cube = [c for c in range(17, 231) if (c - 16) % 6 + (c - 16) // 6 % 6 + (c - 16) // 36 >= 5]
    return f"color({cube[rank * 53 % len(cube)]})"


def plan(made: Any, cluster: Any, conditions: Any) -> None:
    """Print the mask's picture, the numbers, and a table of the ranks."""
    console = _console()
    found = made.report(cluster, conditions=conditions)
    for owner, line in grid_lines(made.data, 24, 72):
        console.print(Text(line, style=_colour(owner)))
    console.print(Text(str(found)), soft_wrap=True)
    console.print(_ranks(found))


def _ranks(found: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "work", "", "received MiB", "compute ms", "waiting ms"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    ranks = len(found.tiles)
    chosen = list(range(ranks)) if ranks <= 16 else sorted({*range(0, ranks, -(-ranks // 14)), int(found.tiles.argmax()), ranks - 1})
    max_tiles = float(found.tiles.max()) or 1.0
    moved = found.bytes_received.sum(0)
    t = found.timeline
    for r in chosen:
        tiles = int(found.tiles[r])
        table.add_row(
            str(r),
            f"{tiles:,}",
            Text(bar(tiles / max_tiles), style=_colour(r)),
            f"{float(moved[r]) / 2**20:.1f}",
            f"{1e3 * float(t.forward.busy[r] + t.backward.busy[r]):.3f}",
            f"{1e3 * float(t.forward.exposed[r] + t.backward.exposed[r]):.3f}",
        )
    return table


def simulated(found: Sequence[Any], mask: str, cluster: Any) -> None:
    """Print a table of simulated strategies."""
    console, best = _console(), found[0]
    where = f"{cluster.name}: {cluster.kernel.name}"
    head = f"{mask}, {best.tokens:,} tokens over {best.gpus:,} devices ({where}), simulated from a sample of ranks"
    console.print(Text(head), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("", "ms", "forward", "backward", "compute", "busiest", "TFLOP/s per device"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for one in found[:10]:
        t = one.timeline
        table.add_row(
            one.name, f"{1e3 * one.seconds:.2f}", f"{1e3 * t.forward.seconds:.2f}", f"{1e3 * t.backward.seconds:.2f}",
            f"{1e3 * one.computing:.2f}", f"{one.imbalance:.3f}", f"{one.flops_per_device / 1e12:.0f}",
        )  # fmt: skip
    console.print(table)
