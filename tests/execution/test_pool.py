"""The pool's logic over a deterministic fake: no process, no clock, no chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raysim.errors import RunError
from raysim.execution.ray_pool import (
    ActorLost,
    Done,
    InputLost,
    Pool,
    Unit,
    UnitFailed,
    run_until,
    wait_until_started,
)


class FakeBackend:
    """Everything submitted is ready at the next wait, in the order of a given choice; outcomes follow a script."""

    def __init__(self, script: Callable[[str, Unit], Any] | None = None, order: Callable[[list], list] = list) -> None:
        self.script = script or (lambda slot, unit: (slot, unit.key, unit.attempt))
        self.order = order
        self.now = 0.0
        self.refs: dict[int, tuple] = {}
        self.log: list[tuple] = []
        self.hanging: set[int] = set()
        self.pids = 100
        self.bad_starts: dict[str, int] = {}
        self.nodes: dict[str, str] = {}

    def clock(self) -> float:
        return self.now

    def _ref(self, *content: Any) -> int:
        ref = len(self.refs)
        self.refs[ref] = content
        return ref

    def start(self, slot: str, generation: int) -> int:
        self.log.append(("start", slot, generation))
        return self._ref("start", slot)

    def adopt(self, slot: str) -> int:
        self.log.append(("adopt", slot))
        return self._ref("start", slot)

    def submit(self, slot: str, unit: Unit) -> int:
        self.log.append(("submit", slot, unit.kind, unit.key, unit.attempt))
        return self._ref("unit", slot, unit)

    def wait(self, refs: Sequence[int], timeout_s: float) -> list[int]:
        self.now += 1.0
        return self.order([ref for ref in refs if ref not in self.hanging])

    def result(self, ref: int) -> Any:
        kind, slot, *rest = self.refs[ref]
        if kind == "start":
            if self.bad_starts.get(slot, 0) > 0:
                self.bad_starts[slot] -= 1
                raise ActorLost("no memory")
            self.pids += 1
            return self.pids, self.nodes.get(slot, "node")
        value = self.script(slot, rest[0])
        if isinstance(value, Exception):
            raise value
        return value

    def kill(self, slot: str) -> None:
        self.log.append(("kill", slot))


def started(backend: FakeBackend, count: int = 2, **fields: Any) -> Pool:
    pool = Pool("client", [f"client-{i}" for i in range(count)], backend, clock=backend.clock, **fields)
    pool.start()
    wait_until_started([pool], backend)
    return pool


def run(pool: Pool, backend: FakeBackend, units: Sequence[Unit]) -> dict[int, Done]:
    done: dict[int, Done] = {}
    for unit in units:
        pool.put(replace(unit, then=lambda d: done.__setitem__(d.unit.key, d)))
    run_until([pool], backend, lambda: not pool.unfinished)
    return done


def units(*costs: float) -> list[Unit]:
    return [Unit("train", key, cost=cost) for key, cost in enumerate(costs)]


@pytest.mark.parametrize("order", [list, lambda refs: refs[::-1], lambda refs: refs[:1]])
def test_every_unit_ends_once_whatever_the_order(order):
    backend = FakeBackend(order=order)
    done = run(started(backend, 3), backend, units(*range(10)))
    assert sorted(done) == list(range(10))
    assert sum(entry[0] == "submit" for entry in backend.log) == 10


def submitted(backend: FakeBackend) -> list[tuple[str, int]]:
    return [(entry[1], entry[3]) for entry in backend.log if entry[0] == "submit"]


def test_largest_first():
    backend = FakeBackend()
    run(started(backend), backend, units(1, 5, 3, 4))
    assert [key for _, key in submitted(backend)] == [1, 3, 2, 0]


def test_a_second_unit_is_in_flight_per_actor_while_enough_others_wait():
    backend = FakeBackend()
    pool = started(backend)
    for unit in units(*range(7, 0, -1)):
        pool.put(unit)
    pool.dispatch()
    assert submitted(backend) == [("client-0", 0), ("client-1", 1), ("client-0", 2), ("client-1", 3)][:4]
    assert len(pool.refs) == 4
    assert pool.idle == 0
    first = pool.refs[0]
    pool.collect(first)
    pool.dispatch()
    assert submitted(backend)[4:] == [("client-0", 4)], "three units wait for two actors"
    pool.collect(pool.refs[0])
    pool.dispatch()
    assert submitted(backend)[5:] == [], "two units wait for two actors: client-1 may end first and take one"


def test_what_waits_at_an_actor_that_dies_is_no_further_attempt():
    def die_once(slot, unit):
        return ActorLost("killed") if unit.key == 0 and unit.attempt == 1 else (slot, unit.attempt)

    backend = FakeBackend(die_once)
    done = run(started(backend, 1), backend, units(5, 4, 3, 2, 1))
    assert {key: d.place.attempt for key, d in done.items()} == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    assert all(d.error is None for d in done.values())
    assert [key for _, key in submitted(backend)][:4] == [0, 1, 0, 1], "both are handed out again"


def test_the_time_of_a_unit_begins_when_the_one_before_it_ended():
    backend = FakeBackend(order=lambda refs: refs[:1])
    pool = started(backend, 1)
    done: list[Done] = []
    for unit in units(3, 2, 1):
        pool.put(replace(unit, timeout_s=2.5, then=done.append))
    run_until([pool], backend, lambda: len(done) == 3)
    assert [d.error for d in done] == [None] * 3, "each took one tick, the second had waited for another"
    assert pool.busy_seconds == 3.0


def test_equal_units_go_first_in_first_out():
    backend = FakeBackend()
    run(started(backend, 1), backend, units(1, 1, 1))
    assert [entry[3] for entry in backend.log if entry[0] == "submit"] == [0, 1, 2]


def test_a_pool_that_comes_after_another_waits_until_that_is_done():
    backend = FakeBackend()
    first, second = started(backend), Pool("scorer", ["scorer-0"], backend, clock=backend.clock)
    second.start()
    second.after = first
    ended = []

    def trained(done: Done) -> None:
        ended.append(done.unit.kind)
        second.put(Unit("score", done.unit.key, then=lambda done: ended.append(done.unit.kind)))

    for unit in units(1, 2, 3, 4, 5):
        first.put(replace(unit, then=trained))
    run_until([first, second], backend, lambda: len(ended) == 10)
    assert ended == ["train"] * 5 + ["score"] * 5


def test_only_as_many_actors_work_as_the_limit_says():
    backend = FakeBackend()
    pool = started(backend, 3)
    pool.limit = 2
    assert pool.idle == 2
    run(pool, backend, units(*range(9)))
    assert {slot for slot, _ in submitted(backend)} == {"client-0", "client-1"}


def test_an_actor_takes_what_lies_on_its_node_before_anything_larger_and_nobody_idles():
    backend = FakeBackend()
    backend.nodes = {"client-0": "a", "client-1": "b"}
    near = [Unit("score", key, cost=key, near=node) for key, node in enumerate("abbbb")]
    run(started(backend), backend, near)
    taken = [entry[1:4:2] for entry in backend.log if entry[0] == "submit"]
    assert taken == [("client-0", 0), ("client-1", 4), ("client-1", 3), ("client-0", 2), ("client-1", 1)]


def test_actors_that_die_while_they_take_over_another_run_are_replaced():
    backend = FakeBackend()
    pool = started(backend)
    pool.adopt()
    backend.bad_starts = {"client-1": 1}
    wait_until_started([pool], backend)
    assert ("start", "client-1", 2) in backend.log
    assert len(run(pool, backend, units(1, 2, 3))) == 3


def test_a_unit_of_a_dead_actor_is_run_again_by_whoever_is_free():
    def die_once(slot, unit):
        return ActorLost("killed") if unit.key == 0 and unit.attempt == 1 else (slot, unit.attempt)

    backend = FakeBackend(die_once)
    pool = started(backend)
    done = run(pool, backend, units(9, 1, 1))
    assert done[0].value[1] == 2
    assert done[0].place.attempt == 2
    assert done[0].error is None
    assert pool.retried == 1
    assert ("kill", "client-0") in backend.log
    assert ("start", "client-0", 2) in backend.log
    wait_until_started([pool], backend)
    wait_until_started([pool], backend)
    assert {d.place.actor for d in run(pool, backend, [Unit("train", 5), Unit("train", 6)]).values()} == {
        "client-0.2",
        "client-1",
    }


def test_after_the_last_retry_the_unit_fails_and_the_others_do_not():
    backend = FakeBackend(lambda slot, unit: ActorLost("killed") if unit.key == 0 else unit.key)
    done = run(started(backend, retries=2), backend, units(1, 1))
    assert isinstance(done[0].error, ActorLost)
    assert done[0].unit.attempt == 3
    assert done[1].value == 1


def test_an_error_of_the_unit_itself_is_not_run_again():
    backend = FakeBackend(lambda slot, unit: UnitFailed("ValueError: no") if unit.key == 0 else unit.key)
    pool = started(backend)
    done = run(pool, backend, units(1, 1))
    assert str(done[0].error) == "ValueError: no"
    assert (pool.retried, done[1].value) == (0, 1)


def test_lost_input_is_handed_back():
    backend = FakeBackend(lambda slot, unit: InputLost("node died"))
    assert isinstance(run(started(backend), backend, units(1))[0].error, InputLost)


def test_a_unit_that_runs_over_its_time_ends_and_its_actor_is_replaced():
    backend = FakeBackend()
    pool = started(backend, 1)
    done: list[Done] = []
    pool.put(Unit("train", 0, timeout_s=5.0, then=done.append))
    pool.dispatch()
    backend.hanging = set(pool.refs)
    run_until([pool], backend, lambda: bool(done))
    assert isinstance(done[0].error, TimeoutError)
    assert "5 s" in str(done[0].error)
    assert ("start", "client-0", 2) in backend.log


def test_pinned_units_wait_for_their_own_actor_even_after_it_died():
    def die_once(slot, unit):
        return ActorLost("killed") if unit.key == 1 and unit.attempt == 1 else slot

    backend = FakeBackend(die_once)
    pool = started(backend, 3)
    pinned = [Unit("train", k, home=f"client-{k}", cost=k) for k in range(3)]
    done = run(pool, backend, pinned)
    assert {key: d.value for key, d in done.items()} == {0: "client-0", 1: "client-1", 2: "client-2"}


def test_a_late_unit_may_be_run_again_elsewhere():
    backend = FakeBackend()
    pool = started(backend, 2)
    done: list[Done] = []
    pool.put(Unit("score", 7, timeout_s=5.0, again_when_late=True, then=done.append))
    pool.dispatch()
    backend.hanging = set(pool.refs)
    run_until([pool], backend, lambda: bool(done))
    assert (done[0].error, done[0].unit.attempt, pool.retried) == (None, 2, 1)


def test_a_unit_that_ended_just_in_time_is_not_thrown_away():
    backend = FakeBackend()
    pool = started(backend, 1)
    done: list[Done] = []
    pool.put(Unit("train", 0, timeout_s=5.0, then=done.append))
    pool.dispatch()
    backend.now += 100
    assert pool.expire() == []
    run_until([pool], backend, lambda: bool(done))
    assert done[0].value == ("client-0", 0, 1)


def test_an_actor_that_never_starts_ends_the_run_if_it_is_the_last():
    backend = FakeBackend()
    pool = Pool("scorer", ["scorer-0"], backend, start_timeout_s=10, clock=backend.clock)
    pool.start()
    backend.hanging = set(pool.refs)
    with pytest.raises(RunError, match=r"no scorer actor is left: scorer-0: it did not start within 10 s"):
        wait_until_started([pool], backend)


def test_a_slot_that_cannot_be_replaced_is_given_up_while_others_are_left():
    """Its actor dies, the new one never starts (its node is gone): the other actor does all the work, pinned units too."""

    def die(slot, unit):
        if slot == "client-0":
            backend.hanging = {len(backend.refs)}  # The reference of the actor that replaces it.
            return ActorLost("node died")
        return slot

    backend = FakeBackend(die)
    pool = started(backend, 2, start_timeout_s=10)
    pinned = [Unit("train", k, home=f"client-{k % 2}") for k in range(6)]
    done = run(pool, backend, pinned)
    assert {d.value for d in done.values()} == {"client-1"}
    assert run(pool, backend, [Unit("train", 9, home="client-0")])[9].value == "client-1"


def test_an_actor_that_dies_at_every_start_ends_the_run_if_it_is_the_last():
    backend = FakeBackend()
    backend.bad_starts = {"client-0": 9}
    pool = Pool("client", ["client-0"], backend, retries=2, clock=backend.clock)
    pool.start()
    with pytest.raises(
        RunError, match=r"no client actor is left: client-0\.3: it died 3 times while starting: no memory"
    ):
        wait_until_started([pool], backend)
    backend.bad_starts = {"client-0": 1}
    wait_until_started([started(backend, 1)], backend)


def test_two_pools_work_together_and_busy_time_is_counted():
    backend = FakeBackend()
    clients, scorers = started(backend), Pool("scorer", ["scorer-0"], backend, clock=backend.clock)
    scorers.start()
    wait_until_started([scorers], backend)
    scored = []

    def trained(done: Done) -> None:
        scorers.put(Unit("score", done.unit.key, then=lambda done: scored.append(done.unit.key)))

    for unit in units(3, 2, 1):
        clients.put(replace(unit, then=trained))
    run_until([clients, scorers], backend, lambda: len(scored) == 3)
    assert sorted(scored) == [0, 1, 2]
    assert clients.busy_seconds == 3.0, "each unit took one tick of the fake clock"
    assert scorers.busy_seconds == 3.0
