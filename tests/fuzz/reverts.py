"""Are past bugs detected again? Each bug's mend is reversed in a copy of the repository, and a harness runs until it reports an error.

    python tests/fuzz/reverts.py --seconds 120 [--only NAME]

Wrong results of one call: random cases of `tests.fuzz`. Ranks that make different calls: `tests.faults`. Checkpoints, files of the command
line and timeouts: the test file of each. NaN that crosses masks in the GPU kernels is detected on a GPU only (`--device cuda` of the
fuzzer). `tests/fuzz/README.md` has the times of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS, MASKS, DROPIN = "src/longspan/_kernels", "src/longspan/_masks", "src/longspan/_dropin"
COMM, CHECKPOINTS, CLI = "src/longspan/_comm", "src/longspan/_training/checkpoints.py", "src/longspan/cli"
Edits = list[tuple[str, str, str]]  # (file, old, new); the old text occurs once in the file
REVERTS: dict[str, Edits] = {
    "tiles above a causal square counted twice": [
        (f"{KERNELS}/plain_tiles.py", 'if rect.kind == "causal":\n', 'if rect.kind == "causal" and self.work.mask is None:\n'),
    ],
    "NaN crosses masks, tile by tile": [
        (f"{KERNELS}/plain_tiles.py", "if seen is None or self.bounded(self.v):", "if True:"),
        (f"{KERNELS}/plain_tiles.py", "isolate = seen is not None and not", "isolate = False and not"),
    ],
    "NaN crosses masks, torch's CPU operator": [
        (f"{KERNELS}/isolation.py", "if tiles.bounded(*whole) or within(tiles.limit, *tests):", "if True:"),
        (f"{KERNELS}/isolation.py", 'if rect.kind == "full" or tiles.bounded(', "if True or tiles.bounded("),
    ],
    "NaN crosses masks, dense kernel": [(f"{KERNELS}/nonfinite.py", "product(a, torch.where(finite, x, 0.0))", "product(a, x)")],
    "NaN in dq of rows that see nothing": [
        (f"{KERNELS}/plain_tiles.py", "scores - norm.masked_fill(norm == -torch.inf, torch.inf)", "scores - norm"),
    ],
    "inference tensor as a buffer": [
        (f"{DROPIN}/buffers.py", "with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():", "with torch.no_grad():"),
        (f"{DROPIN}/buffers.py", "return None if tensor.is_inference() else tensor._version", "return tensor._version"),
    ],
    "stale trace after a cache was cleared": [
        (f"{MASKS}/trace_key.py", "        return kind, self.instance(value, kind.__mro__)\n", "        return kind, id(value)\n"),
    ],
    "stale trace of torch's deterministic flag": [
        (f"{MASKS}/trace_key.py", "    if not all(_is_known_attribute(name)", "    if False and not all(_is_known_attribute(name)"),
        (f"{MASKS}/trace_key.py", "            if not _is_known_attribute(name):\n                raise Unsure\n", ""),
        (f"{MASKS}/trace_cache.py", "torch.are_deterministic_algorithms_enabled(), ", ""),
        (f"{MASKS}/trace_key.py", "return self.identity(value) if _is_library_function(value) else self.function(value)",
         'return self.identity(value) if str(value.__module__).startswith("torch") else self.function(value)'),
    ],
    "stale trace of a captured number": [(f"{MASKS}/trace_cache.py", "not traced.has_read_values and ", "")],
    "tensors made like vectors count as scalars": [
        (f"{MASKS}/intervals.py", 'not node.all_input_nodes[0].meta["val"].ndim',
         "not any(isinstance(v, Tensor) and v.ndim for v in inputs)"),
    ],
    "the lower bound of an index taken for its value": [
        (f"{MASKS}/intervals.py", " or any(not torch.equal(i.lo, i.hi) for i in indices if not isinstance(i, IntervalStep)):", ":"),
    ],
    "BlockTable.to_block_mask raises": [
        (f"{MASKS}/block_table.py", "indices = torch.zeros(self.rows, self.kv_tiles", "indices = torch.zeros(self.rows"),
    ],
    "unsound interval of squares": [(f"{MASKS}/interval_rules.py", "size = _absolute(call, args)", "size = cast(Interval, args[0])")],
    "window under causal over several tiles": [
        (f"{KERNELS}/rectangles.py", " and _covers(rows[stop], c0, diagonal[stop] - 1)", ""),
    ],
    "negative captured index in Triton": [(f"{KERNELS}/gpu/codegen.py", "if index.nonneg else f\"wrap(", "if True else f\"wrap(")],
    "settings of functions that torch leaves out": [
        (f"{KERNELS}/gpu/emitters.py", "_completed(args, 1.0, 20.0)",
         "args if len(args) > 2 else [args[0], constant(1.0), constant(20.0)]"),
    ],
    "score mods over more keys than one tile": [
        (f"{KERNELS}/plain_tiles.py", "q1 - 1 - rect.q0 < k0 - rect.k0", "q1 - 1 - rect.q0 <= k0 - rect.k0"),
    ],
    "two key lengths in the drop-in": [(f"{DROPIN}/dispatcher.py", "layouts[0].digest, layouts[1].digest", "layouts[0].digest")],
    "a mask combined with a constant bool": [
        (f"{MASKS}/interval_rules.py", "return Interval(combine(a.lo, b.lo), combine(a.hi, b.hi))", "return monotone(1, 1)(call, (a, b))"),
    ],
}  # fmt: skip
# Bugs between ranks: edits, and arguments of `tests.faults`.
FAULTS: dict[str, tuple[Edits, str]] = {
    "ranks agree on the first call of a kind only": (
        [
            (f"{COMM}/agreement.py", "_numbers = itertools.count(1)\n", "_numbers = itertools.count(1)\n_agreed: set[object] = set()\n"),
            (f"{COMM}/agreement.py", "        if mesh.size > 1:\n            watchdog.call",
             "        key = (mesh.size, call and call.digests)\n        if mesh.size > 1 and (error is not None or key not in _agreed):\n"
             "            _agreed.add(key)\n            watchdog.call"),
        ],
        "--scenarios ring --kinds diverge",
    ),
    "unshard is not checked": (
        [(f"{COMM}/gather.py", "return agree(mesh, CallDescription(", "return Agreement.none() or agree(mesh, CallDescription(")],
        "--scenarios unshard --kinds diverge",
    ),
}  # fmt: skip
# Bugs of commands and timeouts: edits, and the test file.
TESTS: dict[str, tuple[Edits, str]] = {
    "damaged shards of a checkpoint are loaded": (
        [(CHECKPOINTS, "    damage = checkpoint.damage()\n", "    damage = None\n")], "tests/integrations/test_checkpoints.py",
    ),
    "a checkpoint without job.json is accepted": (
        [(CHECKPOINTS, "raise CheckpointError(f\"the checkpoint {folder} is damaged: {_MANIFEST}: {error.strerror}\") from None",
          "return Checkpoint(folder=folder, step=int(folder.name[5:]), identity={}, files={})")],
        "tests/integrations/test_checkpoints.py",
    ),
    "a pickle in a checkpoint's metadata is executed": (
        [(CHECKPOINTS, "_MetadataUnpickler(io.BytesIO((", "pickle.Unpickler(io.BytesIO((")], "tests/integrations/test_checkpoints.py",
    ),
    "a FIFO as a file of document lengths blocks": (
        [(f"{CLI}/parse.py", "if path.exists() and not path.is_file():", "if False:")], "tests/cli/test_hostile_input.py",
    ),
    "out of memory is a traceback": (
        [(f"{CLI}/app.py", "except (MemoryError, RuntimeError) as error:", "except ZeroDivisionError as error:")],
        "tests/cli/test_hostile_input.py",
    ),
    "a timeout blames a healthy neighbour": (
        [(f"{COMM}/watchdog.py", "if notes[r][\"held up\"]]", "if False]")], "tests/comm/test_watchdog.py",
    ),
    "the default timeout is torch's 30 minutes": (
        [(f"{COMM}/watchdog.py", "DEFAULT_TIMEOUT = 600.0", "DEFAULT_TIMEOUT = 1800.0")], "tests/comm/test_watchdog.py",
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="time for random cases, each bug")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--corpus", action="store_true", help="replay the corpus instead of drawing random cases")
    parser.add_argument("--only", help="bugs whose name contains this text")
    options = parser.parse_args()
    missed = 0
    every: dict[str, tuple[Edits, Callable[[Path], str | None]]] = {
        name: (edits, lambda copy: first_wrong(copy, None if options.corpus else options.first, options.seconds))
        for name, edits in REVERTS.items()
    }
    every |= {name: (edits, lambda copy, given=given: first_fault(copy, given)) for name, (edits, given) in FAULTS.items()}
    every |= {name: (edits, lambda copy, file=file: first_failure(copy, file)) for name, (edits, file) in TESTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", ".*_cache"))
        for name, (edits, detect) in every.items():
            if options.only and options.only not in name:
                continue
            originals = {file: (copy / file).read_text() for file, _, _ in edits}
            for file, old, new in edits:
                text = (copy / file).read_text()
                if text.count(old) != 1:
                    raise SystemExit(
                        f"{name}: expected {old!r} once in {file}, got it {text.count(old)} times; adapt tests/fuzz/reverts.py"
                    )
                (copy / file).write_text(text.replace(old, new))
            begin = time.monotonic()
            first = detect(copy)
            missed += first is None
            print(f"{name}: {'NOT DETECTED' if first is None else first} ({time.monotonic() - begin:.0f} s)", flush=True)
            for file, text in originals.items():
                (copy / file).write_text(text)
    return 1 if missed else 0


def first_wrong(copy: Path, first: int | None, seconds: float) -> str | None:
    """The first wrong case of the fuzzer in a copy of the repository, or of the corpus; None if there is none."""
    command = [sys.executable, "-m", "tests.fuzz", "--stop", "--keep", "--json"]
    corpus = sorted(str(p) for p in (copy / "tests/fuzz/corpus").glob("*.json"))
    command += ["--replay", *corpus] if first is None else ["--first", str(first), "--seconds", str(seconds)]
    done = _run(copy, command)
    if not done.stdout.strip():
        return f"the process died with exit code {done.returncode}"
    result = json.loads(done.stdout.splitlines()[-1])
    if not result["wrong"]:
        return None
    wrong = result["wrong"][0]
    return f"after {result['cases']} cases, {result['seconds']:.0f} CPU seconds: {wrong.get('text', wrong)}"[:200]


def first_fault(copy: Path, arguments: str) -> str | None:
    """The first wrong run of `tests.faults`; None if there is none."""
    command = [sys.executable, "-m", "tests.faults", "--ranks", "3", "--jobs", "1", *arguments.split()]
    lines = _run(copy, command, until="WRONG").stdout.splitlines()
    return next((line[:200] for line in lines if line.startswith("WRONG")), None)


def first_failure(copy: Path, file: str) -> str | None:
    """The first failed test of a file, or that it does not end; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    try:
        done = _run(copy, command, limit=60.0)
    except subprocess.TimeoutExpired:
        return f"{file} does not end"
    return next((line[:200] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), None)


def _run(copy: Path, command: list[str], *, until: str = "", limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in the copy, to the end or to its first line that begins with `until`; at most `limit` seconds."""
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if not until:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit)
    lines = []
    with subprocess.Popen(command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(until):
                process.terminate()
    return subprocess.CompletedProcess(command, process.returncode, "".join(lines), "")


if __name__ == "__main__":
    sys.exit(main())
