"""What one rank of a mesh does: layouts of contexts, paths of shards, meshes of sequences, and arguments of module styles."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.torch_compat.fake_group import RANK, RANKS, fake_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import longspan as ls
from longspan.testing import virtual_world
from longspan.torch_compat import _attention as tc
from longspan.torch_compat import _cp_custom_ops, _dispatcher, _ring, _ring_kernels
from longspan.torch_compat._load_balancer import layout_of


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatcher, "declared_layouts", {})
    monkeypatch.setattr(tc, "_dispatch_mode", tc._DispatchMode.MONKEY_PATCH)
    for name, value in vars(tc._ContextParallelOptions()).items():
        monkeypatch.setattr(tc._cp_options, name, value)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as mesh:
        yield mesh


@pytest.mark.parametrize(("lengths", "enabled", "balanced"), [
    ([12], True, True), ([12, 18], True, True), ([12], False, False), ([9], True, False), ([7], True, False), ([12, 15], True, False),
    ([15, 12], True, False), ([], True, False),
])  # fmt: skip
def test_contexts_are_head_tail_if_enabled_and_two_chunks_per_rank_are_equal(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], enabled: bool, balanced: bool
) -> None:
    made: dict[str, Any] = {}

    class Context:
        def __init__(self, dispatcher: Any, buffers: Any) -> None:
            made.update(dispatcher=dispatcher, lengths=[b.length for b in buffers])

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(tc, "Context", Context)
    tc._cp_options.enable_load_balance = enabled
    tc.set_rotate_method("alltoall")
    with tc.context_parallel(ls.Mesh.abstract(RANKS), buffers=[torch.zeros(2, n) for n in lengths], buffer_seq_dims=[1] * len(lengths)):  # type: ignore[arg-type]
        assert tc._cp_options.enable_load_balance == balanced
    assert tc._cp_options.enable_load_balance == enabled and made["lengths"] == lengths
    dispatcher = made["dispatcher"]
    assert dispatcher.strategy == "ring"
    for n in lengths:
        chunks = torch.arange(n).chunk(2 * RANKS if balanced else RANKS)
        want = torch.cat([chunks[RANK], chunks[-1 - RANK]]) if balanced else chunks[RANK]
        assert dispatcher.sequences.layout(n).positions(RANK).tolist() == want.tolist()


# ------------------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(("length", "requires_grad", "balanced", "path"), [
    (12, False, True, "DTensor"), (12, False, False, "DTensor"), (7, False, False, "DTensor"), (12, True, True, "shard"),
    (17, False, True, "DTensor"), (13, False, True, "shard"), (29, False, True, "shard"),
])  # fmt: skip
def test_shards_of_torchs_sizes_go_through_dtensor(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, length: int, requires_grad: bool, balanced: bool, path: str
) -> None:
    """Gradients, and sizes of shards other than those of `torch.chunk`, need longspan's own."""
    paths: list[str] = []
    for name, function in (("DTensor", "distribute_tensor"), ("shard", "shard")):
        original = getattr(tc, function)
        monkeypatch.setattr(
            tc, function, lambda *args, name=name, original=original, **kwargs: paths.append(name) or original(*args, **kwargs)
        )
    balancer = tc._HeadTailLoadBalancer(length, RANKS, "cpu") if balanced else None
    x = torch.arange(3.0 * length).view(3, length).requires_grad_(requires_grad)
    (part,) = tc._context_parallel_shard(mesh, [x], [1], balancer)
    assert torch.equal(part, x[:, layout_of(balancer, length, RANKS).positions(RANK)]) and paths == [path]


def test_each_buffer_needs_a_dim(mesh: DeviceMesh) -> None:
    x = torch.zeros(6)
    with pytest.raises(ValueError, match="shorter"):
        tc._context_parallel_buffers(mesh, [x, x], [0])


def test_block_masks_of_cross_attention_have_the_layouts_of_both_lengths(mesh: DeviceMesh) -> None:
    tc._cp_options.enable_load_balance = False

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q * 2 + h >= kv * 3 + b

    made = tc._create_cp_block_mask(mask, 2, 5, 24, 39, mesh)
    q, kv = torch.arange(8, 16)[:, None], torch.arange(39)
    b, h = torch.tensor(1), torch.tensor(4)
    assert torch.equal(made.mask_mod(b, h, torch.arange(8)[:, None], torch.arange(39)), mask(b, h, q, kv))
    assert made.whole.seq_lengths == (24, 39) and made.kv_num_blocks.shape[:2] == (2, 5)


def test_redeclared_layouts_drop_no_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatcher, "MAX_GROUPS", 2)
    layouts = [{n: layout_of(None, n, 2)} for n in (4, 6, 8)]
    for name, declared in zip("abb", layouts):
        _dispatcher.declare_layouts(name, declared)
    assert _dispatcher.declared_layouts == {"a": layouts[0], "b": layouts[2]}


def test_caches_are_bounded() -> None:
    layouts = [{n: layout_of(None, n, 2)} for n in range(2, 82)]
    for i, declared in enumerate(layouts):
        _dispatcher.declare_layouts(f"group {i}", declared)
    assert len(_dispatcher.declared_layouts) == 64 and "group 15" not in _dispatcher.declared_layouts
    cache, mesh = _dispatcher.DispatcherCache(), ls.Mesh.abstract(2)
    made = [cache.of(mesh, declared) for declared in layouts[:17]]
    assert cache.of(mesh, layouts[1]) is made[1] and cache.of(mesh, layouts[0]) is not made[0]
    assert _ring_kernels._plan.cache_info().maxsize == 64


# -------------------------------------------------------------------------------------------------------------- meshes of sequences


@pytest.mark.parametrize(("placements", "axis"), [
    ([Shard(2), Replicate()], None), ([Replicate(), Shard(2)], "many"), ([Replicate(), Shard(1)], None), ([Shard(2), Shard(2)], "many"),
    ([Shard(1), Shard(2)], "many"), ([Replicate(), Replicate()], None),
])  # fmt: skip
def test_a_sequence_is_sharded_along_an_axis_of_several_ranks(placements: list[Any], axis: str | None) -> None:
    with fake_mesh(one=1, many=RANKS) as mesh:
        made = _dispatcher._sequence_mesh(DTensor.from_local(torch.zeros(2, 4, 6, 3), mesh, placements))
    assert (made and made.axes[0].name) == axis and (made is None or made.size == RANKS)


def test_a_sequence_of_a_mesh_of_one_axis_is_sharded_along_it() -> None:
    with fake_mesh() as mesh:
        made = _dispatcher._sequence_mesh(DTensor.from_local(torch.zeros(4, 6, 3), mesh, [Shard(1)]))
        assert made is not None and made.axes[0].name == "cp"
        assert _dispatcher._sequence_mesh(torch.zeros(4, 6, 3)) is None


def test_kv_of_ranks_with_other_numbers_of_tokens_raise_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: dict[str, Any] = {}
    monkeypatch.setattr(_cp_custom_ops, "_mesh", meshes.__getitem__)

    def rank(mesh: Any) -> str:
        meshes[name := f"rank {mesh.rank}"] = mesh
        k, v = torch.zeros(2, 3, 5 if mesh.rank == 1 else 4, 7), torch.zeros(2, 3, 5 if mesh.rank == 1 else 4, 6)
        with pytest.raises(ValueError, match="expected equally many tokens of k and v") as error:
            _cp_custom_ops.flex_cp_allgather(k, v, 2, name)
        return str(error.value)

    assert all("[[4, 4], [5, 5], [4, 4]]" in text for text in virtual_world(3).run(rank))


# ------------------------------------------------------------------------------------------------------------------ module styles


def test_a_style_converts_the_outputs_of_its_module(mesh: DeviceMesh) -> None:
    calls: list[Any] = []

    class Style(tc._ContextParallel):
        def sdpa_output_fn(self, module: Any, inputs: Any, outputs: Any, mesh: Any) -> Any:
            calls.append((module, inputs, mesh))
            return super().sdpa_output_fn(module, inputs, outputs, mesh)

    module, x = nn.Identity(), torch.zeros(2, 4, 6, 3)
    Style(2, tc._ContextParallel.AttentionType.SDPA)._apply(module, mesh)
    assert type(module(x)) is Tensor
    ((seen, (inputs,), of_mesh),) = calls
    assert seen is module and of_mesh is mesh and isinstance(inputs, Tensor)


def test_the_monkey_patch_shards_along_its_dim(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa(query: Tensor) -> Tensor:
        seen.append(query)
        return query

    seen: list[Any] = []
    sdpa.__name__ = "scaled_dot_product_attention"
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    tc._enable_context_parallel_dispatcher_impl(1, mesh)
    try:
        out = F.scaled_dot_product_attention(torch.zeros(2, 4, 6, 3))  # type: ignore[call-arg]
    finally:
        tc._disable_context_parallel_dispatcher_impl()
    assert seen[0].placements == (Shard(1),) and type(out) is Tensor and F.scaled_dot_product_attention is sdpa


def test_converters_of_a_replaced_function_get_its_arguments_and_the_mesh() -> None:
    calls: list[Any] = []
    module: Any = SimpleNamespace(double=lambda x, y=0: 2 * x + y)
    double = module.double
    double.__name__ = "double"

    def before(module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        calls.append((module, args, kwargs, mesh))
        return (args[0] + 1,), {"y": 5}

    def after(module: Any, inputs: Any, outputs: Any, mesh: Any) -> Any:
        calls.append((module, inputs, outputs, mesh))
        return -outputs

    tc._distribute_function(double, module, "mesh", before, after)  # type: ignore[arg-type]
    assert module.double(3, y=4) == -13
    assert calls == [(None, (3,), {"y": 4}, "mesh"), (None, ((4,), {"y": 5}), 13, "mesh")]
    tc._restore_function(module.double, module)
    assert module.double is double


# ----------------------------------------------------------------------------------------------------------------------- the ring


def test_kv_move_once_per_further_rank_and_gradients_return_to_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = SimpleNamespace(ProcessGroup=ls.Mesh, get_rank=lambda mesh: mesh.rank, get_world_size=lambda mesh: mesh.size)
    monkeypatch.setattr(_ring, "dist", dist)
    exchanges: list[int] = []

    class Rotater(_ring._AllToAllRotater):
        def exchange_buffers(self, curr_buffer: Tensor) -> None:
            exchanges.append(len(curr_buffer))
            super().exchange_buffers(curr_buffer)

    monkeypatch.setattr(_ring, "_AllToAllRotater", Rotater)
    tc.set_rotate_method("alltoall")
    tc._cp_options.enable_load_balance = False
    q, kv = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 6, 3)

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.zeros_like(q), q[..., 0]

    def backward(*, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, ...]:
        return query, key, value

    virtual_world(RANKS).run(lambda mesh: _ring._templated_ring_attention(mesh, 2, forward, q, kv, kv))  # type: ignore[arg-type]
    assert exchanges == [2 * kv.numel()] * (RANKS - 1) * RANKS
    exchanges.clear()
    virtual_world(RANKS).run(
        lambda mesh: _ring._templated_ring_attention_backward(mesh, 2, backward, q, "grad_out", q, kv, kv, q, q[..., 0], False)  # type: ignore[arg-type]
    )
    assert exchanges == [2 * kv.numel()] * (2 * RANKS - 1) * RANKS


def test_partial_results_are_merged_along_the_sequence_dim() -> None:
    """Shapes [B, S, H, D] instead of [B, H, S, D]."""
    made = []
    for seq_dim in (2, 1):
        merger = _ring._SDPAMerger(False, seq_dim)
        for step, partial in enumerate((False, True)):
            generator = torch.Generator().manual_seed(step)
            out = torch.randn(2, 6, 4 if partial else 8, 5, generator=generator)
            lse = torch.randn(2, 6, 4 if partial else 8, generator=generator)
            merger.step(*(x.movedim(2, seq_dim) for x in (out, lse)), partial)
        made.append([x.movedim(seq_dim, 2) for x in merger.results()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("form", ["plain", "with a last dim", "padded"])
def test_backward_of_the_ring_forms_gets_the_lse_of_its_rows(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """torch pads flash attention's lse; cuDNN's has a last dim of 1."""
    given: list[Any] = []
    monkeypatch.setattr(_ring_kernels.ops, "run_backward", lambda tensors, options, plan: given.append((tensors, options)) or (1, 2, 3))
    q, k, v = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 7)
    lse = torch.arange(24.0).view(2, 3, 4)
    padded = torch.cat([lse, torch.full((2, 3, 28), torch.nan)], 2)
    shaped = {"plain": lse, "with a last dim": lse[..., None], "padded": padded}[form]
    grads = _ring_kernels._backward(
        ls.Mesh.abstract(RANKS), v, (q, k, v), v, shaped, dropout_p=0.0, is_causal=True, scale=None  # type: ignore[arg-type]
    )  # fmt: skip
    ((tensors, options),) = given
    assert grads == (1, 2, 3) and torch.equal(tensors.lse, lse) and tensors.lse.is_contiguous()
    assert options.scale == 5**-0.5 and not options.spec.invariant
