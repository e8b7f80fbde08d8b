"""Random cases of attention over a cache against the oracle: `python -m tests.cache.cases --seconds 60` runs as many as fit.

A case draws a cache, then steps, forks, truncations and frees of random sequences. After every step, out and lse of each new token are
compared with `longspan.testing.oracle` over the tokens that the sequence should hold.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.paged import to_fp8
from longspan._kernels.protocol import state_dtype
from longspan.testing import oracle


def _lookup_mask(rng: random.Random, length: int, device: str) -> Any:
    visible = (torch.rand(length, generator=torch.Generator().manual_seed(rng.randrange(2**30))) < 0.7).to(device)
    return ls.mask_mod(lambda b, h, q, kv: visible[kv] & (kv <= q))


def _slopes(rng: random.Random, heads: int, length: int, device: str) -> Any:
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(rng.randrange(2**30))).to(device)
    return lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs()


def _bias(rng: random.Random, heads: int, length: int, device: str) -> Any:
    bias = torch.randn(heads, length, generator=torch.Generator().manual_seed(rng.randrange(2**30))).to(device)
    return lambda s, b, h, q, kv: s + bias[h, kv]


MASKS: dict[str, Callable[[Any, int, str], Any]] = {
    "none": lambda rng, length, device: None,
    "full": lambda rng, length, device: ls.full(),
    "causal": lambda rng, length, device: ls.causal(),
    "window": lambda rng, length, device: ls.sliding_window(rng.randint(1, 40)),
    "two-sided window": lambda rng, length, device: ls.sliding_window(rng.randint(0, 20), rng.randint(1, 3)),
    "causal window": lambda rng, length, device: ls.causal() & ls.sliding_window(rng.randint(1, 40), 2),
    "first tokens and window": lambda rng, length, device: (
        (ls.prefix(rng.randint(0, 8)) | ls.sliding_window(rng.randint(1, 20))) & ls.causal()
    ),
    "by head": lambda rng, length, device: ls.mask_mod(lambda b, h, q, kv: (kv <= q) & ((q - kv) % (h + 2) != 1)),
    "by sequence": lambda rng, length, device: ls.mask_mod(lambda b, h, q, kv: (kv <= q) & ((kv + b) % 3 != 0)),
    "blind": lambda rng, length, device: ls.mask_mod(lambda b, h, q, kv: kv > q + 5),
    "lookup": _lookup_mask,
}
SCORES: dict[str, Callable[[Any, int, int, str], Any]] = {
    "none": lambda rng, heads, length, device: None,
    "distance": lambda rng, heads, length, device: lambda s, b, h, q, kv: s - 0.05 * (q - kv),
    "softcap": lambda rng, heads, length, device: lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0),
    "by sequence": lambda rng, heads, length, device: lambda s, b, h, q, kv: s * (1 + 0.1 * b),
    "slopes": _slopes,
    "bias": _bias,
}


@dataclass
class Model:
    """The tokens that each sequence should hold: per layer k [G, length, D] and v [G, length, E]."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]


class Case:
    """One random case. `run` raises AssertionError with the seed in its message."""

    def __init__(
        self,
        seed: int,
        *,
        kernel: str = "auto",
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        longest: int = 700,
        mesh: Any = None,
        group: int = 1,
    ) -> None:
        """group: so many consecutive seeds have the same kind of cache and programs, for which GPU kernels are compiled: steps of more than
        four tokens run by the kernel "cpu" in most groups, and head dims are multiples of 16, on which kernels are specialised. 1: one kind
        per seed, and steps of any length.
        """
        self.few_kernels = group > 1
        self.seed, self.rng, self.kernel, self.device = seed, random.Random(seed), kernel, device
        rng = random.Random(f"kernels of group {seed // group}") if self.few_kernels else self.rng
        last = torch.float16 if self.few_kernels else torch.float64  # the GPU decode kernels do not support float64
        self.dtype = dtype or rng.choice([torch.float32, torch.float32, torch.bfloat16, last])
        self.layers, self.kv_heads = rng.choice([1, 1, 2]), rng.choice([1, 2, 3])
        key_dims, value_dims = ([16, 32, 48, 64, 128], [16, 48, 64, 128]) if self.few_kernels else ([16, 32, 24], [16, 40])
        self.heads, self.dims = self.kv_heads * rng.choice([1, 2, 4]), (rng.choice(key_dims), rng.choice(value_dims))
        self.page_size, self.longest = rng.choice([1, 7, 16, 64]), min(longest, rng.choice([40, 200, 700]))
        self.generator = torch.Generator().manual_seed(seed)
        self.comparisons, self.done = 0, set[str]()  # comparisons with the oracle, and names of what happened to sequences
        self.models: dict[int, Model] = {}
        self.mask_name, self.score_name = rng.choice(list(MASKS)), rng.choice(list(SCORES))
        self.mask = MASKS[self.mask_name](rng, self.longest, device)
        reach = None if self.mask is None else self.mask.left_reach
        window = reach + rng.choice([0, 0, 5]) if reach is not None and reach > 0 and rng.random() < 0.7 else None
        self.shared = rng.random() < 0.25
        if self.shared:  # latent vectors of MLA: values are the first elements of keys
            self.dims = (self.dims[1] + rng.choice([0, 16, 32] if self.few_kernels else [0, 8, 16]), self.dims[1])
        self.scales: tuple[float, float] | None = None  # of FP8 pages
        kind = random.Random(f"8 bits, {seed // group}")
        if not self.shared and kind.random() < 0.3:
            self.scales = kind.choice([0.0625, 0.01, 0.3]), kind.choice([0.0625, 0.02, 1.0])
        k_scale, v_scale = self.scales or (1.0, 1.0)
        self.cache = ls.KVCache(
            pages=-(-self.longest // self.page_size) * 6 + 8, page_size=self.page_size, layers=self.layers, kv_heads=self.kv_heads,
            head_dim=self.dims[0], value_dim=self.dims[1], shared_kv=self.shared, window=window, device=device, mesh=mesh,
            dtype=torch.float8_e4m3fn if self.scales else self.dtype, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        self.score_mod = SCORES[self.score_name](rng, self.heads, self.longest, device)
        self.sink = torch.randn(self.heads, generator=self.generator).to(device) if rng.random() < 0.3 else None
        self.scale = rng.choice([None, None, 0.3, -0.2])
        self.long_steps = not self.few_kernels or rng.random() < 0.2

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def run(self) -> None:
        try:
            for _ in range(self.rng.randint(2, 6)):
                self.act()
        except Exception as error:
            raise AssertionError(f"case {self.seed}: mask {self.mask_name!r}, score {self.score_name!r}, {self.dtype}: {error}") from error

    def act(self) -> None:
        rng = self.rng
        if len(self.models) < 3:
            for sequence_id in self.cache.allocate(rng.randint(1, 2)):
                empty = [(self.randn(self.kv_heads, 0, d), self.randn(self.kv_heads, 0, e)) for d, e in [self.dims] * self.layers]
                self.models[sequence_id] = Model(empty)
        chosen = rng.sample(sorted(self.models), rng.randint(1, len(self.models)))
        self.step(chosen)
        if rng.random() < 0.4:
            parent = rng.choice(sorted(self.models))
            self.done.add("fork")
            self.models[self.cache.fork(parent)] = Model(list(self.models[parent].layers))
        if rng.random() < 0.4:
            shrunk = rng.choice(sorted(self.models))
            length = rng.randint(0, self.models[shrunk].length)
            try:
                self.cache.truncate(shrunk, length)
                self.done.add("truncate")
            except ValueError:  # the window before the remaining tokens was given back
                assert self.cache.window is not None
                length = self.models[shrunk].length
            self.models[shrunk].layers = [(k[:, :length], v[:, :length]) for k, v in self.models[shrunk].layers]
        while len(self.models) > 4:
            ended = rng.choice(sorted(self.models))
            self.cache.free(ended)
            self.done.add("free")
            del self.models[ended]

    def step(self, ids: list[int]) -> None:
        """New tokens of all these sequences in every layer, compared with the oracle."""
        rng, shortest_room = self.rng, min(self.longest - self.models[i].length for i in ids)
        if shortest_room < 1:
            return
        if rng.random() < 0.4:
            one = rng.randint(1, min(4 if self.few_kernels else 8, shortest_room))
            counts, given = [one] * len(ids), one
        else:
            counts = [rng.choice([0, 1, 1, 4 if self.few_kernels else 5, rng.randint(1, self.longest)]) for _ in ids]
            counts = given = [min(c, self.longest - self.models[i].length) for c, i in zip(counts, ids)]
        step = self.cache.step(ids, given)
        kernel = "cpu" if not self.long_steps and max(counts) > 4 else self.kernel
        batched = len(set(counts)) == 1 and rng.random() < 0.7
        shape = (len(ids), counts[0]) if batched else (1, sum(counts))
        starts = [self.models[i].length for i in ids]
        flat = [p for s, c in zip(starts, counts) for p in range(s, s + c)]
        assert step.positions.flatten().tolist() == flat
        for layer in range(self.layers):
            q, k, v = (
                self.randn(shape[0], heads, shape[1], dim)
                for heads, dim in ((self.heads, self.dims[0]), (self.kv_heads, self.dims[0]), (self.kv_heads, self.dims[1]))
            )
            if self.shared:
                v = k[..., : self.dims[1]]
            out, lse = ls.attention(
                q, k, v, cache=step, layer=layer, mask=self.mask, score_mod=self.score_mod,
                scale=self.scale, sink=self.sink, return_lse=True, kernel=kernel,
            )  # fmt: skip
            assert out.dtype == self.dtype and out.shape == (*q.shape[:3], self.dims[1]) and lse.shape == q.shape[:3]
            offset = 0
            for index, (sequence_id, count, start) in enumerate(zip(ids, counts, starts)):
                part = partial(_part, index=index if batched else None, span=slice(offset, offset + count))
                old_k, old_v = self.models[sequence_id].layers[layer]
                held = part(k), part(v)
                if self.scales:
                    held = tuple(to_fp8(x, scale).double() * scale for x, scale in zip(held, self.scales))
                new = torch.cat([old_k, held[0]], 1), torch.cat([old_v, held[1]], 1)
                self.models[sequence_id].layers[layer] = new
                if count:
                    self.compare(part(q), new, (part(out), part(lse)), index, start)
                offset += count

    def compare(self, q: Tensor, kv: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor], index: int, start: int) -> None:
        """Raise unless out and lse of one sequence's new tokens are as near the oracle's as the dtype allows."""
        self.comparisons += 1
        mask, score = self.mask, self.score_mod
        at_mask = None if mask is None else lambda b, h, q, kv: mask(b + index, h, q + start, kv)
        at_score = None if score is None else lambda s, b, h, q, kv: score(s, b + index, h, q + start, kv)
        args = {"mask": at_mask, "score_mod": at_score, "scale": self.scale, "sink": self.sink}
        out, lse = oracle(q[None], kv[0][None], kv[1][None], return_lse=True, **args)
        # One rounding of out to its dtype, one of probabilities by GPU kernels. Scores are some tens: exponents err by tens of roundings.
        wide = 256 * torch.finfo(state_dtype(self.dtype)).eps
        largest = 1 + float(kv[1].double().abs().max())
        torch.testing.assert_close(got[0].double(), out[0], rtol=0, atol=largest * (2 * torch.finfo(self.dtype).eps + wide))
        torch.testing.assert_close(got[1].double(), lse[0], rtol=wide, atol=wide)


def _part(x: Tensor, *, index: int | None, span: slice) -> Tensor:
    """The tokens of one sequence: a row of a batch, or a span of a ragged tensor."""
    return x[0, :, span] if index is None else x[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=None, help="end after so many cases")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="such as bfloat16; drawn at random by default")
    parser.add_argument("--longest", type=int, default=700, help="tokens of the longest sequence")
    parser.add_argument("--group", type=int, default=1, help="seeds that share GPU kernels")
    parser.add_argument("--split", type=int, default=None, help="tokens of the smallest split of the triton kernel, a multiple of 64")
    options = parser.parse_args()
    if options.split is not None:
        from longspan._kernels.triton import decode_call

        decode_call.SMALLEST_SPLIT = options.split
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import speed_up

        speed_up()
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    end, seed, cases = time.monotonic() + options.seconds, options.first, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `timeout` ends a process that compiles: the count is printed then, too
    try:
        while time.monotonic() < end and cases != options.cases:
            Case(seed, kernel=options.kernel, device=options.device, dtype=dtype, longest=options.longest, group=options.group).run()
            seed, cases = seed + 1, cases + 1
    finally:
        print(f"{cases} cases passed, seeds {options.first} to {seed - 1}", flush=True)


if __name__ == "__main__":
    main()
