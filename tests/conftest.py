"""Command line options, the order of tests, and settings made before test modules are imported."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import NO_BROWSER

HERE = Path(__file__).parent
# `make test-gpu` installs nothing: without hypothesis, the test files that need it are skipped.
collect_ignore = [] if find_spec("hypothesis") else [str(p) for p in HERE.rglob("test_*.py") if "from hypothesis import" in p.read_text()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-grid", action="store_true", help="run all cases of large grids instead of a covering sample")
    parser.addoption("--part", metavar="I/N", help="run every N-th selected test, starting with the I-th")


def pytest_configure(config: pytest.Config) -> None:
    """Settings of a process that runs tests. The one that starts workers imports no torch, which takes 3 s before the workers start.

    Hypothesis draws the same examples in every run, new ones with --whole-grid.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        prepare()
    if find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("longspan", deadline=None, derandomize=not config.getoption("--whole-grid"))
        settings.load_profile("longspan")


def prepare() -> None:
    """Without a GPU, Triton kernels run in the interpreter. The fork server, from which ranks start, imports what many ranks need."""
    import torch

    from longspan.testing import processes

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compile processes would import torch for a few small kernels
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from tests.interpreter import speed_up

        speed_up()
    if find_spec("transformers"):
        models = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss")
        processes.PRELOADED += ("longspan.integrations.trainer", *(f"transformers.models.{m}.modeling_{m}" for m in models))


def in_order(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Tests by worker: pytest-xdist gives each worker a contiguous range, and one that is done takes tests from the end of another's.

    Tests marked `processes` are the first worker's: only its fork server starts, and while they wait, the other workers have all cores.
    Tests marked `long` come first in the shares of the other workers: a worker that started one last would leave the others idle.
    """
    processes = [item for item in items if item.get_closest_marker("processes")]
    long = [item for item in items if item.get_closest_marker("long") and item not in set(processes)]
    first = set(processes + long)
    rest = [item for item in items if item not in first]
    heads = [processes, *(long[worker :: workers - 1] for worker in range(workers - 1))] if workers > 1 else [processes + long]
    ordered: list[pytest.Item] = []
    for worker, head in enumerate(heads):
        size = (len(items) - len(ordered)) // (workers - worker) - len(head)
        ordered += head + rest[: max(size, 0)]
        rest = rest[max(size, 0) :]
    return ordered


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole-grid"):
        repetitions = [item for item in items if item.get_closest_marker("repetition")]
        items[:] = [item for item in items if item not in set(repetitions)]
        config.hook.pytest_deselected(items=repetitions)
    if hasattr(config, "workerinput"):
        items[:] = in_order(items, config.workerinput["workercount"])
    part = config.getoption("--part")
    if part:
        first, step = map(int, part.split("/"))
        items[:] = items[first - 1 :: step]
    import torch

    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run `make test-gpu` on a machine that has one"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Return memory of the GPU that a test has freed: `make test-gpu` runs many processes on one."""
    if "gpu" in item.keywords:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt all that exists by now from garbage collection: a million objects, which tests of lifetimes would traverse again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List skipped browser tests in a section of their own: they are the only tests of the report page's script."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.section("BROWSER TESTS DID NOT RUN", sep="!", red=True, bold=True)
        terminalreporter.line(f"{len(skipped)} tests of the report page were skipped: {NO_BROWSER}.", red=True)
        terminalreporter.line("Install one (Debian: apt-get install chromium) and run: pytest tests/report/test_browser.py", red=True)
