"""`longspan verify`: check this installation on this machine."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError


def verify(
    ranks: Annotated[
        str | None, typer.Option(help="virtual ranks, threads of this process; default 4; under torchrun, its processes are used")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto is the GPU if there is one")] = "auto",
    whole: Annotated[bool, typer.Option("--whole", help="all masks × scores × dtypes instead of a sample")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> int:
    """Check every kernel and strategy against float64.

    Compares out, lse and gradients with dense attention. Errors up to twice the error of dense attention in the same dtype are allowed. The
    exit code is 0 if all checks pass, else 1.
    """
    many = 4 if ranks is None else parse.count(ranks, "--ranks")
    place = parse.device(device)

    from longspan._training import launch

    if launch.is_rank():
        if ranks is not None and many != launch.world_size(many):
            raise UsageError(f"--ranks: torchrun started {launch.world_size(many)} processes, got {many}; leave out the option")
        return launch.run_ranks(_rank, launch.world_size(many), place.type, whole, as_json)
    if many > parse.MAX_RANKS:
        raise UsageError(f"--ranks: expected up to {parse.MAX_RANKS} virtual ranks, got {many}")
    return _run_checks(place, whole, as_json, many, None)


def _rank(device: Any, kind: str, whole: bool, as_json: bool) -> int:
    import torch
    import torch.distributed as dist

    place = device if kind == "cuda" else torch.device("cpu")
    return _run_checks(place, whole, as_json, dist.get_world_size(), dist.get_rank())


def _run_checks(device: Any, whole: bool, as_json: bool, ranks: int, rank: int | None) -> int:
    """Run all checks: the exit code. `rank` is None with virtual ranks. Every rank checks its own device; rank 0 prints."""
    import torch

    import longspan as ls
    from longspan.cli import oracle_checks as checking
    from longspan.cli import strategy_checks as spanning

    tell: Callable[[str], None] = _echo if not rank else _silent
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16 instructions
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        tell(f"longspan {ls.__version__}, torch {torch.__version__}, {name}")
        tell("errors over their budgets, against dense attention in float64: at most 1 is right\n")
        tell(f"{'kernel':19}{'dtype':10}{'cases':>7}{'out':>9}{'lse':>9}{'gradients':>11}")
        kernels = _print_lines(kernel_lines(device, whole=whole), tell)
        tell(f"\n{'strategy':19}over {ranks} {'virtual ranks' if rank is None else 'processes'}")
        strategies = _print_lines(spanning.lines(device, ranks, virtual=rank is None), tell)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    elsewhere = [] if rank is None else spanning.failures_elsewhere([*kernels, *strategies])
    for failure in elsewhere:
        tell(failure)
    wrong = sum(not line.ok for line in [*kernels, *strategies]) + len(elsewhere)
    done = sum(line.cases for line in [*kernels, *strategies])
    tell(f"\nall {done} checks passed" if not wrong else f"\n{wrong} of {len(kernels) + len(strategies)} lines failed")
    if as_json:
        about = {"longspan": ls.__version__, "torch": torch.__version__, "device": name, "ranks": ranks, "virtual": rank is None}
        parts = {"kernels": [_row(line) for line in kernels], "strategies": [_row(line) for line in strategies], "elsewhere": elsewhere}
        tell(json.dumps({"ok": not wrong, **about, "shown": list(checking.SHOWN), **parts}))
    return 1 if wrong else 0


def kernel_lines(device: Any, *, whole: bool) -> Iterator[Any]:
    """One line per kernel and dtype; a single line for a kernel that is not supported here."""
    import torch

    import longspan as ls
    from longspan._kernels.registry import NAMES, NotSupported
    from longspan.cli.oracle_checks import Line, Problem, grid

    dtypes = [torch.float32, torch.bfloat16, torch.float16 if device.type == "cuda" else torch.float64]
    problems = [Problem(mask=mask, score=score, dtype=dtype, device=device) for mask, score, dtype in grid(dtypes, whole=whole)]
    for kernel in (name for name in NAMES if name != "auto"):
        idle: list[Line] = []
        for dtype in dtypes:
            line = Line(name=kernel, dtype=str(dtype).removeprefix("torch."))
            for problem in (p for p in problems if p.dtype == dtype):
                call = _attend(ls.attention, mask=problem.made_mask, kernel=kernel)
                try:
                    line.add(problem, problem.shares(problem.results(call, problem.inputs)))
                except NotSupported as error:
                    line.refused, line.reason = line.refused + 1, str(error)
                except Exception as error:  # any other exception is a failed check
                    line.fail(problem, error)
            if line.cases:
                yield line
            else:
                idle.append(line)
        if len(idle) == len(dtypes):
            yield Line(name=kernel, dtype="", refused=sum(line.refused for line in idle), reason=idle[0].reason)


def _attend(attention: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda q, k, v, **rest: attention(q, k, v, return_lse=True, **options, **rest)


def _print_lines(lines: Iterator[Any], tell: Callable[[str], None]) -> list[Any]:
    printed = []
    for line in lines:
        printed.append(line)
        if not line.cases:
            tell(f"{line.name:19}not supported: {_reason(line.reason)}")
            continue
        shares = line.worst.values()
        shown = "".join(f"{share:{width}.3f}" for share, width in zip(shares, (9, 9, 11), strict=True))
        refused = f"   {line.refused} not supported" if line.refused else ""
        tell(f"{line.name:19}{line.dtype:10}{line.cases:7}{shown}{refused}{'' if line.ok else '   WRONG'}")
        for failure in line.failures:
            tell(f"    {failure}")
    return printed


def _reason(text: str) -> str:
    """The reason in a NotSupported message, without its advice."""
    return text.partition("does not support this call: ")[2].partition(". kernel='auto'")[0] or text


def _row(line: Any) -> dict[str, Any]:
    worst = {name: share if math.isfinite(share) else None for name, share in line.worst.items()}  # JSON has no infinity
    return {**{k: v for k, v in vars(line).items() if k != "worst"}, **worst, "ok": line.ok}


def _echo(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass
