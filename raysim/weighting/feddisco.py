"""FedDisco: weigh clients by size, less for label distributions far from uniform.

    d_k = discrepancy(label distribution of k, uniform)
    w_k = max(p_k - a d_k + b, 0) / sum_j max(p_j - a d_j + b, 0)        p_k = n_k / sum_j n_j

The Kullback-Leibler discrepancy is normalised to sum 1 over the cohort, the others are taken as they are. Where nothing is
left above 0, the weights are p_k, with a note. Each client tells the server how many examples of each class it has: a cost
in privacy.

Reference: Ye et al., FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023, with the defaults of the
authors' code.
Shapes: C cohort, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.fields import NonNegative
from raysim.vector import VectorLayout
from raysim.weighting.base import Report, Sums, Weighting, Weights, by_size, normalised


@dataclass(frozen=True)
class FedDisco(Weighting):
    """Each client counts by its size and by how even its labels are.

    Attributes:
        a: Weight of the discrepancy.
        b: Added to all, so that few clients fall to 0.
        discrepancy: kl, l1, l2 or cosine (1 - cosine similarity).
    """

    name: Literal["feddisco"] = "feddisco"
    a: NonNegative = 0.5
    b: NonNegative = 0.1
    discrepancy: Literal["kl", "l1", "l2", "cosine"] = "kl"

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """w_k from n_k and the class counts of the reports."""
        counts = np.stack([report.class_counts for report in reports if report.class_counts is not None])
        assert len(counts) == len(reports), "every report has class counts"
        distances = distances_to_uniform(counts, self.discrepancy)
        if self.discrepancy == "kl" and distances.any():
            distances = normalised(distances)
        kept = np.maximum(by_size(reports) - self.a * distances + self.b, 0.0)
        if not kept.any():
            return Weights(by_size(reports), notes=("no client is above 0: weights by size",))
        return Weights(normalised(kept))


def distances_to_uniform(counts: np.ndarray, discrepancy: str) -> np.ndarray:
    """d_k [C] of class counts [C, K]."""
    labels = counts / counts.sum(axis=1, keepdims=True)
    even = 1 / counts.shape[1]
    distances: np.ndarray
    if discrepancy == "kl":
        distances = np.maximum((labels * np.log(np.where(labels > 0, labels / even, 1.0))).sum(axis=1), 0.0)
    elif discrepancy == "l1":
        distances = np.abs(labels - even).sum(axis=1)
    elif discrepancy == "l2":
        distances = np.sqrt(np.square(labels - even).sum(axis=1))
    else:
        # cos(labels, even) = sum(labels) even / (|labels| even sqrt(K)), and labels sum to 1.
        distances = np.maximum(1 - 1 / np.sqrt(np.square(labels).sum(axis=1) * counts.shape[1]), 0.0)
    return distances
