"""Local training: the loop that every algorithm's clients run, and the one place where it may differ (`correct`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from raysim.fields import BelowOne, Count, Fraction, NonNegative, Positive, Section
from raysim.objective import LastBatch, Objective
from raysim.vector import Vector


def _refuse_unread(section: Schedule | OptimizerSettings, **keys_of: tuple[str, ...]) -> None:
    """Refuse a setting that the chosen `name` does not read, given which names read which keys."""
    for key in dict.fromkeys(key for keys in keys_of.values() for key in keys):
        value = getattr(section, key)
        if key not in keys_of.get(section.name, ()) and value != getattr(type(section), key):
            readers = " or ".join(name for name, keys in keys_of.items() if key in keys)
            raise ValueError(f"{key}: {value} has no effect with {section.name}; leave it out or use {readers}")


@dataclass(frozen=True)
class Schedule(Section):
    """How the learning rate changes from round to round; within a round it is constant.

    Attributes:
        name: In round t = 1..R, `constant`: lr; `step`: lr * factor ** ((t - 1) // every); `cosine`:
            lr * (final + (1 - final) * (1 + cos(pi * (t - 1) / R)) / 2).
        every: Rounds between two steps.
        factor: What a step multiplies the rate by (0.998 every round in FedDyn's experiments).
        final: Share of lr that the cosine approaches.
    """

    name: Literal["constant", "step", "cosine"] = "constant"
    every: Count = 1
    factor: Fraction = 0.998
    final: BelowOne = 0.0

    def __post_init__(self) -> None:
        _refuse_unread(self, step=("every", "factor"), cosine=("final",))

    def share(self, round_num: int, rounds: int) -> float:
        """What the learning rate is multiplied by in round `round_num` of `rounds`."""
        if self.name == "step":
            return self.factor ** ((round_num - 1) // self.every)
        if self.name == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * (round_num - 1) / rounds)) / 2
        return 1.0


@dataclass(frozen=True)
class OptimizerSettings(Section):
    """The client's optimizer, made afresh for every round.

    Attributes:
        name: `sgd`, `adam` or `adamw`.
        lr: Learning rate (0.01 in the FedVG experiments).
        momentum: Heavy-ball momentum (sgd).
        weight_decay: L2 penalty, part of the gradient; `adamw` shrinks the parameters by it instead, apart from the gradient.
        beta1: Decay of the first moment (adam, adamw).
        beta2: Decay of the second moment (adam, adamw).
        eps: Added to the root of the second moment (adam, adamw).
        schedule: The learning rate over the rounds.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.01
    momentum: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: Positive = 1e-8
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        _refuse_unread(self, sgd=("momentum",), adam=("beta1", "beta2", "eps"), adamw=("beta1", "beta2", "eps"))

    def at(self, round_num: int, rounds: int) -> OptimizerSettings:
        """The settings in round `round_num` of `rounds`: lr is that of the round, and constant."""
        if self.schedule.name == "constant":
            return self
        return replace(self, lr=self.lr * self.schedule.share(round_num, rounds), schedule=Schedule())

    def start(self, params: Vector, grad: Vector) -> Callable[[], None]:
        """A fresh optimizer over the flat vector: each call takes one step with the gradient that is then in `grad`."""
        # torch's own arithmetic, but not its optimizer classes: the first one in a process imports torch's compiler,
        # which costs each actor 1.7 s and 160 MB (torch 2.14).
        if self.name == "sgd":
            velocity: list[torch.Tensor | None] = [None]
            return lambda: sgd(
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
        first, second, num_steps = torch.zeros_like(params), torch.zeros_like(params), torch.zeros(())
        return lambda: adam(
            [params],
            [grad],
            [first],
            [second],
            [],
            [num_steps],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            decoupled_weight_decay=self.name == "adamw",
            amsgrad=False,
            maximize=False,
            foreach=False,
            fused=False,
        )


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

    def at(self, round_num: int, rounds: int) -> Self:
        """The same in round `round_num` of `rounds`, with that round's learning rate."""
        optimizer = self.optimizer.at(round_num, rounds)
        return self if optimizer is self.optimizer else replace(self, optimizer=optimizer)


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
