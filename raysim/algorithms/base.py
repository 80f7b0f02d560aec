"""What an algorithm is: how clients train and how the server steps. Everything about it is a pure function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from raysim.cohort import Coefficients, Cohort, Summation
from raysim.fields import Section
from raysim.local import LocalTraining
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector

__all__ = ["Algorithm", "AnyAlgorithm", "Coefficients", "Cohort", "Summation"]

S = TypeVar("S", bound=ServerState)
K = TypeVar("K")
Up = TypeVar("Up", bound=ClientUpdate)


class Algorithm(Section, ABC, Generic[S, K, Up]):
    """Base of all algorithms: a frozen dataclass whose fields are its hyper-parameters.

    State goes in and comes out; nothing is kept on the instance, and inputs are never changed.

    Attributes:
        default_weighting: The weighting of the method's paper, used when a configuration names none.
        averages: Whether the server's step on the model is the weighted mean of the clients' models and nothing else.
        update_vectors: Vectors of the model's size in an update, for the plan of memory.
    """

    name: str
    default_weighting: ClassVar[str] = "size"
    averages: ClassVar[bool] = False
    update_vectors: ClassVar[int] = 1

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

    def evaluated(self, server: S) -> Vector:
        """The parameters that are tested: the deployed ones, unless a method's paper tests others."""
        return server.params


AnyAlgorithm = Algorithm[Any, Any, Any]
