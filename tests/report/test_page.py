"""The report page: self-contained, with the report's numbers, and safe for any user text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.pages import page_of

import longspan as ls
from longspan._report.page import notebook
from longspan._report.page_tables import headline_numbers

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def evil_mask() -> ls.Mask:
    """A mask whose name is markup."""

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < 1000)

    mod.__name__ = mod.__qualname__ = EVIL
    return ls.mask_mod(mod)


@pytest.fixture(scope="module")
def plan() -> ls.Plan:
    mask = ls.causal() & ls.documents(lengths=[1500, 2500, 96])
    return ls.plan(mask, 4096, ls.Mesh.abstract(4), layout="head_tail", strategy="exchange", heads=8, kv_heads=2, head_dim=64)


def test_the_page_requests_nothing_from_the_network(plan: ls.Plan, tmp_path: Path) -> None:
    plan.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "{{" not in text.split('id="meta"')[0]
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", text)


def test_every_headline_number_is_the_reports(plan: ls.Plan) -> None:
    text, report = page_of(plan), plan.report()
    values = {name: float(v) for name, v in re.findall(r'data-name="(\w+)" data-value="([^"]+)"', text)}
    assert values == {name: float(v) for name, (_, v, _) in headline_numbers(report).items()}
    received = report.bytes_received.sum(0).double() / 2**20
    want = {
        "seconds": 1e3 * report.seconds,
        "forward": 1e3 * report.timeline.forward.seconds,
        "backward": 1e3 * report.timeline.backward.seconds,
        "exposed": 1e3 * report.exposed,
        "flops": report.flops_per_device / 1e12,
        "balance": report.balance,
        "tokens": 1024,
        "received": float(received.mean()),
        "received_max": float(received.max()),
        "share": 100 * report.share,
        "stages": len(report.received),
        "steps": report.steps,
        "in_flight": report.in_flight,
        "memory": sum(report.memory_parts.values()) / 2**20,
    }
    assert values == pytest.approx(want, rel=1e-12)


def test_the_work_table_has_each_ranks_pairs_tiles_bytes_and_times(plan: ls.Plan) -> None:
    report, text = plan.report(), page_of(plan)
    table = text.split('<th scope="col">waiting, ms</th>')[1].split("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
    passes = (report.timeline.forward, report.timeline.backward)
    busy, exposed = sum(p.busy for p in passes), sum(p.exposed for p in passes)
    for rank, row in enumerate(rows[-4:]):
        mib = float(report.bytes_received.sum(0)[rank]) / 2**20
        assert row == [
            str(rank), f"{float(report.pairs[rank]):,.0f}", f"{int(report.tiles[rank]):,}", f"{mib:,.1f}",
            f"{1e3 * float(busy[rank]):,.3f}", f"{1e3 * float(exposed[rank]):,.3f}",
        ]  # fmt: skip


def test_memory_bars_are_shares_of_the_total(plan: ls.Plan) -> None:
    parts, text = plan.report().memory_parts, page_of(plan)
    widths = [float(w) for w in re.findall(r'class="bar"><span style="width:([\d.]+)%"', text)]
    assert widths == [float(f"{100 * size / sum(parts.values()):.1f}") for size in parts.values()]
    assert all(f"<td>{size / 2**20:,.1f} MiB</td>" in text for size in parts.values())


def test_the_option_table_compares_with_the_fastest(plan: ls.Plan) -> None:
    text, considered, report = page_of(plan), plan.considered(), plan.report()
    assert considered is not None
    best = min(considered.winner.seconds, report.seconds)
    rows = re.findall(r'<tr[^>]*><th scope="row">([^<]*)</th><td>([\d.]+)</td><td>([-+][\d.]+) %</td><td>([\d.]+)</td>', text)
    assert [row[0].removesuffix(" ~") for row in rows[1:]] == [o.name for o in considered.options[:15]]
    timeline = report.timeline
    this_plan = report.seconds, float((timeline.forward.busy + timeline.backward.busy).max())
    for (_, ms, slower, compute), (seconds, busy) in zip(rows, [this_plan, *((o.seconds, o.computing) for o in considered.options)]):
        assert (ms, slower, compute) == (f"{1e3 * seconds:.3f}", f"{100 * (seconds / best - 1):+.1f}", f"{1e3 * busy:.3f}")


def test_user_text_is_escaped_wherever_it_appears() -> None:
    plan = ls.plan(evil_mask(), 2048, ls.Mesh.abstract(2), heads=4)
    for text in (page_of(plan), page_of(plan, title=EVIL)):
        assert "document.title=" in text and "<script>document" not in text and "<img" not in text
    frame = notebook(plan.report(), plan.considered())
    assert frame.startswith("<iframe") and frame.count("<") == 2 and html.unescape(frame).count("<html") == 1


def test_the_page_lists_impossible_options_with_the_reason(plan: ls.Plan) -> None:
    odd = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(4), heads=6)
    assert "not possible: 6 query heads" in page_of(odd) and "this plan: exchange, head_tail" in page_of(plan)
    assert "nothing to choose from" in page_of(ls.plan(ls.full(), (256, 512), ls.Mesh.abstract(2)))


@pytest.mark.parametrize("mesh", [1, (2, 3)])
def test_one_rank_and_two_axes_have_pages(mesh: Any) -> None:
    names = ("ulysses", "ring") if isinstance(mesh, tuple) else None
    assert "data-value" in page_of(ls.plan(ls.causal(), 1000, ls.Mesh.abstract(mesh, axis_names=names), heads=6, kv_heads=2))
