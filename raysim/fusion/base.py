"""What a fusion is: the server trains on its own data with the clients' models at hand.

It comes after the server's step and has the last word on the global model. One scorer does it, as one call.

Shapes: C clients of the cohort that returned a usable update, P trainable scalars.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.algorithms.base import AnyAlgorithm
from raysim.fields import Section
from raysim.local import LocalTraining
from raysim.objective import Objective
from raysim.vector import Vector
from raysim.weighting.base import Weighting


@dataclass(frozen=True)
class Candidates:
    """What the server has at the end of a round. The updates are read where they lie in memory that processes share.

    Attributes:
        start: [P] of the model that the round began with.
        merged: [P] of the model after the algorithm's server step.
        deltas: [C] vectors [P], the clients' updates.
        weights: float64 [C], the weighting's verdict.
    """

    start: Vector
    merged: Vector
    deltas: Sequence[Vector]
    weights: np.ndarray


@dataclass(frozen=True)
class Fused:
    """What becomes of them.

    Attributes:
        params: [P] of the new global model.
        weights: float64 [C], how much each client came to count; None: as the weighting said.
        note: What a user may want to know, for the run's log.
    """

    params: Vector
    weights: np.ndarray | None = None
    note: str = ""


class Fusion(Section, ABC):
    """Base of all fusions: a frozen dataclass whose fields are its hyper-parameters.

    Attributes:
        training: Epochs over the validation set, batches and optimizer.
        needs_updates: Whether it looks at single clients' updates; otherwise `Candidates.deltas` is empty.
    """

    name: str
    training: LocalTraining
    needs_updates: ClassVar[bool] = True

    def check(self, algorithm: AnyAlgorithm, weighting: Weighting) -> None:
        """Refuse an algorithm or a weighting that it cannot follow.

        Raises:
            ValueError: Why; listed with the other mistakes of a configuration.
        """

    @abstractmethod
    def fuse(
        self, objective: Objective, candidates: Candidates, training: LocalTraining, rng: np.random.Generator
    ) -> Fused:
        """The new global model.

        Args:
            objective: The model in training mode, bound to the validation set; its buffers are those of the merged model,
                and where they end is where the global model's are.
            candidates: The round's models.
            training: `self.training` with the round's learning rate.
            rng: Order of the examples.
        """
