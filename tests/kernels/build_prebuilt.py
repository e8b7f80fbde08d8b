"""Compile missing prebuilt kernels (`longspan._kernels.gpu.prebuilt`), recompile kernels of another assembler, and delete unused ones.

    make kernels

Needs no GPU. Kernels compile in as many processes as there are cores. Prints a line for each kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import triton
from tests.kernels.common_calls import TARGET, Request, common_requests

from longspan._kernels.gpu import assembler, compilation, prebuilt

_requests: list[Request] = []  # for the processes, which are forked: a request cannot be sent


def assembler_version() -> str:
    text = subprocess.run([assembler.tool(TARGET).path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"V([\d.]+)", text)
    return f"ptxas {version[1] if version else text}"


def build(index: int) -> str:
    """Compile one kernel and write its file; a line that describes it."""
    request, started = _requests[index], time.perf_counter()
    triton.knobs.compilation.disable_line_info = True  # a quarter of the time, and of the size
    with compilation._partitions_share_functions(), compilation.right_assembler(TARGET):
        kernel = triton.compile(request.source, target=TARGET, options=request.options)
    path = prebuilt.path_of(request.key)
    path.write_bytes(prebuilt.pack(kernel.metadata._asdict(), kernel.asm["cubin"], assembler=assembler_version()))
    return f"{request.source.name} {request.key}: {path.stat().st_size / 1024:.0f} KB in {time.perf_counter() - started:.1f} s"


def main() -> None:
    wanted, by = common_requests(), assembler_version()
    folder: Path = prebuilt.FOLDER
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.xz"):
        if path.stem not in wanted or prebuilt.unpack(path)[0]["assembler"] != by:
            path.unlink()
    _requests.extend(request for key, request in wanted.items() if not prebuilt.path_of(key).exists())
    with multiprocessing.get_context("fork").Pool(max(1, min(int(os.environ.get("JOBS") or os.cpu_count() or 1), len(_requests)))) as pool:
        for line in pool.imap_unordered(build, range(len(_requests)), chunksize=1):
            print(line, flush=True)
    size = sum(path.stat().st_size for path in folder.glob("*.xz"))
    print(f"{len(wanted)} kernels, {size / 2**20:.1f} MB; {len(_requests)} built by Triton {triton.__version__}, {assembler_version()}")


if __name__ == "__main__":
    sys.exit(main())
