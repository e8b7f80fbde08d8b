"""Records of compiled kernels: a kernel of another source, Triton or check is compiled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels import compiled_record
from tests.kernels.compiled_record import Record, is_recorded, parameter_bytes

from longspan._kernels.gpu.source_digest import NoDigest

PTX = ".visible .entry sample(\n.param .u64 .ptr .global .align 16 sample_param_0,\n.param .align 64 .b8 sample_param_1[128]\n) {"


class Compiled:
    """What Triton returns."""

    def __init__(self, source: Any, **_: Any) -> None:
        if not hasattr(source, "key"):
            raise SyntaxError("not compiled")
        self.asm, self.metadata = {"ptx": PTX}, SimpleNamespace(shared=96, tensordesc_meta=None)


def source(key: str) -> Any:
    return SimpleNamespace(name="sample", key=key)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script whose record has the kernels "one" and "two"."""

    def key(of: Any, target: Any, options: dict[str, Any]) -> str:
        if of.key == "no digest":
            raise NoDigest("a constant")
        return f"{of.key} {target} {options['num_warps']}"

    monkeypatch.setattr(compiled_record, "HERE", tmp_path)
    monkeypatch.setattr(compiled_record, "kernel_key", key)
    path = tmp_path / "sample_compile.py"
    path.write_text("check()")
    monkeypatch.setattr(sys, "argv", ["", "--record"])
    record = Record(str(path))
    for name in ("two", "one"):
        assert not is_recorded(record.take_or_compile(Compiled, source(name), 90, {"num_warps": 4}))
    record.save()
    monkeypatch.setattr(sys, "argv", [""])
    return path


def take(script: Path, key: str = "one", warps: int = 4) -> Any:
    return Record(str(script)).take_or_compile(Compiled, source(key), 90, {"num_warps": warps})


def test_a_kernel_of_the_record_is_not_compiled(script: Path) -> None:
    kernel = take(script)
    assert is_recorded(kernel) and kernel.metadata.shared == 96 and kernel.hash == "one 90 4" and kernel.src.name == "sample"
    assert parameter_bytes(kernel) == parameter_bytes(Compiled(source("one"))) == [8, 128]


@pytest.mark.parametrize(("key", "warps"), [("three", 4), ("one", 8), ("no digest", 4)])
def test_other_kernels_are_compiled(script: Path, key: str, warps: int) -> None:
    assert not is_recorded(take(script, key, warps))


def test_another_text_of_the_script_compiles(script: Path) -> None:
    script.write_text("check_more()")
    assert not is_recorded(take(script))


def test_another_triton_compiles(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_record.triton, "__version__", "3.99")
    assert not is_recorded(take(script))


def test_anew_compiles(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--anew"])
    assert not is_recorded(take(script))


def test_an_error_of_the_compiler_is_not_recorded(script: Path) -> None:
    record = Record(str(script))
    with pytest.raises(SyntaxError):
        record.take_or_compile(lambda source, **_: Compiled(None), source("wrong"), 90, {"num_warps": 4})
    assert not record.used


def test_record_drops_kernels_that_were_not_used(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(str(script))
    record.take_or_compile(Compiled, source("one"), 90, {"num_warps": 4})
    record.save()
    assert set(json.loads(record.path.read_text())["kernels"]) == {"one 90 4", "two 90 4"}
    monkeypatch.setattr(sys, "argv", ["", "--record"])
    record.save()
    assert set(json.loads(record.path.read_text())["kernels"]) == {"one 90 4"}
