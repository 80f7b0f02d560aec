"""Clients that do nothing, so that what is left of a round is the framework."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from raysim.algorithms.base import Algorithm, Cohort
from raysim.bench.findings import Finding, Row
from raysim.bench.workload import Bench
from raysim.config import RunConfig, resolve
from raysim.errors import ConfigError
from raysim.execution.ray_plan import local_nodes
from raysim.execution.settings import ExecutionSettings
from raysim.local import LocalTraining
from raysim.objective import Objective
from raysim.preparation import Prepared, prepare
from raysim.recorder import checksums
from raysim.recording.progress import Silent
from raysim.simulation import run_round
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector

MODELS = {
    "LeNet-5": ("lenet5", 44_000),
    "ResNet-18": ("resnet18", 11_200_000),
    "ViT-B/16": ("timm:vit_base_patch16_224", 85_300_000),
}
"""Network and about how many parameters it has for one channel and ten classes."""
CLIENTS = 20
FEWEST = 4
"""Fewer clients than this share what a round costs once too badly to speak of one client."""
SPILL_FREE = 0.6
"""Share of the object store that is used; Ray writes to disk from 80 % on, which would be measured too."""
WARM_UP = 2


@dataclass(frozen=True)
class Null(Algorithm[ServerState, None, ClientUpdate]):
    """Clients that load the model they got and return it, a little higher."""

    name: Literal["null"] = "null"

    def init_server(self, params: Vector, population: Population) -> ServerState:
        """The global model."""
        return ServerState(params)

    def client_update(
        self, server: ServerState, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[ClientUpdate, None]:
        """A delta of the model's size, for which nothing was trained."""
        delta = (objective.params - server.params).add_(1e-9)
        return ClientUpdate(delta, objective.num_examples, 1, 0.0), None

    def server_update(self, server: ServerState, cohort: Cohort[ClientUpdate]) -> ServerState:
        """The mean."""
        return ServerState(server.params + cohort.mean_delta())


def overhead(bench: Bench) -> Finding:
    """Milliseconds per client of a round without training: load, return, finite check, float64 sum, checksums once."""
    rows, raw, notes = list[Row](), dict[str, Any](), list[str]()
    for title, (model, parameters) in MODELS.items():
        clients = min(CLIENTS, _fitting(bench.config, parameters))
        if clients < FEWEST:
            each = 4 * parameters / 2**20
            notes.append(f"overhead: {title} skipped: Ray's object store is too small for {FEWEST} x {each:.0f} MiB")
            continue
        try:
            times, size = _rounds_without_training(bench, model, clients)
        except ConfigError as error:
            notes.append(f"overhead: {title} skipped: {error}")
            continue
        bench.say(f"overhead: {title}: {', '.join(f'{t:.1f}' for t in times)} ms per client")
        rows.append(
            Row.of(f"{title}, per client", times, "ms", f"{size:,} parameters, {clients} clients, 2 client actors")
        )
        raw[title] = {"parameters": size, "clients": clients, "ms_per_client": times}
    return Finding("overhead", rows, raw, notes)


def _fitting(config: RunConfig, parameters: int) -> int:
    """Clients whose updates the object store holds until they are summed, beside three global models."""
    (node,) = local_nodes(config.execution)
    return int(SPILL_FREE * node.store / (4 * parameters)) - 3


def without_training(execution: ExecutionSettings, model: str, clients: int) -> Prepared:
    """A run of rounds in which a cohort of clients does nothing; weights by size."""
    config = resolve(
        {
            "model": {"name": model},
            "partition": {"scheme": "iid", "clients": max(clients, CLIENTS)},
            "client": {"per_round": clients, "local_epochs": 1},
            "weighting": {"name": "size"},
        }
    )
    ready = prepare(replace(config, execution=execution))
    return replace(ready, setup=replace(ready.setup, algorithm=Null()))


def _rounds_without_training(bench: Bench, model: str, clients: int) -> tuple[list[float], int]:
    ready = without_training(replace(bench.config.execution, client_actors=2, scorer_actors=1), model, clients)
    executor, state, times = bench.executor(ready), ready.initial, list[float]()
    for _ in range(WARM_UP + bench.repeats):
        clock = time.perf_counter()
        result = run_round(ready, state, executor, Silent())
        state = result.state
        checksums(state, result.outcomes)
        times.append(1000 * (time.perf_counter() - clock) / clients)
        del result
    return times[WARM_UP:], ready.population.layout.size
