"""A model-based test of the cache's bookkeeping: no page is lost, leaked, or shared by accident."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import longspan as ls

PAGES, PAGE_SIZE = 9, 4


class CacheMachine(RuleBasedStateMachine):
    """Every token is a number that no other token has. The model holds, for each sequence, the numbers that it should contain."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache = ls.KVCache(pages=PAGES, page_size=PAGE_SIZE, layers=1, kv_heads=1, head_dim=1, dtype=torch.float64)
        self.contents: dict[int, list[int]] = {}
        self.next_token = 1

    @rule(target=sequences)
    def allocate(self) -> int:
        (sequence_id,) = self.cache.allocate(1)
        self.contents[sequence_id] = []
        return sequence_id

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        child = self.cache.fork(parent)
        self.contents[child] = list(self.contents[parent])
        return child

    @rule(ids=st.lists(sequences, min_size=1, max_size=3, unique=True), counts=st.lists(st.integers(0, 6), min_size=3, max_size=3))
    def step(self, ids: list[int], counts: list[int]) -> None:
        counts, before = counts[: len(ids)], self.cache.free_pages
        try:
            step = self.cache.step(ids, counts)
        except RuntimeError:
            assert self.cache.free_pages == before
            return
        new = [[self.next_token + sum(counts[:i]) + j for j in range(count)] for i, count in enumerate(counts)]
        self.next_token += sum(counts)
        for sequence_id, tokens in zip(ids, new):
            self.contents[sequence_id] += tokens
        x = torch.tensor([token for tokens in new for token in tokens], dtype=torch.float64).view(1, 1, -1, 1)
        out = ls.attention(x, x, x, cache=step, layer=0, scale=0.0)
        for value, sequence_id in zip(out.flatten().tolist(), (i for i, count in zip(ids, counts) for _ in range(count))):
            assert abs(value - sum(self.contents[sequence_id]) / len(self.contents[sequence_id])) < 1e-9

    @rule(sequence_id=sequences, share=st.floats(0, 1))
    def truncate(self, sequence_id: int, share: float) -> None:
        length = int(share * len(self.contents[sequence_id]))
        self.cache.truncate(sequence_id, length)
        del self.contents[sequence_id][length:]

    @rule(sequence_id=consumes(sequences))
    def free(self, sequence_id: int) -> None:
        self.cache.free(sequence_id)
        del self.contents[sequence_id]

    @invariant()
    def sequences_hold_their_tokens(self) -> None:
        pages = self.cache.layer_pages(0)
        for sequence_id, tokens in self.contents.items():
            sequence = self.cache.sequence(sequence_id)
            assert self.cache.lengths(sequence_id).tolist() == [len(tokens)]
            assert pages.gather(sequence.row, 0, len(tokens))[1].flatten().tolist() == tokens
            assert pages.table[sequence.row, : len(sequence.pages)].tolist() == sequence.pages
            assert len(sequence.pages) == -(-len(tokens) // PAGE_SIZE)

    @invariant()
    def pages_are_free_or_held(self) -> None:
        holders: dict[int, list[int]] = {}
        for sequence_id in self.contents:
            for page in self.cache.sequence(sequence_id).pages:
                holders.setdefault(page, []).append(sequence_id)
        assert self.cache.free_pages == PAGES - len(holders)
        for page, ids in holders.items():
            assert self.cache._pool.references(page) == len(ids) == len(set(ids))


CacheMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestCache = CacheMachine.TestCase
