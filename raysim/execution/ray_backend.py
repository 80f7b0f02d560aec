"""Ray behind the pool's small interface: making actors, asking them, and telling their ends apart."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysim.execution.ray_actors import WorkActor
from raysim.execution.ray_plan import Plan
from raysim.execution.ray_pool import ActorLost, InputLost, Ref, Unit, UnitFailed


class RayBackend:
    """Makes actors and asks them; what `ray_pool` calls a backend."""

    def __init__(self, plan: Plan, setup_ref: Any, group: PlacementGroup | None, first: Mapping[str, int]) -> None:
        self._plan = plan
        self._first = first  # Bundle of the first actor of a role in the group; a role that is not in it has none.
        self.setup_ref = setup_ref
        self._group = group
        self._run_id = uuid.uuid4().hex[:8]
        self._actors: dict[str, Any] = {}
        self._vectors: dict[Ref, tuple[str, tuple[Any, ...]]] = {}

    def start(self, slot: str, generation: int) -> Ref:
        """Begin to create an actor: `client-3` or `scorer-0`."""
        role, _, index = slot.partition("-")
        plan = self._plan
        options: dict[str, Any] = {"name": f"raysim/{self._run_id}/{slot}.{generation}"}
        if role == "scorer":
            options |= {"num_cpus": plan.scorer_cpus, "num_gpus": ray_gpus(plan.scorer_gpus)}
            label = plan.scorer_label
        else:
            options |= {"num_cpus": plan.client_cpus, "num_gpus": ray_gpus(plan.client_gpus)}
            label = plan.client_label
        if self._group is not None and role in self._first:
            # The bundles of a group lie on nodes with the label already.
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._first[role] + int(index)
            )
        elif label:
            options["label_selector"] = dict(label)
        actor_class: Any = WorkActor
        self._actors[slot] = actor_class.options(**options).remote(self.setup_ref, slot)
        ref: Ref = self._actors[slot].hello.remote()
        return ref

    def adopt(self, slot: str) -> Ref:
        """Give the slot's actor the setup that is now in `setup_ref`."""
        ref: Ref = self._actors[slot].adopt.remote(self.setup_ref)
        return ref

    def submit(self, slot: str, unit: Unit) -> Ref:
        """Run a unit; of training, scores and sums only the short report is waited for, vectors stay where they are."""
        actor = self._actors[slot]
        if unit.kind == "train":
            item, broadcast, state = unit.payload
            *vectors, report = actor.train.remote(item, unit.attempt, broadcast, state)
            ref: Ref = self._keep(slot, vectors, report)
        elif unit.kind == "sum":
            *vectors, report = actor.sum.remote(*unit.payload)
            ref = self._keep(slot, vectors, report)
        elif unit.kind == "accumulate":
            key, *payload = unit.payload
            *vectors, report = actor.accumulate.remote(key, unit.attempt, *payload)
            ref = self._keep(slot, vectors, report)
        elif unit.kind == "finish":
            *vectors, report = actor.finish.remote(*unit.payload)
            ref = self._keep(slot, vectors, report)
        elif unit.kind == "score":
            key, *payload = unit.payload
            *vectors, report = actor.score.remote(key, unit.attempt, *payload)
            ref = self._keep(slot, vectors, report)
        elif unit.kind == "score_many":
            keys, *payload = unit.payload
            ref = actor.score_many.remote(keys, unit.attempt, *payload)
        else:
            ref = getattr(actor, unit.kind).remote(*unit.payload)
        return ref

    def _keep(self, slot: str, vectors: Sequence[Any], report: Ref) -> Ref:
        self._vectors[report] = slot, tuple(vectors)
        return report

    def wait(self, refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
        """All that are ready, after at least one is or the time is over; nothing is fetched to the driver."""
        refs = list(refs)
        with signals_heard():
            ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def result(self, ref: Ref) -> Any:
        """The value; for training, scores and sums the report with the references of the vectors."""
        _, vectors = self._vectors.pop(ref, ("", None))
        try:
            with signals_heard():
                value = ray.get(ref)
        except ObjectLostError as error:
            # First: an argument that is gone comes as an error that is a RayTaskError as well.
            raise InputLost(_reason(error)) from None
        except RayTaskError as error:
            raise UnitFailed(str(error)) from None
        except (ActorDiedError, ActorUnavailableError, WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
            raise ActorLost(_reason(error)) from None
        except RayError as error:
            raise UnitFailed(f"{type(error).__name__}: {error}") from None
        return value if vectors is None else (value, *vectors)

    def kill(self, slot: str) -> None:
        """End the slot's actor and forget what it was running, or a unit given up would stay in memory."""
        actor = self._actors.pop(slot, None)
        self._vectors = {ref: kept for ref, kept in self._vectors.items() if kept[0] != slot}
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """End all actors."""
        for slot in list(self._actors):
            self.kill(slot)


@contextmanager
def signals_heard() -> Iterator[None]:
    """Let through what a signal handler raised; Ray's C code makes a SystemError of it, with the exception as the cause."""
    try:
        yield
    except SystemError as error:
        raise error.__cause__ or error from None


def ray_gpus(share: Any) -> float:
    """A share in Ray's granularity of 1/10000, rounded down so that k of them fit."""
    return float(share) if share.denominator == 1 else int(share * 10_000) / 10_000


def _reason(error: Exception) -> str:
    """The first line of Ray's explanation, with its hint at the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "memory" in line.lower() or "SIGKILL" in line or "exit" in line.lower()]
    return " ".join(dict.fromkeys([*lines[:1], *causes[:1]])) or type(error).__name__
