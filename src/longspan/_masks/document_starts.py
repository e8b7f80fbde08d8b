"""Where the documents of a packed sequence start, read from a mask program.

A conjunct of the mask that restricts a query to its own document has one of two forms:

    ids[q] == ids[kv]      document ids; two tables where queries and keys differ
    kv >= first[q]         first token of each query's document, as `longspan.documents` looks it up

Other masks have no documents here: their sequence starts at token 0 only. Legend: Q queries, K keys, B batch rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from longspan._masks.program import Program, op_name

_AND = frozenset(("bitwise_and", "logical_and", "__and__"))
_COPY = frozenset(("_to_copy", "clone", "detach", "alias", "lift_fresh_copy"))


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentStarts:
    """First tokens of documents, ascending from 0, int64 on the host: one entry, or one per batch row where documents differ.

    Attributes:
        q: Starts among the queries.
        kv: Starts among the keys.
    """

    q: tuple[Tensor, ...]
    kv: tuple[Tensor, ...]


def document_starts(program: Program | None, captured: Sequence[Tensor], q_len: int, kv_len: int, batch: int) -> DocumentStarts:
    """The document starts of a mask over q_len × kv_len tokens and `batch` rows; 0 alone without documents.

    Documents that are not contiguous have no starts: the tables of a conjunct count only if each document is one range of tokens.
    """
    starts_by_lookup: list[tuple[list[Tensor], list[Tensor]]] = []
    if program is not None:
        for leaf in _conjuncts(program.result):
            starts = _starts_of(leaf, program, captured, q_len, kv_len, batch)
            if starts is not None:
                starts_by_lookup.append(starts)
    rows = max((len(q) for q, _ in starts_by_lookup), default=1)
    zero = torch.zeros(1, dtype=torch.int64)

    def joined(side: int) -> tuple[Tensor, ...]:
        return tuple(torch.cat([zero, *(s[side][r if len(s[side]) > 1 else 0] for s in starts_by_lookup)]).unique() for r in range(rows))

    return DocumentStarts(q=joined(0), kv=joined(1))


def _conjuncts(node: Node) -> Iterator[Node]:
    """The conjuncts of a bool node."""
    node = _source(node)
    if node.op == "call_function" and op_name(node) in _AND:
        for arg in node.args:
            if isinstance(arg, Node):
                yield from _conjuncts(arg)
    else:
        yield node


def _source(node: Node) -> Node:
    """The node that copies and conversions of a value started from."""
    while node.op == "call_function" and op_name(node) in _COPY and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _starts_of(
    leaf: Node, program: Program, captured: Sequence[Tensor], q_len: int, kv_len: int, batch: int
) -> tuple[list[Tensor], list[Tensor]] | None:
    """(starts among queries, starts among keys) by batch row that a conjunct implies; None if it is not about documents."""
    if leaf.op != "call_function" or len(leaf.args) != 2 or not all(isinstance(a, Node) for a in leaf.args):
        return None
    left, right = (_source(a) for a in leaf.args)  # type: ignore[arg-type]
    _, _, q, kv = program.index_nodes
    name = op_name(leaf)
    if (name, left) == ("ge", kv) or (name, right) == ("le", kv):
        first = _table(right if left is kv else left, q, program, captured, q_len, batch)
        return None if first is None or q_len != kv_len else _by_row([_starts_of_first(row) for row in first])
    if name != "eq":
        return None
    for a, b in ((left, right), (right, left)):
        q_ids, kv_ids = _table(a, q, program, captured, q_len, batch), _table(b, kv, program, captured, kv_len, batch)
        if q_ids is not None and kv_ids is not None:
            rows = max(len(q_ids), len(kv_ids))
            return _by_row([_starts_of_ids(q_ids[r % len(q_ids)], kv_ids[r % len(kv_ids)]) for r in range(rows)])
    return None


def _table(node: Node, index: Node, program: Program, captured: Sequence[Tensor], length: int, batch: int) -> Tensor | None:
    """The integer table [1, length] or [batch, length] that a node looks up at a position, or at a batch row and a position."""
    if node.op != "call_function" or op_name(node) != "index" or node.args[0] not in program.captured_nodes:
        return None
    table = captured[program.captured_nodes.index(node.args[0])]  # type: ignore[arg-type]
    if table.dtype.is_floating_point or table.dtype == torch.bool or table.shape[-1] < length:
        return None
    places = [_source(i) for i in node.args[1]]  # type: ignore[union-attr,arg-type]
    if places == [index]:
        return table[None, :length].cpu().long()
    if places == [program.index_nodes[0], index] and len(table) >= batch:
        return table[:batch, :length].cpu().long()
    return None


def _by_row(pairs: Sequence[tuple[Tensor, Tensor] | None]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Pairs of batch rows as a pair of lists; None if one of them is None."""
    known = [pair for pair in pairs if pair is not None]
    return ([q for q, _ in known], [kv for _, kv in known]) if len(known) == len(pairs) else None


def _starts_of_ids(q_ids: Tensor, kv_ids: Tensor) -> tuple[Tensor, Tensor] | None:
    q, kv = _runs(q_ids), _runs(kv_ids)
    return None if q is None or kv is None else (q, kv)


def _starts_of_first(first: Tensor) -> tuple[Tensor, Tensor] | None:
    """Starts by the first token of each token's document [S]; values outside of the sequence are padding, which sees nothing."""
    valid = (first >= 0) & (first < len(first))
    inside = first[valid]
    if bool((inside > valid.nonzero()[:, 0]).any()) or bool((inside.diff() < 0).any()) or bool((first[inside] != inside).any()):
        return None
    starts = torch.ones(len(first), dtype=torch.bool)
    starts[1:] = first.diff() != 0
    return starts.nonzero()[:, 0], inside.unique()


def _runs(ids: Tensor) -> Tensor | None:
    """First tokens of the ranges of equal ids [S]; None if a document, that is an id of 0 or more, has several ranges."""
    if not len(ids):
        return ids
    starts = torch.ones(len(ids), dtype=torch.bool)
    starts[1:] = ids.diff() != 0
    documents = ids[starts]
    documents = documents[documents >= 0]
    return starts.nonzero()[:, 0] if len(documents.unique()) == len(documents) else None


def block_edges(starts: Tensor, length: int, block: int) -> Tensor:
    """First tokens of blocks of `block` tokens counted from each start, then the length: int64 [blocks + 1]. No block crosses a start."""
    if length == 0:
        return torch.zeros(1, dtype=torch.int64)
    starts = starts[starts < length]
    ends = torch.cat([starts[1:], torch.tensor([length])])
    counts = (ends - starts + block - 1) // block
    nth = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.cat([starts.repeat_interleave(counts) + nth * block, torch.tensor([length])])
