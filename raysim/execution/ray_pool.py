"""A pool of actors that loses no work: a dead actor is replaced and its unit handed out again.

Plain Python over a small backend, so that the logic is tested with a deterministic fake; nothing here imports ray.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from raysim.errors import RunError
from raysim.execution.base import Place

logger = logging.getLogger("raysim.pool")

Ref = Hashable
"""Stands for a result that is not there yet."""


class ActorLost(Exception):
    """The actor died, or cannot be reached; its unit may be run again elsewhere."""


class InputLost(Exception):
    """Something the unit was given is gone (its node died); the unit that made it must be run again."""


class UnitFailed(Exception):
    """The unit's own code raised; running it again would raise again. The text is the traceback."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One piece of work.

    Attributes:
        kind: train, score, evaluate, ...
        key: The client or shard it belongs to.
        label: How logs call it: `round 2 client 3`.
        payload: What the backend needs to run it.
        cost: Expected work; larger is handed out first. Equal costs go first in, first out.
        timeout_s: Longest time it may run.
        home: Slot whose actor has to run it; None: any.
        near: Node that holds its largest inputs: an actor there takes it before others, None: no matter.
        again_when_late: A unit that runs over its time is run again elsewhere instead of ending with the time-out.
        attempt: 1 the first time.
        then: Told how it ended.
    """

    kind: str
    key: int
    label: str = ""
    payload: Any = None
    cost: float = 0.0
    timeout_s: float | None = None
    home: str | None = None
    near: str | None = None
    again_when_late: bool = False
    attempt: int = 1
    then: Callable[[Done], None] = lambda done: None


@dataclass(frozen=True)
class Done:
    """A unit that ended, with its value or with the error that ended it."""

    unit: Unit
    value: Any = None
    error: Exception | None = None
    place: Place | None = None
    started: float = 0.0
    finished: float = 0.0


class Backend(Protocol):
    """How actors are made and asked. All references become ready exactly once."""

    def start(self, slot: str, generation: int) -> Ref:
        """Begin to create the slot's actor; its result is (process id, node id)."""

    def adopt(self, slot: str) -> Ref:
        """Have the slot's idle actor take over another run; its result is that of `start`."""

    def submit(self, slot: str, unit: Unit) -> Ref:
        """Run a unit on the slot's actor."""

    def wait(self, refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
        """Those of `refs` that are ready, after at least one is or the time is over."""

    def result(self, ref: Ref) -> Any:
        """The value of a ready reference; raises ActorLost, InputLost or UnitFailed."""

    def kill(self, slot: str) -> None:
        """End the slot's actor, which may be dead already, and forget what it was running."""


@dataclass
class _InFlight:
    unit: Unit
    ref: Ref
    since: float
    """When it began to run, as far as the driver knows: when the one before it on its actor ended."""


@dataclass
class _Slot:
    name: str
    generation: int = 0
    failures: int = 0
    pid: int = 0
    node: str = ""
    starting: Ref | None = None
    since: float = 0.0
    work: list[_InFlight] = field(default_factory=list)
    """In the order of submission; the first runs, the others wait at the actor."""

    @property
    def label(self) -> str:
        return self.name if self.generation == 1 else f"{self.name}.{self.generation}"


@dataclass
class Pool:
    """Actors of one role and the units that wait for them.

    An actor gets a second unit while its first runs, so that it need not wait for the driver in between; but only while more
    units wait than there are actors, so that at the end of a round nothing waits at a busy actor while another is idle.
    A slot whose actor cannot be replaced is given up while others are left; the run ends when none is.

    Attributes:
        role: For messages: `client` or `scorer`.
        slots: Names of the places for actors; a dead actor is replaced in its slot.
        backend: Makes and asks the actors.
        retries: How often a unit is run again after its actor died, and how often a slot may fail to start in a row.
        start_timeout_s: Longest time an actor may take to answer for the first time.
        depth: Most units in flight per actor.
        after: A pool that has to be done before this one is handed any unit; None: both work at the same time.
        limit: Number of actors that are handed units; None: all.
        clock: Seconds; tests replace it.
    """

    role: str
    slots: Sequence[str]
    backend: Backend
    retries: int = 2
    start_timeout_s: float = 120.0
    depth: int = 2
    after: Pool | None = None
    limit: int | None = None
    clock: Callable[[], float] = time.monotonic
    busy_seconds: float = 0.0
    retried: int = 0
    _slots: dict[str, _Slot] = field(default_factory=dict)
    _queue: list[Unit] = field(default_factory=list)

    def start(self) -> None:
        """Begin to create all actors."""
        for name in self.slots:
            self._slots[name] = _Slot(name)
            self._start(self._slots[name])

    def adopt(self) -> None:
        """Have all actors, which are idle, take over another run."""
        for slot in self._slots.values():
            slot.since, slot.starting = self.clock(), self.backend.adopt(slot.name)

    @property
    def lost_slots(self) -> int:
        """Slots that were given up."""
        return len(self.slots) - len(self._slots)

    @property
    def refs(self) -> list[Ref]:
        """All references that something will come back on, those of one actor in the order in which it works."""
        found: list[Ref] = []
        for slot in self._slots.values():
            found += [slot.starting] if slot.starting is not None else [work.ref for work in slot.work]
        return found

    @property
    def unfinished(self) -> bool:
        """Whether units wait or run."""
        return bool(self._queue) or any(slot.work for slot in self._slots.values())

    @property
    def starting(self) -> bool:
        """Whether an actor has not answered yet."""
        return any(slot.starting is not None for slot in self._slots.values())

    @property
    def idle(self) -> int:
        """Actors that will have nothing to do once every waiting unit is handed out."""
        slots = list(self._slots.values())[: self.limit]
        return max(0, sum(not slot.work for slot in slots) - len(self._queue))

    def put(self, unit: Unit) -> None:
        """Queue a unit. If its home was given up, any actor may run it."""
        unit = unit if unit.home is None or unit.home in self._slots else replace(unit, home=None)
        insort(self._queue, unit, key=lambda waiting: -waiting.cost)

    def dispatch(self) -> None:
        """Hand units to actors: to idle ones first.

        Each takes the largest that it may run, among equals the one that waits longest; but if that one's inputs are on
        another node, the first of those whose inputs are on its own, if there are any. Only an idle one takes others.
        """
        if self.after is not None and self.after.unfinished:
            return
        slots = list(self._slots.values())[: self.limit]
        for depth in range(self.depth):
            for slot in slots:
                if slot.starting is not None or len(slot.work) != depth:
                    continue
                if depth and len(self._queue) <= len(slots):
                    return
                if (unit := self._pick(slot, far=not depth)) is not None:
                    self._queue.remove(unit)
                    slot.work.append(_InFlight(unit, self.backend.submit(slot.name, unit), self.clock()))
                    logger.info(
                        "%s %s on %s pid %d attempt %d", unit.label, unit.kind, slot.label, slot.pid, unit.attempt
                    )

    def _pick(self, slot: _Slot, *, far: bool) -> Unit | None:
        mine = (unit for unit in self._queue if unit.home in (None, slot.name))
        first = next(mine, None)
        if first is None or first.near in (None, slot.node):
            return first
        return next((unit for unit in mine if unit.near == slot.node), first if far else None)

    def collect(self, ref: Ref) -> Done | None:
        """Take what came back on a ready reference; None if no unit ended by it."""
        now = self.clock()
        for slot in self._slots.values():
            if slot.starting == ref:
                slot.starting = None
                self._started(slot, ref)
                return None
            for index, work in enumerate(slot.work):
                if work.ref == ref:
                    return self._ended(slot, index, now)
        return None  # Of an actor that has been replaced in the meantime.

    def _ended(self, slot: _Slot, index: int, now: float) -> Done | None:
        work = slot.work.pop(index)
        unit, started = work.unit, work.since if index == 0 else now
        self.busy_seconds += now - started
        if index == 0 and slot.work:
            slot.work[0].since = now
        place = Place(slot.label, slot.pid, slot.node, unit.attempt)
        try:
            value = self.backend.result(work.ref)
        except ActorLost as lost:
            self._replace(slot, str(lost))
            return None if self._again(unit) else Done(unit, None, lost, place, started, now)
        except (InputLost, UnitFailed) as error:
            return Done(unit, None, error, place, started, now)
        return Done(unit, value, None, place, started, now)

    def expire(self) -> list[Done]:
        """End what runs over its time: a unit, replacing its actor, or the wait for an actor that does not start."""
        now = self.clock()
        ended = []
        for slot in list(self._slots.values()):
            if slot.starting is not None and now - slot.since > self.start_timeout_s:
                self._give_up(
                    slot, f"it did not start within {self.start_timeout_s:.0f} s; other jobs may hold its resources"
                )
            elif slot.work and (done := self._expired(slot, slot.work[0], now)) is not None:
                ended.append(done)
        return ended

    def _expired(self, slot: _Slot, work: _InFlight, now: float) -> Done | None:
        unit, late = work.unit, now - work.since
        if unit.timeout_s is None or late <= unit.timeout_s or self.backend.wait([work.ref], 0.0):
            return None  # In time, or it ended just now.
        place = Place(slot.label, slot.pid, slot.node, unit.attempt)
        self.busy_seconds += late
        error = TimeoutError(f"timed out after {unit.timeout_s:g} s")
        slot.work.remove(work)
        self._replace(slot, f"{unit.label} {unit.kind} {error}")
        if unit.again_when_late and self._again(unit):
            return None
        return Done(unit, None, error, place, work.since, now)

    def _start(self, slot: _Slot) -> None:
        slot.generation += 1
        slot.since, slot.pid = self.clock(), 0
        slot.starting = self.backend.start(slot.name, slot.generation)

    def _started(self, slot: _Slot, ref: Ref) -> None:
        try:
            slot.pid, slot.node = self.backend.result(ref)
        except UnitFailed as error:
            raise RunError(f"{slot.label} cannot start: {error}") from None
        except ActorLost as lost:
            slot.failures += 1
            if slot.failures > self.retries:
                self._give_up(slot, f"it died {slot.failures} times while starting: {lost}")
            else:
                self._replace(slot, str(lost))
        else:
            slot.failures = 0
            logger.info("%s ready: pid %d on node %s", slot.label, slot.pid, slot.node[:8])

    def _replace(self, slot: _Slot, why: str) -> None:
        logger.warning("%s (pid %d) is replaced: %s", slot.label, slot.pid, why.splitlines()[0] if why else "died")
        self.backend.kill(slot.name)
        self._hand_back(slot)
        self._start(slot)

    def _give_up(self, slot: _Slot, why: str) -> None:
        """Go on without a slot; units that only it was to run may go anywhere."""
        self.backend.kill(slot.name)
        self._hand_back(slot)
        del self._slots[slot.name]
        if not self._slots:
            raise RunError(f"no {self.role} actor is left: {slot.label}: {why}")
        logger.warning("%s is given up, %d %s actors are left: %s", slot.label, len(self._slots), self.role, why)
        self._queue = [replace(unit, home=None) if unit.home == slot.name else unit for unit in self._queue]

    def _hand_back(self, slot: _Slot) -> None:
        """Queue what waited at an actor that is gone: it never ran, so it is no further attempt."""
        for work in slot.work:
            self.put(work.unit)
        slot.work.clear()

    def _again(self, unit: Unit) -> bool:
        """Queue a unit once more if it has attempts left."""
        if unit.attempt > self.retries:
            return False
        self.retried += 1
        self.put(replace(unit, attempt=unit.attempt + 1))
        return True


def run_until(pools: Sequence[Pool], backend: Backend, finished: Callable[[], bool], *, tick_s: float = 1.0) -> None:
    """Run all pools until `finished`; each unit that ends is told to its `then`, which may put new ones."""
    while not finished():
        for pool in pools:
            pool.dispatch()
        owners = {ref: pool for pool in pools for ref in pool.refs}
        assert owners, "work is unfinished and nothing is in flight"
        ready = set(backend.wait(list(owners), tick_s))
        ended = [owners[ref].collect(ref) for ref in owners if ref in ready]
        for pool in pools:
            ended += pool.expire()
        for done in ended:
            if done is not None:
                done.unit.then(done)


def wait_until_started(pools: Sequence[Pool], backend: Backend, *, tick_s: float = 1.0) -> None:
    """Wait until every actor of every pool has answered."""
    while any(pool.starting for pool in pools):
        owners = {ref: pool for pool in pools for ref in pool.refs}
        for ref in backend.wait(list(owners), tick_s):
            owners[ref].collect(ref)
        for pool in pools:
            pool.expire()
