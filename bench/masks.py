"""How long block tables take and how much memory, at a million tokens; torch's create_block_mask beside them at a size it can do.

    python bench/masks.py [--tokens 1048576] [--json]

"extra MB" is the rise of the process's peak resident memory over what it held before (Linux only). Times are the best of three,
tracing apart, except for the masks that are measured once because they take long.
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

from longspan.masks.classify import classify
from longspan.masks.tracing import trace

MaskMod = Callable[..., torch.Tensor]


def masks(tokens: int) -> dict[str, MaskMod]:
    """The masks to measure. Documents: 1000, and 128 tokens long on average with padding between them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (tokens,), generator=generator).sort()[0]
    short = torch.randint(0, max(1, tokens // 128), (tokens,), generator=generator).sort()[0]
    short[torch.cat([short[1:] != short[:-1], torch.tensor([True])])] = -1

    def causal_documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (ids[q] == ids[kv])

    def causal_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < 4096)

    def causal_or_prefix(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) | (kv < 100_000)

    def own_documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ids[q] == ids[kv]

    def padded_short_documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (short[q] == short[kv]) & (short[q] >= 0)

    return {f.__name__: f for f in (causal_documents, causal_window, causal_or_prefix, own_documents, padded_short_documents)}


def hopeless(tokens: int) -> MaskMod:
    noise = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(0))

    def random_lookups(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return noise[q] == noise[kv]

    return random_lookups


def resident(field: str) -> float | None:
    """A line of /proc/self/status in MB, None where there is no such file."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(field))


def measured(work: Callable[[], Any], repeat: int) -> tuple[Any, float, float | None]:
    """(result, best seconds, extra peak MB of the first run)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
    except OSError:
        before = None
    best, extra, result = float("inf"), None, None
    for i in range(repeat):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
        if i == 0 and before is not None:
            extra = max(0.0, (resident("VmHWM") or 0.0) - before)
    return result, best, extra


def ours(name: str, mask: MaskMod, tokens: int, repeat: int = 3) -> dict[str, Any]:
    traced = trace(mask, "mask")
    table, seconds, extra = measured(lambda: classify(traced.program, traced.captured(), tokens, tokens), repeat)
    return {"mask": name, "tokens": tokens, "seconds": seconds, "extra_mb": extra, "runs": len(table.first), "density": table.density}


def torchs(name: str, mask: MaskMod, tokens: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    table, seconds, extra = measured(lambda: create_block_mask(mask, None, None, tokens, tokens, device="cpu"), 1)
    density = 1 - table.sparsity() / 100
    return {"mask": f"{name} (torch)", "tokens": tokens, "seconds": seconds, "extra_mb": extra, "runs": None, "density": density}


def show(row: dict[str, Any]) -> None:
    extra = "" if row["extra_mb"] is None else f"{row['extra_mb']:.0f}"
    runs = "" if row["runs"] is None else str(row["runs"])
    print(f"{row['mask']:34} {row['tokens']:>9} {row['seconds']:>9.3f} {extra:>9} {runs:>9} {row['density']:>10.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--hopeless-tokens", type=int, default=1 << 16)
    parser.add_argument("--torch-tokens", type=int, default=1 << 14, help="size for torch, which evaluates every element")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}; block 128 × 128, one head")
    print(f"{'mask':34} {'tokens':>9} {'seconds':>9} {'extra MB':>9} {'runs':>9} {'density':>10}")
    rows = []
    for name, mask in masks(options.tokens).items():
        rows.append(ours(name, mask, options.tokens))
        show(rows[-1])
    rows.append(ours("random_lookups (hopeless)", hopeless(options.hopeless_tokens), options.hopeless_tokens, repeat=1))
    show(rows[-1])
    beside = [(name, mask) for name, mask in masks(options.torch_tokens).items() if name in ("causal_documents", "causal_window")]
    for name, mask in beside:
        for measure in (ours, torchs):
            rows.append(measure(name, mask, options.torch_tokens))
            show(rows[-1])
    print(f"torch's create_block_mask holds every element of the mask: {options.torch_tokens} tokens is the largest size tried.")
    if options.json:
        print(json.dumps({"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
