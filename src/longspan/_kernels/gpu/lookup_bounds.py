"""Bounds checks of lookups in captured tensors, before a kernel runs.

Kernels clamp every index, since padding rows compute arbitrary ones. Without a check, a visible pair whose index is out of bounds would get
a number where torch raises. The check raises only where the error is certain: the program was evaluated at such a pair on the host, and
the looked-up value is not discarded by the mask, by the other branch of a `where`, or by a factor 0.

Evaluated once per block table, programs, sizes and lengths; for a mask, unless `Work.mask_is_checked`:
1. interval bounds; if they prove all lookups in bounds, nothing else;
2. every pair of a small attention; of a large one, every position for lookups by query alone or by key alone, and for other lookups the
   corners of tiles and 2¹⁷ sampled pairs. Of keys chosen at run time, corners of chosen blocks, of the first choice.

Not detected, and clamped: rare pairs of a large attention that the sample misses, indices that depend on the score, captured tensors that
are written to later, and pairs of later choices. Step 2 copies captured tensors that a discontinuous operation reads, and the first choice,
to the host, which synchronises once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu.codegen import ByKey
from longspan._kernels.gpu.exact_values import decisive
from longspan._kernels.gpu.guards import reached
from longspan._kernels.gpu.sample_pairs import Pairs, around, chosen_pairs, places, sampled, spread
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable
from longspan._masks.intervals import bounds
from longspan._masks.program import Program, call, op_name

_MAX_POSITIONS = 64  # with an index out of bounds, to evaluate
_BATCHES, _HEADS = 2, 4  # to sample, where the table has one for all

_checked: DerivedCache[BlockTable, None] = DerivedCache(64)  # calls whose lookups are in bounds


def check_lookups(work: Work, batch: int, heads: int) -> None:
    """Raise ValueError if a program certainly looks outside a captured tensor. `batch`, `heads`: sizes of the query tensor."""
    pieces = [(work.score, work.score_captured), (None if work.mask_is_checked else work.mask, work.mask_captured)]
    asked = [(p, captured) for p, captured in pieces if p is not None and not _inside(p, captured, work, batch, heads)]
    if not asked:
        return
    shapes = tuple(tuple(t.shape) for _, captured in pieces for t in captured)
    keys = tuple(p.key for p, _ in asked)
    chosen = None if work.device_tables is None else work.device_tables.signature
    key = (keys, shapes, work.q_tiles.name, work.kv_tiles.name, batch, heads, work.first_batch, work.first_head, chosen)

    def check() -> None:
        for program, captured in asked:
            on_host = _on_host(program, captured)
            if work.device_tables is not None:
                _check_at(
                    program, on_host, work, chosen_pairs(work.device_tables.selection, work.q_tiles.length, work.kv_tiles.length, batch)
                )
            else:
                _check_pairs(program, on_host, work, batch, heads)

    _checked.get(work.table, key, check)


# ------------------------------------------------------------------------------------------------ bounds


def _inside(program: Program, captured: Sequence[Tensor], work: Work, batch: int, heads: int) -> bool:
    """Whether interval bounds prove all lookups in bounds, without reading captured tensors."""
    ends = (work.first_batch + batch, work.first_head + heads, _end(work.q_tiles), _end(work.kv_tiles))
    return _proven(ByKey(program), tuple(tuple(t.shape) for t in captured), ends)


def stays_inside(program: Program, captured: Sequence[Tensor], ends: tuple[int, int, int, int]) -> bool:
    """Whether all lookups are proven in bounds for batch rows, heads, queries and keys below `ends`."""
    return _proven(ByKey(program), tuple(tuple(t.shape) for t in captured), ends)


@lru_cache(maxsize=1024)
def _proven(keyed: ByKey, shapes: tuple[tuple[int, ...], ...], ends: tuple[int, int, int, int]) -> bool:
    program = keyed.program
    sizes = dict(zip(program.captured_nodes, shapes, strict=True))
    limits = dict(zip(program.index_nodes, ends, strict=True))
    lookups = _lookups(program)
    if all(limits.get(i, size + 1) <= size for n in lookups for i, size in zip(_indices(n), sizes[_table(n)], strict=True)):
        return True
    if 0 in ends:
        return True
    if any(_table(n) in behind(_indices(m)) for n in lookups for m in lookups):
        return False
    stand_ins = [torch.ones((), dtype=c.dtype).expand(shape) for c, shape in zip(program.captured, shapes, strict=True)]
    try:
        bounded = bounds(program, stand_ins, ends[2], ends[3], ends[0], ends[1])
    except (ValueError, IndexError):  # a constant index out of bounds: step 2 tells whether its value is used
        return False
    return all(bounded.lookups.get(n, False) for n in lookups)


def _lookups(program: Program) -> list[Node]:
    return [n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "index"]


def _table(lookup: Node) -> Node:
    return lookup.args[0]  # type: ignore[return-value]


def _indices(lookup: Node) -> list[Node]:
    return list(lookup.args[1])  # type: ignore[arg-type]


def behind(nodes: Sequence[Node]) -> set[Node]:
    """The nodes and all nodes that they depend on."""
    ancestors: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in ancestors:
            ancestors.add(node)
            todo += node.all_input_nodes
    return ancestors


def _end(tiling: Tiling) -> int:
    """The smallest number above all positions."""
    if tiling.pos is None or tiling.count is None:
        return tiling.length
    return int((tiling.pos + tiling.count).max()) if len(tiling.pos) else 0


def _on_host(program: Program, captured: Sequence[Tensor]) -> list[Tensor]:
    """Captured tensors on the host where a discontinuous operation reads them; else expanded ones of their shape, without memory."""
    read = decisive(program.graph)
    return [
        t.cpu() if node in read else torch.ones((), dtype=t.dtype).expand(t.shape)
        for node, t in zip(program.captured_nodes, captured, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ pairs


def _check_pairs(program: Program, captured: Sequence[Tensor], work: Work, batch: int, heads: int) -> None:
    table = work.table
    if not len(table.first):
        return
    pairs = sampled(table, work.q_tiles, work.kv_tiles)
    _check_at(program, captured, work, _indices_at(pairs, program, work, batch, heads))
    for axis, rows, columns in (("q", work.q_tiles, work.kv_tiles), ("kv", work.kv_tiles, work.q_tiles)):
        alone = [n for n in _lookups(program) if _axes(program, n) & {"q", "kv"} == {axis}]
        if not alone:
            continue
        place = places(rows)
        zero = torch.zeros_like(place)
        everywhere = Pairs(zero, zero, *((place, zero) if axis == "q" else (zero, place)))
        outside = _outside(program, captured, _indices_at(everywhere, program, work, batch, heads))
        odd = [outside[n].flatten(0, 1).any(0) for n in alone]
        odd_cells = torch.nonzero(torch.stack(odd).any(0)).flatten()
        if len(odd_cells):
            sides = table if axis == "q" else table.transposed
            b, h, here, there = around(sides, rows, columns, place[spread(len(odd_cells), _MAX_POSITIONS, of=odd_cells)])
            pairs = Pairs(b, h, *((here, there) if axis == "q" else (there, here)))
            _check_at(program, captured, work, _indices_at(pairs, program, work, batch, heads))


def _axes(program: Program, lookup: Node) -> set[str]:
    """The names of the inputs that the indices of a lookup depend on."""
    return {str(n.target) for n in behind(_indices(lookup)) if n in program.placeholders}


# ------------------------------------------------------------------------------------------------ at pairs


def _indices_at(pairs: Pairs, program: Program, work: Work, batch: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q, kv of rank 3 for a program: batch rows, heads, pairs."""
    b, h = pairs.b.view(1, 1, -1), pairs.h.view(1, 1, -1)
    uses_batch, uses_head = (any(p is not None and getattr(p, u) for p in (program, work.mask)) for u in ("uses_batch", "uses_head"))
    if work.table.batch == 1:
        b = spread(batch if uses_batch else 1, _BATCHES).view(-1, 1, 1)
    if work.table.heads == 1:
        h = spread(heads if uses_head else 1, _HEADS).view(1, -1, 1)
    return b + work.first_batch, h + work.first_head, pairs.q.view(1, 1, -1), pairs.kv.view(1, 1, -1)


def _values(program: Program, inputs: Sequence[Tensor]) -> tuple[dict[Node, Any], dict[Node, Tensor]]:
    """(values of all nodes with clamped indices, for each lookup where an index was out of bounds)."""
    env: dict[Node, Any] = dict(zip(program.placeholders, inputs, strict=True))
    outside: dict[Node, Tensor] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            env[node] = node.meta["constant"].cpu().reshape(1, 1, 1)
        elif node.op == "call_function" and op_name(node) == "index":
            table = env[_table(node)]
            at = [env[i] for i in _indices(node)]
            wrong = [(i < -n) | (i >= n) for i, n in zip(at, table.shape, strict=True)]
            outside[node] = torch.stack(torch.broadcast_tensors(*wrong)).any(0)
            clamped = tuple(i.clamp(-n, n - 1) for i, n in zip(at, table.shape, strict=True))
            env[node] = table[clamped] if table.numel() else torch.zeros(outside[node].shape, dtype=table.dtype)
        elif node.op == "call_function":
            args, kwargs = (torch.fx.map_arg(a, lambda n: env[n]) for a in (node.args, node.kwargs))
            env[node] = call(node.target, args, dict(kwargs), torch.device("cpu"))  # type: ignore[arg-type]
    return env, outside


def _inputs(program: Program, captured: Sequence[Tensor], indices: Sequence[Tensor]) -> list[Tensor]:
    score = [torch.zeros(1, 1, 1, dtype=program.score_dtype)] if program.kind == "score" else []
    return [*score, *indices, *(c.reshape(1, 1, 1) if c.ndim == 0 else c for c in captured)]


def _outside(program: Program, captured: Sequence[Tensor], indices: Sequence[Tensor]) -> dict[Node, Tensor]:
    return _values(program, _inputs(program, captured, indices))[1]


def _check_at(program: Program, captured: Sequence[Tensor], work: Work, indices: Sequence[Tensor]) -> None:
    """Raise if a lookup is out of bounds at one of the pairs (b, h, q, kv of rank 3) and its value reaches the result."""
    if not indices[0].numel():
        return
    env, outside = _values(program, _inputs(program, captured, indices))
    if not any(bool(o.any()) for o in outside.values()):
        return
    seen = torch.ones(1, 1, 1, dtype=torch.bool)
    if program.kind == "score" and work.mask is not None:
        host = _on_host(work.mask, work.mask_captured)
        seen = _values(work.mask, _inputs(work.mask, host, indices))[0][work.mask.result]
    counts = reached(program, env, seen)
    for node, wrong in outside.items():
        if node not in counts or "score" in _axes(program, node):
            continue
        certain = torch.broadcast_tensors(wrong & counts[node], *indices)
        if bool(certain[0].any()):
            raise ValueError(_message(program, node, env, certain))


def _message(program: Program, lookup: Node, env: dict[Node, Any], certain: Sequence[Tensor]) -> str:
    at = tuple(torch.nonzero(certain[0])[0].tolist())
    b, h, q, kv = (int(c[at]) for c in certain[1:])
    shape = tuple(env[_table(lookup)].shape)
    dims = [
        f"dim {dim} has {size} entries, its index goes at least from {int(env[i].min())} to {int(env[i].max())}"
        for dim, (i, size) in enumerate(zip(_indices(lookup), shape, strict=True))
        if bool(((env[i] < -size) | (env[i] >= size)).any())
    ]
    what = "mask" if program.kind == "mask" else "score_mod"
    return (
        f"{what} {program.name!r} looks outside a captured tensor of shape {shape}, at batch row {b}, head {h}, query {q}, "
        f"key {kv} for one: {'; '.join(dims)}. Was the tensor made for other lengths? Make it larger, or clamp the index"
    )
