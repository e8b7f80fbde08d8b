"""The operator against the float64 oracle, over masks, score mods, heads, dims and lengths, in every kernel."""

from __future__ import annotations

import pytest
import torch
from tests.cases import LENGTHS, Case, check_against_oracle, covering_sample, whole_grid

# Every pair of mask and heads, mask and dims, score and heads, score and dims, heads and dims. Cases after the first 30 add pairs of masks
# with score mods and lengths; each would compile kernels of its own. `python -m tests.fuzz --device cuda` has such pairs.
ON_GPU = covering_sample(whole_grid())[:30]
MEDIUM = covering_sample(whole_grid(lengths=(1, 7, 128, 300, 650)))  # 650: five whole tiles and a part of one
SHORT = covering_sample(whole_grid(lengths=(1, 7, 128, 150)))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
OTHERS = (torch.bfloat16, torch.float16, torch.float64)
TINY = [c for c in covering_sample(whole_grid(lengths=(1, 7, 40, 130))) if c.dims == "64" or c.length < 100]


# The dense kernel has no tiles: 650 tokens are to it what 300 are.
CASES = [(c, kernel) for c in MEDIUM for kernel in ("dense", "cpu") if kernel == "cpu" or c.length < 650]


@pytest.mark.parametrize(("case", "kernel"), CASES, ids=str)
def test_equals_the_oracle_in_float32(case: Case, kernel: str) -> None:
    check_against_oracle(case, kernel, torch.float32, batch=1 if case.length == 650 else 2)


@pytest.mark.parametrize("kernel", ["dense", "cpu"])
@pytest.mark.parametrize(("case", "dtype"), [(c, OTHERS[i % 3]) for i, c in enumerate(SHORT)], ids=str)
def test_equals_the_oracle_in_other_dtypes(case: Case, kernel: str, dtype: torch.dtype) -> None:
    check_against_oracle(case, kernel, dtype, through_lse=True, batch=1 if case.length == 150 else 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton compiles; see the test on the GPU")
@pytest.mark.parametrize("case", TINY[::6], ids=str)
def test_triton_equals_the_oracle_in_the_interpreter(case: Case) -> None:
    pytest.importorskip("triton")
    check_against_oracle(case, "triton", torch.float32, through_lse=case.length % 2 == 1, batch=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), [(c, DTYPES[i % 3]) for i, c in enumerate(ON_GPU)], ids=str)
def test_triton_equals_the_oracle_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    check_against_oracle(case, "triton", dtype, "cuda", through_lse=case.length % 2 == 1)


HALF = [(c, DTYPES[0 if i % 3 else 2]) for i, c in enumerate(ON_GPU)]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), HALF, ids=str)
def test_hopper_equals_the_oracle_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    check_against_oracle(case, "hopper", dtype, "cuda", through_lse=case.length % 2 == 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The whole grids are thousands of cases: they are generated on request only."""
    if "any_case" in metafunc.fixturenames:
        lengths = (1, 7, 128, 300) if "triton" in metafunc.function.__name__ else LENGTHS
        # Lengths and heads first, of which kernels do not know: a process of `--part I/15` compiles what no other does.
        cases = sorted(whole_grid(lengths), key=lambda c: (c.length, c.heads)) if metafunc.config.getoption("--whole-grid") else []
        metafunc.parametrize("any_case", cases, ids=str)


@pytest.mark.parametrize("kernel", ["dense", "cpu"])
def test_the_whole_grid(any_case: Case, kernel: str) -> None:
    check_against_oracle(any_case, kernel, torch.float32)


def test_the_whole_grid_in_triton(any_case: Case) -> None:
    if not torch.cuda.is_available():  # the interpreter rounds bfloat16 its own way
        check_against_oracle(any_case, "triton", torch.float32, batch=1)
        return
    dtype = {"64": torch.float32, "128": torch.bfloat16, "192/128": torch.float16}[any_case.dims]
    check_against_oracle(any_case, "triton", dtype, "cuda", batch=1)
