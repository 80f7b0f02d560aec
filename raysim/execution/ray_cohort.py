"""One round's pipeline: train -> check -> score, client by client, in whatever order they come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import ray

from raysim.errors import RunError
from raysim.execution.base import Observer, Outcome, Packed, PoolUse, Setup, StoredState, WorkItem
from raysim.execution.cost import CostModel
from raysim.execution.ray_pool import ActorLost, Done, InputLost, Pool, Unit, UnitFailed
from raysim.weighting.base import Tally

logger = logging.getLogger("raysim.ray")


class CohortRun:
    """The clients of one round on their way through the pools.

    Args:
        setup: The run.
        clients: Where they train.
        scorers: Where their models are scored.
        per_client: Whether every client has an actor of its own.
        round_num: Of the round.
        broadcast: Reference of what the round begins with.
        observer: Told who is trained and scored.
        cost: Expected work; learns from every unit.
        unit_timeout_s: Longest time of a unit on a scorer.
        models_per_call: Most models that a scorer gets at once.
    """

    def __init__(
        self,
        setup: Setup,
        clients: Pool,
        scorers: Pool,
        *,
        per_client: bool,
        round_num: int,
        broadcast: Any,
        observer: Observer,
        cost: CostModel,
        unit_timeout_s: float,
        models_per_call: int = 1,
    ) -> None:
        self._setup, self._clients, self._scorers, self._per_client = setup, clients, scorers, per_client
        self._round_num, self._broadcast, self._observer = round_num, broadcast, observer
        self._cost, self._unit_timeout_s, self._models_per_call = cost, unit_timeout_s, models_per_call
        self._outcomes: dict[int, Outcome] = {}
        self.units: dict[int, Unit] = {}
        self._ready: dict[int, float] = {}
        self._open: set[int] = set()
        self._wants_reference = setup.weighting.reference_needs != "nothing"
        self._reference: Tally | None = None
        self._reference_ref: Any = None
        self._waiting: list[Callable[[], None]] = []
        self._models: list[tuple[Outcome, Done]] = []
        self._last_trained = time.monotonic()

    def run(
        self, items: Sequence[WorkItem], until: Callable[[Callable[[], bool]], None]
    ) -> tuple[list[Outcome], Tally | None, PoolUse]:
        """Run all items to their end; `until` keeps the pools going until its argument says so."""
        pools = (self._clients, self._scorers)
        started = time.monotonic()
        busy, retried = [pool.busy_seconds for pool in pools], sum(pool.retried for pool in pools)
        if self._wants_reference:
            label = f"round {self._round_num}"
            self._scorers.put(self._on_scorer("reference", -1, label, (self._broadcast,), self._referred))
        examples = [item.num_examples * self._setup.training.local_epochs for item in items]
        for item, cost in zip(items, self._cost.costs(examples), strict=True):
            self._put(item, cost)
        until(self._finished)
        ended = time.monotonic()
        train, total = self._last_trained - started, ended - started
        spent = [pool.busy_seconds - before for pool, before in zip(pools, busy, strict=True)]
        scored = self._setup.weighting.needs_probe
        use = PoolUse(
            train_seconds=train,
            score_tail_seconds=ended - self._last_trained,
            client_utilisation=_share(spent[0], train * len(self._clients.slots)),
            scorer_utilisation=_share(spent[1], total * len(self._scorers.slots)) if scored else None,
            retries=sum(pool.retried for pool in pools) - retried,
            client_seconds=spent[0],
            scorer_seconds=spent[1],
        )
        return [self._outcomes[item.client_id] for item in items], self._reference, use

    def _finished(self) -> bool:
        while self._models and (len(self._models) >= self._models_per_call or self._scorers.idle):
            self._score_many(self._models[: self._models_per_call])
            del self._models[: self._models_per_call]
        return not self._open and (self._reference is not None or not self._wants_reference)

    def _put(self, item: WorkItem, cost: float) -> None:
        state = ray.put(item.state.load()) if isinstance(item.state, StoredState) else item.state
        outcome = Outcome(item.client_id, item.position, started=datetime.now(UTC))
        unit = Unit(
            "train",
            item.client_id,
            f"round {self._round_num} client {item.client_id}",
            (replace(item, state=None), self._broadcast, Packed(None, {}) if state is None else state),
            cost=cost,
            timeout_s=self._setup.client_timeout_s,
            home=f"client-{item.client_id}" if self._per_client else None,
            then=partial(self._trained, outcome),
        )
        self._outcomes[item.client_id], self.units[item.client_id] = outcome, unit
        self._open.add(item.client_id)
        self._clients.put(unit)

    def _referred(self, done: Done) -> None:
        if done.error is not None:
            raise RunError(f"the weighting's reference failed: {done.error}") from done.error
        self._reference, self._reference_ref = done.value, ray.put(done.value)
        for put in self._waiting:
            put()
        self._waiting.clear()

    def _trained(self, outcome: Outcome, done: Done) -> None:
        outcome.actor = done.place
        self._last_trained = time.monotonic()
        if done.error is not None:
            self._fail(outcome, done)
        else:
            outcome.train, outcome.update, state = done.value
            outcome.state = state if outcome.train.state_checksum is not None else None
            outcome.check_update()
            item: WorkItem = done.unit.payload[0]
            self._cost.add(item.num_examples * self._setup.training.local_epochs, outcome.train.seconds)
        if done.unit.attempt == 1 or outcome.client_id not in self._ready:
            self._observer.client_trained(outcome.client_id)
        kept = done.unit.payload[0].kept
        if outcome.status == "ok" and self._setup.weighting.needs_probe and kept is not None:
            outcome.keep_probe(kept, self._round_num)
            self._observer.client_scored(outcome.client_id)
            self._close(outcome)
        elif outcome.status == "ok" and self._setup.weighting.needs_probe:
            self._ready[outcome.client_id] = time.monotonic()
            put = partial(self._score if self._models_per_call == 1 else self._stack, outcome, done)
            if self._wants_reference and self._reference is None:
                self._waiting.append(put)
            else:
                put()
        else:
            self._close(outcome)

    def _score(self, outcome: Outcome, trained: Done) -> None:
        """Hand a model to the scorers: whole, or if several of them have nothing else to do, shard by shard."""
        key, label = outcome.client_id, trained.unit.label
        near = trained.place.node if trained.place else None
        shards = len(self._setup.scoring_shards) if self._setup.scoring.subset is None else 1
        if shards > 1 and self._scorers.idle > 1:
            parts = _Parts(shards)
            for i in range(shards):
                payload = (key, self._broadcast, outcome.update, i)
                then = partial(self._shard_scored, outcome, parts, i)
                self._scorers.put(replace(self._on_scorer("accumulate", key, label, payload, then), near=near))
        else:
            payload = (key, self._broadcast, outcome.update, self._reference_ref)
            then = partial(self._scored, outcome)
            self._scorers.put(replace(self._on_scorer("score", key, label, payload, then), near=near))

    def _stack(self, outcome: Outcome, trained: Done) -> None:
        """Let a model wait until there are enough of them for a call, or a scorer with nothing to do."""
        self._models.append((outcome, trained))

    def _score_many(self, models: Sequence[tuple[Outcome, Done]]) -> None:
        members, (first, trained) = [outcome for outcome, _ in models], models[0]
        updates = (outcome.update for outcome in members)
        payload = ([outcome.client_id for outcome in members], self._broadcast, self._reference_ref, *updates)
        label = f"round {self._round_num} clients {', '.join(str(outcome.client_id) for outcome in members)}"
        unit = self._on_scorer("score_many", first.client_id, label, payload, partial(self._many_scored, models))
        self._scorers.put(replace(unit, near=trained.place.node if trained.place else None))

    def _many_scored(self, models: Sequence[tuple[Outcome, Done]], done: Done) -> None:
        for i, (outcome, trained) in enumerate(models):
            if done.error is None:
                self._scored(outcome, replace(done, value=(done.value[i],)))
            else:
                self._score(outcome, trained)  # Alone: only the one at fault shall fail.

    def _on_scorer(self, kind: str, key: int, label: str, payload: Any, then: Callable[[Done], None]) -> Unit:
        return Unit(kind, key, label, payload, timeout_s=self._unit_timeout_s, again_when_late=True, then=then)

    def _shard_scored(self, outcome: Outcome, parts: _Parts, index: int, done: Done) -> None:
        if parts.given_up:
            return
        if done.error is not None:
            parts.given_up = True
            self._scored(outcome, done)
            return
        self._queued(outcome, done)
        seconds, parts.sums[index] = done.value
        parts.seconds += seconds
        if all(sums is not None for sums in parts.sums):
            payload = (self._broadcast, outcome.update, self._reference_ref, parts.seconds, *parts.sums)
            then = partial(self._scored, outcome)
            unit = self._on_scorer("finish", outcome.client_id, done.unit.label, payload, then)
            self._scorers.put(replace(unit, near=done.unit.near))

    def _scored(self, outcome: Outcome, done: Done) -> None:
        outcome.scorer = done.place
        unit = self.units[outcome.client_id]
        if isinstance(done.error, InputLost) and unit.attempt <= self._clients.retries:
            # The update is gone with its node: the client trains again, drawing the same numbers.
            logger.warning("%s: update lost, training again", done.unit.label)
            outcome.update = outcome.state = outcome.train = outcome.queue_seconds = None
            self.units[outcome.client_id] = replace(unit, attempt=unit.attempt + 1)
            self._clients.put(self.units[outcome.client_id])
            return
        if done.error is not None:
            self._fail(outcome, done)
        else:
            (outcome.probe, outcome.score_seconds), *sums = done.value
            outcome.sums = sums[0] if self._setup.scoring.grows else None
            outcome.score_age = 0
            self._queued(outcome, done)
            outcome.check_probe()
        self._observer.client_scored(outcome.client_id)
        self._close(outcome)

    def _queued(self, outcome: Outcome, done: Done) -> None:
        if outcome.queue_seconds is None:
            outcome.queue_seconds = max(0.0, done.started - self._ready[outcome.client_id])

    def _close(self, outcome: Outcome) -> None:
        outcome.finished = datetime.now(UTC)
        self._open.discard(outcome.client_id)

    def _fail(self, outcome: Outcome, done: Done) -> None:
        actor = done.place.actor if done.place else "?"
        if isinstance(done.error, UnitFailed):
            logger.error("%s %s on %s raised:\n%s", done.unit.label, done.unit.kind, actor, done.error)
            reason = str(done.error).strip().splitlines()[-1]
        elif isinstance(done.error, ActorLost):
            reason = f"actor died ({done.unit.attempt} attempts): {done.error}"
        else:
            reason = str(done.error)
        kind = "score" if done.unit.kind in ("accumulate", "finish") else done.unit.kind
        logger.warning("%s failed in %s: %s", done.unit.label, kind, reason)
        outcome.drop("failed", f"{kind}: {reason}")


class _Parts:
    """The sums of a model's shards, as they come in."""

    def __init__(self, shards: int) -> None:
        self.sums: list[Any] = [None] * shards
        self.seconds = 0.0
        self.given_up = False


def _share(spent: float, available: float) -> float | None:
    return min(1.0, spent / available) if available > 0 else None
