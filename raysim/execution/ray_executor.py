"""The Ray executor: clients train in one pool of actors while scorers in another probe what has come back.

The driver owns every object. Updates stay on the node that made them until they are summed, group by group; only reports
and probes, a few numbers each, come inline. The test of a round's model runs on the scorers while the next round trains.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raysim.cohort import Coefficients
from raysim.errors import ConfigError, RunError
from raysim.evaluation import Metrics, ShardPredictions
from raysim.execution.base import Broadcast, FusedModel, Observer, Outcome, Packed, PoolUse, Setup, WorkItem
from raysim.execution.cost import CostModel
from raysim.execution.ray_backend import RayBackend, ray_gpus, signals_heard
from raysim.execution.ray_cohort import CohortRun
from raysim.execution.ray_connection import Connection, cluster_nodes, connect, given_group, wait_for_resources
from raysim.execution.ray_plan import (
    Demand,
    Plan,
    better_split,
    fixed_plan,
    make_plan,
    memory_line,
    parts_of,
    round_seconds,
)
from raysim.execution.ray_pool import Done, InputLost, Pool, Unit, run_until, wait_until_started
from raysim.execution.ray_traffic import Traffic
from raysim.execution.settings import ExecutionSettings
from raysim.execution.work import add_groups, evaluation_metrics, groups_of, sum_updates
from raysim.state import Arrays, Buffers, ServerState
from raysim.vector import Vector
from raysim.weighting.base import Tally

logger = logging.getLogger("raysim.ray")

ADVICE_AFTER = 3
"""Rounds after which a run says whether another division of its actors would be faster."""
START_SECONDS_PER_ACTOR = 15.0
"""Allowance for starting one actor process on a busy core, beyond `execution.resource_timeout_s`."""


class RayExecutor:
    """Runs rounds on a Ray cluster.

    Args:
        setup: The run; put into the object store once.
        settings: Pools and resources.
        demand: Expected work, for the plan.
        say: Told the plan, line by line, before any actor starts.
        parts: Only 1/parts of the cluster is planned for.

    Raises:
        ConfigError: Ray cannot be reached, or its resources do not suffice.
    """

    def __init__(
        self, setup: Setup, settings: ExecutionSettings, demand: Demand, say: Any = logger.info, parts: int = 1
    ) -> None:
        self._setup = setup
        self._settings = settings
        self._demand = demand
        self._parts = parts
        clock = time.perf_counter()
        self._connection: Connection = connect(settings, demand.store_bytes)
        connected = time.perf_counter()
        self._given = given_group()
        self._group: PlacementGroup | None = None
        self._units: dict[int, Unit] = {}
        self._uses: list[PoolUse] = []
        self._say = say
        self._tests = 0
        self._cost = CostModel()
        self._backend: RayBackend | None = None
        try:
            self.plan = self._make_plan(settings, demand)
            for line in self.plan.lines():
                say(line)
            if self.plan.warning:
                say(self.plan.warning)
            if self._given is None:
                wait_for_resources(self.plan, settings.resource_timeout_s)
            self._start()
            self._startup = {"ray": connected - clock, "actors": time.perf_counter() - connected}
        except RunError as error:
            self.close()
            raise ConfigError(f"execution: the actors cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _make_plan(self, settings: ExecutionSettings, demand: Demand) -> Plan:
        nodes = parts_of(cluster_nodes(), self._parts)
        return (make_plan if self._given is None else fixed_plan)(settings, nodes, demand)

    def _start(self) -> None:
        plan, settings = self.plan, self._settings
        if self._given is None:
            self._group = self._scorer_group()
            first = {"scorer": 0}
        else:
            first = {"scorer": 1, "client": 1 + plan.scorer_actors}
        self._backend = RayBackend(plan, ray.put(self._setup), self._given or self._group, first)
        timeout = settings.resource_timeout_s + START_SECONDS_PER_ACTOR * (plan.client_actors + plan.scorer_actors)
        # Scorers first: under memory pressure Ray kills the newest actors first, and a scorer is the dearer one.
        self._scorers = self._pool("scorer", plan.scorer_actors, timeout)
        self._clients = self._pool("client", plan.client_actors, timeout)
        self._pools = [self._scorers, self._clients]
        for pool in self._pools:
            pool.start()
        wait_until_started(self._pools, self._backend)
        self._traffic = Traffic()

    def adopt(self, setup: Setup, settings: ExecutionSettings, demand: Demand) -> bool:
        """Take over another run with the pools as they are; False if it would get other ones."""
        assert self._backend is not None
        if settings != self._settings or self._make_plan(settings, demand) != self.plan:
            return False
        if self._scorers.lost_slots or self._clients.lost_slots:
            return False
        clock = time.perf_counter()
        self._setup, self._demand, self._units, self._cost, self._uses = setup, demand, {}, CostModel(), []
        self._backend.setup_ref = ray.put(setup)
        for pool in self._pools:
            pool.adopt()
        wait_until_started(self._pools, self._backend)
        self._startup = {"ray": 0.0, "actors": time.perf_counter() - clock}
        return True

    def _run_until(self, finished: Callable[[], bool]) -> None:
        assert self._backend is not None
        run_until(self._pools, self._backend, finished)

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
        labels = [dict(plan.scorer_label)] * plan.scorer_actors if plan.scorer_label else None
        group = placement_group([bundle] * plan.scorer_actors, strategy="SPREAD", bundle_label_selector=labels)
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
    ) -> tuple[list[Outcome], Tally | None, PoolUse]:
        """Train the cohort, probing each update as soon as it is there."""
        run = CohortRun(
            self._setup,
            self._clients,
            self._scorers,
            per_client=self.plan.per_client,
            round_num=broadcast.round_num,
            broadcast=self._traffic.put(broadcast),
            observer=observer,
            cost=self._cost,
            unit_timeout_s=self._settings.unit_timeout_s,
            models_per_call=1 if self._setup.scoring.subset else self._settings.clients_per_call,
        )
        self._units = run.units
        outcomes, reference, use = run.run(items, self._run_until)
        self._uses.append(use)
        used = [o.train.gpu_memory for o in outcomes if o.train is not None and o.train.gpu_memory is not None]
        if len(self._uses) == 1 and used:
            line = memory_line(max(m.peak for m in used), min(m.total for m in used), self.plan.client_gpus)
            if line is not None:
                self._say(line)
        if len(self._uses) == ADVICE_AFTER:
            self._advise()
        return outcomes, reference, use

    def _advise(self) -> None:
        """Say if the pools should be divided otherwise; the first round, in which processes warm up, does not count."""
        uses = self._uses[1:]
        elapsed = sum(use.train_seconds + use.score_tail_seconds for use in uses)
        train, score = (sum(getattr(use, f"{role}_seconds") for use in uses) for role in ("client", "scorer"))
        split = better_split(self.plan, train, score, elapsed, self._demand.cohort)
        if split is not None and self._setup.weighting.needs_probe:
            now, then = (
                round_seconds(train, score, *pools) / len(uses)
                for pools in ((self.plan.client_actors, self.plan.scorer_actors), split)
            )
            self._say(
                f"a round takes about {now:.1f} s, and about {then:.1f} s with execution.client_actors: {split[0]} and "
                f"execution.scorer_actors: {split[1]}"
            )

    def score_more(
        self, broadcast: Broadcast, outcomes: Sequence[Outcome], level: int, reference: Tally | None
    ) -> Tally | None:
        """Score the images that a level adds; of what is lost with its node, all levels again."""
        head, label = self._traffic.put(broadcast), f"round {broadcast.round_num} level {level}"
        if reference is not None:
            (done,) = self._on_scorers([Unit("reference", -1, label, (head, level, reference.total))])
            reference = done.value
        base = ray.put(reference)
        for _ in range(self._settings.retries + 1):
            units = [
                Unit(
                    "score",
                    o.client_id,
                    f"{label} client {o.client_id}",
                    (o.client_id, head, o.update, base, level, o.sums),
                )
                for o in outcomes
            ]
            try:
                scored = self._on_scorers(units)
            except InputLost as lost:
                logger.warning("%s: something was lost with its node and is made again: %s", label, lost)
                for outcome in outcomes:
                    self._update(outcome)
                    outcome.sums = None
                continue
            for outcome, done in zip(outcomes, scored, strict=True):
                (outcome.probe, seconds), outcome.sums = done.value
                outcome.score_seconds = (outcome.score_seconds or 0.0) + seconds
                outcome.check_probe()
            return reference
        raise RunError(f"{label}: the inputs of scores were lost {self._settings.retries + 1} times")

    def sums(self, outcomes: Sequence[Outcome], coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
        """float64 sums: on the driver, which maps the updates of one group at a time, or in groups on the scorers."""
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
                self._traffic.returned(added)
                return add_groups([added.value])
            except (InputLost, ObjectLostError) as lost:
                logger.warning("sums: something was lost with its node and is made again: %s", lost)
                for outcome in outcomes:
                    self._update(outcome)
        raise RunError(f"the sums of a round were lost {self._settings.retries + 1} times")

    def _on_scorers(self, units: Sequence[Unit]) -> list[Done]:
        """Run units on the scorers; in the order of `units`."""
        limit, found = self._settings.unit_timeout_s, dict[int, Done]()
        for unit in units:
            then = partial(found.__setitem__, unit.key)
            self._scorers.put(replace(unit, timeout_s=limit, again_when_late=True, then=then))
        self._run_until(lambda: len(found) == len(units))
        for done in found.values():
            if isinstance(done.error, InputLost):
                raise done.error
            if done.error is not None:
                raise RunError(f"{done.unit.label}: {done.unit.kind} failed: {done.error}") from done.error
        return [found[unit.key] for unit in units]

    def _update(self, outcome: Outcome) -> Arrays:
        """A client's update; if it is gone with its node, the client trains again, drawing the same numbers."""
        for attempt in range(self._settings.retries + 1):
            try:
                arrays: Arrays = self.fetch(outcome.update)
                return arrays
            except ObjectLostError:
                trained: list[Done] = []
                unit = replace(self._units[outcome.client_id], attempt=attempt + 2, then=trained.append)
                logger.warning("%s: update lost, training again", unit.label)
                self._clients.put(unit)
                self._run_until(lambda: bool(trained))  # noqa: B023
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
        head = tuple(self._traffic.put(value) for value in (broadcast, merged, buffers, weights))
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
                self._traffic.returned(done)
                fused: FusedModel = done.value
                return fused
        raise RunError(f"{label}: the inputs of the fusion were lost {self._settings.retries + 1} times")

    def evaluate(self, params: Vector, buffers: Buffers, then: Callable[[Metrics], None]) -> None:
        """Test a model, the shards of the evaluation spread over the scorers; `then` is told while later work goes on."""
        setup = self._setup
        packed = self._traffic.put(Packed.of(ServerState(params))), self._traffic.put(Packed.of(buffers))
        count = setup.num_evaluation_shards
        shards: dict[int, ShardPredictions] = {}

        def tested(done: Done) -> None:
            if done.error is not None:
                raise RunError(f"{done.unit.label}: evaluate failed: {done.error}") from done.error
            shards[done.unit.key] = done.value
            if len(shards) == count:
                self._tests -= 1
                then(evaluation_metrics(setup, [shards[i] for i in range(count)]))

        self._tests += 1
        limit = self._settings.unit_timeout_s
        for i in range(count):
            unit = Unit(
                "evaluate", i, f"test shard {i}", (*packed, i), timeout_s=limit, again_when_late=True, then=tested
            )
            self._scorers.put(unit)
        self._scorers.dispatch()

    def drain(self, limit_s: float = math.inf) -> None:
        """Wait for every test that was begun."""
        deadline = time.monotonic() + limit_s
        self._run_until(lambda: not self._tests or time.monotonic() > deadline)

    def hold_scoring(self, held: bool, *, scorers: int | None = None) -> None:
        """For measurements: let scorers wait until the last client has trained, and use only some of them."""
        self._scorers.after, self._scorers.limit = (self._clients if held else None), scorers

    def fetch(self, handle: Any) -> Any:
        """The object behind a reference."""
        with signals_heard():
            self._traffic.fetched(handle)
            return ray.get(handle)

    def end_round(self) -> int:
        """Drop the units of the round, with what they were given; bytes that the driver sent and got since the last call."""
        self._units.clear()
        return self._traffic.take()

    def describe(self) -> dict[str, Any]:
        """The plan, where Ray is, and the seconds that connecting to it and starting the actors took."""
        return {**self.plan.as_dict(), "ray": self._connection.where, "startup_s": self._startup}

    def close(self) -> None:
        """End all actors, and Ray if this run started it."""
        with ExitStack() as stack:  # Each step is tried, whatever becomes of the one before.
            stack.callback(self._connection.close)
            if self._group is not None:
                stack.callback(remove_placement_group, self._group)
            if self._backend is not None:
                stack.callback(self._backend.close)
