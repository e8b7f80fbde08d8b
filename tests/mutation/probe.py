"""Which mutant is active, and which tests reach which mutants. The runner copies this file into the copy of src/ that it instruments.

LONGSPAN_MUTANT: the number of the active mutant. LONGSPAN_MUTANT_LOG: a file that gets a line "test\tnumber" for each mutant that a test
reaches, in all of its processes; LONGSPAN_MUTANT_TEST names the test.
"""

from __future__ import annotations

import os
import threading

import torch

active = int(os.environ.get("LONGSPAN_MUTANT", "-1"))
_log = os.environ.get("LONGSPAN_MUTANT_LOG")
_seen: set[int] = set()
_lock = threading.Lock()


def on(number: int) -> bool:
    """Whether this mutant is active."""
    if _log is not None and number not in _seen and not torch.compiler.is_compiling():
        _record(number)
    return number == active


def begin(test: str) -> None:
    """The next reached mutants are reached by this test."""
    os.environ["LONGSPAN_MUTANT_TEST"] = test
    _seen.clear()


def _record(number: int) -> None:
    assert _log is not None
    with _lock:
        _seen.add(number)
        file = os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{os.environ.get('LONGSPAN_MUTANT_TEST', '')}\t{number}\n".encode())
        os.close(file)
