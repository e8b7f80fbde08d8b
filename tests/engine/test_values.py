"""Lists of gradients: fake implementations of operators return the shapes of the real ones."""

from __future__ import annotations

import pytest
import torch

from longspan._engine.values import empty_flat_grads


@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_are_those_of_inputs_a_sink_and_captured_tensors_that_need_one(with_sink: bool, needs: tuple[bool, bool]) -> None:
    q, k, v, sink = torch.empty(2, 6, 5, 8), torch.empty(2, 3, 7, 8), torch.empty(2, 3, 7, 4), torch.empty(6)
    captured = [torch.empty(9, dtype=torch.float64), torch.empty(11)]
    grads = empty_flat_grads(q, k, v, sink if with_sink else None, captured, needs)
    want = [q, k, v, *([sink] if with_sink else []), *(t for t, need in zip(captured, needs, strict=True) if need)]
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in want]
