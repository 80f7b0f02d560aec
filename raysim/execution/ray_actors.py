"""The actor: a process with a bound model, a thin shell around the functions of `work.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from raysim.cohort import Coefficients
from raysim.evaluation import ShardPredictions
from raysim.execution.base import Broadcast, FusedModel, Packed, Setup, TrainReport, WorkItem
from raysim.execution.faults import strike
from raysim.execution.work import (
    accumulate_shard,
    add_groups,
    build_objective,
    evaluate_shard,
    finish_probe,
    fuse_models,
    probe_client,
    probe_clients,
    reference_at,
    sum_group,
    train_client,
)
from raysim.state import Arrays
from raysim.weighting.base import Probe, Sums, Tally, add_sums


@ray.remote(max_restarts=0, max_task_retries=0)
class WorkActor:
    """A client or a scorer, as its pool decides. It holds the setup and a model's memory, never state of a run."""

    _label = "an actor whose setup cannot be read"  # Ray asks for it even then.

    def __init__(self, setup: Setup, label: str) -> None:
        self._label = label
        self.adopt(setup)

    def __repr__(self) -> str:
        return self._label

    def adopt(self, setup: Setup) -> tuple[int, str]:
        """Work for this run from now on; nothing of the one before is left."""
        self._setup = setup
        torch.set_num_threads(setup.threads)
        self._objective = build_objective(setup, _device())
        return self.hello()

    def hello(self) -> tuple[int, str]:
        """Process id and node id; answers once the model is built."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    @ray.method(num_returns=3)  # type: ignore[untyped-decorator]
    def train(
        self, item: WorkItem, attempt: int, broadcast: Broadcast, state: Packed
    ) -> tuple[Arrays, Packed, TrainReport]:
        """Three objects: the vectors stay on this node, the report is small enough to travel inline."""
        return train_client(self._setup, self._objective, broadcast, item, state, attempt=attempt)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def score(
        self,
        client_id: int,
        attempt: int,
        broadcast: Broadcast,
        arrays: Arrays,
        reference: Tally | None,
        level: int = 0,
        sums: Sums | None = None,
    ) -> tuple[Sums | None, tuple[Probe, float]]:
        """Probe one client's model. Two objects: sums stay on this node if images may be added to them, else there are none."""
        probe, seconds, total = probe_client(
            self._setup,
            self._objective,
            broadcast,
            arrays,
            reference,
            client_id=client_id,
            attempt=attempt,
            level=level,
            sums=sums,
        )
        return total if self._setup.scoring.grows else None, (probe, seconds)

    def score_many(
        self,
        client_ids: Sequence[int],
        attempt: int,
        broadcast: Broadcast,
        reference: Tally | None,
        *updates: Arrays,
    ) -> list[tuple[Probe, float]]:
        """Probe several clients' models in one call; the updates are read where the object store has them."""
        return probe_clients(self._setup, self._objective, broadcast, updates, reference, client_ids, attempt=attempt)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def accumulate(
        self, client_id: int, attempt: int, broadcast: Broadcast, arrays: Arrays, shard: int
    ) -> tuple[Sums, float]:
        """Two objects: the sums over one shard stay on this node, the seconds they took travel inline."""
        started = time.perf_counter()
        strike(self._setup.faults, "score", client_id, broadcast.round_num, attempt)
        sums = accumulate_shard(self._setup, self._objective, broadcast, arrays, shard)
        return sums, time.perf_counter() - started

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def finish(
        self, broadcast: Broadcast, arrays: Arrays, reference: Tally | None, seconds: float, *shards: Sums
    ) -> tuple[None, tuple[Probe, float]]:
        """The probe of a model whose shards took `seconds` elsewhere; two objects, as those of `score`."""
        started = time.perf_counter()
        tally = Tally(add_sums(shards))
        probe = finish_probe(self._setup, self._objective, broadcast, arrays, tally, reference)
        return None, (probe, seconds + time.perf_counter() - started)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def sum(self, coefficients: Mapping[str, Coefficients], *updates: Arrays) -> tuple[Arrays, int]:
        """Two objects: the sums of a group stay on this node, the number of its members travels inline."""
        return sum_group(updates, coefficients), len(updates)

    def add(self, *groups: Arrays) -> Arrays:
        """The sums of all groups."""
        return add_groups(groups)

    def reference(self, broadcast: Broadcast, level: int = 0, sums: Sums | None = None) -> Tally | None:
        """What the weighting needs of the global model."""
        return reference_at(self._setup, self._objective, broadcast, level, sums)

    def fuse(
        self, broadcast: Broadcast, merged: Packed, buffers: Packed, weights: np.ndarray, *updates: Arrays
    ) -> FusedModel:
        """The run's fusion of a cohort; its updates are read where the object store has them."""
        return fuse_models(self._setup, self._objective, broadcast, merged, buffers, weights, updates)

    def evaluate(self, server: Packed, buffers: Packed, shard: int) -> ShardPredictions:
        """Predictions on one shard of the test set."""
        return evaluate_shard(self._setup, self._objective, server, buffers, shard)


def _device() -> torch.device:
    """The GPU that Ray assigned to this actor, else the CPU.

    `torch.cuda.is_available()` alone is no test: Ray lets actors without a GPU see all of them.
    """
    context = ray.get_runtime_context()
    assigned: Any = context.get_accelerator_ids().get("GPU", [])
    if not assigned or not torch.cuda.is_available():
        return torch.device("cpu")
    share = float(context.get_assigned_resources().get("GPU", 1.0))
    if share < 1:
        # One that wants more than its share fails, instead of its neighbours.
        torch.cuda.set_per_process_memory_fraction(share)
    return torch.device("cuda")
