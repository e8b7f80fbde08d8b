"""Mutation testing: random one-line changes of src/, each of which some test should notice.

    python tests/mutants.py --sample 300 --seed 1           # a random sample of all packages
    python tests/mutants.py --changed                       # files that differ from the main branch
    python tests/mutants.py --only src/longspan/_masks      # files of a folder
    python tests/mutants.py --given mutants.json            # mutants made by hand: [{"file": …, "old": …, "new": …}, …]

First, all tests run once, to record their times and which mutants they reach. Then each mutant runs the tests that reach it, the fastest
first, up to the first failure (`tests.mutation.runner`): seconds for most. Survivors of packages that compute results run random cases too.
Device code (functions compiled by Triton or Gluon) is left out, and so are messages, annotations and docstrings. Not part of CI.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.mutation import runner
from tests.mutation.make import PACKAGE, ROOT, Mutant, given, sample, survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=30, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changed", action="store_true", help="only files of src/ that differ from the main branch")
    parser.add_argument("--only", nargs="*", default=[], help="only these files or folders")
    parser.add_argument("--given", type=Path, help="a JSON file of mutants made by hand")
    parser.add_argument("--again", type=Path, help="the --out file of an earlier run: judge the mutants that were not killed")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="only these test files or folders")
    parser.add_argument(
        "--out", type=Path, help="append verdicts to this file, a line of JSON each; mutants that it has are not judged again"
    )
    parser.add_argument("--recording", type=Path, help="the tests that reach each mutant: read from this file if it exists, else written")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no mutant after this time")
    parser.add_argument("--record", type=float, default=1e9, help="seconds to record which mutants tests reach; later files are left out")
    parser.add_argument("--file-limit", type=float, default=600.0, help="seconds to record one test file")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of tests for one mutant")
    parser.add_argument("--fuzz", type=float, default=15.0, help="seconds of random cases for each survivor")
    parser.add_argument("--part", default="1/1", help="I/N: judge every Nth mutant from the Ith on, to share a recording between processes")
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
    if options.again:
        mutants = survivors(options.again)
    else:
        mutants = given(options.given) if options.given else sample(only, options.sample, options.seed)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("torch", "pytest", "numpy", "torch.fx.experimental.proxy_tensor", "torch._dynamo", "triton"):
        with contextlib.suppress(ImportError):
            __import__(name)
    verdicts: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        verdicts = [json.loads(line) for line in options.out.read_text().splitlines()]
    names = [f.name for f in fields(Mutant)]
    known = {Mutant(**{name: one[name] for name in names}) for one in verdicts}
    part, parts = map(int, options.part.split("/"))
    judged = {number for number, mutant in enumerate(mutants) if mutant in known or number % parts != part - 1}

    def report(number: int, verdict: str, seconds: float) -> None:
        verdicts.append(asdict(mutants[number]) | {"package": mutants[number].package, "verdict": verdict})
        print(f"{seconds:6.1f} s  {verdict:30s} {mutants[number]}", flush=True)
        if options.out:
            with options.out.open("a") as out:
                print(json.dumps(verdicts[-1]), file=out)

    limits = runner.Limits(
        record=options.record, file=options.file_limit, mutant=options.limit, fuzz=options.fuzz, total=options.seconds
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        copy = runner.Copy.make(Path(folder) / "repository", dict(enumerate(mutants)))
        recording = runner.judge(copy, limits, report, options.tests, saved=options.recording, judged=judged)
    print(f"{len(recording.seconds)} tests in {sum(recording.seconds.values()):.0f} s; failed without a mutant: {sorted(recording.failed)}")
    print(*runner.packages(verdicts), sep="\n")
    if options.json:
        print(json.dumps(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
