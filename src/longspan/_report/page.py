"""The report as one HTML file: data, styles and script inside, nothing fetched from anywhere.

Large arrays travel as one compressed block and are drawn from runs, so that a million tokens stay smooth. All text that comes from users is
escaped, in the markup and in the data.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan._cost.auto import Considered
from longspan._cost.report_data import PlanReport
from longspan._plan.digest import content
from longspan._plan.plan_data import PlanData

HERE = Path(__file__).parent
SHOWN = 64  # ranks in the timeline and in the matrix
TOTAL = 1 << 22  # entries of all steps at all ranks; beyond that the page does not tell steps
TYPES = {torch.int32: "i4", torch.float32: "f4"}


def save(numbers: PlanReport, considered: Considered | None, path: str | Path, *, title: str | None = None) -> None:
    """Write the page of a report, with the options that were considered, to a file."""
    Path(path).write_text(page(numbers, considered, title=title), encoding="utf-8")


def notebook(numbers: PlanReport, considered: Considered | None) -> str:
    """The page in an iframe of its own."""
    return f'<iframe style="width:100%;height:900px;border:0" srcdoc="{html.escape(page(numbers, considered), quote=True)}"></iframe>'


def page(numbers: PlanReport, considered: Considered | None, *, title: str | None = None) -> str:
    """The page of a report as HTML text. `considered`: the options of `auto`, None where there was nothing to choose from."""
    data, cluster = numbers.data, numbers.cluster
    arrays, block = _packed(_arrays(data, numbers))
    meta = {"arrays": arrays, **_meta(data, numbers)}
    heading = title or numbers.plan
    parts = {
        "title": html.escape(heading),
        "subtitle": html.escape(f"{cluster.name}: {cluster.about}"),
        "numbers": _rows(numbers),
        "options": _options(considered, numbers),
        "memory": _memory(numbers),
        "work": _work(numbers),
        "meta": json.dumps(meta, separators=(",", ":")).replace("<", "\\u003c"),
        "block": block,
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    text = (HERE / "page.html").read_text(encoding="utf-8")
    pieces = text.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:  # one pass: what is put in is not looked at again
        name, rest = piece.split("}}", 1)
        out += [parts[name], rest]
    return "".join(out)


# ------------------------------------------------------------------------------------------------------------------------ tables


def figures(numbers: PlanReport) -> dict[str, tuple[str, float, str]]:
    """What the page says in numbers: name → (label, value, unit)."""
    moved = numbers.bytes_received.sum(0).double()
    t = numbers.timeline
    return {
        "seconds": ("predicted, forward and backward", 1e3 * numbers.seconds, "ms"),
        "forward": ("… forward", 1e3 * t.forward.seconds, "ms"),
        "backward": ("… backward", 1e3 * t.backward.seconds, "ms"),
        "exposed": ("waiting for data, at most", 1e3 * numbers.exposed, "ms"),
        "flops": ("useful work per device", numbers.flops_per_device / 1e12, "TFLOP/s"),
        "balance": ("busiest rank over the mean", numbers.balance, "×"),
        "tokens": ("tokens per rank, at most", max(numbers.tokens), ""),
        "received": ("received per rank, forward, mean", float(moved.mean()) / 2**20, "MiB"),
        "most": ("… at most", float(moved.max()) / 2**20, "MiB"),
        "share": ("keys received, as a share of an all-gather", 100 * numbers.share, "%"),
        "stages": ("stages", len(numbers.received), ""),
        "steps": ("… computed in steps", numbers.steps, ""),
        "in_flight": ("tokens of keys in flight, at most", numbers.in_flight, ""),
        "memory": ("memory per rank, at most", sum(numbers.memory_parts.values()) / 2**20, "MiB"),
    }


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _rows(numbers: PlanReport) -> str:
    out = []
    for name, (label, value, unit) in figures(numbers).items():
        shown = f"{_number(value)} {unit}".strip()
        out.append(f'<tr><th scope="row">{html.escape(label)}</th><td data-name="{name}" data-value="{value!r}">{shown}</td></tr>')
    return "\n".join(out)


def _options(found: Considered | None, numbers: PlanReport) -> str:
    if found is None:
        return "<p>There was nothing to choose from.</p>"
    best = min(found.winner.seconds, numbers.seconds)
    lines = [
        '<table><thead><tr><th scope="col">option</th><th scope="col">ms</th><th scope="col">slower</th><th scope="col">computing, ms</th>'
        '<th scope="col">busiest</th><th scope="col">received</th></tr></thead><tbody>'
    ]
    here = f"this plan: {numbers.strategy}, {numbers.layout}"
    own = (
        here,
        numbers.seconds,
        float((numbers.timeline.forward.busy + numbers.timeline.backward.busy).max()),
        numbers.balance,
        numbers.share,
    )
    rows = [own, *((o.name + ("" if o.exact else " ~"), o.seconds, o.computing, o.imbalance, o.received) for o in found.options[:15])]
    for i, (name, seconds, computing, imbalance, received) in enumerate(rows):
        lines.append(
            f'<tr{" class=own" if not i else ""}><th scope="row">{html.escape(name)}</th><td>{1e3 * seconds:.3f}</td>'
            f"<td>{100 * (seconds / best - 1):+.1f} %</td><td>{1e3 * computing:.3f}</td><td>{imbalance:.3f}</td>"
            f"<td>{100 * received:.1f} %</td></tr>"
        )
    for name, reason in found.refused:
        lines.append(f'<tr><th scope="row">{html.escape(name)}</th><td colspan="5">cannot be: {html.escape(reason)}</td></tr>')
    note = "~ estimated from owners alone; the others are planned and timed exactly. What is not balanced comes last."
    return "".join(lines) + f"</tbody></table><p>{note}</p>"


def _memory(numbers: PlanReport) -> str:
    whole = sum(numbers.memory_parts.values()) or 1
    lines = []
    for name, size in numbers.memory_parts.items():
        width = 100 * size / whole
        lines.append(
            f'<tr><th scope="row">{html.escape(name)}</th><td>{size / 2**20:,.1f} MiB</td>'
            f'<td class="bar"><span style="width:{width:.1f}%"></span></td></tr>'
        )
    return "".join(lines)


def _work(numbers: PlanReport) -> str:
    t, ranks = numbers.timeline, len(numbers.tiles)
    moved = numbers.bytes_received.sum(0)
    lines = []
    for r in range(min(ranks, 1024)):
        busy = 1e3 * float(t.forward.busy[r] + t.backward.busy[r])
        waits = 1e3 * float(t.forward.exposed[r] + t.backward.exposed[r])
        lines.append(
            f'<tr><th scope="row">{r}</th><td>{float(numbers.pairs[r]):,.0f}</td>'
            f"<td>{int(numbers.tiles[r]):,}</td><td>{float(moved[r]) / 2**20:,.1f}</td>"
            f"<td>{busy:,.3f}</td><td>{waits:,.3f}</td></tr>"
        )
    return "".join(lines)


# -------------------------------------------------------------------------------------------------------------------------- data


def _meta(data: PlanData, numbers: PlanReport) -> dict[str, Any]:
    return {
        "q_len": data.q_len,
        "kv_len": data.kv_len,
        "ranks": len(numbers.tiles),
        "degree": data.degree,
        "group": data.ring_of.tolist(),
        "stages": len(numbers.received),
        "steps": numbers.work.steps,
        "late": numbers.work.halves is not None,  # the last step is over local keys, their second part, backward only
        "joined": numbers.work.joined,
        "shown": _shown(numbers),
        "forward": numbers.timeline.forward.seconds,
        "backward": numbers.timeline.backward.seconds,
        "balance": numbers.balance,
    }


def _shown(numbers: PlanReport) -> list[int]:
    ranks = len(numbers.tiles)
    if ranks <= SHOWN:
        return list(range(ranks))
    busiest = {int(numbers.timeline.backward.total.argmax()), int(numbers.pairs.argmax())}
    return sorted({round(i * (ranks - 1) / (SHOWN - 1)) for i in range(SHOWN)} | busiest)


def _arrays(data: PlanData, numbers: PlanReport) -> dict[str, Tensor]:
    table, queries, keys = data.tiles[0].table, data.tiles[0].queries, data.tiles[0].kv
    rows = table.q_tiles
    runs = slice(0, int(table.ptr[rows]))
    found = {
        "ptr": table.ptr[: rows + 1],
        "first": table.first[runs],
        "last": table.last[runs],
        "kind": table.kind[runs],
        "q_owner": queries.owner,
        "k_owner": keys.owner,
        "q_edges": queries.edges,
        "k_edges": keys.edges,
        "pairs": numbers.pairs,
        "tiles": numbers.tiles.float(),
        **_steps(data, keys.tiles),
    }
    shown = torch.tensor(_shown(numbers))
    for name, one in (("forward", numbers.timeline.forward), ("backward", numbers.timeline.backward)):
        lanes = {"compute": one.compute, "travel": one.travel, "home": one.home or (one.compute[0] * 0, one.compute[0] * 0)}
        for lane, (begin, end) in lanes.items():
            found[f"{name}_{lane}"] = torch.stack([begin[shown], end[shown]])
        found[f"{name}_turns"] = torch.stack([one.before[shown], one.after[shown], one.total[shown]])
    found["matrix"] = numbers.matrix[shown][:, shown].float()  # beyond 2 GiB too
    return found


def _steps(data: PlanData, tiles: int) -> dict[str, Tensor]:
    """In which step tiles arrive at ranks, as runs: for rank r, entries step_ptr[r] … : tiles before step_end come in step_value."""
    s = data.schedule
    here = (s.row == 0).nonzero()[:, 0]
    if not len(here) or len(here) > TOTAL:
        empty = torch.zeros(1, dtype=torch.int32)
        return {
            "step_ptr": torch.zeros(data.inner[0].ranks + 1, dtype=torch.int32),
            "step_first": empty,
            "step_end": empty,
            "step_value": empty,
        }
    first, end = data.tiles[0].kv.within(s.start[here], s.length[here])
    order = (s.receiver[here] * (tiles + 1) + first).argsort()
    count = torch.bincount(s.receiver[here], minlength=data.inner[0].ranks)
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    step = torch.zeros(s.stages + 1, dtype=torch.int64)
    for i, group in enumerate(s.steps):
        step[group.start : group.stop] = i + 1
    return {"step_ptr": ptr, "step_first": first[order], "step_end": end[order], "step_value": step[s.stage[here][order]]}


def _packed(arrays: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
    index, parts, offset = {}, [], 0
    for name, tensor in arrays.items():
        flat = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int32).contiguous()
        index[name] = {"at": offset, "shape": list(flat.shape), "type": TYPES[flat.dtype]}
        parts.append(content(flat))
        offset += 4 * flat.numel()
    return index, base64.b64encode(zlib.compress(b"".join(parts), 6)).decode()
