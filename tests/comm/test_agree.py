"""Ranks that disagree hear of it, all of them, with the field and the rank."""

from __future__ import annotations

import re

import pytest

from longspan._comm.agreement import agree
from longspan._comm.mesh import Mesh
from longspan.testing import virtual_world

SAME = {"dtype": "bfloat16", "plan": "6fa1", "seq_len": "4096"}


def told(
    shape: int | tuple[int, int], fields: dict[int, dict[str, str]], errors: dict[int, Exception] | None = None
) -> list[Exception | None]:
    """What agree raises on each rank; `fields` and `errors` are of ranks that differ from SAME."""

    def fn(mesh: Mesh) -> Exception | None:
        try:
            agree(mesh, fields.get(mesh.rank, SAME), (errors or {}).get(mesh.rank))
        except Exception as error:
            return error
        return None

    return virtual_world(shape).run(fn)


@pytest.mark.parametrize("shape", [1, 2, 5, (2, 3)], ids=str)
def test_ranks_that_agree_go_on(shape: int | tuple[int, int]) -> None:
    assert not any(told(shape, {}))


def test_agreement_costs_one_small_exchange_for_each_axis() -> None:
    world = virtual_world((2, 3))
    world.run(lambda mesh: agree(mesh, SAME))
    assert {e.what for e in world.exchanges} == {"agreement of all ranks, digests"}
    assert len(world.exchanges) == 2 + 3
    assert (
        max(int(sum(e.bytes.sum(1)[e.ranks.index(r)] for e in world.exchanges if r in e.ranks)) for r in range(world.size))
        == 40 * 2 + 3 * 40
    )
    assert world.bytes_sent == 0


def test_the_order_of_fields_does_not_matter() -> None:
    assert not any(told(2, {1: dict(reversed(SAME.items()))}))


@pytest.mark.parametrize("shape", [4, (2, 2)], ids=str)
def test_every_rank_names_the_field_and_the_rank_that_differs(shape: int | tuple[int, int]) -> None:
    errors = told(shape, {2: SAME | {"dtype": "float32"}})
    assert all(type(error) is ValueError for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert re.search(r"dtype: rank 2 has float32, ranks 0, 1, 3 have bfloat16\. All ranks", str(errors[0]))
    assert "plan" not in str(errors[0]).split(".")[0]


def test_several_fields_and_several_values_are_all_named() -> None:
    errors = told(5, {1: SAME | {"dtype": "float32"}, 3: SAME | {"dtype": "float16", "seq_len": "4095"}})
    assert "dtype: rank 1 has float32, rank 3 has float16, ranks 0, 2, 4 have bfloat16" in str(errors[4])
    assert "seq_len: rank 3 has 4095, ranks 0, 1, 2, 4 have 4096" in str(errors[4])


def test_on_a_tie_the_lowest_rank_counts_as_the_others() -> None:
    assert "dtype: rank 1 has float32, rank 0 has bfloat16" in str(told(2, {1: SAME | {"dtype": "float32"}})[1])
    assert "dtype: rank 1 has bfloat16, rank 0 has float32" in str(told(2, {0: SAME | {"dtype": "float32"}})[0])


def test_a_field_that_only_some_ranks_have_is_named() -> None:
    errors = told(3, {1: SAME | {"score_mod": "alibi"}, 2: {"dtype": "bfloat16", "plan": "6fa1"}})
    assert "score_mod: rank 1 has alibi, ranks 0, 2 have no such field" in str(errors[0])
    assert "seq_len: rank 2 has no such field, ranks 0, 1 have 4096" in str(errors[0])


def test_a_rank_that_refused_raises_its_own_error_and_the_others_say_why() -> None:
    mine = TypeError("q: expected 4 dims, got 3; é ☃")
    errors = told((2, 3), {}, {3: mine})
    assert errors[3] is mine
    for rank, error in enumerate(errors):
        if rank != 3:
            assert type(error) is RuntimeError
            assert str(error) == "rank 3 refused this call: TypeError: q: expected 4 dims, got 3; é ☃"


def test_ranks_that_all_refuse_alike_raise_their_own_errors() -> None:
    mine = {r: ValueError("bad") for r in range(3)}
    assert told(3, {}, mine) == [mine[0], mine[1], mine[2]]
    own = told(3, {}, {0: ValueError("a"), 2: ValueError("b")})
    assert str(own[1]) == "rank 0 refused this call: ValueError: a; rank 2 refused this call: ValueError: b"


def test_a_rank_alone_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="bad"):
        agree(Mesh.abstract(1), SAME, ValueError("bad"))


def test_many_ranks_are_not_all_listed() -> None:
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more have 4096" in str(told(11, {0: SAME | {"seq_len": "1"}})[5])
