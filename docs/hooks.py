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


def long_step_table(data: dict[str, Any]) -> str:
    """Seconds of the parts of whole training steps."""
    rows = data["rows"]
    lines = [f"{data['device']}, torch {data['torch']}, {data['date']}.", "", "| seconds | " + " | ".join(_tokens(r) for r in rows) + " |"]
    lines.append("|---|" + "---:|" * len(rows))
    for part in rows[0]["parts"]:
        lines.append(f"| {part} | " + " | ".join(f"{row['parts'][part]:.2f}" for row in rows) + " |")
    lines.append("| step | " + " | ".join(f"{row['seconds']:.2f}" for row in rows) + " |")
    for name in ("forward", "backward"):
        lines.append(f"| attention {name}, TFLOP/s | " + " | ".join(f"{row['attention_tflops'][name]:.0f}" for row in rows) + " |")
    lines.append("| peak GPU memory, GiB | " + " | ".join(f"{row['peak_gib']:.1f}" for row in rows) + " |")
    return "\n".join(lines)


def loss_table(data: dict[str, Any]) -> str:
    """Milliseconds and memory of the tiled loss and of Liger's."""
    lines = [f"{data['device']}, torch {data['torch']}, liger-kernel {data['liger']}, chunk {data['chunk']}, {data['date']}.", ""]
    lines += [
        "| sizes | tokens | tiled | liger | tiled / liger | `auto` takes | peak GiB tiled / liger |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for row in data["rows"]:
        ms, peak = row["ms"], row["peak_gib"]
        cells = [f"{ms['tiled']:.0f}", f"{ms['liger']:.0f}", f"{ms['tiled'] / ms['liger']:.2f}", row["auto"]]
        lines.append(f"| {row['sizes']} | {row['tokens']:,} | " + " | ".join(cells) + f" | {peak['tiled']:.1f} / {peak['liger']:.1f} |")
    return "\n".join(lines)


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['tokens']:,} tokens"


TABLES = {"peers": peers_table, "long_step_gpu": long_step_table, "loss_gpu": loss_table}
