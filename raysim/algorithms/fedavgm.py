"""FedAvgM: the server treats the mean delta as a gradient and steps with momentum.

    d <- -sum_k w_k (theta_k - theta)          pseudo-gradient
    v <- beta v + d
    theta <- theta - server_lr (d + beta v)    Nesterov
    theta <- theta - server_lr v               heavy ball

Momentum sees trainable parameters only; buffers are averaged. `v` is not damped by (1 - beta).

Reference: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019,
section 4.3; Nesterov as the paper's reproductions use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Lt

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import Positive
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class MomentumServer(ServerState):
    """The model and the velocity v [P]."""

    velocity: Vector


@dataclass(frozen=True)
class FedAvgM(Algorithm[MomentumServer, None, ClientUpdate]):
    """FedAvg with server momentum.

    Attributes:
        momentum: beta (0.9; the paper sweeps {0, 0.7, 0.9, 0.97, 0.99, 0.997}); 0 is FedAvg.
        server_lr: Learning rate of the server; about 1 - beta keeps the step of FedAvg.
        nesterov: Nesterov momentum, or heavy ball.
    """

    name: Literal["fedavgm"] = "fedavgm"
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    server_lr: Positive = 1.0
    nesterov: bool = True

    def init_server(self, params: Vector, population: Population) -> MomentumServer:
        """V = 0."""
        return MomentumServer(params, params.new_zeros(params.shape))

    def client_update(
        self,
        server: MomentumServer,
        client: None,
        objective: Objective,
        training: LocalTraining,
        rng: np.random.Generator,
    ) -> tuple[ClientUpdate, None]:
        """`delta = theta_k - theta` after local SGD."""
        local = local_sgd(objective, server.params, training, rng)
        return ClientUpdate(local.params - server.params, objective.num_examples, local.num_steps, local.loss), None

    def server_update(self, server: MomentumServer, cohort: Cohort[ClientUpdate]) -> MomentumServer:
        """One step of SGD with momentum on the pseudo-gradient."""
        gradient = -cohort.mean_delta()
        velocity = self.momentum * server.velocity + gradient
        step = gradient + self.momentum * velocity if self.nesterov else velocity
        return MomentumServer(server.params - self.server_lr * step, velocity)
