"""FedProx: FedAvg whose clients are pulled toward the model they started from, and may do less than all of their work.

    client:  w <- w - lr (grad f_k(w) + mu (w - theta))
    server:  theta <- theta + sum_k w_k (theta_k - theta)

The proximal gradient is part of the gradient: the optimizer, and with it momentum, sees the sum. A straggler trains for fewer
epochs, from 1 to local_epochs - 1 with equal chances, and what it reached counts like every other model.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.
Differs from the paper: uniform sampling without replacement and weights by size, as in the authors' code; stragglers are
drawn client by client, not as an exact share of the cohort.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import BelowOne, NonNegative
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class FedProx(Algorithm[ServerState, None, ClientUpdate]):
    """FedAvg with a proximal term.

    Attributes:
        mu: Weight of the proximal term; 0 is FedAvg. There is no default that works everywhere: the paper tunes it in
            {0.001, 0.01, 0.1, 0.5, 1}.
        stragglers: Chance of a client to be a straggler, drawn anew every round (0; the paper tests 0.5 and 0.9).
    """

    name: Literal["fedprox"] = "fedprox"
    averages = True
    mu: NonNegative = 0.01
    stragglers: BelowOne = 0.0

    def check(self, training: LocalTraining) -> None:
        """A straggler does less than the others."""
        if self.stragglers and training.local_epochs < 2:
            raise ValueError(
                f"algorithm.stragglers: {self.stragglers} needs client.local_epochs of at least 2, as stragglers run fewer "
                f"epochs than the others; got {training.local_epochs}"
            )

    def init_server(self, params: Vector, population: Population) -> ServerState:
        """The global model, nothing else."""
        return ServerState(params)

    def client_update(
        self, server: ServerState, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[ClientUpdate, None]:
        """Local SGD on `f_k(w) + mu/2 |w - theta|^2`."""
        if self.stragglers and rng.random() < self.stragglers:
            training = replace(training, local_epochs=int(rng.integers(1, training.local_epochs)))
        start = server.params
        local = local_sgd(objective, start, training, rng, correct=lambda grad, w: grad + self.mu * (w - start))
        return ClientUpdate(local.params - start, objective.num_examples, local.num_steps, local.loss), None

    def server_update(self, server: ServerState, cohort: Cohort[ClientUpdate]) -> ServerState:
        """`theta + sum_k w_k delta_k`."""
        return ServerState(server.params + cohort.mean_delta())
