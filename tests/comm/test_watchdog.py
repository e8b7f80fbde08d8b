"""What the watchdog says of the ranks' notes, and the timeouts it takes; processes that are late or gone are in test_processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from longspan._comm import watchdog
from longspan._comm.watchdog import Answers, StartedExchange, Watchdog, configured_timeout, describe

EXCHANGE = StartedExchange(group="cp", number=7, what="stage 2 of 3 (ring), forward", call="attention, forward pass")
NAME = "'stage 2 of 3 (ring), forward' of 'attention, forward pass'"


def note(number: int, *, held_up: bool = False, left: str = "") -> dict[str, Any]:
    return {"groups": {"cp": [number, "stage 1", "attention, forward pass", 2.5]}, "held up": held_up, "left": left}


def test_a_rank_that_has_not_started_the_exchange_is_late_and_the_others_are_not_to_blame() -> None:
    text = describe(EXCHANGE, [0, 1, 2], {0: note(7), 1: note(7, held_up=True), 2: note(6)}, [])
    assert text == (
        f"global rank 2 is late, it has not started {NAME}: its last exchange is 'stage 1' of 'attention, forward pass', number 6, "
        "started 2.5 s before it answered; not to blame: global ranks 0, 1"
    )


def test_a_neighbour_that_waits_itself_is_not_named() -> None:
    text = describe(EXCHANGE, [0, 1, 2], {0: note(7), 1: note(5, held_up=True)}, [2])
    assert text == "global rank 2 does not respond: it has ended or is stopped; not to blame: global ranks 0, 1"


def test_a_rank_of_another_axis_that_holds_up_a_neighbour_is_named() -> None:
    text = describe(EXCHANGE, [0, 2], {0: note(7), 1: note(7), 2: note(6, held_up=True)}, [3])
    assert text == "global rank 3 does not respond: it has ended or is stopped; not to blame: global ranks 0, 2"


def test_a_rank_that_left_its_call_is_named_with_its_error() -> None:
    text = describe(EXCHANGE, [0, 1], {0: note(7), 1: note(6, left="attention, forward pass ended there with MemoryError: x")}, [])
    assert text.startswith("global rank 1 has left its call: attention, forward pass ended there with MemoryError: x; not to blame")


def test_ranks_that_all_wait_for_one_exchange_point_to_the_network() -> None:
    assert describe(EXCHANGE, [0, 1], {0: note(7), 1: note(7)}, []) == (
        f"every rank has started {NAME}, and all respond: check the network between them"
    )


def test_ranks_that_wait_for_different_exchanges_are_named_when_nobody_else_is() -> None:
    assert describe(EXCHANGE, [0, 1], {0: note(7), 1: note(6, held_up=True)}, []).startswith("global rank 1 is late")


def test_ranks_that_ask_at_the_same_time_answer_each_other() -> None:
    store = HashStore()
    ranks = [Answers(Watchdog(), store, rank, 0.3) for rank in range(3)]
    ranks[2].stop()  # as a rank that has ended
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            answers = list(threads.map(lambda answers: answers.ask([0, 1, 2]), ranks[:2]))
            assert [sorted(notes or {}) for notes in answers] == [[0, 1], [0, 1]]
    assert sorted(ranks[0].ask([0, 1, 2]) or {}) == [0, 1]  # rank 1 does not ask
    for rank in ranks[:2]:
        rank.stop()


def test_stop_ends_a_question_that_nobody_answers() -> None:
    """A thread in a call of the store would abort the process when the interpreter ends."""
    answers = Answers(Watchdog(), HashStore(), 0, 0.3)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(answers.ask, [0, 1])
        while len(answers._threads) < 2:
            time.sleep(0.01)
        started = time.monotonic()
        answers.stop()
        assert not any(thread.is_alive() for thread in answers._threads)
        assert time.monotonic() - started < answers._patience / 2
        assert asked.result() is None


def test_stop_waits_for_all_threads_together_as_long_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], []

    class Stuck:
        def join(self, timeout: float) -> None:
            waited.append(timeout)
            now[0] += 0.75 * watchdog._STOP_SECONDS

    answers = Answers(Watchdog(), HashStore(), 0, 0.3)
    answers.stop()
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    answers._threads = [Stuck() for _ in range(3)]  # type: ignore[misc]
    answers.stop()
    assert waited == pytest.approx([watchdog._STOP_SECONDS, 0.25 * watchdog._STOP_SECONDS, 0.0])


def test_the_timeout_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSPAN_TIMEOUT", raising=False)
    assert configured_timeout() == timedelta(minutes=10)
    monkeypatch.setenv("LONGSPAN_TIMEOUT", "2.5")
    assert configured_timeout() == timedelta(seconds=2.5)
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("LONGSPAN_TIMEOUT", wrong)
        with pytest.raises(ValueError, match=f"LONGSPAN_TIMEOUT: expected a number of seconds above 0, got {wrong!r}"):
            configured_timeout()
