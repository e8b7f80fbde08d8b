"""Programs of the tokens that one rank holds, for caches whose pages are spread over ranks.

A rank's tokens of a sequence, in order, are a sequence of their own: key t of it is the token at `whole_position` of the whole sequence. A
program of local positions converts them and then computes what the mod's own program computes, so kernels need not know about ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._masks.program import Program
from longspan._masks.tracing import Traced, trace


class LocalTrace(NamedTuple):
    """A program of local positions and its preamble, without sources.

    inputs: for each source, its index among `LocalSequences` and then the captured tensors of the mod's own program.
    """

    traced: Traced
    inputs: tuple[int, ...]

    @property
    def program(self) -> Program:
        return self.traced.program


class LocalSequences(NamedTuple):
    """Of each local sequence, int32 [n]: batch index of the whole sequence; whole minus local position of its queries; position of the
    first token that this rank holds.
    """

    batch: Tensor
    query_offset: Tensor
    key_offset: Tensor


def local_program(
    program: Program, captured: Sequence[Tensor], sequences: LocalSequences, *, ranks: int, page_size: int
) -> tuple[Program, list[Tensor]]:  # fmt: skip
    """(program of local positions, its captured tensors)."""
    traced, inputs = local_trace(program, ranks, page_size)
    tensors = (*sequences, *captured)
    made = replace(traced, sources=tuple(tensors[i] for i in inputs))
    return made.program, made.captured()


def local_trace(program: Program, ranks: int, page_size: int) -> LocalTrace:
    """The program of local positions of a program, cached."""
    return _traces.get(program, (ranks, page_size), partial(_trace, program, ranks, page_size))


def whole_position(local: Tensor, key_offset: Tensor, ranks: int, page_size: int) -> Tensor:
    """The position in the whole sequence of the token at a local position. The rank holds every `ranks`-th page from the first one on."""
    return local + local // page_size * ((ranks - 1) * page_size) + key_offset


def _trace(program: Program, ranks: int, page_size: int) -> LocalTrace:
    of_sequences = [torch.zeros(1, dtype=torch.int32, device="cpu") for _ in LocalSequences._fields]
    captured = [torch.zeros((1,) * spec.ndim, dtype=spec.dtype, device="cpu") for spec in program.captured]
    batch, query_offset, key_offset = of_sequences

    def converted(*inputs: Tensor) -> Tensor:
        *score, n, h, q, kv = inputs
        whole = whole_position(kv, key_offset[n], ranks, page_size)
        return program(*score, batch[n].long(), h, q + query_offset[n], whole, *captured)

    made = trace(converted, program.kind, score_dtype=program.score_dtype, name=program.name)
    number = {id(t): i for i, t in enumerate((*of_sequences, *captured))}
    return LocalTrace(replace(made, sources=()), tuple(number[id(t)] for t in made.sources))


_traces: DerivedCache[Program, LocalTrace] = DerivedCache(8)  # by number of ranks and page size
