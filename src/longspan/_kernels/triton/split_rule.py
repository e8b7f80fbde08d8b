"""How sequences are split for decoding, and whether a CTA computes one split or a group of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RESIDENT = 2  # CTAs per SM of a launch by groups
_START = 256
_FULL = 0.9  # a launch by groups keeps at least this share of the device busy


class SplitRule(NamedTuple):
    """Arguments of `decode_splits.split_tokens` and `decode_splits.group_tokens` besides the length."""

    smallest: int
    coarse: int
    share: int
    group: int = 0

    def tokens(self, length: int) -> int:
        """As `decode_splits.split_tokens`."""
        tokens = self.smallest
        while tokens < self.share * (length // tokens) or (tokens < self.coarse and 4 * tokens < length):
            tokens *= 2
        return tokens

    def count(self, length: int, *, grouped: bool = False) -> int:
        """Number of splits, or of groups of splits, of a sequence."""
        tokens = self.tokens(length)
        return -(-length // (self._group_tokens(tokens) if grouped else tokens))

    def _group_tokens(self, tokens: int) -> int:
        """As `decode_splits.group_tokens`."""
        return max(tokens, min(8 * tokens, self.group))

    def max_count(self, longest: int, *, grouped: bool = False) -> int:
        """Upper bound of `count` over all lengths up to `longest`: a shorter sequence may have more splits than a longer one."""
        max_splits, tokens = 0, self.smallest
        while True:
            last = tokens * (tokens // self.share + 1) - 1  # the longest sequence with splits of `tokens`
            if tokens < self.coarse:
                last = min(last, 4 * tokens)
            taken = self._group_tokens(tokens) if grouped else tokens
            max_splits = max(max_splits, -(-min(last, longest) // taken))
            if last >= longest:
                return max_splits
            tokens *= 2

    def counts(self, lengths: Sequence[int]) -> SplitCounts:
        """Numbers of splits and groups of sequences."""
        splits = groups = joined = most_groups = largest = 0
        for length in lengths:
            tokens = self.tokens(length)
            group = self._group_tokens(tokens)
            count = -(-length // group)
            splits, joined, most_groups = max(splits, -(-length // tokens)), max(joined, group // tokens), max(most_groups, count)
            groups, largest = groups + count, max(largest, min(length, group))
        return SplitCounts(splits, most_groups, joined, groups, largest, sum(lengths), len(lengths))

    def cta_group(self, split: SplitCounts, longest: int, tiles: int, sms: int) -> int:
        """Tokens of a group of splits per CTA, one CTA per SM, that ends a batch first; 0 for one split per CTA.

        Results do not depend on it. tiles: of query rows, of all KV heads. A CTA starts and ends in the time of `_START` tokens.
        """
        tokens = self.tokens(longest)
        taken = {}
        for group in (tokens, 2 * tokens, 4 * tokens, 8 * tokens):
            waves = -(-tiles * max(split.sequences, -(-split.tokens // group)) // sms)
            taken[group] = waves * (min(group, longest) + _START)
        best = min(taken, key=lambda group: taken[group])
        return 0 if best == tokens else best

    def largest_counts(self, longest: int, sequences: int) -> SplitCounts:
        """Upper bounds of `counts` for sequences of up to `longest` tokens each, of which one group per sequence is certain."""
        splits, groups = (self.max_count(longest, grouped=grouped) for grouped in (False, True))
        joined = self._group_tokens(self.smallest) // self.smallest
        return SplitCounts(splits, groups, joined, sequences, self.group, sequences * self.group, sequences)


class SplitCounts(NamedTuple):
    """Of sequences: most splits of one, most groups of one, most splits of a group; all groups, tokens of the largest, all tokens,
    sequences.
    """

    splits: int
    groups: int
    joined: int
    all_groups: int
    largest: int
    tokens: int
    sequences: int

    def groups_fill(self, tiles: int, sms: int, needed: int = 1) -> bool:
        """Whether one CTA per group fills a device. tiles: of query rows, of all KV heads. needed: CTAs per SM for the memory's bandwidth.

        In one wave, the CTAs of the largest group end last. In several, CTAs start as others end, and the device is half idle while the
        last ones run: on average for half the time of a group.
        """
        if self.joined == 1:
            return False
        slots, tokens = RESIDENT * sms, tiles * self.tokens
        taken = needed * sms * self.largest if tiles * self.all_groups <= slots else tokens + slots * self.largest // 4
        return tokens >= _FULL * taken
