"""The arrays that the report page draws from, packed into one compressed block.

The mask is sent as runs of tiles, not as a grid, so that a page of a million tokens stays small and smooth.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import torch
from torch import Tensor

from longspan._cost.report_data import PlanReport
from longspan._cost.timeline import PassTimes
from longspan._plan.digest import content
from longspan._plan.plan_data import PlanData

MAX_RANKS = 64  # ranks in the timeline and in the matrix
MAX_ARRIVALS = 1 << 22  # (rank, contiguous range) arrivals; a page with more does not name the step of a tile
TYPES = {torch.int32: "i4", torch.float32: "f4"}


def metadata(report: PlanReport) -> dict[str, Any]:
    """Sizes and scalars of the page, for JSON."""
    data = report.data
    return {
        "q_len": data.q_len,
        "kv_len": data.kv_len,
        "ranks": report.ranks,
        "degree": data.degree,
        "group": data.kv_coordinates.tolist(),
        "stages": len(report.received),
        "steps": report.work.steps,
        "split_local": report.work.halves is not None,  # the last step is the second part of local KV, in backward only
        "joined": report.work.joined,
        "shown": shown_ranks(report),
        "forward": report.timeline.forward.seconds,
        "backward": report.timeline.backward.seconds,
        "balance": report.balance,
    }


def shown_ranks(report: PlanReport) -> list[int]:
    """All ranks; of more than MAX_RANKS, an even sample and the busiest ones."""
    if report.ranks <= MAX_RANKS:
        return list(range(report.ranks))
    busiest = {int(report.timeline.backward.total.argmax()), int(report.pairs.argmax())}
    return sorted({round(i * (report.ranks - 1) / (MAX_RANKS - 1)) for i in range(MAX_RANKS)} | busiest)


def page_arrays(report: PlanReport) -> dict[str, Tensor]:
    """Every array of the page by name: the mask's runs, owners, work, arrivals, times of the shown ranks, traffic matrix."""
    tiles = report.data.tiles[0]
    table = tiles.table
    runs = int(table.ptr[table.q_tiles])
    shown = torch.tensor(shown_ranks(report))
    return {
        "ptr": table.ptr[: table.q_tiles + 1],
        "first": table.first[:runs],
        "last": table.last[:runs],
        "kind": table.kind[:runs],
        "q_owner": tiles.queries.owner,
        "k_owner": tiles.kv.owner,
        "q_edges": tiles.queries.edges,
        "k_edges": tiles.kv.edges,
        "pairs": report.pairs,
        "tiles": report.tiles.float(),
        **_arrivals(report.data),
        **_times("forward", report.timeline.forward, shown),
        **_times("backward", report.timeline.backward, shown),
        "matrix": report.matrix[shown][:, shown].float(),  # int32 would overflow at 2 GiB
    }


def _times(name: str, one: PassTimes, shown: Tensor) -> dict[str, Tensor]:
    """Begin and end of each step's compute, KV transfer and gradient return [2, shown, steps]; transposes and total [3, shown]."""
    nothing = torch.zeros_like(one.compute[0])
    spans = {"compute": one.compute, "transfer": one.transfer, "return": one.grad_return or (nothing, nothing)}
    times = {f"{name}_{what}": torch.stack([begin[shown], end[shown]]) for what, (begin, end) in spans.items()}
    return {**times, f"{name}_transposes": torch.stack([one.before[shown], one.after[shown], one.total[shown]])}


def _arrivals(data: PlanData) -> dict[str, Tensor]:
    """The step in which KV tiles arrive at each rank of the KV axis, as runs sorted by tile.

    Rank r has runs step_ptr[r] … step_ptr[r + 1] − 1; run i brings tiles step_first[i] … step_end[i] − 1 in step step_value[i].
    """
    schedule, kv, ranks = data.schedule, data.tiles[0].kv, data.inner[0].ranks
    moves = (schedule.row == 0).nonzero()[:, 0]
    if len(moves) > MAX_ARRIVALS:
        moves = moves[:0]
    receiver = schedule.receiver[moves]
    first, end = kv.within(schedule.start[moves], schedule.length[moves])
    step_of_stage = torch.zeros(schedule.stages + 1, dtype=torch.int64)
    for i, stages in enumerate(schedule.steps):
        step_of_stage[stages.start : stages.stop] = i + 1
    order = (receiver * kv.tiles + first).argsort()
    return {
        "step_ptr": torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(receiver, minlength=ranks).cumsum(0)]),
        "step_first": first[order],
        "step_end": end[order],
        "step_value": step_of_stage[schedule.stage[moves][order]],
    }


def pack(arrays: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
    """(index of name → byte offset, shape and type; the arrays as 32-bit numbers, deflated, in base64)."""
    index: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, tensor in arrays.items():
        flat = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int32).contiguous()
        index[name] = {"at": offset, "shape": list(flat.shape), "type": TYPES[flat.dtype]}
        parts.append(content(flat))
        offset += 4 * flat.numel()
    return index, base64.b64encode(zlib.compress(b"".join(parts), 6)).decode()
