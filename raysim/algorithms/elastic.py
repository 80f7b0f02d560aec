"""Elastic aggregation: parameters that the output hardly depends on move further, sensitive ones less.

    client:  Omega_j <- mu Omega_j + (1 - mu) |d mean(F(x)^2) / d theta_j|   from 0, over unlabelled batches at theta; local SGD
    server:  Omega = sum_k w_k Omega_k
             zeta_j = 1 + tau - Omega_j / max_{j' in the same tensor} Omega_{j'}
             theta_j <- theta_j + zeta_j sum_k w_k delta_{k,j}

`variant: flbench` has one number per tensor t and client, and the maximum over clients:

    client:  T_t <- mu T_t + (1 - mu) |d loss / d theta_t|^2   from 0, over labelled batches at theta; local SGD
    server:  zeta_t = 1 + tau - sum_k w_k T_{k,t} / max_k T_{k,t}

zeta lies in [tau, 1 + tau]; where a tensor has no sensitivity at all, zeta = 1. The examples used for Omega stay in training.

Reference: Chen et al., Elastic Aggregation for Federated Optimization, CVPR 2023; tau and mu as in OpenFed and FL-bench.
Differs from the FedVG authors' code: that has the flbench form, adds sensitivities up over clients and rounds, and does not
train on the examples used for them. With FedVG: its weights act on the deltas and on Omega; on T its client weights do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import Count, Fraction, NonNegative
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Batch, Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector, VectorLayout


@dataclass(frozen=True)
class ElasticUpdate(ClientUpdate):
    """An update with the sensitivity: Omega_k [P], or the numbers T_k."""

    sensitivity: Vector | tuple[float, ...]


def elasticity(sensitivity: Vector, tau: float, layout: VectorLayout) -> Vector:
    """Zeta [P] from the aggregated sensitivity [P]."""
    zeta = torch.ones_like(sensitivity)
    for part in layout.slices:
        largest = sensitivity[part].max()
        if largest > 0:
            zeta[part] = 1 + tau - sensitivity[part] / largest
    return zeta


def tensor_elasticity(sensitivities: np.ndarray, weights: np.ndarray, tau: float) -> np.ndarray:
    """Zeta [T] from the sensitivities [C, T] of all clients and the clients' weights [C]."""
    largest, mean = sensitivities.max(axis=0), (weights[:, None] * sensitivities).sum(axis=0)
    return np.where(largest > 0, 1 + tau - mean / np.where(largest > 0, largest, 1), 1)


def squared_gradients(objective: Objective, batch: Batch) -> Vector:
    """|d loss / d theta_t|^2 of every tensor, float64 [T]; buffers do not move."""
    with objective.scoring("batch"):
        objective.gradient(batch)
    return torch.stack([objective.grad[part].double().square().sum() for part in objective.layout.slices])


@dataclass(frozen=True)
class Elastic(Algorithm[ServerState, None, ElasticUpdate]):
    """FedAvg with a step size of its own for every scalar, or for every tensor.

    Attributes:
        tau: Least step, relative to FedAvg's; the largest is 1 + tau.
        mu: Decay of the moving average over batches.
        batches: Batches that the sensitivity is taken over; fewer where a client has fewer.
        variant: `official`, or `flbench`: the form behind the numbers in the FedVG paper, for comparison.
        when: Sensitivity before or after local training, at theta or at theta_k.
    """

    update_vectors: ClassVar[int] = 2
    name: Literal["elastic"] = "elastic"
    tau: NonNegative = 0.5
    mu: Fraction = 0.95
    batches: Count = 10
    variant: Literal["official", "flbench"] = "official"
    when: Literal["before", "after"] = "before"

    def init_server(self, params: Vector, population: Population) -> ServerState:
        """The global model, nothing else."""
        return ServerState(params)

    def sensitivity(self, objective: Objective, training: LocalTraining, rng: np.random.Generator) -> Vector:
        """Omega [P] or T [T] at the objective's parameters."""
        flbench, grad = self.variant == "flbench", objective.grad
        average = grad.new_zeros(len(objective.layout.slices)).double() if flbench else torch.zeros_like(grad)
        for _, batch in zip(range(self.batches), objective.batches(training.batch_size, rng), strict=False):
            new = squared_gradients(objective, batch) if flbench else objective.output_energy_gradient(batch).abs()
            average = self.mu * average + (1 - self.mu) * new
        return average

    def client_update(
        self, server: ServerState, client: None, objective: Objective, training: LocalTraining, rng: np.random.Generator
    ) -> tuple[ElasticUpdate, None]:
        """Local SGD, and the sensitivity before or after it."""
        objective.params.copy_(server.params)
        if self.when == "before":
            found = self.sensitivity(objective, training, rng)
        local = local_sgd(objective, server.params, training, rng)
        if self.when == "after":
            found = self.sensitivity(objective, training, rng)
        sensitivity = tuple(found.tolist()) if self.variant == "flbench" else found
        delta, steps = local.params - server.params, local.num_steps
        return ElasticUpdate(delta, objective.num_examples, steps, local.loss, sensitivity), None

    def server_update(self, server: ServerState, cohort: Cohort[ElasticUpdate]) -> ServerState:
        """`theta + zeta * sum_k w_k delta_k`."""
        layout = cohort.population.layout
        if self.variant == "flbench":
            zeta_T = tensor_elasticity(cohort.values("sensitivity"), cohort.weights.client, self.tau)
            zeta = torch.from_numpy(np.repeat(zeta_T, [part.stop - part.start for part in layout.slices]))
            return ServerState(server.params + zeta.to(cohort.dtype) * cohort.mean_delta())
        sums = cohort.sums(delta=cohort.delta_weights, sensitivity=cohort.weights.parameters)
        return ServerState(server.params + elasticity(sums["sensitivity"], self.tau, layout) * sums["delta"])
