"""Running max of hopper's forward kernels: it follows the scores only if they grow by much. Needs a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.test_hopper import on_hopper
from torch import Tensor

import longspan as ls
from longspan._masks.algebra import Mask
from longspan.testing import oracle

pytest.importorskip("triton.experimental.gluon")
pytestmark = pytest.mark.gpu

LEVELS: dict[str, Callable[[Tensor], Tensor]] = {  # base-2 logarithm of what multiplies the weight of key i
    "growing": lambda i: i / 12,
    "falling": lambda i: -i / 12,
    "one step over all floats": lambda i: torch.where(i < 700, -300.0, 300.0),
    "single keys": lambda i: torch.where(i % 97 == 5, 200.0 * torch.sin(i), 0.0),
    "just below and above the limit": lambda i: (i // 128) * 9.9 + (i % 128 == 77) * 1.5,
}


def leveled(name: str, dims: tuple[int, int], dtype: torch.dtype, length: int) -> list[Tensor]:
    """q, k and v whose scores of key i are higher by LEVELS[name](i)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, length, d, device="cuda") for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    i = torch.arange(length, device="cuda", dtype=torch.float32)
    q[..., 0], k[..., 0] = 8.0, LEVELS[name](i) * dims[0] ** 0.5 / 8 * 0.6931
    return [t.to(dtype) for t in (q, k, v)]


def match_the_oracle(name: str, dims: tuple[int, int], mask: Mask, dtype: torch.dtype, length: int) -> None:
    """Assert that out and lse are right, within the error of a dense computation in the same dtype."""
    q, k, v = leveled(name, dims, dtype, length)
    out, lse = ls.attention(q, k, v, mask=mask, kernel="hopper", return_lse=True)
    want, want_lse = oracle(q, k, v, mask=mask, return_lse=True)
    dense = oracle(q, k, v, mask=mask, dtype=dtype)
    assert float((out.double() - want).norm()) <= 1.5 * float((dense.double() - want).norm()) + 1e-6
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_scores_that_grow_and_fall_match_the_oracle(name: str, dims: tuple[int, int]) -> None:
    on_hopper()
    for mask, dtype in ((ls.causal(), torch.bfloat16), (ls.full(), torch.float16), (ls.documents([300, 77, 1034]), torch.bfloat16)):
        match_the_oracle(name, dims, mask, dtype, 1411)


@pytest.mark.parametrize(("turns", "length"), [(False, 1283), (True, 1155)])
def test_three_warp_groups_match_the_oracle(turns: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper()
    monkeypatch.setattr("longspan._kernels.hopper.passes.takes_three_groups", lambda **sizes: True)
    monkeypatch.setattr("longspan._kernels.hopper.passes.takes_turns", lambda **sizes: turns)
    gaps = ls.mask_mod(lambda b, h, q, kv: (q // 200) % 3 == (kv // 150) % 3)
    for name, mask in (("growing", ls.causal()), ("single keys", gaps), ("one step over all floats", ls.full())):
        match_the_oracle(name, (64, 64), mask, torch.bfloat16, length)


def test_a_row_whose_max_grows_changes_no_bit_of_other_rows() -> None:
    on_hopper()
    q, k, v = leveled("falling", (128, 128), torch.bfloat16, 1549)
    before = ls.attention(q, k, v, mask=ls.full(), kernel="hopper")
    changed = torch.arange(3, 1549, 19, device="cuda")
    q[:, :, changed, 0] *= -1
    after = ls.attention(q, k, v, mask=ls.full(), kernel="hopper")
    others = torch.ones(1549, dtype=torch.bool, device="cuda")
    others[changed] = False
    assert torch.equal(before[:, :, others], after[:, :, others]) and not torch.equal(before, after)
