"""Mutation testing: random one-line changes of src/, each of which some test should notice.

    python tests/mutants.py --sample 50 --seed 1            # a random sample of all packages
    python tests/mutants.py --changed                       # files that differ from the main branch
    python tests/mutants.py --only src/longspan/_masks      # files of a folder
    python tests/mutants.py --given mutants.json            # mutants made by hand: [{"file": …, "old": …, "new": …}, …]

Each mutant runs the tests that name its module, then those of the mirroring folder, then the fuzz corpus and random cases, and stops at
the first failure. Device code (functions compiled by Triton or Gluon) is left out, and so are messages, annotations and docstrings.
Mutants run in a copy of the repository. Not part of CI: a survivor costs minutes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "src/longspan"
# The test folders of a package, the nearest first.
FOLDERS = {
    "_balance": ["balance", "plan"], "_cache": ["cache", "engine"], "_comm": ["comm", "engine"], "_cost": ["cost", "plan"],
    "_dropin": ["dropin", "torch_compat"], "_engine": ["engine"], "_kernels": ["kernels", "engine"], "_masks": ["masks", "plan"],
    "_plan": ["plan", "engine"], "_planner": ["plan", "cost"], "_report": ["report"], "_training": ["integrations"], "cli": ["cli"],
    "integrations": ["integrations"], "testing": ["comm", "engine"], "torch_compat": ["torch_compat", "dropin"],
}  # fmt: skip
FUZZED = ("_comm", "_dropin", "_engine", "_kernels", "_masks", "_plan", "_planner")  # packages whose mutants change results of calls
DEVICE_CODE = ("_kernels/hopper/", "_kernels/triton/forward.py", "_kernels/triton/backward.py", "_kernels/gpu/row_sum_kernels.py")
COMPILED = ("triton.jit", "gluon.jit", "jit", "core.extern")
COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+", ast.BitAnd: "|", ast.BitOr: "&"}
CASTS = ("float", "double", "to", "contiguous", "clone", "detach", "long", "int", "bool", "abs", "expand", "flatten", "cpu")
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum", "amax": "amin", "amin": "amax"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one line: characters [start, stop) of `line` become `new`."""

    file: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    kind: str

    @property
    def package(self) -> str:
        parts = self.file.split("/")
        return parts[2] if len(parts) > 3 else "top level"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.old!r} → {self.new!r}"


# --------------------------------------------------------------------------------------------------------------- making mutants


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    text = path.read_text()
    return list(_Finder(str(path.relative_to(ROOT)), text).walk(ast.parse(text)))


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.lines = file, text.splitlines()

    def walk(self, node: ast.AST) -> Iterator[Mutant]:
        """Mutants of a node and its children, without code that no test should notice or that a GPU compiles."""
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom) or _is_message(node):
            return
        if isinstance(node, ast.FunctionDef) and (node.name in ("__repr__", "__str__") or any(map(_is_compiled, node.decorator_list))):
            return
        yield from self._here(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    yield from self.walk(child)

    def _here(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._between(node.left, node.comparators[0], COMPARE[type(node.ops[0])], "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield from self._between(node.left, node.right, ARITHMETIC[type(node.op)], "arithmetic")
        elif isinstance(node, ast.BoolOp):
            yield from self._between(node.values[0], node.values[1], "or" if isinstance(node.op, ast.And) else "and", "and/or")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._replaced(node, self._text(node.operand), "dropped not")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield from self._replaced(node, str(not node.value), "constant")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield from self._replaced(node, str(node.value + 1), "constant")
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield from self._replaced(node, repr(node.value * 2 + 1), "constant")
        elif isinstance(node, ast.Call):
            yield from self._calls(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "key" in node.targets[0].id:
            yield from self._key(node.value)

    def _calls(self, node: ast.Call) -> Iterator[Mutant]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(node.func, ast.Attribute) and name in CASTS:
            yield from self._replaced(node, self._text(node.func.value), "dropped cast")
        if name in NAMES:
            yield from self._replaced(node, self._text(node).replace(name, NAMES[name], 1), "min/max, any/all")
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if len(plain) >= 2 and plain == node.args and name not in ("isinstance", "getattr", "setattr", "hasattr", "range", "zip"):
            first, second = self._text(plain[0]), self._text(plain[1])
            if first and second and first != second and plain[0].lineno == plain[1].end_lineno:
                at, stop = plain[0].col_offset, plain[1].end_col_offset or 0
                between = self._slice(plain[0].lineno, plain[0].end_col_offset or 0, plain[1].col_offset)
                yield from self._edit(plain[0].lineno, at, stop, f"{second}{between}{first}", "swapped arguments")
        if name in ("get", "cached") and node.args and isinstance(node.args[0], ast.Tuple):
            yield from self._key(node.args[0])

    def _key(self, value: ast.AST) -> Iterator[Mutant]:
        for element in value.elts if isinstance(value, ast.Tuple) else ():
            if not isinstance(element, ast.Starred):
                yield from self._replaced(element, "None", "dropped key component")

    def _between(self, left: ast.expr, right: ast.expr, operator: str, kind: str) -> Iterator[Mutant]:
        if left.end_lineno == right.lineno:
            between = self._slice(right.lineno, left.end_col_offset or 0, right.col_offset)
            before, after = (")" * between.count(")"), "(" * between.count("("))
            yield from self._edit(right.lineno, left.end_col_offset or 0, right.col_offset, f"{before} {operator} {after}", kind)

    def _replaced(self, node: ast.expr, new: str, kind: str) -> Iterator[Mutant]:
        if new and node.lineno == node.end_lineno:
            yield from self._edit(node.lineno, node.col_offset, node.end_col_offset or 0, new, kind)

    def _edit(self, line: int, start: int, stop: int, new: str, kind: str) -> Iterator[Mutant]:
        old = self._slice(line, start, stop)
        if old.strip() != new.strip():
            yield Mutant(file=self.file, line=line, start=start, stop=stop, old=old, new=new, kind=kind)

    def _slice(self, line: int, start: int, stop: int) -> str:
        return self.lines[line - 1].encode()[start:stop].decode()

    def _text(self, node: ast.expr) -> str:
        return self._slice(node.lineno, node.col_offset, node.end_col_offset or 0) if node.lineno == node.end_lineno else ""


def _is_compiled(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text.split("(")[0].endswith(COMPILED)


def _is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def sources(only: list[str]) -> list[Path]:
    """Files to mutate, without device code."""
    roots = [ROOT / name for name in only] or [ROOT / PACKAGE]
    files = sorted(f for root in roots for f in ([root] if root.suffix == ".py" else root.rglob("*.py")))
    return [f for f in files if not any(part in f.as_posix() for part in DEVICE_CODE)]


def sample(only: list[str], count: int, seed: int) -> list[Mutant]:
    """A random sample: packages in proportion to their mutants."""
    every = [mutant for path in sources(only) for mutant in mutants_of(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def given(path: Path) -> list[Mutant]:
    """Mutants of a file, each found by its old text, which must be in one line."""
    mutants = []
    for entry in json.loads(path.read_text()):
        lines = (ROOT / entry["file"]).read_text().splitlines()
        at = [i for i, text in enumerate(lines) if entry["old"] in text]
        if len(at) != 1:
            raise SystemExit(f"{entry['file']}: expected {entry['old']!r} in one line, got lines {[i + 1 for i in at]}")
        start = len(lines[at[0]].split(entry["old"])[0].encode())
        size = len(entry["old"].encode())
        mutants.append(Mutant(line=at[0] + 1, start=start, stop=start + size, kind="given", **entry))
    return mutants


# -------------------------------------------------------------------------------------------------------------- running the tests


HARNESS_FAILED = 70  # exit code
NO_TESTS = 5  # exit code of pytest


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds for one stage of tests and for random cases (0: none), and the test files of the only stage, if they are given."""

    stage: float
    fuzz: float
    tests: list[str] | None = None


def stages(mutant: Mutant) -> Iterator[tuple[str, list[str]]]:
    """(name, test files) in the order in which they run: files that name the module, then the rest of the folders that mirror it."""
    module, stem = mutant.file.removeprefix("src/").removesuffix(".py").replace("/", "."), Path(mutant.file).stem
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    naming = [f for f in files if module in (text := f.read_text()) or f.stem == f"test_{stem}" or f"import {stem}" in text]
    done = {f for f in naming if "processes" not in f.stem}
    if done:
        yield "tests that name the module", [str(f.relative_to(ROOT)) for f in sorted(done)]
    for folder in FOLDERS.get(mutant.package, ["engine"]):
        rest = [f for f in files if f.parent.name == folder and f not in done]
        done.update(rest)
        if rest:
            yield f"tests/{folder}", [str(f.relative_to(ROOT)) for f in rest]


def verdict(mutant: Mutant, copy: Path, limits: Limits) -> str:
    """Which stage killed a mutant, "survived", or which stages took longer than the limit: a hang, or too many tests."""
    path = copy / mutant.file
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    line = lines[mutant.line - 1].encode()
    lines[mutant.line - 1] = (line[: mutant.start] + mutant.new.encode() + line[mutant.stop :]).decode()
    mutated = "".join(lines)
    try:
        compile(mutated, str(path), "exec")
    except SyntaxError:
        return "no program"
    try:
        path.write_text(mutated)
        unfinished = []
        code = _forked(copy, lambda: _fuzz(copy, limits.fuzz), limits.fuzz * 4 + 120) if limits.fuzz and mutant.package in FUZZED else 0
        if code > 0:
            return "killed by random cases"
        unfinished += ["random cases"] * (code < 0)
        for name, files in stages(mutant) if limits.tests is None else [("the given tests", limits.tests)]:
            code = _forked(copy, lambda: _pytest(copy, files), limits.stage)  # noqa: B023
            if code > 0 and code != NO_TESTS:
                return f"killed by {name}"
            unfinished += [name] * (code < 0)
        return f"timeout of {', '.join(unfinished)}" if unfinished else "survived"
    finally:
        path.write_text(text)


def _pytest(copy: Path, files: list[str]) -> int:
    import pytest

    files = [f for f in files if (copy / f).exists()]
    return int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line", *files]))


def _fuzz(copy: Path, seconds: float) -> int:
    """The corpus, then random cases: a process each, since constants of longspan are lowered before it is imported."""
    command = [sys.executable, "-m", "tests.fuzz", "--keep"]
    corpus = sorted(str(p) for p in (copy / "tests/fuzz/corpus").glob("*.json"))
    runs = [[*command, "--replay", *corpus], [*command, "--stop", "--tile", "16", "--seconds", str(seconds)]]
    return int(any(subprocess.run(run, cwd=copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode for run in runs))


def _forked(copy: Path, run: Any, limit: float) -> int:
    """run() in a forked process with the copy first in the path: torch is imported already, longspan is not. −1 after the limit."""
    pid = os.fork()
    if pid == 0:
        code = HARNESS_FAILED
        with contextlib.suppress(BaseException):
            os.setsid()
            os.chdir(copy)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            sys.path[:0] = [str(copy / "src"), str(copy)]
            os.environ["PYTHONPATH"] = f"{copy / 'src'}:{copy}"
            code = run()
        os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # processes that the tests left behind
            code = os.waitstatus_to_exitcode(status)
            if code in (3, 4, HARNESS_FAILED):  # pytest's internal and usage errors
                raise SystemExit(f"the tests did not start (exit code {code}): run them without a mutant")
            return code if code >= 0 else 1
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=30, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changed", action="store_true", help="only files of src/ that differ from the main branch")
    parser.add_argument("--only", nargs="*", default=[], help="only these files or folders")
    parser.add_argument("--given", type=Path, help="a JSON file of mutants made by hand")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no mutant after this time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one stage")
    parser.add_argument("--fuzz", type=float, default=30.0, help="seconds of random cases for each mutant")
    parser.add_argument("--tests", nargs="*", help="only these test files, instead of the stages")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON in the last line")
    options = parser.parse_args()
    only = list(options.only)
    if options.changed:
        names = subprocess.run(
            ["git", "diff", "--name-only", "main...", "--", PACKAGE], cwd=ROOT, capture_output=True, text=True, check=True
        )
        only += [name for name in names.stdout.split() if name.endswith(".py") and (ROOT / name).exists()]
        if not only:
            raise SystemExit("no file of src/ differs from the main branch")
    mutants = given(options.given) if options.given else sample(only, options.sample, options.seed)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("torch", "pytest", "numpy", "torch.fx.experimental.proxy_tensor", "torch._dynamo", "triton"):
        with contextlib.suppress(ImportError):
            __import__(name)
    verdicts: list[dict[str, Any]] = []
    begin, limits = time.monotonic(), Limits(stage=options.limit, fuzz=options.fuzz, tests=options.tests)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", ".*_cache", ".carry"))
        if _forked(copy, lambda: _pytest(copy, options.tests or ["tests/test_import.py"]), options.limit):
            raise SystemExit("tests fail without a mutant: run them first")
        for mutant in mutants:
            if time.monotonic() - begin > options.seconds:
                break
            start = time.monotonic()
            result = verdict(mutant, copy, limits)
            verdicts.append(asdict(mutant) | {"package": mutant.package, "verdict": result})
            print(f"{time.monotonic() - start:6.0f} s  {result:40s} {mutant}", flush=True)
    _summary(verdicts)
    if options.json:
        print(json.dumps(verdicts))
    return 0


def _summary(verdicts: list[dict[str, Any]]) -> None:
    """Counts by package, and the survivors."""
    counts: dict[str, Counter[str]] = {}
    for v in verdicts:
        short = v["verdict"].split()[0]
        counts.setdefault(v["package"], Counter())[short] += 1
    for package, count in sorted(counts.items()):
        print(f"{package:15s} " + ", ".join(f"{n} {name}" for name, n in sorted(count.items())))
    total = sum(counts.values(), Counter())
    print(f"{'all':15s} " + ", ".join(f"{n} {name}" for name, n in sorted(total.items())))


if __name__ == "__main__":
    sys.exit(main())
