"""Lists of gradients: fake implementations of operators return the shapes of the real ones."""

from __future__ import annotations

import pytest
import torch

from longspan._engine.values import BackwardTensors, CallTensors, InputGrads, empty_flat_grads
from longspan._kernels.protocol import Grads


@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_are_those_of_inputs_a_sink_and_captured_tensors_that_need_one(with_sink: bool, needs: tuple[bool, bool]) -> None:
    q, k, v, sink = torch.empty(2, 6, 5, 8), torch.empty(2, 3, 7, 8), torch.empty(2, 3, 7, 4), torch.empty(6)
    captured = [torch.empty(9, dtype=torch.float64), torch.empty(11)]
    grads = empty_flat_grads(q, k, v, sink if with_sink else None, captured, needs)
    want = [q, k, v, *([sink] if with_sink else []), *(t for t, need in zip(captured, needs, strict=True) if need)]
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_flat_gradients_have_the_dtypes_of_their_tensors_and_known_strides(with_sink: bool, strided: bool) -> None:
    turned = lambda *shape: torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    q, k, v, sink = turned(2, 6, 5, 8), torch.randn(2, 3, 7, 8), turned(2, 3, 7, 4), torch.randn(6).half()
    captured = [torch.randn(9, dtype=torch.float64), torch.randn(11), torch.randn(4, 3).half()]
    inputs = CallTensors(q=q, k=k, v=v, sink=sink if with_sink else None, score_captured=captured)
    tensors = BackwardTensors(inputs=inputs, out=q, lse=q, grad_out=q, grad_lse=None, needs=(True, False, True))
    given = [turned(2, 6, 5, 8), turned(2, 3, 7, 8), torch.randn(2, 3, 7, 4)]
    grads = [torch.randn(9), None, torch.randn(3, 4).T]
    flat = tensors.flat_grads(Grads(q=given[0], k=given[1], v=given[2], captured=grads), torch.randn(12)[::2], strided=strided)
    assert all(torch.equal(a, b) for a, b in zip(flat, given, strict=False))
    assert [g.is_contiguous() for g in flat] == [not strided, True, True] + [True] * (with_sink + 2)
    assert strided == (flat[0].stride() == q.stride())
    assert [g.dtype for g in flat[3:]] == [*[torch.float16] * with_sink, torch.float64, torch.float16]
    named = InputGrads.of(flat, inputs.sink, tensors.needs)
    assert named.q is flat[0] and named.k is flat[1] and named.v is flat[2] and (named.sink is None) == (not with_sink)
    assert [g is None for g in named.captured] == [False, True, False] and named.captured[2] is flat[-1]
    assert [t is x for t, x in zip(inputs.differentiable, [q, k, v, *([sink] if with_sink else []), *captured], strict=True)]
