"""Sharding rules, handlers, module styles and shards over a mesh of which one process plays one rank: no data is exchanged."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
from torch.distributed.tensor.experimental._context_parallel import _sharding_rules as their_rules
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore

from longspan.torch_compat import _attention as tc
from longspan.torch_compat import _dispatcher, _handlers, _ring
from longspan.torch_compat import _sharding_rules as our_rules
from longspan.torch_compat._block_mask import ShardedBlockMask
from longspan.torch_compat._dispatcher import default_layout
from longspan.torch_compat._load_balancer import layout_of

RANKS, RANK = 3, 1
FLEX, SDPA = tc._ContextParallel.AttentionType.FLEX, tc._ContextParallel.AttentionType.SDPA


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(vars(tc._cp_options))
    monkeypatch.setattr(_dispatcher, "declared_layouts", {})
    monkeypatch.setattr(tc, "_dispatch_mode", tc._dispatch_mode)
    yield
    vars(tc._cp_options).update(before)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


def test_options_and_their_meaning_are_torchs() -> None:
    assert vars(tc._ContextParallelOptions())["convert_to_f32"] is vars(theirs._ContextParallelOptions())["convert_to_f32"]
    assert tc._ContextParallelOptions().enable_load_balance is theirs._ContextParallelOptions().enable_load_balance
    assert tc._ContextParallelOptions().rotate_method.name == theirs._ContextParallelOptions().rotate_method.name
    assert [(b.name, b.value) for b in tc._CausalBehavior] == [(b.name, b.value) for b in theirs._CausalBehavior]
    before = theirs._cp_options.enable_load_balance
    try:
        for balanced, causal, size in itertools.product((True, False), (True, False), (1, 2, 4)):
            tc._cp_options.enable_load_balance = theirs._cp_options.enable_load_balance = balanced
            for rank, step in itertools.product(range(size), range(size)):
                ours, want = (library._is_causal_behavior(rank, size, step, causal) for library in (tc, theirs))
                assert ours.name == want.name, (balanced, causal, size, rank, step)
    finally:
        theirs._cp_options.enable_load_balance = before


# ------------------------------------------------------------------------------------------------------------------ sharding rules


def strategy_cases(mesh: DeviceMesh) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of each operator: with and without bias, lse and debug mask."""

    def tensor(*shape: int) -> OpStrategy:
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
        return OpStrategy([OpSpec(DTensorSpec(mesh, (Replicate(),), meta))])

    q, lse, state, bias = tensor(6, 9, 48, 8), tensor(6, 9, 48), tensor(2), tensor(6, 9, 48, 48)
    grads = [True, True, True, False]
    return {
        "flash_attention": [(q, q, q), (q, q, q, 0.0, True), (q, q, q, 0.0, True, False), (q, q, q, 0.0, True, True)],
        "flash_attention_backward": [
            (q, q, q, q, q, lse, None, None, 48, 48, 0.0, True, state, state),
            (q, q, q, q, q, lse, state, state, 48, 48, 0.0, True, state, state),
        ],
        "efficient_attention": [(q, q, q, None, True), (q, q, q, bias, True)],
        "efficient_attention_backward": [
            (q, q, q, q, b, q, lse, state, state, 0.0, grads, True) for b in (None, bias)
        ],
        "cudnn_attention": [
            (q, q, q, b, computes_lse, 0.0, True, *debug)
            for b, computes_lse, debug in itertools.product((None, bias), (True, False), ((), (False,), (True,)))
        ],
        "cudnn_attention_backward": [
            (q, q, q, q, q, lse, state, state, b, None, None, 48, 48, 0.0, True) for b in (None, bias)
        ],
    }  # fmt: skip


def placements(rules: Any, name: str, args: tuple[Any, ...]) -> Any:
    schema = OpSchema(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default, args, {})
    try:
        made = getattr(rules, f"_scaled_dot_product_{name}_cp_strategy")(schema)
    except Exception as error:  # torch's own rule may refuse the arguments
        return type(error).__name__
    return [f"{s.input_specs} -> {s.output_specs}" for s in made.strategies]


def test_placements_equal_torchs(mesh: DeviceMesh) -> None:
    for name, cases in strategy_cases(mesh).items():
        for args in cases:
            ours, want = (placements(rules, name, args) for rules in (our_rules, their_rules))
            assert ours == want, (name, args)
            assert isinstance(ours, list) or (name == "cudnn_attention" and args[3] is not None), (name, ours)


def registered() -> dict[Any, Any]:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return {op: (propagator.op_strategy_funcs.get(op), propagator.op_to_schema_info.get(op)) for op in _handlers._RING_FORMS}


def test_out_and_lse_are_sharded_along_the_sequence_or_the_gradients_of_q_k_and_v() -> None:
    sharded = {str(op): count for op, (_, count) in _handlers._RING_FORMS.items()}
    assert len(sharded) == 6 and all(count == (3 if "backward" in op else 2) for op, count in sharded.items())


def test_rules_and_handlers_are_registered_once_and_removed() -> None:
    before = registered()
    original = DTensor._op_dispatcher._custom_op_handlers
    their_rules.register_cp_sharding_rules()
    want = {op: (strategy.__name__, schema) for op, (strategy, schema) in registered().items()}
    their_rules.unregister_cp_sharding_rules()
    for clear in (False, True):
        for _ in range(2):
            tc._enable_cp_dtensor_dispatcher()
            assert {op: (strategy.__name__, schema) for op, (strategy, schema) in registered().items()} == want
            assert our_rules._original_strategies == before
            handlers = DTensor._op_dispatcher._custom_op_handlers
            assert all(handlers[op] is tc._sdpa_handler for op in want) and original.items() <= handlers.items()
        our_rules.unregister_cp_sharding_rules(clear_the_cache=clear)
        assert registered() == before and DTensor._op_dispatcher._custom_op_handlers is original
        assert not our_rules._original_strategies


def test_handlers_stay_until_the_last_thread_removes_them() -> None:
    original = DTensor._op_dispatcher._custom_op_handlers
    installed, may_end = threading.Event(), threading.Event()

    def other_thread() -> None:
        _handlers.install_handlers()
        installed.set()
        may_end.wait(10)
        _handlers.remove_handlers()

    thread = threading.Thread(target=other_thread)
    thread.start()
    installed.wait(10)
    _handlers.install_handlers()
    _handlers.remove_handlers()
    still_installed = DTensor._op_dispatcher._custom_op_handlers is not original
    may_end.set()
    thread.join()
    assert still_installed and DTensor._op_dispatcher._custom_op_handlers is original


def test_only_results_along_the_sequence_become_dtensors(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def form(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        calls.append((args, kwargs))
        return args[1], None, torch.ones(5)

    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    monkeypatch.setitem(_handlers._RING_FORMS, op, (form, 2))
    q, k = torch.zeros(2, 4, 6, 3), torch.ones(2, 4, 6, 3)
    sharded = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k)]
    out, empty, state = tc._sdpa_handler(op, (sharded[0], 0.0), {"key": sharded[1]})  # type: ignore[misc]
    ((args, kwargs),) = calls
    assert args[0] is mesh and torch.equal(args[1], q) and args[2] == 0.0 and type(kwargs["key"]) is Tensor
    assert out.placements == (Shard(2),) and out.shape == (2, 4, 18, 3) and out.device_mesh is mesh
    assert empty is None and type(state) is Tensor
    out, *_ = tc._sdpa_handler(op, (q, sharded[1]), {})  # type: ignore[misc]
    assert type(calls[-1][0][1]) is Tensor and isinstance(out, DTensor)


def test_the_cpus_operator_shards_batch_and_heads_only() -> None:
    rule = our_rules._cpu_flash_rule
    q = object()
    allowed = [Replicate(), Shard(0), Shard(1)]
    assert rule(q, q, q, 0.0, True) == [([p, p], [p, p, p, None, None]) for p in allowed]
    assert rule(q, q, q, attn_mask=None) == [([p, p], [p, p, p]) for p in allowed]
    assert rule(q, q, q, 0.0, attn_mask=q) == [([Replicate()] * 2, [Replicate()] * 3 + [None])]


# ------------------------------------------------------------------------------------------------------------------------- shards


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q + kv + b > 3)


def test_shards_keep_the_structure_of_buffers_and_are_declared(mesh: DeviceMesh) -> None:
    x, y = torch.arange(24.0).view(2, 12), torch.arange(36.0).view(18, 2)
    block_mask = create_block_mask(causal, 2, None, 12, 12, device="cpu", BLOCK_SIZE=4)
    balancer = tc._HeadTailLoadBalancer(12, RANKS, "cpu")
    parts = tc._context_parallel_shard(mesh, {"x": x, "mask": block_mask}, {"x": -1, "mask": 0}, balancer)
    assert torch.equal(parts["x"], x[:, [2, 3, 8, 9]]) and tc._cp_options.enable_load_balance
    assert isinstance(parts["mask"], ShardedBlockMask) and parts["mask"].seq_lengths == (4, 12)
    name = mesh.get_group().group_name
    assert {n: layout.positions(RANK).tolist() for n, layout in _dispatcher.declared_layouts[name].items()} == {12: [2, 3, 8, 9]}
    assert tc._dispatch_mode is tc._DispatchMode.MODULE_WRAPPER
    parts = tc._context_parallel_shard(mesh, [x, y], [1, 0])
    assert torch.equal(parts[0], x[:, 4:8]) and torch.equal(parts[1], y[6:12]) and not tc._cp_options.enable_load_balance
    assert sorted(_dispatcher.declared_layouts[name]) == [12, 18]
    grown = x.clone().requires_grad_()
    (part,) = tc._context_parallel_shard(mesh, [grown], [1], balancer)
    (grad,) = torch.autograd.grad(part.sum(), grown)
    assert grad[0].nonzero()[:, 0].tolist() == [2, 3, 8, 9]


def test_shards_of_uneven_lengths_and_of_rows_with_their_own_documents(mesh: DeviceMesh) -> None:
    (part,) = tc._context_parallel_shard(mesh, [torch.arange(7)], [0])
    assert part.tolist() == torch.arange(7).chunk(RANKS)[RANK].tolist()
    balancer = tc._PerDocumentHeadTailLoadBalancer([[6, 12], [12, 6]], RANKS, "cpu")
    x = torch.arange(2 * 5 * 18).view(2, 5, 18)
    (part,) = tc._context_parallel_shard(mesh, [x], [2], balancer)
    positions = layout_of(balancer, 18, RANKS).positions(RANK)
    assert torch.equal(part, torch.stack([x[b][:, positions[b]] for b in range(2)])) and positions[0].tolist() == [1, 4, 8, 9, 14, 15]
    for bad, dim in ((x[:1], 2), (x.movedim(2, 0), 0)):
        with pytest.raises(ValueError, match="expected dim 0 to be the batch of 2 rows"):
            tc._context_parallel_shard(mesh, [bad], [dim], balancer)

    class Rows(tc._LoadBalancer):
        def _generate_indices(self, restore: bool = False) -> Tensor:
            return torch.arange(3).expand(3, -1)

    with pytest.raises(ValueError, match="expected dim 0 to be the batch of 3 rows"):  # as many rows as tokens
        tc._context_parallel_shard(mesh, [torch.zeros(3, 3)], [0], Rows())


def test_buffers_that_cannot_be_sharded_raise(mesh: DeviceMesh) -> None:
    x = torch.zeros(6)
    for buffers, dims in (([x], [0, 0]), ([x, x], [0]), ({"x": x}, {})):
        with pytest.raises(ValueError, match="same structure as `buffers`"):
            tc._context_parallel_shard(mesh, buffers, dims)
    with pytest.raises(ValueError, match="same structure as `buffers`: expected 2 dims, got 1"):
        tc._context_parallel_shard(mesh, [[x, x]], [0])
    with pytest.raises(ValueError, match="expected tensors and BlockMasks, got int"):
        tc._context_parallel_shard(mesh, [3], [0])
    with pytest.raises(ValueError, match="expected 2, got 1"):
        tc.context_parallel_unshard(mesh, [x, x], [0])


def test_a_sharded_block_mask_has_the_rows_of_its_rank(mesh: DeviceMesh) -> None:
    whole = create_block_mask(causal, 2, None, 24, 24, device="cpu", BLOCK_SIZE=4)
    b, q, kv = (torch.arange(n) for n in (2, 24, 24))
    dense = causal(b[:, None, None], b, q[:, None], kv)
    for balancer in (
        None,
        tc._HeadTailLoadBalancer(24, RANKS, "cpu"),
        tc._PerDocumentHeadTailLoadBalancer([[6, 18], [12, 12]], RANKS, "cpu"),
    ):
        (mask,) = tc._context_parallel_shard(mesh, [whole], [0], balancer)
        layout = layout_of(balancer, 24, RANKS)
        order = torch.cat([torch.atleast_2d(layout.positions(r)) for r in range(RANKS)], 1).expand(2, -1)
        rows = torch.atleast_2d(layout.positions(RANK)).expand(2, -1)
        want = torch.stack([dense[i][rows[i]][:, order[i]] for i in range(2)])
        got = mask.mask_mod(b[:, None, None], b, torch.arange(8)[:, None], torch.arange(24))
        assert torch.equal(got, want) and mask.BLOCK_SIZE == (4, 4) and mask.kv_num_blocks.shape == (2, 1, 2)
        assert torch.equal(mask.to_dense()[:, 0].bool(), want.view(2, 2, 4, 6, 4).any(4).any(2))
        with pytest.raises(AttributeError, match="has no attribute 'lists'"):
            _ = mask.lists
    oblong = create_block_mask(causal, 2, None, 24, 24, device="cpu", BLOCK_SIZE=(4, 8))
    (mask,) = tc._context_parallel_shard(mesh, [oblong], [0])
    assert mask.BLOCK_SIZE == (4, 4)


def test_a_block_mask_from_a_mask_mod_has_the_default_layout(mesh: DeviceMesh) -> None:
    made = tc._create_cp_block_mask(causal, 2, 3, 24, 24, mesh)
    assert made.layouts[0].positions(RANK).tolist() == [4, 5, 6, 7, 16, 17, 18, 19] and made.kv_num_blocks.shape[:2] == (2, 3)
    tc._cp_options.enable_load_balance = False
    made = tc._create_cp_block_mask(causal, 1, 1, 24, 30, mesh)
    assert [layout.length for layout in made.layouts] == [24, 30] and made.seq_lengths == (8, 30)
    assert made.layouts[0].positions(RANK).tolist() == list(range(8, 16))
    balancer = tc._HeadTailLoadBalancer(24, RANKS, "cpu")
    assert tc._create_cp_block_mask(causal, 1, 1, 24, 24, mesh, balancer).layouts[1].positions(0).tolist() == [0, 1, 2, 3, 20, 21, 22, 23]


# ------------------------------------------------------------------------------------------------------------------ module styles


def test_inputs_of_sdpa_become_dtensors_and_outputs_local(mesh: DeviceMesh) -> None:
    style, x = tc._ContextParallel(2, SDPA), torch.zeros(2, 4, 6, 3)
    given = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    args, kwargs = style.sdpa_input_fn(None, (x, given), {"value": x, "attn_mask": x, "is_causal": True}, mesh)
    assert args[1] is given and kwargs["attn_mask"] is x and kwargs["is_causal"] is True
    for t in (args[0], kwargs["value"]):
        assert t.placements == (Shard(2),) and t.shape == (2, 4, 18, 3)
    args, kwargs = style.sdpa_input_fn(None, (x, x, x, x, 0.0), {}, mesh)
    assert [isinstance(t, DTensor) for t in args] == [True, True, True, False, False] and args[3] is x
    with pytest.raises(ValueError, match=r"placed \(Shard\(2\),\)"):
        style.sdpa_input_fn(None, (DTensor.from_local(x, mesh, [Shard(1)], run_check=False),), {}, mesh)
    assert type(style.sdpa_output_fn(None, (), given, mesh)) is Tensor and style.sdpa_output_fn(None, (), x, mesh) is x
    local, same, none = style.sdpa_output_fn(None, (), (given, x, None), mesh)
    assert type(local) is Tensor and same is x and none is None


def test_inputs_of_flex_have_the_kv_of_all_ranks(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def gathered(k: Tensor, v: Tensor, dim: int, name: str) -> tuple[Tensor, Tensor]:
        calls.append((k.is_contiguous() and v.is_contiguous(), dim, name))
        return torch.cat([k] * RANKS, dim), torch.cat([v] * RANKS, dim)

    monkeypatch.setattr(tc, "flex_cp_allgather", gathered)
    style = tc._ContextParallel(2, FLEX)
    q, k, v = (torch.full((2, 5, 4, 3), float(i)).transpose(1, 2) for i in range(3))
    given = {"query": q, "key": k, "value": v}
    for positional in range(4):
        names = list(given)[:positional]
        args, kwargs = style.flex_input_fn(
            None, tuple(given[n] for n in names), {n: t for n, t in given.items() if n not in names} | {"scale": 0.5}, mesh
        )
        made = dict(zip(names, args, strict=True)) | {n: kwargs[n] for n in given if n not in names}
        assert made["query"] is q and kwargs["scale"] == 0.5 and set(kwargs) == {"scale", *given} - set(names)
        assert [(made[n].shape[2], float(made[n].max())) for n in ("key", "value")] == [(15, 1.0), (15, 2.0)]
    args, kwargs = style.flex_input_fn(None, (q, k, v, "score_mod"), {}, mesh)
    assert args[3:] == ("score_mod",) and kwargs == {}
    assert calls == [(True, 2, mesh.get_group().group_name)] * 5
    with pytest.raises(TypeError, match="key: expected a tensor, got NoneType"):
        style.flex_input_fn(None, (q,), {"value": v}, mesh)


def test_hooks_end_with_the_forward_that_they_began_with(mesh: DeviceMesh) -> None:
    modes: list[int] = []

    class Module(nn.Module):
        def forward(self, query: Tensor, fails: bool = False) -> Any:
            modes.append(torch.overrides._len_torch_function_stack())
            if fails:
                raise KeyError("in forward")
            return query

    x, before = torch.zeros(2, 4, 6, 3), torch.overrides._len_torch_function_stack()
    for kind in (FLEX, SDPA):
        module = tc._ContextParallel(2, kind)._apply(Module(), mesh)
        for _ in range(2):
            with pytest.raises(KeyError, match="in forward"):
                module(x, fails=True)
            assert torch.overrides._len_torch_function_stack() == before
            assert type(module(x)) is Tensor
            assert torch.overrides._len_torch_function_stack() == before
        hooks = tc._ForwardHooks(tc._ContextParallel(2, kind), mesh)
        assert hooks.after(module, (), x) is x  # a forward that began before the hooks
    assert len(modes) == 8 and min(modes) > before


def test_the_monkey_patch_replaces_and_restores_sdpa(mesh: DeviceMesh) -> None:
    original = F.scaled_dot_product_attention
    for mode in tc._DispatchMode:
        tc._dispatch_mode = mode
        tc._enable_context_parallel_dispatcher_impl(2, mesh)
        try:
            assert (F.scaled_dot_product_attention is not original) == (mode is tc._DispatchMode.MONKEY_PATCH)
            assert our_rules._cp_strategy_contexts
        finally:
            tc._disable_context_parallel_dispatcher_impl()
        assert F.scaled_dot_product_attention is original and not our_rules._cp_strategy_contexts


# -------------------------------------------------------------------------------------------------------------------- dispatchers


def test_layouts_are_the_declared_ones_else_the_default(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Dispatcher:
        def __init__(self, mesh: Any, *, layout: Any, strategy: str, lengths: list[int]) -> None:
            seen.append([lengths, *(layout(n, RANKS).positions(0).tolist() for n in (12, 6))])

        def sdpa(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    monkeypatch.setattr(_dispatcher, "AttentionDispatcher", Dispatcher)
    cache = _dispatcher.DispatcherCache()
    q, k = (DTensor.from_local(torch.zeros(2, 3, n, 5), mesh, [Shard(2)], run_check=False) for n in (4, 2))
    assert cache.sdpa(q, k, k, None, scale=0.5) == ((q, k, k, None), {"scale": 0.5})
    contiguous = {12: layout_of(None, 12, RANKS)}
    _dispatcher.declare_layouts(mesh.get_group().group_name, contiguous)
    cache.sdpa(q, k, k)
    assert seen == [[[12, 6], [0, 1, 10, 11], [0, 5]], [[12], [0, 1, 2, 3], [0, 5]]]
    plain = torch.ones(1, 1, 2, 3)
    assert torch.equal(cache.sdpa(plain, plain, plain), plain) and len(seen) == 2


def test_flex_without_a_block_mask_has_the_declared_layouts(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, asked = tc._ForwardHooks(tc._ContextParallel(2, FLEX), mesh), []

    def of(mesh: Any, layouts: Any) -> Any:
        asked.append(layouts)
        return SimpleNamespace(flex=lambda *args, **kwargs: (args, kwargs))

    monkeypatch.setattr(hooks._dispatchers, "of", of)
    declared = {12: layout_of(None, 12, RANKS)}
    for layouts in ({}, declared):
        if layouts:
            _dispatcher.declare_layouts(mesh.get_group().group_name, layouts)
        assert hooks._flex("q", "k", "v", "score", None, 0.5, flag=True) == (("q", "k", "v", "score", None, 0.5), {"flag": True})  # type: ignore[arg-type]
    assert asked == [{}, declared]


def test_enabling_twice_and_disabling_once_leaves_nothing() -> None:
    before = torch.overrides._len_torch_function_stack()
    _dispatcher.enable()
    _dispatcher.enable()
    assert torch.overrides._len_torch_function_stack() == before + 1
    for _ in range(2):
        _dispatcher.disable()
        assert torch.overrides._len_torch_function_stack() == before
    assert default_layout(12, 2).positions(0).tolist() == [0, 1, 2, 9, 10, 11] and default_layout(10, 2).positions(0).tolist() == list(
        range(5)
    )


def test_outputs_of_flex_and_of_failed_forwards_are_left_alone(mesh: DeviceMesh) -> None:
    local = torch.zeros(1, 2, 4, 3)
    sharded = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)
    for kind in (FLEX, SDPA):
        hooks = tc._ForwardHooks(tc._ContextParallel(2, kind), mesh)
        outputs: list[Any] = [[sharded], None, sharded]
        got = []
        for output in outputs:
            hooks.before(nn.Identity(), (local, local, local), {})
            got.append(hooks.after(nn.Identity(), (), output))
        assert got[1] is None and hooks.after(nn.Identity(), (), outputs[0]) is outputs[0]  # without a forward that began
        if kind is FLEX:
            assert got[0] is outputs[0] and got[2] is sharded
        else:
            assert isinstance(got[0], tuple) and type(got[0][0]) is type(got[2]) is Tensor


def test_placements_that_dtensor_derived_are_kept_unless_it_is_asked_to_forget_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import debug

    cleared: list[str] = []
    names = ("_clear_fast_path_sharding_prop_cache", "_clear_python_sharding_prop_cache", "_clear_sharding_prop_cache")
    for name in names:
        monkeypatch.setattr(debug, name, lambda name=name: cleared.append(name), raising=False)
    our_rules.unregister_cp_sharding_rules()
    tc._disable_context_parallel_dispatcher()
    assert not cleared
    our_rules.unregister_cp_sharding_rules(clear_the_cache=True)
    assert cleared == list(names)


@pytest.mark.parametrize(("rank", "step", "causal", "balanced", "block"), [
    (1, 0, False, False, (False, False, False)), (1, 2, False, True, (False, False, False)),
    (0, 0, True, True, (True, False, False)), (2, 0, True, False, (True, False, False)),
    (0, 1, True, True, (False, True, False)), (1, 1, True, True, (False, False, True)), (1, 2, True, True, (False, True, False)),
    (2, 2, True, True, (False, False, True)), (0, 1, True, False, (None, False, False)), (2, 2, True, False, (False, False, False)),
    (1, 2, True, False, (None, False, False)), (1, 1, True, False, (False, False, False)),
])  # fmt: skip
def test_a_ring_step_computes_all_of_a_block_or_a_half(
    rank: int, step: int, causal: bool, balanced: bool, block: tuple[bool | None, bool, bool]
) -> None:
    tc._cp_options.enable_load_balance = balanced
    made = _ring._block(rank, RANKS, step, causal)
    assert (made.behavior.value, made.half_queries, made.half_kv) == block
    q = torch.arange(8.0).view(1, 1, 4, 2)
    assert made.queries(q).tolist() == (q[:, :, 2:] if block[1] else q).tolist()
    assert made.kv(q).tolist() == (q[:, :, :2] if block[2] else q).tolist()
    for add, half, rows in ((made.add_queries, block[1], slice(2, 4)), (made.add_kv, block[2], slice(0, 2))):
        expected = q.clone()
        new = torch.ones(1, 1, 2 if half else 4, 2, dtype=torch.float16)
        expected[:, :, rows if half else slice(None)] += 1
        got = add(q, new)
        assert torch.equal(got, expected) and got.dtype == torch.float32 and q[0, 0, 0, 0] == 0


def test_the_handler_logs_the_ring_form_and_refuses_other_operators(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    x = DTensor.from_local(torch.zeros(1, 1, 2, 4), mesh, [Shard(2)], run_check=False)
    logged: list[str] = []
    monkeypatch.setattr(_handlers.logger, "debug", lambda text, *values: logged.append(text % values))
    with pytest.raises(NotImplementedError, match="dropout_p: expected 0"):
        tc._sdpa_handler(op, (x, x, x, 0.5), {})
    assert logged == [f"ring form of {op}"]
    with pytest.raises(NotImplementedError, match=r"CP only supports aten\._scaled_dot_product_flash_attention.*, got aten\.mm"):
        tc._sdpa_handler(torch.ops.aten.mm.default, (x, x), {})


def test_an_operator_without_a_strategy_has_none_again() -> None:
    propagator, op = DTensor._op_dispatcher.sharding_propagator, torch.ops.longspan.flex_cp_allgather.default
    tables = propagator.op_strategy_funcs, propagator.op_to_schema_info
    assert not any(op in table for table in tables)
    with our_rules._op_strategy_context(op, placements) as before:
        assert before == (None, None) and op in tables[0]
    assert not any(op in table for table in tables)
