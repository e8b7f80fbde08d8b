"""Every name of torch's context-parallel modules exists here, and gives what torch's gives, where torch's runs on CPUs."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel as upstream
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
from torch.distributed.tensor.experimental._context_parallel import _sharding_rules as their_rules

from longspan.testing import run_processes
from longspan.torch_compat import _attention as ours
from longspan.torch_compat import _cp_custom_ops, _handlers
from longspan.torch_compat import _sharding_rules as our_rules

MODULES = ("_attention", "_cp_custom_ops", "_load_balancer", "_sharding_rules")
CPU_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LENGTH = 32  # tokens of one rank
CASES = [(True, True), (True, False), (False, False)]  # is_causal, balanced


def defined_names(path: Path) -> list[str]:
    """The names that a module's source defines, without its imports."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in dict.fromkeys(names) if not (name.startswith("__") or name == "_")]


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_torchs_module_exists(module: str) -> None:
    names = defined_names(Path(upstream.__file__).parent / f"{module}.py")
    own = importlib.import_module(f"longspan.torch_compat.{module}")
    assert names and not [name for name in names if not hasattr(own, name)]


@pytest.mark.parametrize("module", MODULES)
def test_parameters_and_their_defaults_are_torchs(module: str) -> None:
    names = defined_names(Path(upstream.__file__).parent / f"{module}.py")
    libraries = [importlib.import_module(f"{package}.{module}") for package in (upstream.__name__, "longspan.torch_compat")]
    for name in names:
        pairs = [[getattr(library, name) for library in libraries]]
        if all(map(inspect.isclass, pairs[0])):
            pairs = [[getattr(kind, method, None) for kind in pairs[0]] for method in vars(pairs[0][0])]
        for functions in pairs:
            if all(map(inspect.isfunction, functions)):
                theirs, ours = ([(p.name, repr(p.default)) for p in inspect.signature(fn).parameters.values()] for fn in functions)
                assert ours == theirs, functions[1].__qualname__


def test_out_and_lse_are_sharded_and_three_gradients() -> None:
    assert len(_handlers._RING_FORMS) == 6
    for op, (form, sharded) in _handlers._RING_FORMS.items():
        assert sharded == (3 if "backward" in str(op) else 2), op
        assert form.__name__ == f"_{op.__name__.removesuffix('.default').strip('_').replace('product', 'product_ring', 1)}", op


def test_a_group_that_does_not_exist_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in (None, "a group"):
        monkeypatch.setattr(_cp_custom_ops, "process_group_by_name", lambda name, group=group: group)
        monkeypatch.setattr(_cp_custom_ops, "as_mesh", lambda group: [group])
        monkeypatch.setattr(_cp_custom_ops.dist, "get_world_size", lambda group: 5)
        assert _cp_custom_ops._size("cp") == (1 if group is None else 5)  # a fake implementation may run without the group
        if group is None:
            with pytest.raises(RuntimeError, match="expected the name of a process group of this process, got 'cp'"):
                _cp_custom_ops._mesh("cp")
        else:
            assert _cp_custom_ops._mesh("cp") == ["a group"]


# ------------------------------------------------------------------------------------------------------------- over two processes


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def set_options(balanced: bool, method: str) -> None:
    for library in (ours, theirs):
        library._cp_options.enable_load_balance = balanced
        library.set_rotate_method(method)


def rotations(library: Any, method: str) -> list[Tensor]:
    rotater = library._create_rotater(dist.group.WORLD, 2, library._RotateMethod[method])
    buffer, received = torch.arange(6.0) + 100 * dist.get_rank(), []
    for _ in range(2):
        rotater.exchange_buffers(buffer)
        buffer = rotater.next_buffer()
        received.append(buffer.clone())
    return received


def template(library: Any, is_causal: bool) -> list[Tensor]:
    """out, lse and gradients of the ring over the CPU's operator."""
    q, k, v, grad = (random(10 * dist.get_rank() + i, 2, 3, LENGTH, 8) for i in range(4))
    group = dist.group.WORLD
    out, lse, *_ = library._templated_ring_attention(group, 2, CPU_OP, q, k, v, is_causal=is_causal, dropout_p=0.0, scale=0.3)
    grads = library._templated_ring_attention_backward(
        group, 2, CPU_BACKWARD, grad, "grad_out", q, k, v, out, lse, is_causal, dropout_p=0.0, scale=0.3
    )
    return [out, lse, *grads[:3]]


def ring_forms(mesh: Any, is_causal: bool) -> dict[str, list[Tensor]]:
    """out, lse and gradients of the ring forms of torch's three kernels."""
    q, k, v, grad = (random(10 * dist.get_rank() + i, 2, 3, LENGTH, 8) for i in range(4))
    made = {}
    forward = {"dropout_p": 0.0, "is_causal": is_causal, "scale": 0.3}
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = ours._scaled_dot_product_ring_flash_attention(mesh, q, k, v, **forward)
    grads = ours._scaled_dot_product_ring_flash_attention_backward(
        mesh, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset, scale=0.3
    )
    made["flash"] = [out, lse, *grads]
    out, lse, seed, offset = ours._scaled_dot_product_ring_efficient_attention(mesh, q, k, v, **forward)
    grads = ours._scaled_dot_product_ring_efficient_attention_backward(
        mesh, grad, q, k, v, None, out, lse, seed, offset, 0.0, (True, True, True, False), is_causal, scale=0.3
    )
    made["efficient"] = [out, lse, *grads[:3]]
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = ours._scaled_dot_product_ring_cudnn_attention(mesh, q, k, v, **forward)
    grads = ours._scaled_dot_product_ring_cudnn_attention_backward(
        mesh, grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, is_causal, scale=0.3
    )
    made["cudnn"] = [out, lse.squeeze(-1), *grads]
    return made


def handled(mesh: Any) -> list[Tensor]:
    """torch's operator on DTensors, through the handler."""
    q, k, v = (random(10 * dist.get_rank() + i, 2, 3, LENGTH, 8) for i in range(3))
    sharded = tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v))
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = ours.custom_ops[op](op, (*sharded, 0.0, True), {"scale": 0.3})
    assert out.placements == (Shard(2),) and out.shape[2] == 2 * LENGTH
    return [out.to_local(), lse.to_local()]


def patched(library: Any, mesh: Any) -> Tensor:
    """SDPA of local shards under the monkey patch."""
    q, k, v = (random(10 * dist.get_rank() + i, 2, 3, LENGTH, 8) for i in range(3))
    library._dispatch_mode = library._DispatchMode.MONKEY_PATCH
    original = F.scaled_dot_product_attention
    library._enable_context_parallel_dispatcher_impl(seq_dim=2, mesh=mesh)
    try:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    finally:
        library._disable_context_parallel_dispatcher_impl()
    assert F.scaled_dot_product_attention is original
    return out


def block_masks(library: Any, mesh: Any, balanced: bool) -> list[Tensor]:
    library._cp_options.enable_load_balance = balanced
    length = 2 * 256
    kv_length = length if balanced else length + 128  # a balancer is of one length
    ids = torch.arange(kv_length) // 150

    def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (ids[q] == ids[kv])

    theirs._compiled_create_block_mask = theirs.create_block_mask  # compiling takes seconds
    made = library._create_cp_block_mask(documents, 2, 1, length, kv_length, mesh)
    assert library is theirs or made.whole.seq_lengths == (length, kv_length)
    # Which blocks are full and which partial is the library's affair; together they must be the same.
    return [made.to_dense(), torch.tensor(made.shape)]


def buffers(library: Any, mesh: Any) -> list[Tensor]:
    whole = [random(1, 2, 2 * LENGTH, 5), random(2, 2 * LENGTH, 3)]
    balancer = library._create_default_load_balancer(2 * LENGTH, 2, "cpu")
    return library._context_parallel_buffers(mesh, whole, [1, 0], balancer)


def strategies(rules: Any, mesh: Any) -> dict[str, list[str]]:
    """The placements that each sharding strategy allows."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

    def tensor(*shape: int) -> OpStrategy:
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
        return OpStrategy([OpSpec(DTensorSpec(mesh, (Replicate(),), meta))])

    q, lse, state = tensor(2, 4, 64, 8), tensor(2, 4, 64), tensor(2)
    arguments = {
        "flash_attention": (q, q, q, 0.0, True),
        "flash_attention_backward": (q, q, q, q, q, lse, None, None, 64, 64, 0.0, True, state, state),
        "efficient_attention": (q, q, q, None, True),
        "efficient_attention_backward": (q, q, q, q, None, q, lse, state, state, 0.0, [True, True, True, False], True),
        "cudnn_attention": (q, q, q, None, True),
        "cudnn_attention_backward": (q, q, q, q, q, lse, state, state, None, None, None, 64, 64, 0.0, True),
    }
    made = {}
    for name, args in arguments.items():
        op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
        strategy = getattr(rules, f"_scaled_dot_product_{name}_cp_strategy")(OpSchema(op, args, {}))
        made[name] = sorted(f"{s.input_specs} -> {s.output_specs}" for s in strategy.strategies)
        propagator = DTensor._op_dispatcher.sharding_propagator
        before = propagator.op_strategy_funcs.get(op)
        with rules._op_strategy_context(op, len) as (found, _):
            assert found is before and propagator.op_strategy_funcs[op] is len
        assert propagator.op_strategy_funcs.get(op) is before
    return made


def _process() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    both = (("ours", ours), ("theirs", theirs))
    made: dict[str, Any] = {}
    for method in ("ALL_TO_ALL", "ALL_GATHER"):
        made[f"rotations {method}"] = {name: rotations(library, method) for name, library in both}
    for is_causal, balanced in CASES:
        for method in ("alltoall", "allgather"):
            set_options(balanced, method)
            case = f"causal={is_causal} balanced={balanced} {method}"
            made[f"template {case}"] = {name: template(library, is_causal) for name, library in both}
            want = made[f"template {case}"]["theirs"]
            for kernel, results in ring_forms(mesh, is_causal).items():
                made[f"{kernel} {case}"] = {"ours": results, "theirs": want}
    set_options(True, "allgather")
    whole = template(theirs, True)
    made["handler"] = {"ours": handled(mesh), "theirs": whole[:2]}
    made["monkey patch"] = {"ours": [patched(ours, mesh)], "theirs": whole[:1]}
    made["buffers"] = {name: buffers(library, mesh) for name, library in both}
    for balanced in (True, False):
        made[f"block mask balanced={balanced}"] = {name: block_masks(library, mesh, balanced) for name, library in both}
    made["strategies"] = {"ours": strategies(our_rules, mesh), "theirs": strategies(their_rules, mesh)}
    return made


@pytest.mark.processes
def test_functions_equal_torchs_own_over_two_processes() -> None:
    for made in run_processes(_process, 2, timeout=120.0):
        for case, results in made.items():
            if case == "strategies":
                assert results["ours"] == results["theirs"]
                continue
            for got, want in zip(results["ours"], results["theirs"], strict=True):
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, msg=lambda text, case=case: f"{case}: {text}")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("convert", "dtype"),
    [(True, torch.float32), (False, torch.float32), (True, torch.float64), (False, torch.float64), (True, torch.bfloat16)],
)
def test_merging_partial_results_equals_torchs(convert: bool, dtype: torch.dtype, steps: int) -> None:
    mergers = [library._SDPAMerger(convert, seq_dim=2) for library in (ours, theirs)]
    for step, partial in enumerate((False, False, True)[:steps]):
        rows = 8 if partial else 16
        out, lse = random(step, 2, 3, rows, 4).to(dtype), random(9 + step, 2, 3, rows).to(torch.promote_types(dtype, torch.float32))
        for merger in mergers:
            merger.step(out.clone(), lse.clone(), partial)
    for got, want in zip(mergers[0].results(), mergers[1].results(), strict=True):
        digits = 1e-6 if dtype == torch.float64 and convert else None  # float32, whatever the dtype
        torch.testing.assert_close(got, want, rtol=digits, atol=digits)
        assert not convert or dtype != torch.float64 or torch.equal(got, got.float().double())


def test_merging_rows_without_keys_gives_no_nan() -> None:
    merger = ours._SDPAMerger(True, seq_dim=2)
    for _ in range(2):
        merger.step(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf), False)
    out, lse = merger.results()
    assert out.abs().max() == 0 and (lse == -torch.inf).all()


@pytest.mark.parametrize("add", [True, False])
def test_updating_a_chunk_equals_torchs(add: bool) -> None:
    original, new = random(0, 2, 6, 3), random(1, 2, 2, 3)
    got, want = (library._partial_update(original.clone(), new, 1, 3, 1, add) for library in (ours, theirs))
    assert torch.equal(got, want)
    with pytest.raises(AssertionError, match=r"expected shape \(2, 2, 3\), got \(2, 3\)"):
        ours._partial_update(original, new[:, 0], 1, 3, 1, add)


def test_a_replaced_function_is_restored() -> None:
    import types

    module = types.SimpleNamespace()

    def double(x: int) -> int:
        return 2 * x

    module.double = double
    ours._distribute_function(double, module, None, lambda m, args, kwargs, mesh: ((args[0] + 1,), kwargs), lambda m, i, out, mesh: -out)
    assert module.double(3) == -8
    ours._distribute_function(module.double, module, None, None, None)  # already replaced
    ours._restore_function(module.double, module)
    assert module.double is double and module.double(3) == 6


def test_arguments_that_torchs_ring_rejects_raise() -> None:
    q = torch.zeros(1, 1, 4, 2)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        ours._scaled_dot_product_ring_flash_attention(None, q, q, q, return_debug_mask=True)
    with pytest.raises(NotImplementedError, match="attn_bias"):
        ours._scaled_dot_product_ring_efficient_attention(None, q, q, q, q)
    with pytest.raises(NotImplementedError, match="same query and context"):
        ours._templated_ring_attention(None, 2, CPU_OP, q, q[:, :, :2], q, is_causal=True)
    with pytest.raises(NotImplementedError, match="CP only supports"):
        ours._sdpa_handler(torch.ops.aten.add.Tensor, (q,), {})
