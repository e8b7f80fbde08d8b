"""`python -m tests.fuzz`: random cases against the oracle until the time is over.

Each part of a run is a process of its own with another tile size (see `thresholds`). A wrong case is minimised and written as a script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TILES = (16, 16, 16, 8, 16, 32, 16, 128)  # of the parts of a run, in turn
# Cases of one process; few on a GPU, where most of the time is compiling, which runs in parallel: one group of `tests.fuzz.groups`.
PART, GPU_PART = 1000, 64
LATE = 300.0  # seconds after the end of the run when a case that still runs counts as one that hangs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the whole run")
    parser.add_argument("--cases", type=int, help="stop after this many cases")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--tile", type=int, help="tokens per tile of every part, instead of several sizes in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder for scripts of wrong cases")
    parser.add_argument("--stop", action="store_true", help="end at the first wrong case")
    parser.add_argument("--keep", action="store_true", help="do not minimise")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON in the last line")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs="+", type=Path, help="check cases of JSON files (all with the same tile) instead, all of them")
    options = parser.parse_args()
    if options.part or options.replay:
        return _part(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Start parts until the time is over, and add up their counts."""
    end, part = time.monotonic() + options.seconds, 0
    total: Counter[str] = Counter()
    families: Counter[str] = Counter()
    wrong: list[Any] = []
    running: list[subprocess.Popen[str]] = []
    left = options.cases if options.cases is not None else 1 << 62
    # Each part runs in a new process, so that state of one part cannot affect the next.
    while running or (time.monotonic() < end and left > 0 and not (options.stop and wrong)):
        while len(running) < options.jobs and time.monotonic() < end and left > 0 and not (options.stop and wrong):
            size = PART if options.device == "cpu" else GPU_PART
            cases = min(size, left)
            tile = options.tile or (TILES[part % len(TILES)] if options.device == "cpu" else 128)
            running.append(_started(options, options.first + part * size, cases, tile, end - time.monotonic()))
            part, left = part + 1, left - cases
        process = _next_to_end(running, end)
        running.remove(process)
        counts = _counts(options, process)
        total.update({name: counts[name] for name in ("cases", "refused", "seconds")})
        families.update(counts["families"])
        wrong += counts["wrong"]
        print(f"{total['cases']} cases, {len(wrong)} wrong, {total['seconds']:.0f} CPU seconds", file=sys.stderr, flush=True)
    counts = {
        "cases": total["cases"],
        "refused": total["refused"],
        "wrong": wrong,
        "seconds": round(total["seconds"], 1),
        "families": families,
    }
    for name, n in sorted(families.items()):
        print(f"{n:7d}  {name}")
    rate = total["cases"] / max(total["seconds"], 1e-9)
    print(f"{total['cases']} cases, {total['refused']} not supported, {len(wrong)} wrong, {rate:.1f} cases per CPU second")
    if options.json:
        print(json.dumps(counts))
    return 1 if wrong else 0


def _next_to_end(running: list[subprocess.Popen[str]], end: float) -> subprocess.Popen[str]:
    """The process that ends first; after LATE seconds beyond `end`, one that did not is killed."""
    while True:
        for process in running:
            if process.poll() is not None:
                return process
        if time.monotonic() > end + LATE:
            running[0].kill()
        time.sleep(0.05)


def _counts(options: argparse.Namespace, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The counts of a process that has ended; if it died, its case is among the wrong ones."""
    assert process.stdout is not None
    lines = process.stdout.read().strip().splitlines()
    running = _running(options.out, process.pid)
    try:
        counts: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        died = {"died": process.returncode, "seed": running.read_text() if running.exists() else None, "said": lines[-3:]}
        counts = {"cases": 0, "refused": 0, "seconds": 0.0, "families": {}, "wrong": [died]}
    running.unlink(missing_ok=True)
    return counts


def _running(folder: Path, pid: int) -> Path:
    """The file with the seed of the case that a process runs."""
    return folder / f"running_{pid}"


def _started(options: argparse.Namespace, first: int, cases: int, tile: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--part", "--first", str(first), "--cases", str(cases), "--tile", str(tile)]
    command += ["--seconds", str(seconds), "--device", options.device, "--out", str(options.out)]
    command += ["--stop"] * options.stop + ["--keep"] * options.keep
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if options.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _part(options: argparse.Namespace) -> int:
    """One process: cases of consecutive seeds, or of files; the counts as JSON in the last line."""
    from tests.fuzz.thresholds import lower

    files = [json.loads(path.read_text()) for path in options.replay or ()]
    tile = files[0]["tile"] if files else options.tile
    assert all(case["tile"] == tile for case in files), "cases of one process have one tile size"
    lower(tile)

    import torch
    from tests.fuzz.cases import draw, families
    from tests.fuzz.harness import Refused, Wrong, check
    from tests.fuzz.minimise import report

    torch.set_num_threads(1)
    if options.device == "cpu":
        from tests.fuzz.interpreter import prepare

        prepare()
    options.out.mkdir(parents=True, exist_ok=True)
    running = _running(options.out, os.getpid())
    end, begin = time.monotonic() + options.seconds, time.process_time()
    counted: Counter[str] = Counter()
    result: dict[str, Any] = {"cases": 0, "refused": 0, "wrong": []}
    for number in range(len(files) or options.cases):
        if not files and time.monotonic() > end:
            break
        case = files[number] if files else draw(options.first + number, tile, device=options.device)
        result["cases"] += 1
        running.write_text(str(case["seed"]))
        try:
            check(case)
        except Refused:
            result["refused"] += 1
        except Wrong as error:
            wrong = {"seed": case["seed"], "tile": tile, "kind": error.kind, "text": str(error)[:300]}
            print(f"WRONG seed {case['seed']} tile {tile}: {str(error)[:300]}", file=sys.stderr, flush=True)
            if not options.keep:
                wrong["script"] = str(report(case, error, options.out))
            result["wrong"].append(wrong)
            if options.stop:
                break
        counted.update(families(case))
    running.unlink()
    result |= {"families": counted, "seconds": time.process_time() - begin}
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
