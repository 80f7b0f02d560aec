"""FedLAW: learn the clients' weights and a global shrinkage on the server's data.

    theta(x, y) = gamma sum_k lambda_k theta_k,    lambda = softmax(x), gamma = exp(y)
    minimise L_val(theta(x, y)) over x and y from lambda = w, gamma = 1; g = grad L_val(theta):

    dL/dx_k = lambda_k (gamma <g, theta_k> - <g, theta>)
    dL/dy   = <g, theta>

Reference: Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023; Adam(0.5, 0.999)
at 0.01 and 20 epochs as in the authors' code for CIFAR-10.
Differs from it: starts at the weights of the weighting, of which theirs is `size`.
Shapes: C cohort, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from raysim.fusion.base import Candidates, Fused, Fusion
from raysim.local import LocalTraining, OptimizerSettings
from raysim.objective import Objective


def _adam() -> LocalTraining:
    optimizer = OptimizerSettings(name="adam", lr=0.01, beta1=0.5, beta2=0.999)
    return LocalTraining(local_epochs=20, batch_size=64, optimizer=optimizer)


@dataclass(frozen=True)
class FedLAW(Fusion):
    """Weights and shrinkage that minimise the validation loss.

    Attributes:
        training: Epochs over the validation set, batches and optimizer of x and y.
        shrink: Learn gamma; false keeps it at 1.
    """

    name: Literal["fedlaw"] = "fedlaw"
    training: LocalTraining = field(default_factory=_adam)
    shrink: bool = True

    def check(self, algorithm: str, *, averages: bool) -> None:
        """It stands in for the weighted mean, so there must be nothing more to the server's step."""
        if not averages:
            raise ValueError(
                f"fusion: fedlaw replaces the weighted mean, but {algorithm}'s server step is more than that"
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
