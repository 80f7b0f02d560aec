"""The serial executor: the whole round in this process, one unit after the other.

It is the reference that the Ray executor equals bit for bit, and the place to set a breakpoint: errors of a client are not
wrapped but raised where they happen.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from raysim.cohort import Coefficients
from raysim.evaluation import Metrics
from raysim.execution.base import (
    Broadcast,
    FusedModel,
    Observer,
    Outcome,
    Packed,
    Place,
    PoolUse,
    Setup,
    StoredState,
    WorkItem,
)
from raysim.execution.ray_plan import Demand
from raysim.execution.settings import ExecutionSettings
from raysim.execution.work import (
    build_objective,
    evaluate_shard,
    evaluation_metrics,
    fuse_models,
    probe_client,
    reference_at,
    sum_updates,
    train_client,
)
from raysim.state import Buffers, ServerState
from raysim.vector import Vector
from raysim.weighting.base import Tally


class SerialExecutor:
    """Runs every unit in this process. Handles are the objects themselves."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._objective = build_objective(setup)

    def adopt(self, setup: Setup, settings: ExecutionSettings, demand: Demand) -> bool:
        """Take over another run, if it is to be serial."""
        if settings.backend != "serial":
            return False
        self._setup, self._objective = setup, build_objective(setup)
        return True

    def run_cohort(
        self, broadcast: Broadcast, items: Sequence[WorkItem], observer: Observer
    ) -> tuple[list[Outcome], Tally | None, PoolUse]:
        """Train and probe each client in turn."""
        setup, objective = self._setup, self._objective
        started = time.perf_counter()
        reference = reference_at(setup, objective, broadcast)
        outcomes = []
        train_seconds = 0.0
        for item in items:
            outcome = Outcome(item.client_id, item.position, started=datetime.now(UTC))
            state = item.state.load() if isinstance(item.state, StoredState) else item.state or Packed(None, {})
            arrays, new_state, outcome.train = train_client(setup, objective, broadcast, item, state)
            outcome.update, outcome.state = arrays, new_state if new_state.kind is not None else None
            outcome.actor = Place("serial", os.getpid(), platform.node(), 1)
            train_seconds += outcome.train.seconds
            outcome.check_update()
            observer.client_trained(item.client_id)
            if outcome.status == "ok" and setup.weighting.needs_probe:
                if item.kept is not None:
                    outcome.keep_probe(item.kept, broadcast.round_num)
                else:
                    outcome.probe, outcome.score_seconds, sums = probe_client(
                        setup, objective, broadcast, arrays, reference, client_id=item.client_id
                    )
                    outcome.sums = sums if setup.scoring.grows else None
                    outcome.queue_seconds, outcome.scorer, outcome.score_age = 0.0, outcome.actor, 0
                    outcome.check_probe()
                observer.client_scored(item.client_id)
            outcome.finished = datetime.now(UTC)
            outcomes.append(outcome)
        return outcomes, reference, PoolUse(train_seconds, time.perf_counter() - started - train_seconds)

    def score_more(
        self, broadcast: Broadcast, outcomes: Sequence[Outcome], level: int, reference: Tally | None
    ) -> Tally | None:
        """Score the images that a level adds."""
        setup, objective = self._setup, self._objective
        reference = reference_at(setup, objective, broadcast, level, reference.total if reference else None)
        for outcome in outcomes:
            outcome.probe, seconds, outcome.sums = probe_client(
                setup,
                objective,
                broadcast,
                outcome.update,
                reference,
                client_id=outcome.client_id,
                level=level,
                sums=outcome.sums,
            )
            outcome.score_seconds = (outcome.score_seconds or 0.0) + seconds
            outcome.check_probe()
        return reference

    def sums(self, outcomes: Sequence[Outcome], coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
        """float64 sums in the fixed groups."""
        return sum_updates([o.position for o in outcomes], lambda i: outcomes[i].update, coefficients)

    def fuse(
        self,
        outcomes: Sequence[Outcome],
        broadcast: Broadcast,
        merged: Packed,
        buffers: Packed,
        weights: np.ndarray,
    ) -> FusedModel:
        """The fusion, here."""
        updates = [outcome.update for outcome in outcomes]
        return fuse_models(self._setup, self._objective, broadcast, merged, buffers, weights, updates)

    def evaluate(self, params: Vector, buffers: Buffers, then: Callable[[Metrics], None]) -> None:
        """Metrics on the test set (and the validation set), shard by shard."""
        setup = self._setup
        packed = Packed.of(ServerState(params)), Packed.of(buffers)
        shards = [evaluate_shard(setup, self._objective, *packed, i) for i in range(setup.num_evaluation_shards)]
        then(evaluation_metrics(setup, shards))

    def drain(self, limit_s: float = math.inf) -> None:
        """Nothing is ever left to wait for."""

    def end_round(self) -> int:
        """Nothing is kept, and there is no network."""
        return 0

    def fetch(self, handle: Any) -> Any:
        """The handle itself."""
        return handle

    def describe(self) -> dict[str, Any]:
        """One process."""
        return {"backend": "serial", "client_actors": 1, "scorer_actors": 1, "binding": "serial"}

    def close(self) -> None:
        """Nothing to end."""
