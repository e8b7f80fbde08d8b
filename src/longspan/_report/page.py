"""A report as one HTML file with data, styles and script inside; it fetches nothing.

User text (names of masks, titles) is escaped in the markup and in the data.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path

from longspan._cost.options import Considered
from longspan._cost.report_data import PlanReport
from longspan._report import page_tables
from longspan._report.page_data import metadata, pack, page_arrays

FOLDER = Path(__file__).parent


Numbers = Mapping[str, tuple[str, float, str]]  # label, value and unit by name


def save(
    report: PlanReport, considered: Considered | None, path: str | Path, *, title: str | None = None, numbers: Numbers | None = None
) -> None:
    """Write the page to a file. `considered`: the options of `auto`, or None. `numbers`: shown before the report's."""
    Path(path).write_text(page(report, considered, title=title, numbers=numbers), encoding="utf-8")


def notebook(report: PlanReport, considered: Considered | None) -> str:
    """The page inside an iframe, for notebooks."""
    return f'<iframe style="width:100%;height:900px;border:0" srcdoc="{html.escape(page(report, considered), quote=True)}"></iframe>'


def page(report: PlanReport, considered: Considered | None, *, title: str | None = None, numbers: Numbers | None = None) -> str:
    """The page as HTML text. `considered`: the options of `auto`, or None if there was nothing to choose from."""
    index, block = pack(page_arrays(report))
    fields = {
        "title": html.escape(title or report.plan),
        "subtitle": html.escape(f"{report.cluster.name}: {report.cluster.about}"),
        "numbers": page_tables.numbers({**(numbers or {}), **page_tables.headline_numbers(report)}),
        "options": page_tables.options(report, considered),
        "memory": page_tables.memory(report),
        "work": page_tables.work(report),
        "meta": json.dumps({"arrays": index, **metadata(report)}, separators=(",", ":")).replace("<", "\\u003c"),
        "block": block,
        "style": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": (FOLDER / "page.js").read_text(encoding="utf-8"),
    }
    return _fill((FOLDER / "page.html").read_text(encoding="utf-8"), fields)


def _fill(template: str, fields: dict[str, str]) -> str:
    """Replace {{name}} in a template. One pass: a {{name}} inside a field's text is left alone."""
    first, *rest = template.split("{{")
    out = [first]
    for piece in rest:
        name, text = piece.split("}}", 1)
        out += [fields[name], text]
    return "".join(out)
