"""Where and how the work runs: the `execution` section of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from raysim.fields import Count, NonNegative, NonNegativeInt, Positive, Section

_LABEL = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"


NUMERIC = ("execution.threads", "execution.clients_per_call")
"""The settings of execution that can change a number; the others say who does the work."""


def is_numeric(key: str) -> bool:
    """Whether a key of a configuration is one of `NUMERIC`."""
    return key in NUMERIC


def gpu_share(value: float | str) -> Fraction | None:
    """The share of a GPU that `num_gpus` asks for: a whole number or 1/k; None for `auto`.

    Raises:
        ValueError: Anything else; shares other than 1/k leave remainders on a GPU that nothing can use.
    """
    if value == "auto":
        return None
    try:
        exact = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"num_gpus must be auto, a whole number or 1/k, got {value!r}") from None
    if exact >= 0 and exact.denominator == 1:
        return exact
    if Fraction(1, 10_000) <= exact < 1:  # Ray counts GPUs in steps of 1/10000.
        nearest = Fraction(1, round(1 / exact))
        # 0.3333 stands for 1/3, 0.3 does not.
        if abs(exact - nearest) <= Fraction(1, 10_000):
            return nearest
    raise ValueError(f"num_gpus must be auto, a whole number or 1/k (1/2, 1/3, 0.25, ...), got {value}")


@dataclass(frozen=True)
class ActorSettings(Section):
    """Resources of one actor.

    Attributes:
        num_cpus: CPUs it reserves. On a CPU, twice as many actors as cores (0.5) keep the cores busy.
        num_gpus: `auto`: an equal 1/k for clients and scorers where there are GPUs, else 0; a whole number or 1/k.
        label: Only nodes that were started with these labels, `{raysim-role: scorer}`, for example (`ray start --labels
            raysim-role=scorer`); null: all nodes.
    """

    num_cpus: NonNegative = 0.5
    num_gpus: float | str = "auto"
    label: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        gpu_share(self.num_gpus)
        for key, value in (self.label or {}).items():
            # What Ray accepts as labels. It would also read `!x` and `in(x, y)` as conditions; the plan knows equality only.
            if not re.fullmatch(rf"([A-Za-z0-9.-]{{1,253}}/)?{_LABEL}", key) or not re.fullmatch(_LABEL, value):
                raise ValueError(
                    f"label: {key}: {value} is no label of a node: key and value are up to 63 letters, digits, '-', '_' or "
                    "'.', and begin and end with a letter or digit"
                )


@dataclass(frozen=True)
class ExecutionSettings(Section):
    """Where and how the work runs. Nothing here but `threads` and `clients_per_call` can change a number of the result.

    Attributes:
        backend: `ray` or `serial` (in this process, for debugging).
        address: A Ray cluster's address; null: `RAY_ADDRESS`, else a Ray that raysim starts itself.
        num_cpus: CPUs of a Ray that raysim starts itself; null: all.
        num_gpus: GPUs of a Ray that raysim starts itself; null: all.
        object_store_memory_mb: Object store of a Ray that raysim starts itself; null: Ray's share of the free memory, 30 %, or
            more if a round needs it.
        state_cache_mb: Clients' states (SCAFFOLD, FedDyn) that the object store keeps; those that were used longest ago are
            read from their files when needed again.
        client_actors: `auto`: every client of the cohort its own actor if they fit, else as many as fit; `per_client`: every
            client of the run its own; or a number.
        scorer_actors: `auto` or a number.
        threads: Torch threads per process; part of the numerics, the same for `serial`.
        clients_per_call: Most clients' models that a scorer scores in one call, vectorised (ray only): faster for small
            models on GPUs, for that many times the memory. Sums then have other last bits, and which clients share a call
            depends on which updates wait at the time: above 1, results repeat to about 1e-5 only.
        client: Resources of a client actor.
        scorer: Resources of a scorer actor.
        retries: How often a unit of work is run again after its actor died.
        sum_on_driver_mb: Updates of a round, all together, that the driver adds up itself, if they are on its node. More, or
            on other nodes: scorers add groups of them where they lie, and the driver gets one vector. The bits are the same.
        min_clients: A round with fewer usable updates, and clients that failed, ends the run.
        on_nonfinite: `exclude` a client whose update or score is not finite, or `abort` the run.
        resource_timeout_s: Longest wait for resources that exist but are taken.
        unit_timeout_s: Longest time that a unit on a scorer may take (scoring a model, testing a shard, a fusion); then
            another actor does it.
        prometheus: Report the run's progress to Prometheus through Ray's metrics agents (`execution/ray_metrics.py`).
    """

    backend: Literal["ray", "serial"] = "ray"
    address: str | None = None
    num_cpus: Count | None = None
    num_gpus: NonNegativeInt | None = None
    object_store_memory_mb: Count | None = None
    state_cache_mb: NonNegative = 2048.0
    client_actors: Literal["auto", "per_client"] | Count = "auto"
    scorer_actors: Literal["auto"] | Count = "auto"
    threads: Count = 1
    clients_per_call: Count = 1
    client: ActorSettings = field(default_factory=ActorSettings)
    scorer: ActorSettings = field(default_factory=ActorSettings)
    retries: NonNegativeInt = 2
    sum_on_driver_mb: NonNegative = 1024.0
    min_clients: Count = 1
    on_nonfinite: Literal["exclude", "abort"] = "exclude"
    resource_timeout_s: Positive = 30.0
    unit_timeout_s: Positive = 3600.0
    prometheus: bool = False

    def __post_init__(self) -> None:
        if self.prometheus and self.backend == "serial":
            raise ValueError("prometheus: true needs backend: ray, whose agents serve the metrics")
