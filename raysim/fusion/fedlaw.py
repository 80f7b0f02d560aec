"""FedLAW: learn the clients' weights and a global shrinkage on the server's data.

    theta(x, y) = gamma sum_k lambda_k theta_k,    lambda = softmax(x), gamma = exp(y)
    minimise L_val(theta(x, y)) over x and y from lambda = w, gamma = 1; g = grad L_val(theta):

    dL/dx_k = lambda_k (gamma <g, theta_k> - <g, theta>)
    dL/dy   = <g, theta>

Reference: Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023; Adam(0.5, 0.999)
at 0.01 and 20 epochs as in the authors' code for CIFAR-10.
Differs from it: starts at the weights of the weighting, of which theirs is `size` (a guard's cap holds for the start only);
the server's data is the whole validation set instead of 2 % of the training data, so an epoch has more steps; BatchNorm
statistics start at the mean of the clients'.
Shapes: C cohort, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from raysim.algorithms.base import AnyAlgorithm
from raysim.fields import BelowOne, Count
from raysim.fusion.base import Candidates, Fused, Fusion
from raysim.local import LocalTraining, OptimizerSettings
from raysim.objective import Objective
from raysim.weighting.base import Weighting


@dataclass(frozen=True)
class FedLAWOptimizer(OptimizerSettings):
    """Adam(0.5, 0.999) at 0.01, unless told otherwise."""

    name: Literal["sgd", "adam", "adamw"] = "adam"
    beta1: BelowOne = 0.5


@dataclass(frozen=True)
class FedLAWTraining(LocalTraining):
    """20 epochs in batches of 128, unless told otherwise."""

    local_epochs: Count = 20
    batch_size: Count | None = 128
    optimizer: FedLAWOptimizer = field(default_factory=FedLAWOptimizer)


@dataclass(frozen=True)
class FedLAW(Fusion):
    """Weights and shrinkage that minimise the validation loss.

    Attributes:
        training: Epochs over the validation set, batches and optimizer of x and y.
        shrink: Learn gamma; false keeps it at 1.
    """

    name: Literal["fedlaw"] = "fedlaw"
    training: FedLAWTraining = field(default_factory=FedLAWTraining)
    shrink: bool = True

    def check(self, algorithm: AnyAlgorithm, weighting: Weighting) -> None:
        """It stands in for the weighted mean, so there must be nothing more to the server's step, nor to the weights."""
        if not algorithm.averages:
            raise ValueError(
                f"fusion: fedlaw replaces the weighted mean, but {algorithm.name}'s server step is more than that"
            )
        if weighting.granularity != "model" or weighting.clips:
            raise ValueError(
                "fusion: fedlaw learns one weight per client; weights per unit and clipping have no effect"
            )

    def fuse(
        self, objective: Objective, candidates: Candidates, training: LocalTraining, rng: np.random.Generator
    ) -> Fused:
        """Gradient steps on x and y, each at the model that they stand for."""
        start, deltas, count = candidates.start, candidates.deltas, len(candidates.deltas)
        logits = np.log(np.maximum(candidates.weights, 1e-12))
        xy = torch.tensor([*logits, 0.0], dtype=torch.float64)
        grad = torch.zeros_like(xy)
        step = training.optimizer.start(xy, grad)

        def place() -> tuple[torch.Tensor, float]:
            """Put theta(x, y) into the objective."""
            weights, gamma = torch.softmax(xy[:count], dim=0), float(xy[count].exp())
            objective.params.copy_(start)
            for share, delta in zip(weights.tolist(), deltas, strict=True):
                objective.params.add_(delta, alpha=share)
            objective.params.mul_(gamma)
            return weights, gamma

        weights, gamma = place()
        for _ in range(training.local_epochs):
            for batch in objective.batches(training.batch_size, rng, last_batch=training.last_batch):
                objective.gradient(batch)
                g = objective.grad.double()
                along_start, along_theta = float((g * start).sum()), float((g * objective.params).sum())
                along = torch.tensor([along_start + float((g * delta).sum()) for delta in deltas], dtype=torch.float64)
                grad[:count] = weights * (gamma * along - along_theta)
                grad[count] = along_theta if self.shrink else 0.0
                step()
                weights, gamma = place()
        learned = weights.numpy()
        note = f"fedlaw: gamma {gamma:.4f}, largest weight {learned.max():.3f}"
        return Fused(objective.params.clone(), learned, note)
