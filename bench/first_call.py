"""Seconds of the first call, forward and backward, in new processes: with an empty compile cache, again, and on several ranks at once.

    PYTHONPATH=src:. python bench/first_call.py [--dim 128] [--ranks 8] [--common-only]

Needs a GPU. B 1, H 8/2, S 2048, bfloat16. Kernels of common masks are part of the package. Those of other masks and of score mods are
compiled, and all are with LONGSPAN_PREBUILT=0. `import`: torch and longspan. `compiled`: kernels that Triton compiled, not those of the
package or of its cache on disk. `next mask`: the first call with another common mask in the same process. The package's bytecode is
compiled before the first process starts, as an installer does.
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
from collections.abc import Callable
from typing import Any

START = time.perf_counter()
TOKENS = 2048
COMMON, OTHER = ("causal", "window", "documents"), ("own mask", "score mod")  # kinds of calls


def arguments_of(kind: str) -> dict[str, Any]:
    """The keyword arguments of `attention`."""
    import torch

    import longspan as ls

    made: dict[str, Callable[[], dict[str, Any]]] = {
        "causal": lambda: {"mask": ls.causal()},
        "window": lambda: {"mask": ls.sliding_window(1024)},
        "documents": lambda: {"mask": ls.causal() & ls.documents(lengths=[TOKENS // 3, TOKENS - TOKENS // 3])},
        "own mask": lambda: {"mask": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 != 1)},
        "score mod": lambda: {"mask": ls.causal(), "score_mod": lambda s, b, h, q, kv: 30 * torch.tanh(s / 30)},
    }
    return made[kind]()


def one_process(dim: int, begin: float, kind: str) -> None:
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
    q, k, v = (torch.randn(1, h, TOKENS, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    torch.cuda.synchronize()
    time.sleep(max(0.0, begin - time.time()))

    def call(kind: str) -> tuple[float, float]:
        """Seconds of the forward and the backward pass."""
        started, arguments = time.perf_counter(), arguments_of(kind)
        out = ls.attention(q, k, v, **arguments)
        torch.cuda.synchronize()
        forward = time.perf_counter()
        out.sum().backward()
        torch.cuda.synchronize()
        return forward - started, time.perf_counter() - forward

    forward, backward = call(kind)
    line = f"{imported - START:8.1f}{forward:9.2f}{backward:10.2f}{forward + backward:7.2f}{len(compiled):10}"
    if kind in COMMON:
        line += f"{sum(call('documents' if kind != 'documents' else 'causal')):11.2f}"
    print(line, flush=True)


def run(command: list[str], cache: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, **variables}
    return subprocess.Popen([sys.executable, __file__, *command], env=environment, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--common-only", action="store_true", help="only calls whose kernels are part of the package")
    parser.add_argument("--begin", type=float, help="measure in this process, from this time on")
    parser.add_argument("--kind", default=COMMON[0], choices=(*COMMON, *OTHER))
    options = parser.parse_args()
    if options.begin is not None:
        one_process(options.dim, options.begin, options.kind)
        return
    package = importlib.util.find_spec("longspan")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        compileall.compile_dir(folder, quiet=1)
    print(f"bench first_call, dim {options.dim}, date {datetime.date.today()}; seconds")
    print(f"{'':32}{'import':>8}{'forward':>9}{'backward':>10}{'both':>7}{'compiled':>10}{'next mask':>11}")

    def row(name: str, process: subprocess.Popen[str]) -> None:
        print(f"{name:32}{process.communicate()[0]}", end="", flush=True)

    command = ["--dim", str(options.dim), "--begin"]
    kinds = COMMON if options.common_only else (*COMMON, *OTHER)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as cache:
            row(f"{kind}, empty cache", run([*command, "0", "--kind", kind], cache))
            row(f"{kind}, second process", run([*command, "0", "--kind", kind], cache))
    if not options.common_only:
        with tempfile.TemporaryDirectory() as cache:
            row("causal, LONGSPAN_PREBUILT=0", run([*command, "0"], cache, LONGSPAN_PREBUILT="0"))
    if options.ranks:
        with tempfile.TemporaryDirectory() as cache:
            begin = str(time.time() + 20)  # imports are over by then
            for rank in [run([*command, begin], cache) for _ in range(options.ranks)]:
                row(f"one of {options.ranks} ranks", rank)


if __name__ == "__main__":
    main()
