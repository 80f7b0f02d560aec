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
from typing import Literal

import numpy as np
import torch

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import BelowOne, NonNegative, Positive
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class OptServer(ServerState):
    """The model, first moment m [P], second moment v [P], steps taken."""

    first: Vector
    second: Vector
    steps: int


@dataclass(frozen=True)
class FedOpt(Algorithm[OptServer, None, ClientUpdate]):
    """What the three optimizers share; they differ in the second moment.

    Attributes:
        server_lr: Learning rate of the server (0.1; grid-tuned in the paper).
        beta1: Decay of the first moment.
        tau: Degree of adaptivity, added to the root of the second moment.
        v0: Start of the second moment.
        bias_correction: Divide the moments by one minus their decay to the power of the steps, as Adam does.
    """

    server_lr: Positive = 0.1
    beta1: BelowOne = 0.9
    tau: Positive = 1e-3
    v0: NonNegative = 0.0
    bias_correction: bool = False

    @abstractmethod
    def second_moment(self, v: Vector, squared: Vector, steps: int) -> tuple[Vector, float]:
        """The new second moment from the old one and D^2, and what bias correction divides it by."""

    def init_server(self, params: Vector, population: Population) -> OptServer:
        """M = 0, v = v0."""
        return OptServer(params, torch.zeros_like(params), torch.full_like(params, self.v0), 0)

    def client_update(
        self, server: OptServer, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[ClientUpdate, None]:
        """`delta = theta_k - theta` after local SGD."""
        local = local_sgd(objective, server.params, training, rng)
        return ClientUpdate(local.params - server.params, objective.num_examples, local.num_steps, local.loss), None

    def server_update(self, server: OptServer, cohort: Cohort[ClientUpdate]) -> OptServer:
        """One adaptive step along the mean delta."""
        delta, steps = cohort.mean_delta(), server.steps + 1
        first = self.beta1 * server.first + (1 - self.beta1) * delta
        second, correction = self.second_moment(server.second, delta**2, steps)
        m, v = (first / (1 - self.beta1**steps), second / correction) if self.bias_correction else (first, second)
        return OptServer(server.params + self.server_lr * m / (v.sqrt() + self.tau), first, second, steps)


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """The second moment is the sum of squares; no first moment by default (paper: beta1 = 0)."""

    name: Literal["fedadagrad"] = "fedadagrad"
    beta1: BelowOne = 0.0

    def second_moment(self, v: Vector, squared: Vector, steps: int) -> tuple[Vector, float]:
        """V + D^2; a sum has no bias."""
        return v + squared, 1.0


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """The second moment is a moving average of squares with decay `beta2` (paper: 0.99)."""

    name: Literal["fedadam"] = "fedadam"
    beta2: BelowOne = 0.99

    def second_moment(self, v: Vector, squared: Vector, steps: int) -> tuple[Vector, float]:
        """beta2 v + (1 - beta2) D^2."""
        return self.beta2 * v + (1 - self.beta2) * squared, 1 - self.beta2**steps


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """The second moment moves toward the square by 1 - `beta2` of it (paper: 0.99), however far the two are apart."""

    name: Literal["fedyogi"] = "fedyogi"
    beta2: BelowOne = 0.99

    def second_moment(self, v: Vector, squared: Vector, steps: int) -> tuple[Vector, float]:
        """V - (1 - beta2) D^2 sign(v - D^2)."""
        return v - (1 - self.beta2) * squared * torch.sign(v - squared), 1 - self.beta2**steps
