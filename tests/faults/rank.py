"""One rank of a run: a process group over loopback, the calls of a scenario, and the fault if this rank is its victim."""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.faults.inject import CABLE_KINDS, DIVERGE, POINT_KINDS, RAISE, REORDER, SKIP, Injector
from tests.faults.judge import NOTHING
from tests.faults.scenarios import SCENARIOS, RankState
from tests.faults.supervisor import Case
from torch import Tensor

import longspan as ls


def rank_main(case: Case, rank: int, folder: str, timeout: float, report: Callable[..., None]) -> int:
    """Run the scenario on this rank; the exit code. Errors of calls are reported, and the next call is made."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.size, timeout=timedelta(seconds=timeout)
    )
    fault = case.fault if case.fault is not None and case.fault.victim == rank else None
    kind = "" if fault is None else fault.kind
    injector = Injector(fault=fault if kind in (*POINT_KINDS, *CABLE_KINDS) else None, timeout=timeout, report=report)
    injector.install()
    if case.scenario == "checkpoint":
        injector.install_checkpoint_points()
    odd = fault.name if fault is not None and kind == DIVERGE else ""
    first_odd = 0 if fault is None else fault.at
    state = RankState(rank=rank, size=case.size, folder=folder, odd=odd if first_odd == 0 else "")
    calls = SCENARIOS[case.scenario](state)
    dist.barrier()  # groups of a mesh are made by now
    if fault is not None and kind == SKIP:
        del calls[fault.at]
    elif fault is not None and kind == REORDER:
        calls[fault.at : fault.at + 2] = reversed(calls[fault.at : fault.at + 2])
    if kind in (SKIP, REORDER, DIVERGE):
        report("fault", kind)
    for i, (name, call) in enumerate(calls):
        injector.call, state.odd = name, odd if i >= first_odd else ""
        report("call", name, "")
        try:
            report("value", name, _digest(call()))
        except BaseException as error:  # torch's CheckpointException is not an Exception
            report("error", name, f"{type(error).__name__}: {error}")
            if kind == RAISE:
                raise
        finally:
            injector.call = None
    report("end", injector.points)
    return 0


def _digest(tensors: Iterable[Tensor]) -> str:
    contents = [(str(t.dtype), list(t.shape), t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()) for t in tensors]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16] if contents else NOTHING


def prepare() -> None:
    """Import and cache, in one thread, what forked ranks then share: without it each rank imports Dynamo, 3 s of CPU time."""
    import torch._dynamo
    import torch._inductor.standalone_compile
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    import longspan._comm.process_group
    import longspan._training.checkpoints  # noqa: F401

    torch.set_num_threads(1)
    x = torch.ones(1, 1, 8, 4, requires_grad=True)
    ls.attention(x, x, x, mask=ls.causal(), score_mod=lambda score, b, h, q, kv: score + q).sum().backward()
    ls.plan(ls.documents(lengths=[100, 50]), 150, ls.Mesh.abstract(3), strategy="ring")
    gc.collect()
    gc.freeze()  # ranks would traverse all of it when they exit
