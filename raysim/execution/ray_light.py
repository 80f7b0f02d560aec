"""Rounds of scoring that only sleeps: how well the pools keep scorers busy, with more of them than there are cores.

The pools and the backend are those of a run; the actors are light ones without torch, with which one costs 320 MB and 3 s.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import ray

from raysim.errors import RunError
from raysim.execution.ray_backend import RayBackend
from raysim.execution.ray_connection import cluster_nodes, connect
from raysim.execution.ray_plan import Plan, local_nodes
from raysim.execution.ray_pool import Done, Pool, Ref, Unit, run_until, wait_until_started
from raysim.execution.settings import ExecutionSettings

LIGHT_MEMORY = 80 * 2**20
"""Private memory of a light actor, in bytes (measured: about 60 MB)."""
PARAMETERS = 44_000
"""Length of the vectors that travel."""
CLIENTS = 2


def rehearse(
    settings: ExecutionSettings,
    counts: Sequence[int],
    *,
    models_per_scorer: int,
    seconds: float,
    repeats: int,
    say: Callable[[str], None],
) -> tuple[dict[int, list[float]], list[int]]:
    """Seconds of rounds in which every scorer sleeps for `models_per_scorer` models.

    Args:
        settings: Which Ray, and the size of one that is started.
        counts: Numbers of scorers, ascending.
        models_per_scorer: Models of a round over scorers.
        seconds: Sleep per model.
        repeats: Rounds that count, after one that does not.
        say: Told how it goes.

    Returns:
        The repeats of each number of scorers, and the numbers that memory is too small for.
    """
    with contextlib.ExitStack() as stack:
        connection = connect(settings)
        stack.callback(connection.close)
        nodes = cluster_nodes()
        memory = sum(node.memory for node in nodes)
        if len(nodes) == 1:  # What a node offers is not what is free; on this machine that can be told.
            memory = min(memory, local_nodes(settings)[0].memory)
        fitting = [count for count in counts if (count + CLIENTS) * LIGHT_MEMORY <= memory]
        plan = Plan(CLIENTS, max(fitting, default=1), Fraction(0), Fraction(0), 0, 0, "", False, tuple(nodes))
        backend = _LightBackend(plan, None, None, {})
        stack.callback(backend.close)
        broadcast = ray.put(np.zeros(PARAMETERS, dtype=np.float32))
        found = {}
        for count in fitting:
            sizes = {"client": CLIENTS, "scorer": count}
            pools = [Pool(role, [f"{role}-{i}" for i in range(size)], backend) for role, size in sizes.items()]
            for pool in pools:
                pool.start()
            wait_until_started(pools, backend)
            times = [_round(pools, backend, broadcast, models_per_scorer * count, seconds) for _ in range(repeats + 1)]
            found[count] = times[1:]
            say(f"{count} sleeping scorers: {', '.join(f'{s:.3f}' for s in times[1:])} s")
    return found, [count for count in counts if count not in fitting]


def _round(pools: Sequence[Pool], backend: RayBackend, broadcast: Any, models: int, seconds: float) -> float:
    clients, scorers = pools
    scored = 0

    def trained(done: Done) -> None:
        payload = (done.unit.key, broadcast, done.value[1], seconds)
        scorers.put(Unit("score", done.unit.key, f"model {done.unit.key}", payload, then=ended))

    def ended(done: Done) -> None:
        nonlocal scored
        if done.error is not None:
            raise RunError(f"{done.unit.kind} on a light actor failed: {done.error}") from done.error
        scored += 1

    started = time.perf_counter()
    for model in range(models):
        clients.put(Unit("train", model, f"model {model}", (model, broadcast, None), then=trained))
    run_until(pools, backend, lambda: scored == models)
    return time.perf_counter() - started


class _LightBackend(RayBackend):
    """Makes light actors, which a larger pool finds as the smaller one left them."""

    def start(self, slot: str, generation: int) -> Ref:
        if slot not in self._actors or generation > 1:
            self._actors[slot] = _light_actor().options(num_cpus=0, max_restarts=0).remote()
        ref: Ref = self._actors[slot].hello.remote()
        return ref


@functools.cache
def _light_actor() -> Any:
    # Made in here, so that the class itself is sent: a process that had to import this file would import torch.
    class LightActor:
        def hello(self) -> tuple[int, str]:
            return os.getpid(), ray.get_runtime_context().get_node_id()

        @ray.method(num_returns=3)  # type: ignore[untyped-decorator]
        def train(self, item: int, attempt: int, broadcast: Any, state: None) -> tuple[Any, None, int]:
            return {"delta": broadcast + 1}, None, item

        @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
        def score(self, key: int, attempt: int, broadcast: Any, update: Any, seconds: float) -> tuple[None, float]:
            time.sleep(seconds)
            return None, float((broadcast + update["delta"])[0])

    return ray.remote(LightActor)
