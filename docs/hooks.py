"""MkDocs hooks: tables of the benchmark page from the JSON that bench/results holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "bench" / "results"
_MARK = re.compile(r"<!-- bench:(\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- bench:NAME -->` by the table of bench/results/NAME.txt."""
    return _MARK.sub(lambda match: TABLES[match[1]](load(match[1])), markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the plots of bench/results to the site."""
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"bench/{picture.name}", abs_src_path=str(picture)))
    return files


def load(name: str) -> dict[str, Any]:
    """The last line of a result file, which is one JSON object."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.txt").read_text(encoding="utf-8").strip().splitlines()[-1])
    return data


def peers_table(data: dict[str, Any]) -> str:
    """TFLOP/s forward / backward of every peer, device time, and longspan over the best peer."""
    names = list(data["versions"])
    lines = [_about(data), "", "| row | " + " | ".join(names) + " | ratio, device | ratio, as called |"]
    lines.append("|---|" + "---:|" * (len(names) + 2))
    for row in data["rows"]:
        speeds = [_pair(row, name) for name in names]
        ratios = [" / ".join(_ratio(row, step, column) for step in ("forward", "backward")) for column in ("device", "called")]
        lines.append(f"| {row['row']} | " + " | ".join([*speeds, *ratios]) + " |")
    return "\n".join(lines)


def _about(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"{data['device']}, torch {data['torch']}, triton {data['triton']}, {data['date']}; {versions}."


def _pair(row: dict[str, Any], name: str) -> str:
    speeds = [row[f"{step}_device"].get(name) for step in ("forward", "backward")]
    return "–" if None in speeds else " / ".join(f"{speed:.0f}" for speed in speeds)


def _ratio(row: dict[str, Any], step: str, column: str) -> str:
    speeds = dict(row[f"{step}_{column}"])
    ours = speeds.pop("longspan")
    return f"{ours / max(speeds.values()):.2f}" if speeds else "–"


TABLES = {"peers": peers_table}
