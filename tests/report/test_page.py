"""The report page: complete in itself, right in its numbers, harmless whatever users call things."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.pages import page_of

import longspan as ls
from longspan._report import figure, trace
from longspan._report.page import figures, notebook

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def evil_mask() -> ls.Mask:
    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < 1000)

    mod.__name__ = mod.__qualname__ = EVIL
    return ls.mask_mod(mod)


@pytest.fixture(scope="module")
def plan() -> ls.Plan:
    mask = ls.causal() & ls.documents(lengths=[1500, 2500, 96])
    return ls.plan(mask, 4096, ls.Mesh.abstract(4), layout="head_tail", strategy="exchange", heads=8, kv_heads=2, head_dim=64)


def test_the_page_asks_nothing_of_any_network(plan: ls.Plan, tmp_path: Path) -> None:
    plan.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "{{" not in text.split('id="meta"')[0]
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", text)


def test_every_number_on_the_page_is_the_reports(plan: ls.Plan) -> None:
    text, report = page_of(plan), plan.report()
    values = dict(re.findall(r'data-name="(\w+)" data-value="([^"]+)"', text))
    assert {name: float(v) for name, v in values.items()} == {name: float(v) for name, (_, v, _) in figures(report).items()}
    assert float(values["balance"]) == report.balance and float(values["seconds"]) == 1e3 * report.seconds
    assert float(values["share"]) == 100 * report.share and int(values["stages"]) == len(report.received)


def test_what_users_name_is_text_wherever_it_appears() -> None:
    plan = ls.plan(evil_mask(), 2048, ls.Mesh.abstract(2), heads=4)
    for text in (page_of(plan), page_of(plan, title=EVIL)):
        assert "document.title=" in text and "<script>document" not in text and "<img" not in text
    frame = notebook(plan.report(), plan.considered())
    assert frame.startswith("<iframe") and frame.count("<") == 2 and html.unescape(frame).count("<html") == 1


def test_a_page_says_what_there_was_to_choose_and_what_could_not_be(plan: ls.Plan) -> None:
    odd = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(4), heads=6)
    assert "cannot be: 6 query heads" in page_of(odd) and "this plan: exchange, head_tail" in page_of(plan)
    assert "nothing to choose from" in page_of(ls.plan(ls.full(), (256, 512), ls.Mesh.abstract(2)))


@pytest.mark.parametrize("mesh", [1, (2, 3)])
def test_pages_of_one_rank_and_of_two_axes(mesh: Any) -> None:
    names = ("ulysses", "ring") if isinstance(mesh, tuple) else None
    assert "data-value" in page_of(ls.plan(ls.causal(), 1000, ls.Mesh.abstract(mesh, axis_names=names), heads=6, kv_heads=2))


def test_the_trace_holds_every_step_of_every_rank(plan: ls.Plan, tmp_path: Path) -> None:
    report = plan.report()
    trace.save(report, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    steps = int(((report.work.full + report.work.partial) > 0).sum())
    packed = [e for e in compute if "pack local keys" in e["name"]]
    assert len(packed) == 2 * 4 * report.work.joined
    assert len(compute) - len(packed) == 2 * steps and {e["pid"] for e in compute} == {0, 1, 2, 3}
    busy = sum(e["dur"] for e in compute if e["pid"] == 2)
    assert busy == pytest.approx(1e6 * float(report.timeline.forward.busy[2] + report.timeline.backward.busy[2]), rel=1e-3)


def test_plans_and_tables_draw_in_the_terminal(plan: ls.Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0] == repr(plan) and len(lines) == 25 and set("0123") <= set("".join(lines[1:]))
    assert lines[-1].strip()[-1] == "0"  # head-tail: the last queries are rank 0's
    assert "█" in str(ls.causal().block_table(4096))


def test_plot_draws_and_saves(plan: ls.Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = plan.plot(tmp_path / "plan.png")
    assert len(found.axes) == 3 and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_plot_says_what_to_install(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"longspan\[viz\]"):
        figure.figure(plan.report())
