"""Time and memory to build block tables of a million tokens, and torch's create_block_mask at a size that fits into memory.

    python bench/masks.py [--tokens 1048576] [--json]

Times include making the mask, tracing it and building the table: the minimum of three runs, or one run for torch and for the mask of
random lookups, which interval arithmetic cannot decide. "extra MB": peak resident memory of the first run beyond memory in use before
(Linux only).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls

MakeMask = Callable[[], ls.Mask]


def masks(tokens: int) -> dict[str, MakeMask]:
    """Constructors of the masks to measure, by name. Documents: 1000, or of 128 tokens on average with padding between them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (tokens,), generator=generator).sort()[0]
    lengths = ids.bincount(minlength=1000)
    short = torch.randint(0, max(1, tokens // 128), (tokens,), generator=generator).sort()[0]
    short[torch.cat([short[1:] != short[:-1], torch.tensor([True])])] = -1
    return {
        "causal & documents (1000)": lambda: ls.causal() & ls.documents(lengths=lengths),
        "causal & sliding_window(4096)": lambda: ls.causal() & ls.sliding_window(4096),
        "causal | prefix(100000)": lambda: ls.causal() | ls.prefix(100_000),
        "mask_mod with sorted ids": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])),
        "causal & documents(ids), padded": lambda: ls.causal() & ls.documents(ids=short),
        "mask_mod with padded ids": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (short[q] == short[kv]) & (short[q] >= 0)),
    }


def random_lookups(tokens: int) -> MakeMask:
    """A mask whose tiles must all be evaluated."""
    noise = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(0))
    return lambda: ls.mask_mod(lambda b, h, q, kv: noise[q] == noise[kv])


def resident(field: str) -> float | None:
    """A field of /proc/self/status in MB; None on other systems than Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(field))


def measured(work: Callable[[], Any], repeat: int) -> tuple[Any, float, float | None]:
    """(result, minimum seconds, extra peak MB of the first run)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
    except OSError:
        before = None
    minimum, extra, result = float("inf"), None, None
    for i in range(repeat):
        start = time.perf_counter()
        result = work()
        minimum = min(minimum, time.perf_counter() - start)
        if i == 0 and before is not None:
            extra = max(0.0, (resident("VmHWM") or 0.0) - before)
    return result, minimum, extra


def longspan_row(name: str, make: MakeMask, tokens: int, repeat: int = 3) -> dict[str, Any]:
    """One row of the result."""
    table, seconds, extra = measured(lambda: make().block_table(tokens), repeat)
    return {"mask": name, "tokens": tokens, "seconds": seconds, "extra_mb": extra, "runs": len(table.first), "density": table.density}


def torch_row(name: str, make: MakeMask, tokens: int) -> dict[str, Any]:
    """One row of the result for create_block_mask."""
    table, seconds, extra = measured(lambda: create_block_mask(make(), None, None, tokens, tokens, device="cpu"), 1)
    density = 1 - table.sparsity() / 100
    return {"mask": f"{name}: torch", "tokens": tokens, "seconds": seconds, "extra_mb": extra, "runs": None, "density": density}


def print_row(row: dict[str, Any]) -> None:
    extra = "" if row["extra_mb"] is None else f"{row['extra_mb']:.0f}"
    runs = "" if row["runs"] is None else str(row["runs"])
    print(f"{row['mask']:34} {row['tokens']:>9} {row['seconds']:>9.3f} {extra:>9} {runs:>9} {row['density']:>10.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--lookup-tokens", type=int, default=1 << 16, help="tokens of the mask of random lookups")
    parser.add_argument("--torch-tokens", type=int, default=1 << 14, help="tokens for torch, which evaluates every element")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}; block 128 × 128, one head")
    print(f"{'mask':34} {'tokens':>9} {'seconds':>9} {'extra MB':>9} {'runs':>9} {'density':>10}")
    rows = []
    for name, mask in masks(options.tokens).items():
        rows.append(longspan_row(name, mask, options.tokens))
        print_row(rows[-1])
    rows.append(longspan_row("random lookups", random_lookups(options.lookup_tokens), options.lookup_tokens, repeat=1))
    print_row(rows[-1])
    for name, mask in list(masks(options.torch_tokens).items())[:2]:
        for measure in (longspan_row, torch_row):
            rows.append(measure(name, mask, options.torch_tokens))
            print_row(rows[-1])
    print(f"torch's create_block_mask holds every element of the mask: {options.torch_tokens} tokens is the largest size tried.")
    if options.json:
        print(
            json.dumps(
                {
                    "bench": "masks",
                    "torch": torch.__version__,
                    "machine": platform.machine(),
                    "threads": torch.get_num_threads(),
                    "rows": rows,
                }
            )
        )


if __name__ == "__main__":
    main()
