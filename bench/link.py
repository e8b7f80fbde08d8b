"""A link that is not there: copies on one GPU in place of what other ranks would send, made by its copy engines, as NVLink's are.

    PYTHONPATH=src python bench/link.py     what such copies reach, alone and beside a kernel that holds every multiprocessor

A plain copy inside one GPU runs on multiprocessors. It waits for a persistent kernel that holds all of them, which what comes over a link
does not. The driver's batch of copies takes a wish to overlap with compute, and then may use a copy engine. It is a wish: the table says
what became of it. GB/s counts each byte once, though it is both read and written.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor

import longspan as ls
from longspan.comm.group import Done, Pending

KINDS = ("engine", "copy")
Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source): contiguous, of the same bytes


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of the driver, 24 bytes. The hints of places are for managed memory only."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER, _OVERLAP_WITH_COMPUTE = 1, 1


def batch_of_copies() -> Callable[[Pairs, int], None] | None:
    """The driver's call for a batch of copies on a stream, or None where the driver has none. The stream must not be the default one.

    The driver library rather than the runtime: a symbol there keeps its arguments for good. That of CUDA 12.8 takes one more, where the
    index of a copy that failed goes.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    now, before = getattr(driver, "cuMemcpyBatchAsync_v2", None), getattr(driver, "cuMemcpyBatchAsync", None)
    call = now or before
    if call is None:
        return None
    call.restype = ctypes.c_int

    def copies(pairs: Pairs, stream: int) -> None:
        n = len(pairs)
        targets = (ctypes.c_uint64 * n)(*(target.data_ptr() for target, _ in pairs))
        sources = (ctypes.c_uint64 * n)(*(source.data_ptr() for _, source in pairs))
        sizes = (ctypes.c_size_t * n)(*(source.nbytes for _, source in pairs))
        how, first = _Attributes(order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE), ctypes.c_size_t(0)
        failed = () if now else (ctypes.byref(ctypes.c_size_t(0)),)
        error = call(
            targets, sources, sizes, ctypes.c_size_t(n), ctypes.byref(how), ctypes.byref(first), ctypes.c_size_t(1), *failed,
            ctypes.c_void_p(stream),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"the driver refused a batch of {n} copies, with error {error}; --link copy needs no such batch")

    return copies


class Link:
    """A stream beside the one that computes, of high priority as a communication library's may be. `kind`: one of KINDS."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.stream = torch.cuda.Stream(priority=-1)
        self._batch = batch_of_copies() if kind == "engine" else None
        if kind == "engine" and self._batch is None:
            raise RuntimeError("this driver has no batches of copies (CUDA 12.8 and later have); use --link copy")

    def move(self, pairs: Pairs) -> torch.cuda.Event:
        """Copy each source to its target, after what the current stream has been given so far. The event: all of them are there."""
        self.stream.wait_stream(torch.cuda.current_stream())
        pairs = [(target, source) for target, source in pairs if source.numel()]
        for target, source in pairs:
            if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
                raise ValueError(
                    f"link: expected contiguous tensors of the same bytes, got {list(target.shape)} {target.dtype} with strides "
                    f"{target.stride()} for {list(source.shape)} {source.dtype} with strides {source.stride()}"
                )
        with torch.cuda.stream(self.stream), torch.no_grad():
            if self._batch is not None and pairs:
                self._batch(pairs, self.stream.cuda_stream)
            elif pairs:
                for target, source in pairs:
                    target.copy_(source)
            done = torch.cuda.Event()
            done.record()
        for tensor in (tensor for pair in pairs for tensor in pair):
            tensor.record_stream(self.stream)
        return done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


def open_link(kind: str | None) -> Link:
    """The link of that kind; of copy engines where that works, if none is asked for."""
    if kind is not None:
        return Link(kind)
    try:
        found = Link("engine")
        source = torch.arange(1 << 20, device="cuda")
        target = torch.zeros_like(source)
        found.move([(target, source)]).synchronize()
        return found if torch.equal(target, source) else Link("copy")
    except RuntimeError:
        return Link("copy")


@dataclass(frozen=True, kw_only=True)
class Copied:
    """An exchange under way; holds its tensors until it is waited for."""

    done: torch.cuda.Event
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


@dataclass(frozen=True, kw_only=True)
class Echo:
    """A group of which one rank exists: what it expects from others is copied from its own rows."""

    name: str
    rank: int
    size: int
    link: Link

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        return self._echo(out, [sent], what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        return self._echo(out, pieces, what)

    def _echo(self, out: Tensor, sources: Sequence[Tensor], what: str) -> Pending:
        if not out.is_cuda:
            return Done()
        sources = [source for source in sources if len(source)]
        if not sources and len(out):
            raise ValueError(f"{what}: this rank sends nothing, so that there is nothing to copy in place of what it gets")
        pairs, start = [], 0
        for source in cycle(sources):
            part = out[start : start + len(source)]
            pairs.append((part, source[: len(part)]))
            start += len(part)
            if start == len(out):
                break
        return Copied(done=self.link.move(pairs), tensors=(out, *sources))


class EchoMesh(ls.Mesh):
    """A mesh of which one rank exists. `link` is set once for all of them, and no part of a mesh as a value."""

    link: ClassVar[Link]

    def group(self, axis: int | str) -> Any:
        return Echo(name="echo", rank=self.rank, size=self.size, link=self.link)


COPIES, BYTES = 8, 256 * 2**20


def beside(link: Link, kernel: Callable[[], object] | None, copies: int) -> tuple[float, float]:
    """(milliseconds of the copies, of the kernel), of each what there is; the copies begin when the kernel has run for a while."""
    source, target = (torch.empty(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    idle = torch.cuda.Stream()  # copies wait for what is current when they are asked for: nothing
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host queues all that follows
        with torch.cuda.stream(link.stream):
            link.stream.wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(4_000_000)
            events[0].record()
        with torch.cuda.stream(idle):
            for _ in range(copies):
                link.move([(target, source)])
        events[1].record(link.stream)
        events[2].record()
        if kernel is not None:
            kernel()
        events[3].record()
        torch.cuda.synchronize()
        found.append((events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])))
    return statistics.median(c for c, _ in found), statistics.median(k for _, k in found)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 32, 32768, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def kernel() -> Tensor:
        with torch.no_grad():
            return ls.attention(q, k, v, mask=ls.causal(), kernel="hopper")

    kernel()
    works = open_link(None).kind
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; the link is: {works}")
    print(f"{COPIES} copies of {BYTES >> 20} MiB; kernel: hopper forward, causal 32k, 32 heads, D 128, bf16")
    print(f"{'':8}{'alone':>9}{'beside':>9}  GB/s |{'alone':>9}{'beside':>9}  ms of the kernel")
    for kind in KINDS if works == "engine" else ("copy",):
        link = Link(kind)
        copies, _ = beside(link, None, COPIES)
        _, kernel_alone = beside(link, kernel, 0)
        copies_beside, kernel_beside = beside(link, kernel, COPIES)
        speeds = [COPIES * BYTES / ms / 1e6 for ms in (copies, copies_beside)]
        print(f"{kind:8}{speeds[0]:9.0f}{speeds[1]:9.0f}       |{kernel_alone:9.3f}{kernel_beside:9.3f}")


if __name__ == "__main__":
    main()
