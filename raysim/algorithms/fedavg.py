"""FedAvg: clients run local SGD, the server takes the weighted mean of their models.

    client:  theta_k = E epochs of SGD from theta
    server:  theta  <- theta + sum_k w_k (theta_k - theta)

With weights by size this is the method of the paper; FedVG's weights make it FedVG.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.algorithms.base import Algorithm, Cohort
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class FedAvg(Algorithm[ServerState, None, ClientUpdate]):
    """Local SGD, then the weighted mean of the clients' models."""

    name: Literal["fedavg"] = "fedavg"
    averages = True

    def init_server(self, params: Vector, population: Population) -> ServerState:
        """The global model, nothing else."""
        return ServerState(params)

    def client_update(
        self, server: ServerState, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[ClientUpdate, None]:
        """`delta = theta_k - theta` after local SGD."""
        local = local_sgd(objective, server.params, training, rng)
        return ClientUpdate(local.params - server.params, objective.num_examples, local.num_steps, local.loss), None

    def server_update(self, server: ServerState, cohort: Cohort[ClientUpdate]) -> ServerState:
        """`theta + sum_k w_k delta_k`."""
        return ServerState(server.params + cohort.mean_delta())
