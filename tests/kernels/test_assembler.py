"""The assembler: never one that leaves descriptors unset, and never code that the driver cannot load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu import assembler

TARGET = SimpleNamespace(backend="cuda", arch=90)


def tool(version: str) -> Any:
    return SimpleNamespace(version=version, path=f"ptxas {version}")


@pytest.fixture(autouse=True)
def no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)


def given(monkeypatch: pytest.MonkeyPatch, own: str, blackwell: str | None, driver: int, ptxas: str | None = None) -> None:
    """Triton with this choice of assembler and these two, and a driver of this version of CUDA."""
    both = {"ptxas_blackwell": blackwell, "ptxas": ptxas}
    monkeypatch.setattr(assembler.nvidia_compiler, "get_ptxas", lambda arch: tool(own))
    monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=SimpleNamespace(**{name: tool(v) for name, v in both.items() if v})))
    monkeypatch.setattr(assembler, "_driver_major", lambda: driver)


@pytest.mark.parametrize(
    ("own", "blackwell", "driver", "taken"),
    [
        ("12.8", "12.9", 12, "12.9"), ("12.8", "12.9", 0, "12.9"), ("12.8", "13.1", 13, "13.1"), ("12.8", "13.1", 12, "12.8"),
        ("12.9", "13.1", 13, "12.9"), ("13.0", None, 13, "13.0"), ("12.8", None, 13, "12.8"), ("12.8", "12.8", 12, "12.8"),
    ],
)  # fmt: skip
def test_the_first_assembler_without_the_fault_that_the_driver_supports(
    own: str, blackwell: str | None, driver: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, own, blackwell, driver)
    assert assembler.version(TARGET) == taken


@pytest.mark.parametrize(
    ("own", "ptxas", "arch", "taken"),
    [
        ("13.4", "12.9", 90, "12.9"), ("13.3", "13.1", 90, "13.1"), ("13.1", "12.9", 90, "13.1"), ("13.4", "12.8", 90, "13.4"),
        ("13.5", "13.4", 90, "13.5"), ("13.4", None, 90, "13.4"), ("13.4", "12.9", 100, "13.4"), ("13.4", "12.9", 120, "13.4"),
    ],
)  # fmt: skip
def test_hopper_gets_the_assembler_that_spills_less(
    own: str, ptxas: str | None, arch: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, own, own, 13, ptxas)
    assert assembler.version(SimpleNamespace(backend="cuda", arch=arch)) == taken
    assembler.use_right_assembler.__wrapped__(lambda: True)
    assert assembler.nvidia_compiler.get_ptxas(arch).version == taken


def test_the_users_assembler_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "12.8", "12.9", 12)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/opt/ptxas")
    assert assembler.version(TARGET) == "12.9"
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert assembler.version(TARGET) == "12.8"
    given(monkeypatch, "13.4", "13.4", 13, "12.9")
    assert assembler.version(TARGET) == "13.4"
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH")
    assert assembler.version(TARGET) == "12.9"


def test_triton_kernels_are_optimized_less_if_there_is_no_other_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, gluon = (SimpleNamespace(fn=SimpleNamespace(is_gluon=lambda answer=answer: answer)) for answer in (False, True))
    given(monkeypatch, "12.8", "13.1", 12)
    assert assembler.options_for(triton, TARGET, {"num_warps": 4}) == {"num_warps": 4, "ptx_options": "--opt-level 1"}
    assert assembler.options_for(triton, TARGET, {"ptx_options": "-v"}) == {"ptx_options": "-v --opt-level 1"}
    assert assembler.options_for(gluon, TARGET, {"num_warps": 4}) == {"num_warps": 4}
    given(monkeypatch, "12.8", "12.9", 12)
    assert assembler.options_for(triton, TARGET, None) is None


def test_only_kernels_that_are_compiled_here_get_another_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "12.8", "12.9", 12)
    here = [False]
    assembler.use_right_assembler.__wrapped__(lambda: here[0])
    get = assembler.nvidia_compiler.get_ptxas
    assert get(90).version == "12.8"
    here[0] = True
    assert get(90).version == "12.9"


def test_other_gpus_and_other_tritons_have_no_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "12.8", "12.9", 12)
    source: Any = SimpleNamespace(fn=SimpleNamespace(is_gluon=lambda: False))
    amd = SimpleNamespace(backend="hip", arch="gfx942")
    assert assembler.tool(amd) is None and assembler.version(amd) == "" and assembler.options_for(source, amd, None) is None
    assert assembler.tool(TARGET).path == "ptxas 12.9"
    monkeypatch.delattr(assembler.nvidia_compiler, "get_ptxas")
    assert assembler.version(TARGET) == "" and assembler.options_for(source, TARGET, {"num_warps": 4}) == {"num_warps": 4}
    assembler.use_right_assembler.__wrapped__(lambda: True)
    assert not hasattr(assembler.nvidia_compiler, "get_ptxas")


@pytest.mark.parametrize(("reported", "major"), [(12080, 12), (13010, 13), (11999, 11), (None, 0)])
def test_the_version_of_the_driver(reported: int | None, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> Any:
        if reported is None:
            raise OSError(name)
        return SimpleNamespace(cuDriverGetVersion=lambda at: setattr(at._obj, "value", reported))

    monkeypatch.setattr(assembler.ctypes, "CDLL", library)
    assert assembler._driver_major.__wrapped__() == major


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "value_dim", "last"), [(192, 16, False), (64, 192, True), (192, 192, True)])
def test_rows_beside_a_nan_are_right_if_keys_and_values_have_different_layouts(dim: int, value_dim: int, last: bool) -> None:
    """ptxas 12.8 took the descriptor of values from an unset register in the loops that are repeated because of a NaN."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 259, d, device="cuda", dtype=torch.bfloat16) for d in (dim, dim, value_dim, value_dim))
    q[0, 1, 82] = torch.nan
    v[1, 2, 258] = torch.inf  # one row sees it
    if last:
        v = v.mT.contiguous().mT
    results = []
    for kernel in ("triton", "dense"):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = ls.attention(*inputs, mask=ls.causal(), kernel=kernel)
        results.append([out.detach(), torch.autograd.grad(out, inputs, grad)[0]])
    seen = torch.ones(2, 3, 259, dtype=torch.bool, device="cuda")
    seen[0, 1, 82] = seen[1, 2, 258] = False
    for got, want in zip(*results, strict=True):
        assert torch.isfinite(got[seen]).all()
        assert float((got - want)[seen].abs().max()) < 0.05 * float(want[seen].abs().max())
