"""Decoding over ranks: one rank's partial results over its pages, by the decode kernel and by torch operations. Exchanges are left out.

    PYTHONPATH=src:. python bench/decode_ranks.py [--json]

Needs a GPU. GQA 32/8, head dim 128, bfloat16, pages of 64; one new token of each sequence. TB/s count the rank's keys and values once.

    device    calls enqueued behind a pause: host time excluded
    host      microseconds of host time of a call
    torch     one eager call by torch operations on an idle device, as ranks without the decode kernel compute
    error     largest difference between the two
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from bench.timing import as_called_ms, device_ms, host_us
from torch import Tensor

from longspan._engine.cached_local import attend_local
from longspan._engine.cached_tokens import StepQueries
from longspan._kernels.paged import PagedKV, PagedWork, SpreadPages, query_ranges
from longspan._kernels.paged_splits import attend_sequence, gathered_keys

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
DEVICE, DTYPE = "cuda", torch.bfloat16
ROWS = ((1, 131_072, 4), (8, 32_768, 8), (32, 32_768, 8), (1, 1_048_576, 8))  # sequences, tokens of each, ranks


def problem(sequences: int, length: int, ranks: int) -> tuple[StepQueries, PagedKV, int]:
    """(new tokens, pages of one layer on rank 1, number of these pages)."""
    spread = SpreadPages(ranks=ranks, rank=1, shifts=tuple(i % ranks for i in range(sequences)), page_size=PAGE)
    table, used = torch.zeros(sequences, -(-length // PAGE), dtype=torch.int32), 0
    for i in range(sequences):
        columns = spread.local_pages(i, 0, table.shape[1])
        table[i, columns.start :: ranks] = torch.arange(used, used + len(columns))
        used += len(columns)
    k, v = (torch.randn(used, KV_HEADS, PAGE, DIM, device=DEVICE, dtype=DTYPE) for _ in range(2))
    ranges, _ = query_ranges(
        [length - 1] * sequences, [length] * sequences, list(range(sequences)), [], torch.device(DEVICE), spread
    )  # fmt: skip
    kept: dict[Any, Any] = {}

    def derived(key: Any, make: Any) -> Any:
        if key not in kept:
            kept[key] = make()
        return kept[key]

    step: Any = SimpleNamespace(ranges=ranges, ids=tuple(range(sequences)), derived=derived)
    q = torch.randn(sequences, HEADS, 1, DIM, device=DEVICE, dtype=DTYPE)
    return StepQueries(q, step), PagedKV(k=k, v=v, table=table.to(DEVICE)), used


def by_torch(queries: StepQueries, pages: PagedKV, work: PagedWork) -> Tensor:
    """out [n, H, E] by torch operations."""
    ranges = queries.step.ranges
    results = [
        attend_sequence(queries.q[i], gathered_keys(pages, ranges, i, work), start, work)[0] for i, start in enumerate(ranges.starts)
    ]  # fmt: skip
    return torch.stack(results)[:, :, 0]


def measure(sequences: int, length: int, ranks: int) -> dict[str, Any]:
    queries, pages, used = problem(sequences, length, ranks)
    work = PagedWork(scale=DIM**-0.5)
    kernel = partial(attend_local, queries, pages, work, range(sequences), "auto")
    plain = partial(by_torch, queries, pages, work)
    error = float((kernel()[0][0].transpose(0, 1) - plain()).abs().max())
    device = device_ms({"kernel": kernel})["kernel"]
    return {
        "sequences": sequences, "length": length, "ranks": ranks, "device_us": 1e3 * device,
        "tb_s": 2 * used * KV_HEADS * PAGE * DIM * DTYPE.itemsize / device / 1e9, "host_us": host_us(kernel),
        "torch_us": 1e3 * as_called_ms({"torch": plain}, repeat=5, warmup=1)["torch"], "error": error,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"bench decode_ranks, device {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("sequences    tokens  ranks   device µs   TB/s   host µs   torch µs   error")
    rows = []
    with torch.no_grad():
        for row in ROWS:
            one = measure(*row)
            rows.append(one)
            print(
                f"{row[0]:9d} {row[1]:9d} {row[2]:6d} {one['device_us']:11.1f} {one['tb_s']:6.2f} {one['host_us']:9.0f} "
                f"{one['torch_us']:10.0f} {one['error']:7.1e}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"bench": "decode_ranks", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
