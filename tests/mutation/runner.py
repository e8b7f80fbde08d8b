"""Runs tests against mutants: which tests reach which mutants, then, for each mutant, those tests, the fastest first, until one fails.

A server process imports longspan with all mutants in it (`tests.mutation.schemata`) and collects the tests once. It forks a process for
each test file, to record, and for each mutant, to judge. Mutants that run at import get a process that imports longspan anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.make import ROOT, Mutant
from tests.mutation.schemata import PROBE, instrument

FIRST_FILE = 1_000_000  # numbers of files
HARNESS_FAILED = 70  # exit code
LATE = ("processes", "elastic", "two_hosts", "faults", "examples", "browser")  # files whose tests start processes
FUZZED = ("_comm", "_dropin", "_engine", "_kernels", "_masks", "_plan", "_planner")  # packages whose mutants change results of calls


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds: to record all tests, one test file; for the tests of one mutant; of random cases for a survivor; for everything."""

    record: float
    file: float
    mutant: float
    fuzz: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Copy:
    """An instrumented copy of the repository. `mutants` by number; `at_import`: see `Instrumented`; `file_numbers` by file."""

    folder: Path
    mutants: dict[int, Mutant]
    at_import: set[int]
    without: set[int]
    file_numbers: dict[str, int]

    @classmethod
    def make(cls, folder: Path, mutants: dict[int, Mutant]) -> Copy:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", ".*_cache", ".carry"))
        shutil.copy(Path(__file__).with_name("probe.py"), folder / "src" / f"{PROBE}.py")
        files = {file: FIRST_FILE + i for i, file in enumerate(sorted({m.file for m in mutants.values()}))}
        at_import, without = set(), set()
        for file, number in files.items():
            made = instrument((ROOT / file).read_text(), {k: m for k, m in mutants.items() if m.file == file}, number)
            (folder / file).write_text(made.text)
            at_import |= made.at_import
            without |= made.without
        return cls(folder=folder, mutants=mutants, at_import=at_import, without=without, file_numbers=files)


@dataclass
class Recording:
    """Seconds of each test that passes without a mutant, and the tests that reach each mutant or file."""

    seconds: dict[str, float] = field(default_factory=dict)
    reached: dict[int, set[str]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def add(self, results: Path, log: Path) -> None:
        for line in results.read_text().splitlines() if results.exists() else ():
            one = json.loads(line)
            if one["passed"]:
                self.seconds[one["test"]] = one["seconds"]
            elif not one["skipped"]:
                self.failed.add(one["test"])
        for line in log.read_text().splitlines() if log.exists() else ():
            test, _, number = line.rpartition("\t")
            self.reached.setdefault(int(number), set()).add(test)
        results.unlink(missing_ok=True)
        log.unlink(missing_ok=True)

    def save(self, path: Path) -> None:
        reached = {number: sorted(tests) for number, tests in self.reached.items()}
        path.write_text(json.dumps({"seconds": self.seconds, "reached": reached, "failed": sorted(self.failed)}))

    @classmethod
    def load(cls, path: Path) -> Recording:
        saved = json.loads(path.read_text())
        reached = {int(number): set(tests) for number, tests in saved["reached"].items()}
        return cls(seconds=saved["seconds"], reached=reached, failed=set(saved["failed"]))

    def tests(self, copy: Copy, number: int) -> list[str]:
        """Tests that reach a mutant, the fastest first."""
        key = copy.file_numbers[copy.mutants[number].file] if number in copy.at_import else number
        return sorted((t for t in self.reached.get(key, ()) if t in self.seconds), key=self.seconds.__getitem__)


def judge(
    copy: Copy, limits: Limits, report: Callable[[int, str, float], None], tests: list[str], *, saved: Path | None, judged: set[int]
) -> Recording:
    """Report a verdict for each mutant that is not `judged`: killed, survived, not reached, timeout. Returns the recording.

    saved: the recording of an earlier run with the same mutants, or where to write it. Without such a file, all tests run once.
    """
    begin, recorded = time.monotonic(), saved is not None and saved.exists()
    recording = Recording.load(saved) if saved is not None and recorded else Recording()

    def body(items: dict[str, Any]) -> None:
        if not recorded:
            _record(copy, items, limits, recording)
            if saved is not None:
                recording.save(saved)
        for number, mutant in copy.mutants.items():
            if number in judged:
                continue
            if time.monotonic() - begin > limits.total:
                return
            start = time.monotonic()
            verdict = _verdict(copy, number, items, recording, limits)
            if verdict.startswith(("survived", "not reached")) and limits.fuzz and mutant.package in FUZZED:
                verdict = "killed by random cases" if _fuzz(copy.folder, number, limits.fuzz) else verdict
            report(number, verdict, time.monotonic() - start)

    _with_items(copy.folder, body, tests)
    return recording


def _with_items(folder: Path, body: Callable[[dict[str, Any]], None], tests: list[str]) -> None:
    """Call body(test items by name) in this process, with the tests of the copy imported and collected."""
    import pytest

    class Plugin:
        def pytest_runtestloop(self, session: Any) -> bool:
            body({item.nodeid: item for item in session.items})
            return True

    os.chdir(folder)
    sys.path[:0] = [str(folder / "src"), str(folder)]
    os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder}"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-s", "--no-header", "--no-summary", "--continue-on-collection-errors"]
    code = pytest.main([*options, *tests], plugins=[Plugin()])
    if code not in (0, 1, 5):
        raise SystemExit(HARNESS_FAILED)


def _run(item: Any, after: Any) -> tuple[bool, bool]:
    """(passed, skipped) of one test."""
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, nextitem=after, log=False)
    return all(r.passed for r in reports), any(r.skipped for r in reports)


def _record(copy: Copy, items: dict[str, Any], limits: Limits, recording: Recording) -> None:
    files: dict[str, list[str]] = {}
    for name in items:
        files.setdefault(name.split("::")[0], []).append(name)
    end = time.monotonic() + limits.record
    results, log = copy.folder / "results.jsonl", copy.folder / "reached.txt"
    for file in _by_turns(list(files)):
        if time.monotonic() > end:
            print(f"not recorded: {file}", flush=True)
            continue
        _forked(lambda: _record_file(items, files[file], results, log), min(limits.file, end + 30 - time.monotonic()))  # noqa: B023
        recording.add(results, log)


def _by_turns(files: list[str]) -> list[str]:
    """Test files of all folders by turns, so that a short recording covers every package; files that start processes last."""
    nth = {file: sorted(f for f in files if Path(f).parent == Path(file).parent).index(file) for file in files}
    return sorted(files, key=lambda file: (any(word in file for word in LATE), nth[file], file))


def _record_file(items: dict[str, Any], names: list[str], results: Path, log: Path) -> int:
    import longspan_mutant_probe as probe  # type: ignore[import-not-found]

    probe._log = os.environ["LONGSPAN_MUTANT_LOG"] = str(log)
    with results.open("a") as out:
        for name, after in zip(names, [*names[1:], None]):
            probe.begin(name)
            start = time.monotonic()
            passed, skipped = _run(items[name], items.get(after or ""))
            print(
                json.dumps({"test": name, "seconds": time.monotonic() - start, "passed": passed, "skipped": skipped}), file=out, flush=True
            )
    return 0


def _verdict(copy: Copy, number: int, items: dict[str, Any], recording: Recording, limits: Limits) -> str:
    if number in copy.without:
        return "no program"
    tests, room, chosen = recording.tests(copy, number), limits.mutant, []
    while room > 0 and len(chosen) < len(tests):
        chosen.append(tests[len(chosen)])
        room -= recording.seconds[chosen[-1]]
    if not tests:
        return "not reached"
    seconds = sum(recording.seconds[t] for t in chosen)
    chosen = [t for t in chosen if t in items]
    if number in copy.at_import:
        code = subprocess_code(copy.folder, number, chosen[:200], 4 * seconds + 120)
    else:
        code = _forked(lambda: _first_failure(items, chosen, number), 4 * seconds + 30)
    if code == HARNESS_FAILED:
        return "no verdict"
    if code < 0:
        return "timeout"
    return "killed" if code else f"survived {len(chosen)} of {len(tests)} tests"


def _first_failure(items: dict[str, Any], tests: list[str], number: int) -> int:
    import longspan_mutant_probe as probe

    probe.active = number
    os.environ["LONGSPAN_MUTANT"] = str(number)
    for name, after in zip(tests, [*tests[1:], None]):
        passed, skipped = _run(items[name], items.get(after or ""))
        if not passed and not skipped:
            return 1
    return 0


def subprocess_code(folder: Path, number: int, tests: list[str], limit: float) -> int:
    """The exit code of tests in a new Python process with an active mutant; −1 after the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
    code = _limited(command, folder, number, limit)
    return code if code < 0 else int(code in (1, 2, 3, 4))


def _fuzz(folder: Path, number: int, seconds: float) -> bool:
    """Whether the corpus or random cases fail with an active mutant."""
    command = [sys.executable, "-m", "tests.fuzz", "--keep"]
    corpus = sorted(str(p) for p in (folder / "tests/fuzz/corpus").glob("*.json"))
    runs = [[*command, "--replay", *corpus], [*command, "--stop", "--tile", "16", "--seconds", str(seconds)]]
    return any(_limited(run, folder, number, 4 * seconds + 120) > 0 for run in runs)


def _limited(command: list[str], folder: Path, number: int, limit: float) -> int:
    """The exit code of a command with an active mutant; −1 after the limit."""
    environment = os.environ | {"LONGSPAN_MUTANT": str(number)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(limit)
        return code if code >= 0 else 1
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _forked(run: Callable[[], int], limit: float) -> int:
    """run() in a forked process, its exit code; −1 after the limit. Ends all processes that it left behind."""
    pid = os.fork()
    if pid == 0:
        code = HARNESS_FAILED
        with contextlib.suppress(BaseException):
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            code = run()
        os._exit(code)
    end, code = time.monotonic() + limit, -1
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 1
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if code < 0:
        os.waitpid(pid, 0)
    return code


def packages(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    """Counts of verdicts by package, a line each."""
    names = sorted({v["package"] for v in verdicts})
    for name in [*names, "all"]:
        counts: dict[str, int] = {}
        for v in verdicts:
            if name in (v["package"], "all"):
                short = v["verdict"].split()[0]
                counts[short] = counts.get(short, 0) + 1
        yield f"{name:15s} " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
