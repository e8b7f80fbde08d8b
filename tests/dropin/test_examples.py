"""The examples run over loopback and check themselves. They use public names only, so that a user can copy one file and run it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_imports_public_names_and_no_other_file(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    modules += [f"{node.module}.{alias.name}" for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert not [m for m in modules if m.startswith("longspan") and any(part.startswith("_") for part in m.split("."))]
    assert not [m for m in modules if m.split(".")[0] in ("examples", "tests", "bench")]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "line"), [("flex_attention_cp.py", "gradient of slopes     matches"), ("sdpa_cp.py", "ulysses    loss")])
def test_a_torchrun_example_matches_one_process(name: str, line: str) -> None:
    assert line in run_script(EXAMPLES / name, 2)[0]


def test_the_example_of_packed_documents_matches_float64(capsys: Any) -> None:
    from examples.packed_documents import main

    main()
    assert "all match" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("name", ["fsdp_cp.py", "tp_cp.py", "transformers_llama.py"])
def test_an_example_that_starts_processes_matches_one_process(name: str, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("starts processes, and tests/integrations covers the same calls: run with --whole-grid")
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and "all match" in done.stdout, done.stderr


def test_the_example_of_many_devices_matches_for_a_short_sequence(capsys: Any, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("starts processes, and tests/engine covers the same calls: run with --whole-grid")
    from examples.many_devices import main

    main([83, 21, 3, 57], ranks=2)
    assert "ulysses  " in (printed := capsys.readouterr().out) and "all match" in printed
