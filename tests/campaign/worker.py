"""One process of a campaign: reads "campaign, first seed, count" lines, checks these cases, and writes what happens as lines of JSON.

{"begin": seed}, {"compiling": number of kernels that compile now}, {"end": seed, "outcome": "right", "wrong" or "refused"}, {"idle": true}
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from typing import Any

SLOW_S = 0.25  # compiling for less: the kernel came from Triton's cache on disk


class Reporter:
    """Writes lines to the parent, from any thread. `compiled`: (name, seconds) of each kernel."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what cases print goes to stderr
        self._lock = threading.Lock()
        self._compiling = 0
        self.compiled: list[tuple[str, float]] = []

    def say(self, **event: Any) -> None:
        with self._lock:
            self._say(event)

    def _say(self, event: dict[str, Any]) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    def watch_compilation(self) -> None:
        """Report every kernel that longspan compiles while it compiles."""
        try:
            from longspan._kernels.gpu import compilation
        except ImportError:  # no Triton
            return
        compile_locked = compilation._compile_locked

        def watched(src: Any, *args: Any) -> Any:
            begin = time.monotonic()
            self._change(1)
            try:
                return compile_locked(src, *args)
            finally:
                self.compiled.append((str(getattr(src, "name", "kernel")), round(time.monotonic() - begin, 2)))
                self._change(-1)

        compilation._compile_locked = watched

    def _change(self, by: int) -> None:
        with self._lock:
            self._compiling += by
            self._say({"compiling": self._compiling})


def check(name: str, seed: int, device: str) -> dict[str, Any]:
    """The outcome of one case."""
    from tests.campaign.kinds import NotSupported, campaigns

    try:
        right = campaigns()[name].check(seed, device)
        return {"outcome": "right", "families": sorted(right.families), "comparisons": right.comparisons}
    except NotSupported as error:
        return {"outcome": "refused", "text": str(error)[:200]}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
        return {"outcome": "wrong", "text": f"{type(error).__name__} ({where}): {error}"[:600]}


def is_broken() -> bool:
    """Whether a kernel failed on the device: every later call of this process would fail too."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def main() -> int:
    device = sys.argv[1]
    reporter = Reporter()
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        from tests.fuzz.interpreter import prepare

        prepare()
    import longspan  # noqa: F401

    reporter.watch_compilation()
    reporter.say(idle=True)
    for line in sys.stdin:
        name, first, count = json.loads(line)
        for seed in range(first, first + count):
            reporter.say(begin=seed)
            begin, before = time.monotonic(), len(reporter.compiled)
            outcome = check(name, seed, device)
            compiled = [one for one in reporter.compiled[before:] if one[1] > SLOW_S]
            reporter.say(end=seed, seconds=round(time.monotonic() - begin, 3), compiled=compiled, **outcome)
            if outcome["outcome"] == "wrong" and device != "cpu" and is_broken():
                return 3
        reporter.say(idle=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
