"""What the server sees at the end of a round: the clients that came back, and sums of what they sent.

Shapes: C clients of the cohort that returned a usable update, U units, P trainable scalars, T numbers of a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from raysim.state import ClientUpdate, Population
from raysim.vector import Unit, Vector
from raysim.weighting.base import Weights

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

    def rows(self, members: Sequence[int]) -> Coefficients:
        """The factors of some of the clients."""
        return Coefficients(self.values[list(members)], self.units)


Summation = Callable[[Mapping[str, Coefficients]], dict[str, np.ndarray]]
"""Given coefficients per update field, the float64 sums over the cohort: what an executor provides."""


@dataclass(frozen=True)
class Cohort(Generic[Up]):
    """What the server sees at the end of a round. The updates themselves stay where they are; it asks for sums of them.

    Attributes:
        client_ids: Ascending; the order of everything below.
        weights: The weighting's verdict.
        population: N, every n_k and the layout.
        scalars: The plain numbers of each update (`num_steps`, `num_examples`, ...) and its tuples of them, one mapping per
            client.
        summation: The executor's sum over updates.
        dtype: Type of the model's vectors.
    """

    client_ids: tuple[int, ...]
    weights: Weights
    population: Population
    scalars: Sequence[Mapping[str, Any]]
    summation: Summation
    dtype: torch.dtype = torch.float32

    @property
    def num_clients(self) -> int:
        """N, all clients of the run (not of the cohort)."""
        return self.population.num_clients

    @property
    def delta_weights(self) -> np.ndarray:
        """The factors of the deltas in a weighted mean: [C, U] if the weighting gives weights per unit, else [C]."""
        return self.weights.deltas

    def values(self, name: str) -> np.ndarray:
        """A number of each update as float64 [C], or its tuple of T numbers as [C, T]."""
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
