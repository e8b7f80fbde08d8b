"""`longspan hub` writes kernels that the `kernels` package, and code that follows its rules, loads from any path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from longspan.cli import hub_layout
from longspan.cli.app import run
from longspan.cli.hub_layout import relative_source

# The rules of the `kernels` package: the module's name is the id in metadata.json, its file is __init__.py of the variant.
LOAD = """
import importlib.util, json, sys
from pathlib import Path

variant = Path(sys.argv[1]) / "build" / "torch-cpu"
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    assert run(["hub", str(folder), "--repo", "span/longspan"]) == 0
    return folder


def python(code: str, folder: Path, *, path: str = "", **environment: str) -> str:
    """What a new interpreter prints, without longspan on its path unless given."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_variant_has_metadata_and_no_absolute_import(layout: Path) -> None:
    ids = []
    for backend in ("cuda", "cpu"):
        variant = layout / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        ids.append(metadata.pop("id"))
        assert metadata == {
            "name": "longspan", "version": 1, "kernels-minver": "0.17.0", "license": "MIT", "python-depends": [],
            "backend": {"type": backend},
        }  # fmt: skip
        for path in variant.rglob("*.py"):
            code = [line for line in path.read_text().splitlines() if ">>>" not in line and "longspan" in line]
            assert not [line for line in code if line.lstrip(" f\"'").startswith(("import longspan", "from longspan"))], path
    assert len(set(ids)) == 2 and all(kernel_id.isidentifier() for kernel_id in ids)
    assert 'attn_implementation="span/longspan"' in (layout / "README.md").read_text()


def test_a_variant_runs_without_an_installed_longspan(layout: Path) -> None:
    code = LOAD + textwrap.dedent("""
        import torch
        sys.modules["longspan"] = None  # any import of it would raise
        q = torch.randn(1, 2, 37, 16, requires_grad=True)
        slopes = torch.tensor([0.5, 0.25])
        alibi = lambda score, b, h, i, j: score - slopes[h] * (i - j)
        outs = [kernel.attention(q, q, q, mask=kernel.causal(), score_mod=alibi, kernel=name) for name in ("dense", "cpu")]
        torch.testing.assert_close(*outs)
        outs[1].sum().backward()
        attend = lambda x: kernel.attention(x, x, x, mask=kernel.causal(), score_mod=alibi)
        torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q), outs[0])
        print("same")
    """)
    assert python(code, layout) == "same\n"


def test_the_triton_kernels_of_a_variant_run_beside_an_installed_longspan(layout: Path) -> None:
    pytest.importorskip("triton")
    code = LOAD + textwrap.dedent("""
        import torch
        import longspan as ls
        q = torch.randn(1, 2, 37, 16)
        soft = lambda score, b, h, i, j: 3 * torch.tanh(score / 3)
        got = kernel.attention(q, q, q, mask=kernel.causal(), score_mod=soft, kernel="triton")
        torch.testing.assert_close(got, ls.attention(q, q, q, mask=ls.causal(), score_mod=soft, kernel="dense"), rtol=1e-4, atol=1e-5)
        generated = sys.modules[name + "._kernels.gpu.codegen"].function_source("f", "x", ["return x"])
        assert f"from {name}._kernels.gpu.device_library import" in generated
        print("same")
    """)
    source = str(Path(__file__).parents[2] / "src")
    assert python(code, layout, path=source, TRITON_INTERPRET="1") == "same\n"


def test_transformers_loads_the_kernel_by_its_repository(layout: Path) -> None:
    pytest.importorskip("transformers")
    kernels = pytest.importorskip("kernels")
    code = """
        import torch
        from transformers import Gemma2Config, Gemma2ForCausalLM

        config = Gemma2Config(
            vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, sliding_window=7, attn_logit_softcapping=3.0,
        )
        ids = torch.randint(3, 61, (2, 23), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(23) >= torch.tensor([[0], [6]])).long()
        labels = ids.masked_fill(torch.arange(23) <= torch.tensor([[0], [6]]), -100)
        results = []
        for implementation in ("span/longspan", "eager"):
            torch.manual_seed(0)
            model = Gemma2ForCausalLM._from_config(config, attn_implementation=implementation).eval()
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            grads = torch.autograd.grad(loss, list(model.parameters()))
            results.append((loss, grads, model.generate(ids[:1], max_new_tokens=5, do_sample=False)))
        torch.testing.assert_close(*results)
        from kernels import get_loaded_kernels
        assert [str(k.metadata.name) for k in get_loaded_kernels()] and "longspan" not in __import__("sys").modules
        print("same")
    """
    site = str(Path(kernels.__file__).parents[1])
    assert python(code, layout, path=site, LOCAL_KERNELS=f"span/longspan={layout}") == "same\n"


def test_imports_become_relative_and_names_of_operators_get_the_id() -> None:
    text = textwrap.dedent('''
        """Legend as in longspan._kernels.protocol."""
        from longspan._masks.algebra import Mask
        from longspan import __version__
        import longspan._kernels.hopper  # noqa: F401
        name = "longspan::attend"
        message = "longspan: expected a mask"
    ''')
    made = relative_source(text, 2, "_id")
    assert "from .._masks.algebra import Mask" in made and "from .. import __version__" in made
    assert "from .._kernels import hopper  # noqa" in made
    assert "name = '_id::attend'" in made and 'message = "longspan: expected a mask"' in made
    with pytest.raises(ValueError, match="cannot make 'import longspan as ls' relative"):
        relative_source("import longspan as ls", 1, "_id")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo", "longspan"], "--repo: expected org/name, got 'longspan'"),
        (["--backends", "cuda,rocm"], "--backends: expected some of cuda, cpu, got rocm"),
        (["--number", "x"], "--number"),
    ],
)
def test_wrong_options_raise(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hub", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["README.md", "build", "build/notes.txt", "build/torch-cpu/metadata.json", "build/lib/metadata.json"])
@pytest.mark.parametrize("content", ["", '{"name": "other", "id": "_other"}', "[1]"])
def test_files_of_others_are_not_replaced(name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    assert run(["hub", str(tmp_path), "--backends", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "README.md and build/ were written by `longspan hub`" in error and str(tmp_path / name.removesuffix("/metadata.json")) in error
    assert contents(tmp_path) == {name: content.encode()}


def test_a_layout_is_replaced_unless_its_card_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_layout, "relative_source", lambda text, depth, kernel_id: text)  # takes 2 s; other tests check it
    arguments = ["hub", str(tmp_path), "--backends", "cpu"]
    assert run([*arguments, "--number", "3", "--repo", "org/first"]) == 0
    (tmp_path / "LICENSE").write_text("kept")
    assert run([*arguments, "--repo", "org/second"]) == 0
    assert "org/second" in (tmp_path / "README.md").read_text() and (tmp_path / "LICENSE").read_text() == "kept"
    with (tmp_path / "README.md").open("a") as card:
        card.write("Measured on our GPUs.\n")
    before = contents(tmp_path)
    assert run(arguments) == 2
    assert contents(tmp_path) == before
