"""Scripts for torchrun, run by forked ranks: the agent of torchrun and a fresh import of torch per rank take 10 s of CPU time."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from longspan.testing import run_processes


def run_script(script: Path, ranks: int, *, folder: Path | None = None, timeout: float = 240.0) -> list[str]:
    """Run a script on `ranks` processes with the environment of `torchrun --nproc-per-node RANKS`: what each rank printed."""
    return run_processes(_script, ranks, str(script), None if folder is None else str(folder), timeout=timeout)


def _script(script: str, folder: str | None) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Torchrun's agent owns the store that ranks rendezvous at; here rank 0 does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [None if store is None else store.port]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]),
        "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    if folder is not None:
        os.chdir(folder)
    sys.argv[:] = [script]
    sys.path.insert(0, str(Path(script).parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
