"""FedOpt: adaptive server optimizers on the mean delta, coordinate by coordinate.

    D <- sum_k w_k (theta_k - theta)
    m <- beta1 m + (1 - beta1) D
    v <- v + D^2                                  FedAdagrad
    v <- beta2 v + (1 - beta2) D^2                FedAdam
    v <- v - (1 - beta2) D^2 sign(v - D^2)        FedYogi
    theta <- theta + server_lr m / (sqrt(v) + tau)

Trainable parameters only. No bias correction unless asked for.

Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
Differs from the paper's Algorithm 2: v starts at 0 (as in its experiments and TensorFlow Federated) instead of at least
tau^2, and the weights are by size instead of uniform; both are settings.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import NonNegative, Positive
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector

Decay = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class AdaptiveServer(ServerState):
    """The model, first moment m [P], second moment v [P], steps taken."""

    first: Vector
    second: Vector
    steps: int


@dataclass(frozen=True)
class FedOpt(Algorithm[AdaptiveServer, None, ClientUpdate]):
    """What the three optimizers share; they differ in the second moment.

    Attributes:
        server_lr: Learning rate of the server (0.1; grid-tuned in the paper).
        beta1: Decay of the first moment.
        tau: Degree of adaptivity, added to the root of the second moment.
        v0: Start of the second moment.
        bias_correction: Divide the moments by one minus their decay to the power of the steps, as Adam does.
    """

    server_lr: Positive = 0.1
    beta1: Decay = 0.9
    tau: Positive = 1e-3
    v0: NonNegative = 0.0
    bias_correction: bool = False

    @abstractmethod
    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        """The new second moment from the old one and D^2."""

    def second_correction(self, steps: int) -> float:
        """What the second moment is divided by under `bias_correction`."""
        return 1.0

    def init_server(self, params: Vector, population: Population) -> AdaptiveServer:
        """M = 0, v = v0."""
        zeros = params.new_zeros(params.shape)
        return AdaptiveServer(params, zeros, torch.full_like(params, self.v0), 0)

    def client_update(
        self,
        server: AdaptiveServer,
        client: None,
        objective: Objective,
        training: LocalTraining,
        rng: np.random.Generator,
    ) -> tuple[ClientUpdate, None]:
        """`delta = theta_k - theta` after local SGD."""
        local = local_sgd(objective, server.params, training, rng)
        return ClientUpdate(local.params - server.params, objective.num_examples, local.num_steps, local.loss), None

    def server_update(self, server: AdaptiveServer, cohort: Cohort[ClientUpdate]) -> AdaptiveServer:
        """One adaptive step along the mean delta."""
        delta, steps = cohort.mean_delta(), server.steps + 1
        first = self.beta1 * server.first + (1 - self.beta1) * delta
        second = self.second_moment(server.second, delta**2)
        m, v = first, second
        if self.bias_correction:
            m, v = first / (1 - self.beta1**steps), second / self.second_correction(steps)
        return AdaptiveServer(server.params + self.server_lr * m / (v.sqrt() + self.tau), first, second, steps)


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """The second moment is the sum of squares; no first moment by default (paper: beta1 = 0)."""

    name: Literal["fedadagrad"] = "fedadagrad"
    beta1: Decay = 0.0

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        """V + D^2."""
        return v + squared


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """The second moment is a moving average of squares.

    Attributes:
        beta2: Its decay (paper: 0.99).
    """

    name: Literal["fedadam"] = "fedadam"
    beta2: Decay = 0.99

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        """beta2 v + (1 - beta2) D^2."""
        return self.beta2 * v + (1 - self.beta2) * squared

    def second_correction(self, steps: int) -> float:
        """1 - beta2^steps."""
        return float(1 - self.beta2**steps)


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """The second moment moves toward the square by a step that does not depend on their distance.

    Attributes:
        beta2: One minus the relative size of that step (paper: 0.99).
    """

    name: Literal["fedyogi"] = "fedyogi"
    beta2: Decay = 0.99

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        """V - (1 - beta2) D^2 sign(v - D^2)."""
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)

    def second_correction(self, steps: int) -> float:
        """1 - beta2^steps."""
        return float(1 - self.beta2**steps)
