"""Which calls list their tiles on the device: those of kernels that can, with a mask of the form `selection & rest`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import selected as engine
from longspan._engine.selected import lists_tiles, selects_keys, split_mask
from longspan._masks.algebra import as_mask

CHOICE = torch.zeros(2, 3, 5, 2, dtype=torch.int32)  # 5 rows of 16 queries


def tensors(heads: int = 6) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, heads, 70, 8), torch.zeros(2, 3, 100, 8)


class Intercepting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("installed", [True, False])
def test_kernels_that_select_keys_on_the_device_need_triton_and_tokens(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_triton", lambda: installed)
    q, k = tensors()
    answers = {kernel: selects_keys(q, k, CHOICE, kernel) for kernel in ("auto", "cpu", "dense", "hopper", "triton")}
    assert answers == {kernel: installed and kernel == "triton" for kernel in answers}  # on the CPU, in Triton's interpreter
    for one, other in ((q[:, :, :0], k), (q, k[:, :, :0]), (q.to("meta"), k)):
        assert selects_keys(one, other, CHOICE, "triton") is False
    assert not selects_keys(q, k, CHOICE.to("meta"), "triton")


def test_a_mask_is_split_into_the_choice_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_triton", lambda: True)
    q, k = tensors()
    selection, causal = ls.selected(CHOICE, 16), ls.causal()
    for mask in (selection, selection & ls.full()):
        alone = split_mask(mask, q, k, kernel="triton")
        assert alone is not None and alone.rest is None and alone.fixed
        assert alone.selection.heads_per_choice == 2 and torch.equal(alone.selection.indices, CHOICE)
        assert (alone.selection.granularity, alone.selection.q_granularity) == (16, 16)
    both = split_mask(causal & selection, q, k, kernel="triton")
    assert both is not None and both.rest is causal and both.fixed
    table = torch.ones(100, dtype=torch.bool)
    reading = split_mask(selection & ls.mask_mod(lambda b, h, q, kv: table[kv]), q, k, kernel="triton")
    assert reading is not None and reading.rest is not None and not reading.fixed
    by_head = split_mask(ls.selected(CHOICE.repeat(1, 2, 1, 1), 16), q, k, kernel="triton")
    assert by_head is not None and by_head.selection.heads_per_choice == 1


def test_other_masks_kernels_and_intercepted_calls_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_triton", lambda: True)
    q, k = tensors()
    mask = ls.selected(CHOICE, 16)
    assert split_mask(mask, q, k, kernel="triton") is not None
    for other in (None, ls.causal(), mask | ls.causal(), lambda b, h, i, j: i >= j):
        assert split_mask(other, q, k, kernel="triton") is None
    assert split_mask(mask, q, k, kernel="cpu") is None
    with ls.invariant():
        assert split_mask(mask, q, k, kernel="triton") is None
    with Intercepting():
        assert split_mask(mask, q, k, kernel="triton") is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ls.selected(CHOICE[:, :, :4], 16), "expected 5 rows for 70 queries"),
        (ls.selected(CHOICE[:, :2], 16), r"expected 1, KV heads or query heads as its second dim \(\[1, 3, 6\]\), got 2"),
        (ls.selected(CHOICE + 7, 16), "expected indices from -1 to 6"),
        (ls.selected(CHOICE.repeat(2, 1, 1, 1), 16), "batch"),
    ],
)
def test_a_choice_is_checked_against_the_sizes_of_the_call(mask: ls.Mask, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_triton", lambda: True)
    with pytest.raises(ValueError, match=message):
        split_mask(mask, *tensors(), kernel="triton")
    with pytest.raises(ValueError, match=message):
        split_mask(mask & ls.causal(), *tensors(), kernel="triton")


def test_a_block_mask_lists_its_tiles_in_256_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_triton", lambda: True)
    q, k = tensors()
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 100, device="cpu")
    mask, another = as_mask(block_mask), as_mask(block_mask)
    assert not lists_tiles(ls.causal(), q, k, kernel="triton") and not lists_tiles(mask, q, k, kernel="cpu")
    with ls.invariant():
        assert not lists_tiles(mask, q, k, kernel="triton")
    with Intercepting():
        assert not lists_tiles(mask, q, k, kernel="triton")
    assert [lists_tiles(mask, q, k, kernel="triton") for _ in range(258)] == [True] * 256 + [False] * 2
    assert lists_tiles(another, q, k, kernel="triton")
    monkeypatch.setattr(engine, "is_captured", lambda q: True)  # calls in CUDA graphs are not counted
    assert lists_tiles(mask, q, k, kernel="triton")


@pytest.mark.parametrize("needs", ["q", "k", "v"])
def test_a_call_on_the_device_is_differentiable_by_each_tensor_alone(needs: str) -> None:
    pytest.importorskip("triton")
    inputs = {name: torch.randn(1, 1, 20, 16, requires_grad=name == needs) for name in "qkv"}
    mask = ls.selected(torch.tensor([[[[0, 1], [1, -1]]]]), 16)
    by_kernel = []
    for kernel in ("triton", "cpu"):
        out = ls.attention(*inputs.values(), mask=mask, kernel=kernel)
        by_kernel.append(torch.autograd.grad(out.sin().sum(), inputs[needs])[0])
    torch.testing.assert_close(*by_kernel)
