"""Filter for racecheck's reports of the Hopper kernels: `compute-sanitizer --tool racecheck … | python tests/kernels/racecheck_filter.py`.

Known false positives, explained in `hopper_sanitizer_cases.py`: values of a few bytes that warps pass to each other in shared memory (work
records, votes, lse of earlier states), and the arguments that Triton's `warp_specialize` passes to its partitions. Any other report, one
without a line of the source, or a truncated list, exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "longspan" / "_kernels" / "hopper"
VOTES = ("vote", "vote_alike")
MESSAGE_ACCESS = ("store_int", "load_int", *VOTES)
_STATE_LSE = "lse_s.index("
_REPORT = re.compile(r"Race reported between .* access at \S+(?: in (\S+):(\d+))?")
_OTHER = re.compile(r"\band (?:Read|Write) access at \S+(?: in (\S+):(\d+))?")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


Lines = set[tuple[str, int]]  # (file, line)


def known_lines(source: Path = SOURCE) -> dict[str, tuple[Lines, Lines]]:
    """The lines to which racecheck ascribes each known kind of report: of the access that it names first, and of the others.

    Messages: the bodies of the functions in MESSAGE_ACCESS. lse of earlier states: their stores and loads. Arguments of partitions: of each
    kernel that calls `warp_specialize`, the line of its name, of the call and of the branch around it, to which the compiler ascribes the
    code that it adds. Votes: a read of votes that the compiler has merged from several branches is ascribed to the line of the kernel's
    name; nothing else is at the addresses that votes are written to.
    """
    messages: Lines = set()
    states: Lines = set()
    arguments: Lines = set()
    votes: Lines = set()
    names: Lines = set()
    for file in sorted(source.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        states |= {(file.name, i) for i, line in enumerate(text.splitlines(), 1) if _STATE_LSE in line}
        if not any(name in text for name in ("warp_specialize", *(f"def {access}(" for access in MESSAGE_ACCESS))):
            continue
        for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
            if function.name in MESSAGE_ACCESS:
                messages |= _lines(file, function)
                votes |= _lines(file, function) if function.name in VOTES else set()
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == "warp_specialize"]
            branches = [node for node in ast.walk(function) if isinstance(node, ast.If) and any(c in ast.walk(node) for c in calls)]
            arguments |= {(file.name, node.lineno) for node in (function, *branches) if calls}
            names |= {(file.name, function.lineno)} if calls else set()
            for call in calls:
                arguments |= _lines(file, call)
    return {
        "records and votes in shared memory": (messages, messages),
        "lse of earlier states": (states, states),
        "arguments of warp_specialize partitions": (arguments, arguments),
        "votes, read by merged code": (votes, messages | names),
    }


def _lines(file: Path, node: ast.FunctionDef | ast.Call) -> Lines:
    return {(file.name, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def classify_reports(lines: Iterable[str], known: dict[str, tuple[Lines, Lines]]) -> tuple[Counter[str], list[str]]:
    """(number of reports of each known kind, problems): a report with a line of no known kind, or of two kinds, and a truncated list."""
    reports: list[tuple[str, list[tuple[str, int]]]] = []
    summary = None
    for line in lines:
        if first := _REPORT.search(line):
            reports.append((line.strip(), [(first[1] or "no line", int(first[2] or 0))]))
        elif (more := _OTHER.search(line)) and reports:
            reports[-1][1].append((more[1] or "no line", int(more[2] or 0)))
        summary = _SUMMARY.search(line) or summary
    counts: Counter[str] = Counter()
    problems = []
    for text, accesses in reports:
        first, *others = accesses
        kind = next((name for name, (firsts, rest) in known.items() if first in firsts and rest.issuperset(others)), None)
        if kind is None:
            problems.append(f"{text}: {', '.join(f'{name}:{number}' for name, number in accesses)}")
        else:
            counts[kind] += 1
    if summary is None:
        problems.append("no summary: racecheck did not finish")
    elif int(summary[1]) != int(summary[2]) + int(summary[3]) or int(summary[1]) != len(reports):
        problems.append(f"{summary[0]}, and {len(reports)} read here: expected all of them; raise --print-limit")
    return counts, problems


def main() -> None:
    counts, problems = classify_reports(sys.stdin, known_lines())
    for name, count in counts.items():
        print(f"{count} known reports: {name}")
    for text in problems:
        print(f"unknown: {text}")
    print("no other reports" if not problems else f"{len(problems)} unknown reports")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
