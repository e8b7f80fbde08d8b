"""A plan in plain text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from longspan._plan.plan_data import PlanData
from longspan._report.grid import density_grid

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPARSE = 0.1  # cells with a smaller computed share are drawn as a dot


def symbol(rank: int) -> str:
    """One character per rank; symbols repeat after 62 ranks."""
    return SYMBOLS[rank % len(SYMBOLS)]


def grid_lines(data: PlanData, height: int, width: int) -> Iterator[tuple[int, str]]:
    """(owner rank, line of text) for each line of the mask's grid, queries downwards and keys to the right.

    A cell shows its rank's symbol, a dot where less than a tenth of it is computed, a blank where nothing is.
    """
    grid = density_grid(data, height, width)
    for owner, densities in zip(grid.owner.tolist(), grid.density.tolist(), strict=True):
        mark = symbol(owner)
        yield owner, "".join(" " if d == 0 else "·" if d < SPARSE else mark for d in densities).rstrip()


def picture(data: PlanData, height: int = 24, width: int = 64) -> str:
    """The mask's grid as text, each cell with the symbol of the rank that computes it."""
    return "\n".join(line for _, line in grid_lines(data, height, width))


def bar(share: float, width: int = 24) -> str:
    """A horizontal bar for a share in 0 … 1, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8].strip())


def curve(values: Sequence[float], *, label: str, first: int = 1, height: int = 8, width: int = 64) -> str:
    """A curve of values over steps from `first` on, as text: at most `width` columns, each the mean of its values, in eighths of a line.

    Values that are not finite are left out.
    """
    columns = []
    for i in range(min(width, len(values))):
        part = values[i * len(values) // min(width, len(values)) : (i + 1) * len(values) // min(width, len(values))]
        finite = [v for v in part if math.isfinite(v)]
        columns.append(sum(finite) / len(finite) if finite else math.nan)
    shown = [v for v in columns if math.isfinite(v)]
    if not shown:
        return f"{label}: no finite value"
    low, high = min(shown), max(shown)
    levels = [0 if math.isnan(v) else 1 + round((v - low) / ((high - low) or 1.0) * (height * 8 - 1)) for v in columns]
    lines = []
    for line in reversed(range(height)):
        mark = f"{high:.4g}" if line == height - 1 else f"{low:.4g}" if line == 0 else ""
        lines.append(f"{mark:>10} ┤" + "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, level - 8 * line))] for level in levels).rstrip())
    return "\n".join([*lines, f"{'':>10} └{'─' * len(columns)} {label}, steps {first} to {first + len(values) - 1}"])
