"""Hopper's decode kernel for latent KV (MLA): on a Hopper GPU against float64 and triton's kernel; compiled without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.scripts import run_hopper_script
from torch import Tensor

import longspan as ls
from longspan._engine.cached import write_cached

LATENT, DIM = 512, 576
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.long
def test_the_kernel_compiles_without_spills_in_its_loops(pytestconfig: pytest.Config) -> None:
    run_hopper_script("latent_decode_compile.py", pytestconfig)


class Latent:
    """Sequences of these lengths, whose last `counts` tokens are new. Their pages are interleaved."""

    def __init__(
        self, lengths: list[int], counts: list[int], *, heads: int, page_size: int = 64, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        generator = torch.Generator(device="cuda").manual_seed(sum(lengths) + heads)
        self.lengths, self.counts, self.page_size = lengths, counts, page_size
        self.k = [torch.randn(1, 1, n, DIM, generator=generator, device="cuda").to(dtype) for n in lengths]
        self.q = [torch.randn(1, heads, n, DIM, generator=generator, device="cuda").to(dtype) for n in counts]

    def cache(self) -> tuple[ls.KVCache, list[int]]:
        """A cache that holds all tokens but the new ones."""
        pages = sum(-(-n // self.page_size) for n in self.lengths) + 3
        cache = ls.KVCache(
            pages=pages, page_size=self.page_size, layers=1, kv_heads=1, head_dim=DIM, value_dim=LATENT, shared_kv=True,
            dtype=self.k[0].dtype, device="cuda",
        )  # fmt: skip
        cache._k.fill_(float("nan"))  # slots without a token
        ids, done = cache.allocate(len(self.k)), [0] * len(self.k)
        while any(n - c > d for n, c, d in zip(self.lengths, self.counts, done, strict=True)):
            for i, k in enumerate(self.k):
                new = min(190, self.lengths[i] - self.counts[i] - done[i])
                if new > 0:
                    part = k[:, :, done[i] : done[i] + new]
                    write_cached(part, part[..., :LATENT], cache.step([ids[i]], new), 0)
                    done[i] += new
        return cache, ids

    def attend(self, kernel: str, *, times: int = 1, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(out, lse) of each sequence's new tokens, one after the other in a ragged batch. times: how often the step is repeated."""
        cache, ids = self.cache()
        new = [k[:, :, n - c :] for k, n, c in zip(self.k, self.lengths, self.counts, strict=True)]
        q, k = torch.cat(self.q, 2), torch.cat(new, 2)
        for _ in range(times):  # repeated calls are prepared
            out, lse = ls.attention(
                q, k, k[..., :LATENT], cache=cache.step(ids, self.counts), layer=0, kernel=kernel, return_lse=True, **options
            )
            cache.truncate(ids, [n - c for n, c in zip(self.lengths, self.counts, strict=True)])
        return list(out.split(self.counts, 2)), list(lse.split(self.counts, 2))

    def expected(self, mask: Any = None, score_mod: Any = None, sink: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """(out, lse) in float64."""
        results = []
        for i, (q, k) in enumerate(zip(self.q, self.k, strict=True)):
            heads, length = q.shape[1], self.lengths[i]
            h, kv = torch.arange(heads, device="cuda").view(-1, 1, 1), torch.arange(length, device="cuda")
            at = torch.arange(length - self.counts[i], length, device="cuda").view(-1, 1)
            b, scores = torch.tensor(i, device="cuda"), q[0].double() @ k[0].double().mT / DIM**0.5
            scores = scores if score_mod is None else score_mod(scores, b, h, at, kv)
            scores = scores if mask is None else scores.masked_fill(~mask(b, h, at, kv), -torch.inf)
            lse = scores.logsumexp(-1)
            lse = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
            results.append(((scores - lse[..., None]).exp() @ k[0, ..., :LATENT].double(), lse))
        return results


def check(case: Latent, **options: Any) -> None:
    """hopper's kernel is as close to float64 as triton's, and a repeated call has the same bits."""
    out, lse = case.attend("auto", **options)
    again, _ = case.attend("auto", times=3, **options)
    other, _ = case.attend("triton", **options)
    for i, (right, right_lse) in enumerate(case.expected(**options)):
        assert torch.equal(out[i], again[i])
        error, allowed = ((x[i][0].double() - right).abs().max().item() for x in (out, other))
        assert error <= 1.5 * allowed + 1e-3, f"sequence {i}: {error}, triton's kernel {allowed}"
        torch.testing.assert_close(lse[i][0].double(), right_lse, rtol=0, atol=2e-3)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20) + 0.01 * (h - 3)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("heads", [17, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lengths_around_blocks_and_splits_match_float64(heads: int, dtype: torch.dtype) -> None:
    check(Latent([1, 63, 64, 65, 257, 1100, 2049, 4500], [1] * 8, heads=heads, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "options",
    [
        {"mask": ls.causal()},
        {"mask": ls.causal() & ls.sliding_window(100)},
        {"mask": ls.mask_mod(lambda b, h, q, kv: (kv + b) % (h + 2) != 0), "score_mod": softcap},
    ],
    ids=["causal", "window", "modulo and softcap"],
)
def test_several_new_tokens_with_masks_match_float64(options: dict[str, Any]) -> None:
    check(Latent([70, 333, 1290], [3, 7, 2], heads=24, page_size=128), **options)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_a_sink_and_captured_tensors_match_float64() -> None:
    bias = torch.linspace(-1, 1, 24 * 700, device="cuda").view(24, 700)
    check(Latent([77, 650], [1, 1], heads=24), sink=torch.linspace(-2, 2, 24, device="cuda"))
    check(Latent([77, 650], [2, 1], heads=24), score_mod=lambda s, b, h, q, kv: s + bias[h, kv])


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("hidden", [float("nan"), float("inf")])
def test_hidden_values_change_no_bit(hidden: float) -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (kv != 340) | (h == 7))
    case = Latent([90, 1500], [1, 2], heads=40)
    expected, _ = case.attend("triton", mask=mask)
    close, _ = case.attend("auto", mask=mask)
    case.k[1][:, :, 340] = hidden
    for times in (1, 3):
        out, _ = case.attend("auto", mask=mask, times=times)
        assert torch.equal(out[0], close[0])  # another sequence
        seen = torch.arange(40, device="cuda") == 7
        assert not out[1][:, seen].isfinite().all() and torch.isfinite(out[1][:, ~seen]).all()
        torch.testing.assert_close(out[1][:, ~seen], expected[1][:, ~seen], rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_bits_are_equal_alone_batched_and_on_other_pages() -> None:
    case = Latent([300, 1777, 5000], [1, 1, 1], heads=128)
    expected, _ = case.attend("auto", mask=ls.causal())
    for page_size in (192, 256):
        alone = Latent([300, 1777, 5000], [1, 1, 1], heads=128, page_size=page_size)
        for name in ("lengths", "counts", "k", "q"):
            setattr(alone, name, getattr(case, name)[1:2])
        assert torch.equal(alone.attend("auto", mask=ls.causal())[0][0], expected[1])


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_ctas_with_several_splits_match_float64_and_change_no_bit() -> None:
    lengths = [2900] * 33 + [130, 1025, 2049]  # one wave of CTAs of two splits
    case = Latent(lengths, [1] * len(lengths), heads=128)
    check(case)
    together, _ = case.attend("auto")
    for i in (0, 33, 35):
        alone = Latent([1], [1], heads=128)
        for name in ("lengths", "counts", "k", "q"):
            setattr(alone, name, getattr(case, name)[i : i + 1])
        assert torch.equal(alone.attend("auto")[0][0], together[i])


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_many_splits_match_float64_and_are_merged_alone_as_in_a_batch() -> None:
    case = Latent([300, 9000, 17000, 40000], [1, 1, 1, 1], heads=40)  # 9, 17 and 40 partial results
    check(case)
    together, _ = case.attend("auto")
    for i in range(4):
        alone = Latent([1], [1], heads=40)
        for name in ("lengths", "counts", "k", "q"):
            setattr(alone, name, getattr(case, name)[i : i + 1])
        assert torch.equal(alone.attend("auto")[0][0], together[i])


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_new_tokens_are_written_and_other_slots_are_left() -> None:
    case = Latent([130, 600], [66 - 2, 1], heads=3)
    cache, ids = case.cache()
    k = torch.cat([x[:, :, n - c :] for x, n, c in zip(case.k, case.lengths, case.counts, strict=True)], 2)
    step = cache.step(ids, case.counts)
    ls.attention(torch.cat(case.q, 2), k, k[..., :LATENT], cache=step, layer=0, mask=ls.causal())
    for i, row in enumerate(step.ranges.rows):
        assert torch.equal(cache.layer_pages(0).gather(row, 0, case.lengths[i])[0], case.k[i][0])


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@torch.inference_mode()
def test_replays_of_a_graph_equal_eager_steps() -> None:
    case = Latent([500, 1021], [1, 1], heads=32)
    outs = []
    for graphed in (False, True):
        cache, ids = case.cache()
        q, k = (torch.cat([x[:, :, -1:] for x in tensors]) for tensors in (case.q, case.k))

        def attend(step: Any, q: Tensor = q, k: Tensor = k) -> Tensor:
            return ls.attention(q, k, k[..., :LATENT], cache=step, layer=0, mask=ls.causal())

        results = [attend(cache.step(ids, 1, longest=2000)).clone()]
        if graphed:
            step, graph = cache.step(ids, 1, longest=2000), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                held = attend(step)
        for i in range(4):
            if graphed:
                if i:
                    step.advance()
                graph.replay()
            results.append((held if graphed else attend(cache.step(ids, 1))).clone())
        outs.append(results)
    for eager, replayed in zip(*outs, strict=True):
        assert torch.equal(eager, replayed)
