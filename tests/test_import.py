"""`import longspan` loads nothing; a public name loads torch and nothing heavier."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longspan as ls


def third_party_modules(code: str) -> set[str]:
    """Top-level packages that a new interpreter has loaded after `code`, without the standard library."""
    show = "import sys; print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    out = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True).stdout
    return set(ast.literal_eval(out.splitlines()[-1]))


def test_importing_longspan_does_not_import_torch() -> None:
    assert "torch" not in third_party_modules("import longspan")


def test_public_names_import_nothing_heavier_than_torch() -> None:
    with_torch = third_party_modules("import torch")
    loaded = third_party_modules("import longspan as ls\nls.attention, ls.plan, ls.context_parallel") - with_torch
    assert not loaded & {"triton", "numpy", "matplotlib", "typer", "rich", "transformers", "pytest", "hypothesis"}, loaded


@pytest.mark.parametrize("arguments", ["--help", "plan --help", "train --help", "plan --gpus none", "train --rate nan", "bench --dim x"])
def test_help_and_option_errors_of_the_command_line_do_not_import_torch(arguments: str) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    code = f"from longspan.cli.app import run\nassert run({arguments.split()!r}) == {0 if 'help' in arguments else 2}"
    assert not third_party_modules(code) & {"torch", "numpy", "matplotlib"}


def test_every_public_name_exists_is_listed_and_is_documented() -> None:
    for name in ls.__all__:
        assert getattr(ls, name).__doc__, name
    assert set(ls.__all__) <= set(dir(ls))
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = ls.atention  # type: ignore[attr-defined]


def test_public_names_can_be_used_first_inside_a_compiled_function() -> None:
    code = (
        "import longspan as ls, torch\n"
        "f = torch.compile(lambda q: ls.attention(q, q, q, mask=ls.causal()), fullgraph=True, backend='aot_eager')\n"
        "f(torch.randn(1, 2, 40, 16, requires_grad=True)).sum().backward()"
    )
    assert "torch" in third_party_modules(code)


def test_subpackages_are_imported_on_first_use() -> None:
    code = (
        "import sys, longspan as ls; assert 'longspan.testing' not in sys.modules; "
        "ls.testing.virtual_world, ls.torch_compat.context_parallel, ls.integrations.loss"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_benchmark_can_be_imported_without_a_gpu() -> None:
    benches = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))
    code = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]"
    path = os.pathsep.join([str(benches[0].parent), str(benches[0].parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, benches)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert len(benches) > 9 and done.returncode == 0, done.stderr
