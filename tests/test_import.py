"""`import longspan` loads torch and nothing heavier, and registers the operators."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan as ls

# As a command (argv[0] is -m), longspan loads its names, and torch, at the first use of a name; subpackages at theirs.
FIRST_USES = """
import sys
sys.argv = ["-m"]
import longspan as ls
assert "torch" not in sys.modules
ls.causal()
sys.modules["torch"].ops.longspan.attend.default
assert "longspan.testing" not in sys.modules and "attention" in vars(ls)
print(sorted({m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names)))
ls.testing.virtual_world, ls.torch_compat.context_parallel, ls.integrations.loss
"""


def test_longspan_imports_torch_and_nothing_heavier_and_subpackages_on_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert "torch" in loaded
    assert not loaded & {"triton", "matplotlib", "typer", "rich", "transformers", "pytest", "hypothesis"}, loaded


def test_every_public_name_exists_is_listed_and_is_documented() -> None:
    for name in ls.__all__:
        assert getattr(ls, name).__doc__, name
    assert set(ls.__all__) <= set(dir(ls))
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = ls.atention  # type: ignore[attr-defined]


def test_every_benchmark_can_be_imported_without_a_gpu() -> None:
    benches = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))
    code = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]"
    path = os.pathsep.join([str(benches[0].parent), str(benches[0].parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, benches)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert len(benches) > 9 and done.returncode == 0, done.stderr


def test_private_torch_interfaces_are_used_in_one_module() -> None:
    """Operators of torch.ops and DTensor's sharding rules are exceptions (docs/contributing.md)."""
    source = Path(ls.__file__).parent
    exceptions = {source / "_torch_private.py", source / "torch_compat" / "_sharding_rules.py"}
    used = []
    for path in sorted(set(source.rglob("*.py")) - exceptions):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            used += [f"{path.name}: {name}" for name in names if re.match(r"torch\.(?!ops\.)(\w+\.)*_(?!_)", name)]
    assert not used
