"""K and V of large shards are sent in separate exchanges, without packing: the same results as packed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kernels.test_hopper import on_hopper
from tests.sharded import Problem, Results, check_budget, mask_named, summed
from torch import Tensor

import longspan as ls
from longspan._comm.process_group import C10dGroup
from longspan._engine import kv_exchange, sharded_call
from longspan._kernels.cpu import CpuKernel
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Work
from longspan.testing import run_processes, virtual_world

WAYS: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring", "layout": "head_tail", "overlap": True},
    "all-gather": {"strategy": "allgather", "layout": "contiguous"},
    "exchange": {"strategy": "exchange", "layout": "round_robin", "stages": 2},
    "at once": {"strategy": "exchange", "layout": "auto", "stages": 1, "overlap": False},
    "ring joined": {"strategy": "ring", "layout": "head_tail", "overlap": False},
}
PER_ROW = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 30 + 50 * b))


def by_token(t: Tensor) -> Tensor:
    """The same values with tokens outermost in memory, as projections write them."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def problem(mask: Any, *, batch: int = 2, **options: Any) -> Problem:
    return Problem(mask=mask, score="none", q_len=203, kv_len=203, batch=batch, heads=6, kv_heads=3, **options)


def over(p: Problem, shape: Any, lay: Callable[[Tensor, int], Tensor], **options: Any) -> tuple[dict[str, Tensor], list[str], int]:
    """`with_plan` of a new plan."""
    return with_plan(p.plan(ls.Mesh.abstract(shape), **options), p, shape, lay)


def with_plan(made: ls.Plan, p: Problem, shape: Any, lay: Callable[[Tensor, int], Tensor]) -> tuple[dict[str, Tensor], list[str], int]:
    """(unsharded results, names of exchanges, bytes) over a virtual world. `lay(t, rank)` sets the strides of a rank's k and v."""
    world = virtual_world(shape)

    def rank(mesh: Any) -> dict[str, Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
            return ls.attention(q, lay(k, mesh.rank), lay(v, mesh.rank), **rest)

        return p.on_rank(made.on(mesh), attend=attend)

    by_rank = world.run(rank)
    moves = [e for e in world.exchanges if "stage" in e.what]
    return summed(by_rank), [e.what for e in moves], sum(int(e.bytes.sum()) for e in moves)


def assert_close(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Compare up to the order of sums: one exchange orders received rows by rank, several by stage, and products may depend on strides."""
    for name, want in right.items():
        assert Results(got).error(Results(right), name) <= 1e-12 * max(1.0, float(want[torch.isfinite(want)].abs().max())), name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every pair of way, mask and step size; every triple with --whole-grid."""
    if "step_tokens" in metafunc.fixturenames:
        grid = itertools.product(enumerate(WAYS), enumerate(("causal", "rows differ")), enumerate((16384, 64)))
        whole = metafunc.config.getoption("--whole-grid")
        cases = [(way, mask, size) for (i, way), (j, mask), (k, size) in grid if whole or (i + j + k) % 2 == 0]
        metafunc.parametrize(("way", "mask", "step_tokens"), cases)


def test_separate_exchanges_equal_packed_ones_for_all_strides(
    way: str, mask: str, step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.import_module("longspan._plan.schedule"), "STAGE_TOKENS", step_tokens)
    p = problem(ls.causal() if mask == "causal" else PER_ROW)
    made = p.plan(ls.Mesh.abstract(4), **WAYS[way])
    schedule = made.data.schedule
    right, names, size = with_plan(made, p, 4, lambda t, _: t)
    assert len(names) == 3 * schedule.stages  # KV forward, KV backward, gradients
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    lays: list[Callable[[Tensor, int], Tensor]] = [lambda t, _: t, lambda t, _: by_token(t), lambda t, rank: by_token(t) if rank % 2 else t]
    for lay in lays:  # the last one: strides that differ between ranks
        got, exchanges, moved = with_plan(made, p, 4, lay)
        assert_close(got, right)
        assert moved == size
        for kind in ("keys, forward", "values, forward", "keys, backward", "values, backward", "return of gradients"):
            assert sum(n.endswith(kind) for n in exchanges) == len(schedule.steps)


def test_kv_with_tokens_outermost_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    monkeypatch.setattr(kv_exchange, "copy_rows_", lambda out, x: (copied.append(x.shape), out.copy_(x)))
    over(problem(ls.causal(), batch=1), 3, lambda t, _: by_token(t), **WAYS["ring"])
    over(problem(PER_ROW), 3, lambda t, _: by_token(t), **WAYS["exchange"])  # batch rows with different layouts
    assert not copied
    over(problem(ls.causal(), batch=1), 3, lambda t, _: by_token(t), **WAYS["at once"])  # one buffer for local and received KV
    assert copied


def let_cpu_read_two_buffers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let the cpu kernel read KV from two buffers. Returns the list of (local, received) tokens, call by call."""
    tokens: list[tuple[int, int]] = []
    forward, backward, capabilities = CpuKernel.forward, CpuKernel.backward, CpuKernel.capabilities

    def in_one_buffer(inputs: AttentionInputs) -> AttentionInputs:
        if inputs.local_kv is None:
            return inputs
        local_k, local_v = inputs.local_kv
        tokens.append((local_k.shape[2], inputs.k.shape[2]))
        return AttentionInputs(q=inputs.q, k=torch.cat([local_k, inputs.k], 2), v=torch.cat([local_v, inputs.v], 2))

    def two_buffer_forward(self: CpuKernel, inputs: AttentionInputs, work: Work, **options: Any) -> Any:
        return forward(self, in_one_buffer(inputs), work, **options)

    def two_buffer_backward(self: CpuKernel, tensors: BackwardInputs, work: Work, **options: Any) -> Any:
        return backward(self, replace(tensors, inputs=in_one_buffer(tensors.inputs)), work, **options)

    def two_buffer_capabilities(self: CpuKernel, *args: Any, **options: Any) -> Any:
        return replace(capabilities(self, *args, **options), two_kv_buffers=True)

    monkeypatch.setattr(CpuKernel, "capabilities", two_buffer_capabilities)
    monkeypatch.setattr(CpuKernel, "forward", two_buffer_forward)
    monkeypatch.setattr(CpuKernel, "backward", two_buffer_backward)
    return tokens


@pytest.mark.parametrize("mask", ["causal", "documents", "rows differ"])
def test_a_kernel_that_reads_two_buffers_gets_local_kv_uncopied(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {"causal": ls.causal(), "documents": mask_named("documents", 203, ""), "rows differ": PER_ROW}
    p = problem(masks[mask], batch=1 if mask == "causal" else 2)
    right, names, size = over(p, 4, lambda t, _: by_token(t), **WAYS["at once"])
    buffers = let_cpu_read_two_buffers(monkeypatch)
    copied: list[tuple[int, ...]] = []
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    monkeypatch.setattr(kv_exchange, "copy_rows_", lambda out, x: (copied.append(x.shape), out.copy_(x)))
    got, exchanges, moved = over(p, 4, lambda t, _: by_token(t), **WAYS["at once"])
    assert_close(got, right)
    assert moved == size and (len(names), len(exchanges)) == (3, 5)
    assert bool(copied) == (mask != "causal")  # two batch rows are not token-outermost
    assert bool(buffers) == (mask != "rows differ")  # their rows are scattered in the buffer
    over(p, 4, lambda t, _: by_token(t), **WAYS["ring"])
    assert len(buffers) in (0, 2 * 4)  # both passes of four ranks; in a ring local KV has a step of its own


def test_separate_exchanges_depend_on_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(ls.causal(), dtype=torch.float32)
    shard = 203 // 4 * p.batch * p.kv_heads * (p.dim + p.value_dim) * 4
    for limit, separate in ((shard, True), (shard + 1, False)):
        monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", limit)
        _, names, _ = over(p, 4, lambda t, _: t, **WAYS["ring"])
        assert any("values" in n for n in names) == separate


@pytest.mark.parametrize("mask", ["causal", "rows differ"])
@pytest.mark.parametrize("way", ["ring", "ring joined"])
def test_packed_kv_in_one_exchange_per_step_equals_one_per_stage(way: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, the stages of a step are merged also where K and V are packed."""
    monkeypatch.setattr(importlib.import_module("longspan._plan.schedule"), "STAGE_TOKENS", 64)
    p = problem(ls.causal() if mask == "causal" else PER_ROW)
    right, by_stage, bytes_by_stage = over(p, 5, lambda t, _: t, **WAYS[way])
    build = sharded_call.local_schedule
    monkeypatch.setattr(sharded_call, "local_schedule", lambda plan, options: build(plan, replace(options, merge_stages=True)))
    got, merged, merged_bytes = over(p, 5, lambda t, _: t, **WAYS[way])
    assert len(merged) < len(by_stage) and any("stages 1 to" in name for name in merged) and merged_bytes == bytes_by_stage
    assert_close(got, right)


@pytest.mark.parametrize("way", ["ring", "at once"])
def test_a_rank_without_kv_takes_part(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    buffers = let_cpu_read_two_buffers(monkeypatch)
    p = Problem(mask=ls.causal(), score="none", q_len=5, kv_len=5, batch=1, heads=4, kv_heads=2)
    options = {**WAYS[way], "layout": "contiguous"}
    layout = p.plan(ls.Mesh.abstract(7), **options).kv_layout
    assert 0 in [layout.local_len(rank) for rank in range(7)]
    right = p.by_oracle()
    got, _, _ = over(p, 7, lambda t, _: by_token(t), **options)
    for name in right.values:
        assert Results(got).error(right, name) < 1e-11, name
    assert way == "ring" or {0} < {local for local, _ in buffers}


def test_queries_and_kv_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    buffers = let_cpu_read_two_buffers(monkeypatch)
    p = Problem(mask=ls.mask_mod(lambda b, h, q, kv: q + 90 >= kv), score="alibi", q_len=131, kv_len=229, batch=1, heads=6, kv_heads=3)
    right = p.by_oracle()
    got, _, _ = over(p, 3, lambda t, _: by_token(t), strategy="exchange", layout="contiguous", stages=1, overlap=False)
    for name in right.values:
        assert Results(got).error(right, name) < 1e-11, name
    assert buffers


def test_after_a_ulysses_transpose_k_and_v_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    p = Problem(mask=ls.causal(), score="none", q_len=203, kv_len=203, batch=1, heads=4, kv_heads=2)
    _, names, _ = over(p, (2, 2), lambda t, _: by_token(t), strategy="ulysses_ring", layout="head_tail")
    assert names and not any("values" in n for n in names)


def _real() -> Problem:
    mask = mask_named("documents", 203, "")
    return Problem(mask=mask, score="softcap", q_len=203, kv_len=203, batch=1, heads=6, kv_heads=3, dtype=torch.bfloat16)


def _rank(way: str) -> tuple[dict[str, Tensor], list[str]]:
    kv_exchange.SEPARATE_KV_BYTES = 0
    names: list[str] = []
    begin = C10dGroup._begin

    def recording_begin(self: C10dGroup, out: Tensor, sent: Any, splits: Any, what: str, call: Any) -> Any:
        names.append(what)
        return begin(self, out, sent, splits, what, call)

    C10dGroup._begin = recording_begin  # type: ignore[method-assign]
    p = _real()

    def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
        return ls.attention(q, by_token(k), v, **rest)

    options = {**WAYS[way], "layout": "contiguous"}  # rank 0 receives nothing
    return p.on_rank(p.plan(dist.group.WORLD, **options), attend=attend), names


@pytest.mark.processes
@pytest.mark.parametrize("way", ["exchange", "at once"])
def test_real_processes_send_k_and_v_separately(way: str) -> None:
    by_rank = run_processes(_rank, 2, way)
    check_budget(_real(), Results(summed([values for values, _ in by_rank])))
    for _, names in by_rank:
        ways = [sum(n.endswith(kind) for n in names) for kind in ("values, forward", "keys, backward")]
        assert ways[0] >= ways[1] >= 1  # backward skips stages without moves


def recording(call: Callable[..., Any], joined: list[bool]) -> Callable[..., Any]:
    """A kernel's pass that appends True to `joined` if it gets KV from two buffers."""

    def wrapped(self: Any, tensors: Any, *rest: Any, **options: Any) -> Any:
        inputs = tensors.inputs if isinstance(tensors, BackwardInputs) else tensors
        joined.extend([True] * (inputs.local_kv is not None))
        return call(self, tensors, *rest, **options)

    return wrapped


GPU_WAYS = [("at once", 4, 128), ("ring", 3, 128), ("at once", 9, 96), ("ring joined", 4, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "ranks", "dim"), GPU_WAYS)
def test_on_a_gpu_kv_in_two_buffers_gives_the_bits_of_one(way: str, ranks: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper()
    from longspan._kernels.hopper import HopperKernel

    joined: list[bool] = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(HopperKernel, name, recording(getattr(HopperKernel, name), joined))
    p = Problem(
        mask=mask_named("documents", 3001, ""), score="none", q_len=3001, kv_len=3001, batch=1, heads=8, kv_heads=2, dim=dim, value_dim=dim,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    monkeypatch.setattr(importlib.import_module("longspan._plan.schedule"), "STAGE_TOKENS", 64)  # each stage of a ring is a step
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
        with monkeypatch.context() as patch:
            capabilities = HopperKernel.capabilities
            one_buffer = lambda *args, **options: replace(capabilities(*args, **options), two_kv_buffers=False)
            patch.setattr(HopperKernel, "capabilities", one_buffer)
            right, _, _ = over(p, ranks, lambda t, _: t, **WAYS[way])
        assert not joined
        for lay in (lambda t, _: t, lambda t, _: by_token(t)):
            got, names, _ = over(p, ranks, lay, **WAYS[way])
            assert any("values" in n for n in names)
            for name, want in right.items():
                assert torch.equal(got[name], want), name
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(joined) == (not WAYS[way]["overlap"])
    fast, _, _ = over(p, ranks, lambda t, _: by_token(t), **WAYS[way])
    check_budget(p, Results(fast))


def test_shards_of_enough_bytes_are_sent_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """41 tokens of each of 3 ranks, 2 batch rows, 5 KV heads, 7 + 9 dims in 2 bytes: 13,120 bytes."""
    plan = ls.plan(ls.causal(), 125, ls.Mesh.abstract(3), layout="contiguous", strategy="ring").data
    k, v = (torch.empty(2, 5, 41, dim, dtype=torch.bfloat16) for dim in (7, 9))
    for limit, expected in ((13_120, True), (13_121, False)):
        monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", limit)
        assert kv_exchange.sends_kv_separately(plan, k, v) == expected
