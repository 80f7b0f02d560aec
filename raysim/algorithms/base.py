"""What an algorithm is: how clients train and how the server steps. Everything about it is a pure function.

Shapes: C clients of the cohort that returned a usable update, U units, P trainable scalars.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from raysim.fields import Section
from raysim.local import LocalTraining
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Unit, Vector
from raysim.weighting.base import Weights

S = TypeVar("S", bound=ServerState)
K = TypeVar("K")
Up = TypeVar("Up", bound=ClientUpdate)


@dataclass(frozen=True)
class Coefficients:
    """Factors of a linear combination over the cohort.

    Attributes:
        values: float64 [C], or [C, U] with `units`.
        units: The units of the second axis.
    """

    values: np.ndarray
    units: tuple[Unit, ...] = ()


Summation = Callable[[Mapping[str, Coefficients]], dict[str, np.ndarray]]
"""Given coefficients per update field, the float64 sums over the cohort: what an executor provides."""


@dataclass(frozen=True)
class Cohort(Generic[Up]):
    """What the server sees at the end of a round. The updates themselves stay where they are; it asks for sums of them.

    Attributes:
        client_ids: Ascending; the order of everything below.
        weights: The weighting's verdict.
        population: N, every n_k and the layout.
        scalars: The plain numbers of each update (`num_steps`, `num_examples`, ...), one mapping per client.
        summation: The executor's sum over updates.
        dtype: Type of the model's vectors.
    """

    client_ids: tuple[int, ...]
    weights: Weights
    population: Population
    scalars: Sequence[Mapping[str, float]]
    summation: Summation
    dtype: torch.dtype = torch.float32

    @property
    def num_clients(self) -> int:
        """N, all clients of the run (not of the cohort)."""
        return self.population.num_clients

    @property
    def delta_weights(self) -> np.ndarray:
        """The weights that apply to parameters: [C, U] if the weighting gives them per unit, else [C]."""
        return self.weights.client if self.weights.unit is None else self.weights.unit

    def values(self, name: str) -> np.ndarray:
        """A scalar field of the updates as float64 [C]."""
        return np.array([scalars[name] for scalars in self.scalars], dtype=np.float64)

    def sums(self, **coefficients: np.ndarray) -> dict[str, Vector]:
        """Linear combinations of update fields over the cohort, all in one pass over the updates.

        Args:
            **coefficients: Field of the update -> factors [C], or [C, U] over the units of the weights.

        Returns:
            Field -> [P], accumulated in float64 in fixed groups of 16 and cast once to the model's type.
        """
        units = () if self.weights.granularity == "model" else self.population.layout.units(self.weights.granularity)
        given = {
            name: Coefficients(np.asarray(values, dtype=np.float64), units if np.ndim(values) == 2 else ())
            for name, values in coefficients.items()
        }
        return {name: torch.from_numpy(total).to(self.dtype) for name, total in self.summation(given).items()}

    def mean_delta(self) -> Vector:
        """Weighted mean of the deltas: `sum_k w_k delta_k`, unit by unit if the weights are."""
        return self.sums(delta=self.delta_weights)["delta"]


class Algorithm(Section, ABC, Generic[S, K, Up]):
    """Base of all algorithms: a frozen dataclass whose fields are its hyper-parameters.

    State goes in and comes out; nothing is kept on the instance, and inputs are never changed.

    Attributes:
        default_weighting: The weighting of the method's paper, used when a configuration names none.
    """

    name: str
    default_weighting: ClassVar[str] = "size"

    def check(self, training: LocalTraining) -> None:
        """Refuse local training that the method is not defined for.

        Raises:
            ValueError: What it needs; listed with the other mistakes of a configuration.
        """

    @abstractmethod
    def init_server(self, params: Vector, population: Population) -> S:
        """Server state before round 1, at the initial model."""

    def init_client(self, params: Vector) -> K | None:
        """State of a client that takes part for the first time; None for stateless methods."""
        return None

    @abstractmethod
    def client_update(
        self, server: S, client: K | None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[Up, K | None]:
        """Local work of one client: its update and its new state."""

    @abstractmethod
    def server_update(self, server: S, cohort: Cohort[Up]) -> S:
        """The server's step from the cohort's weighted sums."""


AnyAlgorithm = Algorithm[Any, Any, Any]
