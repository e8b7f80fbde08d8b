"""Isolation of the Hopper kernels: NaN, inf and huge numbers in tokens that a row does not see change no bit of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from tests.kernels.shards import work_of

import longspan as ls
from longspan._kernels.hopper import HopperKernel
from longspan._kernels.hopper.isolation import isolates, isolation_demanded
from longspan._kernels.hopper.passes import HopperCall
from longspan._kernels.protocol import AttentionInputs, Selection
from longspan._kernels.triton import TritonKernel
from longspan.testing import virtual_world

TOKENS, HEADS, KV_HEADS = 1000, 4, 2
IDS = torch.repeat_interleave(torch.tensor([0, 1, -1, 2, 3, -1]), torch.tensor([300, 71, 40, 129, 400, 60]))
MASKS: dict[str, ls.Mask] = {
    "causal": ls.causal(),
    "documents": ls.causal() & ls.documents(ids=IDS),
    "window": ls.sliding_window(200),
    "two sides": ls.documents(ids=IDS),
    "per head": ls.mask_mod(lambda b, h, q, kv: (q - kv).abs() < 60 * (h + 1)),
    "empty rows": ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q % 7 != 3) & (kv % 5 != 1)),
}
HUGE = torch.finfo(torch.bfloat16).max / 4


class Results(NamedTuple):
    """out, dq [B, H, Q, E or D], lse [B, H, Q], dk, dv [B, G, KV, D or E] of one call."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def causal_call(length: int, local: int = 0) -> tuple[HopperCall, list[Tensor]]:
    """(a call on the CPU with ones, its tensors k, v, local k, local v, norm, delta)."""
    q, *kv = (torch.ones(2, h, n, 16, dtype=torch.bfloat16) for h, n in ((4, 100), (2, length), (2, length), (2, local), (2, local)))
    inputs = AttentionInputs(q=q, k=kv[0], v=kv[1], local_kv=(kv[2], kv[3]) if local else None)
    call = HopperCall(inputs, work_of(lambda b, h, q, kv: q >= kv, ((0, 100),), ((0, length + local),), block=128))
    return call, [*kv, torch.zeros(2, 4, 100), torch.zeros(2, 4, 100)]


def flag(call: HopperCall, norm: Tensor, delta: Tensor, *, scanned: bool) -> int:
    flag = torch.zeros(1, dtype=torch.int32)
    for launch, tensors in call.unbounded(norm, delta, flag, scanned=scanned):
        launch(tensors, {})
    return int(flag)


@pytest.mark.parametrize(("which", "value", "of_kv", "of_rows"), [
    (0, float("nan"), 1, 0), (1, float("nan"), 1, 0), (1, float("inf"), 1, 0), (1, -3e38, 1, 0), (1, 1e17, 0, 0), (1, 2e18, 1, 0),
    (2, float("-inf"), 1, 0), (3, float("nan"), 1, 0), (4, float("nan"), 1, 1), (4, float("-inf"), 0, 0), (5, float("inf"), 1, 1),
])  # fmt: skip
def test_numbers_that_need_isolation_set_the_flag(which: int, value: float, of_kv: int, of_rows: int) -> None:
    call, tensors = causal_call(130, local=70)
    norm, delta = tensors[4:]
    assert (flag(call, norm, delta, scanned=True), flag(call, norm, delta, scanned=False)) == (0, 0)
    tensors[which].view(-1)[-1] = value
    assert (flag(call, norm, delta, scanned=True), flag(call, norm, delta, scanned=False)) == (of_kv, of_rows)


def test_row_terms_beyond_the_first_round_of_ctas_are_read() -> None:
    call, _ = causal_call(1)
    norm, delta = torch.zeros(2, 4, 1100), torch.zeros(2, 4, 1100)  # 4 CTAs read 1,024 each at a time
    delta[1, 3, -1] = torch.nan
    assert flag(call, norm, delta, scanned=True) == 1


def test_masked_calls_are_isolated_unless_the_variable_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSPAN_ISOLATE", raising=False)
    call, _ = causal_call(130)
    assert isolates(call.work) and not isolates(replace(call.work, mask=None)) and not isolation_demanded()
    monkeypatch.setenv("LONGSPAN_ISOLATE", "0")
    assert not isolates(call.work) and not isolation_demanded()
    monkeypatch.setenv("LONGSPAN_ISOLATE", "1")
    assert isolates(call.work) and isolation_demanded()


@pytest.mark.parametrize(("granularity", "q_granularity"), [(64, 128), (64, 64)])
def test_chosen_blocks_of_64_are_isolated_on_demand_only(
    granularity: int, q_granularity: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.delenv("LONGSPAN_ISOLATE", raising=False)
    q, k, v = (torch.zeros(1, heads, 256, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    inputs, kernel = AttentionInputs(q=q, k=k, v=v), HopperKernel(fallback=TritonKernel())
    indices = torch.zeros(1, 2, 256 // q_granularity, 3, dtype=torch.int32)
    chosen = Selection(indices=indices, granularity=granularity, q_granularity=q_granularity, heads_per_choice=2)
    assert kernel.selection_block(inputs, chosen, captured_grads=False, by_head=False) == (q_granularity, granularity)
    monkeypatch.setenv("LONGSPAN_ISOLATE", "1")
    assert kernel.selection_block(inputs, chosen, captured_grads=False, by_head=False) is None


@contextmanager
def fixed_order() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw(dims: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k, v, grad_out and grad_lse, the same at every call."""
    generator = torch.Generator("cuda").manual_seed(1)
    d, e = dims
    shapes = {"q": (HEADS, d), "k": (KV_HEADS, d), "v": (KV_HEADS, e), "grad_out": (HEADS, e)}
    given = {name: torch.randn(2, h, TOKENS, n, generator=generator, device="cuda").to(dtype) for name, (h, n) in shapes.items()}
    return given | {"grad_lse": torch.randn(2, HEADS, TOKENS, generator=generator, device="cuda")}


def results(given: dict[str, Tensor], mask: ls.Mask, **options: Any) -> Results:
    q, k, v = (given[name].detach().requires_grad_() for name in "qkv")
    out, lse = ls.attention(q, k, v, mask=mask, return_lse=True, kernel="hopper", **options)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (given["grad_out"], given["grad_lse"]))
    return Results(out, lse, dq, dk, dv)


def visible(mask: ls.Mask) -> Tensor:
    """bool [H, Q, KV]."""
    index, heads, zero = torch.arange(TOKENS), torch.arange(HEADS).view(-1, 1, 1), torch.zeros((), dtype=torch.long)
    return torch.as_tensor(mask(zero, heads, index[:, None], index[None, :])).expand(HEADS, TOKENS, TOKENS).cuda()


def chosen(where: str) -> Tensor:
    """bool [TOKENS]."""
    index, ids = torch.arange(TOKENS, device="cuda"), IDS.cuda()
    return {
        "one": index == 577,
        "last": index == TOKENS - 1,
        "several": (index == 130) | (index == 511) | (index == 900),
        "a document": ids == 1,
        "padding": ids == -1,
        "a third": (index % 3 == 0) & (index > 400),
    }[where]


def poisoned(given: dict[str, Tensor], names: tuple[str, ...], tokens: Tensor, value: float) -> dict[str, Tensor]:
    """`value` in some dims of the tokens of the first batch row."""
    changed = {name: given[name].clone() for name in names}
    for tensor in changed.values():
        tensor[0, :, tokens, 1::3] = value
    return given | changed


def changed_vectors(names: tuple[str, ...], tokens: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """(rows [H, Q], keys [G, KV]) of the first batch row whose results may change."""
    rows = torch.zeros(HEADS, TOKENS, dtype=torch.bool, device="cuda")
    if "k" in names or "v" in names:
        rows |= (sees & tokens).any(-1)
    if "q" in names or "grad_out" in names:
        rows |= tokens & sees.any(-1)
    keys = (sees & rows[..., None]).any(1).unflatten(0, (KV_HEADS, -1)).any(1)
    return rows, keys


def check(compute: Callable[[dict[str, Tensor]], Results], dims: tuple[int, int], mask: ls.Mask, where: str, value: float) -> None:
    tokens, sees, given = chosen(where), visible(mask), draw(dims, torch.bfloat16)
    clean = compute(given)
    for names in (("k",), ("v",), ("k", "v"), ("q",), ("grad_out",), ("q", "k", "v", "grad_out")):
        rows, keys = changed_vectors(names, tokens, sees)
        dirty = compute(poisoned(given, names, tokens, value))
        for name, before, after in zip(Results._fields, clean, dirty, strict=True):
            stays = ~(keys if name in ("dk", "dv") else rows)
            assert torch.equal(before[1], after[1]), f"{names}: {name} of the other batch row"
            assert torch.equal(before[0][stays], after[0][stays]), f"{names}: {name}"
        empty, unseen = ~sees.any(-1), ~sees.any(1).unflatten(0, (KV_HEADS, -1)).any(1)
        assert not dirty.out[:, empty].any() and not dirty.dq[:, empty].any() and (dirty.lse[:, empty] == -torch.inf).all()
        assert not dirty.dk[:, unseen].any() and not dirty.dv[:, unseen].any()
        if value != value:
            in_rows = rows & sees.any(-1)
            assert dirty.dq[0][in_rows].isnan().any(-1).all(), f"{names}: a row that sees a NaN says so"
            if names != ("grad_out",):
                assert dirty.out[0][in_rows].isnan().any(-1).all(), f"{names}: a row that sees a NaN says so"


CASES = [
    ((64, 64), "documents", "a third", float("inf")),
    ((64, 64), "empty rows", "several", float("nan")),
    ((128, 128), "causal", "one", float("nan")),
    ((128, 128), "window", "several", HUGE),
    ((128, 128), "per head", "last", float("inf")),
    ((192, 128), "documents", "padding", float("nan")),
    ((256, 256), "two sides", "a document", float("nan")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "mask", "where", "value"), CASES)
def test_tokens_change_no_bit_of_rows_that_do_not_see_them(dims: tuple[int, int], mask: str, where: str, value: float) -> None:
    with fixed_order():
        check(lambda given: results(given, MASKS[mask]), dims, MASKS[mask], where, value)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
@pytest.mark.parametrize("mask", ["documents"])
def test_sums_in_any_order_stay_finite_where_nothing_is_seen(mask: str, dims: tuple[int, int]) -> None:
    names, tokens, sees = ("q", "k", "v", "grad_out"), chosen("several"), visible(MASKS[mask])
    given = draw(dims, torch.float16)
    clean, dirty = results(given, MASKS[mask]), results(poisoned(given, names, tokens, float("nan")), MASKS[mask])
    rows, keys = changed_vectors(names, tokens, sees)
    assert torch.equal(clean.out[0][~rows], dirty.out[0][~rows])
    torch.testing.assert_close(dirty.dq[0][~rows], clean.dq[0][~rows], rtol=1e-2, atol=1e-3)
    assert torch.equal(clean.dk[0][~keys], dirty.dk[0][~keys]) and torch.equal(clean.dv[0][~keys], dirty.dv[0][~keys])
    assert torch.equal(dirty.dq[0].isnan().any(-1), rows)


@pytest.mark.gpu
def test_sinks_score_mods_and_their_gradients_are_isolated() -> None:
    given = draw((128, 128), torch.bfloat16)
    dirty = poisoned(given, ("q", "k", "v", "grad_out"), chosen("padding"), float("nan"))
    sink, slopes = torch.zeros(HEADS, device="cuda"), torch.linspace(0.1, 0.9, HEADS, device="cuda").requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + slopes[h] * (kv - q) * 0.01

    def score_of_constants(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + constants[h] * (kv - q) * 0.01

    constants = slopes.detach()  # gradients of captured tensors have no fixed order
    with fixed_order():
        for options in ({"sink": sink}, {"score_mod": score_of_constants}):
            expected, got = (results(x, MASKS["documents"], **options) for x in (given, dirty))
            for name, before, after in zip(Results._fields, expected, got, strict=True):
                assert torch.equal(before, after), name
    grads = []
    for x in (given, dirty):
        out = ls.attention(x["q"], x["k"], x["v"], mask=MASKS["documents"], score_mod=score, kernel="hopper")
        grads += torch.autograd.grad(out, slopes, x["grad_out"])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "strategy"), [("causal", "ring"), ("documents", "exchange")])
def test_steps_of_a_schedule_are_isolated(mask: str, strategy: str) -> None:
    """Four virtual ranks: running states between steps, KV in two buffers, gradients that are added to."""
    names, tokens, given = ("q", "k", "v", "grad_out"), chosen("several"), draw((128, 128), torch.bfloat16)

    def step(x: dict[str, Tensor]) -> list[Tensor]:
        def run(mesh: Any) -> list[Tensor]:
            plan = ls.plan(MASKS[mask], TOKENS, mesh, strategy=strategy, batch=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=128)
            local = [plan.shard(x[name], 2).detach().requires_grad_() for name in "qkv"]
            out = ls.attention(*local, plan=plan, kernel="hopper")
            grads = torch.autograd.grad(out, local, plan.shard(x["grad_out"], 2))
            return [plan.unshard(t, 2) for t in (out, *grads)]

        return virtual_world(4).run(run)[0]

    rows, keys = changed_vectors(names, tokens, visible(MASKS[mask]))
    with fixed_order():
        pairs = zip(step(given), step(poisoned(given, names, tokens, float("nan"))), (rows, rows, keys, keys), strict=True)
        for i, (before, after, may) in enumerate(pairs):
            assert torch.equal(before[0][~may], after[0][~may]) and torch.equal(before[1], after[1]), i


@pytest.mark.gpu
def test_a_captured_graph_isolates_what_came_after_the_capture() -> None:
    given = draw((128, 128), torch.bfloat16)
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")

    def step() -> tuple[Tensor, ...]:
        out = ls.attention(q, k, v, mask=ls.causal(), kernel="hopper")
        return (out, *torch.autograd.grad(out, (q, k, v), given["grad_out"]))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            clean = [t.clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for value in (float("nan"), None, float("nan")):
        with torch.no_grad():
            k[0, :, 577], v[0, :, 577] = (given["k"][0, :, 577], given["v"][0, :, 577]) if value is None else (value, value)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        rows = slice(0, TOKENS if value is None else 577)
        assert torch.equal(results[0][0][:, rows], clean[0][0][:, rows])
        torch.testing.assert_close(results[1][0][:, rows], clean[1][0][:, rows], rtol=1e-2, atol=1e-3)
        assert bool(results[0].isnan().any()) == (value is not None) and torch.equal(results[2][1], clean[2][1])


@pytest.mark.gpu
def test_items_of_three_warp_groups_are_isolated() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 16, 8192, 64, device="cuda").bfloat16() for _ in range(3))
    clean = ls.attention(q, k, v, mask=ls.causal(), kernel="hopper")
    v[:, :, 5000], k[:, :, 6000] = torch.nan, torch.inf
    dirty = ls.attention(q, k, v, mask=ls.causal(), kernel="hopper")
    assert torch.equal(clean[:, :, :5000], dirty[:, :, :5000]) and dirty[:, :, 5000:].isnan().any(-1).all()


@pytest.mark.gpu
def test_split_items_are_isolated() -> None:
    """Few queries over many keys: items are split along KV, and a part has the partial blocks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 128, device="cuda").bfloat16() for n in (200, 3100, 3100))
    mask = ls.mask_mod(lambda b, h, q, kv: q + 2900 >= kv)
    clean = ls.attention(q, k, v, mask=mask, kernel="hopper")
    v[:, :, 3000] = torch.nan
    dirty = ls.attention(q, k, v, mask=mask, kernel="hopper")
    assert torch.equal(clean[:, :, :100], dirty[:, :, :100]) and dirty[:, :, 100:].isnan().all()
