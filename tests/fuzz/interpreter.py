"""Triton's interpreter for the fuzzer: faster, and one launch at a time."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def prepare() -> None:
    """Patch the interpreter for the life of the process."""
    if find_spec("triton"):
        from tests.interpreter import run_triton_in_one_thread, speed_up

        speed_up()
        run_triton_in_one_thread(pytest.MonkeyPatch())
