"""Printed pictures and tables, in colour if the terminal supports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan._report.terminal import bar, grid_lines


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def text(value: str) -> None:
    _console().print(value, markup=False, soft_wrap=True)


def _colour(rank: int) -> str:
    """A colour of the 256-colour cube; neighbouring ranks get distant colours."""
    cube = [c for c in range(17, 231) if (c - 16) % 6 + (c - 16) // 6 % 6 + (c - 16) // 36 >= 5]
    return f"color({cube[rank * 53 % len(cube)]})"


def plan(made: Any, cluster: Any, conditions: Any) -> None:
    """Print the mask's picture, the numbers, and a table of the ranks."""
    console, report = _console(), made.report(cluster, conditions=conditions)
    for owner, line in grid_lines(made.data, 24, 72):
        console.print(Text(line, style=_colour(owner)))
    console.print(Text(str(report)), soft_wrap=True)
    console.print(_rank_table(report))


def _rank_table(report: Any) -> Table:
    """One line per rank, of at most 16 ranks: evenly spread, with the busiest and the last."""
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "work", "", "received MiB", "compute ms", "waiting ms"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    ranks = len(report.tiles)
    chosen = list(range(ranks)) if ranks <= 16 else sorted({*range(0, ranks, -(-ranks // 14)), int(report.tiles.argmax()), ranks - 1})
    max_tiles = float(report.tiles.max()) or 1.0
    moved = report.bytes_received.sum(0)
    t = report.timeline
    for r in chosen:
        tiles = int(report.tiles[r])
        table.add_row(
            str(r),
            f"{tiles:,}",
            Text(bar(tiles / max_tiles), style=_colour(r)),
            f"{float(moved[r]) / 2**20:.1f}",
            f"{1e3 * float(t.forward.busy[r] + t.backward.busy[r]):.3f}",
            f"{1e3 * float(t.forward.exposed[r] + t.backward.exposed[r]):.3f}",
        )
    return table


def simulated(results: Sequence[Any], mask: str, cluster: Any) -> None:
    """Print a table of simulated strategies."""
    console, best = _console(), results[0]
    where = f"{cluster.name}: {cluster.kernel.name}"
    head = f"{mask}, {best.tokens:,} tokens over {best.gpus:,} devices ({where}), simulated from a sample of ranks"
    console.print(Text(head), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("", "ms", "forward", "backward", "compute", "busiest", "TFLOP/s per device"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for one in results[:10]:
        t = one.timeline
        table.add_row(
            one.name, f"{1e3 * one.seconds:.2f}", f"{1e3 * t.forward.seconds:.2f}", f"{1e3 * t.backward.seconds:.2f}",
            f"{1e3 * one.computing:.2f}", f"{one.imbalance:.3f}", f"{one.flops_per_device / 1e12:.0f}",
        )  # fmt: skip
    console.print(table)
