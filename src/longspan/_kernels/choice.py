"""Which kernel is fastest for one whole rectangle, as measured: on this machine (`longspan calibrate --kernels`), else what is shipped.

What was measured here lies in a file of the user's cache directory, by the device's name: $LONGSPAN_CACHE/kernels.json, or
~/.cache/longspan/kernels.json. It decides nothing but speed.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Name = Literal["hopper", "triton", "flash", "efficient", "cudnn"]
Kind = Literal["full", "causal"]


@dataclass(frozen=True, kw_only=True)
class Faster:
    """Where a kernel is the fastest: one pass over one whole rectangle in half precision, without a score program.

    `dims`: head dims (of keys, of values). `tokens`: from this many queries and keys on. `capability`: of the devices that it was measured
    on, major and minor.
    """

    kernel: Name
    backward: bool
    kind: Kind
    dims: tuple[int, int]
    tokens: int
    capability: tuple[int, int]


# What bench/aten_choice.py measured, and nothing else: it prints rows for this table, the first that fits decides.
SHIPPED: tuple[Faster, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of both passes of a kernel over one rectangle, all queries against all keys."""

    kernel: Name
    kind: Kind
    dims: tuple[int, int]
    heads: tuple[int, int]
    tokens: int
    forward: float
    backward: float


def winners(timings: Iterable[Timing], default: str, capability: tuple[int, int], margin: float = 1.03) -> list[Faster]:
    """Rows for what beats `default` by more than `margin` at every head count: from the shortest length on from which it always does."""
    timings = list(timings)
    out = []
    for backward in (False, True):
        for kind, dims in sorted({(t.kind, t.dims) for t in timings}):
            here = [t for t in timings if (t.kind, t.dims) == (kind, dims)]
            took = {(t.kernel, t.tokens, t.heads): t.backward if backward else t.forward for t in here}
            ours = {(tokens, heads): s for (kernel, tokens, heads), s in took.items() if kernel == default}
            lengths = sorted({tokens for tokens, _ in ours})
            found: list[tuple[float, int, Name]] = []
            for kernel in sorted({t.kernel for t in here} - {default}):
                ratio = {at: s / took.get((kernel, *at), float("inf")) for at, s in ours.items()}
                good = [n for n in lengths if all(r > margin for (tokens, _), r in ratio.items() if tokens >= n)]
                if good:
                    found.append((min(r for (tokens, _), r in ratio.items() if tokens == lengths[-1]), good[0], kernel))
            if found:
                _, tokens, kernel = max(found)
                out.append(Faster(kernel=kernel, backward=backward, kind=kind, dims=dims, tokens=tokens, capability=capability))
    return out


def file() -> Path:
    return Path(os.environ.get("LONGSPAN_CACHE") or Path.home() / ".cache" / "longspan") / "kernels.json"


def save(device: str, rows: Iterable[Faster], about: dict[str, str]) -> Path:
    """Keep what was measured for a device of this name, in place of what was kept for it before."""
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _read(path)
    kept[device] = {"about": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    _measured_here.cache_clear()
    return path


def rows_for(device: str, capability: tuple[int, int]) -> tuple[Faster, ...]:
    """What is known of a device: measured here, else shipped for its compute capability."""
    found = _measured_here(device)
    return tuple(row for row in SHIPPED if row.capability == capability) if found is None else found


@cache
def _measured_here(device: str) -> tuple[Faster, ...] | None:
    kept = _read(file()).get(device)
    return None if kept is None else tuple(_row(row) for row in kept["rows"])


def _read(path: Path) -> dict[str, Any]:
    """The file's contents if they can be used. What cannot be is said and left aside: it is about speed alone."""
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        for entry in kept.values():
            for row in entry["rows"]:
                _row(row)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{path}: cannot be read ({error!r}) and is not used; `longspan calibrate --kernels` writes it anew", stacklevel=2)
        return {}
    return dict(kept)


def _row(row: dict[str, Any]) -> Faster:
    found = Faster(**{**row, "dims": tuple(row["dims"]), "capability": tuple(row["capability"])})
    if found.kernel not in get_args(Name) or found.kind not in get_args(Kind):
        raise ValueError(f"no kernel {found.kernel!r} for {found.kind!r}")
    return found
