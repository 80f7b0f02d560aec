"""What a weighting is: how much each client counts when the server averages.

Shapes: C clients of the cohort that returned a usable update, U units, P trainable scalars.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.fields import Count, Section
from raysim.objective import Batch, BatchNormMode, Objective
from raysim.vector import Granularity, Vector, VectorLayout

Sums = Mapping[str, np.ndarray]
"""What a scorer gathers over validation examples: arrays that add over shards."""


@dataclass(frozen=True)
class ScoringSettings(Section):
    """How client models are scored on the validation set. All of it is part of the numerics.

    Attributes:
        batch_norm: `batch`: BatchNorm uses the statistics of the scoring batch (as published); `running`: the client's
            running statistics. The two can rank clients in opposite order.
        batch_size: Validation images per pass. Batches are fixed for the run and class-stratified.
        shards: Fixed parts of whole batches; their gradient sums are added in shard order.
    """

    batch_norm: BatchNormMode = "batch"
    batch_size: Count = 256
    shards: Count = 1


@dataclass(frozen=True)
class Probe:
    """What a scorer found out about one client's model on the validation set.

    Attributes:
        unit_norms: float64 [U], norm of the validation gradient of each unit.
        loss: Mean validation loss.
        correct: Validation examples predicted right.
        count: Validation examples.
    """

    unit_norms: np.ndarray
    loss: float
    correct: int
    count: int

    @property
    def score(self) -> float:
        """Mean over units of the gradient norm; larger = farther from a stationary point."""
        return float(np.mean(self.unit_norms))

    @property
    def accuracy(self) -> float:
        """Share of validation examples predicted right."""
        return self.correct / self.count


@dataclass(frozen=True)
class Report:
    """What the driver knows of one client's update when it decides on weights; no vector of the model's size."""

    client_id: int
    num_examples: int
    num_steps: int
    loss: float
    probe: Probe | None


@dataclass(frozen=True)
class Weights:
    """Aggregation weights of the cohort, in the order of the reports.

    Attributes:
        client: float64 [C], >= 0, sums to 1.
        unit: float64 [C, U] whose columns sum to 1, or None when all units share `client`.
        granularity: The units of `unit`.
        notes: What a user should know: a fallback taken, a client that dominates.
    """

    client: np.ndarray
    unit: np.ndarray | None = None
    granularity: Granularity | Literal["model"] = "model"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for array in (self.client, *(() if self.unit is None else (self.unit,))):
            assert np.all(array >= 0), "weights are not negative"
            assert np.allclose(array.sum(axis=0), 1.0, rtol=0, atol=1e-6), "weights sum to 1 over clients"


class Weighting(Section, ABC):
    """Base of all weightings: a frozen dataclass whose fields are its hyper-parameters.

    `accumulate` and `finish` run on a scorer, `reference` once per round at the global model, `weights` on the driver.
    A weighting without `needs_probe` implements `weights` only and costs no scoring.
    """

    name: str
    needs_probe: ClassVar[bool] = False

    def reference(self, objective: Objective, shards: Iterable[Iterable[Batch]]) -> Sums | None:
        """What is needed of the *global* model on the validation set, once per round; None: nothing."""
        return None

    def accumulate(self, objective: Objective, shard: Iterable[Batch]) -> Sums:
        """Gather sums over the batches of one shard at the client's model, which is loaded. Leaves the model unchanged."""
        raise TypeError(f"weighting {self.name} needs no probe")

    def finish(self, sums: Sums, params: Vector, global_params: Vector, layout: VectorLayout) -> Probe:
        """Turn sums over the whole validation set into a probe."""
        raise TypeError(f"weighting {self.name} needs no probe")

    @abstractmethod
    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """Weights of the cohort. `reports` is not empty, in client-id order, and all numbers in it are finite."""


def normalised(values: np.ndarray) -> np.ndarray:
    """Non-negative values over clients [C] or [C, U], divided by their sum over clients."""
    result: np.ndarray = values / values.sum(axis=0)
    return result
