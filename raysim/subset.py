"""A subset of the validation set in place of all of it: which images are scored, and how wrong the weights may be.

Before anything is scored, bounds say how many images are enough; afterwards the two parts that the subset falls into say how
far its weights are from those of the whole set:

    TV(w^(m), w) ~ sqrt(a b) / m  TV(w_A, w_B)  sqrt(1 - m / N)        1/2 TV(w_A, w_B) sqrt(1 - m / N) for equal parts

Shapes: N validation images, m of them scored, in parts of a and b; C clients, U units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np
from annotated_types import Ge

from raysim.data.arrays import stratified_sample
from raysim.data.validation import stratified_batches
from raysim.fields import ProperFraction, Section

Shards = tuple[tuple[np.ndarray, ...], ...]
"""Batches, as positions in the validation set, by shard."""


@dataclass(frozen=True)
class SubsetSettings(Section):
    """Scoring on part of the validation set: class-stratified, the same for all clients of a round, drawn anew every round.

    Attributes:
        images: Images that are scored, m: at least 4, two for each of the halves that show the error.
        settle: While the last images moved the weights by this much or more (total variation; of the first images, half of
            what lies between their halves), as many again are scored, up to the whole validation set; null: none are.
    """

    images: Annotated[int, Ge(4)]
    settle: ProperFraction | None = None

    def totals(self, size: int) -> list[int]:
        """Images scored up to each level, out of N = `size`: m, 2 m, 4 m, ..., N.

        No level consists of a single image, for which BatchNorm has no statistics.
        """
        totals = [self.images]
        while self.settle is not None and totals[-1] < size - 1:
            doubled = 2 * totals[-1]
            totals.append(doubled if doubled <= size - 2 else size)
        return totals

    def parts(self, size: int, level: int) -> tuple[int, int]:
        """Sizes of the two parts that show the error: the halves at level 0, then what there was and what is new."""
        totals = self.totals(size)
        if level == 0:
            return self.images - self.images // 2, self.images // 2
        return totals[level - 1], totals[level] - totals[level - 1]


def subset_shards(
    labels: np.ndarray, settings: SubsetSettings, batch_size: int, level: int, rng: np.random.Generator
) -> Shards:
    """The images that a level adds to those of the levels before, in class-stratified batches.

    Args:
        labels: [N], of the validation set.
        settings: How many images.
        batch_size: Images per batch.
        level: 0, the first m images, in two shards: the halves; later ones have one shard.
        rng: The generator of the round, fresh: every level draws those before it first, so that levels are disjoint.
    """
    left, new = np.arange(len(labels)), np.arange(0)
    for before, total in pairwise([0, *settings.totals(len(labels))[: level + 1]]):
        chosen = stratified_sample(labels[left], total - before, rng)
        left, new = np.delete(left, chosen), left[chosen]
    parts = [new]
    if level == 0:
        first = stratified_sample(labels[new], settings.parts(len(labels), 0)[0], rng)
        parts = [new[first], np.delete(new, first)]
    return tuple(tuple(part[batch] for batch in stratified_batches(labels[part], batch_size, rng)) for part in parts)


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """1/2 sum_k |a_k - b_k| of weights [C]; of weights [C, U] the mean over units, which may share those of one side."""
    if first.ndim != second.ndim:
        first, second = (weights if weights.ndim == 2 else weights[:, None] for weights in (first, second))
    return float(0.5 * np.abs(first - second).sum(axis=0).mean())


def weight_error(first: np.ndarray, second: np.ndarray, parts: tuple[int, int], size: int) -> float:
    """Estimate of the total variation between the weights from a subset and those from the whole validation set.

    Weights from few images err, to first order, by the mean over these images of something with variance S^2 over the
    validation set (under stratification: within its classes). For disjoint parts of a and b images, drawn without replacement
    from N and m = a + b together,

        Var(e_A) = S^2 (1/a - 1/N)        Cov(e_A, e_B) = -S^2 / N        e = (a e_A + b e_B) / m
        Var(e_A - e_B) = S^2 (1/a + 1/b) = S^2 m / (a b)                  Var(e) = S^2 (1/m - 1/N)

    so that sd(e) = sqrt(a b) / m sqrt(1 - m / N) sd(e_A - e_B): that the parts exclude each other cancels in their
    difference and leaves the factor for the finite population. Absolute values scale alike. It is an estimate from one pair of
    parts and itself noisy. What both parts have in common it does not see: a norm of a noisy gradient is too long, by
    E|g'|^2 - |g|^2 = Var, which pulls weights together.

    Args:
        first: Weights [C] or [C, U] by the part of a images.
        second: By the part of b images.
        parts: (a, b).
        size: N.
    """
    a, b = parts
    m = a + b
    return math.sqrt(a * b) / m * total_variation(first, second) * math.sqrt(max(0.0, 1 - m / size))


def weight_ratio_bounds(rho: float) -> tuple[float, float]:
    """Between what w'_k / w_k lies when no score G_k is off by more than rho G_k, for inverse scores w_k ~ 1 / G_k.

        (1 - rho) / (1 + rho) <= w'_k / w_k <= (1 + rho) / (1 - rho)

    Raises:
        ValueError: rho is not in [0, 1).
    """
    if not 0 <= rho < 1:
        raise ValueError(f"rho should be in [0, 1), got {rho}")
    return (1 - rho) / (1 + rho), (1 + rho) / (1 - rho)


def gradient_error_bound(bound: float, images: int, delta: float) -> float:
    """What |g' - g|_2 of the mean gradient over m images exceeds with probability delta at most.

        (B / sqrt(m)) (1 + sqrt(2 ln(1 / delta)))

    Args:
        bound: B, the largest norm of one image's gradient.
        images: m, drawn without replacement.
        delta: In (0, 1).
    """
    return bound / math.sqrt(images) * (1 + math.sqrt(2 * math.log(1 / delta)))


def images_for(bound: float, rho: float, gradient_norm: float, clients: int, delta: float) -> int:
    """Images m after which, with probability 1 - delta, no client's l2 score is off by more than rho of itself.

        m >= (B / (rho G))^2 (1 + sqrt(2 ln(C / delta)))^2

    Args:
        bound: B, the largest norm of one image's gradient.
        rho: In (0, 1).
        gradient_norm: G, the smallest score of the cohort.
        clients: C.
        delta: In (0, 1).
    """
    # `gradient_error_bound` at delta / C (the union bound over clients), solved for m.
    return math.ceil((gradient_error_bound(bound, 1, delta / clients) / (rho * gradient_norm)) ** 2)


def aggregate_error_bound(rho: float, weights: np.ndarray, lengths: np.ndarray) -> float:
    """How far the weighted mean of the deltas moves under `weight_ratio_bounds(rho)`: 2 rho / (1 - rho) sum_k w_k |delta_k|.

    Args:
        rho: In [0, 1).
        weights: [C], exact.
        lengths: [C], norms of the deltas.
    """
    return 2 * rho / (1 - rho) * float((weights * lengths).sum())
