"""Pictures in plain text."""

from __future__ import annotations

from longspan._plan.plan_data import PlanData
from longspan._report.grid import grid

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def symbol(rank: int) -> str:
    """One character for a rank: of more than 62, every 62nd looks alike."""
    return SYMBOLS[rank % len(SYMBOLS)]


def picture(data: PlanData, height: int = 24, width: int = 64) -> str:
    """Queries downwards, keys to the right: the rank that computes a cell, a dot where it computes little of it, blank where nothing is."""
    found = grid(data, height, width)
    lines = []
    for owner, densities in zip(found.owner.tolist(), found.density.tolist(), strict=True):
        mark = symbol(owner)
        lines.append("".join(" " if d == 0 else "·" if d < 0.1 else mark for d in densities).rstrip())
    return "\n".join(lines)


def bar(share: float, width: int = 24) -> str:
    """A bar of 0 … 1, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8].strip())
