"""Seconds of the first call, forward and backward, in new processes: with an empty compile cache, again, and on several ranks at once.

    PYTHONPATH=src:. python bench/first_call.py [--dim 128] [--ranks 8]

Needs a GPU. B 1, H 8/2, S 2048, causal, bfloat16. `import`: torch and longspan. `compiled`: kernels that Triton compiled, not those of its
cache on disk. The package's bytecode is compiled before the first process starts, as an installer does.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

START = time.perf_counter()


def one_process(dim: int, begin: float) -> None:
    """Print one line about the first call of this process, which starts at the time `begin`."""
    import torch
    import triton

    import longspan as ls

    compiled: list[str] = []

    def note(src: Any, *, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = note
    imported = time.perf_counter()
    q, k, v = (torch.randn(1, h, 2048, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    torch.cuda.synchronize()
    time.sleep(max(0.0, begin - time.time()))
    started = time.perf_counter()
    out = ls.attention(q, k, v, mask=ls.causal())
    torch.cuda.synchronize()
    forward = time.perf_counter()
    out.sum().backward()
    torch.cuda.synchronize()
    backward = time.perf_counter()
    print(
        f"{imported - START:8.1f}{forward - started:9.2f}{backward - forward:10.2f}{backward - started:7.2f}{len(compiled):10}", flush=True
    )


def run(command: list[str], cache: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *command], env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--begin", type=float, help="measure in this process, from this time on")
    options = parser.parse_args()
    if options.begin is not None:
        one_process(options.dim, options.begin)
        return
    package = importlib.util.find_spec("longspan")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        compileall.compile_dir(folder, quiet=1)
    print(f"bench first_call, dim {options.dim}, date {datetime.date.today()}; seconds")
    print(f"{'':24}{'import':>8}{'forward':>9}{'backward':>10}{'both':>7}{'compiled':>10}")
    command = ["--dim", str(options.dim), "--begin"]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as ranks_cache:
        for name in ("empty cache", "second process"):
            print(f"{name:24}{run([*command, '0'], cache).communicate()[0]}", end="")
        begin = str(time.time() + 20)  # imports are over by then
        for rank in [run([*command, begin], ranks_cache) for _ in range(options.ranks)]:
            print(f"{f'one of {options.ranks} ranks':24}{rank.communicate()[0]}", end="")


if __name__ == "__main__":
    main()
