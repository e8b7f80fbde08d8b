"""The work of a call on one device: tiles in the kernel's block size, and the dtypes of its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._engine import one_device
from longspan._engine.ops import specs
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.registry import NotSupported

CAUSAL = ls.causal().traced


def inputs_of(dtype: torch.dtype = torch.float32, **more: Any) -> CallTensors:
    q, k, v = (torch.randn(1, h, n, d).to(dtype) for h, n, d in ((4, 70, 8), (2, 90, 8), (2, 90, 5)))
    return CallTensors(q=q, k=k, v=v, **({"sink": None, "mask_captured": [], "score_captured": []} | more))


OPTIONS = CallOptions(spec=specs.of(CAUSAL.program, None, "cpu"), scale=0.5)


@pytest.mark.parametrize("block", [(64, 32), (32, 64), (128, 128)])
def test_work_is_in_tiles_of_the_kernels_block(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(name="cpu", block_size=lambda inputs, table: block)
    monkeypatch.setattr(one_device, "_pass_kernel", lambda name, call, *, decodes: kernel)
    chosen, work = one_device.kernel_and_work(inputs_of(), OPTIONS, backward=False)
    assert chosen is kernel and (work.table.block, work.q_tiles.block, work.kv_tiles.block) == (block, *block)
    assert (work.q_tiles.length, work.kv_tiles.length) == (70, 90)
    rows, columns = -(-70 // block[0]), -(-90 // block[1])
    assert tuple(work.table.to_dense().shape[-2:]) == (rows, columns)


def test_a_kernel_without_static_masks_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(name="dense", block_size=lambda inputs, table: (128, 128))
    monkeypatch.setattr(one_device, "_pass_kernel", lambda name, call, *, decodes: kernel)
    one_device.kernel_and_work(inputs_of(), OPTIONS, backward=False)
    tables = object.__new__(one_device.StaticTables)
    monkeypatch.setattr(one_device, "mask_tables", lambda inputs, options: tables)
    plain = one_device.make_work(
        inputs_of(), OPTIONS, one_device._tables.tables(CAUSAL.program, [], 70, 90, batch=1, heads=4), backward=False
    )
    monkeypatch.setattr(one_device, "make_work", lambda *_, **__: plain)
    with pytest.raises(NotSupported, match="kernel 'dense' does not support StaticMask: expected one of '"):
        one_device.kernel_and_work(inputs_of(), OPTIONS, backward=False)


@pytest.mark.parametrize(("change", "decodes"), [("", True), ("backward", False), ("sink", False), ("max scores", False)])
def test_forward_passes_without_a_sink_and_max_scores_may_decode(change: str, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    kernel = SimpleNamespace(name="cpu", block_size=lambda inputs, table: (128, 128))
    monkeypatch.setattr(one_device, "_pass_kernel", lambda name, call, *, decodes: (asked.append(decodes), kernel)[1])
    options = CallOptions(spec=OPTIONS.spec, scale=0.5, max_scores=change == "max scores")
    sink: dict[str, Tensor] = {"sink": torch.zeros(4)} if change == "sink" else {}
    one_device.kernel_and_work(inputs_of(**sink), options, backward=change == "backward")
    assert asked == [decodes]


def test_results_have_the_dtypes_of_the_call() -> None:
    inputs = inputs_of(torch.bfloat16)
    state = one_device.forward(inputs, OPTIONS)
    assert (state.out.dtype, state.lse.dtype, state.max_scores) == (torch.bfloat16, torch.float32, None)
    tensors = BackwardTensors(inputs=inputs, out=state.out, lse=state.lse, grad_out=torch.ones_like(state.out), grad_lse=None, needs=())
    grads, grad_sink = one_device.backward(tensors, OPTIONS)
    assert (grads.q.dtype, grads.k.dtype, grads.v.dtype, grad_sink) == (torch.bfloat16, torch.bfloat16, torch.bfloat16, None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "triton"),
        ({"name": "cpu"}, "chosen"),
        ({"decodes": False}, "chosen"),
        ({"cuda": False}, "chosen"),
        ({"installed": False}, "chosen"),
        ({"few": False}, "chosen"),
        ({"unsupported": "a reason"}, "chosen"),
    ],
    ids=str,
)
def test_few_queries_on_a_gpu_take_the_decode_kernel_if_none_is_named(
    change: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"name": "auto", "decodes": True, "cuda": True, "installed": True, "few": True, "unsupported": None} | change
    capabilities = SimpleNamespace(unsupported=given["unsupported"])
    monkeypatch.setattr(one_device, "has_triton", lambda: given["installed"])
    monkeypatch.setattr(one_device, "is_decoding", lambda inputs, work: given["few"])
    monkeypatch.setattr(one_device, "kernel_named", lambda name: SimpleNamespace(name=name, capabilities=lambda inputs, work: capabilities))
    monkeypatch.setattr(one_device, "choose", lambda name, calls: SimpleNamespace(kernel=SimpleNamespace(name="chosen")))
    inputs: Any = SimpleNamespace(q=SimpleNamespace(is_cuda=given["cuda"]))
    call: Any = one_device.KernelCall(inputs, SimpleNamespace())  # type: ignore[arg-type]
    assert one_device._pass_kernel(given["name"], call, decodes=given["decodes"]).name == name
