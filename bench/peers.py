"""longspan against other attention kernels on one GPU: flash-attn-4, cudnn.flex_attention, FlexAttention, cuDNN, FlashAttention-2.

    PYTHONPATH=src:. python bench/peers.py [--rows TEXT,…] [--peers NAME,…] [--json]     measure the peers that can be imported
    PYTHONPATH=src:. python bench/peers.py --prepare-at-once …                         the same; see below
    PYTHONPATH=src:. python bench/peers.py --plot RESULT.txt PICTURE.png              plot a result

B 1, bfloat16. TFLOP/s count useful work: 4·D per visible (query, key) pair forward, 2.5 times as much backward. Peers alternate in random
order; medians of 20 calls. Every peer gets its preferred memory layout ([B, H, S, D] or [B, S, H, D]) and a mask built beforehand.

    device      calls enqueued behind a pause: host time excluded
    as called   one eager call on an idle device: host time included
    first       seconds of the first forward and backward, compilation included (longer with --prepare-at-once)
    error       relative error of out against float64, over 64 queries
    MiB         peak memory of forward and backward without the inputs
    fixed       speed of longspan's backward pass under torch.use_deterministic_algorithms, over that of its default mode (device)

Most of the time is compilation. With --prepare-at-once every row has a process of its own: all compile at once, and when the last is ready
they are timed one after the other, while the others wait. It needs memory for all rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.peer_calls import PEERS, Peer, Unsupported, transposed
from bench.peer_problems import ROWS, Row, problem_of, reference, visible_pairs
from bench.timing import as_called_ms, deterministic, device_ms, host_us

PASSES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class PreparedRow:
    """A row after compilation and before timing.

    Attributes:
        known: Fields of the result that are measured before timing.
        flop: Useful floating-point operations of a forward pass.
        calls: Compiled calls by pass and peer.
    """

    known: dict[str, Any]
    flop: float
    calls: dict[str, dict[str, Callable[[], Any]]]


def prepare(row: Row, peers: list[Peer]) -> PreparedRow:
    """Compile and run the calls of all peers; errors, peak memory and seconds of the first call by peer."""
    problem, (dim, value_dim) = problem_of(row), row.dims
    shapes = ((row.heads, dim), (row.kv_heads, dim), (row.kv_heads, value_dim), (row.heads, value_dim))
    *inputs, grad = (torch.randn(1, h, row.tokens, d, device="cuda", dtype=torch.bfloat16) for h, d in shapes)
    queries = torch.randint(row.tokens, (64,), device="cuda")
    expected = reference(row, problem, *inputs, queries)
    flop = 2.0 * (dim + value_dim) * row.heads * visible_pairs(row, problem)
    result: dict[str, Any] = {"row": str(row), "skipped": {}, "first_s": {}, "error": {}, "peak_mib": {}, "mask_ms": {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {step: {} for step in PASSES}
    for peer in peers:
        order = transposed if peer.tokens_first else torch.Tensor.detach
        leaves, grad_out = [order(t).requires_grad_() for t in inputs], order(grad)
        try:
            call = peer.prepare(row, problem, leaves)
            torch.cuda.synchronize()
            start, before = time.perf_counter(), torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = call(*leaves)
            grads = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            torch.cuda.synchronize()
        except Unsupported as reason:
            result["skipped"][peer.name] = str(reason)
            continue
        except Exception as error:
            result["skipped"][peer.name] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        result["first_s"][peer.name] = time.perf_counter() - start
        result["peak_mib"][peer.name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        for _ in range(2):  # as in a training loop: the graph of a first call may have a slower backward pass
            out = call(*leaves)
            torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        start = time.perf_counter()
        peer.prepare(row, problem, leaves)
        torch.cuda.synchronize()
        result["mask_ms"][peer.name] = 1e3 * (time.perf_counter() - start)
        heads_first = out.transpose(1, 2) if peer.tokens_first else out
        error = (heads_first.detach()[0][:, queries].double() - expected).norm() / expected.norm()
        result["error"][peer.name] = float(error)
        assert all(bool(t.isfinite().all()) for t in (out, *grads)), f"{row} {peer.name}: non-finite results"
        calls["forward"][peer.name] = lambda call=call, leaves=leaves: call(*leaves)
        calls["backward"][peer.name] = lambda out=out, leaves=leaves, g=grad_out: torch.autograd.grad(out, leaves, g, retain_graph=True)
        del grads
    if "longspan" in calls["backward"]:
        deterministic(calls["backward"]["longspan"])
    return PreparedRow(known=result, flop=flop, calls=calls)


def time_row(row: PreparedRow) -> dict[str, Any]:
    """One row of the result: speeds, errors, memory and times by peer."""
    result = dict(row.known)
    for step, factor in zip(PASSES, (1.0, 2.5), strict=True):
        for column, clock in (("device", device_ms), ("called", as_called_ms)):
            result[f"{step}_{column}"] = {name: factor * row.flop / ms / 1e9 for name, ms in clock(row.calls[step]).items()}
    if "longspan" in row.calls["backward"]:
        fast = row.calls["backward"]["longspan"]
        times = device_ms({"default": fast, "fixed": partial(deterministic, fast)})
        result["fixed"] = times["default"] / times["fixed"]
    result["host_us"] = {step: {name: host_us(call, repeat=20) for name, call in row.calls[step].items()} for step in PASSES}
    return result


def measured(rows: list[Row], peers: list[Peer]) -> Iterator[dict[str, Any]]:
    """Rows of the result, one after the other."""
    return (time_row(prepare(row, peers)) for row in rows)


def measured_in_processes(rows: list[Row], peers: list[Peer]) -> Iterator[dict[str, Any]]:
    """Rows of the result, each from a process of its own (`serve_row`). All prepare their row at once."""
    command = [sys.executable, __file__, "--peers", ",".join(p.name for p in peers), "--serve-row"]
    processes = [
        subprocess.Popen([*command, str(ROWS.index(row))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for row in rows
    ]
    try:
        for process in processes:
            _answer(process, "prepared")
        for process in processes:
            print("time", file=process.stdin, flush=True)
            yield json.loads(_answer(process, "timed"))
            process.wait()
    finally:
        for process in processes:
            process.kill()


def _answer(process: subprocess.Popen[str], word: str) -> str:
    """The rest of the first line of a process that begins with `word`; peers print lines of their own."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(word):
            return text[len(word) :]
    raise RuntimeError(f"a row's process ended before it printed {word!r}: {process.args!r}")


def serve_row(row: Row, peers: list[Peer]) -> None:
    """Prepare a row, say so, wait for a line, time the row, print it: one process of `measured_in_processes`."""
    prepared = prepare(row, peers)
    torch.cuda.empty_cache()
    print("prepared", flush=True)
    sys.stdin.readline()
    print("timed", json.dumps(time_row(prepared)), flush=True)


def ratio(row: dict[str, Any], step: str, column: str) -> float | None:
    """longspan's speed over the fastest peer's; None without a peer."""
    speeds = row[f"{step}_{column}"]
    others = [speed for name, speed in speeds.items() if name != "longspan"]
    return speeds["longspan"] / max(others) if others and "longspan" in speeds else None


def line(row: dict[str, Any], names: list[str]) -> str:
    """A row of the printed table."""
    text = f"{row['row']:38}"
    for column in ("device", "called"):
        for step in PASSES:
            speeds, best = row[f"{step}_{column}"], ratio(row, step, column)
            text += " |" + "".join(f"{speeds[n]:6.0f}" if n in speeds else f"{'-':>6}" for n in names)
            text += f"{best:6.2f}" if best is not None else f"{'-':>6}"
    return text


def plot(result: Path, picture: Path) -> None:
    """Plot a result file as bars of device speed."""
    from matplotlib import pyplot

    data = json.loads(result.read_text(encoding="utf-8").strip().splitlines()[-1])
    rows, names = data["rows"], list(data["versions"])
    figure, axes = pyplot.subplots(2, 1, figsize=(13, 8), sharex=True, layout="constrained")
    width = 0.8 / len(names)
    for axis, step in zip(axes, PASSES, strict=True):
        for n, name in enumerate(names):
            bars = [(i, row[f"{step}_device"][name]) for i, row in enumerate(rows) if name in row[f"{step}_device"]]
            places = [i + width * (n - (len(names) - 1) / 2) for i, _ in bars]
            axis.bar(places, [speed for _, speed in bars], width=width * 0.95, label=f"{name} {data['versions'][name]}")
        axis.set_ylabel(f"{step}, TFLOP/s")
        axis.margins(y=0.18)
    axes[0].legend(ncols=3, fontsize="small", loc="upper right")
    axes[1].set_xticks(range(len(rows)), [row["row"] for row in rows], rotation=45, ha="right", fontsize=8)
    axes[0].set_title(f"{data['device']}, torch {data['torch']}, triton {data['triton']}, {data['date']}; bfloat16, device time")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains one of these, separated by commas")
    parser.add_argument("--peers", default="", help="only these peers, separated by commas")
    parser.add_argument("--prepare-at-once", action="store_true", help="compile all rows at once, each in a process of its own")
    parser.add_argument("--serve-row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULT", "PICTURE"))
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    if not torch.cuda.is_available():
        sys.exit("bench/peers.py needs a CUDA GPU")
    import triton

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    selected = [p for p in PEERS if not args.peers or p.name in args.peers.split(",")]
    absent = {p.name: reason for p in selected if (reason := p.missing()) is not None}
    peers = [p for p in selected if p.name not in absent]
    if args.serve_row is not None:
        serve_row(ROWS[args.serve_row], peers)
        return
    about = {
        "bench": "peers",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "versions": {p.name: p.version for p in peers},
        "missing": absent,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    names = [p.name for p in peers]
    columns = "".join(f"{n[:6]:>6}" for n in names) + f"{'ratio':>6}"
    print(f"{'TFLOP/s':38}" + "".join(f" |{f'{s}, {c}':^{len(columns)}}" for c in ("device", "as called") for s in PASSES))
    print(f"{'':38}" + f" |{columns}" * 4, flush=True)
    rows = []
    try:
        measure = measured_in_processes if args.prepare_at_once else measured
        for row in measure([r for r in ROWS if any(text in str(r) for text in args.rows.split(","))], peers):
            rows.append(row)
            print(line(row, names), flush=True)
    except KeyboardInterrupt:  # also SIGTERM: the rows measured so far are printed
        print(f"stopped after {len(rows)} rows")
    for row in rows:
        details = [f"{n} {row['error'][n]:.1e}, {row['peak_mib'][n]:.0f} MiB, first {row['first_s'][n]:.1f} s, "
                   f"host {row['host_us']['forward'][n]:.0f}/{row['host_us']['backward'][n]:.0f} µs" for n in row["error"]]  # fmt: skip
        if "fixed" in row:
            details.append(f"deterministic backward {row['fixed']:.2f} of the default's speed")
        print(f"{row['row']}: " + "; ".join(details + [f"{n} skipped ({why})" for n, why in row["skipped"].items()]))
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
