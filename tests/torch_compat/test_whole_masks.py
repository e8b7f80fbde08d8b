"""FlexAttention with a BlockMask over the whole sequence, which `_ContextParallel` gives the KV of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from longspan.torch_compat import _attention as tc


@pytest.mark.parametrize("positional", [3, 4, 5])
def test_a_block_mask_of_another_maker_gets_the_kv_of_all_ranks(positional: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(get_group=lambda: SimpleNamespace(group_name="cp ranks"))
    monkeypatch.setattr(tc, "flex_cp_allgather", lambda k, v, dim, name: (torch.cat([k, k], dim), torch.cat([v] * 2, dim)))
    hooks = tc._ForwardHooks(tc._ContextParallel(2, tc._ContextParallel.AttentionType.FLEX), mesh)
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 4, 8, device="cpu", BLOCK_SIZE=4)
    q, k, v = (torch.full((1, 2, 4, size), float(size)) for size in (3, 3, 5))
    given = {"query": q, "key": k, "value": v, "score_mod": None, "block_mask": block_mask}
    before = torch.overrides._len_torch_function_stack()
    args, kwargs = hooks.before(nn.Identity(), tuple(given.values())[:positional], dict(list(given.items())[positional:]))
    made = dict(zip(given, args)) | kwargs
    assert made["query"] is q and made["block_mask"] is block_mask and made["score_mod"] is None and len(args) == positional
    assert made["key"].shape == (1, 2, 8, 3) and made["value"].shape == (1, 2, 8, 5)
    assert torch.overrides._len_torch_function_stack() == before, "torch's own operator runs"
    assert hooks.after(nn.Identity(), (), q) is q
