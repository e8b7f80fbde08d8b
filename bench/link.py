"""A stand-in for the network that lets one GPU run a single rank of a mesh.

A copy inside one GPU runs on its SMs, even a copy that the driver is asked to overlap, and waits for kernels that occupy all SMs. A
transfer over a real link takes no SM. Therefore there are two kinds of link. `copy` charges a rank for the received bytes, read and
written once. `none` charges nothing: KV arrive in memory that already holds random numbers. (Random, because the values that a kernel
computes with change its power draw, and so its clock.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor

import longspan as ls
from longspan._comm.group import CPU, ControlGroup, Done, Pending
from longspan._engine import kv_exchange

KINDS = ("copy", "none")
Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source): contiguous, with equally many bytes


class Link:
    """A communication stream of high priority. `kind`: one of KINDS."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = torch.cuda.current_device()  # a number: streams of the current device take ten times as long to look up
        self.stream = torch.cuda.Stream(priority=-1)
        self.buffers: dict[Any, list[Tensor]] = {}

    def receive_buffer(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory for received KV. Kind `none`: one of four random tensors in turn, enough for K and V of two steps."""
        if self.kind == "copy":
            return like.new_empty(shape)
        buffers = self.buffers.setdefault((shape, like.dtype), [])
        if len(buffers) < 4:
            buffers.insert(0, torch.randn(shape, device=like.device).to(like.dtype))
        buffers.append(buffers.pop(0))
        return buffers[-1]

    def move(self, pairs: Pairs) -> torch.cuda.Event:
        """Copy each source to its target, after all work queued on the current stream. Returns the event of the last copy."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for target, source in pairs:
            if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
                raise ValueError(
                    f"link: expected contiguous tensors with equally many bytes, got a target {list(target.shape)} {target.dtype} with "
                    f"strides {target.stride()} and a source {list(source.shape)} {source.dtype} with strides {source.stride()}"
                )
        if pairs and self.kind == "copy":
            with torch.cuda.stream(self.stream), torch.no_grad():
                for target, source in pairs:
                    target.copy_(source)
        return self.stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


@dataclass(frozen=True, kw_only=True)
class Copied:
    """An exchange in flight; holds its tensors until `wait`."""

    done: torch.cuda.Event
    device: int
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.done)


@dataclass(frozen=True, kw_only=True)
class Echo:
    """A process group with one real rank: data of other ranks is copied from the rank's own."""

    name: str
    rank: int
    size: int
    link: Link
    any_stream: ClassVar[bool] = True

    def control(self) -> ControlGroup:
        return ControlGroup(self, CPU)

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        return self._echo(out, [sent], what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        return self._echo(out, pieces, what)

    def _echo(self, out: Tensor, sources: Sequence[Tensor], what: str) -> Pending:
        if not out.is_cuda:  # a control message: copied at once
            for target, source in echoed(out, sources, what):
                target.copy_(source)
            return Done()
        link = self.link
        pairs = echoed(out, sources, what) if link.kind == "copy" else ()
        return Copied(done=link.move(pairs), device=link.device, tensors=(out, *sources))


def echoed(out: Tensor, sources: Sequence[Tensor], what: str) -> list[tuple[Tensor, Tensor]]:
    """(target, source) pairs that fill `out` with the rows of `sources`, repeated."""
    sources = [source for source in sources if source.shape[0]]
    rows = out.shape[0]
    if not sources and rows:
        raise ValueError(
            f"{what}: expected a rank that sends something, which is copied in place of received data; got one that only receives"
        )
    pairs, start = [], 0
    for source in cycle(sources) if rows else ():
        stop = min(start + source.shape[0], rows)
        pairs.append((out[start:stop], source[: stop - start]))
        start = stop
        if start == rows:
            break
    return pairs


class EchoMesh(ls.Mesh):
    """A mesh with one real rank. `link` belongs to the class: meshes are compared as values, and a link is not part of the value."""

    link: ClassVar[Link]

    @classmethod
    def use(cls, link: Link) -> None:
        """Use a link for all meshes of this process; received KV go to the link's buffers."""
        cls.link = link
        kv_exchange.empty_rows = lambda like, rows, width: link.receive_buffer(like, (rows, width))  # type: ignore[assignment]

    def group(self, axis: int | str) -> Any:
        return Echo(name="echo", rank=self.rank, size=self.size, link=self.link)
