"""Connecting to Ray: somebody's cluster if one is named, else a Ray of our own that ends with the run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup

from raysim.errors import ConfigError
from raysim.execution.ray_plan import STORE_FULL, Node, Plan, local_nodes
from raysim.execution.settings import ExecutionSettings

logger = logging.getLogger("raysim.ray")

TELL_AFTER_S = 3.0
"""Shorter waits are not worth a word: actors that were just ended hold their resources for a moment."""
REACH_S = 10.0
"""Longest time until a cluster's address answers."""


_GROUP: ContextVar[PlacementGroup | None] = ContextVar("group", default=None)


@contextmanager
def inside_group(group: PlacementGroup) -> Iterator[None]:
    """Runs in this block live in a placement group: a bundle for the driver, then one per scorer, then one per client actor."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def given_group() -> PlacementGroup | None:
    """The group that a run has to live in; None: it takes what it needs from the cluster."""
    return _GROUP.get()


@dataclass(frozen=True)
class Connection:
    """A connection to Ray.

    Attributes:
        started: Whether this run made it, and so has to end it.
        where: For messages.
    """

    started: bool
    where: str

    def close(self) -> None:
        """Disconnect, ending a Ray of our own; a Ray that was there before is left as it is."""
        if self.started:
            ray.shutdown()


def connect(settings: ExecutionSettings, store_bytes: float = 0.0) -> Connection:
    """Use the Ray this process is connected to, else `execution.address` or `RAY_ADDRESS`, else start one here.

    Args:
        settings: Where and how.
        store_bytes: What the run keeps in the object store, for the size of the one of a Ray that is started here.

    Raises:
        ConfigError: The cluster cannot be reached.
    """
    if ray.is_initialized():
        return Connection(False, "the Ray this process is connected to")
    address = settings.address or os.environ.get("RAY_ADDRESS")
    # Ray replaces the SIGTERM handler; a run's own must survive, or a stopped job looks like a crashed one.
    main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": f"raysim-{os.getpid()}"}
    try:
        if address:
            _knock(address)
            ray.init(address=address, **quiet)
        else:
            (usual,), (node,) = local_nodes(settings), local_nodes(settings, store_bytes / STORE_FULL)
            chosen = settings.object_store_memory_mb is not None or node.store > 1.01 * usual.store
            ray.init(
                address="local",
                num_cpus=settings.num_cpus,
                num_gpus=settings.num_gpus,
                object_store_memory=int(node.store) if chosen else None,  # None: Ray's choice, which looks at /dev/shm.
                include_dashboard=False,
                **quiet,
            )
    except (OSError, RuntimeError, ValueError) as error:
        key = "execution.address" if settings.address else "RAY_ADDRESS" if address else "execution"
        raise ConfigError(
            f"{key}: cannot {'reach' if address else 'start'} Ray{f' at {address}' if address else ''}: {error}"
        ) from error
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, handler)
    return Connection(True, address or "a local Ray")


def gcs_address() -> str:
    """Where other processes find the Ray that this one is connected to."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _knock(address: str) -> None:
    """See whether anybody answers at `host:port`: Ray itself tries for minutes before it says that nobody does."""
    host, _, port = address.rpartition(":")
    if "/" not in host and port.isdigit():  # Not `auto`, nor `ray://host:port`.
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


def cluster_nodes() -> list[Node]:
    """The nodes that are alive, with what they offer in all."""
    return [
        Node(
            name=node["NodeManagerHostname"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            memory=node["Resources"].get("memory", 0.0),
            store=node["Resources"].get("object_store_memory", 0.0),
            labels=node.get("Labels", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def wait_for_resources(plan: Plan, timeout_s: float) -> None:
    """Wait until what the plan needs is free.

    Raises:
        ConfigError: Others still hold it after `timeout_s`.
    """
    needed = {
        "CPU": plan.client_actors * plan.client_cpus + plan.scorer_actors * plan.scorer_cpus,
        "GPU": float(plan.client_actors * plan.client_gpus + plan.scorer_actors * plan.scorer_gpus),
    }
    deadline = time.monotonic() + timeout_s
    told, tell = False, time.monotonic() + TELL_AFTER_S
    while short := _short(needed):
        if time.monotonic() > deadline:
            free = ray.available_resources()
            lacking = ", ".join(f"{needed[name]:g} {name} needed, {free.get(name, 0):g} free" for name in short)
            raise ConfigError(
                f"execution: {lacking} on the cluster after {timeout_s:g} s (execution.resource_timeout_s): other jobs hold "
                "the rest; ask for fewer actors or wait longer"
            )
        if not told and time.monotonic() > tell:
            logger.warning("waiting up to %g s for %s that other jobs hold", timeout_s, " and ".join(short))
            told = True
        time.sleep(0.5)


def _short(needed: dict[str, float]) -> Sequence[str]:
    free = ray.available_resources()
    return [name for name, amount in needed.items() if amount > free.get(name, 0.0) + 1e-3]
