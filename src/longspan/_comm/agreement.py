"""Do all ranks believe the same? If not, every rank says so: no rank is left waiting, none computes something else than the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import Mesh

_WORDS = 4  # int64 words of a digest
AGREEMENT = "agreement of all ranks"


def agree(mesh: Mesh, fields: Mapping[str, str], error: Exception | None = None, *, device: torch.device | str = "cpu") -> None:
    """Return if `fields` are the same on every rank of the mesh; raise on every rank if they are not.

    Every rank calls this, also one whose own checks failed: it passes its `error`, which it raises again here, and the others raise a
    RuntimeError that says which rank refused and why. Digests are compared first ([ranks, 5] int64 on `device`, which the
    backend must carry); texts travel only if those differ.
    """
    if mesh.size > 1:
        told = _gather(mesh, fields, error, torch.device(device))
        if error is None and told:
            _judge(mesh, told)
    if error is not None:
        raise error


def _gather(mesh: Mesh, fields: Mapping[str, str], error: Exception | None, device: torch.device) -> list[dict[str, Any]]:
    """What each rank believes, or nothing if all agree."""
    mine = {"fields": dict(sorted(fields.items())), "error": None if error is None else f"{type(error).__name__}: {error}"}
    text = json.dumps(mine).encode()
    digest = hashlib.sha256(text).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_WORDS)]
    row = torch.tensor([[*words, len(text)]], dtype=torch.int64, device=device)
    rows = all_gather_rows(mesh, row, [1] * mesh.size, what=f"{AGREEMENT}, digests").tolist()
    # A rank that failed tells of it in its text; where all failed alike, each raises its own error all the same.
    if all(other == rows[0] for other in rows):
        return []
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    lengths = [int(other[_WORDS]) for other in rows]
    texts = all_gather_rows(mesh, sent, lengths, what=f"{AGREEMENT}, texts").cpu()
    return [json.loads(bytes(part.tolist())) for part in texts.split(lengths)]


def _judge(mesh: Mesh, told: Sequence[Mapping[str, Any]]) -> None:
    refused = [f"rank {r} refused this call: {t['error']}" for r, t in enumerate(told) if t["error"] is not None]
    if refused:
        raise RuntimeError("; ".join(refused))
    names = sorted({name for t in told for name in t["fields"]})
    differ = [text for name in names if (text := _differ(name, [t["fields"].get(name) for t in told]))]
    raise ValueError(
        f"the {mesh.size} ranks of this mesh do not agree: {'; '.join(differ)}. All ranks must make the same call with the same plan: "
        "give those ranks what the others have (each keeps its own shard's tensors)"
    )


def _differ(name: str, values: Sequence[str | None]) -> str | None:
    """Who holds another value of a field than most ranks do. On a tie the value of the lowest rank counts as the others'."""
    if all(value == values[0] for value in values):
        return None
    usual = max(dict.fromkeys(values), key=values.count)  # max keeps the first of equals, and values come by rank
    odd: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            odd.setdefault(value, []).append(rank)
    parts = [f"{_ranks(ranks)} {_holds(value, len(ranks))}" for value, ranks in odd.items()]
    others = [rank for rank, value in enumerate(values) if value == usual]
    return f"{name}: {', '.join(parts)}, {_ranks(others)} {_holds(usual, len(others))}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{rest}"


def _holds(value: str | None, count: int) -> str:
    return f"{'has' if count == 1 else 'have'} {'no such field' if value is None else value}"
