"""FedNova: deltas are normalised by the local work behind them before they are averaged.

    tau_eff = sum_k w_k |a_k|_1
    D <- tau_eff sum_k w_k delta_k / |a_k|_1
    v <- server_momentum v + D
    theta <- theta + v

|a_k|_1 is the total weight that a client's optimizer gave to its gradients, in units of the learning rate, with tau steps:
tau for plain SGD; (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) for momentum rho; (1 - (1 - lr mu)^tau) / (lr mu) with a
proximal term mu. With equal work of all clients it is FedAvg. Buffers: plain weighted average.

Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.
Differs from the authors' code: with mu they take tau_eff from the number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import BelowOne, NonNegative
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class NovaUpdate(ClientUpdate):
    """An update with |a_k|_1."""

    local_work: float


@dataclass(frozen=True)
class NovaServer(ServerState):
    """The model and the velocity v [P]."""

    velocity: Vector


def local_work(num_steps: int, *, momentum: float = 0.0, lr_mu: float = 0.0) -> float:
    """|a_k|_1 for `num_steps` steps of SGD with momentum, or with a proximal term of strength `lr * mu`."""
    if momentum:
        return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)
    if lr_mu:
        return -math.expm1(num_steps * math.log1p(-lr_mu)) / lr_mu
    return float(num_steps)


@dataclass(frozen=True)
class FedNova(Algorithm[ServerState, None, NovaUpdate]):
    """Normalised averaging.

    Attributes:
        mu: Proximal term of the clients (0: none).
        server_momentum: Momentum of the server's step (0: none; `gmf` in the authors' code).
    """

    name: Literal["fednova"] = "fednova"
    mu: NonNegative = 0.0
    server_momentum: BelowOne = 0.0

    def check(self, training: LocalTraining) -> None:
        """The closed forms hold for SGD, with momentum or a proximal term, not both."""
        optimizer = training.optimizer
        if optimizer.name != "sgd" or optimizer.weight_decay or (optimizer.momentum and self.mu):
            raise ValueError(
                "algorithm: fednova needs client.optimizer sgd without weight_decay, and either momentum or algorithm.mu: its "
                "normalisation has no closed form otherwise"
            )
        if optimizer.momentum >= 1 or optimizer.lr * self.mu >= 1:
            raise ValueError("algorithm: fednova needs client.optimizer.momentum and lr * mu below 1")

    def init_server(self, params: Vector, population: Population) -> ServerState:
        """The global model, and v = 0 if there is momentum."""
        return NovaServer(params, torch.zeros_like(params)) if self.server_momentum else ServerState(params)

    def client_update(
        self, server: ServerState, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[NovaUpdate, None]:
        """Local SGD and the work it took."""
        start, optimizer = server.params, training.optimizer
        correct = (lambda grad, w: grad + self.mu * (w - start)) if self.mu else None
        local = local_sgd(objective, start, training, rng, correct=correct)
        work = local_work(local.num_steps, momentum=optimizer.momentum, lr_mu=optimizer.lr * self.mu)
        delta = local.params - start
        return NovaUpdate(delta, objective.num_examples, local.num_steps, local.loss, work), None

    def server_update(self, server: ServerState, cohort: Cohort[NovaUpdate]) -> ServerState:
        """The normalised step D, with momentum if there is any."""
        work, weights = cohort.values("local_work"), cohort.weights.client
        effective = float((weights * work).sum())
        per_step = cohort.delta_weights / (work if cohort.weights.unit is None else work[:, None])
        step = cohort.sums(delta=effective * per_step)["delta"]
        if not isinstance(server, NovaServer):
            return ServerState(server.params + step)
        velocity = self.server_momentum * server.velocity + step
        return NovaServer(server.params + velocity, velocity)
