"""The Ray executor: clients train in one pool of actors while scorers in another probe what has come back.

The driver owns every object. Updates stay on the node that made them until they are summed, one at a time; only reports and
probes, a few numbers each, come inline.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raysim.cohort import Coefficients
from raysim.errors import ConfigError, RunError
from raysim.evaluation import Metrics, metrics_of
from raysim.execution.base import Broadcast, FusedModel, Observer, Outcome, Packed, PoolUse, Setup, WorkItem
from raysim.execution.ray_backend import RayBackend, ray_gpus, signals_heard
from raysim.execution.ray_connection import Connection, cluster_nodes, connect, wait_for_resources
from raysim.execution.ray_plan import Demand, Plan, make_plan
from raysim.execution.ray_pool import (
    ActorLost,
    Done,
    InputLost,
    Pool,
    Unit,
    UnitFailed,
    run_until_done,
    wait_until_started,
)
from raysim.execution.settings import ExecutionSettings
from raysim.execution.work import add_groups, groups_of, sum_updates
from raysim.state import Arrays, Buffers, ServerState
from raysim.vector import Vector
from raysim.weighting.base import Sums

logger = logging.getLogger("raysim.ray")

START_SECONDS_PER_ACTOR = 15.0
"""Allowance for starting one actor process on a busy core, beyond `execution.resource_timeout_s`."""


class RayExecutor:
    """Runs rounds on a Ray cluster.

    Args:
        setup: The run; put into the object store once.
        settings: Pools and resources.
        demand: Expected work, for the plan.
        say: Told the plan, line by line, before any actor starts.

    Raises:
        ConfigError: Ray cannot be reached, or its resources do not suffice.
    """

    def __init__(self, setup: Setup, settings: ExecutionSettings, demand: Demand, say: Any = logger.info) -> None:
        self._setup = setup
        self._settings = settings
        self._demand = demand
        self._connection: Connection = connect(settings)
        self._group: PlacementGroup | None = None
        self._units: dict[int, Unit] = {}
        self._backend: RayBackend | None = None
        try:
            self.plan = make_plan(settings, cluster_nodes(), demand)
            for line in self.plan.lines():
                say(line)
            wait_for_resources(self.plan, settings.resource_timeout_s)
            self._start()
        except RunError as error:
            self.close()
            raise ConfigError(f"execution: the actors cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        plan, settings = self.plan, self._settings
        self._group = self._scorer_group()
        self._backend = RayBackend(plan, ray.put(self._setup), self._group)
        timeout = settings.resource_timeout_s + START_SECONDS_PER_ACTOR * (plan.client_actors + plan.scorer_actors)
        # Scorers first: under memory pressure Ray kills the newest actors first, and a scorer is the dearer one.
        self._scorers = self._pool("scorer", plan.scorer_actors, timeout)
        self._clients = self._pool("client", plan.client_actors, timeout)
        for pool in (self._scorers, self._clients):
            pool.start()
        wait_until_started([self._scorers, self._clients], self._backend)

    def adopt(self, setup: Setup, settings: ExecutionSettings, demand: Demand) -> bool:
        """Take over another run with the pools as they are; False if it would get other ones."""
        assert self._backend is not None
        if settings != self._settings or make_plan(settings, cluster_nodes(), demand) != self.plan:
            return False
        if self._scorers.lost_slots or self._clients.lost_slots:
            return False
        self._setup, self._demand, self._units = setup, demand, {}
        self._backend.setup_ref = ray.put(setup)
        pools = [self._scorers, self._clients]
        for pool in pools:
            pool.adopt()
        wait_until_started(pools, self._backend)
        return True

    def _pool(self, role: str, count: int, timeout: float) -> Pool:
        assert self._backend is not None
        slots = [f"{role}-{i}" for i in range(count)]
        return Pool(role, slots, self._backend, retries=self._settings.retries, start_timeout_s=timeout)

    def _scorer_group(self) -> PlacementGroup | None:
        """One bundle per scorer, spread over the nodes; None when scorers reserve nothing."""
        plan = self.plan
        bundle = {"CPU": plan.scorer_cpus, "GPU": ray_gpus(plan.scorer_gpus)}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            return None
        group = placement_group([bundle] * plan.scorer_actors, strategy="SPREAD")
        with signals_heard():
            reserved = group.wait(self._settings.resource_timeout_s)
        if not reserved:
            remove_placement_group(group)
            raise ConfigError(
                f"execution.scorer_actors: {plan.scorer_actors} x {bundle} could not be reserved within "
                f"{self._settings.resource_timeout_s:g} s (execution.resource_timeout_s): other jobs hold them"
            )
        return group

    def run_cohort(
        self, broadcast: Broadcast, items: Sequence[WorkItem], observer: Observer
    ) -> tuple[list[Outcome], Sums | None, PoolUse]:
        """Train the cohort, probing each update as soon as it is there."""
        assert self._backend is not None
        limit = self._settings.unit_timeout_s
        run = _CohortRun(self._setup, self._clients, self._scorers, self.plan, broadcast, observer, limit)
        self._units = run.units
        return run.run(items, self._backend)

    def sums(self, outcomes: Sequence[Outcome], coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
        """float64 sums: on the driver, one update in memory at a time, or in groups on the scorers."""
        size = len(outcomes) * self._demand.model_bytes / 2**20
        here = ray.get_runtime_context().get_node_id()
        away = any(outcome.actor is None or outcome.actor.node != here for outcome in outcomes)
        if away or size > self._settings.sum_on_driver_mb:
            return self._sums_on_scorers(outcomes, coefficients)
        return sum_updates([o.position for o in outcomes], lambda i: self._update(outcomes[i]), coefficients)

    def _sums_on_scorers(
        self, outcomes: Sequence[Outcome], coefficients: Mapping[str, Coefficients]
    ) -> dict[str, np.ndarray]:
        """Each group is summed on the node where most of it lies, then the groups are added on one node."""
        groups = groups_of([outcome.position for outcome in outcomes])
        for _ in range(self._settings.retries + 1):
            units = []
            for key, members in enumerate(groups):
                inputs = [outcomes[i] for i in members]
                rows = {name: factors.rows(members) for name, factors in coefficients.items()}
                nodes = Counter(outcome.actor.node for outcome in inputs if outcome.actor is not None)
                payload = (rows, *(outcome.update for outcome in inputs))
                units.append(Unit("sum", key, f"group {key}", payload, near=max(nodes, key=nodes.__getitem__)))
            try:
                partials = [done.value[1] for done in self._on_scorers(units)]
                if len(partials) == 1:
                    return add_groups([self.fetch(partials[0])])
                (added,) = self._on_scorers([Unit("add", 0, "sum of all groups", tuple(partials))])
                return add_groups([added.value])
            except (InputLost, ObjectLostError) as lost:
                logger.warning("sums: something was lost with its node and is made again: %s", lost)
                for outcome in outcomes:
                    self._update(outcome)
        raise RunError(f"the sums of a round were lost {self._settings.retries + 1} times")

    def _on_scorers(self, units: Sequence[Unit]) -> list[Done]:
        """Run units on the scorers; in the order of `units`."""
        assert self._backend is not None
        limit, found = self._settings.unit_timeout_s, dict[int, Done]()
        for unit in units:
            self._scorers.put(replace(unit, timeout_s=limit, again_when_late=True))
        run_until_done([self._scorers], self._backend, lambda done: found.update({done.unit.key: done}))
        for done in found.values():
            if isinstance(done.error, InputLost):
                raise done.error
            if done.error is not None:
                raise RunError(f"{done.unit.label}: {done.unit.kind} failed: {done.error}") from done.error
        return [found[unit.key] for unit in units]

    def _update(self, outcome: Outcome) -> Arrays:
        """A client's update; if it is gone with its node, the client trains again, drawing the same numbers."""
        assert self._backend is not None
        for attempt in range(self._settings.retries + 1):
            try:
                arrays: Arrays = self.fetch(outcome.update)
                return arrays
            except ObjectLostError:
                unit = replace(self._units[outcome.client_id], attempt=attempt + 2)
                logger.warning("%s: update lost, training again", unit.label)
                trained: list[Done] = []
                self._clients.put(unit)
                run_until_done([self._clients], self._backend, trained.append)
                if trained[0].error is not None:
                    raise RunError(
                        f"{unit.label}: its update was lost and cannot be made again: {trained[0].error}"
                    ) from None
                outcome.actor = trained[0].place
                _, outcome.update, state = trained[0].value
                outcome.state = state if outcome.state is not None else None
        raise RunError(f"round of client {outcome.client_id}: its update was lost {self._settings.retries + 1} times")

    def fuse(
        self,
        outcomes: Sequence[Outcome],
        broadcast: Broadcast,
        merged: Packed,
        buffers: Packed,
        weights: np.ndarray,
    ) -> FusedModel:
        """The fusion on a scorer; if an update is gone with its node, its client trains again."""
        assert self._backend is not None
        head = ray.put(broadcast), ray.put(merged), ray.put(buffers), ray.put(weights)
        label = f"round {broadcast.round_num}"
        assert self._setup.fusion is not None
        needed = self._setup.fusion.needs_updates
        for _ in range(self._settings.retries + 1):
            payload = (*head, *(outcome.update for outcome in outcomes if needed))
            try:
                (done,) = self._on_scorers([Unit("fuse", 0, label, payload)])
            except InputLost as lost:
                logger.warning("%s: something was lost with its node and is made again: %s", label, lost)
                for outcome in outcomes:
                    self._update(outcome)
            else:
                fused: FusedModel = done.value
                return fused
        raise RunError(f"{label}: the inputs of the fusion were lost {self._settings.retries + 1} times")

    def evaluate(self, params: Vector, buffers: Buffers) -> Metrics:
        """Metrics on the test set, its shards spread over the scorers."""
        assert self._backend is not None
        setup = self._setup
        packed = ray.put(Packed.of(ServerState(params))), ray.put(Packed.of(buffers))
        count = len(setup.evaluation_shards)
        units = [Unit("evaluate", i, f"test shard {i}", (*packed, i)) for i in range(count)]
        shards = [done.value for done in self._on_scorers(units)]
        return metrics_of(setup.test.labels, shards, setup.input_spec.num_classes)

    def hold_scoring(self, held: bool) -> None:
        """Let scorers wait until the last client has trained, to measure what it saves that they need not."""
        self._scorers.after = self._clients if held else None

    def fetch(self, handle: Any) -> Any:
        """The object behind a reference."""
        with signals_heard():
            return ray.get(handle)

    def describe(self) -> dict[str, Any]:
        """The plan."""
        return {**self.plan.as_dict(), "ray": self._connection.where}

    def close(self) -> None:
        """End all actors, and Ray if this run started it."""
        with ExitStack() as stack:  # Each step is tried, whatever becomes of the one before.
            stack.callback(self._connection.close)
            if self._group is not None:
                stack.callback(remove_placement_group, self._group)
            if self._backend is not None:
                stack.callback(self._backend.close)


class _CohortRun:
    """One round's pipeline: train -> check -> score, client by client, in whatever order they come."""

    def __init__(
        self,
        setup: Setup,
        clients: Pool,
        scorers: Pool,
        plan: Plan,
        broadcast: Broadcast,
        observer: Observer,
        unit_timeout_s: float,
    ) -> None:
        self._setup, self._clients, self._scorers, self._plan = setup, clients, scorers, plan
        self._unit_timeout_s = unit_timeout_s
        self._round_num, self._observer = broadcast.round_num, observer
        self._broadcast = ray.put(broadcast)
        self._outcomes: dict[int, Outcome] = {}
        self.units: dict[int, Unit] = {}
        self._ready: dict[int, float] = {}
        self._wants_reference = setup.weighting.reference_needs != "nothing"
        self._reference: Sums | None = None
        self._reference_ref: Any = None
        self._waiting: list[Unit] = []
        self._last_trained = time.monotonic()

    def run(self, items: Sequence[WorkItem], backend: RayBackend) -> tuple[list[Outcome], Sums | None, PoolUse]:
        """Run all items to their end."""
        pools = (self._clients, self._scorers)
        started = time.monotonic()
        busy, retried = [pool.busy_seconds for pool in pools], sum(pool.retried for pool in pools)
        weighting = self._setup.weighting
        if self._wants_reference:
            self._scorers.put(self._scoring_unit("reference", -1, f"round {self._round_num}", (self._broadcast,)))
        for item in items:
            self._put(item)
        run_until_done(pools, backend, self._handle)
        ended = time.monotonic()
        train, total = self._last_trained - started, ended - started
        spent = [pool.busy_seconds - before for pool, before in zip(pools, busy, strict=True)]
        use = PoolUse(
            train_seconds=train,
            score_tail_seconds=ended - self._last_trained,
            client_utilisation=_share(spent[0], train * len(self._clients.slots)),
            scorer_utilisation=_share(spent[1], total * len(self._scorers.slots)) if weighting.needs_probe else None,
            retries=sum(pool.retried for pool in pools) - retried,
        )
        return [self._outcomes[item.client_id] for item in items], self._reference, use

    def _put(self, item: WorkItem) -> None:
        state = Packed(None, {}) if item.state is None else item.state
        home = f"client-{item.client_id}" if self._plan.per_client else None
        unit = Unit(
            "train",
            item.client_id,
            f"round {self._round_num} client {item.client_id}",
            (item, self._broadcast, state),
            cost=item.num_examples * self._setup.training.local_epochs,
            timeout_s=self._setup.client_timeout_s,
            home=home,
        )
        self._outcomes[item.client_id] = Outcome(item.client_id, item.position, started=datetime.now(UTC))
        self.units[item.client_id] = unit
        self._clients.put(unit)

    def _handle(self, done: Done) -> None:
        if done.unit.kind == "reference":
            if done.error is not None:
                raise RunError(f"the weighting's reference failed: {done.error}") from done.error
            self._reference, self._reference_ref = done.value, ray.put(done.value)
            for unit in self._waiting:
                self._scorers.put(replace(unit, payload=(*unit.payload, self._reference_ref)))
            return
        outcome = self._outcomes[done.unit.key]
        if done.unit.kind == "train":
            self._trained(outcome, done)
        else:
            self._scored(outcome, done)
        outcome.finished = datetime.now(UTC)

    def _trained(self, outcome: Outcome, done: Done) -> None:
        outcome.actor = done.place
        self._last_trained = time.monotonic()
        if done.error is not None:
            self._fail(outcome, done)
        else:
            outcome.train, outcome.update, state = done.value
            outcome.state = state if outcome.train.state_checksum is not None else None
            outcome.check_update()
        if done.unit.attempt == 1 or outcome.client_id not in self._ready:
            self._observer.client_trained(outcome.client_id)
        if outcome.status == "ok" and self._setup.weighting.needs_probe:
            self._ready[outcome.client_id] = time.monotonic()
            unit = self._scoring_unit("score", outcome.client_id, done.unit.label, (self._broadcast, outcome.update))
            unit = replace(unit, near=done.place.node if done.place else None)
            if self._wants_reference and self._reference_ref is None:
                self._waiting.append(unit)
            else:
                self._scorers.put(replace(unit, payload=(*unit.payload, self._reference_ref)))

    def _scoring_unit(self, kind: str, key: int, label: str, payload: Any) -> Unit:
        return Unit(kind, key, label, payload, timeout_s=self._unit_timeout_s, again_when_late=True)

    def _scored(self, outcome: Outcome, done: Done) -> None:
        outcome.scorer = done.place
        unit = self.units[outcome.client_id]
        if isinstance(done.error, InputLost) and unit.attempt <= self._clients.retries:
            # The update is gone with its node: the client trains again, drawing the same numbers.
            logger.warning("%s: update lost, training again", done.unit.label)
            outcome.update = outcome.state = outcome.train = None
            self.units[outcome.client_id] = replace(unit, attempt=unit.attempt + 1)
            self._clients.put(self.units[outcome.client_id])
            return
        if done.error is not None:
            self._fail(outcome, done)
        else:
            outcome.probe, outcome.score_seconds = done.value
            outcome.queue_seconds = max(0.0, done.started - self._ready[outcome.client_id])
            outcome.check_probe()
        self._observer.client_scored(outcome.client_id)

    def _fail(self, outcome: Outcome, done: Done) -> None:
        actor = done.place.actor if done.place else "?"
        if isinstance(done.error, UnitFailed):
            logger.error("%s %s on %s raised:\n%s", done.unit.label, done.unit.kind, actor, done.error)
            reason = str(done.error).strip().splitlines()[-1]
        elif isinstance(done.error, ActorLost):
            reason = f"actor died ({done.unit.attempt} attempts): {done.error}"
        else:
            reason = str(done.error)
        logger.warning("%s failed in %s: %s", done.unit.label, done.unit.kind, reason)
        outcome.drop("failed", f"{done.unit.kind}: {reason}")


def _share(spent: float, available: float) -> float | None:
    return min(1.0, spent / available) if available > 0 else None
