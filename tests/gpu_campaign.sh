#!/usr/bin/env bash
# Random campaigns on a machine with a GPU, side by side: fuzz cases and invariant documents on the GPU, fuzz cases on the CPU.
# Run from the root of the repository; installs nothing. Prints counts and wrong cases; the logs stay in $OUT.
# WALL: seconds for everything. CPU_ONLY=1: no GPU parts. SEED: added to every first seed.
set -u
WALL=${WALL:-270} SEED=${SEED:-0} OUT=${OUT:-build/campaign} GPU_JOBS=${GPU_JOBS:-9} CPU_JOBS=${CPU_JOBS:-5}
mkdir -p "$OUT"
rm -f "$OUT"/*.txt "$OUT"/*.err
export PYTHONPATH="$PWD/src:$PWD" OMP_NUM_THREADS=1
part() { # NAME COMMAND…: a part in the background, killed at the end of WALL
    timeout "$WALL" "${@:2}" >"$OUT/$1.txt" 2>"$OUT/$1.err" &
}
if [ -z "${CPU_ONLY:-}" ]; then
    # A case that compiles may last 40 s after it was started.
    part gpu_fuzz python3 -m tests.fuzz --device cuda --jobs "$GPU_JOBS" --seconds $((WALL - 42)) --first $((7000000 + SEED)) \
        --keep --json --out "$OUT/gpu"
    for kernel in hopper triton; do
        part "invariant_$kernel" python3 -m tests.invariant_cases --seconds $((WALL - 12)) --kernel "$kernel" --device cuda --plain 128 \
            --longest 1500 --first $((20000 + SEED))
    done
fi
CUDA_VISIBLE_DEVICES="" part cpu_fuzz python3 -m tests.fuzz --jobs "$CPU_JOBS" --seconds $((WALL - 12)) --first $((11000000 + SEED)) \
    --keep --json --out "$OUT/cpu"
wait
python3 - "$OUT" <<'PY'
import json
import sys
from pathlib import Path

failed = False
for path in sorted(Path(sys.argv[1]).glob("*.txt")):
    lines = path.read_text().splitlines() or ["nothing was printed"]
    if path.stem.startswith("invariant"):
        print(f"{path.stem}: {lines[-1]}", *lines[:-1][:8], sep="\n  ")
        failed |= ", 0 wrong" not in lines[-1]
        continue
    try:
        counts = json.loads(lines[-1])
    except ValueError:
        print(f"{path.stem}: no counts; {path.with_suffix('.err').read_text()[-700:]}")
        failed = True
        continue
    print(f"{path.stem}: {counts['cases']} cases, {counts['refused']} not supported, {len(counts['wrong'])} wrong")
    for wrong in counts["wrong"][:8]:
        print("  WRONG", json.dumps(wrong)[:330])
    failed |= bool(counts["wrong"])
sys.exit(failed)
PY
