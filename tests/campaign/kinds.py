"""The random campaigns on a GPU: how many cases each should reach, how many seeds share kernels, and how one seed is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

CALLS_TILE = 128  # longspan's constants keep their values
# Seeds of a group; of calls, as in `tests.fuzz.groups`, which imports torch.
CALLS_MEMBERS, INVARIANT_MEMBERS, CACHE_MEMBERS, SELECTED_MEMBERS = 64, 256, 64, 128


class NotSupported(Exception):
    """The documented answer to a call that a named kernel does not support."""


class Right(NamedTuple):
    """Result of a case that passed. families: the features it covers. comparisons: number of compared results."""

    families: set[str]
    comparisons: int = 1


class Campaign(NamedTuple):
    """`check(seed, device)` raises if the case is wrong.

    target: cases that the campaign should reach. members: consecutive seeds that share kernels. first: so many of them run before another
    group begins. groups: of campaigns side by side, groups begin in this proportion.
    """

    target: int
    members: int
    first: int
    groups: int
    check: Callable[[int, str], Right]


def _call(seed: int, device: str) -> Right:
    from tests.fuzz.cases import draw, families
    from tests.fuzz.harness import Refused, check

    case = draw(seed, CALLS_TILE, device=device)
    try:
        check(case)
    except Refused as error:
        raise NotSupported(str(error)) from None
    dims = {f"dim {case['dim']}", f"value dim {case['value_dim']}"}
    return Right(families(case) | dims)


def _invariant(kernel: str) -> Callable[[int, str], Right]:
    def check(seed: int, device: str) -> Right:
        from tests import invariant_cases as cases

        counts: Counter[str] = Counter()
        options = {"kernel": kernel, "device": device, "longest": 1500 if device != "cpu" else 100, "group": INVARIANT_MEMBERS}
        if wrong := cases.failures(seed, counts, **options):
            raise AssertionError("; ".join(wrong))
        one = cases.problem(seed, **{**options, "device": "cpu", "longest": 1})
        families = {name for name in counts if name != "documents"}
        families |= {f"mask {one.mask}", f"score {one.score}", str(one.q.dtype).removeprefix("torch."), f"sink {one.sink is not None}"}
        families |= {f"dims {one.q.shape[3]}/{one.v.shape[3]}", f"strategy {one.strategies[0]}"}
        return Right(families, sum(counts.values()) - counts["documents"])

    return check


def _cache(seed: int, device: str) -> Right:
    from tests.cache.cases import Case

    case = Case(seed, device=device, group=CACHE_MEMBERS)
    case.run()
    families = {f"mask {case.mask_name}", f"score {case.score_name}", str(case.dtype).removeprefix("torch."), f"page {case.page_size}"}
    families |= {f"dims {case.dims[0]}/{case.dims[1]}"} | ({"shared KV"} if case.shared else set())
    families |= {"sink"} if case.sink is not None else set()
    return Right(families | set(case.done), case.comparisons)


def _selected(seed: int, device: str) -> Right:
    from tests.selected.cases import check, draw

    case = draw(seed, device=device, longest=300 if device == "cpu" else 700, group=SELECTED_MEMBERS)
    try:
        check(case, kernel=case.kernel)
    except ValueError as error:
        if "does not support this call" not in str(error):
            raise
        raise NotSupported(str(error)) from None
    return Right(set(case.families))


def campaigns() -> dict[str, Campaign]:
    """By name."""
    return {
        "calls": Campaign(2000, CALLS_MEMBERS, 16, 75, _call),
        "invariant hopper": Campaign(500, INVARIANT_MEMBERS, 30, 6, _invariant("hopper")),
        "invariant triton": Campaign(500, INVARIANT_MEMBERS, 30, 6, _invariant("triton")),
        "cache": Campaign(500, CACHE_MEMBERS, 10, 24, _cache),
        "selected": Campaign(2000, SELECTED_MEMBERS, 25, 40, _selected),
    }
