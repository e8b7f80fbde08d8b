"""Kernels of the package: their keys, their files, and when they are not taken. No GPU is needed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kernels.scripts import run_script

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from longspan._kernels.gpu import compilation, prebuilt
from longspan._kernels.gpu import source_digest as source_digest_module
from longspan._kernels.gpu.source_digest import NoDigest, source_digest, source_texts

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {
    "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": 168, "enable_fp_fusion": True, "ptx_options": None,
    "launch_pdl": False, "launch_cooperative_grid": False, "debug": False, "sanitize_overflow": False, "ir_override": None,
}  # fmt: skip
METADATA = {"name": "sample", "shared": 96, "num_warps": 8, "num_ctas": 1, "target": TARGET, "ptx_options": "--of-this-machine"}
SAMPLE = """
FACTOR = 3
UNUSED = 4

def helper(x):
    return x * FACTOR

def default(x, scale=FACTOR):
    return x + scale

def other(x):
    return x

def kernel(x):
    return default(helper(x))
"""


@pytest.mark.long
def test_the_package_has_the_kernels_of_common_calls(pytestconfig: pytest.Config) -> None:
    run_script("prebuilt_check.py", pytestconfig)


def test_files_of_the_package_are_intact_and_small() -> None:
    files = sorted(prebuilt.FOLDER.glob("*.xz"))
    assert files
    for path in files:
        metadata, binary = prebuilt.unpack(path)
        assert binary.startswith(b"\x7fELF") and metadata["target"]["arch"] == 90
        assert not any("/" in str(value) for value in metadata.values()), f"{path}: a path of the machine that built it"
    assert sum(path.stat().st_size for path in files) <= 3 * 2**20


def digest(tmp_path: Path, text: str) -> str:
    return source_digest(kernel_of(tmp_path, text))


def kernel_of(tmp_path: Path, text: str, jit: tuple[str, ...] = ("helper", "default", "other", "kernel")) -> Any:
    """The function `kernel` of a module of this package with a text."""
    path = tmp_path / f"sample_{abs(hash(text))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("longspan.sample", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in jit:
        setattr(module, name, JITFunction(getattr(module, name)))
    return module.kernel


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("default(helper(x))", "helper(default(x))"),
        ("x * FACTOR", "x * FACTOR * 2"),
        ("FACTOR = 3", "FACTOR = 5"),
        ("scale=FACTOR", "scale=FACTOR + 1"),
        ("def helper(x):", "def helper(x):  # a comment"),
    ],
)
def test_a_change_of_a_function_that_a_kernel_calls_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert SAMPLE.count(old) == 1
    assert digest(tmp_path, SAMPLE) != digest(tmp_path, SAMPLE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"), [("UNUSED = 4", "UNUSED = 6"), ("    return x\n", "    return -x\n"), ("\nFACTOR", "\n\n\nFACTOR")]
)
def test_a_change_elsewhere_in_the_file_does_not(tmp_path: Path, old: str, new: str) -> None:
    assert digest(tmp_path, SAMPLE) == digest(tmp_path, SAMPLE.replace(old, new, 1))


def test_the_digest_covers_each_function_once(tmp_path: Path) -> None:
    texts = source_texts(kernel_of(tmp_path, SAMPLE))
    functions = {"", ".sample.default", ".sample.helper", ".sample.kernel:default", ".sample.kernel:helper"}
    assert set(texts) == functions | {".sample.default=0", ".sample.helper:FACTOR"}


def test_the_digest_covers_which_function_a_name_is(tmp_path: Path) -> None:
    text = SAMPLE.replace("default(helper(x))", "default(first(second(x)))")
    forward, reverse = (
        ("\ndef kernel", "\nfirst, second = helper, other\ndef kernel"),
        ("\ndef kernel", "\nfirst, second = other, helper\ndef kernel"),
    )
    assert digest(tmp_path, text.replace(*forward)) != digest(tmp_path, text.replace(*reverse))


def test_two_functions_of_one_name_have_no_digest(tmp_path: Path) -> None:
    made = "\ndef make(n):\n    def inner(x):\n        return x + n\n    return inner\n\nfirst, second = make(3), make(5)\ndef kernel"
    with pytest.raises(NoDigest, match="expected one function of this name"):
        digest(tmp_path, SAMPLE.replace("default(helper(x))", "first(second(x))").replace("\ndef kernel", made))


@pytest.mark.parametrize("factor", ["3", "5"])
def test_the_digest_covers_constants_of_decorated_functions(tmp_path: Path, factor: str) -> None:
    wrap = "\nimport functools\ndef wrap(f):\n    return functools.wraps(f)(lambda *a: f(*a))\n\n@wrap\ndef helper"
    texts = source_texts(
        kernel_of(tmp_path, SAMPLE.replace("\ndef helper", wrap).replace("FACTOR = 3", f"FACTOR = {factor}"), jit=("kernel",))
    )
    assert texts[".sample.helper:FACTOR"] == factor


def test_an_object_without_text_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(NoDigest, match="expected a number"):
        digest(tmp_path, SAMPLE.replace("FACTOR = 3", "FACTOR = object()"))


def test_the_digest_covers_the_statements_that_choose_a_function_of_gluon() -> None:
    assert importlib.import_module("longspan._kernels.hopper.gluon_names")
    by_name = source_digest_module._definitions()
    assert '_first(gl, "barrier", "thread_barrier")' in by_name["barrier"] and "tma" not in by_name["barrier"]
    assert all(part in by_name["tma_add"] for part in ('_first(tma, "async_atomic_add")', "create_async_tma_reduce", "def _first("))


def source(function: Any, **changed: Any) -> Any:
    """What Triton compiles."""
    known = {"signature": {"x": "*bf16", "n": "i32"}, "constants": {(2,): 64}, "attrs": {(0,): [["tt.divisibility", 16]], (1,): []}}
    return SimpleNamespace(fn=function, name="sample", **{**known, **changed})


def test_a_key_depends_on_types_constants_alignment_options_and_target(tmp_path: Path) -> None:
    function = kernel_of(tmp_path, SAMPLE)
    variants = [
        (source(function), TARGET, OPTIONS),
        (source(function, signature={"x": "*fp16", "n": "i32"}), TARGET, OPTIONS),
        (source(function, constants={(2,): 128}), TARGET, OPTIONS),
        (source(function, constants={(2,): None}), TARGET, OPTIONS),
        (source(function, attrs={}), TARGET, OPTIONS),
        (source(function), GPUTarget("cuda", 100, 32), OPTIONS),
        (source(function), TARGET, {**OPTIONS, "maxnreg": 240}),
    ]
    assert len({prebuilt.kernel_key(*variant) for variant in variants}) == len(variants)


def test_a_key_does_not_depend_on_facts_that_are_empty_or_on_other_options(tmp_path: Path) -> None:
    function = kernel_of(tmp_path, SAMPLE)
    key = prebuilt.kernel_key(source(function), TARGET, OPTIONS)
    assert key == prebuilt.kernel_key(source(function, attrs={(0,): [["tt.divisibility", 16]]}), TARGET, {**OPTIONS, "extern_libs": "/x"})


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A folder with the kernel of one source, and Triton's cache, in tmp_path; a function that looks the kernel up."""
    (tmp_path / "prebuilt").mkdir()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setattr(prebuilt, "_prebuilt_sources", prebuilt._prebuilt_sources.__wrapped__)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    one = source(kernel_of(tmp_path, SAMPLE))
    path = prebuilt.path_of(prebuilt.kernel_key(one, TARGET, OPTIONS))
    path.write_bytes(prebuilt.pack(METADATA, b"\x7fELF a binary", assembler="ptxas 1.2"))
    return lambda: prebuilt.prebuilt_kernel(one, TARGET, OPTIONS)


def test_a_kernel_of_the_package_is_taken_and_put_into_tritons_cache(packed: Callable[[], Any], tmp_path: Path) -> None:
    first = packed()
    assert first.kernel == b"\x7fELF a binary" and first.name == "sample" and first.metadata.shared == 96
    assert first.metadata.assembler == "ptxas 1.2" and not hasattr(first.metadata, "ptx_options")
    assert [path.read_bytes() for path in (tmp_path / "cache").rglob("sample.cubin")] == [first.kernel]
    assert packed().kernel == first.kernel


def test_a_damaged_copy_in_tritons_cache_is_replaced(packed: Callable[[], Any], tmp_path: Path) -> None:
    packed()
    (copy,) = (tmp_path / "cache").rglob("sample.cubin")
    copy.write_bytes(b"\x7fELF a bin")
    assert packed().kernel == copy.read_bytes() == b"\x7fELF a binary"


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: data[:40] + b"\0" + data[41:]])
def test_a_damaged_file_is_compiled_with_a_warning(packed: Callable[[], Any], tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    (path,) = (tmp_path / "prebuilt").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="damaged kernel, compiled instead"):
        assert packed() is None


def test_a_kernel_that_the_package_lacks_is_compiled(packed: Callable[[], Any], tmp_path: Path) -> None:
    (path,) = (tmp_path / "prebuilt").iterdir()
    path.unlink()
    assert packed() is None and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "name",
    [
        "TRITON_ALWAYS_COMPILE",
        "TRITON_KERNEL_DUMP",
        "TRITON_KERNEL_OVERRIDE",
        "DISABLE_PTXAS_OPT",
        "MLIR_ENABLE_DUMP",
        "DISABLE_LLVM_OPT",
        "TRITON_OVERRIDE_ARCH",
    ],
)
def test_variables_of_triton_that_ask_for_a_compilation_get_one(
    packed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert packed() is None


@pytest.mark.parametrize("name", ["PTXAS_OPTIONS", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "USE_IR_LOC"])
def test_variables_with_a_value_too(packed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "ptx")
    assert packed() is None


@pytest.mark.parametrize(("option", "value"), [("debug", True), ("sanitize_overflow", True), ("ir_override", "kernel.ptx")])
def test_options_that_change_the_code_too(
    packed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, option: str, value: Any
) -> None:  # fmt: skip
    monkeypatch.setitem(OPTIONS, option, value)
    assert packed() is None


def test_longspan_prebuilt_0_compiles(packed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function = kernel_of(tmp_path, SAMPLE)
    assert prebuilt.may_be_prebuilt(function, ())
    monkeypatch.setenv("LONGSPAN_PREBUILT", "0")
    assert packed() is None and not prebuilt.may_be_prebuilt(function, ())


def test_a_function_without_source_compiles(packed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(function: Any) -> str:
        raise OSError("could not get source code")

    function = kernel_of(tmp_path, SAMPLE)
    monkeypatch.setattr(prebuilt, "source_digest", fail)
    assert packed() is None and not prebuilt.may_be_prebuilt(function, ())


def test_only_kernels_with_the_functions_of_a_call_may_be_prebuilt(packed: Callable[[], Any], tmp_path: Path) -> None:
    function = kernel_of(tmp_path, SAMPLE)
    assert prebuilt.may_be_prebuilt(function, (5, None)) and not prebuilt.may_be_prebuilt(function, (5, function))


def test_compilation_takes_kernels_of_the_package_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_compile_once", lambda source, target, options: f"compiled {source}")
    monkeypatch.setattr(prebuilt, "prebuilt_kernel", lambda source, target, options: {"known": "taken"}.get(source))
    assert [compilation._take_or_compile(name, TARGET, {}) for name in ("known", "new")] == ["taken", "compiled new"]


FIRST_CALLS = """
import torch, triton, longspan as ls
from longspan.testing import oracle
compiled = []
triton.knobs.compilation.listener = lambda src, cache_hit, **_: compiled.append(src.name)
for dim, heads, tokens in ((64, (8, 2), 1100), (128, (6, 6), 900)):
    for mask in (None, ls.causal(), ls.sliding_window(1024), ls.causal() & ls.documents(lengths=[tokens - 300, 300])):
        sizes = [(1, h, tokens, dim) for h in (heads[0], heads[1], heads[1])]
        q, k, v = (torch.randn(size, dtype=torch.bfloat16, device="cuda", requires_grad=True) for size in sizes)
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        out, expected = ls.attention(q, k, v, mask=mask, kernel="hopper"), oracle(*wide, mask=mask)
        grad = torch.randn_like(out)
        out.backward(grad)
        expected.backward(grad.double())
        for got, right in ((out, expected), *((t.grad, w.grad) for t, w in zip((q, k, v), wide))):
            error = float((got.double() - right).norm() / right.norm())
            assert error < 0.01, (dim, mask, error)
assert bool(compiled) is COMPILES, compiled
"""


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_first_calls_with_and_without_kernels_of_the_package_are_right(tmp_path: Path, compiles: bool) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "LONGSPAN_PREBUILT": "0" if compiles else "1"}
    code = FIRST_CALLS.replace("COMPILES", str(compiles))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
