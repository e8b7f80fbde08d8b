"""The triton kernel against a dense float64 computation: in Triton's interpreter on CPU, for real on a GPU.

Error budget: a few times what rounding the result to the dtype costs, for values of order one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

# ruff: noqa: E402
from tests.kernels.calls import backward, forward, unsupported_reason
from tests.kernels.scripts import run_script

from longspan._kernels.gpu import prepared_launch
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.protocol import State, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import Config, Tile, TritonKernel
from longspan._masks.block_table import BlockTable
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Mod = Callable[..., Tensor]
SMALL = Config(
    forward=Tile(m=64, n=32, warps=4, stages=2), dkdv=Tile(m=32, n=64, warps=4, stages=2), dq=Tile(m=64, n=32, warps=4, stages=2)
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def runs_of(kinds: Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> BlockTable:
    """A block table from tile kinds [batch, heads, q_tiles, kv_tiles], built by a loop over all tiles."""
    ptr: list[int] = [0]
    first: list[int] = []
    last: list[int] = []
    kind: list[int] = []
    for row in kinds.flatten(0, 2).tolist():
        for j, value in enumerate(row):
            if value and j and row[j - 1] == value:
                last[-1] = j
            elif value:
                first.append(j)
                last.append(j)
                kind.append(value)
        ptr.append(len(first))
    p, f, z, k = (torch.tensor(x, dtype=torch.int32) for x in (ptr, first, last, kind))
    batch, heads = kinds.shape[:2]
    return BlockTable(q_len=q_len, kv_len=kv_len, block=block, batch=batch, heads=heads, ptr=p, first=f, last=z, kind=k)


def table_of(dense: Tensor, block: tuple[int, int]) -> BlockTable:
    """The table of a dense mask [batch, heads, Q, K], with its transpose filled in."""
    batch, heads, q_len, kv_len = dense.shape
    m, n = block
    tiles = (-(-q_len // m), -(-kv_len // n))
    full = torch.ones(batch, heads, tiles[0] * m, tiles[1] * n, dtype=torch.bool)
    some = torch.zeros_like(full)
    full[..., :q_len, :kv_len] = some[..., :q_len, :kv_len] = dense.cpu()
    shape = (batch, heads, tiles[0], m, tiles[1], n)
    kinds = some.view(shape).any(5).any(3).int() + full.view(shape).all(5).all(3).int()
    kinds = torch.where(some.view(shape).any(5).any(3), kinds, 0)
    table = runs_of(kinds, block, q_len, kv_len)
    table.__dict__["transposed"] = runs_of(kinds.transpose(2, 3), block[::-1], kv_len, q_len)
    return table


def everything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= 0


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def late(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv + 40) & (q // 7 % 3 != 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem on random inputs."""

    shape: tuple[int, int, int, int, int] = (1, 2, 2, 80, 80)  # B, H, G, Q, K
    dims: tuple[int, int] = (32, 32)
    mask: Mod = causal
    score: Mod | None = None
    learned: tuple[Tensor, ...] = ()
    dtype: torch.dtype = torch.float32
    block: tuple[int, int] = (64, 64)
    scale: float = 0.2
    layout: str = "bhsd"

    def tensor(self, heads: int, length: int, dim: int) -> Tensor:
        B = self.shape[0]
        if self.layout == "bshd":
            return torch.randn(B, length, heads, dim, device=DEVICE).to(self.dtype).transpose(1, 2)
        if self.layout == "strided":
            return torch.randn(B, heads, length, 2 * dim, device=DEVICE).to(self.dtype)[..., ::2]
        return torch.randn(B, heads, length, dim, device=DEVICE).to(self.dtype)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        _, H, G, Q, K = self.shape
        return self.tensor(H, Q, self.dims[0]), self.tensor(G, K, self.dims[0]), self.tensor(G, K, self.dims[1])

    def grid(self) -> tuple[Tensor, ...]:
        B, H, _, Q, K = self.shape
        sizes = (B, H, Q, K)
        return tuple(torch.arange(s, device=DEVICE).view([-1 if i == j else 1 for j in range(4)]) for i, s in enumerate(sizes))

    def allowed(self) -> Tensor:
        B, H, _, Q, K = self.shape
        return self.mask(*self.grid()).expand(B, H, Q, K)

    def work(self) -> Work:
        *_, Q, K = self.shape
        mask = trace(self.mask, "mask")
        score = trace(self.score, "score") if self.score else None
        allowed = self.allowed()
        allowed = allowed if mask.program.uses_batch else allowed[:1]
        allowed = allowed if mask.program.uses_head else allowed[:, :1]
        return Work(
            table=table_of(allowed, self.block),
            q_tiles=Tiling(length=Q, block=self.block[0]),
            kv_tiles=Tiling(length=K, block=self.block[1]),
            scale=self.scale,
            mask=mask.program,
            mask_captured=[t.to(DEVICE) for t in mask.captured()],
            score=score.program if score else None,
            score_captured=[t.to(DEVICE) for t in score.captured()] if score else [],
            joint=joint_of(score.program) if score else None,
        )


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Results of the float64 computation."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    grads: tuple[Tensor, ...]


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor) -> Dense:
    """Forward and gradients in float64. Learned tensors are float64 during the call."""
    q, k, v, do, dlse = (t.detach().double() for t in (q, k, v, do, dlse))
    wrt = [t.requires_grad_() for t in (q, k, v)]
    held = [t.data for t in case.learned]
    for t in case.learned:
        t.data = t.data.double()
        t.requires_grad_()
    repeat = case.shape[1] // case.shape[2]
    s = q @ k.repeat_interleave(repeat, 1).mT * case.scale
    if case.score:
        s = case.score(s, *case.grid()).expand_as(s)
    allowed = case.allowed()
    s = torch.where(allowed, s, -torch.inf)
    seen = allowed.any(-1, keepdim=True) & (s.amax(-1, keepdim=True) > -torch.inf)
    p = torch.softmax(torch.where(seen, s, 0.0), -1) * seen
    out = p @ v.repeat_interleave(repeat, 1)
    lse = torch.logsumexp(torch.where(seen, s, 0.0), -1)
    loss = (out * do).sum() + (torch.where(seen[..., 0], lse, 0.0) * dlse).sum()
    grads = torch.autograd.grad(loss, [*wrt, *case.learned], allow_unused=True)
    for t, data in zip(case.learned, held, strict=True):
        t.requires_grad_(False)
        t.data = data
    lse = torch.where(seen[..., 0], lse, -torch.inf)
    return Dense(out=out.detach(), lse=lse.detach(), max_scores=s.amax(-1).detach(), grads=tuple(g.detach() for g in grads))


def close(got: Tensor | None, want: Tensor, dtype: torch.dtype, what: str) -> None:
    budget = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert got is not None and got.shape == want.shape, what
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite), f"{what}: not finite in other places than the oracle"
    scale = want[finite].abs().max().clamp(min=1.0) if finite.any() else 1.0
    error = float(((got.double() - want)[finite].abs() / scale).max()) if finite.any() else 0.0
    assert error <= budget, f"{what}: error {error:.2e} over {budget:.0e}"


def check(case: Case, *, kernel: TritonKernel | None = None, work: Work | None = None, wide: bool = False) -> None:
    kernel = kernel or TritonKernel(config=SMALL)
    q, k, v = case.inputs()
    do, dlse = torch.randn_like(case.tensor(case.shape[1], case.shape[3], case.dims[1])), torch.randn(q.shape[:3], device=DEVICE)
    want = dense(case, q, k, v, do, dlse)
    work = work or case.work()
    assert unsupported_reason(kernel, q, k, v, work) is None
    state = forward(kernel, q, k, v, work, state=None, final=True, max_scores=True)
    assert state.out.dtype == case.dtype
    assert state.max_scores is not None
    close(state.out, want.out, case.dtype, "out")
    close(state.lse, want.lse, case.dtype, "lse")
    close(state.max_scores, want.max_scores, case.dtype, "max_scores")
    dlse = torch.where(torch.isfinite(want.lse), dlse, 0.0)
    delta = kernel.delta(state.out, do, dlse)
    needs = [any(c.data_ptr() == t.data_ptr() for t in case.learned) for c in work.score_captured]
    grads = backward(kernel, q, k, v, state.out, state.lse, do, None, work, needs=needs, wide=wide, delta=delta)
    assert grads.q.dtype == (torch.float32 if wide else case.dtype)
    for name, got, expected in zip(("dq", "dk", "dv"), (grads.q, grads.k, grads.v), want.grads, strict=False):
        close(got, expected, case.dtype, name)
    for tensor, expected in zip(case.learned, want.grads[3:], strict=True):
        (at,) = (i for i, c in enumerate(work.score_captured) if c.data_ptr() == tensor.data_ptr())
        close(grads.captured[at], expected, case.dtype, "captured gradient")


def document_mask(length: int) -> Mod:
    ids = (torch.arange(length, device=DEVICE) // 37).int()
    ids[-5:] = -1
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] >= 0) & (q >= kv)


def per_head_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv < 20 * (h + 1)) & (kv - q <= 10 * b)


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + (kv - q) * torch.exp2(-(h + 1) * 2.0)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 2 * torch.tanh(s / 2)


def relative_bias(length: int) -> tuple[Mod, Tensor]:
    table = torch.randn(2 * length, device=DEVICE)
    return lambda s, b, h, q, kv: s + table[q - kv + length], table


def head_bias(heads: int) -> tuple[Mod, tuple[Tensor, Tensor]]:
    bias, gain = torch.randn(heads, device=DEVICE), torch.randn((), device=DEVICE)
    return lambda s, b, h, q, kv: s * gain + bias[h] * 0.5, (bias, gain)


@pytest.mark.parametrize("mask", [everything, causal, late, per_head_mask])
def test_masks_match_the_oracle(mask: Mod) -> None:
    check(Case(shape=(2, 2, 1, 70, 100), mask=mask))


def test_captured_ids_with_padding_match_the_oracle() -> None:
    check(Case(mask=document_mask(150), shape=(1, 2, 1, 150, 150)))


@pytest.mark.parametrize("score", [alibi, softcap])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_match_the_oracle(score: Mod, dtype: torch.dtype) -> None:
    check(Case(score=score, dtype=dtype))


def test_gradient_of_a_relative_bias_table_matches() -> None:
    score, table = relative_bias(100)
    check(Case(score=score, learned=(table,), shape=(1, 2, 1, 90, 100)))


def test_gradients_of_per_head_and_scalar_tensors_match() -> None:
    score, learned = head_bias(3)
    check(Case(score=score, learned=learned, shape=(1, 3, 3, 70, 70)))


def test_gradients_along_queries_or_keys_alone_match() -> None:
    by_query, by_key = torch.randn(4, 90, device=DEVICE), torch.randn(90, device=DEVICE)
    check(Case(score=lambda s, b, h, q, kv: s + by_query[h, q] * by_key[kv], learned=(by_query, by_key), shape=(1, 4, 2, 90, 90)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_looked_up_negative_indices_count_from_the_end(dtype: torch.dtype) -> None:
    """In a mask, in a score, and where gradients are added to the table that is read."""
    index, bias = (torch.arange(90, device=DEVICE) % 16 - 8).to(dtype), torch.randn(8, device=DEVICE)
    flags = torch.tensor([True, False, True, True, False, True, True, True], device=DEVICE)
    case = Case(
        mask=lambda b, h, q, kv: (q >= kv) & flags[index[q].long()], score=lambda s, b, h, q, kv: s + bias[index[kv].long()],
        learned=(bias,), shape=(1, 2, 1, 90, 90),
    )  # fmt: skip
    check(case)


def test_looked_up_indices_far_outside_do_not_read_outside() -> None:
    """The mask discards all pairs with index −10⁹, at which torch would raise. The kernel clamps the index."""
    index = torch.arange(90, device=DEVICE) % 8
    wild = torch.where(torch.arange(90, device=DEVICE) % 5 == 0, -(10**9), index)
    flags, bias = torch.ones(8, dtype=torch.bool, device=DEVICE), torch.randn(8, device=DEVICE)
    flags[3] = False
    tame = Case(
        mask=lambda b, h, q, kv: (kv % 5 != 0) & flags[index[kv]], score=lambda s, b, h, q, kv: s + bias[index[kv]],
        learned=(bias,), shape=(1, 2, 1, 90, 90),
    )  # fmt: skip
    mask, score = (
        trace(lambda b, h, q, kv: (wild[kv] >= 0) & flags[wild[kv]], "mask"),
        trace(lambda s, b, h, q, kv: s + bias[wild[kv]], "score"),
    )
    work = replace(
        tame.work(), mask=mask.program, mask_captured=mask.captured(), score=score.program, score_captured=score.captured(),
        joint=joint_of(score.program),
    )  # fmt: skip
    check(tame, work=work)


@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (6, 2)])
def test_grouped_heads_match(heads: tuple[int, int]) -> None:
    check(Case(shape=(1, *heads, 40, 70), score=alibi))


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (96, 96), (40, 24)])
def test_head_dims_match(dims: tuple[int, int]) -> None:
    check(Case(dims=dims, shape=(1, 1, 1, 70, 70), scale=dims[0] ** -0.5))


@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (128, 128), (300, 260), (1, 200), (130, 3)])
def test_lengths_match(lengths: tuple[int, int]) -> None:
    check(Case(shape=(1, 2, 1, *lengths), block=(128, 128), mask=causal if lengths[0] >= lengths[1] else everything))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_wide_gradients(dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, dims=(64, 64)), wide=True)


@pytest.mark.parametrize("layout", ["bshd", "strided"])
def test_inputs_need_not_be_contiguous(layout: str) -> None:
    check(Case(layout=layout, shape=(2, 2, 2, 40, 50), mask=everything))


def test_tiles_loaded_by_tma_match() -> None:
    config = Config(**{name: replace(getattr(SMALL, name), tma=True) for name in ("forward", "dkdv", "dq")})
    check(Case(dims=(64, 40), shape=(2, 2, 1, 90, 70), mask=everything, layout="bshd"), kernel=TritonKernel(config=config))


def test_a_negative_scale_matches() -> None:
    check(Case(scale=-0.3))


def test_the_built_in_configuration_works() -> None:
    check(Case(block=(128, 128), shape=(1, 2, 1, 130, 130)), kernel=TritonKernel())


def test_output_keeps_the_query_order_of_dims() -> None:
    case = Case(layout="bshd")
    q, k, v = case.inputs()
    state = forward(TritonKernel(config=SMALL), q, k, v, case.work(), state=None, final=True, max_scores=False)
    assert state.out.transpose(1, 2).is_contiguous()
    assert state.max_scores is None


def test_two_merged_halves_equal_one_whole() -> None:
    case = Case(shape=(1, 2, 1, 100, 160), mask=late, dtype=torch.bfloat16)
    kernel = TritonKernel(config=SMALL)
    q, k, v = case.inputs()
    whole = forward(kernel, q, k, v, case.work(), state=None, final=True, max_scores=True)
    state: State | None = None
    for start, final in ((64, False), (0, True)):
        stop = 160 if start else 64
        half = late_part(case, start, stop)
        state = forward(kernel, q, k[:, :, start:stop], v[:, :, start:stop], half, state=state, final=final, max_scores=True)
        assert state.out.dtype == (torch.bfloat16 if final else torch.float32)
    assert state is not None and state.max_scores is not None and whole.max_scores is not None
    torch.testing.assert_close(state.lse, whole.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.max_scores, whole.max_scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.out, whole.out, rtol=2e-2, atol=1e-2)


def late_part(case: Case, start: int, stop: int) -> Work:
    """The work of keys start … stop − 1 alone, in a tensor of their own, at their global positions."""
    table = table_of(case.allowed()[:1, :1, :, start:stop], case.block)
    first = torch.arange(0, stop - start, case.block[1], dtype=torch.int32)
    tiling = Tiling(
        length=stop - start, block=case.block[1], row=first, pos=first + start, count=(stop - start - first).clamp(max=case.block[1]).int()
    )
    return replace(case.work(), table=table, kv_tiles=tiling)


def test_permuted_tiles_give_permuted_rows() -> None:
    case = Case(shape=(1, 2, 1, 160, 160), mask=document_mask(160), score=alibi, block=(64, 64))
    kernel = TritonKernel(config=SMALL)
    q, k, v = case.inputs()
    do = torch.randn_like(q)
    plain = case.work()
    want = forward(kernel, q, k, v, plain, state=None, final=True, max_scores=False)
    delta = kernel.delta(want.out, do, None)
    want_grads = backward(
        kernel, q, k, v, want.out, want.lse, do, None, plain, needs=[False] * len(plain.score_captured), wide=False, delta=delta
    )

    # Tiles of the sequence in the order 2, 0, 1; the last one holds 32 tokens.
    order, counts = torch.tensor([2, 0, 1]), torch.tensor([32, 64, 64], dtype=torch.int32)
    tokens = torch.cat([torch.arange(128, 160), torch.arange(0, 64), torch.arange(64, 128)]).to(DEVICE)
    tiling = Tiling(length=160, block=64, row=(counts.cumsum(0) - counts).int(), pos=(order * 64).int(), count=counts)
    kinds = plain.table.to_dense().int()
    kinds = kinds[:, :, order][:, :, :, order]
    table = runs_of(kinds, (64, 64), 160, 160)
    table.__dict__["transposed"] = runs_of(kinds.transpose(2, 3), (64, 64), 160, 160)
    work = replace(plain, table=table, q_tiles=tiling, kv_tiles=tiling)
    pq, pk, pv, pdo = (t[:, :, tokens] for t in (q, k, v, do))
    got = forward(kernel, pq, pk, pv, work, state=None, final=True, max_scores=False)
    torch.testing.assert_close(got.out, want.out[:, :, tokens])
    torch.testing.assert_close(got.lse, want.lse[:, :, tokens])
    grads = backward(
        kernel,
        pq,
        pk,
        pv,
        got.out,
        got.lse,
        pdo,
        None,
        work,
        needs=[False] * len(work.score_captured),
        wide=False,
        delta=delta[:, :, tokens],
    )
    for name, a, b in (("q", grads.q, want_grads.q), ("k", grads.k, want_grads.k), ("v", grads.v, want_grads.v)):
        torch.testing.assert_close(a, b[:, :, tokens], msg=name)


def test_gradient_functions_of_activations_match() -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        f = torch.nn.functional
        return f.gelu(s) + f.silu(s) + f.softplus(s) + f.leaky_relu(s) + f.relu(s) + torch.sigmoid(s) + torch.clamp(s, -0.3, 0.4) + s**3

    check(Case(score=score, shape=(1, 1, 1, 40, 40)))


def test_an_unsupported_operation_is_named() -> None:
    case = Case(score=lambda s, b, h, q, kv: torch.atan2(s, s + 2))
    reason = unsupported_reason(TritonKernel(), *case.inputs(), case.work())
    assert reason is not None and "atan2" in reason


def test_unsupported_inputs_are_rejected() -> None:
    case = Case()
    q, k, v = case.inputs()
    kernel = TritonKernel()
    assert "float64" in str(unsupported_reason(kernel, q.double(), k.double(), v.double(), case.work()))
    wide = torch.zeros(1, 2, 100, 300, device=DEVICE)
    assert "256" in str(unsupported_reason(kernel, wide, wide, v, case.work()))
    odd = replace(case.work(), table=table_of(case.allowed()[:1, :1], (72, 64)))
    assert "multiples of 16" in str(unsupported_reason(kernel, q, k, v, odd))


@pytest.mark.long
def test_the_compiler_accepts_what_the_interpreter_runs(pytestconfig: pytest.Config) -> None:
    run_script("triton_compile.py", pytestconfig)


def test_a_launch_without_enough_shared_memory_uses_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, launched = [], []

    def compile_kernel(kernel: Any, arguments: Any, options: dict[str, int]) -> Any:
        tried.append(options["num_stages"])
        return SimpleNamespace(metadata=SimpleNamespace(shared=100_000 * options["num_stages"]))

    monkeypatch.setattr(prepared_launch, "interpreted", lambda: False)
    monkeypatch.setattr(prepared_launch, "compile_kernel", compile_kernel)
    monkeypatch.setattr(prepared_launch, "shared_memory_limit", lambda device: 232_448)
    monkeypatch.setattr(prepared_launch, "driver_launch", lambda *_, **__: None)
    monkeypatch.setattr(prepared_launch.PreparedLaunch, "launch_at", lambda self, values: launched.append(self.options))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launch = PreparedLaunch(
        kernel=SimpleNamespace(arg_names=("x",)), options={"num_warps": 4, "num_stages": 4}, ctas=1, device=torch.device(DEVICE),
        descriptors={}, constants={},
    )  # fmt: skip
    launch({"x": torch.zeros(1)}, {})
    assert launched == [{"num_warps": 4, "num_stages": 2}]
    assert tried == [4, 3, 2]
