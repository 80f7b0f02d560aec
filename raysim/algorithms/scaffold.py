"""SCAFFOLD: control variates correct the drift of clients with different data.

    client:  y <- y - lr (grad f_k(y) + c - c_k), K steps from y = x
             option II:  c_k+ = c_k - c + (x - y) / sum_j lr_j
             option I:   c_k+ = grad f_k(x)
    server:  x <- x + server_lr sum_k w_k (y_k - x)
             c <- c + (1/N) sum_{k in cohort} (c_k+ - c_k)

c and every c_k start at 0, so round one is FedAvg. `sum_j lr_j` is K lr with the optimizer steps K that the client really
took. The control variates live on trainable parameters only. The division by `sum_j lr_j` holds for plain SGD: with option II
momentum, weight decay and adaptive optimizers are refused.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1.
Differs from the FedVG authors' code: c_k is kept between rounds (there it stays 0, which is another method: `stateless`), local
epochs are epochs. With FedVG: its weights act on the x step only; c keeps the mean over all N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import Positive
from raysim.local import LocalTraining, full_gradient, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class ScaffoldServer(ServerState):
    """The model x and the control variate c [P]."""

    control: Vector


@dataclass(frozen=True)
class ScaffoldClient:
    """A client's control variate c_k [P]."""

    control: Vector


@dataclass(frozen=True)
class ScaffoldUpdate(ClientUpdate):
    """An update with `c_k+ - c_k` [P]."""

    control_delta: Vector


@dataclass(frozen=True)
class Scaffold(Algorithm[ScaffoldServer, ScaffoldClient, ScaffoldUpdate]):
    """Stochastic controlled averaging.

    Attributes:
        server_lr: Learning rate of the server's step (1 in the paper's experiments).
        option: How a client renews its control variate: II (from its own steps, the paper's choice) or I (its full gradient
            at x, one more pass over its data).
        stateless: c_k = 0 always, as in the FedVG authors' code; for comparison with their numbers only.
    """

    name: Literal["scaffold"] = "scaffold"
    server_lr: Positive = 1.0
    option: Literal["I", "II"] = "II"
    stateless: bool = False

    default_weighting: ClassVar[str] = "uniform"
    update_vectors: ClassVar[int] = 2

    def check(self, training: LocalTraining) -> None:
        """Only plain SGD makes `(x - y) / sum lr` the mean gradient."""
        optimizer = training.optimizer
        if self.option == "II" and (optimizer.name != "sgd" or optimizer.momentum or optimizer.weight_decay):
            raise ValueError(
                "algorithm: scaffold needs client.optimizer sgd without momentum and weight_decay, or option I: "
                "the control variates of option II are mean gradients of plain SGD steps"
            )

    def init_server(self, params: Vector, population: Population) -> ScaffoldServer:
        """C = 0."""
        return ScaffoldServer(params, params.new_zeros(params.shape))

    def init_client(self, params: Vector) -> ScaffoldClient:
        """c_k = 0."""
        return ScaffoldClient(params.new_zeros(params.shape))

    def client_update(
        self,
        server: ScaffoldServer,
        client: ScaffoldClient | None,
        objective: Objective,
        training: LocalTraining,
        rng: np.random.Generator,
    ) -> tuple[ScaffoldUpdate, ScaffoldClient]:
        """Local SGD along `g + c - c_k`, and the new control variate."""
        assert client is not None
        x, c, c_k = server.params, server.control, client.control
        renewed = full_gradient(objective, x, training) if self.option == "I" else c_k
        local = local_sgd(objective, x, training, rng, correct=lambda grad, w: grad + c - c_k)
        if self.option == "II" and local.num_steps:
            renewed = c_k - c + (x - local.params) / local.lr_sum
        delta, steps = local.params - x, local.num_steps
        return (
            ScaffoldUpdate(delta, objective.num_examples, steps, local.loss, renewed - c_k),
            client if self.stateless else ScaffoldClient(renewed),
        )

    def server_update(self, server: ScaffoldServer, cohort: Cohort[ScaffoldUpdate]) -> ScaffoldServer:
        """The x step by the weights, the c step by 1/N."""
        share = np.full(len(cohort.client_ids), 1.0 / cohort.num_clients)
        sums = cohort.sums(delta=cohort.delta_weights, control_delta=share)
        return ScaffoldServer(server.params + self.server_lr * sums["delta"], server.control + sums["control_delta"])
