"""Continuous batching: requests arrive while others are decoded, and every step computes prompts and new tokens together.

    python examples/serve.py

A small random decoder serves requests from one paged cache. Requests with a common prompt prefix fork it; if pages run out, a request waits
until another one ends. Compares each answer with the same request served alone; exits with an error if they do not match.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import longspan as ls

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 97, 64, 4, 2, 16, 2
NEW_TOKENS, MAX_BATCH = 12, 4


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens generated so far. `waiting`: tokens that the cache does not hold yet."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    sequence: int = -1


class Decoder(nn.Module):
    """Attention layers with residual connections over a cache; a window of 24 tokens in every second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        self.projections = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, n * DIM) for n in sizes) for _ in range(LAYERS))
        self.outputs = nn.ModuleList(nn.Linear(HEADS * DIM, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, step: Any) -> Tensor:
        """Logits [T, VOCABULARY] of all new tokens of a step."""
        x = self.embed(tokens) + torch.sin(step.positions[0, :, None] / torch.arange(1, WIDTH + 1, device=tokens.device))
        for layer in range(LAYERS):
            q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(0, 1)[None] for p in self.projections[layer])
            mask = ls.causal() if layer % 2 else ls.causal() & ls.sliding_window(24)
            out = ls.attention(q, k, v, cache=step, layer=layer, mask=mask)
            x = x + self.outputs[layer](out[0].transpose(0, 1).flatten(1))
        return x @ self.embed.weight.T


class Server:
    """Serves requests in order of arrival, at most MAX_BATCH at once."""

    def __init__(self, model: Decoder, *, pages: int, prefix: list[int]) -> None:
        weight = model.embed.weight
        self.model, self.device, self.prefix = model, weight.device, prefix
        self.cache = ls.KVCache(
            pages=pages, page_size=8, layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype=weight.dtype, device=weight.device
        )
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        (self.shared,) = self.cache.allocate(1)
        self._forward([(self.shared, prefix)])

    def _forward(self, parts: list[tuple[int, list[int]]]) -> list[int]:
        """The next token of each sequence, after its new tokens."""
        step = self.cache.step([sequence for sequence, _ in parts], [len(tokens) for _, tokens in parts])
        logits = self.model(torch.tensor([t for _, tokens in parts for t in tokens], device=self.device), step)
        ends = torch.tensor([len(tokens) for _, tokens in parts]).cumsum(0) - 1
        return logits[ends.to(self.device)].argmax(-1).tolist()

    def _admit(self) -> None:
        """Start requests while there is room for their prompts and answers."""
        while self.queue and len(self.running) < MAX_BATCH:
            tokens = len(self.queue[0].prompt) + NEW_TOKENS
            if self.cache.free_pages < (MAX_BATCH + 1) * (tokens // 8 + 2):
                return
            request = self.queue.popleft()
            fits = request.prompt[: len(self.prefix)] == self.prefix and len(request.prompt) > len(self.prefix)
            request.sequence = self.cache.fork(self.shared) if fits else self.cache.allocate(1)[0]
            request.waiting = request.prompt[len(self.prefix) :] if fits else request.prompt
            self.running.append(request)

    def step(self) -> int:
        """One step of all running requests; returns the number of new tokens."""
        self._admit()
        parts = [(r.sequence, r.waiting) for r in self.running]
        for request, token in zip(list(self.running), self._forward(parts) if parts else [], strict=True):
            request.answer.append(token)
            request.waiting = [token]
            if len(request.answer) == NEW_TOKENS:
                self.cache.free(request.sequence)
                self.running.remove(request)
        return sum(len(tokens) for _, tokens in parts)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder().to(device, torch.float64 if device == "cpu" else torch.float32)
    prefix = torch.randint(0, VOCABULARY, (19,)).tolist()
    requests = [Request((prefix if i % 2 else []) + torch.randint(0, VOCABULARY, (5 + 7 * i % 31,)).tolist()) for i in range(10)]
    server = Server(model, pages=60, prefix=prefix)
    arrivals, tokens, start = deque(requests), 0, time.perf_counter()
    while arrivals or server.queue or server.running:
        if arrivals:
            server.queue.append(arrivals.popleft())  # one request arrives before every step
        tokens += server.step()
    seconds = time.perf_counter() - start
    for request in requests:
        alone = Server(model, pages=60, prefix=prefix)
        copy = Request(request.prompt)
        alone.queue.append(copy)
        while len(copy.answer) < NEW_TOKENS:
            alone.step()
        if copy.answer != request.answer:
            raise SystemExit(f"the answer {request.answer} differs from that of the request alone, {copy.answer}")
    print(f"{len(requests)} requests, {tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s): answers equal those alone")


if __name__ == "__main__":
    main()
