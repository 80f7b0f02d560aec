"""Elastic aggregation: parameters that the output hardly depends on move further, sensitive ones less.

    client:  Omega_j <- mu Omega_j + (1 - mu) |d mean(F(x)^2) / d theta_j|   over unlabelled batches, at the received theta,
             from 0 then local SGD
    server:  Omega = sum_k w_k Omega_k
             zeta_j = 1 + tau - Omega_j / max_{j' in the same tensor} Omega_{j'}
             theta_j <- theta_j + zeta_j sum_k w_k delta_{k,j}

zeta lies in [tau, 1 + tau]; where a tensor has no sensitivity at all, zeta = 1. The examples used for Omega stay in training.

Reference: Chen et al., Elastic Aggregation for Federated Optimization, CVPR 2023; tau = 0.5 and mu = 0.95 as the authors'
OpenFed and FL-bench use them.
Differs from the FedVG authors' code: per scalar instead of per tensor, unlabelled output energy instead of the labelled loss,
the maximum within a tensor instead of over clients, sensitivities fresh for every client, no example removed from training.
With FedVG: its weights act on the deltas and on the sensitivities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import Count, Fraction, NonNegative
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector, VectorLayout


@dataclass(frozen=True)
class ElasticUpdate(ClientUpdate):
    """An update with the sensitivity Omega_k [P]."""

    sensitivity: Vector


def elasticity(sensitivity: Vector, tau: float, layout: VectorLayout) -> Vector:
    """Zeta [P] from the aggregated sensitivity [P]."""
    zeta = torch.ones_like(sensitivity)
    for part in layout.slices:
        largest = sensitivity[part].max()
        if largest > 0:
            zeta[part] = 1 + tau - sensitivity[part] / largest
    return zeta


@dataclass(frozen=True)
class Elastic(Algorithm[ServerState, None, ElasticUpdate]):
    """FedAvg with a step size of its own for every scalar.

    Attributes:
        tau: Least step, relative to FedAvg's; the largest is 1 + tau.
        mu: Decay of the moving average over batches.
        batches: Batches that the sensitivity is taken over; fewer where a client has fewer.
    """

    name: Literal["elastic"] = "elastic"
    tau: NonNegative = 0.5
    mu: Fraction = 0.95
    batches: Count = 10

    def init_server(self, params: Vector, population: Population) -> ServerState:
        """The global model, nothing else."""
        return ServerState(params)

    def client_update(
        self, server: ServerState, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[ElasticUpdate, None]:
        """Sensitivity at theta, then local SGD."""
        objective.params.copy_(server.params)
        sensitivity = torch.zeros_like(server.params)
        for _, batch in zip(range(self.batches), objective.batches(training.batch_size, rng), strict=False):
            sensitivity = self.mu * sensitivity + (1 - self.mu) * objective.output_energy_gradient(batch).abs()
        local = local_sgd(objective, server.params, training, rng)
        delta = local.params - server.params
        return ElasticUpdate(delta, objective.num_examples, local.num_steps, local.loss, sensitivity), None

    def server_update(self, server: ServerState, cohort: Cohort[ElasticUpdate]) -> ServerState:
        """`theta + zeta * sum_k w_k delta_k`."""
        sums = cohort.sums(delta=cohort.delta_weights, sensitivity=cohort.delta_weights)
        zeta = elasticity(sums["sensitivity"], self.tau, cohort.population.layout)
        return ServerState(server.params + zeta * sums["delta"])
