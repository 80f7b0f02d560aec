"""A stateful algorithm for tests: FedAvg whose clients count their rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from raysim.algorithms.base import Algorithm, Cohort
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState


@dataclass(frozen=True)
class Count:
    rounds: torch.Tensor


@dataclass(frozen=True)
class Counting(Algorithm[ServerState, Count, ClientUpdate]):
    name: Literal["counting"] = "counting"

    def init_server(self, params: torch.Tensor, population: Population) -> ServerState:
        return ServerState(params)

    def init_client(self, params: torch.Tensor) -> Count:
        return Count(torch.zeros(1))

    def client_update(
        self,
        server: ServerState,
        client: Count | None,
        objective: Objective,
        training: LocalTraining,
        rng: np.random.Generator,
    ) -> tuple[ClientUpdate, Count]:
        assert client is not None
        local = local_sgd(objective, server.params, training, rng)
        update = ClientUpdate(local.params - server.params, objective.num_examples, local.num_steps, local.loss)
        return update, Count(client.rounds + 1)

    def server_update(self, server: ServerState, cohort: Cohort[Any]) -> ServerState:
        return ServerState(server.params + cohort.mean_delta())
