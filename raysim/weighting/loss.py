"""Loss: weigh clients by the validation loss of the model they return.

    w_k = exp(-L_k / T) / sum_j exp(-L_j / T)

A baseline that uses the same server data as FedVG for a third of the work: no gradient. Not taken from a paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.fields import Positive
from raysim.vector import VectorLayout
from raysim.weighting.base import Needs, Probe, Report, Scored, Sums, Weighting, Weights, normalised, probes_of


@dataclass(frozen=True)
class Loss(Weighting):
    """Each client counts by its model's validation loss.

    Attributes:
        temperature: T; large is close to uniform, small close to the best client alone.
    """

    name: Literal["loss"] = "loss"
    temperature: Positive = 1.0

    @property
    def needs(self) -> Needs:
        """A forward pass."""
        return "losses"

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """L_k, which is the score."""
        return Probe.of(sums, score=float(sums["loss"] / sums["count"]))

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """Softmax of -L_k / T."""
        losses = np.array([probe.loss for probe in probes_of(reports)], dtype=np.float64)
        return Weights(normalised(np.exp((losses.min() - losses) / self.temperature)))
