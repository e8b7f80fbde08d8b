"""The same calls with two versions of Triton, in processes that take turns.

    PYTHONPATH=src:. python bench/tritons.py --other FOLDER [--row TEXT …] [--processes N] [--repeat N] [--package] [--json]

Needs a Hopper GPU. FOLDER has another Triton: `pip install --target FOLDER --no-deps triton==VERSION`. Rows are those of
bench/peer_problems.py whose names contain one of the TEXTs. Both versions compile all kernels before the first measurement, with separate
compile caches; with --package, both use the precompiled kernels of the package. First calls are not timed. `device`: launches are enqueued
behind a pause. `as called`: one eager call on an idle device. Speed: the other Triton relative to this one, medians over processes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

DEVICE, KERNEL = "cuda", "hopper"
PASSES, CLOCKS = ("forward", "backward"), ("device", "as called")
_COMPILING = 4  # rows whose kernels a process compiles at once
Times = dict[str, dict[str, float]]  # milliseconds, by row, then by pass and clock


def calls_of(row: Any) -> dict[str, Any]:
    """The passes of a row, each called once."""
    import torch
    from bench.peer_problems import problem_of

    import longspan as ls

    torch.manual_seed(0)
    sizes = [(row.heads, row.dims[0]), (row.kv_heads, row.dims[0]), (row.kv_heads, row.dims[1])]
    leaves = [torch.randn(1, h, row.tokens, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for h, d in sizes]
    problem = problem_of(row)
    attend = partial(ls.attention, *leaves, mask=problem.mask, score_mod=problem.score_mod, kernel=KERNEL)
    out = attend()
    differentiate = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    differentiate()
    return {"forward": torch.no_grad()(attend), "backward": differentiate}


def one_process(texts: list[str], repeat: int) -> None:
    """Print this process's times as JSON. repeat = 0: only compile."""
    import torch
    import triton
    from bench.peer_problems import ROWS
    from bench.timing import as_called_ms, device_ms
    from triton.backends.compiler import GPUTarget

    from longspan._kernels.gpu import assembler

    rows = [row for row in ROWS if any(text in str(row) for text in texts or [""])]
    if not rows:
        raise SystemExit(f"--row: expected part of one of {', '.join(map(str, ROWS))}, got {texts}")
    times: Times = {}
    if repeat == 0:
        with ThreadPoolExecutor(_COMPILING) as threads:
            list(threads.map(calls_of, rows))
    for row in rows if repeat else []:
        calls, of_row = calls_of(row), {}
        for clock, measure in zip(CLOCKS, (device_ms, as_called_ms), strict=True):
            of_row.update({f"{step} {clock}": ms for step, ms in measure(calls, repeat=repeat).items()})
        times[str(row)] = of_row
    versions = {"triton": triton.__version__, "ptxas": assembler.version(GPUTarget("cuda", 90, 32)), "torch": torch.__version__}
    print(json.dumps({"versions": versions, "times": times}))


def run(other: str, cache: str, options: argparse.Namespace, *, repeat: int) -> dict[str, Any]:
    """What `one_process` prints in a process with the Triton in the folder `other`; "": with the one that is installed."""
    paths = [other, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "TRITON_CACHE_DIR": cache,
        "LONGSPAN_PREBUILT": "1" if options.package else "0",
    }  # fmt: skip
    rows = [part for text in options.row for part in ("--row", text)]
    command = [sys.executable, __file__, "--one-process", "--repeat", str(repeat), *rows]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    last: dict[str, Any] = json.loads(process.stdout.strip().split("\n")[-1])
    return last


def speeds(this: list[Times], other: list[Times]) -> dict[str, dict[str, float]]:
    """Of the other Triton over this one, by row, then by pass and clock."""

    def median(times: list[Times], row: str, column: str) -> float:
        return statistics.median(t[row][column] for t in times)

    return {row: {c: median(this, row, c) / median(other, row, c) for c in columns} for row, columns in this[0].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other")
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--processes", type=int, default=2, help="of each version")
    parser.add_argument("--repeat", type=int, default=14, help="calls per process, of which the median is taken")
    parser.add_argument("--package", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_process:
        return one_process(options.row, options.repeat)
    if not options.other or not Path(options.other, "triton").is_dir():
        parser.error("--other: expected a folder with another Triton")
    versions = ["", options.other]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as both:
        caches = [str(Path(folder, str(i))) for i in range(2)]
        known = [r["versions"] for r in both.map(lambda i: run(versions[i], caches[i], options, repeat=0), range(2))]
        times: list[list[Times]] = [[], []]
        for turn in range(options.processes):
            for i in (turn % 2, 1 - turn % 2):
                times[i].append(run(versions[i], caches[i], options, repeat=options.repeat)["times"])
    result = speeds(*times)
    source = "where the package has them, its own" if options.package else "compiled by each"
    names = [f"Triton {v['triton']} (ptxas {v['ptxas']})" for v in known]
    print(f"bench tritons, speed with {names[1]} over that with {names[0]}, kernels {source}, {datetime.date.today()}")
    print(f"{'':36s}" + "".join(f"{f'{step} {clock}':>22s}" for step in PASSES for clock in CLOCKS))
    for row, of_row in result.items():
        print(f"{row:36s}" + "".join(f"{of_row[f'{step} {clock}']:22.3f}" for step in PASSES for clock in CLOCKS))
    if options.json:
        print(json.dumps({"this": known[0], "other": known[1], "package": options.package, "speed": result, "ms": times}))
    return None


if __name__ == "__main__":
    main()
