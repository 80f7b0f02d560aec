"""Accuracy: weigh clients by the validation accuracy of the model they return.

    w_k = a_k / sum_j a_j

Where no model predicts a single example right, the weights are uniform, with a note.

Reference: the `fedacc` baseline in the published code of Devkota et al., FedVG, arXiv:2602.21399.
Differs from it: no server optimizer comes along, and 0/0 is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.vector import VectorLayout
from raysim.weighting.base import Needs, Probe, Report, Scored, Sums, Weighting, Weights, normalised, probes_of


@dataclass(frozen=True)
class Accuracy(Weighting):
    """Each client counts by its model's validation accuracy."""

    name: Literal["accuracy"] = "accuracy"

    @property
    def needs(self) -> Needs:
        """A forward pass."""
        return "losses"

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """Correct predictions; the score is the error rate."""
        return Probe.of(sums, score=float(1 - sums["correct"] / sums["count"]))

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """w_k = a_k / sum_j a_j."""
        correct = np.array([probe.correct for probe in probes_of(reports)], dtype=np.float64)
        if not correct.any():
            return Weights(
                np.full(len(correct), 1 / len(correct)), notes=("no model predicts anything right: uniform",)
            )
        return Weights(normalised(correct))
