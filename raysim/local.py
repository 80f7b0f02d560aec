"""Local training: the loop that every algorithm's clients run, and the one place where it may differ (`correct`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch.optim.sgd import sgd

from raysim.fields import Count, NonNegative, Positive, Section
from raysim.objective import LastBatch, Objective
from raysim.vector import Vector


@dataclass(frozen=True)
class OptimizerSettings(Section):
    """The client's optimizer, made afresh for every round.

    Attributes:
        name: `sgd`.
        lr: Learning rate (0.01 in the FedVG experiments).
        momentum: Heavy-ball momentum.
        weight_decay: L2 penalty, part of the gradient.
    """

    name: Literal["sgd"] = "sgd"
    lr: Positive = 0.01
    momentum: NonNegative = 0.0
    weight_decay: NonNegative = 0.0

    def start(self, params: Vector, grad: Vector) -> Callable[[], None]:
        """A fresh optimizer over the flat vector: each call takes one step with the gradient that is then in `grad`."""
        # torch's own arithmetic, but not its optimizer class: the first one in a process imports torch's compiler,
        # which costs each actor 1.7 s and 160 MB (torch 2.14).
        velocity: list[torch.Tensor | None] = [None]

        def step() -> None:
            sgd(
                [params],
                [grad],
                velocity,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                foreach=False,
            )

        return step


@dataclass(frozen=True)
class LocalTraining(Section):
    """What a client does with the model it receives.

    Attributes:
        local_epochs: Passes over its data per round (5 in the FedVG experiments).
        batch_size: Examples per step; null: all of them in one.
        last_batch: What becomes of an incomplete last batch; `auto`: merged into the batch before it when it holds one
            example and the model has BatchNorm, else kept.
        optimizer: Its optimizer.
    """

    local_epochs: Count = 5
    batch_size: Count | None = 32
    last_batch: LastBatch = "auto"
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


@dataclass(frozen=True)
class LocalResult:
    """Where local training ended.

    Attributes:
        params: [P], a copy.
        num_steps: Optimizer steps taken.
        lr_sum: Sum of the learning rates of these steps.
        loss: Mean loss over the examples seen, each at the parameters it was seen with; 0 without a step.
    """

    params: Vector
    num_steps: int
    lr_sum: float
    loss: float


def full_gradient(objective: Objective, params: Vector, training: LocalTraining) -> Vector:
    """Gradient [P] of the mean loss over all of a client's examples at `params`, in batches; buffers do not move."""
    objective.params.copy_(params)
    objective.grad.zero_()
    with objective.scoring("batch"):
        for batch in objective.batches(training.batch_size, np.random.default_rng(0), last_batch="auto"):
            objective.add_gradient(batch)
    return objective.grad / max(objective.num_examples, 1)


def local_sgd(
    objective: Objective,
    start: Vector,
    training: LocalTraining,
    rng: np.random.Generator,
    *,
    correct: Callable[[Vector, Vector], Vector] | None = None,
) -> LocalResult:
    """Train from `start` for `local_epochs` epochs.

    Args:
        objective: The client's model and data; its bound parameters are overwritten.
        start: [P], not changed.
        training: Epochs, batches, optimizer.
        rng: Order of the examples.
        correct: `(gradient, params) -> gradient`, what the algorithm adds to each stochastic gradient before the optimizer
            sees it: a proximal term, control variates, a dual variable.
    """
    params = objective.params
    params.copy_(start)
    step = training.optimizer.start(params, objective.grad)
    num_steps, num_seen = 0, 0
    total = torch.zeros((), dtype=torch.float64, device=params.device)
    for _ in range(training.local_epochs):
        for batch in objective.batches(training.batch_size, rng, last_batch=training.last_batch):
            loss = objective.gradient(batch)
            if correct is not None:
                objective.grad.copy_(correct(objective.grad, params))
            step()
            total += loss.double() * len(batch.labels)
            num_seen += len(batch.labels)
            num_steps += 1
    mean_loss = (total / max(num_seen, 1)).item()
    return LocalResult(params.clone(), num_steps, num_steps * training.optimizer.lr, mean_loss)
