"""Ranks that differ in a control message all raise the same error, which names the ranks and the field."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan._comm.agreement import AGREEMENT, MAX_FIELDS, WORDS, Agreement, CallDescription, agree, raise_on_all_ranks
from longspan._comm.all_reduce import all_reduce_rows
from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import Mesh
from longspan._comm.row_moves import RowMoves, move_rows
from longspan.testing import virtual_world

SAME = {"dtype": "bfloat16", "plan": "6fa1", "seq_len": "4096"}


def errors_by_rank(
    shape: int | tuple[int, int], fields: dict[int, dict[str, str]], errors: dict[int, Exception] | None = None
) -> list[Exception | None]:
    """The error of each rank, None where it raises none. `fields` and `errors` are of ranks that differ from SAME."""

    def fn(mesh: Mesh) -> Exception | None:
        try:
            if mesh.rank in (errors or {}):
                raise_on_all_ranks(mesh, (errors or {})[mesh.rank])
            agree(mesh, CallDescription("a call", fields.get(mesh.rank, SAME)))
        except Exception as error:
            return error
        return None

    return virtual_world(shape).run(fn)


@pytest.mark.parametrize("shape", [1, 2, 5, (2, 3)], ids=str)
def test_equal_descriptions_agree(shape: int | tuple[int, int]) -> None:
    assert not any(errors_by_rank(shape, {}))


def test_agreement_costs_one_fixed_size_exchange_per_axis() -> None:
    world = virtual_world((2, 3))
    world.run(lambda mesh: agree(mesh, CallDescription("a call", SAME)))
    assert {e.what for e in world.exchanges} == {AGREEMENT}
    assert len(world.exchanges) == 2 + 3
    sent = [sum(int(e.bytes.sum(1)[e.ranks.index(r)]) for e in world.exchanges if r in e.ranks) for r in range(world.size)]
    assert sent == [8 * WORDS * 2 + 3 * 8 * WORDS] * 6
    assert world.bytes_sent == 0


def test_ranks_at_different_calls_name_the_calls_and_not_their_fields() -> None:
    def fn(mesh: Mesh) -> str:
        call = CallDescription("unshard", {"dim": "2"}) if mesh.rank == 1 else CallDescription("attention, forward pass", SAME)
        with pytest.raises(ValueError) as caught:
            agree(mesh, call)
        return str(caught.value)

    (text,) = set(virtual_world(3).run(fn))
    assert "call: rank 1 has unshard, ranks 0, 2 have attention, forward pass. All ranks" in text


def test_backward_passes_of_different_forward_passes_do_not_agree() -> None:
    call = CallDescription("attention, backward pass", SAME)

    def fn(mesh: Mesh) -> tuple[str, int]:
        passes = [Agreement(mesh, CallDescription("attention, forward pass", SAME)) for _ in range(2)]
        for forward in passes:
            forward.wait()
        Agreement(mesh, call, forward=passes[0].number).wait()
        Agreement(mesh, call, forward=0 if mesh.rank == 1 else passes[0].number).wait()  # a compiled rank does not know the number
        with pytest.raises(ValueError) as caught:
            Agreement(mesh, call, forward=passes[mesh.rank == 1].number).wait()
        return str(caught.value), passes[0].number

    (text, first), *others = virtual_world(3).run(fn)
    assert others == [(text, first)] * 2
    assert re.search(rf"forward pass: rank 1 has call \d+, ranks 0, 2 have call {first}\. All", text)


def test_a_rank_that_does_not_know_its_forward_pass_is_not_named_for_it() -> None:
    def fn(mesh: Mesh) -> str:
        fields = SAME | {"dtype": "float16"} if mesh.rank == 2 else SAME
        with pytest.raises(ValueError) as caught:
            Agreement(mesh, CallDescription("attention, backward pass", fields), forward=0 if mesh.rank == 1 else 7).wait()
        return str(caught.value)

    texts = virtual_world(3).run(fn)
    assert "dtype: rank 2 has float16" in texts[0] and "forward pass:" not in texts[0] and len(set(texts)) == 1


@pytest.mark.parametrize(("error", "disagreed", "marked"), [(None, False, 0), (None, True, 0), ("lost", True, 0), ("lost", False, 1)])
def test_a_mesh_is_broken_by_errors_that_are_not_disagreements(error: str | None, disagreed: bool, marked: int) -> None:
    calls: list[Any] = []
    mesh: Any = SimpleNamespace(size=1, mark_broken=lambda *call: calls.append(call))
    agreement = Agreement(mesh, CallDescription("a call", SAME))
    agreement._disagreed = disagreed
    raised = None if error is None else RuntimeError(error)
    agreement.__exit__(None if raised is None else RuntimeError, raised, None)
    assert calls == [("a call", raised)] * marked


def test_an_agreement_can_be_waited_for_twice() -> None:
    def fn(mesh: Mesh) -> int:
        agreement = Agreement(mesh, CallDescription("a call", SAME))
        agreement.wait()
        agreement.wait()
        return agreement.number

    assert len(set(virtual_world(3).run(fn))) == 1


def test_a_description_has_a_bounded_number_of_fields() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_FIELDS} fields, got {MAX_FIELDS + 1}"):
        agree(Mesh(axes=Mesh.abstract(2).axes, coordinate=(0,)), CallDescription("a", {str(i): "" for i in range(MAX_FIELDS + 1)}))


GATHERS = {
    "dtype": lambda odd: (torch.zeros(2, 3, dtype=torch.int32 if odd else torch.float32), [2, 2, 2]),
    "row shape": lambda odd: (torch.zeros(2, 4 if odd else 3), [2, 2, 2]),
    "tokens": lambda odd: (torch.zeros(3 if odd else 2, 3), [2, 3, 2] if odd else [2, 2, 2]),
}


@pytest.mark.parametrize("field", list(GATHERS))
def test_a_gather_of_unlike_rows_raises_on_every_rank(field: str) -> None:
    def fn(mesh: Mesh) -> str:
        rows, counts = GATHERS[field](mesh.rank == 1)
        with pytest.raises(ValueError) as caught:
            all_gather_rows(mesh, rows, counts)
        return str(caught.value)

    (text,) = set(virtual_world(3).run(fn))
    assert f"{field}: rank 1 has" in text


@pytest.mark.parametrize("field", ["dtype", "row shape"])
@pytest.mark.parametrize("call", ["move", "sum"])
def test_moves_and_sums_of_unlike_rows_raise_on_every_rank(call: str, field: str) -> None:
    def fn(mesh: Mesh) -> str:
        odd = mesh.rank == 1
        x = torch.zeros(2, 4 if odd and field == "row shape" else 3, 5, dtype=torch.int32 if odd and field == "dtype" else torch.int64)
        moves = RowMoves(hops=(), order=torch.arange(2))
        with pytest.raises(ValueError) as caught:
            if call == "move":
                move_rows(mesh, x, moves, what="move", fields={})
            else:
                all_reduce_rows(mesh, x, lambda rows: rows.sum(0), lambda rows, _: rows, what="sum", fields={})
        return str(caught.value)

    (text,) = set(virtual_world(3).run(fn))
    assert f"{field.removeprefix('row ') if call == 'sum' else field}: rank 1 has" in text


@pytest.mark.parametrize("shape", [4, (2, 2)], ids=str)
def test_every_rank_names_the_field_and_the_rank_that_differs(shape: int | tuple[int, int]) -> None:
    errors = errors_by_rank(shape, {2: SAME | {"dtype": "float32"}})
    assert all(type(error) is ValueError for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert re.search(r"dtype: rank 2 has float32, ranks 0, 1, 3 have bfloat16\. All ranks", str(errors[0]))
    assert "plan" not in str(errors[0]).split(".")[0]


def test_several_fields_and_several_values_are_all_named() -> None:
    errors = errors_by_rank(5, {1: SAME | {"dtype": "float32"}, 3: SAME | {"dtype": "float16", "seq_len": "4095"}})
    assert "dtype: rank 1 has float32, rank 3 has float16, ranks 0, 2, 4 have bfloat16" in str(errors[4])
    assert "seq_len: rank 3 has 4095, ranks 0, 1, 2, 4 have 4096" in str(errors[4])


def test_on_a_tie_the_lowest_rank_counts_as_the_others() -> None:
    assert "dtype: rank 1 has float32, rank 0 has bfloat16" in str(errors_by_rank(2, {1: SAME | {"dtype": "float32"}})[1])
    assert "dtype: rank 1 has bfloat16, rank 0 has float32" in str(errors_by_rank(2, {0: SAME | {"dtype": "float32"}})[0])


def test_a_field_that_only_some_ranks_have_is_named() -> None:
    errors = errors_by_rank(3, {1: SAME | {"score_mod": "alibi"}, 2: {"dtype": "bfloat16", "plan": "6fa1"}})
    assert "score_mod: rank 1 has alibi, ranks 0, 2 have no such field" in str(errors[0])
    assert "seq_len: rank 2 has no such field, ranks 0, 1 have 4096" in str(errors[0])


def test_a_rank_with_bad_arguments_raises_its_error_and_other_ranks_name_it() -> None:
    mine = TypeError("q: expected 4 dims, got 3; é ☃")
    errors = errors_by_rank((2, 3), {}, {3: mine})
    assert errors[3] is mine
    for rank, error in enumerate(errors):
        if rank != 3:
            assert type(error) is RuntimeError
            assert str(error) == "rank 3 raised in this call: TypeError: q: expected 4 dims, got 3; é ☃"


def test_ranks_that_all_have_bad_arguments_raise_their_errors() -> None:
    mine = {r: ValueError("bad") for r in range(3)}
    assert errors_by_rank(3, {}, mine) == [mine[0], mine[1], mine[2]]
    errors = errors_by_rank(3, {}, {0: ValueError("a"), 2: ValueError("b")})
    assert str(errors[1]) == "rank 0 raised in this call: ValueError: a; rank 2 raised in this call: ValueError: b"


def test_a_rank_alone_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="bad"):
        raise_on_all_ranks(Mesh.abstract(1), ValueError("bad"))


def test_many_ranks_are_not_all_listed() -> None:
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more have 4096" in str(errors_by_rank(11, {0: SAME | {"seq_len": "1"}})[5])


@pytest.mark.parametrize("forward", [None, 7])
def test_a_rank_whose_call_raised_says_so_with_the_call(forward: int | None) -> None:
    mine = ValueError("bad")

    def fn(mesh: Mesh) -> Exception | None:
        call = CallDescription("a call", SAME)
        try:
            Agreement(mesh, call, forward=forward, error=mine if mesh.rank == 1 else None).wait()
        except Exception as error:
            return error
        return None

    errors = virtual_world(3).run(fn)
    assert errors[1] is mine and [str(errors[r]) for r in (0, 2)] == ["rank 1 raised in this call: ValueError: bad"] * 2


def test_calls_of_equal_fields_differ_by_their_kinds() -> None:
    def fn(mesh: Mesh) -> str:
        with pytest.raises(ValueError) as caught:
            agree(mesh, CallDescription("one" if mesh.rank else "another", SAME))
        return str(caught.value)

    (text,) = set(virtual_world(2).run(fn))
    assert text.startswith("the 2 ranks of this mesh do not agree: call: rank 1 has one, rank 0 has another. All ranks")


def test_only_ranks_that_do_not_all_raise_exchange_texts() -> None:
    for raising, exchanges in (((0, 1, 2), 1), ((0, 2), 3)):
        world = virtual_world(3)

        def fn(mesh: Mesh, raising: tuple[int, ...] = raising) -> None:
            with pytest.raises((KeyError, RuntimeError)):
                if mesh.rank in raising:
                    raise_on_all_ranks(mesh, KeyError(str(mesh.rank)))
                agree(mesh, CallDescription("a call", SAME))

        world.run(fn)
        assert len(world.exchanges) == exchanges


def test_the_number_of_a_call_is_that_of_the_first_rank() -> None:
    def fn(mesh: Mesh) -> tuple[int, int]:
        agreement = Agreement(mesh, CallDescription("a call", SAME))
        sent = agreement._sent_number
        assert agreement.number == 0 and not agreement.done
        agreement.wait()
        assert agreement.done
        return sent, agreement.number

    sent, numbers = zip(*virtual_world((2, 2)).run(fn))
    assert set(numbers) == {sent[0]} and len(set(sent)) == 4
    assert Agreement.none().done and Agreement.none().number == 0


def test_descriptions_have_a_digest_for_each_field_by_name_and_value() -> None:
    of = lambda kind, **fields: CallDescription(kind, fields).digests
    (kind, a, b), other = of("k", a="1", b="2"), of("l", a="1", b="3")
    assert other[0] != kind and other[1] == a and other[2] != b and of("k", b="1")[1] != a and len({kind, a, b}) == 3
    assert of("k") == (kind,) and all(-(2**63) <= word < 2**63 for word in (kind, a, b))
    assert len(CallDescription("k", {str(i): "" for i in range(MAX_FIELDS)}).digests) == MAX_FIELDS + 1
    before, after = CallDescription("k", {"a": "1"}).words
    assert len(before) == 24 and len(after) == 8 * MAX_FIELDS and (WORDS, MAX_FIELDS) == (24, 20)
