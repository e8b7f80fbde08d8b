"""`import longspan` stays light, and the public surface is what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import longspan as ls


def test_importing_longspan_imports_nothing_heavier_than_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import longspan; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; print(sorted(new - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(eval(out))
    assert not loaded & {"triton", "numpy", "matplotlib", "typer", "rich", "transformers", "pytest", "hypothesis"}, loaded


def test_every_public_name_exists_and_is_documented() -> None:
    for name in ls.__all__:
        assert getattr(ls, name).__doc__, name


def test_the_other_rooms_are_imported_when_asked_for() -> None:
    code = (
        "import sys, longspan as ls; assert 'longspan.testing' not in sys.modules; "
        "ls.testing.virtual_world, ls.torch_compat.context_parallel, ls.integrations.loss"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_bench_can_be_imported_where_there_is_no_gpu() -> None:
    benches = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))
    code = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]"
    path = os.pathsep.join([str(benches[0].parent), str(benches[0].parents[1])])
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, benches)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert len(benches) > 9 and found.returncode == 0, found.stderr
