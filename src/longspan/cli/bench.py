"""`longspan bench`: longspan against torch's SDPA on this machine, as ratios within one run."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError

DTYPES = ("float32", "bfloat16", "float16")
DOCUMENTS = 16
MAX_MASK_BYTES = 2**32  # of a dense mask


def bench(
    tokens: Annotated[str | None, typer.Option(help="tokens of the sequence (k = 1024); default 2k on a CPU, 16k on a GPU")] = None,
    heads: Annotated[str, typer.Option(help="query heads, or query/KV heads")] = "8",
    dim: Annotated[str, typer.Option(help="head dim")] = "64",
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; default float32 on a CPU, bfloat16 on a GPU")] = None,
    repeat: Annotated[str, typer.Option(help="measurements of each; the minimum is printed")] = "3",
    device: Annotated[str, typer.Option(help="cpu or cuda; auto is the GPU if there is one")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> int:
    """Time attention against torch's SDPA.

    Forward and backward: causal, and packed documents (a dense mask in SDPA). Results are compared too: the exit code is 1 if they differ
    by more than rounding.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    q_heads, kv_heads = parse.heads(heads)
    head_dim, times = parse.count(dim, "--dim"), parse.count(repeat, "--repeat")
    chosen_length = None if tokens is None else parse.count(tokens, "--tokens")
    place = parse.device(device)

    import torch

    import longspan as ls

    gpu = place.type == "cuda"
    named = dtype or ("bfloat16" if gpu else "float32")
    length = chosen_length or (16384 if gpu else 2048)
    sizes = BenchSizes(tokens=length, heads=q_heads, kv_heads=kv_heads, dim=head_dim, dtype=named)
    where = torch.cuda.get_device_name(place) if gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    print(f"longspan {ls.__version__}, torch {torch.__version__}, {where}")
    print(f"{length:,} tokens, {q_heads} query heads over {kv_heads} KV heads of {sizes.dim}, {named}\n")
    print(f"{'mask':22}{'computed':>9}  {'pass':9}{'SDPA ms':>11}{'longspan ms':>13}{'ratio':>8}", flush=True)
    rows = []
    try:
        for row in measured(sizes, place, times):
            rows.append(row)
            both = f"{1e3 * row.sdpa_s:11.2f}{1e3 * row.longspan_s:13.2f}{row.ratio:8.2f}"
            print(f"{row.mask:22}{row.density:9.3f}  {row.name:9}{both}{'' if row.same else '   DIFFERENT RESULTS'}", flush=True)
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise UsageError(f"--tokens: {length} tokens do not fit into memory here; give fewer tokens or heads") from None
    print("\nratio: SDPA's time over longspan's; above 1, longspan is faster.  computed: share of tiles that the mask leaves.")
    if length**2 > MAX_MASK_BYTES:
        print(f"packed documents are skipped: a dense mask for SDPA would take {length**2 / 2**30:.0f} GiB")
    if as_json:
        about = {"longspan": ls.__version__, "torch": torch.__version__, "device": where, "repeat": times, **asdict(sizes)}
        print(json.dumps({**about, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}), flush=True)
    return 0 if all(row.same for row in rows) else 1


@dataclass(frozen=True, kw_only=True)
class BenchSizes:
    """BenchSizes of the measured attention."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str

    def lengths(self) -> list[int]:
        """Lengths of the packed documents, from short to long."""
        many = min(DOCUMENTS, self.tokens)
        ends = [self.tokens * i * (i + many) // (2 * many * many) for i in range(many + 1)]
        return [b - a for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times of one pass under one mask. `same`: whether the results are equal up to rounding."""

    mask: str
    name: str
    density: float
    sdpa_s: float
    longspan_s: float
    same: bool

    @property
    def ratio(self) -> float:
        return self.sdpa_s / self.longspan_s


def measured(sizes: BenchSizes, device: Any, repeat: int) -> Iterator[Row]:
    """Rows of forward and backward under each mask."""
    import torch
    import torch.nn.functional as F

    import longspan as ls

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, sizes.tokens, sizes.dim) for h in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)]
    *inputs, grad = (torch.randn(s, generator=generator).to(device, getattr(torch, sizes.dtype)) for s in shapes)
    q, k, v = (t.requires_grad_() for t in inputs)
    grouped: dict[str, Any] = {"enable_gqa": True} if sizes.heads != sizes.kv_heads else {}
    cases: list[tuple[str, Any, dict[str, Any]]] = [("causal", ls.causal(), {"is_causal": True})]
    if sizes.tokens**2 <= MAX_MASK_BYTES:
        lengths = sizes.lengths()
        ids = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        dense = (ids[:, None] == ids[None, :]).tril_()
        cases.append((f"{len(lengths)} packed documents", ls.causal() & ls.documents(lengths=lengths), {"attn_mask": dense}))
    for name, mask, options in cases:
        density = mask.block_table(sizes.tokens).density
        calls = {
            "sdpa": partial(F.scaled_dot_product_attention, q, k, v, **options, **grouped),
            "longspan": partial(ls.attention, q, k, v, mask=mask),
        }
        outs = {who: call() for who, call in calls.items()}
        backward = {who: partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True) for who, out in outs.items()}
        with torch.no_grad():
            same = _same([outs["longspan"]], [outs["sdpa"]])
            yield Row(mask=name, name="forward", density=density, same=same, **_seconds(calls, device, repeat))
        same = _same(backward["longspan"](), backward["sdpa"]())
        yield Row(mask=name, name="backward", density=density, same=same, **_seconds(backward, device, repeat))


def _same(ours: Any, theirs: Any) -> bool:
    """Whether results are equal up to rounding: a relative error below the square root of the dtype's epsilon."""
    import torch

    return all(float((a - b).float().norm()) <= torch.finfo(a.dtype).eps ** 0.5 * float(b.float().norm()) for a, b in zip(ours, theirs))


def _seconds(calls: Mapping[str, Callable[[], Any]], device: Any, repeat: int) -> dict[str, float]:
    """Minimum of `repeat` times of each call, measured alternately so that other load affects both."""
    minimum = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(repeat):
        for who, call in calls.items():
            minimum[who] = min(minimum[who], _once(call, device))
    return {f"{who}_s": seconds for who, seconds in minimum.items()}


def _once(call: Callable[[], Any], device: Any) -> float:
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    call()  # keeps the device busy while the host queues the timed call
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
