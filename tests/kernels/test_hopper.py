"""The Hopper kernels without a Hopper GPU: they compile, and reject calls with a reason. Their results are tested on a GPU, here and in
`tests/engine/test_oracle_grid.py` and `test_staged_attention.py`.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.scripts import run_hopper_script
from torch import Tensor

import longspan as ls
from longspan._kernels import registry
from longspan._kernels.registry import NotSupported
from longspan.testing import oracle


@pytest.mark.long
def test_the_kernels_compile_for_hopper_without_one(pytestconfig: pytest.Config) -> None:
    run_hopper_script("hopper_compile.py", pytestconfig)


def test_another_device_raises_with_the_reason() -> None:
    pytest.importorskip("triton.experimental.gluon")
    q = torch.randn(1, 2, 130, 64)
    with pytest.raises(NotSupported, match=r"'hopper' does not support this call.*(interpreter|expected a Hopper GPU)"):
        ls.attention(q, q, q, mask=ls.causal(), kernel="hopper")


def test_a_hopper_gpu_with_a_triton_that_was_not_tested_is_told_once_what_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from longspan._kernels.gpu import interpreter
    from longspan._kernels.hopper import kernel

    device = torch.device("cpu")
    monkeypatch.setattr(registry, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(interpreter, "interpreted", lambda: False)
    for tested in kernel.TESTED_TRITON:
        monkeypatch.setattr(kernel, "triton_version", lambda tested=tested: tested)
        assert registry.first_candidate(device) == "hopper"
    monkeypatch.setattr(kernel, "triton_version", lambda: (3, 8))
    with pytest.warns(UserWarning, match=r"uses 'triton' on this Hopper GPU.*passed with 3\.6, 3\.7, 3\.9 only; kernel='hopper' uses it"):
        assert registry.first_candidate(device) == "triton"
    assert kernel.unsupported_triton() is None
    monkeypatch.setattr(kernel, "triton_version", lambda: (3, 99))
    with pytest.warns(UserWarning, match=r"uses 'triton' on this Hopper GPU.*Triton 3\.99: expected 3\.6 to 3\.9"):
        assert registry.first_candidate(device) == "triton"
    assert registry.first_candidate(device) == "triton"  # warnings are errors here
    monkeypatch.setattr(registry, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(kernel, "triton_version", lambda: (3, 98))
    assert registry.first_candidate(device) == "triton"


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [256, 192, 128, 96, 64])
def test_tables_by_query_by_key_by_both_and_one_number_get_their_gradients(dim: int) -> None:
    on_hopper()
    torch.manual_seed(0)
    tables = [torch.randn(n, device="cuda", requires_grad=True) for n in (300, 300, 600, 1)]

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # What is added to a whole row changes nothing: the table by query is a factor.
        return s * (tables[3][0] + tables[0][q]) + 2 * tables[1][kv] + tables[2][q - kv + 300]

    given = [torch.randn(2, h, 300, dim, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
    grad = torch.randn(2, 4, 300, dim, device="cuda")

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, tables, grad.to(out.dtype))

    got = gradients(ls.attention(*given, mask=ls.causal(), score_mod=score, kernel="hopper"))
    want, dense = (gradients(oracle(*given, mask=ls.causal(), score_mod=score, dtype=d)) for d in (torch.float64, torch.bfloat16))
    for a, b, c in zip(got[:3], want[:3], dense[:3], strict=True):
        assert float((a.double() - b).norm()) <= 2 * float((c.double() - b).norm())
    # One number, the sum of all: its error is one draw of many roundings, which are as large as those of the table by query.
    assert float((got[3] - want[3]).abs()) <= 3 * float((dense[0].double() - want[0]).norm())


@pytest.mark.gpu
def test_a_query_whose_head_dim_is_not_innermost_and_outputs_that_follow_it() -> None:
    on_hopper()
    q = torch.randn(1, 2, 64, 300, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    k, v = torch.randn(2, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    out = ls.attention(q, k, v, mask=ls.causal(), kernel="hopper")
    want = oracle(q, k, v, mask=ls.causal())
    assert out.stride() == q.stride() and float((out.double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (192, 128), (128, 192), (160, 112), (72, 200), (128, 64), (64, 128), (256, 64)])
def test_wide_and_different_head_dims_match_the_oracle(dims: tuple[int, int], dtype: torch.dtype) -> None:
    on_hopper()
    torch.manual_seed(0)
    slopes = torch.rand(4, device="cuda")

    def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return 20 * torch.tanh(s / 20) + slopes[h] * (kv - q) / 64

    for length, heads, mask, score in ((517, (4, 2), ls.causal(), None), (300, (2, 2), ls.causal() & ls.documents([9, 90, 201]), softcap)):
        q, k, v = (
            torch.randn(2, h, length, d, device="cuda", dtype=dtype, requires_grad=True)
            for h, d in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
        )
        grad = torch.randn(2, heads[0], length, dims[1], device="cuda", dtype=dtype)

        def results(out: Tensor, given: tuple[Tensor, ...] = (q, k, v), grad: Tensor = grad) -> list[Tensor]:
            return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]

        got = results(ls.attention(q, k, v, mask=mask, score_mod=score, kernel="hopper"))
        want, dense = (results(oracle(q, k, v, mask=mask, score_mod=score, dtype=d)) for d in (torch.float64, dtype))
        for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, want, dense, strict=True):
            assert float((a.double() - b).norm()) <= 1.5 * float((c.double() - b).norm()), name


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 16], ids=["split", "whole"])  # few items are split along KV
def test_a_row_that_sees_a_nan_has_lse_nan(heads: int) -> None:
    q, k, v = (torch.randn(1, heads, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    k[:, :, 1000] = torch.nan
    _, lse = ls.attention(q, k, v, mask=ls.causal(), kernel="hopper", return_lse=True)
    assert torch.equal(lse.isnan(), (torch.arange(2048, device="cuda") >= 1000).expand_as(lse))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [68, 100, 101, 129, 196])  # no multiple of 64; rows past the end would be the next head's
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_a_nan_in_a_gradient_stays_in_its_head(length: int, dims: tuple[int, int], deterministic: bool) -> None:
    on_hopper()
    torch.manual_seed(0)
    given = [torch.randn(2, 3, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
             for n, d in ((length, dims[0]), (300, dims[0]), (300, dims[1]))]  # fmt: skip
    grad = torch.randn(2, 3, length, dims[1], device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        out = ls.attention(*given, mask=ls.full(), kernel="hopper")
        want = torch.autograd.grad(out, given, grad, retain_graph=True)
        grad[0, 1, 0], grad[1, 0, 3] = torch.nan, torch.inf
        got = torch.autograd.grad(out, given, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        for batch, head in ((0, 0), (0, 2), (1, 1), (1, 2)):
            torch.testing.assert_close(a[batch, head], b[batch, head], rtol=2e-2, atol=2e-2, msg=f"{name} of head {batch, head}")
        assert not a[0, 1].isfinite().all() and not a[1, 0].isfinite().all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (192, 128)])
def test_in_fixed_order_every_run_gives_the_same_bits(dims: tuple[int, int]) -> None:
    on_hopper()
    sizes = (8, dims[0]), (2, dims[0]), (2, dims[1])
    given = [torch.randn(1, h, 1000, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h, d in sizes]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out = ls.attention(*given, mask=ls.causal(), kernel="hopper")
        runs = [torch.autograd.grad(out.sum(), given, retain_graph=True) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [(torch.float32, 64, "expected bfloat16 or float16"), (torch.bfloat16, 44, "multiples of 8")],
    ids=["float32", "odd dim"],
)
def test_what_it_cannot_do_raises_and_auto_does_it(dtype: torch.dtype, dim: int, reason: str) -> None:
    on_hopper()
    q = torch.randn(1, 2, 130, dim, device="cuda", dtype=dtype)
    with pytest.raises(NotSupported, match=reason):
        ls.attention(q, q, q, mask=ls.causal(), kernel="hopper")
    assert ls.attention(q, q, q, mask=ls.causal()).isfinite().all()
