"""FedDyn: a linear and a quadratic term in each client's objective align the clients' stationary points with the server's.

    client:  w <- w - lr (grad f_k(w) + alpha_k (w - theta + d_k)),   d_k <- d_k + (theta_k - theta)
    server:  h <- h - (alpha/N) sum_{k in cohort} (theta_k - theta)
             theta <- sum_k w_k theta_k - h / alpha

d_k is the accumulated delta; the paper's dual is lambda_k = -alpha_k d_k, and h = -alpha mean_N d_k. `clip` bounds the norm
of the gradient of loss and linear term, grad f_k(w) + alpha_k (d_k - theta), before alpha_k w is added.

Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1; the scaling
alpha_k = alpha * mean(n) / n_k and alpha = 0.01 are those of the authors' code, as are `clip` (10) and `active_average`.
Differs from the FedVG authors' code: the quadratic term is there (without it the gradient at w = theta is -alpha theta),
buffers are left out, the server's average is not discarded.
With FedVG: its weights act on the mean of theta_k; h keeps the mean over all N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.algorithms.base import Algorithm, Cohort
from raysim.fields import Positive
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective
from raysim.state import ClientUpdate, Population, ServerState
from raysim.vector import Vector


@dataclass(frozen=True)
class FedDynServer(ServerState):
    """The model theta, h [P], and the mean number of examples per client."""

    h: Vector
    mean_examples: float


@dataclass(frozen=True)
class FedDynClient:
    """A client's accumulated delta d_k [P]."""

    accumulated: Vector


@dataclass(frozen=True)
class FedDyn(Algorithm[FedDynServer, FedDynClient, ClientUpdate]):
    """Dynamic regularisation.

    Attributes:
        alpha: Strength of the regulariser (0.01; the paper tunes it in {0.1, 0.01, 0.001}).
        alpha_scaling: `size`: alpha_k = alpha * mean(n) / n_k, weaker for large clients (authors' code); `none`: alpha_k =
            alpha (paper).
        clip: Largest norm of the gradient of loss and linear term; null: no limit.
        eval_model: What is tested: `cloud`, the deployed theta; `active_average`, the weighted mean of the cohort's models.
    """

    name: Literal["feddyn"] = "feddyn"
    alpha: Positive = 0.01
    alpha_scaling: Literal["size", "none"] = "size"
    clip: Positive | None = None
    eval_model: Literal["cloud", "active_average"] = "cloud"

    default_weighting: ClassVar[str] = "uniform"

    def init_server(self, params: Vector, population: Population) -> FedDynServer:
        """H = 0."""
        return FedDynServer(params, params.new_zeros(params.shape), float(np.mean(population.num_examples)))

    def init_client(self, params: Vector) -> FedDynClient:
        """d_k = 0."""
        return FedDynClient(params.new_zeros(params.shape))

    def client_update(
        self,
        server: FedDynServer,
        client: FedDynClient | None,
        objective: Objective,
        training: LocalTraining,
        rng: np.random.Generator,
    ) -> tuple[ClientUpdate, FedDynClient]:
        """Local SGD on the regularised objective, and the new accumulated delta."""
        assert client is not None
        theta, d_k = server.params, client.accumulated
        scale = server.mean_examples / objective.num_examples if self.alpha_scaling == "size" else 1.0
        alpha_k = self.alpha * scale

        def regularised(grad: Vector, w: Vector) -> Vector:
            if self.clip is None:
                return grad + alpha_k * (w - theta + d_k)
            linear = grad + alpha_k * (d_k - theta)
            excess: Vector = linear.norm() / self.clip
            return linear / excess.clamp(min=1) + alpha_k * w

        local = local_sgd(objective, theta, training, rng, correct=regularised)
        delta = local.params - theta
        update = ClientUpdate(delta, objective.num_examples, local.num_steps, local.loss)
        return update, FedDynClient(d_k + delta)

    def server_update(self, server: FedDynServer, cohort: Cohort[ClientUpdate]) -> FedDynServer:
        """H by 1/N, then the weighted mean of the models minus h / alpha."""
        share = np.full(len(cohort.client_ids), self.alpha / cohort.num_clients)
        h = server.h - cohort.sums(delta=share)["delta"]
        return FedDynServer(server.params + cohort.mean_delta() - h / self.alpha, h, server.mean_examples)

    def evaluated(self, server: FedDynServer) -> Vector:
        """Theta, or the mean of models that it was made of: theta + h / alpha."""
        return server.params + server.h / self.alpha if self.eval_model == "active_average" else server.params
