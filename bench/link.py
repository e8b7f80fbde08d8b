"""A link that is not there: copies on one GPU in place of what other ranks would send, or nothing at all.

A copy inside one GPU runs on its multiprocessors (also where the driver is asked for one that overlaps with compute), and takes turns with
kernels that hold all of them. What comes over a real link takes none. So there are two kinds: `copy` charges a rank with all that it gets,
read and written once, and `none` with nothing: keys arrive in memory that holds random numbers already. (The numbers that a kernel computes
with change the power that it draws, and so its clock: whatever memory held before would not do.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor

import longspan as ls
from longspan._comm.group import Done, Pending
from longspan._engine import kv_exchange as keys

KINDS = ("copy", "none")
Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source): contiguous, of the same bytes


class Link:
    """A stream beside the one that computes, of high priority as a communication library's may be. `kind`: one of KINDS."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.stream = torch.cuda.Stream(priority=-1)
        self.numbers: dict[Any, list[Tensor]] = {}

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory for what arrives. Of kind `none`: one of four tensors in turn, as many as keys and values of two steps take."""
        if self.kind == "copy":
            return like.new_empty(shape)
        ready = self.numbers.setdefault((shape, like.dtype), [])
        if len(ready) < 4:
            ready.insert(0, torch.randn(shape, device=like.device).to(like.dtype))
        ready.append(ready.pop(0))
        return ready[-1]

    def move(self, pairs: Pairs) -> torch.cuda.Event:
        """Copy each source to its target, after what the current stream has been given so far. The event: all of them are there, and may
        be freed."""
        self.stream.wait_stream(torch.cuda.current_stream())
        pairs = [(target, source) for target, source in pairs if source.numel()]
        for target, source in pairs:
            if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
                raise ValueError(
                    f"link: expected contiguous tensors of the same bytes, got {list(target.shape)} {target.dtype} with strides "
                    f"{target.stride()} for {list(source.shape)} {source.dtype} with strides {source.stride()}"
                )
        with torch.cuda.stream(self.stream), torch.no_grad():
            for target, source in pairs if self.kind == "copy" else ():
                target.copy_(source)
            done = torch.cuda.Event()
            done.record()
        return done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


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
    any_stream: ClassVar[bool] = True

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        return self._echo(out, [sent], what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        return self._echo(out, pieces, what)

    def _echo(self, out: Tensor, sources: Sequence[Tensor], what: str) -> Pending:
        if not out.is_cuda:
            return Done()
        return Copied(done=self.link.move(echoed(out, sources, what)), tensors=(out, *sources))


def echoed(out: Tensor, sources: Sequence[Tensor], what: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs (target, source) that fill `out` with the rows of `sources`, over and over."""
    sources = [source for source in sources if len(source)]
    if not sources and len(out):
        raise ValueError(f"{what}: this rank sends nothing, so that there is nothing to copy in place of what it gets")
    pairs, start = [], 0
    for source in cycle(sources) if len(out) else ():
        part = out[start : start + len(source)]
        pairs.append((part, source[: len(part)]))
        start += len(part)
        if start == len(out):
            break
    return pairs


class EchoMesh(ls.Mesh):
    """A mesh of which one rank exists. `link` is set once for all of them, and no part of a mesh as a value."""

    link: ClassVar[Link]

    @classmethod
    def use(cls, link: Link) -> None:
        """For all of them, for as long as this process lives: keys arrive where the link says."""
        cls.link = link
        keys.empty_rows = lambda like, rows, width: link.room(like, (rows, width))  # type: ignore[assignment]

    def group(self, axis: int | str) -> Any:
        return Echo(name="echo", rank=self.rank, size=self.size, link=self.link)
