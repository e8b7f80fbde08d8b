"""`longspan.invariant()`: a row has the same bits alone, in a batch, packed, chunked and over ranks."""

from __future__ import annotations

import _thread
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from tests import invariant_cases as cases

import longspan as ls
from longspan._engine.invariant_mode import is_invariant
from longspan._kernels import invariant_tiles
from longspan.testing import oracle, virtual_world


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.repetition] * (n >= 16)) for n in range(24)])
def test_a_document_has_the_same_bits_wherever_it_is_computed(seed: int) -> None:
    assert cases.failures(seed, Counter()) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bits_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    one = cases.problem(7)
    want = cases.alone(one)
    choose = random.Random(ranks)
    choose.choice = lambda options, choice=choose.choice: ranks if tuple(options) == (1, 2, 3, 4, 8) else choice(options)  # type: ignore[method-assign]
    got, where = cases.over_ranks(one, choose)
    assert cases.differences(got, want) == [], where


def _same_over_mesh(mask: Any, lengths: tuple[int, int], shape: int | tuple[int, ...], **options: Any) -> None:
    """Assert that a batch of two has the bits of one device over a virtual mesh: out, lse, all gradients, the sink's included."""
    torch.manual_seed(0)
    (q_len, kv_len), heads, kv_heads = lengths, 4, 2
    tensors = (
        torch.randn(2, heads, q_len, 16), torch.randn(2, kv_heads, kv_len, 16), torch.randn(2, kv_heads, kv_len, 24),
        torch.randn(2, heads, q_len, 24), torch.randn(2, heads, q_len),
    )  # fmt: skip
    one = cases.Problem(
        q=tensors[0],
        k=tensors[1],
        v=tensors[2],
        grad_out=tensors[3],
        grad_lse=tensors[4],
        sink=torch.randn(heads),
        mask="",
        score="softcap",
    )
    want = cases.results(one, tensors, mask)
    axis_names = ("ulysses", "ring") if isinstance(shape, tuple) else None
    sizes = {"batch": 2, "heads": heads, "kv_heads": kv_heads, "head_dim": 16}
    made = ls.plan(mask, lengths, ls.Mesh.abstract(shape, axis_names=axis_names), **sizes, **options)
    sides = ("q", "kv", "kv", "q", "q")

    def rank(mesh: Any) -> dict[str, torch.Tensor]:
        plan = made.on(mesh)
        got = cases.results(one, tuple(plan.shard(t, 2, side=s) for t, s in zip(tensors, sides, strict=True)), None, plan=plan)
        side = {"out": "q", "lse": "q", "dq": "q", "dk": "kv", "dv": "kv"}
        return {name: x if name == "dsink" else plan.unshard(x, 2, side=side[name]) for name, x in got.items()}

    by_rank = virtual_world(shape, axis_names=axis_names).run(rank)
    for name, x in want.items():
        assert torch.equal(torch.stack([r[name] for r in by_rank]).sum(0) if name == "dsink" else by_rank[0][name], x), name


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (2, 1)])
def test_a_mesh_of_two_axes_has_the_bits_of_one_device(shape: tuple[int, int]) -> None:
    _same_over_mesh(ls.causal() & ls.documents([37, 163, 100]), (300, 300), shape, strategy="ulysses_ring")


@pytest.mark.parametrize("layout", ["per_document", "head_tail"])
def test_batch_rows_with_other_documents_have_the_bits_of_one_device(layout: str) -> None:
    _same_over_mesh(ls.causal() & ls.documents([[100, 200], [37, 163, 90]]), (300, 300), 3, strategy="exchange", layout=layout)


@pytest.mark.parametrize("lengths", [(40, 301), (301, 40)])
def test_cross_attention_with_masks_by_head_has_the_bits_of_one_device(lengths: tuple[int, int]) -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: ((q - kv).abs() < 60 * (h + 1)) | (kv < 5))
    _same_over_mesh(mask, lengths, 3, strategy="ring", layout="contiguous")


def test_documents_that_differ_by_batch_row_have_the_bits_of_each_alone() -> None:
    lengths = [[100, 200], [37, 163, 90]]
    mask = ls.causal() & ls.documents(lengths)
    one = cases.problem(5, dtype=torch.float32)
    heads, kv_heads, dim, value_dim = one.q.shape[1], one.k.shape[1], one.q.shape[3], one.v.shape[3]
    tensors = (
        torch.randn(2, heads, 300, dim), torch.randn(2, kv_heads, 300, dim), torch.randn(2, kv_heads, 300, value_dim),
        torch.randn(2, heads, 300, value_dim), torch.randn(2, heads, 300),
    )  # fmt: skip
    got = cases.results(one, tensors, mask)
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            part = tuple(t[row : row + 1, :, start : start + length] for t in tensors)
            want = cases.results(one, part, ls.causal())
            for name in ("out", "lse", "dq", "dk", "dv"):
                assert torch.equal(got[name][row : row + 1, :, start : start + length], want[name]), (row, start, name)
            start += length


def test_a_mask_mod_that_compares_document_ids_counts_blocks_from_each_document() -> None:
    one = cases.problem(11, dtype=torch.float32)
    ids = torch.tensor([0] * 37 + [1] * one.length + [2] * 50)
    tensors = cases.packed_tensors(one, 37, 50)
    inside = one.within_document()
    got = cases.results(one, tensors, lambda b, h, q, kv: (ids[q] == ids[kv]) & inside(b, h, q, kv))
    want = cases.alone(one)
    assert cases.differences({n: x[:, :, 37 : 37 + one.length] for n, x in got.items() if n != "dsink"}, want) == []


def test_decoding_one_query_has_the_bits_of_the_whole_sequence() -> None:
    q, k, v = torch.randn(2, 4, 200, 32), torch.randn(2, 2, 200, 32), torch.randn(2, 2, 200, 32)
    with ls.invariant(), torch.no_grad():
        whole = ls.attention(q, k, v, mask=ls.causal())
        for at in (0, 127, 128, 199):
            step = ls.attention(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1])
            assert torch.equal(step, whole[:, :, at : at + 1])


def test_nan_in_other_documents_does_not_change_a_bit() -> None:
    one = cases.problem(13, dtype=torch.float32)
    before, want = 41, cases.alone(one)
    tensors = cases.packed_tensors(one, before, 60)
    for t in tensors[:4]:
        t[:, :, :before] = torch.nan
        t[:, :, before + one.length :] = torch.inf
    got = cases.results(one, tensors, cases.packed_mask(one, [before], [60]))
    inside = {n: x[:, :, before : before + one.length] for n, x in got.items() if n != "dsink"}
    assert cases.differences(inside, want) == []


@pytest.mark.parametrize("product", ["_bmm_of_wider", "_sum_of_outer_products"])
def test_where_a_product_depends_on_the_place_of_a_row_another_one_is_taken(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_a_document_…` takes the one that suits this machine; these are for others. Head dims are no multiples of 16 or 48."""
    taken = getattr(invariant_tiles, product)
    monkeypatch.setattr(invariant_tiles, "_is_invariant", lambda one, *_: one is taken)
    products = [invariant_tiles._bmm, invariant_tiles._bmm_of_wider, invariant_tiles._sum_of_outer_products]
    chosen = invariant_tiles._invariant_product(torch.float64, 16, 80)
    assert chosen is taken
    a, x = torch.randn(3, 128, 80, dtype=torch.float64), torch.randn(3, 128, 80, dtype=torch.float64).mT
    assert all(torch.allclose(one(a, x), a @ x, rtol=1e-13, atol=1e-12) for one in products)
    q, k, v = (torch.randn(2, 3, n, d, dtype=torch.float64) for n, d in ((150, 20), (170, 20), (170, 9)))
    with ls.invariant():
        out, lse = ls.attention(q, k, v, mask=ls.causal(), return_lse=True, kernel="cpu")
    want, want_lse = oracle(q, k, v, mask=ls.causal(), return_lse=True)
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-12) and torch.allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_strides_of_the_inputs_do_not_change_a_bit() -> None:
    one = cases.problem(17, dtype=torch.float32)
    tensors = one.q, one.k, one.v, one.grad_out, one.grad_lse
    strided = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    q, k, v = (t.detach().requires_grad_() for t in strided[:3])
    with ls.invariant():
        out = ls.attention(q, k, v, mask=one.within_document(), score_mod=one.score_mod())
    grads = torch.autograd.grad((out * strided[3]).sum(), (q, k, v))
    plain = cases.results(
        cases.Problem(**{**vars(one), "sink": None}), (*tensors[:4], torch.zeros_like(one.grad_lse)), one.within_document()
    )
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert torch.equal(x, plain[name]), name


def test_the_backward_pass_follows_the_mode_of_the_forward_pass() -> None:
    tensors = [torch.randn(1, 2, 150, 16, requires_grad=True) for _ in range(3)]
    with ls.invariant():
        out = ls.attention(*tensors, mask=ls.causal())
        inside = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    outside = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_the_mode_belongs_to_the_thread_and_ends_with_the_context() -> None:
    from longspan._engine.invariant_mode import is_invariant

    seen = []
    with ls.invariant(), ls.invariant():
        thread = threading.Thread(target=lambda: seen.append(is_invariant()))
        thread.start()
        thread.join()
        assert is_invariant()
    assert not is_invariant() and seen == [False]


@pytest.mark.parametrize("kernel", ["dense", "flash", "aten"])
def test_kernels_without_the_mode_raise(kernel: str) -> None:
    q = torch.randn(1, 1, 8, 16)
    with ls.invariant(), pytest.raises(ValueError, match=r"longspan\.invariant\(\).*'auto' or one of"):
        ls.attention(q, q, q, kernel=kernel)


def test_compiled_attention_raises() -> None:
    q = torch.randn(1, 1, 8, 16)
    compiled = torch.compile(lambda q: ls.attention(q, q, q), backend="aot_eager")
    compiled(q)
    with ls.invariant(), pytest.raises(RuntimeError, match=r"longspan\.invariant\(\)"):
        compiled(q)


def test_ranks_that_disagree_on_the_mode_raise() -> None:
    made = ls.plan(ls.causal(), 64, ls.Mesh.abstract(2), layout="contiguous", strategy="ring")

    def rank(mesh: Any) -> str:
        plan = made.on(mesh)
        q = plan.shard(torch.randn(1, 1, 64, 16), 2)
        try:
            if mesh.rank == 0:
                with ls.invariant():
                    ls.attention(q, q, q, plan=plan)
            else:
                ls.attention(q, q, q, plan=plan)
        except ValueError as error:
            return str(error)
        return "no error"

    messages = virtual_world(2).run(rank)
    assert all("invariant" in message for message in messages), messages


def test_threads_that_python_did_not_start_follow_the_mode() -> None:
    """Autograd's threads are such threads: activation checkpointing recomputes forward passes in them."""

    def in_a_foreign_thread() -> bool:
        seen, done = [], threading.Event()
        _thread.start_new_thread(lambda: (seen.append(is_invariant()), done.set()), ())
        assert done.wait(60)
        return seen[0]

    assert not in_a_foreign_thread()
    with ls.invariant():
        assert in_a_foreign_thread()
    assert not in_a_foreign_thread() and not is_invariant()


def test_gradients_that_are_zero_are_positive_zeros() -> None:
    """0 · scale is −0.0 for a negative scale, in rows that see nothing and in keys that no row sees."""
    q, k, v = (torch.randn(1, h, 150, 16, requires_grad=True) for h in (4, 2, 2))
    mask = ls.mask_mod(lambda b, h, i, j: (i >= j) & (i > 9) & (j != 70))
    with ls.invariant():
        grads = torch.autograd.grad(ls.attention(q, k, v, mask=mask, scale=-0.3, kernel="cpu").sum(), (q, k, v))
    for grad, rows in zip(grads, (slice(0, 10), slice(70, 71), slice(70, 71))):
        assert not grad[:, :, rows].any() and not grad[:, :, rows].signbit().any()
