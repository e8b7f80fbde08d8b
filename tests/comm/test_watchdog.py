"""What the watchdog says of the ranks' notes, and the timeouts it takes; processes that are late or gone are in test_processes."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from longspan._comm import watchdog
from longspan._comm.watchdog import Answers, ExchangeLimit, StartedExchange, Waiting, Watchdog, configured_timeout, describe

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


def test_timeouts_are_below_a_hundred_million_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("0.001", "0.5", "99999999"):
        monkeypatch.setenv("LONGSPAN_TIMEOUT", seconds)
        assert configured_timeout() == timedelta(seconds=float(seconds))
    monkeypatch.setenv("LONGSPAN_TIMEOUT", "1e8")
    with pytest.raises(ValueError, match="got '1e8'"):
        configured_timeout()


def two_groups(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 3) -> Any:
    """A job of `size` ranks without processes: its default group, and a group of ranks 0 and 2."""
    Group = type("Group", (), {})
    world, pair = Group(), Group()
    world.group_name, world.ranks, pair.group_name, pair.ranks = "world", list(range(size)), "pair", [0, 2]
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=world), get_rank=lambda: rank, get_world_size=lambda: size, get_process_group_ranks=lambda g: g.ranks
    )
    monkeypatch.setattr(watchdog, "dist", fake)
    return SimpleNamespace(dist=fake, world=world, pair=pair, other=Group())


@pytest.mark.parametrize(("configured", "own", "default", "least", "lowered"), [
    ("600", 1800, 900, 600, True),
    ("600", 300, 900, 300, False),
    ("600", 1800, 60, 60, True),
    ("600", 600, None, 600, False),  # no longer than it was
    ("600", None, None, 600, False),  # a backend that does not tell
    ("600", None, 60, 60, False),
    ("5", 4, 3, 3, True),
])  # fmt: skip
def test_exchanges_get_the_least_timeout_of_the_job_the_group_and_the_environment(
    configured: str, own: int | None, default: int | None, least: int, lowered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = two_groups(monkeypatch)
    monkeypatch.setenv("LONGSPAN_TIMEOUT", configured)
    seconds = lambda t: None if t is None else timedelta(seconds=t)
    asked = []

    def backend_timeout(group: Any, device: str) -> Any:
        asked.append((group, device))
        return group.backend, seconds(default if group is job.world else own)

    monkeypatch.setattr(watchdog, "backend_timeout", backend_timeout)
    set_to: list[Any] = []
    job.world.backend, job.pair.backend = "nobody's", SimpleNamespace(_set_default_timeout=set_to.append)
    limit = watchdog.exchange_limit(job.pair, "cuda")
    assert (limit.timeout, limit.before, limit.backend) == (seconds(least), seconds(own), job.pair.backend if lowered else None)
    assert asked == [(job.pair, "cuda"), (job.world, "cuda")]
    assert watchdog.exchange_limit(job.pair, "cuda") is limit and len(asked) == 2  # read once
    with limit:
        assert set_to == [seconds(least)] * lowered
    assert set_to == [seconds(least), seconds(own)][: 2 * lowered]
    assert watchdog.exchange_limit(job.pair, "cpu") is not limit and asked[2:] == [(job.pair, "cpu"), (job.world, "cpu")]


def test_the_timeout_of_the_default_group_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job, asked = two_groups(monkeypatch), []
    monkeypatch.setenv("LONGSPAN_TIMEOUT", "50")
    monkeypatch.setattr(watchdog, "backend_timeout", lambda group, device: asked.append(group) or ("backend", timedelta(seconds=40)))
    assert watchdog.exchange_limit(job.world, "cpu").timeout == timedelta(seconds=40) and asked == [job.world]
    job.dist.group.WORLD = None
    assert watchdog.exchange_limit(job.pair, "cpu").timeout == timedelta(seconds=40) and asked == [job.world, job.pair]


def silent_watchdog() -> Watchdog:
    """A watchdog that does not start a thread."""
    made = Watchdog()
    made._start = lambda: None  # type: ignore[method-assign]
    return made


def test_exchanges_are_numbered_by_group_and_noted_with_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    job, made, now = two_groups(monkeypatch), silent_watchdog(), [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    assert made.note() == {"groups": {}, "held up": False, "left": ""}
    first = made.start_of(job.pair, "stage 1")
    made.call, now[0] = "c" * 150, 103.25
    assert first == StartedExchange(group="pair", number=1, what="stage 1", call="")
    assert made.start_of(job.pair, "w" * 150).number == 2 and made.start_of(job.world, "x").number == 1
    now[0], made.left = 105.0, "l" * 150
    assert made.note() == {
        "groups": {"pair": [2, "w" * 120, "c" * 120, 1.8], "world": [1, "x", "c" * 120, 1.8]}, "held up": False, "left": "l" * 120
    }  # fmt: skip
    made.failed = True
    assert made.note()["held up"]
    made.failed, made.waiting = False, Waiting(first, job.pair, 1.0, timedelta(1))
    assert made.note()["held up"]
    made.started = {str(i): (first, 105.0) for i in range(65)}
    assert list(made.note()["groups"]) == [str(i) for i in range(1, 65)]


def test_a_thread_is_started_for_every_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    job, started, stopped = two_groups(monkeypatch, rank=2), [], []
    exchange = lambda: made.start_of(job.pair, "x").number

    def answers(*given: Any) -> Any:
        started.append(given)
        return SimpleNamespace(stop=lambda: stopped.append(given))

    stores: list[Any] = ["store"]
    monkeypatch.setattr(watchdog, "Answers", answers)
    monkeypatch.setattr(watchdog, "default_store", lambda: stores[0])
    monkeypatch.setattr(watchdog, "backend_timeout", lambda group, device: (None, timedelta(seconds=8)))
    monkeypatch.delenv("LONGSPAN_WATCHDOG", raising=False)
    made = Watchdog()
    assert [exchange(), exchange()] == [1, 2] and started == [(made, "store", 2, 1.0)]
    made.failed, made.left, made.waiting = True, "a call", Waiting(EXCHANGE, job.pair, 0.0, timedelta(1))
    job.dist.group.WORLD = job.other  # another job
    assert exchange() == 1 and len(started) == 2 and stopped == [started[0]]
    assert (made.failed, made.left, made.waiting) == (False, "", None)
    made.restart()  # after a fork
    assert exchange() == 1 and len(started) == 3 and stopped == started[:2]
    job.dist.group.WORLD, stores[0] = job.world, None
    assert [exchange(), exchange()] == [1, 2] and len(started) == 3 and stopped == started and made._answers is None
    job.dist.group.WORLD, stores[0] = job.other, "store"
    monkeypatch.setenv("LONGSPAN_WATCHDOG", "0")
    assert exchange() == 1 and len(started) == 3 and made._answers is None
    job.dist.group.WORLD = None
    assert [exchange(), exchange()] == [1, 2] and len(started) == 3 and made._world is None
    monkeypatch.setenv("LONGSPAN_WATCHDOG", "1")
    for seconds, interval in ((0.1, 0.3), (2.4, 0.3), (16.0, 2.0), (1000.0, 2.0), (12.0, 1.5)):
        job.dist.group.WORLD = type(job.world)()
        job.dist.group.WORLD.group_name = "world"
        monkeypatch.setattr(watchdog, "backend_timeout", lambda group, device, s=seconds: (None, timedelta(seconds=s)))
        exchange()
        assert started[-1][3] == pytest.approx(interval)


def test_all_ranks_of_jobs_of_up_to_256_ranks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, asked in ((3, range(3)), (256, range(256)), (257, [0, 2])):
        two_groups(monkeypatch, size=size)
        assert watchdog._asked([0, 2]) == asked


def test_a_diagnosis_asks_all_ranks_and_names_the_file_of_the_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    job, made = two_groups(monkeypatch), silent_watchdog()
    exchange = StartedExchange(group="pair", number=7, what="x", call="")
    assert made.diagnosis(job.pair, exchange) is None and made.failed
    replies: list[Any] = [None, {0: {"groups": {"pair": [7]}, "held up": True, "left": ""}}]
    asked = []
    made._answers = SimpleNamespace(ask=lambda ranks: asked.append(ranks) or replies[len(asked) - 1])  # type: ignore[assignment]
    monkeypatch.setattr(watchdog, "_dump_flight_recorder", lambda: None)
    assert made.diagnosis(job.pair, exchange) is None
    replies.append(replies[1])
    late = "global rank 2 does not respond: it has ended or is stopped; global rank 1 does not respond: it has ended or is stopped; "
    assert made.diagnosis(job.pair, exchange) == late + "not to blame: global rank 0"
    monkeypatch.setattr(watchdog, "_dump_flight_recorder", lambda: "/tmp/recorder0")
    assert (made.diagnosis(job.pair, exchange) or "").endswith(
        "not to blame: global rank 0. This rank's flight recorder is in /tmp/recorder0"
    )
    assert asked == [range(3)] * 3


def test_the_flight_recorder_is_written_where_torch_writes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two_groups(monkeypatch, rank=2)
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    data: list[Any] = [b"records"]
    monkeypatch.setattr(watchdog, "flight_recorder_dump", lambda: data[0])
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert watchdog._dump_flight_recorder() is None
    for name in names[::-1]:
        monkeypatch.setenv(name, str(tmp_path / f"{name}_"))
        path = watchdog._dump_flight_recorder()
        assert path == tmp_path / f"{name}_2" and path.read_bytes() == b"records"
    data[0] = None
    assert watchdog._dump_flight_recorder() is None
    data[0] = b"records"
    monkeypatch.setenv(names[0], str(tmp_path / "no such folder" / "x"))
    assert watchdog._dump_flight_recorder() is None


def idle_answers(monkeypatch: pytest.MonkeyPatch, store: Any, rank: int, interval: float = 0.3, group: Any = None) -> Answers:
    """Answers whose thread does nothing, so that a test calls its steps."""
    monkeypatch.setattr(Answers, "_run", lambda self: None)
    return Answers(group or silent_watchdog(), store, rank, interval)


def test_patience_grows_with_the_interval_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [idle_answers(monkeypatch, HashStore(), 0, interval)._patience for interval in (0.3, 1.0, 2.0, 4.0)]
    assert made == [2.0, 2.0, 3.0, 6.0]


def test_questions_are_answered_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    made = idle_answers(monkeypatch, store, 1)
    made._watchdog.left = "left"
    text = '{"groups": {}, "held up": false, "left": "left"}'
    made._answer()
    assert made._question == 0
    for question in (0, 1, 3):
        store.set(f"longspan/watchdog/ask/{question}", "1")
    made._answer()
    assert made._question == 2 and [store.get(f"longspan/watchdog/note/{q}/1").decode() for q in (0, 1)] == [text] * 2
    assert not store.check(["longspan/watchdog/note/2/1"]) and not store.check(["longspan/watchdog/note/3/1"])
    made._note(0)  # late
    assert made._question == 2
    made._patience = 0.05
    assert sorted(made._collect([0, 1, 2])) == [1]
    made._answer()
    assert made._question == 4  # the question after its own was waiting
    assert store.get("longspan/watchdog/ask/2") == b"1"
    made._patience = 60.0
    for question, rank in ((4, 2), (4, 0), (5, 0)):
        store.set(f"longspan/watchdog/note/{question}/{rank}", f'{{"n": {rank}}}')
    assert made._collect([2, 0]) == {1: made._watchdog.note(), 2: {"n": 2}, 0: {"n": 0}} and made._question == 5
    assert sorted(made._collect([1, 0])) == [0, 1]


def test_a_store_that_ends_ends_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = idle_answers(monkeypatch, HashStore(), 0)
    monkeypatch.setattr(made, "_collect", lambda ranks: {1: {"asked": ranks}})
    assert made.ask([0, 1]) == {1: {"asked": [0, 1]}}

    def lost(ranks: Any) -> Any:
        raise OSError

    monkeypatch.setattr(made, "_collect", lost)
    assert made.ask([0, 1]) is None


def test_the_first_rank_that_waits_warns_once_after_half_the_timeout(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    job, now = two_groups(monkeypatch), [100.0]
    made = idle_answers(monkeypatch, HashStore(), 0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    exchange = StartedExchange(group="pair", number=7, what="stage 1", call="")
    at = lambda number: {"groups": {"pair": [number, "w", "", 1.0]}, "held up": False, "left": ""}
    notes = {0: at(7), 2: at(6)}
    asked = []
    monkeypatch.setattr(made, "_collect", lambda ranks: asked.append(ranks) or dict(notes))

    def warned(after: float, exchange: StartedExchange | None = exchange) -> str:
        now[0] = 100.0 + after
        made._watchdog.waiting = None if exchange is None else Waiting(exchange, job.pair, 100.0, timedelta(seconds=30))
        made._warn()
        return capsys.readouterr().err

    assert not warned(14.9) and not warned(99.0, None) and not asked
    text = "longspan: stage 1: rank 0 has waited 15 s. global rank 1 does not respond: it has ended or is stopped; global rank 2 is late, "
    late = "it has not started 'stage 1': its last exchange is 'w' of 'no call', number 6, started 1 s before it answered; not to blame: "
    assert warned(15.0) == text + late + "global rank 0\n" and asked == [range(3)]
    assert not warned(16.0) and len(asked) == 1  # once
    other = lambda number: StartedExchange(group="pair", number=number, what="stage 1", call="")
    notes[2] = at(9)
    assert warned(17.0, other(8)) == "" and len(asked) == 2  # this rank has not started it
    assert "rank 0 has waited 18 s" in warned(18.0, other(7))
    made._rank = 2
    assert not warned(19.0, other(6)) and warned(20.4, other(9)).startswith("longspan: stage 1: rank 2 has waited 20 s. ")
    made._stop.set()
    assert not warned(21.0, other(9))


def test_a_warning_comes_too_late_for_an_exchange_that_has_ended(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    job = two_groups(monkeypatch)
    made = idle_answers(monkeypatch, HashStore(), 0)
    made._watchdog.waiting = Waiting(EXCHANGE._replace(group="pair"), job.pair, time.monotonic() - 9, timedelta(seconds=2))

    def collect(ranks: Any) -> Any:
        made._watchdog.waiting = None
        return {0: {"groups": {"pair": [7]}, "held up": False, "left": ""}}

    monkeypatch.setattr(made, "_collect", collect)
    made._warn()
    assert capsys.readouterr().err == ""


def test_the_thread_ends_with_its_default_group_or_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    job = two_groups(monkeypatch)
    run = Answers._run
    made = idle_answers(monkeypatch, HashStore(), 0, 0.001)
    done: list[str] = []

    def warn() -> None:
        done.append("warned")
        if len(done) == 6:
            raise RuntimeError
        if len(done) == 12:
            job.dist.group.WORLD = job.other

    monkeypatch.setattr(made, "_answer", lambda: done.append("answered"))
    monkeypatch.setattr(made, "_warn", warn)
    run(made)
    assert done == ["answered", "warned"] * 3  # until the store ended
    run(made)
    assert done == ["answered", "warned"] * 6  # until another default group
    job.dist.group.WORLD = job.world
    made._stop.set()
    run(made)
    assert len(done) == 12


def test_answers_of_a_forked_process_stop_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made = idle_answers(monkeypatch, HashStore(), 0)
    made._pid = os.getpid() + 1
    made.stop()
    assert not made._stop.is_set()


def test_up_to_eight_ranks_that_are_not_to_blame_are_listed() -> None:
    notes = {rank: note(7) for rank in range(11)}
    listed = ", ".join(map(str, range(8)))
    assert describe(EXCHANGE, range(9), notes, [8]).endswith(f"; not to blame: global ranks {listed}")
    assert describe(EXCHANGE, range(10), notes, [9]).endswith(f"; not to blame: global ranks {listed} and 1 more")
    assert describe(EXCHANGE, range(11), notes, [10]).endswith(f"; not to blame: global ranks {listed} and 2 more")
    assert describe(EXCHANGE, [4, 10], notes, [10]).endswith("; not to blame: global rank 4")
    assert describe(EXCHANGE, [10], {}, [10]) == "global rank 10 does not respond: it has ended or is stopped"


def test_late_ranks_say_what_they_did_last() -> None:
    late = lambda groups: describe(EXCHANGE, [0], {0: {"groups": groups, "held up": False, "left": ""}}, [])
    start = f"global rank 0 is late, it has not started {NAME}: its last exchange is "
    assert late({}) == start + "none"
    assert (
        late({"a": [9, "x", "", 1.0], "b": [3, "y", "call", 0.25]}) == start + "'y' of 'call', number 3, started 0.25 s before it answered"
    )
    assert (
        late({"cp": [1, "x", "", 10.0], "b": [3, "y", "call", 2.5]})
        == start + "'x' of 'no call', number 1, started 10 s before it answered"
    )
    unnamed = EXCHANGE._replace(call="", what="sum")
    assert describe(unnamed, [0], {0: note(7)}, []) == "every rank has started 'sum', and all respond: check the network between them"


def test_ranks_are_named_in_order_silent_or_gone_before_late() -> None:
    notes = {0: note(6), 1: note(7), 3: note(7, left="left it"), 5: note(0, left="elsewhere")}
    text = describe(EXCHANGE, [0, 1, 2, 3], notes, [2, 4])
    assert [part.split(" ")[:3] for part in text.split("; ")] == [["global", "rank", str(r)] for r in (2, 3, 4, 5, 0)] + [
        ["not", "to", "blame:"]
    ]
    assert "global rank 5 has left its call: elsewhere" in text


def test_a_limit_without_a_backend_sets_nothing() -> None:
    with ExchangeLimit(timeout=timedelta(1)):
        pass


def test_answers_use_a_connection_of_their_own() -> None:
    """The program's own connection may be in a call that does not return."""
    own = HashStore()

    class Connection(HashStore):  # type: ignore[misc]
        def clone(self) -> HashStore:
            return own

    program = Connection()
    answers = Answers(Watchdog(), program, 0, 0.3)
    answers.ask([0])
    answers.stop()
    assert own.check(["longspan/watchdog/ask/0"]) and not program.check(["longspan/watchdog/ask/0"])
