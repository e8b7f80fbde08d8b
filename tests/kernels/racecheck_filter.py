"""Filter for racecheck's reports of the Hopper kernels: `compute-sanitizer --tool racecheck … | python tests/kernels/racecheck_filter.py`.

Two kinds of reports are known false positives, explained in `hopper_sanitizer_cases.py`: work records that one warp writes and others read,
and the arguments that Triton's `warp_specialize` passes to its partitions. Any other report, or a truncated list, exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "longspan" / "_kernels" / "hopper"
TOLD = ("write_number", "read_number")
_REPORT = re.compile(r"Race reported between .* in (\S+):(\d+)")
_OTHER = re.compile(r"\band (?:Read|Write) access at .* in (\S+):(\d+)")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def places(source: Path = SOURCE) -> dict[str, set[tuple[str, int]]]:
    """Lines of each known kind: of the functions that tell numbers; of every kernel that starts partitions, of its name, of the statement
    that starts them and of the branch that this stands in, to which the compiler ascribes what it adds.
    """
    found: dict[str, set[tuple[str, int]]] = {"numbers that a warp tells others": set(), "what warp_specialize hands over": set()}
    told, handed = found.values()
    for file in sorted(source.glob("*.py")):
        for function in (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)):
            if function.name in TOLD:
                told |= _lines(file, function)
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == "warp_specialize"]
            branches = [node for node in ast.walk(function) if isinstance(node, ast.If) and any(c in ast.walk(node) for c in calls)]
            handed |= {(file.name, node.lineno) for node in (function, *branches) if calls}
            for call in calls:
                handed |= _lines(file, call)
    return found


def _lines(file: Path, node: ast.FunctionDef | ast.Call) -> set[tuple[str, int]]:
    return {(file.name, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _name(of: ast.expr) -> str:
    return of.attr if isinstance(of, ast.Attribute) else ""


def sort(lines: Iterable[str], known: dict[str, set[tuple[str, int]]]) -> tuple[Counter[str], list[str]]:
    """(how many reports of each known kind, what is wrong): reports that name a place that is of no kind or of another than their first
    one's, and a list that is not whole.
    """
    reports: list[tuple[str, list[tuple[str, int]]]] = []
    summary = None
    for line in lines:
        if first := _REPORT.search(line):
            reports.append((line.strip(), [(first[1], int(first[2]))]))
        elif (more := _OTHER.search(line)) and reports:
            reports[-1][1].append((more[1], int(more[2])))
        summary = _SUMMARY.search(line) or summary
    counts: Counter[str] = Counter()
    wrong = []
    for text, at in reports:
        kind = next((name for name, of in known.items() if set(at) <= of), None)
        if kind is None:
            wrong.append(f"{text}: {', '.join(f'{name}:{number}' for name, number in at)}")
        else:
            counts[kind] += 1
    if summary is None:
        wrong.append("no summary: racecheck did not come to its end")
    elif int(summary[1]) != int(summary[2]) + int(summary[3]) or int(summary[1]) != len(reports):
        wrong.append(f"{summary[0]}, and {len(reports)} read here: expected all of them; raise --print-limit")
    return counts, wrong


def main() -> None:
    counts, wrong = sort(sys.stdin, places())
    for name, count in counts.items():
        print(f"{count} known reports: {name}")
    for text in wrong:
        print(f"unknown: {text}")
    print("nothing else" if not wrong else f"{len(wrong)} to look at")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
