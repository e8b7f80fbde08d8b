"""Programs that contain all of their mutants: each behaves as the changed file when it is active, and as the file when none is."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.mutation.make import Mutant
from tests.mutation.schemata import PROBE, instrument

TEXT = '''"""A docstring."""
from __future__ import annotations

LIMIT = 3 + 1


def value(x: int, y: int = 2) -> tuple[object, ...]:
    """Another."""
    total = (x + y) * 2 if x < LIMIT and y > 0 else max(x, y)
    return total, [0, 1, 2, 3][1:3], f"{x + 1:>4}", {**{"a": x}}
'''
CALLS = ((0, 2), (3, 2), (4, 2), (4, 5), (4, -5))


def mutant(line: int, old: str, new: str) -> Mutant:
    start = TEXT.splitlines()[line - 1].index(old)
    return Mutant(file="value.py", line=line, start=start, stop=start + len(old), old=old, new=new, kind="given")


MUTANTS = {
    0: mutant(4, "3 + 1", "3 - 1"), 1: mutant(7, "2", "3"), 2: mutant(9, "x + y", "x - y"), 3: mutant(9, "<", "<="),
    4: mutant(9, "and", "or"), 5: mutant(9, "max", "min"), 6: mutant(10, "1:", "2:"), 7: mutant(10, "+ 1", "+ 2"),
    8: mutant(9, "(x + y) * 2", "(x + y) + 2"), 9: mutant(10, "[0, 1", "[0 1"),
}  # fmt: skip


def results(text: str, active: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """value(…) of all calls, and the file's constant."""
    probe: Any = ModuleType(PROBE)
    probe.on = lambda number: number == active
    monkeypatch.setitem(sys.modules, PROBE, probe)
    names: dict[str, Any] = {}
    exec(compile(text, "value.py", "exec"), names)
    file = SimpleNamespace(**names)
    return [file.LIMIT, file.value(0), *(file.value(*call) for call in CALLS)]


def test_each_mutant_is_the_changed_file_when_it_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    made = instrument(TEXT, MUTANTS, 1_000_000)
    assert (made.at_import, made.without) == ({0, 1}, {9})
    plain = results(TEXT, -1, monkeypatch)
    assert results(made.text, -1, monkeypatch) == plain
    for number in MUTANTS.keys() - made.without:
        got = results(made.text, number, monkeypatch)
        assert got == results(MUTANTS[number].applied(TEXT), -1, monkeypatch) != plain, MUTANTS[number]
